"""Base class of tasks: what differs between detection, classification and pre-training runs."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from detr_bf.acceleration.allocator import keep_freed_memory
from detr_bf.assembly.compilation import compile_model
from detr_bf.assembly.data import build_train_transforms
from detr_bf.assembly.training import (
    RUN_STEPS,
    changed_splits,
    check_same_classes,
    initial_classes,
    learning_rate,
    metrics_log,
    precision_of,
    resolved,
    resolved_text,
    seed_per_rank,
    train_settings,
    warn_of_slow_average,
)
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import counted, listed
from detr_bf.config import DetectionConfig, RunConfig, config_to_dict
from detr_bf.config.common import resolved_number
from detr_bf.data.checks.annotations import Report
from detr_bf.engine import Checkpoint, EvaluationResult, RunFolder, Trainer, TrainingStep, build_and_load
from detr_bf.engine.optimizer import RunSchedule
from detr_bf.engine.step import Criterion, TrainingBatch
from detr_bf.interop.classes import rows_by_name
from detr_bf.report import TaskPage
from detr_bf.report.detection import batch_former_source

logger = logging.getLogger(__name__)

MOST_ERROR_PICTURES = 60  # of a sheet: a JPEG file has at most 65,500 lines

C = TypeVar("C", bound=RunConfig)
Evaluate = Callable[..., EvaluationResult]  # (model) -> result
MakeBatches = Callable[..., Iterator[Any]]  # (epoch, first batch, phase) -> the batches of this rank from there on


class Task(ABC, Generic[C]):
    """Data checks, model, trainer, evaluation and outputs of one kind of run."""

    kind: ClassVar[str]  # in messages: "a detector"
    batch_type: ClassVar[type[TrainingBatch]]  # of a captured step
    page: ClassVar[TaskPage]  # of report.html
    deploy_option: ClassVar[str]  # of ``detr-bf convert``, see :meth:`deploy`

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def examine(self) -> Report:
        """Return the problems of the data."""

    def check_settings(self) -> None:
        """Build model, loss, optimizer and transforms without memory for the weights.

        Settings that contradict each other are told in this way before any image is read. Warnings of the parts come
        when they are built for training.

        Raises:
            InputError: there is no such model, loss, optimizer or transform.
        """
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=()):
                model = self.prepare_training(self.build_model(2))
                self.build_criterion(model, (1, 1))
            type(self)(resolved(self.config, RUN_STEPS)).build_optimizer(model)
            if isinstance(self.config, DetectionConfig):
                build_train_transforms(self.config)
        except (NotImplementedError, RuntimeError) as error:  # a part that reads values while it is built
            logger.debug("the model cannot be built without memory: %s", error)
        finally:
            logging.disable(before)

    def check(self) -> Mapping[str, Any] | None:
        """Validate the data before anything is built (rank 0 only), and return their statistics.

        Raises:
            InputError: the data have errors.
        """
        if not self.config.data.check:
            return self.describe_data()
        report = self.examine()
        if report.errors:
            raise InputError("\n".join(filter(None, (f"the data cannot be trained on\n{report}", self.advice(report)))))
        logger.info("%s", report)
        return report.statistics

    def advice(self, report: Report, given: str = "") -> str:
        """Return a sentence about the command that corrects errors of a report; empty if there is none.

        Args:
            given: arguments of ``detr-bf check`` that name the data.
        """
        return ""

    def settings_text(self) -> str:
        """Return sentences about batch attention of a detector, with the file that set it; empty for other tasks."""
        return batch_former_source(self.config) if isinstance(self.config, DetectionConfig) else ""

    def describe_data(self, splits: Sequence[str] = ("train", "val")) -> Mapping[str, Any] | None:
        """Return the statistics of ``splits`` without a check of the images; None if the task has none."""
        return None

    @abstractmethod
    def load_data(self) -> Any:
        """Return the training data, with a ``class_map``."""

    @abstractmethod
    def fingerprints(self, data: Any = None) -> dict[str, dict[str, Any]]:
        """Return ``sha256``, ``images`` and ``objects`` of the splits ``train`` and ``val``.

        Equal hashes stand for equal classes, labels, file names and file sizes.

        Args:
            data: of :meth:`load_data`; with them the hashes are quick and do not cover file sizes.
        """

    @abstractmethod
    def build_model(self, num_classes: int, *, pretrained: bool = False) -> nn.Module:
        """Return the model on the CPU; without ``pretrained`` its weights are to come from a checkpoint."""

    def check_start(self) -> None:
        """Check that the settings give a new run the weights that it needs (InputError: they do not)."""

    @abstractmethod
    def initialize(self, model: nn.Module, classes: ClassMap) -> None:
        """Load ``init_from`` into a new model of these classes, if it is set."""

    def prepare_training(self, model: Any) -> Any:
        """Return the model with what only training has; its first weights are loaded."""
        return model

    def fit_classes(
        self,
        model: nn.Module,
        weights: dict[str, Tensor],
        classes: ClassMap,
        *,
        frozen: bool = False,
        before: ClassMap | None = None,
    ) -> dict[str, Tensor]:
        """Return the weights of ``init_from`` with the rows of ``classes``, matched by name, and log which.

        Weights that do not say their classes are returned as they are.

        Args:
            frozen: the rows are not trained.
            before: classes of the weights; None: those that they say.

        Raises:
            InputError: ``frozen``, and the classes are others.
        """
        source, own = self.config.init_from, model.state_dict()
        assert source is not None, "there are weights"
        before = before or initial_classes(source)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            more = self.build_model(classes.num_classes + 1).state_dict()
        tensors = [name for name, value in more.items() if value.shape != own[name].shape]
        if before is None:
            if any(name in weights and weights[name].shape == own[name].shape for name in tensors):
                text = "%s does not say its classes: its class heads are taken to be of the %d of the data, in order"
                logger.warning(text, source, classes.num_classes)
            return weights
        others = set(before.distinct_names) ^ set(classes.distinct_names)
        if frozen and others:
            raise InputError(
                f"init_from: {source} is a detector of other classes than the data have ({listed(sorted(others))} in "
                "only one of them), and a frozen detector cannot learn them: train it on the classes of the data "
                "first, or set freeze.detector=false"
            )
        weights, text = rows_by_name(weights, own, tensors, before, classes)
        if text:
            logger.info("init_from %s: %s", source, text)
        return weights

    def check_model(self, model: nn.Module, data: Any) -> None:
        """Check that the model can be trained on the data (InputError: it cannot)."""

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
        model = build_and_load(
            lambda: self.prepare_training(self.build_model(num_classes)), weights, source, finite=False
        )
        compile_model(model, self.config)
        return TrainingStep(model, self.build_criterion(model), device, precision).to(device).train()

    def build_trainer(self, folder: RunFolder, resume_from: Checkpoint | None = None) -> Trainer:
        """Return the trainer of a new run, or of one that goes on from ``resume_from``.

        Raises:
            InputError: settings, data and weights do not fit together.
        """
        config, device = self.config, device_of(self.config.device)
        torch.manual_seed(config.seed)  # the same weights on all ranks
        data = self.load_data()
        check_same_classes(data.class_map, resume_from, folder)
        fingerprints = self.fingerprints(data)
        changed = changed_splits(config, fingerprints, resume_from, folder)
        is_new = resume_from is None
        model = self.build_model(data.class_map.num_classes, pretrained=is_new and not config.init_from)
        if is_new:
            self.initialize(model, data.class_map)
        model = self.prepare_training(model)
        self.check_model(model, data)
        compile_model(model, config)
        model.to(device)
        if device.type == "cpu":
            keep_freed_memory()
        if is_new:
            self.fit_to_device(model, data, device)
        criterion = self.build_criterion(model, getattr(data, "class_counts", None))
        seed_per_rank(config)
        make_batches, batches_per_epoch, num_images = self.train_batches(data, device)
        evaluate = self.build_evaluation(data.class_map, folder, data)
        steps, timed = self._scheduled_steps(batches_per_epoch), getattr(config.train, "minutes", None) is not None
        numbers = resolved(config, steps)
        optimizer = type(self)(numbers).build_optimizer(model)
        metrics = metrics_log(config, folder, resume_from, new_val="val" in changed)
        with ExitStack() as undo:
            if metrics is not None:
                undo.push(metrics)  # closes the loggers if the state cannot be restored
            trainer = Trainer(
                step=TrainingStep(model, criterion, device, precision_of(config, device)).to(device),
                optimizer=optimizer,
                learning_rate=learning_rate(numbers, batches_per_epoch, steps, warns=not timed),
                reschedule=partial(self._reschedule, model, batches_per_epoch),
                make_batches=make_batches,
                batches_per_epoch=batches_per_epoch,
                evaluate=evaluate,
                settings=train_settings(numbers, num_images, unused_parameters=self.unused_parameters),
                folder=folder,
                metrics=metrics,
                class_map=data.class_map,
                config=config_to_dict(config),
                data=fingerprints,
                resume_from=resume_from,
                new_val="val" in changed,
            )
            undo.pop_all()
        return trainer

    def _scheduled_steps(self, batches_per_epoch: int) -> int:
        """Return the steps of the schedule, and log what they choose; of a run by time a number for its first steps."""
        train = self.config.train
        if getattr(train, "minutes", None) is not None:
            return RUN_STEPS
        steps = train.epochs * math.ceil(batches_per_epoch / train.accumulate)
        self._log_resolved(steps)
        if not isinstance(self.config, DetectionConfig):  # else the data check says it
            warn_of_slow_average(resolved(self.config, steps), steps)
        return steps

    def _log_resolved(self, steps: int) -> None:
        if text := resolved_text(self.config, steps):
            logger.info("chosen for %s: %s", counted(steps, "step"), text)

    def _reschedule(self, model: nn.Module, batches_per_epoch: int, steps: int) -> RunSchedule:
        """Return the schedule of a run by time, ``train.minutes``, which are expected to be that many steps."""
        numbers = resolved(self.config, steps)
        self._log_resolved(steps)
        warn_of_slow_average(numbers, steps)
        rates = [group["lr"] for group in type(self)(numbers).build_optimizer(model).param_groups]
        average = numbers.train.ema
        rate = learning_rate(numbers, batches_per_epoch, steps)
        return RunSchedule(rate, rates, resolved_number(average.decay), average.warmup_steps)

    @property
    def unused_parameters(self) -> bool:
        """True if some parameters get no gradient in a step, which DistributedDataParallel must know."""
        return False
