"""SMCA: Fast Convergence of DETR with Spatially Modulated Co-Attention (Gao et al. 2021, arXiv 2101.07448).

Shape legend: R rows, Q queries, S tokens, C channels, H heads, h x w cells.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from detr_bf.detectors.detector import Detector
from detr_bf.detectors.parts import Options, query_attention, shared_heads, single_level_detector, xavier
from detr_bf.layers import MLP, MultiHeadAttention
from detr_bf.structures import Queries, TokenBatch
from detr_bf.transformer import Decoder, DecoderLayer, LearnedQueries

logger = logging.getLogger(__name__)

# Scales that a head predicts: none, one, one for x and one for y, and a third for their product.
SCALES = {"type1": 0, "type2": 1, "type3": 2, "type4": 3}


def smca(
    backbone: nn.Module,
    channels: Sequence[int],
    options: Options,
    *,
    dynamic_scale: str = "type3",
    smooth: float = 8.0,
    stride: int = 32,
    strides: Sequence[int] = (32,),
) -> Detector:
    """A Gaussian around a place each head chooses is added to the logits of the cross-attention.

    ``strides`` are the backbone's; cells of another ``stride`` misplace the Gaussians, which is warned of.
    """
    if [stride] != list(strides):
        logger.warning(
            "model.smca.stride=%d, but a cell of the feature map has %s pixels: set it to that, unless the weights "
            "were trained so (the authors' code keeps 32)",
            stride,
            " and ".join(map(str, strides)),
        )
    attentions = [
        GaussianAttention(**options.attention, dynamic_scale=dynamic_scale, smooth=smooth, stride=stride)
        for _ in range(options.decoder_layers)
    ]
    return single_level_detector(backbone, channels, options, gaussian_decoder(attentions, attentions[0].norm, options))


def gaussian_decoder(attentions: Sequence[nn.Module], first_norm: nn.LayerNorm, options: Options) -> Decoder:
    """The queries' reference points come from their position, seen through the norm of the first of ``attentions``."""
    dim = options.hidden_dim
    point = nn.Sequential(first_norm, xavier(MLP([dim, dim, dim, 2])))
    return Decoder(
        [DecoderLayer(query_attention(options), attention, **options.layer) for attention in attentions],
        queries=LearnedQueries(options.num_queries, dim, reference=point),
        heads=shared_heads(options),
        norm=nn.LayerNorm(dim),
        aux_loss=options.aux_loss,
    )


class GaussianAttention(nn.Module):
    """Multi-head attention to the memory, modulated in space (section 3.2).

    Args:
        dim, heads, dropout: of the attention.
        dynamic_scale: how many scales a head predicts, see ``SCALES``.
        smooth: divides the exponent.
        stride: pixels of a cell.
    """

    def __init__(
        self, dim: int, *, heads: int, dropout: float, dynamic_scale: str, smooth: float, stride: float
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, dropout)
        self.norm = nn.LayerNorm(dim)
        self.gaussian = Gaussian(dim, heads=heads, dynamic_scale=dynamic_scale, smooth=smooth, stride=stride)

    def forward(self, x: Tensor, queries: Queries, memory: TokenBatch) -> Tensor:
        """(R, Q, C) -> (R, Q, C). The places depend on what entered the layer, ``queries``."""
        located = self.norm(queries.content + queries.position)
        (shape,) = memory.static["spatial_shapes"]
        return self.attention(
            x + queries.position,
            memory.tokens + memory.per_sample["position"],
            memory.tokens,
            memory.per_sample["padding_mask"],
            self.gaussian(located, queries.reference, memory.per_sample["image_size"], shape),
        )


class Gaussian(nn.Module):
    """The logarithm of a Gaussian over the cells of one feature map for every head and query."""

    def __init__(self, dim: int, *, heads: int, dynamic_scale: str, smooth: float, stride: float) -> None:
        super().__init__()
        self.smooth, self.stride = smooth, stride
        self.offset = xavier(nn.Linear(dim, heads * 2))
        self.num_scales = SCALES[dynamic_scale]
        self.scale = nn.Linear(dim, heads * self.num_scales) if self.num_scales else None
        if self.scale is not None:
            nn.init.zeros_(self.scale.weight)
            nn.init.ones_(self.scale.bias)

    def forward(self, located: Tensor, reference: Tensor, image_size: Tensor, shape: tuple[int, int]) -> Tensor:
        """The queries (R, Q, C) around reference points (R, Q, 2) in images of (R, 2) pixels -> (R, H, Q, h * w)."""
        centre = reference * image_size[:, None] / self.stride  # (R, Q, 2) in cells
        centre = centre[:, :, None] + self.offset(located).float().unflatten(-1, (-1, 2))
        x, y = centre.transpose(1, 2).unbind(-1)  # each (R, H, Q)
        across = (x[..., None] - torch.arange(shape[1], device=x.device)).square()
        down = (y[..., None] - torch.arange(shape[0], device=x.device)).square()
        across, down = across[..., None, :], down[..., None]
        scales = self._scales(located)
        distance = scales[0] * across + scales[1] * down
        if len(scales) == 3:
            distance = distance + scales[2] * across * down
        return -distance.flatten(-2) / self.smooth

    def _scales(self, located: Tensor) -> Sequence[Tensor]:
        """Of x, of y and, with three, of their product: each (R, H, Q, 1, 1)."""
        if self.scale is None:
            return [located.new_ones(1)] * 2
        scales = self.scale(located).float().square().unflatten(-1, (-1, self.num_scales)).transpose(1, 2)
        return scales[..., None, None].expand(*scales.shape[:3], max(2, self.num_scales), 1, 1).unbind(3)
