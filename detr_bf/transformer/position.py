"""Position encodings of a feature map (Carion et al. 2020, arXiv 2005.12872, appendix A.4).

Shape legend: B images, h x w cells, C channels, the first half for y, the second for x (the learned form: x first).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from detr_bf.common.errors import InputError


def sine_position(padding_mask: Tensor, dim: int, *, temperature: float = 10000.0, offset: float = 0.0) -> Tensor:
    """Return the fixed encoding (B, h * w, dim), float32, of the cells of ``padding_mask`` (B, h, w), True = padding.

    Coordinates run from 1 / length to 1 over the unpadded part of each image, times 2 pi; sine and cosine alternate.
    ``offset`` is added to the cell number before the division: -0.5 gives the cell's centre (Deformable DETR).
    """
    valid = (~padding_mask).float()
    halves = []
    for axis in (1, 2):
        coordinate = valid.cumsum(axis)
        last = coordinate.narrow(axis, coordinate.shape[axis] - 1, 1)
        halves.append(_sines((coordinate + offset) / (last + 1e-6) * 2 * math.pi, dim // 2, temperature))
    return torch.cat(halves, dim=-1).flatten(1, 2)


def sine_of_coordinates(coordinates: Tensor, dim: int, *, temperature: float = 10000.0) -> Tensor:
    """Encode coordinates (..., N) in [0, 1] with ``dim`` sines and cosines each -> (..., N * dim)."""
    return _sines(coordinates * 2 * math.pi, dim, temperature).flatten(-2)


def _sines(angle: Tensor, dim: int, temperature: float) -> Tensor:
    """(...) -> (..., dim): alternating sines and cosines, wavelengths from 2 pi to temperature x 2 pi."""
    exponent = torch.arange(dim, device=angle.device).div(2, rounding_mode="floor") * 2 / dim
    phase = angle[..., None] / temperature**exponent
    return torch.stack([phase[..., 0::2].sin(), phase[..., 1::2].cos()], dim=-1).flatten(-2)


class SinePosition(nn.Module):
    """:func:`sine_position` as a module."""

    def __init__(self, dim: int, *, temperature: float = 10000.0, offset: float = 0.0) -> None:
        super().__init__()
        if dim % 4:
            raise InputError(f"dim={dim} must be divisible by 4 for the sine position encoding")
        self.dim = dim
        self.temperature = temperature
        self.offset = offset

    def forward(self, padding_mask: Tensor) -> Tensor:
        """(B, h, w) bool -> (B, h * w, C)."""
        return sine_position(padding_mask, self.dim, temperature=self.temperature, offset=self.offset)


class LearnedPosition(nn.Module):
    """One learned vector for each column and each row, up to ``length`` each."""

    def __init__(self, dim: int, *, length: int = 50) -> None:
        super().__init__()
        if dim % 2:
            raise InputError(f"dim={dim} must be even for the learned position encoding")
        self.column = nn.Embedding(length, dim // 2)
        self.row = nn.Embedding(length, dim // 2)
        for embedding in (self.column, self.row):
            nn.init.uniform_(embedding.weight)

    def forward(self, padding_mask: Tensor) -> Tensor:
        """(B, h, w) bool -> (B, h * w, C), the same for every image.

        Raises:
            InputError: the map has more than ``length`` rows or columns.
        """
        batch, height, width = padding_mask.shape
        length = self.row.num_embeddings
        if max(height, width) > length:
            raise InputError(
                f"the learned position encoding holds {length} rows and columns, the feature map has {height} x "
                f"{width}: use smaller images or position_encoding=sine"
            )
        x = self.column.weight[:width].expand(height, -1, -1)
        y = self.row.weight[:height, None].expand(-1, width, -1)
        return torch.cat([x, y], dim=-1).flatten(0, 1).expand(batch, -1, -1)
