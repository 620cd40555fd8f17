"""Conversion of feature maps to tokens.

Shape legend: B images, S tokens (the cells of all maps one after another), C channels, N levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from detr_bf.common.devices import tensor_on
from detr_bf.common.structures import FeatureMap, TokenBatch, resize_mask


class FeatureTokens(nn.Module):
    """Project each map to the width of the transformer, flatten it and attach mask and position encoding.

    Args:
        projections: one per level, (B, C_l, h, w) -> (B, C, h', w'). If there are more projections than maps, the
            first additional one reads the last map, and each further one the output of the one before.
        position: padding mask (B, h, w) -> (B, h * w, C); None: the tokens have no positions.
        level_embedding: add a learned vector (N, C) to the positions of each level, or None.
        strides: pixels per cell of each level, to divide pixels of the images by those of the level; None: count whole
            cells, as the authors' codes do, so that a cell that an image fills in part counts fully.
    """

    def __init__(
        self,
        projections: Sequence[nn.Module],
        position: nn.Module | None,
        *,
        level_embedding: nn.Parameter | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.projections = nn.ModuleList(projections)
        self.position = position
        self.level_embedding = level_embedding
        self.strides = strides

    def forward(self, features: Sequence[FeatureMap], padding_mask: Tensor) -> TokenBatch:
        """Feature maps of images with ``padding_mask`` (B, H, W) -> tokens (B, S, C).

        ``per_sample`` holds ``padding_mask`` (B, S), ``position`` (B, S, C), ``valid_ratios`` (B, N, 2), the
        unpadded fraction of each level's width and height, and ``image_size`` (B, 2), the unpadded width and height in
        pixels.
        """
        levels = list(self._levels(features, padding_mask))
        masks = [level.padding_mask for level in levels]
        size = unpadded(padding_mask)
        filled = [unpadded(mask) for mask in masks] if self.strides is None else [size / each for each in self.strides]
        extents = [tensor_on(mask.device, [mask.shape[2], mask.shape[1]]) for mask in masks]
        positions = {} if self.position is None else {"position": self._positions(self.position, masks)}
        return TokenBatch(
            torch.cat([level.tensor.flatten(2).transpose(1, 2) for level in levels], dim=1),
            positions
            | {
                "padding_mask": torch.cat([mask.flatten(1) for mask in masks], dim=1),
                "valid_ratios": torch.stack(
                    [cells / extent for cells, extent in zip(filled, extents, strict=True)], dim=1
                ),
                "image_size": size,
            },
            {"spatial_shapes": tuple((mask.shape[1], mask.shape[2]) for mask in masks)},
        )

    def _positions(self, position: nn.Module, masks: Sequence[Tensor]) -> Tensor:
        """Return the positions (B, S, C) of the cells of all padding masks (B, h, w)."""
        positions = [position(mask) for mask in masks]
        if self.level_embedding is not None:
            positions = [x + vector for x, vector in zip(positions, self.level_embedding, strict=True)]
        return torch.cat(positions, dim=1)

    def _levels(self, features: Sequence[FeatureMap], padding_mask: Tensor) -> Iterator[FeatureMap]:
        """Yield the projected maps, then those computed from the last map."""
        for project, feature in zip(self.projections, features, strict=False):
            yield FeatureMap(project(feature.tensor), feature.padding_mask)
        source = features[-1].tensor
        for project in self.projections[len(features) :]:
            source = project(source)
            yield FeatureMap(source, resize_mask(padding_mask, source.shape[-2:]))


def unpadded(padding_mask: Tensor) -> Tensor:
    """Return width and height (B, 2), float, of the unpadded part of a mask (B, H, W)."""
    valid = ~padding_mask
    return torch.stack([valid[:, 0].sum(1), valid[:, :, 0].sum(1)], dim=-1).float()
