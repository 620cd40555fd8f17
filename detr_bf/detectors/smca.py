"""SMCA: Fast Convergence of DETR with Spatially Modulated Co-Attention (Gao et al. 2021, arXiv 2101.07448).

Shape legend: R rows, Q queries, S tokens, C channels, H heads, h x w cells.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from detr_bf.common.settings import setting
from detr_bf.common.structures import Queries, TokenBatch
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.parts import decoder_layer, query_attention, shared_heads, single_level_detector
from detr_bf.transformer import Decoder, LearnedQueries
from detr_bf.transformer.attention import MultiHeadAttention
from detr_bf.transformer.blocks import MLP, xavier

logger = logging.getLogger(__name__)

# Scales that a head predicts: none, one, one for x and one for y, and a third for their product.
SCALES = {"type1": 0, "type2": 1, "type3": 2, "type4": 3}


@dataclass(frozen=True)
class SmcaOptions:
    """Options of SMCA beside the shared ones."""

    dynamic_scale: str = setting("smca.dynamic_scale", "type3")  # number of scales that a head predicts, see SCALES
    smooth: float = setting("smca.smooth", 8.0)  # divisor of the exponent
    stride: int = setting("smca.stride", 32)  # pixels per cell; other than the feature map's: shifts the Gaussians


@declare(SmcaOptions)
def smca(backbone: nn.Module, channels: Sequence[int], options: Options, own: SmcaOptions) -> Detector:
    """Build SMCA: the logits of the cross-attention are modulated by a Gaussian around a centre predicted per head."""
    if options.strides is not None and [own.stride] != list(options.strides):
        logger.warning(
            "model.smca.stride=%d, but a cell of the feature map has %s pixels: set it to that, unless the weights "
            "were trained so (the authors' code keeps 32)",
            own.stride,
            " and ".join(map(str, options.strides)),
        )
    attentions = [
        GaussianAttention(options.hidden_dim, heads=options.heads, dropout=options.dropout, **vars(own))
        for _ in range(options.decoder_layers)
    ]
    return single_level_detector(backbone, channels, options, gaussian_decoder(attentions, attentions[0].norm, options))


def gaussian_decoder(attentions: Sequence[nn.Module], first_norm: nn.LayerNorm, options: Options) -> Decoder:
    """Build the decoder; reference points are predicted from the query positions, normalised by ``first_norm``."""
    dim = options.hidden_dim
    point = nn.Sequential(first_norm, xavier(MLP([dim, dim, dim, 2])))
    return Decoder(
        [decoder_layer(options, query_attention(options), attention) for attention in attentions],
        queries=LearnedQueries(options.num_queries, dim, reference=point, groups=options.groups),
        heads=shared_heads(options),
        norm=nn.LayerNorm(dim),
        batch_former=options.query_batch_former,
        aux_loss=options.aux_loss,
    )


class GaussianAttention(nn.Module):
    """Spatially modulated multi-head attention to the memory (section 3.2); arguments as of :class:`SmcaOptions`."""

    def __init__(
        self, dim: int, *, heads: int, dropout: float, dynamic_scale: str, smooth: float, stride: float
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, dropout)
        self.norm = nn.LayerNorm(dim)
        self.gaussian = Gaussian(dim, heads=heads, dynamic_scale=dynamic_scale, smooth=smooth, stride=stride)

    def forward(self, x: Tensor, queries: Queries, memory: TokenBatch) -> Tensor:
        """(R, Q, C) -> (R, Q, C). The centres are predicted from ``queries``, the input of the layer."""
        with_position = self.norm(queries.content + queries.position)
        (shape,) = memory.static["spatial_shapes"]
        return self.attention(
            x + queries.position,
            memory.tokens + memory.per_sample["position"],
            memory.tokens,
            memory.per_sample["padding_mask"],
            self.gaussian(with_position, queries.reference, memory.per_sample["image_size"], shape),
        )


class Gaussian(nn.Module):
    """Logarithm of a Gaussian over the cells of one feature map, for every head and query."""

    def __init__(self, dim: int, *, heads: int, dynamic_scale: str, smooth: float, stride: float) -> None:
        super().__init__()
        self.smooth, self.stride = smooth, stride
        self.offset = xavier(nn.Linear(dim, heads * 2))
        self.num_scales = SCALES[dynamic_scale]
        self.scale = nn.Linear(dim, heads * self.num_scales) if self.num_scales else None
        if self.scale is not None:
            nn.init.zeros_(self.scale.weight)
            nn.init.ones_(self.scale.bias)

    def forward(self, queries: Tensor, reference: Tensor, image_size: Tensor, shape: tuple[int, int]) -> Tensor:
        """Queries (R, Q, C), reference points (R, Q, 2), image sizes (R, 2) in pixels -> (R, H, Q, h * w)."""
        centre = reference * image_size[:, None] / self.stride  # (R, Q, 2) in cells
        centre = centre[:, :, None] + self.offset(queries).float().unflatten(-1, (-1, 2))
        x, y = centre.transpose(1, 2).unbind(-1)  # each (R, H, Q)
        across = (x[..., None] - torch.arange(shape[1], device=x.device)).square()
        down = (y[..., None] - torch.arange(shape[0], device=x.device)).square()
        across, down = across[..., None, :], down[..., None]
        scales = self._scales(queries)
        distance = scales[0] * across + scales[1] * down
        if len(scales) == 3:
            distance = distance + scales[2] * across * down
        return -distance.flatten(-2) / self.smooth

    def _scales(self, queries: Tensor) -> Sequence[Tensor]:
        """Return the scales of x, of y and, if there are three, of their product: each (R, H, Q, 1, 1)."""
        if self.scale is None:
            return [queries.new_ones(1)] * 2
        scales = self.scale(queries).float().square().unflatten(-1, (-1, self.num_scales)).transpose(1, 2)
        return scales[..., None, None].expand(*scales.shape[:3], max(2, self.num_scales), 1, 1).unbind(3)
