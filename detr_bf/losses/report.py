"""The report that every criterion returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

STREAM_NAMES = ("clean", "batchformer")
_REPEATED = re.compile(r".*_(\d+|enc)")  # terms of auxiliary layers and of proposals


@dataclass(frozen=True)
class LossReport:
    """The terms of the training loss with their weights, and values that are only logged.

    With two streams ``logged`` holds ``stream/clean`` and ``stream/batchformer``, whose mean is the total.
    """

    losses: dict[str, Tensor]  # scalars, not weighted; auxiliary layers end in _0, _1, ..., proposals in _enc
    weights: dict[str, float]
    logged: dict[str, Tensor] = field(default_factory=dict)  # scalars without gradient, never summed

    def weighted(self) -> dict[str, Tensor]:
        return {name: self.weights[name] * loss for name, loss in self.losses.items()}

    @property
    def term_weights(self) -> dict[str, float]:
        """Weights by term; auxiliary layers and proposals, which have those of the last layer, are left out."""
        return {name: weight for name, weight in self.weights.items() if not _REPEATED.fullmatch(name)}

    def extended(self, losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> LossReport:
        """Add terms that are measured on all rows together: they count alike in the total and in every stream."""
        report = LossReport(self.losses | dict(losses), self.weights | dict(weights), dict(self.logged))
        for name in (f"stream/{stream}" for stream in STREAM_NAMES):
            if name in report.logged and losses:
                added = torch.stack([weights[term] * loss.detach() for term, loss in losses.items()]).sum()
                report.logged[name] = report.logged[name] + added
        return report

    @cached_property
    def total(self) -> Tensor:
        return torch.stack(list(self.weighted().values())).sum()
