"""Masks of objects, and mask logits of queries that are computed on request.

Shape legend: B images, R rows (streams x images), Q queries, N objects of a batch, M pairs, P points, C channels,
h x w cells of a predicted mask, H x W pixels of the padded batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.common.devices import tensor_on


@dataclass(frozen=True)
class ObjectMasks:
    """Masks of all N objects of a batch, image after image, padded at the right and at the bottom to one size."""

    pixels: Tensor  # (N, H, W) bool
    first: Tensor  # (B,) int64, index of the first object of each image

    @classmethod
    def of(cls, masks: Sequence[Tensor], size: tuple[int, int] | None = None) -> ObjectMasks:
        """Pad the masks (T, h, w) of each image to ``size`` (height, width), or else to the largest image."""
        height, width = size or (max(x.shape[dim] for x in masks) for dim in (1, 2))
        pixels = torch.cat([F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in masks])
        return cls(pixels, tensor_on(pixels.device, list(accumulate((len(x) for x in masks[:-1]), initial=0))))

    def select(self, image: Tensor, target: Tensor) -> Tensor:
        """Select the masks (M, H, W) of objects ``target`` (M,) of ``image`` (M,)."""
        return self.pixels[self.first[image] + target]

    def at(self, image: Tensor, target: Tensor, points: Tensor) -> Tensor:
        """Read the pixels (..., P) of objects ``target`` (...) of ``image`` (...); those that do not exist: any value.

        ``points`` (..., P, 2) are x and y in fractions of the padded image.
        """
        height, width = self.pixels.shape[1:]
        index = (self.first[image] + target).clamp(max=len(self.pixels) - 1)[..., None]
        column, row = (
            (points[..., axis] * side).long().clamp(max=side - 1) for axis, side in enumerate((width, height))
        )
        return self.pixels[index, row, column]


@dataclass(frozen=True)
class Masks:
    """Mask logits over the padded image, computed on request for chosen pairs of row and query.

    Masks are the most expensive output of a detector, and losses and postprocessing read few of them: those of matched
    pairs, or of queries that predict an object. No mask depends on which others are requested.
    """

    of: Callable[[Tensor, Tensor], Tensor]  # rows (M,) and queries (M,), int64 -> logits (M, h, w)
    rows: int
    queries: int

    @classmethod
    def known(cls, logits: Tensor) -> Masks:
        """Wrap the logits (R, Q, h, w) of all masks."""
        return cls(lambda row, query: logits[row, query], *logits.shape[:2])

    def all(self) -> Tensor:
        """Compute all masks: (R, Q, h, w)."""
        pairs = torch.cartesian_prod(torch.arange(self.rows), torch.arange(self.queries))
        return self.of(pairs[:, 0], pairs[:, 1]).unflatten(0, (self.rows, self.queries))


@dataclass(frozen=True)
class ProductMasks:
    """Mask logits that are the product of a vector of each query with the map of its row, plus a bias (RF-DETR)."""

    maps: Tensor  # (R, C, h, w) over the padded image
    vectors: Tensor  # (R, Q, C)
    bias: Tensor  # (1,)
    size: tuple[int, int]  # height and width of the padded image in pixels

    @property
    def rows(self) -> int:
        return self.vectors.shape[0]

    @property
    def queries(self) -> int:
        return self.vectors.shape[1]

    @property
    def cells(self) -> int:
        """Number of cells of a mask."""
        return self.maps.shape[2] * self.maps.shape[3]

    def of(self, row: Tensor, query: Tensor) -> Tensor:
        """Compute the masks (M, h, w) of queries (M,) of rows (M,), int64, in any order; reads the rows on the host."""
        order, counts = row.argsort(stable=True), row.bincount(minlength=self.rows).tolist()
        return self.by_row(query[order], counts)[order.argsort()]

    def all(self) -> Tensor:
        """Compute all masks: (R, Q, h, w)."""
        products = self.vectors @ self.maps.flatten(2)
        return products.unflatten(2, self.maps.shape[2:]) + self.bias

    def by_row(self, query: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute the masks (M, h, w) of ``query`` (M,), of which the first ``counts[0]`` are of row 0, and so on."""
        products = [
            vectors[own] @ of_row.flatten(1)
            for vectors, of_row, own in zip(self.vectors, self.maps, query.split(list(counts)), strict=True)
        ]
        return torch.cat(products).unflatten(1, self.maps.shape[2:]) + self.bias

    def at(self, points: Tensor) -> Tensor:
        """Interpolate all masks bilinearly at points (P, 2), x and y in fractions of the padded image: (R, Q, P)."""
        maps = self.maps.to(torch.promote_types(self.maps.dtype, torch.float32))
        sampled = bilinear(maps, points.to(maps.dtype).expand(len(maps), -1, -1))
        return self.vectors.to(maps.dtype) @ sampled + self.bias


def bilinear(maps: Tensor, points: Tensor) -> Tensor:
    """Interpolate maps (N, C, h, w) bilinearly at points (N, P, 2), x and y in fractions of the map: (N, C, P).

    Outside the centres of the outermost cells the values are those of these cells.
    """
    grid = (2 * points - 1)[:, :, None]
    return F.grid_sample(maps, grid, padding_mode="border", align_corners=False)[..., 0]
