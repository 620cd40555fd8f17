"""Hybrid encoder of RT-DETR (Zhao et al. 2023, arXiv 2304.08069, section 4.2).

Attention-based intra-scale feature interaction (AIFI): encoder layers over the tokens of the coarsest map. Cross-scale
feature fusion (CCFF): convolutions from the coarsest map to the finest and back.

Shape legend: B images, R rows (streams x B), S tokens of all levels, N levels, C channels, h x w cells of one level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch
from detr_bf.detectors.smca_multi_scale import as_maps, as_tokens
from detr_bf.transformer import Encoder, FeatureTokens, without_updating_statistics


def cell_position(height: int, width: int, dim: int, *, temperature: float, released: bool = False) -> Tensor:
    """Return the encoding (h * w, dim), float32, of the cells of a map: sine and cosine of row, then of column number.

    The authors' code computes the encodings of the map column by column (sines and cosines of columns first) and adds
    them to tokens in row order: on a square map rows and columns are exchanged, which this function does on every map.
    On other maps theirs gives one cell the encoding of another, as this function does if ``released``.
    """
    rows, columns = torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij")
    first, second = rows.flatten(), columns.flatten()
    if released:
        first, second = (values.T.flatten() for values in (columns, rows))
    omega = temperature ** -(torch.arange(dim // 4, dtype=torch.float32) / (dim // 4))
    phases = [values[:, None] * omega for values in (first, second)]
    return torch.cat([part for phase in phases for part in (phase.sin(), phase.cos())], dim=1)


class HybridEncoder(nn.Module):
    """Encoder layers over the coarsest level, then fusion of all levels, then projections to the decoder's width.

    Batch attention before or after encoder layer i forks the coarsest level; index ``len(encoder.layers)`` means the
    fused tokens of all levels, before the decoder; batch attention in the backbone has forked all levels. The streams
    pass through the convolutions one after another, and after them the references, if an insertion after the fusion
    reads them: each is normalised with statistics of its own, and only the clean stream updates the running statistics.

    Args:
        fusion: maps (B, C, h, w), from fine to coarse -> maps of the same sizes.
        projections: one per level, (B, C, h, w) -> (B, C', h, w).
        finer: encoder layers over further levels, by the index of the level; without batch attention.
        temperature: longest wavelength of the position encoding in cells / 2 pi.
        released_position: see :func:`cell_position`.
    """

    def __init__(
        self,
        encoder: Encoder,
        fusion: nn.Module,
        projections: Sequence[nn.Module],
        *,
        finer: Mapping[int, Encoder] = MappingProxyType({}),
        temperature: float = 10000.0,
        released_position: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.fusion = fusion
        self.projections = nn.ModuleList(projections)
        self.finer = nn.ModuleList(finer.values())
        self.finer_levels = tuple(finer)
        self.temperature = temperature
        self.released_position = released_position

    def forward(self, batch: TokenBatch) -> TokenBatch:
        """Tokens of all levels (B, S, C), or (R, S, C) if the backbone forks the batch -> memory (R, S, C')."""
        *finer, _ = as_maps(batch.tokens, batch.static["spatial_shapes"])
        for level, layers in zip(self.finer_levels, self.finer, strict=True):
            encoded = layers(self._level(batch, level))
            (finer[level],) = as_maps(encoded.tokens, encoded.static["spatial_shapes"])
        coarsest: TokenBatch = self.encoder(self._level(batch, len(finer)))
        images, streams = coarsest.num_images, list[Tensor]()
        count = coarsest.num_streams + (1 if coarsest.references else 0)  # parts of as many rows as there are images
        parts = coarsest.tokens.chunk(count) if count > 1 else (coarsest.tokens,)
        for number, tokens in enumerate(parts):
            has_maps = number > 0 and (number == coarsest.num_streams or batch.num_streams > 1)
            with without_updating_statistics(self) if streams else nullcontext():
                (last,) = as_maps(tokens, coarsest.static["spatial_shapes"])
                fused = self.fusion([*(x[images:] if has_maps else x[:images] for x in finer), last])
                streams.append(as_tokens([layer(x) for layer, x in zip(self.projections, fused, strict=True)]))
        kept = batch if coarsest.references else batch.without_references()
        memory = kept.with_tokens(torch.cat(streams[: batch.num_streams] + streams[coarsest.num_streams :]))
        if coarsest.num_streams > batch.num_streams:
            memory = memory.fork(torch.cat(streams[1:]))
        former = self.encoder.batch_former
        if former is None:
            return memory
        return former(memory, layer=len(self.encoder.layers), position=former.position)

    def _level(self, batch: TokenBatch, level: int) -> TokenBatch:
        """Return the tokens of one level, with their positions."""
        shapes = batch.static["spatial_shapes"]
        height, width = shapes[level]
        start = sum(h * w for h, w in shapes[:level])
        cells = slice(start, start + height * width)
        tokens = batch.tokens[:, cells]
        position = cell_position(
            height, width, tokens.shape[2], temperature=self.temperature, released=self.released_position
        )
        companions = {
            **batch.per_sample,
            "padding_mask": batch.per_sample["padding_mask"][:, cells],
            "valid_ratios": batch.per_sample["valid_ratios"][:, level : level + 1],
            "position": position.to(tokens).expand_as(tokens),
        }
        static = {**batch.static, "spatial_shapes": ((height, width),)}
        return replace(batch, tokens=tokens, per_sample=companions, static=static)


def projected_tokens(channels: Sequence[int], width: int, strides: Sequence[int] | None) -> FeatureTokens:
    """Build the tokens of maps, each projected to ``width``, without positions (InputError: of the same stride)."""
    if strides and len(set(strides)) < len(strides):
        raise InputError(f"strides: expected maps of different strides, got {list(strides)}; empty backbone.vit.maps")
    return FeatureTokens([NormedConvolution(count, width) for count in channels], None, strides=strides)


class CheckedNorm(nn.BatchNorm2d):
    """Batch norm that refuses one image of one cell in training: one value has no variance.

    One image is read in channels_last: else torch 2.14's backward pass on CPUs is wrong for gradients of flat tokens.
    """

    def forward(self, input: Tensor) -> Tensor:  # name of the base class
        if self.training and input[:, 0].numel() == 1:
            raise InputError(
                "batch norm needs more than one value per channel in training, and the batch is one image of one cell "
                "on the coarsest level: use larger images or train.batch_size=2 or more"
            )
        if self.training and input.shape[0] == 1:
            input = input.contiguous(memory_format=torch.channels_last)
        return super().forward(input)


class NormedConvolution(nn.Sequential):
    """Convolution without bias, batch norm, and an activation or none: (B, C, h, w) -> (B, C', h', w')."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        kernel: int = 1,
        stride: int = 1,
        activation: nn.Module | None = None,
        *,
        groups: int = 1,
    ) -> None:
        super().__init__()
        padding = kernel // 2
        self.convolution = nn.Conv2d(in_channels, channels, kernel, stride, padding, groups=groups, bias=False)
        self.norm = CheckedNorm(channels)
        self.activation = activation or nn.Identity()


class RepVggBlock(nn.Module):
    """Sum of a 3 x 3 and a 1 x 1 convolution, then SiLU (Ding et al. 2021, arXiv 2101.03697, without identity)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide = NormedConvolution(channels, channels, 3)
        self.narrow = NormedConvolution(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.wide(x) + self.narrow(x))


class FusionBlock(nn.Module):
    """Path of RepVGG blocks and a shortcut: (B, C, h, w) -> (B, C', h, w).

    Args:
        expansion: width of the blocks as a share of C'; 1 has no convolution after the sum.

    Raises:
        InputError: ``expansion`` leaves no channel.
    """

    def __init__(self, in_channels: int, dim: int, *, expansion: float = 1.0, blocks: int = 3) -> None:
        super().__init__()
        hidden = int(dim * expansion)
        if hidden < 1:
            raise InputError(f"expansion={expansion} of {dim} channels leaves none: give at least 1/{dim}")
        self.enter, self.shortcut = (NormedConvolution(in_channels, hidden, activation=nn.SiLU()) for _ in range(2))
        self.blocks = nn.Sequential(*(RepVggBlock(hidden) for _ in range(blocks)))
        self.leave = NormedConvolution(hidden, dim, activation=nn.SiLU()) if hidden != dim else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)) + self.shortcut(x))


class CrossScaleFusion(nn.Module):
    """Fusion of every map with the next coarser one, then of every result with the next finer one.

    Args:
        lateral: builds the layer before a map is enlarged, (B, C, h, w) -> (B, C, h, w).
        down: builds the layer that halves the resolution, (B, C, 2 h, 2 w) -> (B, C, h, w).
        fuse: builds the layer over two maps that are concatenated, (B, 2 C, h, w) -> (B, C, h, w).
    """

    def __init__(
        self,
        levels: int,
        *,
        lateral: Callable[[], nn.Module],
        down: Callable[[], nn.Module],
        fuse: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        steps = range(levels - 1)
        self.lateral = nn.ModuleList(lateral() for _ in steps)  # from the coarsest
        self.finer = nn.ModuleList(fuse() for _ in steps)
        self.down = nn.ModuleList(down() for _ in steps)  # from the finest
        self.coarser = nn.ModuleList(fuse() for _ in steps)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps (B, C, h, w), from fine to coarse -> maps of the same sizes."""
        *waiting, current = maps
        reduced = []  # from the coarsest
        for lateral, fuse in zip(self.lateral, self.finer, strict=True):
            reduced.append(lateral(current))
            fine = waiting.pop()
            current = fuse(torch.cat([F.interpolate(reduced[-1], size=fine.shape[-2:]), fine], dim=1))
        fused = [current]
        for down, fuse in zip(self.down, self.coarser, strict=True):
            fused.append(fuse(torch.cat([down(fused[-1]), reduced.pop()], dim=1)))
        return fused
