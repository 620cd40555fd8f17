"""Multi-scale deformable attention in plain PyTorch: what the op means, on any device and in any precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = Sequence[tuple[int, int]]


def ms_deform_attn_reference(
    value: Tensor, spatial_shapes: Shapes, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """As :func:`detr_bf.ops.ms_deform_attn`, without its checks; one bilinear sampling a level.

    Computed in the precision of the locations, in which half precision would cost whole cells.
    """
    rows, _, heads, width = value.shape
    queries, levels, points = attention_weights.shape[1], attention_weights.shape[3], attention_weights.shape[4]
    precision = torch.promote_types(value.dtype, sampling_locations.dtype)
    maps = value.to(precision).transpose(1, 2).flatten(0, 1).mT.split([h * w for h, w in spatial_shapes], dim=-1)
    grids = (2 * sampling_locations.to(precision) - 1).transpose(1, 2).flatten(0, 1)  # (R H, Q, L, P, 2) in [-1, 1]
    sampled = [
        F.grid_sample(level.unflatten(-1, shape), grids[:, :, index], align_corners=False)
        for index, (level, shape) in enumerate(zip(maps, spatial_shapes, strict=True))
    ]  # each (R H, D, Q, P)
    weights = attention_weights.transpose(1, 2).reshape(rows * heads, 1, queries, levels * points)
    summed = (torch.stack(sampled, dim=-2).flatten(-2) * weights).sum(-1)  # (R H, D, Q)
    return summed.view(rows, heads * width, queries).transpose(1, 2).to(value.dtype)
