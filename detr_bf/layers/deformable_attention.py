"""Deformable attention (Zhu et al. 2021, arXiv 2010.04159, section 4.1).

Shape legend: R rows, Q queries, S tokens of all levels, C channels, H heads, L levels, P points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from detr_bf.layers.attention import check_heads
from detr_bf.ops import ms_deform_attn


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
        found = ms_deform_attn(
            value.unflatten(-1, (self.heads, -1)),
            spatial_shapes,
            None,
            self._locations(reference, offsets.to(reference.dtype), spatial_shapes),
            weights.unflatten(-1, (self.levels, self.points)),
        )
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
