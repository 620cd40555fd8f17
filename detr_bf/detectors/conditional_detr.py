"""Conditional DETR for Fast Training Convergence (Meng et al. 2021, arXiv 2108.06152).

Shape legend: R rows, Q queries, S tokens, C channels, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from detr_bf.detectors.detector import Detector
from detr_bf.detectors.parts import Options, neutral_box_head, shared_heads, single_level_detector, xavier
from detr_bf.errors import InputError
from detr_bf.layers import MLP, check_heads, multi_head_attention, sine_of_coordinates
from detr_bf.structures import Queries, TokenBatch
from detr_bf.transformer import Decoder, DecoderLayer, LearnedQueries


def conditional_detr(backbone: nn.Module, channels: Sequence[int], options: Options) -> Detector:
    """Content and place are compared apart; a query looks around a reference point it has learned."""
    dim = options.hidden_dim
    layers = [
        DecoderLayer(
            ConditionalSelfAttention(**options.attention),
            ConditionalCrossAttention(**options.attention, first=index == 0),
            **options.layer,
        )
        for index in range(options.decoder_layers)
    ]
    decoder = Decoder(
        layers,
        queries=LearnedQueries(options.num_queries, dim, reference=xavier(MLP([dim, dim, 2]))),
        heads=shared_heads(options, neutral_box_head(options)),
        norm=nn.LayerNorm(dim),
        look=ScaledSine(dim, temperature=options.position_temperature),
        aux_loss=options.aux_loss,
    )
    return single_level_detector(backbone, channels, options, decoder)


class ScaledSine(nn.Module):
    """Where the queries look: the sine encoding of their reference, scaled by what they hold (section 3.3).

    The content of the first layer is empty, so its encoding is not scaled.
    """

    def __init__(self, dim: int, *, temperature: float = 10000.0) -> None:
        super().__init__()
        if dim % 4:
            raise InputError(f"the sine encoding of reference points needs model.hidden_dim divisible by 4, got {dim}")
        self.dim = dim
        self.temperature = temperature  # that of the tokens' positions, with which it is compared
        self.scale = xavier(MLP([dim, dim, dim]))

    def forward(self, layer: int, queries: Queries) -> Queries:
        assert queries.reference is not None
        y_before_x = queries.reference.flip(-1)  # as the tokens have it
        encoding = sine_of_coordinates(y_before_x, self.dim // 2, temperature=self.temperature)
        return replace(queries, modulation=encoding if layer == 0 else encoding * self.scale(queries.content))


class ConditionalSelfAttention(nn.Module):
    """Attention among the queries with projections of their own for content and position."""

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
            dropout=self.dropout if self.training else 0.0,
        )
        return self.out(attended)


class ConditionalCrossAttention(nn.Module):
    """Attention to the memory: content and place stand side by side in every head, so their logits add up.

    In the ``first`` layer, where the content says nothing yet, the positions are added to it as well.
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
        place = self.position_key(memory.per_sample["position"])
        if self.position_query is not None:
            query, key = query + self.position_query(queries.position), key + place
        attended = multi_head_attention(
            self._side_by_side(query, self.sine_query(queries.modulation)),
            self._side_by_side(key, place),
            self.value(memory.tokens),
            heads=self.heads,
            padding_mask=memory.per_sample["padding_mask"],
            dropout=self.dropout if self.training else 0.0,
        )
        return self.out(attended)

    def _side_by_side(self, content: Tensor, place: Tensor) -> Tensor:
        """Twice (R, N, C) -> (R, N, 2 C), within each head."""
        parts = (part.unflatten(-1, (self.heads, -1)) for part in (content, place))
        return torch.cat(tuple(parts), dim=-1).flatten(-2)


def _linear(dim: int, bias: float | None = None) -> nn.Linear:
    projection = nn.Linear(dim, dim)
    nn.init.xavier_uniform_(projection.weight)
    if bias is not None:
        nn.init.constant_(projection.bias, bias)
    return projection
