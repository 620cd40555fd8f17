"""Who attends to what, with multi-head attention: the tokens of an image, the queries, the queries to the tokens.

Shape legend: R rows (streams x images), Q queries, S tokens, C channels. ``x`` is the content as the residual branch
hands it over: normalised first in a pre-norm layer.
"""

from __future__ import annotations

from torch import Tensor, nn

from detr_bf.layers import MultiHeadAttention
from detr_bf.structures import Queries, TokenBatch


class TokenAttention(nn.Module):
    """Every token of an image attends to every other."""

    def __init__(self, dim: int, *, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, dropout)

    def forward(self, x: Tensor, batch: TokenBatch) -> Tensor:
        """(R, S, C) -> (R, S, C)."""
        located = x + batch.per_sample["position"]
        return self.attention(located, located, x, batch.per_sample["padding_mask"])


class QueryAttention(nn.Module):
    """Every query attends to every other."""

    def __init__(self, dim: int, *, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, dropout)

    def forward(self, x: Tensor, queries: Queries) -> Tensor:
        """(R, Q, C) -> (R, Q, C)."""
        located = x + queries.position
        return self.attention(located, located, x)


class MemoryAttention(nn.Module):
    """Every query attends to every token of its image."""

    def __init__(self, dim: int, *, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, dropout)

    def forward(self, x: Tensor, queries: Queries, memory: TokenBatch) -> Tensor:
        """(R, Q, C) -> (R, Q, C)."""
        located = memory.tokens + memory.per_sample["position"]
        return self.attention(x + queries.position, located, memory.tokens, memory.per_sample["padding_mask"])
