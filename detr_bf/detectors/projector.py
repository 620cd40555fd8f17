"""Projector of LW-DETR and RF-DETR: maps of several blocks of a vision transformer -> one map per level.

LW-DETR: Chen et al. 2024, arXiv 2406.03459, section 3.1. Its blocks are those of YOLOv8's C2f.

Shape legend: B images, C channels of a map, D channels of a level, h x w cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.structures import FeatureMap, resize_mask
from detr_bf.detectors.hybrid_encoder import CheckedNorm
from detr_bf.transformer import FeatureTokens

# Strides in cells of the maps; with patches of 16 pixels these have the stride of the level P4 of a pyramid.
PROJECTED_LEVELS = {"P3": 0.5, "P4": 1.0, "P5": 2.0}
BOTTLENECKS = 3
WIDE = 512  # maps with more channels are narrowed before they are enlarged
NORM_EPS = 1e-6  # of the layer norms
Norm = Callable[[int], nn.Module]


class ProjectedLevels(FeatureTokens):
    """Tokens of levels that are each computed from all feature maps, without positions.

    Args:
        channels: of the maps, which have one size.
        dim: D.
        levels: names in ``PROJECTED_LEVELS``, from fine to coarse.
        layer_norm: layer norms over the channels after the convolutions, instead of batch norms.

    Raises:
        InputError: an unknown level, or levels that are not in order.
    """

    def __init__(self, channels: Sequence[int], dim: int, levels: Sequence[str], *, layer_norm: bool = True) -> None:
        if not levels or list(levels) != [level for level in PROJECTED_LEVELS if level in levels]:
            raise InputError(f"levels={list(levels)}: expected some of {', '.join(PROJECTED_LEVELS)} in this order")
        norm: Norm = partial(LayerNorm2d, eps=NORM_EPS) if layer_norm else CheckedNorm
        super().__init__([LevelProjection(channels, dim, PROJECTED_LEVELS[level], norm) for level in levels], None)

    def _levels(self, features: Sequence[FeatureMap], padding_mask: Tensor) -> Iterator[FeatureMap]:
        """Yield the levels from the maps, which have one size."""
        maps = [feature.tensor for feature in features]
        for project in self.projections:
            level = project(maps)
            yield FeatureMap(level, resize_mask(padding_mask, level.shape[-2:]))


class LevelProjection(nn.Module):
    """One level from all maps, each of which is enlarged or reduced by a convolution of its own first."""

    def __init__(self, channels: Sequence[int], dim: int, scale: float, norm: Norm) -> None:
        super().__init__()
        resized, widths = zip(*(_resized(count, scale, norm) for count in channels), strict=True)
        self.resize = nn.ModuleList(resized)
        self.block = BottleneckBlock(sum(widths), dim, norm)
        self.norm = LayerNorm2d(dim, eps=NORM_EPS)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps (B, C, h, w) -> (B, D, h', w')."""
        resized = [resize(each) for resize, each in zip(self.resize, maps, strict=True)]
        level: Tensor = self.norm(self.block(torch.cat(resized, dim=1)))
        return level


def _resized(channels: int, scale: float, norm: Norm) -> tuple[nn.Sequential, int]:
    """Build the convolutions that change the stride of a map by ``scale``; return them and their output channels."""
    if scale == 1:
        return nn.Sequential(), channels
    if scale > 1:
        return nn.Sequential(ProjectorConvolution(channels, channels, norm, 3, 2, nn.ReLU())), channels
    half = channels // 2
    if channels <= WIDE:
        return nn.Sequential(nn.ConvTranspose2d(channels, half, 2, stride=2)), half
    narrow = ProjectorConvolution(channels, half, norm, activation=nn.ReLU())
    return nn.Sequential(narrow, nn.ConvTranspose2d(half, channels // 4, 2, stride=2)), channels // 4


class BottleneckBlock(nn.Module):
    """Convolution to two halves, of which bottlenecks follow the second; all their results are mixed by a convolution.

    (B, C, h, w) -> (B, D, h, w). A bottleneck is two convolutions of 3 x 3 without a shortcut.
    """

    def __init__(self, channels: int, dim: int, norm: Norm) -> None:
        super().__init__()
        half = dim // 2
        self.enter = ProjectorConvolution(channels, 2 * half, norm)
        self.bottlenecks = nn.ModuleList(
            nn.Sequential(*(ProjectorConvolution(half, half, norm, 3) for _ in range(2))) for _ in range(BOTTLENECKS)
        )
        self.leave = ProjectorConvolution((2 + BOTTLENECKS) * half, dim, norm)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).chunk(2, dim=1))
        for bottleneck in self.bottlenecks:
            parts.append(bottleneck(parts[-1]))
        mixed: Tensor = self.leave(torch.cat(parts, dim=1))
        return mixed


class ProjectorConvolution(nn.Sequential):
    """Convolution without bias, norm and activation (SiLU)."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        norm: Norm,
        kernel: int = 1,
        stride: int = 1,
        activation: nn.Module | None = None,
    ) -> None:
        convolution = nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, bias=False)
        super().__init__(convolution, norm(channels), activation or nn.SiLU())
