"""Feature maps -> tokens.

Shape legend: B images, S tokens (the cells of all maps one after another), C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from detr_bf.structures import FeatureMap, TokenBatch


class FeatureTokens(nn.Module):
    """Project each map to the width of the transformer, flatten it and attach mask and position encoding."""

    def __init__(self, projections: Sequence[nn.Module], position: nn.Module) -> None:
        super().__init__()
        self.projections = nn.ModuleList(projections)
        self.position = position

    def forward(self, features: Sequence[FeatureMap]) -> TokenBatch:
        """Maps (B, C_l, h_l, w_l) -> tokens (B, S, C), ``padding_mask`` (B, S), ``position`` (B, S, C)."""
        tokens: list[Tensor] = [
            project(feature.tensor).flatten(2).transpose(1, 2)
            for project, feature in zip(self.projections, features, strict=True)
        ]
        masks = [feature.padding_mask.flatten(1) for feature in features]
        positions = [self.position(feature.padding_mask) for feature in features]
        return TokenBatch(
            torch.cat(tokens, dim=1),
            {"padding_mask": torch.cat(masks, dim=1), "position": torch.cat(positions, dim=1)},
            {"spatial_shapes": tuple(tuple(feature.tensor.shape[-2:]) for feature in features)},
        )
