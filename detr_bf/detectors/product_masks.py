"""Mask head of RF-DETR (Robinson et al. 2025, arXiv 2511.09554): products of queries with a map of the image.

As in the released code, rfdetr 1.11.2. The map of the projector is enlarged; one block refines it for each decoder
layer, whose queries have a mask each. The proposals have masks over the map before the first block.

Shape legend: R rows (streams x images), Q queries, C channels, h x w cells of the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.common.masks import ProductMasks
from detr_bf.common.structures import Outputs, TokenBatch
from detr_bf.detectors.mask_head import level_of
from detr_bf.transformer.blocks import MLP, Residual


class ProductMaskHead(nn.Module):
    """Masks of the queries of all decoder layers, groups included, and of the proposals.

    Args:
        dim: channels C of queries and memory.
        layers: number of decoder layers.
        stride: pixels per cell of the masks.
    """

    def __init__(self, dim: int, *, layers: int, stride: int = 4) -> None:
        super().__init__()
        self.stride = stride
        self.blocks = nn.ModuleList(DepthwiseBlock(dim) for _ in range(layers))
        self.project = nn.Conv2d(dim, dim, 1)
        self.query_residual = Residual(dim, pre_norm=True)
        self.query_mlp = MLP([dim, 4 * dim, dim], "gelu")
        self.project_query = nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, outputs: Outputs, _: TokenBatch, memory: TokenBatch, __: object, size: Sequence[int]) -> Outputs:
        """Return the outputs with ``masks`` and ``layer_masks``, and groups and proposals with ``layer_masks``.

        Args:
            outputs: of the decoder; the proposals have states.
            memory: tokens of R rows, whose finest level is the map.
            size: height and width of the padded images.

        The tokens of the encoder's input and the backbone's maps, which other mask heads read, are not needed.
        """
        cells, *_ = memory.static["spatial_shapes"]
        x = level_of(memory, cells).transpose(1, 2).unflatten(2, cells)
        x = F.interpolate(x, size=[max(1, side // self.stride) for side in size], mode="bilinear")
        pixels = (size[0], size[1])
        proposals = outputs.proposals and self._with_masks(outputs.proposals, [self.project(x)], pixels)
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(self.project(x))
        found = self._with_masks(outputs, maps[-len(outputs.states) :], pixels)
        return replace(found, masks=found.layer_masks[-1], proposals=proposals)

    def _with_masks(self, outputs: Outputs, maps: Sequence[Tensor], size: tuple[int, int]) -> Outputs:
        """Return predictions and those of their groups with masks; ``maps`` (R, C, h, w) for each layer."""
        masks = tuple(
            ProductMasks(each, self.project_query(self.query_residual(state, self.query_mlp)), self.bias, size)
            for each, state in zip(maps, outputs.states, strict=True)
        )
        groups = tuple((group, self._with_masks(part, maps, size)) for group, part in outputs.groups)
        return replace(outputs, layer_masks=masks, groups=groups)


class DepthwiseBlock(nn.Module):
    """Residual block: depthwise convolution of 3 x 3, layer norm, linear layer and GELU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pointwise = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(R, C, h, w) -> (R, C, h, w)."""
        update = self.pointwise(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + F.gelu(update).permute(0, 3, 1, 2)
