"""What every criterion returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

STREAM_NAMES = ("clean", "batchformer")


@dataclass(frozen=True)
class LossReport:
    """What a step is trained on, and what is only looked at."""

    losses: dict[str, Tensor]  # scalars, not weighted; auxiliary layers end in _0, _1, ..., proposals in _enc
    weights: dict[str, float]
    logged: dict[str, Tensor] = field(default_factory=dict)  # scalars without gradient, never summed

    def weighted(self) -> dict[str, Tensor]:
        return {name: self.weights[name] * loss for name, loss in self.losses.items()}

    @cached_property
    def total(self) -> Tensor:
        return torch.stack(list(self.weighted().values())).sum()
