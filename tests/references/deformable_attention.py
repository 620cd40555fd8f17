"""Multi-scale deformable attention computed with loops, from the equation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def loops(value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Compute Zhu et al. 2021, arXiv 2010.04159, equation 3, with value (R, S, H, D): (R, Q, H x D)."""
    rows, queries, heads, levels, points, _ = locations.shape
    out = torch.zeros(rows, queries, heads, value.shape[-1], dtype=value.dtype)
    places = itertools.product(*map(range, (rows, queries, heads, levels, points)))
    for row, query, head, level, point in places:
        height, width = shapes[level]
        start = sum(h * w for h, w in shapes[:level])
        x = locations[row, query, head, level, point, 0].item() * width - 0.5
        y = locations[row, query, head, level, point, 1].item() * height - 0.5
        for column, line in itertools.product((math.floor(x), math.floor(x) + 1), (math.floor(y), math.floor(y) + 1)):
            if 0 <= column < width and 0 <= line < height:
                share = (1 - abs(x - column)) * (1 - abs(y - line))
                cell = value[row, start + line * width + column, head]
                out[row, query, head] += weights[row, query, head, level, point] * share * cell
    return out.flatten(2)
