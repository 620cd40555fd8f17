"""Mask head of DETR (Carion et al. 2020, arXiv 2005.12872, section 4.4): one mask for every query.

Attention of the queries to the memory at the deepest feature map gives coarse maps; convolutions refine them with the
finer maps of the backbone, from coarse to fine.

Shape legend: B images, R rows (streams x images), Q queries of a row, M queries of any rows, C channels, H heads,
h x w cells of a feature map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_convert

from detr_bf.common.masks import Masks
from detr_bf.common.structures import FeatureMap, Outputs, TokenBatch
from detr_bf.transformer import unpadded

MASK_NORM_GROUPS = 8


class MaskHead(nn.Module):
    """Mask logits from the decoder states, the memory and the backbone's maps.

    With several levels in the memory (Deformable DETR, multi-scale SMCA) the attention uses the level of the backbone's
    deepest map; the finer maps come from the backbone.

    Args:
        dim: channels C of queries and memory.
        heads: number of attention maps per query.
        finer_channels: channels of the backbone's maps finer than the deepest, from coarse to fine.
        see_boxes: add the coverage of each cell by the query's box as an input of the convolutions. Not in DETR, whose
            content encodes the position; the queries of its successors hold the position separately.
    """

    def __init__(self, dim: int, *, heads: int, finer_channels: Sequence[int], see_boxes: bool = False) -> None:
        super().__init__()
        self.attention = AttentionMaps(dim, heads)
        self.convolutions = MaskConvolutions(dim + heads + see_boxes, dim, finer_channels)
        self.see_boxes = see_boxes

    def forward(
        self,
        outputs: Outputs,
        tokens: TokenBatch,
        memory: TokenBatch,
        features: Sequence[FeatureMap],
        size: Sequence[int],
    ) -> Outputs:
        """Return the outputs with the masks of all queries of the last layer, to be computed on request.

        Args:
            outputs: of the decoder; its boxes receive no gradient.
            tokens: input of the encoder, B rows, or R if the backbone forks the batch.
            memory: output of the encoder, R rows.
            features: maps of the backbone, from fine to coarse, with the rows of ``tokens``.
            size: height and width of the padded images; not needed here.
        """
        states = outputs.states[-1]
        *finer, deepest = (feature.tensor for feature in features)
        cells = (deepest.shape[-2], deepest.shape[-1])
        keys, seen = level_of(memory, cells), level_of(memory, cells, "padding_mask")
        maps = self.attention(states, keys, seen).unflatten(-1, cells)
        if self.see_boxes:
            covered = box_coverage(outputs.boxes[-1].detach(), seen.unflatten(1, cells))
            maps = torch.cat([maps, covered.unsqueeze(2).to(maps.dtype)], dim=2)
        projected = level_of(tokens, cells).transpose(1, 2).unflatten(2, cells)
        kind = states.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

        def of(row: Tensor, query: Tensor) -> Tensor:
            with torch.autocast(kind, dtype, enabled=enabled):  # as in the forward pass of the detector
                image = row.to(projected.device)
                image = image if memory.num_streams == tokens.num_streams else image % projected.shape[0]
                return self.convolutions(projected, maps[row, query], finer[::-1], image)

        return replace(outputs, masks=Masks(of, *states.shape[:2]))


class AttentionMaps(nn.Module):
    """Attention weights without values; the softmax of a query runs over all heads and cells together."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        for projection in (self.query, self.key):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(self, states: Tensor, keys: Tensor, padding_mask: Tensor) -> Tensor:
        """States (R, Q, C), keys (R, S, C), padding_mask (R, S), True = padding -> (R, Q, H, S)."""
        query = self.query(states).unflatten(-1, (self.heads, -1))
        key = self.key(keys).unflatten(-1, (self.heads, -1))
        logits = torch.einsum("rqhc,rshc->rqhs", query * query.shape[-1] ** -0.5, key)
        logits = logits.masked_fill(padding_mask[:, None, None], -torch.inf)
        return logits.flatten(2).softmax(-1).view_as(logits)


class MaskConvolutions(nn.Module):
    """Two convolutions at the coarsest size, then one after adding each finer map; for every query separately."""

    def __init__(self, in_channels: int, dim: int, finer_channels: Sequence[int]) -> None:
        super().__init__()
        widths = [in_channels, in_channels, *(dim >> shift for shift in range(1, len(finer_channels) + 2))]
        steps = list(pairwise(widths))
        self.layers = nn.ModuleList(nn.Conv2d(wide, narrow, 3, padding=1) for wide, narrow in steps)
        self.norms = nn.ModuleList(nn.GroupNorm(math.gcd(MASK_NORM_GROUPS, narrow), narrow) for _, narrow in steps)
        self.adapters = nn.ModuleList(
            nn.Conv2d(channels, width, 1) for channels, width in zip(finer_channels, widths[2:], strict=False)
        )
        self.out = nn.Conv2d(widths[-1], 1, 3, padding=1)
        for convolution in (*self.layers, *self.adapters, self.out):
            weight, bias = convolution.parameters()
            nn.init.kaiming_uniform_(weight, a=1)
            nn.init.zeros_(bias)

    def forward(self, projected: Tensor, maps: Tensor, finer: Sequence[Tensor], image: Tensor) -> Tensor:
        """Return masks (M, h', w') of M queries.

        Args:
            projected: (B, C, h, w).
            maps: (M, H or H + 1, h, w).
            finer: (B, ., ., .) each, from coarse to fine.
            image: (M,), row of each query in ``projected`` and ``finer``.
        """
        # index_select: the gradient of plain indexing is summed in an order that depends on the threads
        x = torch.cat([projected.index_select(0, image), maps], dim=1)
        plain = len(self.layers) - len(self.adapters)
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            if index >= plain:
                feature = self.adapters[index - plain](finer[index - plain])
                x = F.interpolate(x, size=feature.shape[-2:]) + feature.index_select(0, image)
            x = norm(layer(x)).relu()
        return self.out(x)[:, 0]


def box_coverage(boxes: Tensor, padding_mask: Tensor) -> Tensor:
    """Return the fraction of each cell that a box covers: (R, Q, h, w), float32.

    Args:
        boxes: (R, Q, 4), centre x, centre y, width, height in fractions of the unpadded image.
        padding_mask: (R, h, w), True = padding.
    """
    corners = box_convert(boxes.float(), "cxcywh", "xyxy") * unpadded(padding_mask).repeat(1, 2)[:, None]
    shares = []
    for axis, length in enumerate(reversed(padding_mask.shape[1:])):
        cell = torch.arange(length, device=boxes.device)
        low, high = corners[..., axis, None], corners[..., axis + 2, None]
        shares.append((torch.minimum(cell + 1, high) - torch.maximum(cell, low)).clamp(min=0))
    across, down = shares
    return down[..., :, None] * across[..., None, :]


def level_of(batch: TokenBatch, size: tuple[int, int], companion: str | None = None) -> Tensor:
    """Return the tokens (R, h * w, C) of the level of size (h, w), or their entry ``companion`` of ``per_sample``."""
    shapes = batch.static["spatial_shapes"]
    level = shapes.index(size)
    start = sum(height * width for height, width in shapes[:level])
    whole = batch.tokens if companion is None else batch.per_sample[companion]
    return whole[:, start : start + size[0] * size[1]]
