"""Position-wise networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """Linear, ReLU, dropout, linear: (..., C) -> (..., C)."""

    def __init__(self, dim: int, hidden_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.expand = nn.Linear(dim, hidden_dim)
        self.dropout = nn.Dropout(dropout)
        self.contract = nn.Linear(hidden_dim, dim)
        for linear in (self.expand, self.contract):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.dropout(F.relu(self.expand(x))))


class MLP(nn.Module):
    """Linear layers with ReLU between them, of the given widths, the input's first."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)
