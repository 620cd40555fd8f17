"""The training loop.

Its neighbours: ``step`` (one batch on one rank), ``state`` (checkpoints), ``recovery`` (steps that are not finite,
unreadable images), ``metrics`` (records and log lines), ``evaluate`` (the evaluation loop).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from detr_bf.acceleration.allocator import keep_large_blocks_if_possible
from detr_bf.common import distributed
from detr_bf.common.devices import HostCopy
from detr_bf.common.errors import InputError, Interrupted
from detr_bf.common.progress import progress_bar
from detr_bf.common.structures import ClassMap
from detr_bf.data.workers import restart_dead_workers
from detr_bf.engine.checkpoint import Checkpoint, set_rng_state
from detr_bf.engine.evaluate import EvaluationResult, EvaluationStopped
from detr_bf.engine.metrics import BatchLog, MetricsLog, TrainingLog
from detr_bf.engine.optimizer import LearningRate, RunSchedule
from detr_bf.engine.recovery import Recovery, StepStart
from detr_bf.engine.run_folder import RunFolder
from detr_bf.engine.state import AveragedWeights, Progress, TrainingClock, TrainingState, running_statistics
from detr_bf.engine.step import (
    DeferredSignals,
    ReducedFlags,
    TrainingBatch,
    TrainingStep,
    nan_unless_finite,
    reduce_flags,
    sync_gradients,
    wrap_ddp,
)
from detr_bf.losses import LossReport

logger = logging.getLogger(__name__)

SCORE_RAW, SCORE_AVERAGED = "score/raw", "score/averaged"  # names in metrics.jsonl
# Steps after the first one, which is slower; their median time tells how many steps a run will have. The fewer ones are
# those of a trial, and of a run of which a tenth is over with them.
MEASURED_STEPS, LEAST_MEASURED_STEPS = 7, 3


@dataclass(frozen=True)
class TrainSettings:
    """Length of a training run, limits, and intervals."""

    epochs: int  # with ``minutes`` no limit: what is given in epochs is a share of them, and of the time
    max_steps: int | None = None  # optimizer steps
    minutes: float | None = None  # of training; None: ``epochs``
    batch_images: int = 1  # images of a batch of all ranks together
    accumulate: int = 1  # batches of a rank per optimizer step
    clip_norm: float = 0.1  # 0 does not clip
    log_every: int = 20  # steps
    checkpoint_every: int = 1000  # steps
    checkpoint_minutes: float | None = None
    keep_every: int = 0  # epochs
    eval_every: int = 1  # epochs
    patience: int | None = None  # epochs
    ema_decay: float | None = None
    ema_warmup_steps: int = 0
    seed: int = 0  # of the generators, if their saved states cannot be used
    max_skipped: int = 0  # steps that may be skipped because their loss or gradient is not finite
    max_replaced: float = 0.0  # unreadable images of an epoch that others may replace
    unused_parameters: bool = False  # some get no gradient in a step


@dataclass(frozen=True)
class UncheckedStep:
    """An optimizer step whose flags and gradient norm the host has not read."""

    start: StepStart
    batches: Sequence[TrainingBatch]
    logs: Sequence[BatchLog]  # of the batches with a backward pass
    norm: Tensor  # of the gradient
    scale: Tensor  # of the loss, by the gradient scaler
    numbers: HostCopy  # the flags of each batch with a forward pass, then the norm, float64
    statistics: Sequence[Tensor] | None  # of the model's batch norms after the step; None: they are the model's

    @cached_property
    def flags_and_norm(self) -> tuple[list[ReducedFlags], float]:
        """The flags of the batches and the norm; waits for a GPU."""
        *numbers, norm = self.numbers.get().tolist()
        size = len(ReducedFlags._fields)
        return [ReducedFlags(*numbers[at : at + size]) for at in range(0, len(numbers), size)], norm


@dataclass
class Trainer:
    """Trains a model and writes its run folder. Every rank has one; the main rank writes the files.

    On a GPU a step is checked during the next one, whose forward pass is under way by then, so that the GPU does not
    wait for the host: the optimizer itself leaves the weights as they are if the gradient is not finite, and the host
    then skips the step and runs the next one again.

    Args:
        make_batches: (epoch, index of the first batch, phase) -> the remaining batches of that epoch for this rank,
            always in the same order. The phase is the epoch whose augmentation they have.
        evaluate: (model, function that is True once this rank is asked to stop) -> the result.
        metrics: None on all ranks but the main one.
        data: fingerprints of the training and validation data.
        resume_from: go on from this checkpoint.
        new_val: the validation data are not those of ``resume_from``, so that scores cannot be compared.
        batches_per_epoch: of each rank.
        reschedule: steps of a run of ``settings.minutes``, known after its first steps -> its schedule.

    Raises:
        InputError: the run cannot go on from ``resume_from``.
    """

    step: TrainingStep
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    make_batches: Callable[[int, int, int], Iterator[TrainingBatch]]
    batches_per_epoch: int
    evaluate: Callable[[nn.Module, Callable[[], bool]], EvaluationResult]
    settings: TrainSettings
    folder: RunFolder
    metrics: MetricsLog | None
    class_map: ClassMap
    config: dict[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    resume_from: Checkpoint | None = None
    new_val: bool = False
    reschedule: Callable[[int], RunSchedule] | None = None
    result: EvaluationResult | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.model = self.step.model
        self.ema = None
        if settings.ema_decay is not None:
            self.ema = AveragedWeights(self.model, settings.ema_decay, settings.ema_warmup_steps)
        self.scaler = torch.amp.GradScaler(self.step.device.type, enabled=self.step.precision == torch.float16)
        self.state = TrainingState(
            self.model,
            self.ema,
            self.optimizer,
            self.scaler,
            folder=self.folder,
            class_map=self.class_map,
            config=self.config,
            data=self.data,
        )
        if self.resume_from is not None:
            self._resume(self.resume_from)
        self.scores: dict[str, float] = {}  # of the last evaluation, of raw and averaged weights if both are evaluated
        self._evaluated: nn.Module | None = None  # last
        self.clock = TrainingClock(self.progress.seconds)
        self._step_ends: list[float] = []  # seconds after the first steps, until the time of a step is measured
        if distributed.is_main() and (self.resume_from is None or self.new_val):
            self.folder.never_found.unlink(missing_ok=True)  # of other data, or of an earlier run without checkpoints
        self.recovery = Recovery(
            self.step, self.state, max_skipped=settings.max_skipped, max_replaced=settings.max_replaced
        )
        self.log = TrainingLog(self.metrics)
        self.signals = DeferredSignals()
        fused = all(group.get("fused") for group in self.optimizer.param_groups)  # only these read found_inf
        self.checks_later = fused and self.step.device.type == "cuda"
        self._unchecked: UncheckedStep | None = None
        self._flags = ReducedFlags(math.nan, 0.0, 0.0, 0.0, 0.0)  # of the last checked batch
        self._ddp_step: nn.Module = self.step

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Restore the state; with another batch size go on at the next whole step of the epoch.

        Raises:
            InputError: the checkpoint cannot be resumed, or more epochs are done than the settings have.
        """
        self.state.restore(checkpoint, self.settings.seed)
        progress, epochs, minutes = self.progress, self.settings.epochs, self.settings.minutes
        if minutes is None and (progress.epoch, progress.images) > (epochs, 0):
            raise InputError(
                f"{self.folder.last} has trained for {progress.epoch} epochs and {progress.images:,} images, more than "
                f"train.epochs={epochs}: give more epochs, or start a new run with init_from={self.folder.last} and "
                "another output_dir"
            )
        images = self.settings.batch_images * self.settings.accumulate
        steps = math.ceil(progress.images / images)
        if left_out := steps * images - progress.images:
            text = "a step now has %d images: the next step begins after another %d images of this epoch"
            logger.warning(text, images, left_out)
        if steps >= self.steps_per_epoch:
            progress.epoch, steps = progress.epoch + 1, 0
        progress.images = steps * images
        if self.new_val:
            progress.best_score, progress.best_loss = -math.inf, None
            progress.best_step, progress.best_epoch, progress.improved_epoch = 0, 0.0, 0.0
        if minutes is not None:
            text = "resumed at step %d, after %.2f of %g minutes and %.4g epochs"
            logger.info(text, progress.step, progress.seconds / 60, minutes, self.epochs_done)
            if progress.step_seconds:
                self._reschedule()
            return
        place = progress.step, self.total_steps, self.epochs_done, epochs
        logger.info("resumed at step %d of %d, after %.4g of %d epochs", *place)

    def train(self) -> EvaluationResult:
        """Train from the current progress to the end, and return the result of the last evaluation.

        Raises:
            TrainingError: more steps are not finite, or more images unreadable, than the settings allow; files cannot
                be written; loader workers keep dying.
            Interrupted: SIGINT or SIGTERM was received; everything is saved.
        """
        self.model.train()
        self._ddp_step = wrap_ddp(self.step, unused_parameters=self.settings.unused_parameters)
        done = self.progress.step
        with self.signals, progress_bar(total=self.total_steps, initial=done, desc="training", unit="step") as bar:
            if self.progress.step == 0:
                self.save()  # a run that is killed from here on can be resumed
            # a resumed run may have been stopped before this evaluation, or have new validation data
            self._evaluate_if_due(again=self.new_val)
            while not self.finished and not self._out_of_patience():
                for batches in self._rest_of_epoch():
                    self.train_step(batches)
                    if not math.isnan(self._flags.loss):
                        bar.set_postfix_str(self._bar_text(), refresh=False)
                    bar.update()
                    self._after_step()
                self.save()
                self.log.log_epoch(self.epochs_done, self.progress.step, self.settings.accumulate)
                self._evaluate_if_due()
            result = self.result or self._evaluate()
            # the evaluation keeps the outputs of its last call, of which the files of the run are written
            return result if self._evaluated is self.evaluation_model else self._evaluate_model(self.evaluation_model)

    def _bar_text(self) -> str:
        loss, minutes = f"loss {self._flags.loss / distributed.world_size():.3f}", self.settings.minutes
        return loss if minutes is None else f"{loss}, {self.progress.seconds / 60:.1f} of {minutes:g} min"

    def measure_step(self) -> float:
        """Run the first few steps of a trial, and return the median seconds of those after the first one.

        Raises:
            TrainingError: see :meth:`train`.
        """
        self.recovery.trial = True
        self.model.train()
        self._ddp_step = wrap_ddp(self.step, unused_parameters=self.settings.unused_parameters)
        times = [time.perf_counter()]
        while len(times) <= LEAST_MEASURED_STEPS + 1 and not self.finished:
            for batches in islice(self._rest_of_epoch(), LEAST_MEASURED_STEPS + 2 - len(times)):
                self.train_step(batches)
                self._settle()  # waits for a GPU
                times.append(time.perf_counter())
        seconds = [end - start for start, end in pairwise(times)]
        return median(seconds[1:] or seconds)

    def train_step(self, batches: Sequence[TrainingBatch]) -> None:
        """Run one optimizer step on the mean loss of ``batches``; skip it if the loss or gradient is not finite."""
        settings = self.settings
        start = self.recovery.begin_step()
        self.step.begin_step(min(1.0, self.schedule_place / max(1, self.learning_rate.total_steps)))
        self.step.logs_attention = (self.progress.step + 1) % settings.log_every == 0
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * self.learning_rate(self.schedule_place)
        later = self.checks_later and bool(self.optimizer.state)  # torch's fused SGD cannot leave out its first step
        flags, logs = [], []
        norm = torch.zeros((), device=self.step.device)
        scale = self.scaler.scale(torch.ones_like(norm))
        for number, batch in enumerate(batches, start=1):
            with sync_gradients(self._ddp_step, number == len(batches)):
                report = self._ddp_step(batch)
                if self._unchecked is not None and not self._is_finite(self._unchecked):
                    del report  # its graph, before the last step is run again
                    self._settle()
                    set_rng_state(start.rng)
                    start = self.recovery.begin_step()
                    report = self._ddp_step(batch)
                self._settle()
                flags.append(self._flags_of(report, batch))
                if not later and ReducedFlags(*flags[-1]).not_finite:
                    break
                loss = nan_unless_finite(report.total, flags[-1])
                self.scaler.scale(loss / len(batches)).backward()
            logs.append(BatchLog.of(report))
        else:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm or math.inf)
        self._count(len(batches))
        numbers = HostCopy(torch.cat([*flags, norm.double()[None]]))
        statistics = None
        if later and self.ema is not None:
            statistics = [each.clone() for each in running_statistics(self.model)]
        self._unchecked = UncheckedStep(start, batches, logs, norm, scale, numbers, statistics)
        if later:
            self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
            self._update()
        else:
            self._settle(self._update)

    def _count(self, batches: int) -> None:
        """Count an optimizer step of that many batches."""
        progress = self.progress
        progress.step += 1
        progress.images += batches * self.settings.batch_images
        if progress.images >= self.batches_per_epoch * self.settings.batch_images:
            progress.epoch, progress.images = progress.epoch + 1, 0

    def _flags_of(self, report: LossReport, batch: TrainingBatch) -> Tensor:
        minutes = self.settings.checkpoint_minutes or math.inf
        save = distributed.is_main() and self.state.minutes_unsaved >= minutes
        seconds = self.clock.seconds if distributed.is_main() and self.settings.minutes is not None else 0.0
        stop = self._stopping()
        return reduce_flags(report.total, stop=stop, save=save, replaced=len(batch.replaced), seconds=seconds)

    def _update(self) -> None:
        """Update the weights. The scaler, if enabled, skips infinite gradients itself."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _is_finite(self, step: UncheckedStep) -> bool:
        flags, norm = step.flags_and_norm
        return not any(each.not_finite for each in flags) and (self.scaler.is_enabled() or math.isfinite(norm))

    def _settle(self, update: Callable[[], None] | None = None) -> None:
        """Check the last step unless that was done; complete or skip it.

        Args:
            update: called before the step is completed.
        """
        step, self._unchecked = self._unchecked, None
        if step is None:
            return
        flags, _ = step.flags_and_norm
        self._flags = flags[-1]
        self.progress.seconds = max(self.progress.seconds, self._flags.seconds)
        for batch, of_batch in zip(step.batches, flags, strict=False):
            self.recovery.count_unreadable(batch, of_batch)
        if self._is_finite(step):
            if update is not None:
                update()
            if self.ema is not None:
                self.ema.update_parameters(self.model, step.statistics)
            self.log.add_step(step.logs, step.norm)
            return
        bad = next((number for number, each in enumerate(flags, start=1) if each.not_finite), None)
        self.log.add_step(step.logs if bad is None else step.logs[: bad - 1])
        self.recovery.skip_step(step.start, step.batches[:bad], scale=float(step.scale), with_backward=bad is None)

    def _rest_of_epoch(self) -> Iterator[list[TrainingBatch]]:
        """Yield the remaining batches of the current epoch, grouped by optimizer step."""
        epoch, steps_done = divmod(self.schedule_step, self.steps_per_epoch)
        if steps_done == 0:
            self.progress.replaced, self.progress.phase = 0, self._next_phase()
        phase = min(self.progress.phase, self.settings.epochs - 1)  # there may be fewer epochs since it began
        self.step.begin_epoch(phase)
        first = steps_done * self.settings.accumulate
        with self.clock.running():
            batches = restart_dead_workers(lambda start: self.make_batches(epoch, start, phase), first)
            for _ in range(self.steps_per_epoch - steps_done):
                if self.finished:
                    return
                yield list(islice(batches, self.settings.accumulate))

    def _after_step(self) -> None:
        """Log, save and stop where due."""
        flags = self._flags
        if self.settings.minutes is not None and not self.progress.step_seconds:
            self._measure()
        if self.progress.step % self.settings.log_every == 0:
            self._write_window()
            if self.step.device.type == "cpu":
                keep_large_blocks_if_possible(distributed.world_size())
        if flags.stop or flags.save or self.progress.step % self.settings.checkpoint_every == 0:
            self.save()
        if flags.stop:
            self._stop()

    def _measure(self) -> None:
        """Measure the time of a step, once enough are done, and schedule the run by it."""
        progress, minutes = self.progress, self.settings.minutes
        assert minutes is not None
        if progress.seconds > max(self._step_ends, default=0.0):  # a step that is checked later has no time yet
            self._step_ends.append(progress.seconds)
        enough = LEAST_MEASURED_STEPS if progress.seconds >= 60 * minutes / 10 else MEASURED_STEPS
        if len(self._step_ends) > enough:
            seconds = median(end - start for start, end in pairwise(self._step_ends))
            progress.step_seconds, progress.begin = seconds, progress.step - progress.seconds / seconds
            self._reschedule()

    def _reschedule(self) -> None:
        """Take over the schedule of as many steps as fit in the minutes."""
        progress, minutes = self.progress, self.settings.minutes
        assert minutes is not None
        assert self.reschedule is not None
        steps = max(1, round(progress.begin + 60 * minutes / progress.step_seconds))
        text = "train.minutes=%g: %.3g s a step, about %s steps in all"
        logger.info(text, minutes, progress.step_seconds, f"{steps:,}")
        found = self.reschedule(steps)
        self.learning_rate = found.learning_rate
        for group, rate in zip(self.optimizer.param_groups, found.rates, strict=True):
            group["base_lr"] = rate
        if self.ema is not None:
            self.ema.decay, self.ema.warmup_steps = found.ema_decay, found.ema_warmup_steps

    def _evaluate_if_due(self, *, again: bool = False) -> None:
        """Evaluate at the end of every ``eval_every``-th epoch and of the run, and save checkpoints to keep.

        Args:
            again: also if the last evaluation was at this step.
        """
        progress, step, epoch = self.progress, self.progress.step, math.ceil(self.epochs_done)
        finished, evaluated = self.finished, step == progress.evaluated_step
        if step == 0 or (evaluated and not again) or not (finished or progress.images == 0):
            return
        others = []
        if finished or epoch % self.settings.eval_every == 0:
            self.result = self._evaluate()
            self.state.thresholds = self.result.thresholds
            record = {"epoch": epoch, "score": self.result.score, **self.scores, **self.result.metrics}
            self.log.write("val", step, record)
            scores = ", ".join(f"{name.removeprefix('score/')} weights {x:.4f}" for name, x in self.scores.items())
            logger.info("epoch %d, step %d: %s%s", epoch, step, self.result, f" ({scores})" if scores else "")
            if self._is_best(self.result):
                others.append(self.folder.best)
            progress.evaluated_step, progress.evaluated_epoch = step, self.epochs_done
        if self.settings.keep_every and epoch % self.settings.keep_every == 0:
            others.append(self.folder.epoch(epoch))
        self.save(*others)

    def _is_best(self, result: EvaluationResult) -> bool:
        """Return True, and count it, if no checkpoint has a better score, nor as good a one with a lower loss.

        Without losses the later one of two equal scores is the best.
        """
        progress, score, loss = self.progress, result.score, result.metrics.get("loss")
        if not score > -math.inf or score < progress.best_score:  # also NaN
            return False
        if score > progress.best_score:
            progress.improved_epoch = self.epochs_done
        elif loss is not None and progress.best_loss is not None and loss > progress.best_loss:
            return False
        progress.best_score, progress.best_loss = score, loss
        progress.best_step, progress.best_epoch = progress.step, self.epochs_done
        progress.best_is_raw = progress.raw_is_better
        return True

    def _out_of_patience(self) -> bool:
        """Return True if the last ``patience`` epochs brought no better score than one that is not 0."""
        progress, patience = self.progress, self.settings.patience
        if patience is None or progress.best_score in (0, -math.inf):
            return False
        epochs = progress.evaluated_epoch - progress.improved_epoch
        if epochs < patience:
            return False
        logger.info("no better score for %g epochs, train.patience=%d: training ends here", epochs, patience)
        return True

    def _evaluate(self) -> EvaluationResult:
        """Evaluate the weights, and their average if there is one; return the better result.

        The weights that were better in the last evaluation come second.
        """
        if self.ema is None:
            return self._evaluate_model(self.model)
        models = {SCORE_RAW: self.model, SCORE_AVERAGED: self.ema.module}
        names = sorted(models, reverse=bool(self.progress.raw_is_better), key=lambda name: name == SCORE_AVERAGED)
        results = {name: self._evaluate_model(models[name]) for name in names}
        self.scores = {name: result.score for name, result in results.items()}
        raw, averaged = (-math.inf if math.isnan(score := self.scores[name]) else score for name in models)
        self.progress.raw_is_better = int(raw > averaged)
        return results[SCORE_RAW if raw > averaged else SCORE_AVERAGED]

    def _evaluate_model(self, model: nn.Module) -> EvaluationResult:
        self._evaluated = model
        distributed.broadcast_from_main(model.buffers())  # statistics of norms differ between ranks
        try:  # the averaged copy is not compiled
            with torch.compiler.set_stance("default" if self.ema is None else "force_eager"):
                return self.evaluate(model, self._stopping)
        except EvaluationStopped:
            self._stop()
            raise

    def save(self, *others: Path) -> None:
        """Save ``last.pt`` and ``others``, see :meth:`TrainingState.save`, after the records up to here."""
        with self.clock.running(False):
            self._write_window()
            self._flags = self._flags._replace(save=0.0)
            if self.settings.minutes is not None:
                self.progress.seconds = distributed.run_on_main(lambda: self.clock.seconds)
            self.state.save(*others)
        self.log.restart_clock()

    def _write_window(self) -> None:
        self._settle()
        self.log.write_window(self.epochs_done, self.progress, self.optimizer)

    def _stopping(self) -> bool:
        return self.signals.received is not None

    def _stop(self) -> None:
        """Raise :class:`Interrupted` on all ranks; everything must be saved."""
        numbers = distributed.all_gather_object(self.signals.received)
        raise distributed.on_all_ranks(
            Interrupted(
                next(number for number in numbers if number is not None),
                f"stopped at step {self.progress.step}; everything is saved in {self.folder.last}. "
                "Continue with the same command and --resume.",
            )
        )

    @property
    def progress(self) -> Progress:
        """Counters of the run."""
        return self.state.progress

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.batches_per_epoch / self.settings.accumulate)

    @property
    def schedule_step(self) -> int:
        """Optimizer steps that the epochs and images done have with the present batch size."""
        images = self.settings.batch_images * self.settings.accumulate
        return self.progress.epoch * self.steps_per_epoch + self.progress.images // images

    @property
    def schedule_place(self) -> float:
        """Steps done in the schedule of the learning rate; by ``minutes`` those that fit in the time used."""
        timed = self.settings.minutes is not None and self.progress.step_seconds
        return self.progress.timed_step if timed else self.schedule_step

    def _next_phase(self) -> int:
        """Return the epoch that augmentation and batch attention have now: the current one, or by ``minutes``."""
        if self.settings.minutes is None:
            return self.progress.epoch
        share = self.progress.seconds / (60 * self.settings.minutes)
        return min(int(share * self.settings.epochs), self.settings.epochs - 1)

    @property
    def finished(self) -> bool:
        seconds = 60 * (self.settings.minutes or math.inf)
        return self.progress.seconds >= seconds or self.progress.step >= (self.total_steps or math.inf)

    @property
    def total_steps(self) -> int | None:
        """Steps at which the run ends; by ``minutes`` those of ``max_steps``, if any."""
        if self.settings.minutes is not None:
            return self.settings.max_steps
        steps = self.progress.step + self.settings.epochs * self.steps_per_epoch - self.schedule_step
        return min(steps, self.settings.max_steps or steps)

    @property
    def epochs_done(self) -> float:
        return self.schedule_step / self.steps_per_epoch

    @property
    def evaluation_model(self) -> nn.Module:
        """The averaged weights, if there are any and the last evaluation did not find the others better."""
        return self.model if self.ema is None or self.progress.raw_is_better else self.ema.module

    @property
    def epochs_text(self) -> str:
        """The last epoch and the one with the best score, counted from 1, each with its checkpoint."""
        last, best = math.ceil(self.epochs_done), math.ceil(self.progress.best_epoch)
        which = f" with {'raw' if self.progress.best_is_raw else 'averaged'} weights" if self.ema is not None else ""
        best_text = f", best epoch {best} ({self.folder.best.name}){which}" if best else ", no epoch with a score"
        return f"last epoch {last} ({self.folder.last.name}){best_text}"
