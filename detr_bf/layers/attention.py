"""Multi-head attention and deformable attention.

Shape legend: R rows, Q queries, S keys or tokens of all levels, C channels, K channels of queries and keys, H heads,
L levels, P points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.errors import InputError
from detr_bf.ops import ms_deform_attn


class AttentionRecord(NamedTuple):
    """Weights of one call of an attention, without dropout."""

    weights: Tensor  # (R, H, Q, S); of deformable attention (R, Q, H, L, P)
    points: Tensor | None = None  # (R, Q, H, L, P, 2) x and y in fractions of the padded level; deformable attention


_records: list[AttentionRecord] | None = None


@contextmanager
def recorded_weights() -> Iterator[list[AttentionRecord]]:
    """Record the weights of every attention that is computed in the block, in the order of the calls."""
    global _records
    before, _records = _records, []
    try:
        yield _records
    finally:
        _records = before


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    blocked: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend with projected inputs: query (R, Q, K), key (R, S, K), value (R, S, C) -> (R, Q, C).

    ``padding_mask`` (R, S), True = padding, is not attended to. ``bias`` (R, H, Q, S) is added to the logits.
    ``blocked`` (Q, S) is True where a query does not attend to a key. ``dropout`` is applied to the attention weights.
    """
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    visible = None if padding_mask is None else ~padding_mask[:, None, None, :]
    if blocked is not None:
        visible = ~blocked if visible is None else visible & ~blocked
    if bias is not None:
        visible = (bias if visible is None else bias.masked_fill(~visible, -torch.inf)).to(query.dtype)
    if _records is not None:
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf) if visible.dtype == torch.bool else scores + visible
        _records.append(AttentionRecord(scores.softmax(-1).detach()))
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
        blocked: Tensor | None = None,
    ) -> Tensor:
        """query (R, Q, C), key and value (R, S, C), masks as of :func:`multi_head_attention` -> (R, Q, C)."""
        attended = multi_head_attention(
            self.query(query),
            self.key(key),
            self.value(value),
            heads=self.heads,
            padding_mask=padding_mask,
            bias=bias,
            blocked=blocked,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.out(attended)


class DeformableAttention(nn.Module):
    """Attention of each query to ``points`` sampled points per head and level, predicted around its reference.

    Initially the heads sample in directions spread over a circle, at distances of one to ``points`` cells.
    """

    def __init__(self, dim: int, *, heads: int, levels: int, points: int) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads, self.levels, self.points = heads, levels, points
        self.sampling_offsets = nn.Linear(dim, heads * levels * points * 2)
        self.attention_weights = nn.Linear(dim, heads * levels * points)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        for projection in (self.sampling_offsets, self.attention_weights):
            nn.init.zeros_(projection.weight)
            nn.init.zeros_(projection.bias)
        for projection in (self.value, self.out):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(initial_offsets(heads, levels, points).flatten())

    def forward(
        self,
        query: Tensor,
        reference: Tensor,
        tokens: Tensor,
        spatial_shapes: Sequence[tuple[int, int]],
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """query (R, Q, C) with reference points or boxes (R, Q, L, 2 or 4) per level, tokens (R, S, C) -> (R, Q, C).

        References are fractions of the whole, padded level. Padded tokens (``padding_mask`` (R, S)) are set to zero.
        """
        value = self.value(tokens)
        if padding_mask is not None:
            value = value.masked_fill(padding_mask[..., None], 0.0)
        weights = self.attention_weights(query).unflatten(-1, (self.heads, -1)).softmax(-1)
        offsets = self.sampling_offsets(query).unflatten(-1, (self.heads, self.levels, self.points, 2))
        weights = weights.unflatten(-1, (self.levels, self.points))
        points = self._locations(reference, offsets.to(reference.dtype), spatial_shapes)
        if _records is not None:
            _records.append(AttentionRecord(weights.detach(), points.detach()))
        found = ms_deform_attn(value.unflatten(-1, (self.heads, -1)), spatial_shapes, None, points, weights)
        return self.out(found)

    def _locations(self, reference: Tensor, offsets: Tensor, spatial_shapes: Sequence[tuple[int, int]]) -> Tensor:
        """Return sampling points for offsets (R, Q, H, L, P, 2), in cells for points and in size / 2P for boxes."""
        centre = reference[:, :, None, :, None, :2]
        if reference.shape[-1] == 2:
            size = offsets.new_tensor([(width, height) for height, width in spatial_shapes])
            return centre + offsets / size[:, None]
        return centre + offsets / self.points * reference[:, :, None, :, None, 2:] * 0.5


def initial_offsets(heads: int, levels: int, points: int) -> Tensor:
    """Return offsets (H, L, P, 2): one direction per head, on the edge of a square, times 1 to P."""
    angle = torch.arange(heads) * (2 * math.pi / heads)
    direction = torch.stack([angle.cos(), angle.sin()], dim=-1)
    direction = direction / direction.abs().amax(dim=-1, keepdim=True)
    distance = torch.arange(1, points + 1, dtype=direction.dtype)
    return (direction[:, None, None] * distance[:, None]).expand(heads, levels, points, 2)
