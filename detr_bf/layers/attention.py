"""Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762) with a padding mask over the keys.

Shape legend: R rows, Q queries, S keys, C channels, K channels of queries and keys, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.errors import InputError


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend with projected inputs: query (R, Q, K), key (R, S, K), value (R, S, C) -> (R, Q, C).

    ``padding_mask`` (R, S), True = padding, is not attended to. ``bias`` (R, H, Q, S) is added to the logits.
    ``dropout`` is applied to the attention weights.
    """
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    visible = None if padding_mask is None else ~padding_mask[:, None, None, :]
    if bias is not None:
        visible = (bias if visible is None else bias.masked_fill(~visible, -torch.inf)).to(query.dtype)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout)
    return attended.transpose(1, 2).flatten(2)


def check_heads(dim: int, heads: int) -> None:
    """Raise InputError unless ``heads`` is positive and divides ``dim``."""
    if heads < 1 or dim % heads:
        raise InputError(f"heads={heads} must divide the width {dim}")


class MultiHeadAttention(nn.Module):
    """:func:`multi_head_attention` with linear projections of inputs and output.

    Initialised as in DETR: Xavier-uniform over the query, key and value projections taken as one matrix.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        for projection in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(projection.weight, gain=0.5**0.5)
            nn.init.zeros_(projection.bias)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding_mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """query (R, Q, C), key and value (R, S, C), padding_mask (R, S) bool, bias (R, H, Q, S) -> (R, Q, C)."""
        attended = multi_head_attention(
            self.query(query),
            self.key(key),
            self.value(value),
            heads=self.heads,
            padding_mask=padding_mask,
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.out(attended)
