"""Batch attention over the images of all ranks.

Batch attention couples only tokens at the same position. The ranks therefore exchange positions with an all-to-all:
each rank receives some positions of all images, computes attention there like a single process, and sends the results
back. Communication and memory are proportional to the rank's own images, whatever the number of ranks; an all-gather of
keys and values would multiply both by that number.

Shape legend: B images of this rank, A of all ranks, S tokens of an image of this rank, G positions of the common grid,
P of them computed on this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from detr_bf.common import distributed

GridShapes = tuple[tuple[int, int], ...]  # height and width of each level


@dataclass(frozen=True)
class Exchange:
    """Batch and grid sizes per rank, and the all-to-all splits they imply.

    The grids of the ranks are aligned level by level at their upper left corner; positions outside a rank's own grid
    are masked.
    """

    images: tuple[int, ...]  # B of each rank
    shapes: tuple[GridShapes, ...]  # of each rank
    rank: int

    @classmethod
    def agree(cls, images: int, shapes: GridShapes) -> Exchange:
        """Gather batch and grid sizes of all ranks (a collective)."""
        own = torch.tensor([images, *(side for shape in shapes for side in shape)])
        gathered = [torch.empty_like(own) for _ in range(distributed.world_size())]
        dist.all_gather(gathered, own, group=distributed.model_group())
        numbers = [tensor.tolist() for tensor in gathered]
        return cls(
            tuple(count for count, *_ in numbers),
            tuple(tuple(zip(sides[::2], sides[1::2], strict=True)) for _, *sides in numbers),
            distributed.rank(),
        )

    @property
    def common(self) -> GridShapes:
        """Largest height and width of each level."""
        return tuple((max(h for h, _ in level), max(w for _, w in level)) for level in zip(*self.shapes, strict=True))

    @property
    def parts(self) -> list[int]:
        """Number of positions of each rank: P each, G in total."""
        whole, rest = divmod(_cells(self.common), len(self.images))
        return [whole + (rank < rest) for rank in range(len(self.images))]

    def spread(self, tokens: Tensor, fill: float = 0) -> Tensor:
        """(B, S, ...) -> (A, P, ...): this rank's positions of all images; ``fill`` outside a grid."""
        pieces = _enlarged(tokens, self.shapes[self.rank], self.common, fill).split(self.parts, dim=1)
        sent = torch.cat([piece.flatten() for piece in pieces])
        cell = math.prod(tokens.shape[2:])
        here = self.parts[self.rank] * cell
        received = _all_to_all(sent, [piece.numel() for piece in pieces], [images * here for images in self.images])
        return received.view(sum(self.images), self.parts[self.rank], *tokens.shape[2:])

    def collect(self, tokens: Tensor) -> Tensor:
        """(A, P, ...) -> (B, S, ...): the inverse of :meth:`spread`."""
        cell, images = math.prod(tokens.shape[2:]), self.images[self.rank]
        sizes = [images * positions * cell for positions in self.parts]
        sent = [images_there * tokens.shape[1] * cell for images_there in self.images]
        pieces = _all_to_all(tokens.flatten(), sent, sizes).split(sizes)
        grids = [piece.view(images, -1, *tokens.shape[2:]) for piece in pieces]
        return _cut(torch.cat(grids, dim=1), self.shapes[self.rank], self.common)

    def ignored(self, padding_mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Return (A, P) bool, True = not attended to: outside a rank's grid, and at ``padding_mask`` (B, S)."""
        if padding_mask is not None:
            return self.spread(padding_mask.to(torch.uint8), fill=1).bool()
        if len(set(self.shapes)) == 1:
            return None
        start = sum(self.parts[: self.rank])
        rows = [
            _enlarged(torch.zeros(1, _cells(shapes), dtype=torch.uint8, device=device), shapes, self.common, 1)
            .narrow(1, start, self.parts[self.rank])
            .expand(images, -1)
            for images, shapes in zip(self.images, self.shapes, strict=True)
        ]
        return torch.cat(rows).bool()


def _cells(shapes: GridShapes) -> int:
    return sum(height * width for height, width in shapes)


def _levels(tokens: Tensor, shapes: GridShapes) -> list[Tensor]:
    """(B, S, ...) -> (B, h, w, ...) for each level."""
    parts = tokens.split([height * width for height, width in shapes], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _enlarged(tokens: Tensor, shapes: GridShapes, common: GridShapes, fill: float) -> Tensor:
    """(B, S, ...) -> (B, G, ...), ``fill`` to the right and at the bottom of each level."""
    if shapes == common:
        return tokens
    grids = []
    for grid, (height, width) in zip(_levels(tokens, shapes), common, strict=True):
        missing = (0, width - grid.shape[2], 0, height - grid.shape[1])
        grids.append(F.pad(grid, (0, 0) * (grid.dim() - 3) + missing, value=fill).flatten(1, 2))
    return torch.cat(grids, dim=1)


def _cut(tokens: Tensor, shapes: GridShapes, common: GridShapes) -> Tensor:
    """(B, G, ...) -> (B, S, ...): the inverse of :func:`_enlarged`."""
    if shapes == common:
        return tokens
    pairs = zip(_levels(tokens, common), shapes, strict=True)
    return torch.cat([grid[:, :height, :width].flatten(1, 2) for grid, (height, width) in pairs], dim=1)


def _all_to_all(sent: Tensor, sizes: list[int], received: list[int]) -> Tensor:
    """All-to-all of a vector: send pieces of ``sizes`` to the ranks, concatenate the pieces ``received`` from them."""
    result: Tensor = _AllToAll.apply(sent, sizes, received)
    return result


class _AllToAll(torch.autograd.Function):
    """Differentiable all-to-all; backward is the reverse all-to-all, without any sum."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, sizes: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sizes, received
        result = sent.new_empty(sum(received))
        dist.all_to_all_single(result, sent.contiguous(), received, sizes, group=distributed.model_group())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sizes, received = ctx.sizes
        return _all_to_all(gradient, received, sizes), None, None
