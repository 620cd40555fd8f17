"""Base class of tasks: what differs between detection, classification and masked autoencoding runs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from detr_bf.assembly.model import accelerate, device_of
from detr_bf.assembly.training import (
    check_same_classes,
    learning_rate,
    metrics_log,
    precision_of,
    seed_per_rank,
    train_settings,
)
from detr_bf.config import RunConfig, config_to_dict
from detr_bf.data.checks.annotations import Report
from detr_bf.engine import Checkpoint, EvaluationResult, RunFolder, Trainer, TrainingStep, build_and_load
from detr_bf.engine.step import Criterion, TrainingBatch
from detr_bf.errors import InputError
from detr_bf.malloc import keep_freed_memory
from detr_bf.report import TaskPage
from detr_bf.structures import ClassMap

logger = logging.getLogger(__name__)

MOST_ERROR_PICTURES = 60  # of a sheet: a JPEG file has at most 65,500 lines

C = TypeVar("C", bound=RunConfig)
Evaluate = Callable[..., EvaluationResult]  # (model) -> result
MakeBatches = Callable[[int, int], Iterator[Any]]  # (epoch, first batch) -> the batches of this rank from there on


class Task(ABC, Generic[C]):
    """Data checks, model, trainer, evaluation and outputs of one kind of run.

    Args:
        config: all settings.
    """

    kind: ClassVar[str]  # in messages: "a detector"
    batch_type: ClassVar[type[TrainingBatch]]  # of a captured step
    page: ClassVar[TaskPage]  # of report.html
    deploy_option: ClassVar[str]  # of ``detr-bf convert``, see :meth:`deploy`

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def examine(self) -> Report:
        """Return the problems of the data."""

    def check(self) -> Mapping[str, Any] | None:
        """Validate the data before anything is built (rank 0 only), and return their statistics.

        Raises:
            InputError: the data have errors.
        """
        if not self.config.data.check:
            return self.describe_data()
        report = self.examine()
        if report.errors:
            raise InputError(f"the data cannot be trained on\n{report}")
        logger.info("%s", report)
        return report.statistics

    def describe_data(self, splits: Sequence[str] = ("train", "val")) -> Mapping[str, Any] | None:
        """Return the statistics of ``splits`` without a check of the images; None if the task has none."""
        return None

    @abstractmethod
    def load_data(self) -> Any:
        """Return the training data, with a ``class_map``."""

    @abstractmethod
    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Return ``sha256``, ``images`` and ``objects`` of the splits ``train`` and ``val``.

        Equal hashes stand for equal classes, labels, file names and file sizes.
        """

    @abstractmethod
    def build_model(self, num_classes: int, *, pretrained: bool = False) -> nn.Module:
        """Return the model on the CPU; without ``pretrained`` its weights are to come from a checkpoint."""

    @abstractmethod
    def initialize(self, model: nn.Module) -> None:
        """Load ``init_from`` into a new model, if it is set."""

    def check_model(self, model: nn.Module, data: Any) -> None:
        """Check that the model can be trained on the data.

        Raises:
            InputError: it cannot.
        """

    def adopt_settings(self, checkpoint: Checkpoint) -> None:
        """Take over the settings that the run chose by itself when it started (in-place)."""

    def fit_to_device(self, model: nn.Module, data: Any, device: torch.device) -> None:
        """Choose the settings of a new run that depend on the device (in-place)."""

    @abstractmethod
    def build_criterion(self, model: nn.Module, class_counts: Sequence[int] | None = None) -> Criterion:
        """Return the training loss of the model; ``class_counts`` are read from the data if needed and not given."""

    @abstractmethod
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the model's parameters."""

    @abstractmethod
    def train_batches(self, data: Any, device: torch.device) -> tuple[MakeBatches, int, int]:
        """Return the batches of this rank, their number in an epoch, and the number of images in an epoch."""

    @abstractmethod
    def build_evaluation(self, class_map: ClassMap, folder: RunFolder, data: Any = None) -> Evaluate:
        """Return the evaluation on the validation split; ``data`` of :meth:`load_data` are reused if given."""

    @abstractmethod
    def load_evaluated(self, source: Path, checkpoint: Checkpoint | None = None) -> tuple[nn.Module, ClassMap]:
        """Return the model of ``source``, a checkpoint of ours or foreign weights, without training-only modules.

        ``checkpoint`` is the content of a file of another form; only detectors have such files.

        Raises:
            InputError: the weights are another model's.
        """

    @abstractmethod
    def write_outputs(self, folder: RunFolder, evaluate: Any, model: nn.Module) -> None:
        """Write the result files and pictures of the last evaluation (rank 0 only)."""

    @abstractmethod
    def predictor(self, checkpoint: Checkpoint, source: Path) -> Any:
        """Return the trained model of a checkpoint, ready for images.

        Raises:
            InputError: the weights are another model's, or such a model predicts nothing.
        """

    @abstractmethod
    def deploy(self, checkpoint: Checkpoint, source: Path, target: Path) -> str:
        """Write the weights without what only training needs, and return a sentence about it.

        Raises:
            InputError: the checkpoint does not allow it, or the outputs would differ.
        """

    def build_step(
        self, weights: Mapping[str, Tensor], num_classes: int, device: torch.device, precision: torch.dtype, source: str
    ) -> TrainingStep:
        """Return a training step with the ``weights`` of ``source``, which may be NaN or infinite.

        Raises:
            InputError: the weights are another model's.
        """
        model = build_and_load(lambda: self.build_model(num_classes), weights, source, finite=False)
        accelerate(model, self.config)
        return TrainingStep(model, self.build_criterion(model), device, precision).to(device).train()

    def build_trainer(self, folder: RunFolder, resume_from: Checkpoint | None = None) -> Trainer:
        """Return the trainer of a new run, or of one that goes on from ``resume_from``.

        Raises:
            InputError: settings, data and weights do not fit together.
        """
        config, device = self.config, device_of(self.config)
        torch.manual_seed(config.seed)  # the same weights on all ranks
        data = self.load_data()
        check_same_classes(data.class_map, resume_from, folder)
        is_new = resume_from is None
        model = self.build_model(data.class_map.num_classes, pretrained=is_new and not config.init_from)
        if is_new:
            self.initialize(model)
        self.check_model(model, data)
        accelerate(model, config)
        model.to(device)
        if device.type == "cpu":
            keep_freed_memory()
        if is_new:
            self.fit_to_device(model, data, device)
        criterion = self.build_criterion(model, getattr(data, "class_counts", None))
        seed_per_rank(config)
        make_batches, batches_per_epoch, num_images = self.train_batches(data, device)
        evaluate = self.build_evaluation(data.class_map, folder, data)
        optimizer = self.build_optimizer(model)
        metrics = metrics_log(config, folder, resume_from)
        with ExitStack() as undo:
            if metrics is not None:
                undo.push(metrics)  # closes the loggers if the state cannot be restored
            trainer = Trainer(
                step=TrainingStep(model, criterion, device, precision_of(config, device)).to(device),
                optimizer=optimizer,
                learning_rate=learning_rate(config, batches_per_epoch),
                make_batches=make_batches,
                batches_per_epoch=batches_per_epoch,
                evaluate=evaluate,
                settings=train_settings(config, num_images, unused_parameters=self.unused_parameters),
                folder=folder,
                metrics=metrics,
                class_map=data.class_map,
                config=config_to_dict(config),
                resume_from=resume_from,
            )
            undo.pop_all()
        return trainer

    @property
    def unused_parameters(self) -> bool:
        """True if some parameters get no gradient in a step, which DistributedDataParallel must know."""
        return False
