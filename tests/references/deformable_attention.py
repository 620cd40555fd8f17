"""Multi-scale deformable attention computed with loops and by index, from the equation."""

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


def by_index(value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Compute the same by index, in the widest dtype of the arguments, for any device; differentiable.

    It does without ``grid_sample``, whose backward pass has 32-bit indices and no fixed order of sums on a GPU.
    """
    images, _, heads, _ = value.shape
    device = value.device
    image = torch.arange(images, device=device).view(-1, 1, 1, 1, 1)
    head = torch.arange(heads, device=device).view(1, 1, -1, 1, 1)
    sizes = torch.tensor([(width, height) for height, width in shapes], device=device)[:, None]  # (L, 1, 2)
    starts = torch.tensor([sum(h * w for h, w in shapes[:level]) for level in range(len(shapes))], device=device)
    places = locations * sizes - 0.5
    first = places.detach().floor()
    sampled: Tensor | float = 0.0  # (B, Q, H, L, P, D)
    for corner in itertools.product((0, 1), repeat=2):
        cell = first + torch.tensor(corner, device=device)
        inside = ((cell >= 0) & (cell < sizes)).all(-1)
        share = (1 - (places - cell).abs()).clamp(min=0).prod(-1) * inside * weights
        column, line = torch.where(inside[..., None], cell, 0).long().unbind(-1)
        index = starts[:, None] + line * sizes[..., 0] + column
        sampled = sampled + value[image, index, head] * share[..., None]
    return torch.as_tensor(sampled).sum((3, 4)).flatten(2)
