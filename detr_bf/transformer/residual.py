"""Where the norm stands: the only thing pre-norm and post-norm layers disagree about."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Residual(nn.Module):
    """``norm(x + dropout(f(x)))``, or with ``pre_norm`` ``x + dropout(f(norm(x)))``."""

    def __init__(self, dim: int, *, dropout: float = 0.0, pre_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.pre_norm = pre_norm

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(function(self.norm(x)))
        return self.norm(x + self.dropout(function(x)))
