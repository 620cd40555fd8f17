"""The training loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm import tqdm

from detr_bf import distributed
from detr_bf.data.loader import steady
from detr_bf.data.sample_key import derive_seed
from detr_bf.engine.average import AveragedWeights
from detr_bf.engine.capture import capture_step, told_together
from detr_bf.engine.checkpoint import Checkpoint, load_strict, restore_rng, rng_state, training_state
from detr_bf.engine.evaluate import EvaluationStopped, Measured
from detr_bf.engine.interrupt import InterruptWatch
from detr_bf.engine.metrics import EpochMeans, Means, MetricsLog, training_line
from detr_bf.engine.optimizer import LearningRate, load_optimizer
from detr_bf.engine.run_folder import RunFolder
from detr_bf.engine.step import ReducedFlags, TrainingBatch, TrainingStep, reduce_flags, sync_gradients, wrap_ddp
from detr_bf.errors import InputError, Interrupted, TrainingError
from detr_bf.losses import LossReport
from detr_bf.progress import progress_bar
from detr_bf.structures import ClassMap

logger = logging.getLogger(__name__)

CAPTURES = 3  # files of steps left out that a run keeps at most: each holds all weights


@dataclass(frozen=True)
class TrainSettings:
    """How long, how exact, how often."""

    epochs: int
    max_steps: int | None = None  # optimiser steps
    accumulate: int = 1  # batches of a process per optimiser step
    clip_norm: float = 0.1  # 0 does not clip
    log_every: int = 20  # steps
    checkpoint_every: int = 1000  # steps
    checkpoint_minutes: float | None = None
    keep_every: int = 0  # epochs
    eval_every: int = 1  # epochs
    ema_decay: float | None = None
    seed: int = 0  # of generators whose saved state cannot be used
    max_skipped: int = 0  # steps whose loss or gradient is not finite that may be left out
    max_replaced: float = 0.0  # images of an epoch that others may replace because they cannot be read
    unused_parameters: bool = False  # some get no gradient in a step


@dataclass
class Progress:
    """Where training stands; part of every checkpoint."""

    step: int = 0  # optimiser steps done
    evaluated_step: int = 0  # the step of the last evaluation
    best_score: float = -math.inf
    best_step: int = 0  # the step of the evaluation with the best score; 0: none has a score
    skipped: int = 0  # steps left out
    replaced: int = 0  # images of this epoch that could not be read


@dataclass
class Trainer:
    """Trains a model and keeps its run folder; of several processes each has one, and the first writes the files.

    Args:
        step: the model, its criterion, device and precision.
        make_batches: (epoch, first batch) -> the batches of that epoch from there on that this process takes, always in
            the same order.
        batches_per_epoch: how many an epoch has for each process.
        evaluate: (model, whether this process was asked to stop) -> what it measured.
        metrics: None in all processes but the first.
    """

    step: TrainingStep
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    make_batches: Callable[[int, int], Iterator[TrainingBatch]]
    batches_per_epoch: int
    evaluate: Callable[[nn.Module, Callable[[], bool]], Measured]
    settings: TrainSettings
    folder: RunFolder
    metrics: MetricsLog | None
    class_map: ClassMap
    config: dict[str, Any]
    resume_from: Checkpoint | None = None
    result: Measured | None = field(default=None, init=False)
    progress: Progress = field(default_factory=Progress, init=False)

    def __post_init__(self) -> None:
        self.model = self.step.model
        self.scaler = torch.amp.GradScaler(self.step.device.type, enabled=self.step.precision == torch.float16)
        decay = self.settings.ema_decay
        self.ema = None if decay is None else AveragedWeights(self.model, decay)
        self._parallel: nn.Module = self.step
        self._watch = InterruptWatch()
        self._saved: Progress | None = None
        self._saved_at = time.monotonic()
        self._means = Means()
        self._epoch_means = EpochMeans()
        self._term_weights: dict[str, float] = {}
        if self.resume_from is not None:
            self._restore(self.resume_from)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.batches_per_epoch / self.settings.accumulate)

    @property
    def total_steps(self) -> int:
        steps = self.settings.epochs * self.steps_per_epoch
        return min(steps, self.settings.max_steps or steps)

    @property
    def epochs_done(self) -> float:
        return self.progress.step / self.steps_per_epoch

    def train(self) -> Measured:
        """Train from where the progress stands to the end, and return the last evaluation.

        Raises:
            TrainingError: the loss or the gradient is not finite, images cannot be read, or files cannot be written,
                beyond what the settings allow.
            Interrupted: SIGINT or SIGTERM was received; everything is saved.
        """
        self.model.train()
        self._parallel = wrap_ddp(self.step, unused_parameters=self.settings.unused_parameters)
        with self._watch, self._bar() as bar:
            if self.progress.step == 0:
                self.save()  # so that a run killed from here on can be resumed
            while True:
                self._evaluate_if_due()  # first, because a run may have been stopped just before it
                if self.progress.step >= self.total_steps:
                    break
                for batches in self._rest_of_epoch():
                    agreed = self._step(batches)
                    bar.set_postfix_str(f"loss {agreed.loss / distributed.world_size():.3f}", refresh=False)
                    bar.update()
                    self._after_step(agreed)
                self.save()
                self._log_epoch()
            return self.result or self._evaluated()

    @property
    def evaluation_model(self) -> nn.Module:
        """The averaged weights when there are any."""
        return self.model if self.ema is None else self.ema.module

    @property
    def epochs_text(self) -> str:
        """The last epoch and the one with the best score, counted from 1, each with its checkpoint."""
        last, best = (math.ceil(step / self.steps_per_epoch) for step in (self.progress.step, self.progress.best_step))
        found = f", best epoch {best} ({self.folder.best.name})" if best else ", no epoch with a score"
        return f"last epoch {last} ({self.folder.last.name}){found}"

    def save(self, *others: Path) -> None:
        """Write ``others`` and then ``last.pt`` with the same content, unless it holds this progress already.

        ``last.pt`` comes last, so that a run killed in between repeats what led to the others. All processes call it.
        """
        self._log_window()
        if self._saved == self.progress and not others:
            return
        training = training_state(self.optimizer, self.scaler, self.progress)
        distributed.run_on_main(lambda: self._write(training, others))
        self._saved = replace(self.progress)
        self._saved_at = time.monotonic()

    def _write(self, training: dict[str, Any], others: Sequence[Path]) -> None:
        averaged = 0 if self.ema is None else int(self.ema.n_averaged)
        checkpoint = Checkpoint(
            model=self.model.state_dict(),
            class_map=self.class_map.to_dict(),
            config=self.config,
            ema=None if self.ema is None else self.ema.module.state_dict(),
            training=training | {"averaged": averaged},
        )
        try:
            for path in others:
                checkpoint.save(path)
            checkpoint.save(self.folder.last, previous=self.folder.previous)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter
            earlier = (
                "That of an earlier step is there: make room, then go on with the same command and --resume"
                if self.folder.holds_a_run()
                else "No checkpoint was written before it: make room, then start again with the same command"
            )
            raise TrainingError(
                f"the checkpoint of step {self.progress.step} cannot be written to {self.folder.path} ({error}). "
                + earlier
            ) from error

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state_to_resume(str(self.folder.last))
        load_strict(self.model, checkpoint.model, str(self.folder.last))
        if self.ema is not None:
            load_strict(self.ema.module, checkpoint.weights, str(self.folder.last))
            self.ema.n_averaged.fill_(state["averaged"])
        load_optimizer(self.optimizer, state["optimizer"], str(self.folder.last))
        older = {"best_ap": "best_score"}  # names in earlier checkpoints
        try:
            if self.scaler.is_enabled() and state["scaler"]:  # empty when the run was not in fp16 before
                self.scaler.load_state_dict(state["scaler"])
            self.progress = Progress(**{older.get(name, name): value for name, value in state["progress"].items()})
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{self.folder.last}: its training state is of another version or damaged ({error}): start anew with "
                f"init_from={self.folder.last} and another output_dir"
            ) from error
        logger.info("resumed at step %d of %d", self.progress.step, self.total_steps)
        seed = derive_seed(self.settings.seed, self.progress.step, distributed.rank())
        if not restore_rng(state["rng"], seed):
            logger.warning(
                "the checkpoint is of another number of processes: their random numbers, and with another total batch "
                "the place in the epoch, are not those of an undisturbed run"
            )

    def _rest_of_epoch(self) -> Iterator[list[TrainingBatch]]:
        """The remaining batches of the current epoch, as many together as make one optimiser step."""
        epoch, steps_done = divmod(self.progress.step, self.steps_per_epoch)
        steps = min(self.steps_per_epoch - steps_done, self.total_steps - self.progress.step)
        if steps_done == 0:
            self.progress.replaced = 0
        batches = steady(lambda start: self.make_batches(epoch, start), steps_done * self.settings.accumulate)
        for _ in range(steps):
            yield list(islice(batches, self.settings.accumulate))

    def _step(self, batches: Sequence[TrainingBatch]) -> ReducedFlags:
        """One optimiser step over the mean loss of ``batches``, unless that or its gradient is not finite."""
        rng, statistics = rng_state(), self._statistics()
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * self.learning_rate(self.progress.step)
        for number, batch in enumerate(batches, start=1):
            with sync_gradients(self._parallel, number == len(batches)):
                report = self._parallel(batch)
                agreed = self._agree(report, batch)
                if agreed.not_finite:
                    self._leave_out(batches[:number], rng, statistics, with_backward=False)
                    return agreed
                self.scaler.scale(report.total / len(batches)).backward()
            self._means.add(loss=report.total, **report.losses, **report.logged)
            self._term_weights = report.term_weights
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm or math.inf)
        if not (self.scaler.is_enabled() or norm.isfinite()):  # with a scaler infinite gradients are its business
            self._leave_out(batches, rng, statistics, with_backward=True)
            return agreed
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self._means.add(grad_norm=norm)
        self.progress.step += 1
        return agreed

    def _agree(self, report: LossReport, batch: TrainingBatch) -> ReducedFlags:
        """Learn how the others fare, and count the images that could not be read."""
        for message in batch.replaced:
            logger.error("another image takes the place of one that cannot be read: %s", message)
        minutes = (time.monotonic() - self._saved_at) / 60
        agreed = reduce_flags(
            report.total,
            stop=self._asked_to_stop(),
            save=distributed.is_main() and minutes >= (self.settings.checkpoint_minutes or math.inf),
            replaced=len(batch.replaced),
        )
        self.progress.replaced += int(agreed.replaced)
        if self.progress.replaced > self.settings.max_replaced:
            raise distributed.on_all_ranks(
                TrainingError(
                    f"{self.progress.replaced} images of this epoch cannot be read, data.max_unreadable allows "
                    f"{self.settings.max_replaced:g}: look at the messages above and at the disk. The last saved state "
                    f"is in {self.folder.last}; go on with --resume"
                )
            )
        return agreed

    def _statistics(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers of norms that learn from every batch, with copies, where a step may be left out."""
        if not self.settings.max_skipped:
            return []
        norms = (module for module in self.model.modules() if isinstance(module, _BatchNorm) and module.training)
        return [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]

    def _leave_out(
        self,
        batches: Sequence[TrainingBatch],
        rng: dict[str, Any],
        statistics: Sequence[tuple[Tensor, Tensor]],
        *,
        with_backward: bool,
    ) -> None:
        """Capture the step and count it as done without learning from it, or stop when that happens too often."""
        step = self.progress.step + 1
        for buffer, before in statistics:
            buffer.copy_(before)
        self.optimizer.zero_grad(set_to_none=True)
        message = told_together(
            capture_step(
                self.step,
                batches,
                rng,
                number=step,
                class_map=self.class_map,
                config=self.config,
                scale=float(self.scaler.get_scale()),
                with_backward=with_backward,
            ),
            self.folder.capture(step, distributed.rank()) if self.progress.skipped < CAPTURES else None,
        )
        self.progress.step += 1
        self.progress.skipped += 1
        if self.progress.skipped > self.settings.max_skipped:
            raise distributed.on_all_ranks(
                TrainingError(
                    f"{message}\nThe last saved state is in {self.folder.last}. Try a lower optimizer.lr, "
                    "optimizer.clip_norm=0.1, train.precision=float32, look at these images with tools/check_data.py, "
                    "or leave such steps out with train.max_skipped=N."
                )
            )
        logger.warning("%s\nThe step is left out, %d of %d.", message, self.progress.skipped, self.settings.max_skipped)

    def _after_step(self, agreed: ReducedFlags) -> None:
        if self.progress.step % self.settings.log_every == 0:
            self._log_window()
        if agreed.stop or agreed.save or self.progress.step % self.settings.checkpoint_every == 0:
            self.save()
        if agreed.stop:
            self._stop()

    def _evaluate_if_due(self) -> None:
        """Evaluate at the end of an epoch that asks for it and at the very end, and save what came of it."""
        step, done = self.progress.step, math.ceil(self.epochs_done)
        finished = step >= self.total_steps
        if step == self.progress.evaluated_step or not (finished or step % self.steps_per_epoch == 0):
            return
        others = []
        if (finished or done % self.settings.eval_every == 0) and self._evaluate(done):
            others.append(self.folder.best)
        if self.settings.keep_every and done % self.settings.keep_every == 0:
            others.append(self.folder.epoch(done))
        self.save(*others)

    def _evaluate(self, epoch: int) -> bool:
        """Evaluate and log; whether the score is the best so far."""
        self.result = self._evaluated()
        self._record("val", {"epoch": epoch, "score": self.result.score, **self.result.metrics})
        logger.info("epoch %d, step %d: %s", epoch, self.progress.step, self.result)
        improved = self.result.score > self.progress.best_score
        if improved:
            self.progress.best_score, self.progress.best_step = self.result.score, self.progress.step
        self.progress.evaluated_step = self.progress.step
        return improved

    def _evaluated(self) -> Measured:
        model = self.evaluation_model
        distributed.broadcast_from_main(model.buffers())  # norms have seen other images here
        try:
            return self.evaluate(model, self._asked_to_stop)
        except EvaluationStopped:
            self._stop()
            raise

    def _asked_to_stop(self) -> bool:
        return self._watch.signal_number is not None

    def _stop(self) -> None:
        """Called where ``last.pt`` holds all that was done."""
        numbers = distributed.all_gather_object(self._watch.signal_number)
        raise distributed.on_all_ranks(
            Interrupted(
                next(number for number in numbers if number is not None),
                f"stopped at step {self.progress.step}; everything is saved in {self.folder.last}. "
                "Go on with the same command and --resume.",
            )
        )

    def _log_window(self) -> None:
        """Write the means since the last record, over all processes."""
        if not self._means:
            return
        batches = self._means.count("loss")
        record = {
            "epoch": self.epochs_done,
            **{f"lr/{group['name']}": group["lr"] for group in self.optimizer.param_groups},
            "lr": self.optimizer.param_groups[0]["lr"],
            **({"skipped_steps": self.progress.skipped} if self.progress.skipped else {}),
            **({"replaced_images": self.progress.replaced} if self.progress.replaced else {}),
            **{f"weight/{name}": weight for name, weight in self._term_weights.items()},
            **self._means.take(per_step="grad_norm"),
        }
        self._epoch_means.add(record, batches)
        self._record("train", record)

    def _log_epoch(self) -> None:
        """Log one line: the means of the training terms over the epoch, or over its part since the resumption."""
        means, batches = self._epoch_means.take()
        if means:
            steps = math.ceil(batches / self.settings.accumulate)
            where = self.epochs_done, self.progress.step, steps
            logger.info("epoch %.3g, step %d, mean of %d steps: %s", *where, training_line(means))

    def _record(self, kind: str, values: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, self.progress.step, values)

    def _bar(self) -> tqdm:
        return progress_bar(total=self.total_steps, initial=self.progress.step, desc="training", unit="step")
