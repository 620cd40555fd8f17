"""State of a running training: progress, averaged weights, and how a checkpoint saves and restores it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from detr_bf.common import distributed
from detr_bf.common.errors import InputError, TrainingError
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import listed
from detr_bf.data.batches import derive_seed
from detr_bf.engine.checkpoint import Checkpoint, load_strict, restore_rng, rng_state
from detr_bf.engine.optimizer import load_optimizer
from detr_bf.engine.run_folder import RunFolder
from detr_bf.evaluation import ScoreThresholds

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Counters of a run, saved in every checkpoint.

    The place in the run is counted in epochs and images, which mean the same after a change of the batch size.
    """

    step: int = 0  # optimizer steps done
    epoch: int = 0  # whole epochs done
    images: int = 0  # images of the current epoch that all ranks have seen
    evaluated_step: int = 0  # the step of the last evaluation
    evaluated_epoch: float = 0.0  # epochs done at that step
    best_score: float = -math.inf
    best_loss: float | None = None  # validation loss of the best checkpoint
    best_step: int = 0  # the step of the best checkpoint; 0: no evaluation has a score
    best_epoch: float = 0.0  # epochs done at that step
    improved_epoch: float = 0.0  # epochs done at the first evaluation with the best score
    raw_is_better: int = 0  # 1: than the averaged weights, in the last evaluation
    best_is_raw: int = 0  # 1: the best checkpoint is for its weights, not for their average
    skipped: int = 0  # steps skipped because they were not finite
    replaced: int = 0  # unreadable images of this epoch
    phase: int = 0  # the epoch whose augmentation and batch attention this epoch has, see Trainer
    seconds: float = 0.0  # of training by train.minutes, see TrainingClock; 0 without
    step_seconds: float = 0.0  # of the first steps by train.minutes; 0: not measured
    begin: float = 0.0  # step at 0 seconds if all steps had taken step_seconds; below 0 after a slow start

    @property
    def timed_step(self) -> float:
        """Steps that fit in the time used; by train.minutes the schedule goes by them, not by the steps done."""
        return self.begin + self.seconds / self.step_seconds


class TrainingClock:
    """Seconds of training steps and their data loading, without evaluations and checkpoints."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since = seconds, math.nan  # NaN: it stands still

    @property
    def seconds(self) -> float:
        return self._seconds if math.isnan(self._since) else self._seconds + time.monotonic() - self._since

    @contextmanager
    def running(self, enabled: bool = True) -> Iterator[None]:
        """Let the clock run within the block, or stand still if not ``enabled``; then go on as before."""
        before = not math.isnan(self._since)
        self._set(enabled)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, running: bool) -> None:
        self._seconds, self._since = self.seconds, time.monotonic() if running else math.nan


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances of the batch norms of a model."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    statistics = (statistic for norm in norms for statistic in (norm.running_mean, norm.running_var))
    return [statistic for statistic in statistics if statistic is not None]


class AveragedWeights(AveragedModel):
    """Exponential moving average of a model's parameters and of the running statistics of its batch norms.

    The statistics belong to the weights they were measured with; torch would average all buffers or none. Other buffers
    are copied.

    Args:
        decay: share of the old average kept at each step.
        warmup_steps: W > 0: step n keeps ``decay * (1 - exp(-n / W))``, as in the released code of RT-DETR; 0: always
            ``decay``.
    """

    def __init__(self, model: nn.Module, decay: float, warmup_steps: int = 0) -> None:
        super().__init__(model)
        self.decay, self.warmup_steps = decay, warmup_steps

    @torch.no_grad()
    def update_parameters(self, model: nn.Module, statistics: Sequence[Tensor] | None = None) -> None:
        """Move the average towards ``model``; the first call copies it.

        Args:
            statistics: :func:`running_statistics` that belong to the weights; None: those of ``model``.
        """
        decay = self.decay
        if self.warmup_steps:
            decay *= 1 - math.exp(-(int(self.n_averaged) + 1) / self.warmup_steps)
        averaged_statistics = running_statistics(self.module)
        averages = [*self.module.parameters(), *averaged_statistics]
        values = [*model.parameters(), *(running_statistics(model) if statistics is None else statistics)]
        averaged = {id(statistic) for statistic in averaged_statistics}
        for average, value in zip(self.module.buffers(), model.buffers(), strict=True):
            if id(average) not in averaged:
                average.copy_(value)
        if self.n_averaged:  # on the CPU
            torch._foreach_lerp_(averages, values, 1 - decay)
        else:
            torch._foreach_copy_(averages, values)
        self.n_averaged += 1


class TrainingState:
    """Model, averaged weights, optimizer, gradient scaler and progress of a run, saved to its folder.

    The learning rate and the order of the data follow from ``progress``.

    Args:
        ema: None without averaged weights.
        class_map, config: stored with the weights, to use them.
        data: fingerprints of the training and validation data, stored to find changes of the data.
    """

    def __init__(
        self,
        model: nn.Module,
        ema: AveragedWeights | None,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        *,
        folder: RunFolder,
        class_map: ClassMap,
        config: dict[str, Any],
        data: Mapping[str, Any],
    ) -> None:
        self.model, self.ema, self.optimizer, self.scaler = model, ema, optimizer, scaler
        self.folder, self.class_map, self.config, self.data = folder, class_map, config, data
        self.progress = Progress()
        self.thresholds: ScoreThresholds | None = None  # of the last evaluation
        self._saved: Progress | None = None
        self._saved_at = time.monotonic()

    @property
    def minutes_unsaved(self) -> float:
        """Minutes since the last checkpoint, or since the start."""
        return (time.monotonic() - self._saved_at) / 60

    def save(self, *others: Path) -> None:
        """Write ``others`` and then ``last.pt`` with the same content; a collective.

        Nothing is written if ``last.pt`` holds this progress already and there are no others. ``last.pt`` comes last:
        a run killed in between repeats the steps that led to the others.
        """
        if self._saved == self.progress and not others:
            return
        training = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "progress": asdict(self.progress),
            "data": dict(self.data),
            "rng": distributed.gather_to_main(rng_state()),  # generators of every rank
            "averaged": 0 if self.ema is None else int(self.ema.n_averaged),
        }
        distributed.run_on_main(lambda: self._write(training, others))
        self._saved = replace(self.progress)
        self._saved_at = time.monotonic()

    def _write(self, training: dict[str, Any], others: Sequence[Path]) -> None:
        checkpoint = Checkpoint(
            model=self.model.state_dict(),
            class_map=self.class_map.to_dict(),
            config=self.config,
            ema=None if self.ema is None else self.ema.module.state_dict(),
            training=training,
            thresholds=None
            if self.thresholds is None
            else {"overall": self.thresholds.overall, "by_class": list(self.thresholds.by_class)},
        )
        try:
            for path in others:
                checkpoint.save(path)
            checkpoint.save(self.folder.last, previous=self.folder.previous)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter
            advice = (
                "The checkpoint of an earlier step is there: free some space, then run the same command with --resume"
                if self.folder.holds_a_run()
                else "No checkpoint was written before it: free some space, then run the same command again"
            )
            raise TrainingError(
                f"the checkpoint of step {self.progress.step} cannot be written to {self.folder.path} ({error}). "
                + advice
            ) from error

    def restore(self, checkpoint: Checkpoint, seed: int) -> None:
        """Load ``checkpoint``, read from ``last.pt``.

        Args:
            seed: of the run; seeds the generators if the run had another number of ranks.

        Raises:
            InputError: the checkpoint has no training state, or one of another model, optimizer or version.
        """
        source = str(self.folder.last)
        state = checkpoint.state_to_resume(source)
        load_strict(self.model, checkpoint.model, source)
        if self.ema is not None:
            load_strict(self.ema.module, checkpoint.model if checkpoint.ema is None else checkpoint.ema, source)
            self.ema.n_averaged.fill_(state["averaged"])
        load_optimizer(self.optimizer, state["optimizer"], source)
        try:
            if self.scaler.is_enabled() and state["scaler"]:  # empty if the run was not in fp16 before
                self.scaler.load_state_dict(state["scaler"])
            missing = {each.name for each in fields(Progress)} - set(state["progress"])
            if missing:
                raise TypeError(f"progress lacks {listed(sorted(missing))}")
            self.progress = Progress(**state["progress"])
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{source}: its training state is of another version or damaged ({error}): start a new run with "
                f"init_from={source} and another output_dir"
            ) from error
        self.thresholds = checkpoint.score_thresholds
        if not restore_rng(state["rng"], derive_seed(seed, self.progress.step, distributed.rank())):
            logger.warning(
                "the checkpoint is of another number of ranks: random numbers differ from those of an uninterrupted run"
            )
