"""A step as the trainer takes it, and batches with targets."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from detr_bf.engine.step import TrainingStep
from detr_bf.losses import CrossEntropy, HungarianMatcher, SetCriterion
from detr_bf.structures import Batch
from tests.detectors import tiny
from tests.references.examples import random_targets


def step_of(
    model: nn.Module, precision: torch.dtype = torch.float32, criterion: SetCriterion | None = None
) -> TrainingStep:
    """The step of a detector on the CPU, by default with cross-entropy."""
    classification = CrossEntropy()
    criterion = criterion or SetCriterion(classification, HungarianMatcher(classification))
    return TrainingStep(model, criterion, torch.device("cpu"), precision)


def batches(count: int = 1, *, masks: bool = False) -> list[Batch]:
    """Batches of two images, each image with its name, of three and one objects."""
    return [_batch(number, masks) for number in range(count)]


def _batch(number: int, masks: bool) -> Batch:
    targets = random_targets((3, 1), classes=tiny.LOGITS - 1, seed=number)
    named = [
        replace(
            target,
            file_name=f"{number}{place}.png",
            masks=torch.ones(len(target.boxes), *target.size, dtype=torch.bool) if masks else None,
        )
        for place, target in enumerate(targets)
    ]
    return replace(tiny.images(), targets=tuple(named))
