"""The attention of a timm ViT's blocks, which its fused kernels never write down.

Shape legend: R images, H heads, S tokens with the class token, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detr_bf.classification.analysis.subject import evaluating, hooked, moved
from detr_bf.errors import InputError
from detr_bf.labelled import LabelledImages
from detr_bf.plugins.plugin import require_vit

Measure = Callable[[Tensor, tuple[int, int]], Tensor]  # attention (R, H, S, S) and the grid of patches -> any shape


def attention_layers(model: nn.Module) -> list[Attention]:
    """The attention of every block.

    Raises:
        InputError: not a timm ViT, or its attention is of another kind.
    """
    layers = [getattr(block, "attn", None) for block in require_vit(model).blocks]
    others = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, Attention)})
    if others or not layers:
        raise InputError(
            f"{type(model).__name__} has {len(layers)} blocks, with attention of the kind {others}; expected one or "
            "more with timm.layers.Attention, whose queries and keys are known: build the model with timm's ordinary "
            "Block"
        )
    return cast("list[Attention]", layers)


@torch.no_grad()
def measure_attention(model: nn.Module, batches: Iterable[LabelledImages], measure: Measure) -> list[list[Tensor]]:
    """What ``measure`` makes of every block's attention, one tensor a batch, on the CPU: [block][batch].

    Queries and keys are taken where timm hands them on, after their norms; weights are before dropout.

    Raises:
        InputError: the model has no such attention, or there are no images.
    """
    layers = attention_layers(model)
    patch_embed: Any = require_vit(model).patch_embed
    found: list[list[Tensor]] = [[] for _ in layers]
    for batch in moved(batches, model):
        grid = patch_embed.dynamic_feat_size(batch.images.shape[-2:])

        def look(layer: int, attention: Tensor, grid: tuple[int, int] = grid) -> None:
            found[layer].append(measure(attention, grid).cpu())

        with evaluating(model), hooked(_hooks(layers, look)):
            model(batch.images)
    return found


def _hooks(layers: list[Attention], look: Callable[[int, Tensor], None]) -> Iterator[RemovableHandle]:
    queries: dict[int, Tensor] = {}

    def keep(layer: int, norm: nn.Module, args: Any, output: Tensor) -> None:
        queries[layer] = output  # (R, H, S, D)

    def finish(layer: int, norm: nn.Module, args: Any, keys: Tensor) -> None:
        logits = queries.pop(layer) * layers[layer].scale @ keys.transpose(-2, -1)
        look(layer, logits.softmax(-1))

    for index, layer in enumerate(layers):
        yield layer.q_norm.register_forward_hook(partial(keep, index))
        yield layer.k_norm.register_forward_hook(partial(finish, index))
