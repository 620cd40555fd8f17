"""Multi-scale SMCA (Gao et al. 2021, arXiv 2101.07448, section 3.4, in the form of the authors' release).

Shape legend: R rows, Q queries, S tokens of all levels, C channels, H heads. Levels have strides 8, 16, 32, 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.settings import setting
from detr_bf.common.structures import FeatureMap, Queries, TokenBatch, resize_mask
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.parts import encoder, position, projection
from detr_bf.detectors.smca import Gaussian, gaussian_decoder
from detr_bf.transformer import Encoder, FeatureTokens
from detr_bf.transformer.attention import MultiHeadAttention, multi_head_attention
from detr_bf.transformer.blocks import FeedForward, Residual, xavier

MAPS = (8, 16, 32)  # strides of the feature maps
LEVELS = 4
STRIDES = (16, 16, 32, 64)  # of the memory, pixels per cell
SHARPNESS = (0.5, 0.5, 1.0, 2.0)  # factors of the squared distance in cells
KERNEL = 5


@dataclass(frozen=True)
class MultiScaleOptions:
    """Options of multi-scale SMCA beside the shared ones."""

    smooth: float = setting("smca.smooth", 8.0)  # divisor of the exponent


@declare(MultiScaleOptions)
def smca_multi_scale(backbone: nn.Module, widths: Sequence[int], options: Options, own: MultiScaleOptions) -> Detector:
    """Build multi-scale SMCA: convolutions mix four levels in the encoder; queries weight the levels they attend to.

    Raises:
        InputError: the feature maps have other strides, or the layers are pre-norm.
    """
    strides = options.strides or MAPS
    if tuple(strides) != MAPS or len(widths) != len(MAPS) or options.pre_norm:
        raise InputError(
            f"strides={list(MAPS)} and pre_norm=false are required by smca_multi_scale; got {list(strides)} with "
            f"{len(widths)} feature maps, and pre_norm={str(options.pre_norm).lower()}"
        )
    attentions = [
        MultiScaleGaussianAttention(options.hidden_dim, heads=options.heads, dropout=options.dropout, smooth=own.smooth)
        for _ in range(options.decoder_layers)
    ]
    return Detector(
        backbone,
        tokens=_tokens(widths, options),
        encoder=_encoder(options),
        decoder=gaussian_decoder(attentions, attentions[0].norm, options),
        mask_head=options.mask_head,
        levels=len(widths),
    )


def _tokens(channels: Sequence[int], options: Options) -> CoarserMap:
    tokens = FeatureTokens(
        [*(projection(count, options, norm=False) for count in channels), nn.Identity()],
        position(options),
        level_embedding=nn.Parameter(torch.randn(LEVELS, options.hidden_dim)),
    )
    return CoarserMap(projection(channels[-1], options, norm=False, kernel=3, stride=2), tokens)


def _encoder(options: Options) -> ReducedEncoder:
    dim = options.hidden_dim
    layers = [
        ExchangeLayer(dim, options.feedforward_dim, options.dropout, options.activation)
        for _ in range(options.encoder_layers)
    ]
    return ReducedEncoder(encoder(options, layers), nn.Conv2d(dim, dim, 3, stride=2, padding=1))


class CoarserMap(nn.Module):
    """Tokens with an additional fourth map of half the size of the third."""

    def __init__(self, convolution: nn.Module, tokens: FeatureTokens) -> None:
        super().__init__()
        self.convolution = convolution
        self.tokens = tokens

    def forward(self, features: Sequence[FeatureMap], padding_mask: Tensor) -> TokenBatch:
        coarser: Tensor = self.convolution(features[-1].tensor)
        mask = resize_mask(features[-1].padding_mask, coarser.shape[-2:])
        batch: TokenBatch = self.tokens([*features, FeatureMap(coarser, mask)], padding_mask)
        return batch


class ExchangeLayer(nn.Module):
    """Depth-wise convolutions on every level and between adjacent levels, then a feed-forward network.

    Padding is not masked. The 1 x 1 convolutions, the norms and the feed-forward network are shared by all levels.
    """

    def __init__(self, dim: int, feedforward_dim: int, dropout: float = 0.0, activation: str = "relu") -> None:
        super().__init__()
        self.enter, self.leave = (xavier(nn.Conv2d(dim, dim, 1)) for _ in range(2))
        self.within = nn.ModuleList(_depthwise(dim) for _ in range(LEVELS))
        self.to_coarser = nn.ModuleList(_depthwise(dim, stride=2) for _ in range(LEVELS - 1))
        self.to_finer = nn.ModuleList(_depthwise(dim) for _ in range(LEVELS - 1))
        self.exchange_residual = Residual(dim, dropout=dropout)
        self.feed_forward = FeedForward(dim, feedforward_dim, dropout, activation=activation)
        self.feed_forward_residual = Residual(dim, dropout=dropout)

    def forward(self, batch: TokenBatch) -> Tensor:
        """(R, S, C) -> (R, S, C)."""
        tokens = self.exchange_residual(batch.tokens, lambda x: self._exchange(x + batch.per_sample["position"], batch))
        return self.feed_forward_residual(tokens, self.feed_forward)

    def _exchange(self, with_position: Tensor, batch: TokenBatch) -> Tensor:
        maps = as_maps(with_position, batch.static["spatial_shapes"])
        own = [mix(self.enter(level)) for mix, level in zip(self.within, maps, strict=True)]
        mixed = list(own)
        for fine, (down, up) in enumerate(zip(self.to_coarser, self.to_finer, strict=True)):
            mixed[fine + 1] = mixed[fine + 1] + down(own[fine])
            mixed[fine] = mixed[fine] + F.interpolate(
                up(own[fine + 1]), size=own[fine].shape[-2:], mode="bilinear", align_corners=True
            )
        return as_tokens([self.leave(level) for level in mixed])


class ReducedEncoder(nn.Module):
    """Encoder whose finest output level is downsampled to the size of the next level, for the decoder."""

    def __init__(self, encoder: Encoder, reduce: nn.Conv2d) -> None:
        super().__init__()
        self.encoder = encoder
        self.reduce = reduce

    def forward(self, batch: TokenBatch) -> TokenBatch:
        memory: TokenBatch = self.encoder(batch)
        shapes = memory.static["spatial_shapes"]
        finest, *others = as_maps(memory.tokens, shapes)
        cells = [height * width for height, width in shapes]
        companions = dict(memory.per_sample)
        for name in ("padding_mask", "position"):
            _, *rest = companions[name].split(cells, dim=1)
            companions[name] = torch.cat([rest[0], *rest], dim=1)
        return replace(
            memory,
            tokens=as_tokens([self.reduce(finest), *others]),
            per_sample=companions,
            static={**memory.static, "spatial_shapes": (shapes[1], *shapes[1:])},
        )


class MultiScaleGaussianAttention(nn.Module):
    """Spatially modulated attention to each level; the results are weighted by a function of the query."""

    def __init__(self, dim: int, *, heads: int, dropout: float, smooth: float) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, dropout)
        self.norm = nn.LayerNorm(dim)
        gaussians = [
            Gaussian(dim, heads=heads, dynamic_scale="type3", smooth=smooth / sharpness, stride=stride)
            for sharpness, stride in zip(SHARPNESS, STRIDES, strict=True)
        ]
        self.gaussians = nn.ModuleList(gaussians)
        self.level_weight = xavier(nn.Linear(dim, LEVELS))
        offsets = nn.init.xavier_uniform_(torch.empty(LEVELS, heads * 2, dim).flatten(0, 1)).chunk(LEVELS)
        for gaussian, weight in zip(gaussians, offsets, strict=True):
            gaussian.offset.weight.data.copy_(weight)  # initialised as one matrix for all levels

    def forward(self, x: Tensor, queries: Queries, memory: TokenBatch) -> Tensor:
        """(R, Q, C) -> (R, Q, C). Centres and weights are predicted from ``queries``, the input of the layer."""
        with_position = self.norm(queries.content + queries.position)
        shapes = memory.static["spatial_shapes"]
        cells = [height * width for height, width in shapes]
        query = self.attention.query(x + queries.position)
        key = self.attention.key(memory.tokens + memory.per_sample["position"]).split(cells, dim=1)
        value = self.attention.value(memory.tokens).split(cells, dim=1)
        mask = memory.per_sample["padding_mask"].split(cells, dim=1)
        found = [
            multi_head_attention(
                query,
                key[level],
                value[level],
                heads=self.attention.heads,
                padding_mask=mask[level],
                bias=gaussian(with_position, queries.reference, memory.per_sample["image_size"], shapes[level]),
                dropout=self.attention.dropout if self.training else 0.0,
            )
            for level, gaussian in enumerate(self.gaussians)
        ]
        weights = self.level_weight(with_position).softmax(-1)  # (R, Q, levels)
        return self.attention.out((torch.stack(found, dim=-1) * weights[:, :, None]).sum(-1))


def as_maps(tokens: Tensor, spatial_shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Tokens (R, S, C) -> maps (R, C, h, w), one per level."""
    parts = tokens.transpose(1, 2).split([height * width for height, width in spatial_shapes], dim=2)
    return [part.unflatten(2, shape) for part, shape in zip(parts, spatial_shapes, strict=True)]


def as_tokens(maps: Sequence[Tensor]) -> Tensor:
    """Maps (R, C, h, w) -> tokens (R, S, C)."""
    return torch.cat([level.flatten(2) for level in maps], dim=2).transpose(1, 2)


def _depthwise(dim: int, stride: int = 1) -> nn.Module:
    return xavier(nn.Conv2d(dim, dim, KERNEL, stride=stride, padding=KERNEL // 2, groups=dim))
