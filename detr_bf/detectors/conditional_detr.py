"""Conditional DETR for Fast Training Convergence (Meng et al. 2021, arXiv 2108.06152).

Shape legend: R rows, Q queries, S tokens, C channels, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Queries, TokenBatch
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.parts import decoder_layer, shared_heads, single_level_detector, zero_init_box_head
from detr_bf.transformer import Decoder, DecoderLayer, LearnedQueries
from detr_bf.transformer.attention import check_heads, multi_head_attention
from detr_bf.transformer.blocks import MLP, xavier
from detr_bf.transformer.position import sine_of_coordinates


@declare()
def conditional_detr(backbone: nn.Module, channels: Sequence[int], options: Options) -> Detector:
    """Build Conditional DETR: content and position are compared separately, around learned reference points."""
    dim = options.hidden_dim
    decoder = Decoder(
        conditional_layers(options),
        queries=LearnedQueries(options.num_queries, dim, reference=xavier(MLP([dim, dim, 2])), groups=options.groups),
        heads=shared_heads(options, zero_init_box_head(options)),
        norm=nn.LayerNorm(dim),
        update_queries=ScaledSine(dim, options.decoder_layers, temperature=options.position_temperature),
        batch_former=options.query_batch_former,
        aux_loss=options.aux_loss,
    )
    return single_level_detector(backbone, channels, options, decoder)


def conditional_layers(options: Options) -> list[DecoderLayer]:
    """Build the decoder layers."""
    dim, heads, dropout = options.hidden_dim, options.heads, options.dropout
    return [
        decoder_layer(
            options,
            ConditionalSelfAttention(dim, heads=heads, dropout=dropout),
            ConditionalCrossAttention(dim, heads=heads, dropout=dropout, first=index == 0),
        )
        for index in range(options.decoder_layers)
    ]


def content_scale(dim: int, layers: int) -> MLP:
    """Build the scale of the positions of all decoder layers but the first; of a single layer it is not trained."""
    scale = xavier(MLP([dim, dim, dim]))
    scale.requires_grad_(layers > 1)  # DistributedDataParallel waits for the gradients of all others
    return scale


class ScaledSine(nn.Module):
    """Position query: the sine encoding of the reference point, scaled by a function of the content (section 3.3).

    The content of the first layer is zero, so its encoding is not scaled.
    """

    def __init__(self, dim: int, layers: int, *, temperature: float = 10000.0) -> None:
        super().__init__()
        if dim % 4:
            raise InputError(f"dim={dim} must be divisible by 4 for the sine encoding of reference points")
        self.dim = dim
        self.temperature = temperature  # the same as of the position encoding of the tokens
        self.scale = content_scale(dim, layers)

    def forward(self, layer: int, queries: Queries, memory: TokenBatch) -> Queries:
        assert queries.reference is not None
        y_before_x = queries.reference.flip(-1)  # the order of the token positions
        encoding = sine_of_coordinates(y_before_x, self.dim // 2, temperature=self.temperature)
        return replace(queries, modulation=encoding if layer == 0 else encoding * self.scale(queries.content))


class ConditionalSelfAttention(nn.Module):
    """Attention between the queries with separate projections of content and position."""

    def __init__(self, dim: int, *, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads, self.dropout = heads, dropout
        self.content_query, self.content_key, self.value = (_linear(dim) for _ in range(3))
        self.position_query, self.position_key = (_linear(dim) for _ in range(2))
        self.out = _linear(dim, bias=0.0)

    def forward(self, x: Tensor, queries: Queries) -> Tensor:
        """(R, Q, C) -> (R, Q, C)."""
        attended = multi_head_attention(
            self.content_query(x) + self.position_query(queries.position),
            self.content_key(x) + self.position_key(queries.position),
            self.value(x),
            heads=self.heads,
            blocked=queries.blocked,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.out(attended)


class ConditionalCrossAttention(nn.Module):
    """Attention to the memory; content and position are concatenated in every head, so their logits add up.

    In the ``first`` layer, whose content is zero, the positions are also added to the content.
    """

    def __init__(self, dim: int, *, heads: int, dropout: float = 0.0, first: bool = False) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads, self.dropout = heads, dropout
        self.content_query, self.content_key, self.value = (_linear(dim) for _ in range(3))
        self.sine_query, self.position_key = (_linear(dim) for _ in range(2))
        self.position_query = _linear(dim) if first else None
        self.out = _linear(dim, bias=0.0)

    def forward(self, x: Tensor, queries: Queries, memory: TokenBatch) -> Tensor:
        """(R, Q, C) -> (R, Q, C)."""
        assert queries.modulation is not None
        query, key = self.content_query(x), self.content_key(memory.tokens)
        position = self.position_key(memory.per_sample["position"])
        if self.position_query is not None:
            query, key = query + self.position_query(queries.position), key + position
        attended = multi_head_attention(
            self._concatenate(query, self.sine_query(queries.modulation)),
            self._concatenate(key, position),
            self.value(memory.tokens),
            heads=self.heads,
            padding_mask=memory.per_sample["padding_mask"],
            dropout=self.dropout if self.training else 0.0,
        )
        return self.out(attended)

    def _concatenate(self, content: Tensor, position: Tensor) -> Tensor:
        """Concatenate two (R, N, C) within each head: (R, N, 2 C)."""
        parts = (part.unflatten(-1, (self.heads, -1)) for part in (content, position))
        return torch.cat(tuple(parts), dim=-1).flatten(-2)


def _linear(dim: int, bias: float | None = None) -> nn.Linear:
    projection = nn.Linear(dim, dim)
    nn.init.xavier_uniform_(projection.weight)
    if bias is not None:
        nn.init.constant_(projection.bias, bias)
    return projection
