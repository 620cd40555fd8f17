"""Multi-head attention and deformable attention.

Shape legend: R rows, Q queries, S keys or tokens of all levels, C channels, K channels of queries and keys, H heads,
L levels, P points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.common.devices import tensor_on
from detr_bf.common.errors import InputError
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

    Args:
        points: number for all levels, or one for each level (RT-DETRv2, arXiv 2407.17140, section 3). A sequence adds
            the buffer ``scale``, as in its checkpoints: the inverse of the number of points of the level of each point.
        discrete: read the cell of each point instead of interpolating (:func:`nearest_cells`); the sampling offsets
            get no gradient then and are frozen.
        released_cells: with ``discrete``, on maps that are not square, the cells of RT-DETRv2's released code.
        project: transform values and result with a linear layer each; not in D-FINE.
    """

    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        levels: int,
        points: int | Sequence[int],
        discrete: bool = False,
        released_cells: bool = False,
        project: bool = True,
    ) -> None:
        super().__init__()
        check_heads(dim, heads)
        per_level = [points] * levels if isinstance(points, int) else list(points)
        if len(per_level) != levels or min(per_level) < 1:
            raise InputError(f"points={points}: give one number of 1 or more, or one for each of the {levels} levels")
        self.heads, self.levels, self.points = heads, levels, max(per_level)
        self.per_level = None if min(per_level) == max(per_level) else tuple(per_level)
        scale = [1 / count for count in per_level for _ in range(count)]
        self.register_buffer("scale", None if isinstance(points, int) else torch.tensor(scale))
        self.discrete, self.released_cells = discrete, released_cells
        self.sampling_offsets = nn.Linear(dim, heads * sum(per_level) * 2)
        self.attention_weights = nn.Linear(dim, heads * sum(per_level))
        self.value: nn.Module = nn.Linear(dim, dim) if project else nn.Identity()
        self.out: nn.Module = nn.Linear(dim, dim) if project else nn.Identity()
        for projection in (self.sampling_offsets, self.attention_weights):
            nn.init.zeros_(projection.weight)
            nn.init.zeros_(projection.bias)
        for projected in (self.value, self.out):
            if isinstance(projected, nn.Linear):
                nn.init.xavier_uniform_(projected.weight)
                nn.init.zeros_(projected.bias)
        grid = initial_offsets(heads, levels, self.points)
        kept = [grid[:, level, :count] for level, count in enumerate(per_level)]
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(torch.cat(kept, dim=1).flatten())
        self.sampling_offsets.requires_grad_(not discrete)

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
            fill = value.masked_fill if value is tokens else value.masked_fill_  # in-place: no copy of a large map
            value = fill(padding_mask[..., None], 0.0)
        weights = self.attention_weights(query).unflatten(-1, (self.heads, -1)).softmax(-1)
        weights = self._by_level(weights[..., None]).squeeze(-1)
        offsets = self._by_level(self.sampling_offsets(query).unflatten(-1, (self.heads, -1, 2)))
        points = self._locations(reference, offsets.to(reference.dtype), spatial_shapes)
        if _records is not None:
            _records.append(AttentionRecord(weights.detach(), points.detach()))
        value = value.unflatten(-1, (self.heads, -1))
        if self.discrete:
            cells = nearest_cells(points, spatial_shapes, released=self.released_cells)
            return self.out(gather_cells(value, cells, weights))
        return self.out(ms_deform_attn(value, spatial_shapes, None, points, weights))

    def _by_level(self, x: Tensor) -> Tensor:
        """Divide (R, Q, H, all points, N) into (R, Q, H, L, P, N); levels with fewer than P points end in zeros."""
        if self.per_level is None:
            return x.unflatten(3, (self.levels, self.points))
        parts = x.split(self.per_level, dim=3)
        return torch.stack([F.pad(part, (0, 0, 0, self.points - part.shape[3])) for part in parts], dim=3)

    def _locations(self, reference: Tensor, offsets: Tensor, spatial_shapes: Sequence[tuple[int, int]]) -> Tensor:
        """Return sampling points for offsets (R, Q, H, L, P, 2), in cells for points and in size / 2P for boxes."""
        centre, steps = self._spread(reference[..., :2]), offsets.flatten(3)
        if reference.shape[-1] == 2:
            sizes = [(width, height) for height, width in spatial_shapes]
            size = tensor_on(offsets.device, sizes, offsets.dtype)
            located = centre + steps / self._spread(size[None, None])
        else:
            if self.scale is None:
                steps = steps / self.points
            else:
                scale = self._by_level(self.scale.to(offsets.dtype)[None, None, None, :, None])
                steps = steps * scale.expand(-1, -1, -1, -1, -1, 2).flatten(3)
            located = centre + steps * self._spread(reference[..., 2:] * 0.5)
        return located.unflatten(-1, (self.levels, self.points, 2))

    def _spread(self, x: Tensor) -> Tensor:
        """Repeat (R, Q, L, 2) for the points of a level -> (R, Q, 1, L * P * 2), which torch adds in long rows."""
        return x[..., None, :].expand(-1, -1, -1, self.points, -1).flatten(2)[:, :, None]


def nearest_cells(points: Tensor, spatial_shapes: Sequence[tuple[int, int]], *, released: bool = False) -> Tensor:
    """Return the index (R, Q, H, L, P) int64, among all tokens, of the cell at each point (R, Q, H, L, P, 2).

    RT-DETRv2's discrete sampling (Lv et al. 2024, arXiv 2407.17140, section 3) takes cell ``x * width + 0.5``, rounded
    down, of points as fractions of the level: half a cell right of the point's own cell. Points beyond the last cell
    take it. With ``released`` the last column is that of a square map, as in the authors' code, which limits both
    coordinates by the height; a column beyond the width is then limited by the width, where their code fails.
    """
    heights, widths = (
        tensor_on(points.device, sizes, points.dtype)[:, None] for sizes in zip(*spatial_shapes, strict=True)
    )
    columns, rows = ((points[..., axis] * size + 0.5).long() for axis, size in enumerate((widths, heights)))
    last_row, last_column = heights.long() - 1, widths.long() - 1
    if released:
        last_column = torch.minimum(last_column, last_row)
    cells = [height * width for height, width in spatial_shapes]
    first = tensor_on(points.device, [0, *accumulate(cells[:-1])])[:, None]
    columns, rows = columns.clamp(min=0).minimum(last_column), rows.clamp(min=0).minimum(last_row)
    return first + rows * widths.long() + columns


def gather_cells(value: Tensor, cells: Tensor, weights: Tensor) -> Tensor:
    """Sum the values (R, S, H, D) of ``cells`` (R, Q, H, L, P) with ``weights`` of the same shape -> (R, Q, H x D)."""
    queries = cells.shape[1]
    index = cells.flatten(3).transpose(1, 2).flatten(2)  # (R, H, Q x points)
    index = index[..., None].expand(-1, -1, -1, value.shape[-1])
    found = value.transpose(1, 2).gather(2, index).unflatten(2, (queries, -1))  # (R, H, Q, points, D)
    weighted = found * weights.to(value.dtype).flatten(3).transpose(1, 2)[..., None]
    return weighted.sum(3).transpose(1, 2).flatten(2)


def initial_offsets(heads: int, levels: int, points: int) -> Tensor:
    """Return offsets (H, L, P, 2): one direction per head, on the edge of a square, times 1 to P."""
    angle = torch.arange(heads) * (2 * math.pi / heads)
    direction = torch.stack([angle.cos(), angle.sin()], dim=-1)
    direction = direction / direction.abs().amax(dim=-1, keepdim=True)
    distance = torch.arange(1, points + 1, dtype=direction.dtype)
    return (direction[:, None, None] * distance[:, None]).expand(heads, levels, points, 2)
