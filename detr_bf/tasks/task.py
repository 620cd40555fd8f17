"""What a kind of training is: all that one session does differently from another."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from detr_bf.assembly.acceleration import accelerate
from detr_bf.config import RunConfig
from detr_bf.data.checks.annotations import Report
from detr_bf.engine import Checkpoint, EvaluationResult, RunFolder, Trainer, TrainingStep, build_and_load
from detr_bf.engine.step import Criterion, TrainingBatch
from detr_bf.errors import InputError

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)
Evaluate = Callable[..., EvaluationResult]  # (model) -> what it measured


class Task(ABC, Generic[C]):
    """One run's task.

    Args:
        config: all settings.
    """

    batch_type: ClassVar[type[TrainingBatch]]

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def examine(self) -> Report:
        """What the doctor finds in the data."""

    def check(self) -> None:
        """What can be known of bad input before anything is built; by the main process alone.

        Raises:
            InputError: it found something.
        """
        if not self.config.data.check:
            return
        report = self.examine()
        if report.errors:
            raise InputError(f"the data cannot be trained on\n{report}")
        logger.info("%s", report)

    @abstractmethod
    def build_model(self, num_classes: int) -> nn.Module:
        """The bare model on the CPU, whose weights are still to come from a checkpoint."""

    @abstractmethod
    def build_criterion(self, model: nn.Module) -> Criterion:
        """What ``model`` is trained on."""

    def build_step(
        self,
        weights: Mapping[str, Tensor],
        num_classes: int,
        device: torch.device,
        precision: torch.dtype,
        source: str,
    ) -> TrainingStep:
        """A step in training mode with the ``weights`` that ``source`` holds, which may be NaN or infinite.

        Raises:
            InputError: they are another model's.
        """
        model = build_and_load(lambda: self.build_model(num_classes), weights, source, finite=False)
        accelerate(model, self.config)
        return TrainingStep(model, self.build_criterion(model), device, precision).to(device).train()

    @abstractmethod
    def build_trainer(self, folder: RunFolder, resume_from: Checkpoint | None) -> Trainer:
        """Everything that training needs."""

    @abstractmethod
    def build_evaluation(self, source: Path, folder: RunFolder) -> tuple[nn.Module, Evaluate]:
        """The model of ``source``, a checkpoint of ours or weights, on the device, and what measures it.

        Raises:
            InputError: the weights are another model's.
        """

    @abstractmethod
    def leave(self, folder: RunFolder, evaluate: Any, model: nn.Module) -> None:
        """Write what the last evaluation found in ``model``, beside its numbers, and pictures; by the main process."""
