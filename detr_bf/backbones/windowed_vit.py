"""Vision transformer of RF-DETR and LW-DETR: a fixed number of windows, maps of one stride from several blocks.

LW-DETR: Chen et al. 2024, arXiv 2406.03459, section 3.1; RF-DETR: Robinson et al. 2025, arXiv 2511.09554.

Shape legend: B images, R rows (streams x images), C channels, h x w patches of the padded batch, N windows per side,
V = N x N windows of an image, s patches of a window, T class and register tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.backbones.backbone import Network, VitOptions, select_levels
from detr_bf.backbones.vit import (
    attention_bias,
    embedded_patches,
    positions_of,
    side_of_patches,
    with_batch_attention,
    without_head,
)
from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch


def build_windowed_vit(
    vit: VisionTransformer, name: str, options: VitOptions, strides: Sequence[int], finer: bool
) -> Network:
    """Build a backbone with ``options.maps`` from a network of timm with square patches, whose head is removed.

    Raises:
        InputError: a map or block that is not there, another stride than the patch size, or ``finer`` maps.
    """
    patch, depth = side_of_patches(vit, name), len(vit.blocks)
    maps, whole = list(options.maps), set(options.global_blocks)
    select_levels({patch: 0}, strides, f"{name} with maps={maps}")
    if finer:
        raise InputError(f"maps={maps}: DETR's mask head needs finer maps than of stride {patch}; leave maps empty")
    if options.window:
        raise InputError(f"maps={maps}: give the number of windows per side, windows, instead of window")
    if maps != sorted(set(maps)) or maps[-1] >= depth:
        raise InputError(f"maps={maps}: expected blocks of {name}, 0 to {depth - 1}, in ascending order")
    if unknown := sorted(block for block in whole if block >= depth):
        raise InputError(f"global_blocks={sorted(whole)}: there is no block {unknown[0]}; {name} has 0 to {depth - 1}")
    if not options.class_token:  # their positions stay in the table
        unused: Any = vit
        unused.cls_token = unused.reg_token = unused.dist_token = None
        vit.num_prefix_tokens = 0
    cfg: Any = vit.pretrained_cfg
    return Network(
        body=WindowedViT(vit, maps, windows=options.windows, whole=whole, antialias=options.antialias),
        channels=(vit.embed_dim,) * len(maps),
        strides=(patch,) * len(maps),
        stages=("vit.patch_embed", *(f"vit.blocks.{index}" for index in range(depth))),
        mean=tuple(cfg["mean"]),
        std=tuple(cfg["std"]),
        reads_padding=True,
        blocks=maps[-1] + 1,
        block_dim=vit.embed_dim,
    )


class WindowedViT(nn.Module):
    """Blocks in windows, each with its own class and register tokens, and blocks over all tokens of an image.

    A block over the whole image attends to the class and register tokens of all windows. Each map passes through the
    last norm of the network. Positions are interpolated over each image without its padding, which is masked in every
    attention; the released code of both detectors stretches every image to a square without padding. The windows divide
    the padded batch: they lie differently in an image beside a larger one.

    Args:
        vit: network of timm; its head is removed. Blocks after the last map do not learn; they are kept because
            checkpoints contain them.
        maps: blocks, from 0, whose outputs are the maps.
        windows: N; 1: all blocks see the whole image.
        whole: blocks that attend to the whole image.
        antialias: interpolate the positions with antialiasing.
    """

    def __init__(
        self, vit: VisionTransformer, maps: Sequence[int], *, windows: int, whole: set[int], antialias: bool
    ) -> None:
        super().__init__()
        self.vit = without_head(vit)
        self.maps, self.windows, self.whole, self.antialias = tuple(maps), windows, frozenset(whole), antialias
        for block in list(vit.blocks)[maps[-1] + 1 :]:
            block.requires_grad_(False)

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, batch_former: BatchFormerV2 | None = None
    ) -> list[Tensor]:
        """Normalised images (B, 3, H, W), mask (B, H, W) bool, True = padding -> a map (R, C, h, w) for each block.

        ``batch_former`` is batch attention between the blocks, which may fork the batch.
        """
        vit, count = self.vit, self.windows
        patches, padding = embedded_patches(vit, images, padding_mask, count)
        prefix, places = positions_of(vit, padding, antialias=self.antialias)
        tokens = in_windows(vit.pos_drop(patches + places), count)  # (B V, s, C)
        seen = in_windows(padding[..., None], count)[..., 0]
        if prefix.shape[1]:  # some runtimes cannot join a part without tokens
            seen = torch.cat([padding.new_zeros(1, prefix.shape[1]).expand(tokens.shape[0], -1), seen], dim=1)
            tokens = torch.cat([prefix.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        return self._blocks(self._joined(vit.norm_pre(tokens), seen, padding), batch_former)

    def _joined(self, tokens: Tensor, padding: Tensor, grid: Tensor) -> TokenBatch:
        """Join the tokens (B V, T + s, C) of an image, window after window: (B, V (T + s), C).

        ``padding`` (B V, T + s) is their mask, ``grid`` (B, h, w) that of the patches. ``per_sample`` holds the masks
        and the biases of attention in ``windows`` (B, V, 1, 1, T + s) and over the ``whole`` image.
        """
        by_image = padding.unflatten(0, (-1, self.windows**2))
        companions = {
            "padding_mask": by_image.flatten(1),
            "windows": attention_bias(padding, tokens).unflatten(0, (-1, self.windows**2)),
            "whole": attention_bias(by_image.flatten(1), tokens),
            "grid": grid,
        }
        ahead = ((1, self.vit.num_prefix_tokens),) if self.vit.num_prefix_tokens else ()
        window = (*ahead, (grid.shape[1] // self.windows, grid.shape[2] // self.windows))
        shapes = {"spatial_shapes": window * self.windows**2}
        return TokenBatch(tokens.unflatten(0, (-1, self.windows**2)).flatten(1, 2), companions, shapes)

    def _blocks(self, batch: TokenBatch, batch_former: BatchFormerV2 | None) -> list[Tensor]:
        """Tokens of B images -> maps (R, C, h, w)."""
        maps: list[Tensor] = []
        for index, block in enumerate(list(self.vit.blocks)[: self.maps[-1] + 1]):
            batch = with_batch_attention(batch_former, batch, index, "before")
            tokens, bias = batch.tokens, batch.per_sample["whole" if index in self.whole else "windows"]
            if index not in self.whole:
                tokens, bias = self._divided(tokens), bias.flatten(0, 1)
            tokens = block(tokens, attn_mask=bias).view_as(batch.tokens)
            batch = with_batch_attention(batch_former, batch.with_tokens(tokens), index, "after")
            if index in self.maps:
                patches, grid = self._divided(self.vit.norm(batch.tokens)), batch.per_sample["grid"]
                as_map = from_windows(patches[:, self.vit.num_prefix_tokens :], self.windows, grid)
                maps.append(as_map.masked_fill(grid[..., None], 0).permute(0, 3, 1, 2).contiguous())
        if batch.num_streams > 1:  # maps from before the fork are the same in both streams
            maps = [torch.cat([each, each]) if each.shape[0] == batch.num_images else each for each in maps]
        return maps

    def _divided(self, tokens: Tensor) -> Tensor:
        """(R, V (T + s), C) -> (R V, T + s, C)."""
        return tokens.unflatten(1, (self.windows**2, -1)).flatten(0, 1)


def in_windows(grid: Tensor, count: int) -> Tensor:
    """(B, h, w, C) -> the cells of each of ``count`` x ``count`` windows (B V, s, C), row by row."""
    parts = grid.unflatten(2, (count, -1)).unflatten(1, (count, -1))  # (B, N, h / N, N, w / N, C)
    return parts.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def from_windows(cells: Tensor, count: int, grid: Tensor) -> Tensor:
    """Inverse of :func:`in_windows` for a grid (B, h, w)."""
    parts = cells.unflatten(0, (-1, count, count)).unflatten(3, (grid.shape[1] // count, grid.shape[2] // count))
    return parts.transpose(2, 3).flatten(3, 4).flatten(1, 2)
