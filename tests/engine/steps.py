"""Training steps for tests: a tiny detector with its batches, and a linear regression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from detr_bf.common.structures import Batch, ClassMap
from detr_bf.engine.step import TrainingStep
from detr_bf.losses import CrossEntropy, HungarianMatcher, LossReport, SetCriterion
from tests.detectors import tiny
from tests.references.examples import random_targets

BATCHES = 5  # per epoch
FEATURES = 3
CLASSES = ClassMap((1,), ("a",), (True,))


def step_of(
    model: nn.Module, precision: torch.dtype = torch.float32, criterion: SetCriterion | None = None
) -> TrainingStep:
    """Build the training step of a detector on the CPU, by default with cross-entropy."""
    classification = CrossEntropy()
    criterion = criterion or SetCriterion(classification, HungarianMatcher(classification))
    return TrainingStep(model, criterion, torch.device("cpu"), precision)


def batches(count: int = 1, *, masks: bool = False) -> list[Batch]:
    """Return batches of two images with three objects and one object, with the names of the images."""
    return [_batch(number, masks) for number in range(count)]


def _batch(number: int, masks: bool) -> Batch:
    targets = random_targets((3, 1), classes=tiny.LOGITS - 1, seed=number)
    named = [
        replace(
            target,
            file_name=f"{number}{index}.png",
            masks=torch.ones(len(target.boxes), *target.size, dtype=torch.bool) if masks else None,
        )
        for index, target in enumerate(targets)
    ]
    return replace(tiny.images(), targets=tuple(named))


@dataclass(frozen=True)
class Examples:
    """Batch of a regression."""

    inputs: Tensor  # (B, FEATURES)
    targets: Tensor  # (B,)
    names: tuple[str, ...]
    replaced: tuple[str, ...] = ()

    def not_finite(self) -> list[str]:
        return [name for name, row in zip(self.names, self.inputs, strict=True) if not row.isfinite().all()]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Examples:
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Examples:
        return cls(**content)

    def fits(self, num_classes: int) -> bool:
        return len(self.inputs) == len(self.targets)


def examples(epoch: int, number: int) -> Examples:
    generator = torch.Generator().manual_seed(100 * epoch + number)
    inputs = torch.randn(4, FEATURES, generator=generator)
    return Examples(inputs, inputs.sum(1) + 1, tuple(f"{epoch}-{number}-{row}" for row in range(4)))


def squared_error(outputs: Tensor, targets: Tensor) -> LossReport:
    return LossReport({"loss_mse": (outputs[:, 0] - targets).square().mean()}, {"loss_mse": 2.0})


def regression() -> nn.Module:
    """Return a model with fixed weights, without a change of torch's generator."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(0.2), nn.Linear(4, 1))


def spoilt(epoch: int, number: int) -> Examples:
    """Epochs whose second batch holds infinity."""
    batch = examples(epoch, number)
    return replace(batch, inputs=batch.inputs / 0) if number == 1 else batch
