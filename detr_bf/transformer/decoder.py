"""The one decoder loop.

Shape legend: R rows (streams x images), Q queries, S tokens, C channels, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from detr_bf.layers import FeedForward, MultiHeadAttention
from detr_bf.structures import TokenBatch
from detr_bf.transformer.residual import Residual


class Decoder(nn.Module):
    """Decoder layers in turn over learned queries; ``norm`` is applied to what every layer hands to the heads."""

    def __init__(self, layers: Sequence[nn.Module], *, dim: int, num_queries: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(dim)
        self.query_position = nn.Embedding(num_queries, dim)

    def forward(self, memory: TokenBatch) -> Tensor:
        """Memory (R, S, C) -> decoder states (L, R, Q, C). The content of the queries starts at zero."""
        position = self.query_position.weight.expand(len(memory.tokens), -1, -1)
        content = torch.zeros_like(position)
        states = []
        for layer in self.layers:
            content = layer(content, position, memory)
            states.append(self.norm(content))
        return torch.stack(states)


class DecoderLayer(nn.Module):
    """Self-attention of the queries, cross-attention to the memory, a feed-forward network."""

    def __init__(
        self, dim: int, *, heads: int, feedforward_dim: int, dropout: float = 0.0, pre_norm: bool = False
    ) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(dim, heads, dropout)
        self.self_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)
        self.cross_attention = MultiHeadAttention(dim, heads, dropout)
        self.cross_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)
        self.feed_forward = FeedForward(dim, feedforward_dim, dropout)
        self.feed_forward_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)

    def forward(self, content: Tensor, position: Tensor, memory: TokenBatch) -> Tensor:
        """content and position (R, Q, C), memory (R, S, C) -> content (R, Q, C)."""
        content = self.self_residual(content, lambda x: self.self_attention(x + position, x + position, x))
        content = self.cross_residual(content, lambda x: self._look(x + position, memory))
        return self.feed_forward_residual(content, self.feed_forward)

    def _look(self, query: Tensor, memory: TokenBatch) -> Tensor:
        located = memory.tokens + memory.per_sample["position"]
        return self.cross_attention(query, located, memory.tokens, memory.per_sample["padding_mask"])
