"""How far attention looks, block by block (Hyeon-Woo et al., ICCV 2023, arXiv 2210.08457, figures 4 and 7).

Shape legend: R images, H heads, S tokens with the class token, P patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from detr_bf.classification.analysis.attention import measure_attention
from detr_bf.classification.analysis.layers import LayerCurve, draw_layers
from detr_bf.labelled import LabelledImages
from detr_bf.plugins.plugin import require_vit


def patch_distances(grid: tuple[int, int]) -> Tensor:
    """(P, P) float64: ``|row_i - row_j| / height + |column_i - column_j| / width`` of the patches of a grid."""
    axes = [torch.arange(side, dtype=torch.float64) / side for side in grid]
    places = torch.cartesian_prod(*axes)
    return torch.cdist(places, places, p=1)


def attention_distance(model: nn.Module, batches: Iterable[LabelledImages]) -> LayerCurve:
    """How far a patch of a timm ViT looks: sum over the other patches j of a_ij |p_i - p_j|, coordinates from 0 to 1.

    Mean and percentiles are over images, heads and patches i; the mean over all pairs is P - 1 times smaller. Class,
    distillation and register tokens have no place, so they are left out as queries and as keys; what a patch
    attends to them counts as distance 0, since the weights a_ij stay as they are.

    Raises:
        InputError: another model, or no images.
    """
    prefix = require_vit(model).num_prefix_tokens

    def measure(attention: Tensor, grid: tuple[int, int]) -> Tensor:
        between_patches = attention[..., prefix:, prefix:]
        return (between_patches * patch_distances(grid).to(attention)).sum(-1)

    return LayerCurve.of(measure_attention(model, batches, measure))


def draw_attention_distance(runs: Mapping[str, LayerCurve]) -> Figure:
    """One line a run."""
    return draw_layers(runs, title="Relative distance of attention", ylabel="distance, sides of the image")
