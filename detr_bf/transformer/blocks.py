"""Position-wise networks, the residual connection around them, and full precision under autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detr_bf.common.errors import InputError
from detr_bf.ops import library, relu_dropout, residual_dropout

M = TypeVar("M", bound=nn.Module)

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "prelu": nn.PReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


def full_precision(module: nn.Module, x: Tensor) -> Tensor:
    """Return ``module(x)`` in the dtype of the module's parameters, without autocast.

    For boxes and reference points: half precision would shift them by whole pixels.
    """
    with torch.autocast(x.device.type, enabled=False):
        result: Tensor = module(x.to(next(module.parameters()).dtype))
    return result


def fused_dropout(dropout: nn.Dropout, x: Tensor) -> bool:
    """Return True if the compiled dropout is to be used: in training on a CPU, where torch's takes ten times as long.

    On a GPU torch's own dropout is fast.
    """
    active = dropout.training and dropout.p > 0 and x.device.type == "cpu"
    return active and not torch.compiler.is_compiling() and library.compiled(x.device)


class Residual(nn.Module):
    """Residual connection with pre- or post-norm.

    ``norm(x + dropout(f(x)))``, or with ``pre_norm`` ``x + dropout(f(norm(x)))``.
    """

    def __init__(self, dim: int, *, dropout: float = 0.0, pre_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.pre_norm = pre_norm

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """(..., C) -> (..., C)."""
        update = function(self.norm(x) if self.pre_norm else x)
        if fused_dropout(self.dropout, update):
            result = residual_dropout(x, update, self.dropout.p)
        else:
            result = x + self.dropout(update)
        return result if self.pre_norm else self.norm(result)


class FeedForward(nn.Module):
    """Linear, activation, dropout, linear: (..., C) -> (..., C).

    Args:
        activation: a name in ``ACTIVATIONS``; ``prelu`` learns one slope.

    Raises:
        InputError: there is no activation of that name.
    """

    def __init__(self, dim: int, hidden_dim: int, dropout: float = 0.0, *, activation: str = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise InputError(f"activation must be {', '.join(ACTIVATIONS)}; got '{activation}'")
        self.expand = nn.Linear(dim, hidden_dim)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)
        self.contract = nn.Linear(hidden_dim, dim)
        for layer in (self.expand, self.contract):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        if isinstance(self.activation, nn.ReLU) and fused_dropout(self.dropout, hidden):
            return self.contract(relu_dropout(hidden, self.dropout.p))
        if isinstance(self.activation, nn.ReLU) and not (self.training or torch.is_grad_enabled()):
            return self.contract(hidden.relu_())  # no new memory
        return self.contract(self.dropout(self.activation(hidden)))


class MLP(nn.Module):
    """Linear layers with an activation between them; ``widths`` begin with that of the input."""

    def __init__(self, widths: Sequence[int], activation: str = "relu") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def xavier(module: M) -> M:
    """Initialise every matrix of ``module`` with Xavier-uniform, as in DETR's transformer."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return module


@contextmanager
def without_updating_statistics(module: nn.Module) -> Iterator[None]:
    """Leave the running statistics of all batch norms of ``module`` unchanged; in training they normalise as always."""
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm) and norm.training]
    tracked = [norm.track_running_stats for norm in norms]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm, before in zip(norms, tracked, strict=True):
            norm.track_running_stats = before
