"""How alike the patches of an image become, block by block (Gong et al. 2021, arXiv 2104.12753, figures 1 and 3).

Shape legend: R images, S tokens with the class token, P patches, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from detr_bf.classification.analysis.layers import LayerCurve, draw_layers
from detr_bf.classification.analysis.subject import evaluating, hooked, moved
from detr_bf.labelled import LabelledImages
from detr_bf.plugins.diverse_patch import cosine_loss
from detr_bf.plugins.plugin import patches_of, require_vit


@torch.no_grad()
def patch_similarity(model: nn.Module, batches: Iterable[LabelledImages]) -> LayerCurve:
    """The mean of |cos| over all pairs of different patches of an image, of the tokens that leave each block.

    Mean and percentiles are over images. Class, distillation and register tokens are left out.

    Raises:
        InputError: not a timm ViT, or no images.
    """
    vit = require_vit(model)
    found: list[list[Tensor]] = [[] for _ in vit.blocks]

    def look(layer: int, block: nn.Module, args: Any, output: Tensor) -> None:
        patches = patches_of(output, vit.num_prefix_tokens)
        found[layer].append(torch.stack([cosine_loss(image[None]) for image in patches]).cpu())

    hooks = (block.register_forward_hook(partial(look, index)) for index, block in enumerate(vit.blocks))
    with evaluating(model), hooked(hooks):
        for batch in moved(batches, model):
            model(batch.images)
    return LayerCurve.of(found, bound=1.0)


def draw_patch_similarity(runs: Mapping[str, LayerCurve]) -> Figure:
    """One line a run."""
    return draw_layers(runs, title="Similarity of patches", ylabel="mean |cosine| of pairs")
