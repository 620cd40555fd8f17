"""The training loop."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from detr_bf.engine.checkpoint import Checkpoint, load_strict, restore_rng, training_state
from detr_bf.engine.evaluate import Evaluation
from detr_bf.engine.interrupt import InterruptWatch
from detr_bf.engine.metrics import MetricsLog
from detr_bf.engine.optimizer import LearningRate, load_optimizer
from detr_bf.engine.run_folder import RunFolder
from detr_bf.errors import Interrupted, TrainingError
from detr_bf.evaluation import Result
from detr_bf.losses import LossReport, SetCriterion
from detr_bf.progress import progress_bar
from detr_bf.structures import Batch, ClassMap

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainSettings:
    """How long, how exact, how often."""

    epochs: int
    max_steps: int | None = None  # optimiser steps
    accumulate: int = 1  # batches per optimiser step
    precision: torch.dtype = torch.float32
    clip_norm: float = 0.1  # 0 does not clip
    log_every: int = 20  # steps
    checkpoint_every: int = 1000  # steps
    keep_every: int = 0  # epochs
    eval_every: int = 1  # epochs
    ema_decay: float | None = None


@dataclass
class Progress:
    """Where training stands; part of every checkpoint."""

    step: int = 0  # optimiser steps done
    evaluated_step: int = 0  # the step of the last evaluation
    best_score: float = -1.0  # PQ where it is measured, else AP


@dataclass
class Trainer:
    """Trains a detector and keeps its run folder.

    Args:
        make_batches: (epoch, first batch) -> the batches of that epoch from there on, always in the same order.
        batches_per_epoch: how many an epoch has.
    """

    model: nn.Module
    criterion: SetCriterion
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    make_batches: Callable[[int, int], Iterator[Batch]]
    batches_per_epoch: int
    evaluate: Evaluation
    settings: TrainSettings
    folder: RunFolder
    metrics: MetricsLog
    class_map: ClassMap
    config: dict[str, Any]
    device: torch.device
    resume_from: Checkpoint | None = None
    result: Result | None = field(default=None, init=False)
    progress: Progress = field(default_factory=Progress, init=False)

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.settings.precision == torch.float16)
        self.ema = _averaged(self.model, self.settings.ema_decay)
        self._watch = InterruptWatch()
        self._saved: Progress | None = None
        self._window: dict[str, list[Tensor]] = defaultdict(list)
        self._window_start = time.perf_counter()
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

    def train(self) -> Result:
        """Train from where the progress stands to the end, and return the last evaluation.

        Raises:
            TrainingError: the loss is not finite.
            Interrupted: SIGINT or SIGTERM was received; everything is saved.
        """
        self.model.train()
        with self._watch, self._bar() as bar:
            if self.progress.step == 0:
                self.save()  # so that a run killed from here on can be resumed
            while True:
                self._evaluate_if_due()  # first, because a run may have been stopped just before it
                if self.progress.step >= self.total_steps:
                    break
                for batches in self._rest_of_epoch():
                    bar.set_postfix_str(f"loss {self._step(batches):.3f}", refresh=False)
                    bar.update()
                    self._after_step()
                self.save()
            return self.result or self.evaluate(self.evaluation_model, self._stop_if_asked)

    @property
    def evaluation_model(self) -> nn.Module:
        """The averaged weights when there are any."""
        return self.model if self.ema is None else self.ema.module

    def save(self, *others: Path) -> None:
        """Write ``others`` and then ``last.pt`` with the same content, unless it holds this progress already.

        ``last.pt`` comes last, so that a run killed in between repeats what led to the others.
        """
        self._log_window()
        if self._saved == self.progress and not others:
            return
        self._saved = replace(self.progress)
        checkpoint = Checkpoint(
            model=self.model.state_dict(),
            class_map=self.class_map.to_dict(),
            config=self.config,
            ema=None if self.ema is None else self.ema.module.state_dict(),
            training=training_state(self.optimizer, self.scaler, self.progress)
            | {"averaged": 0 if self.ema is None else int(self.ema.n_averaged)},
        )
        for path in (*others, self.folder.last):
            checkpoint.save(path)

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.training
        assert state is not None, "last.pt always holds the training state"
        load_strict(self.model, checkpoint.model, str(self.folder.last))
        if self.ema is not None:
            load_strict(self.ema.module, checkpoint.weights, str(self.folder.last))
            self.ema.n_averaged.fill_(state["averaged"])
        load_optimizer(self.optimizer, state["optimizer"], str(self.folder.last))
        if self.scaler.is_enabled() and state["scaler"]:  # empty when the run was not in fp16 before
            self.scaler.load_state_dict(state["scaler"])
        older = {"best_ap": "best_score"}  # names in earlier checkpoints
        self.progress = Progress(**{older.get(name, name): value for name, value in state["progress"].items()})
        restore_rng(state)
        logger.info("resumed at step %d of %d", self.progress.step, self.total_steps)

    def _rest_of_epoch(self) -> Iterator[list[Batch]]:
        """The remaining batches of the current epoch, as many together as make one optimiser step."""
        epoch, steps_done = divmod(self.progress.step, self.steps_per_epoch)
        steps = min(self.steps_per_epoch - steps_done, self.total_steps - self.progress.step)
        batches = self.make_batches(epoch, steps_done * self.settings.accumulate)
        for _ in range(steps):
            yield list(islice(batches, self.settings.accumulate))

    def _step(self, batches: Sequence[Batch]) -> float:
        """One optimiser step over the mean loss of ``batches``; returns that loss."""
        total = 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * self.learning_rate(self.progress.step)
        for batch in batches:
            report = self._forward(batch.to(self.device, non_blocking=True))
            self.scaler.scale(report.total / len(batches)).backward()
            total += self._check_finite(report, batch) / len(batches)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self._window["grad_norm"].append(norm)
        self.progress.step += 1
        return total

    def _forward(self, batch: Batch) -> LossReport:
        precision = self.settings.precision
        with torch.autocast(self.device.type, precision, enabled=precision != torch.float32):
            outputs = self.model(batch)
        report = self.criterion(outputs, batch.targets)
        for name, value in {"loss": report.total, **report.losses, **report.logged}.items():
            self._window[name].append(value.detach())
        return report

    def _check_finite(self, report: LossReport, batch: Batch) -> float:
        total = report.total.item()
        if math.isfinite(total):
            return total
        files = ", ".join(target.file_name for target in batch.targets)
        losses = ", ".join(f"{name} {value.item():.6g}" for name, value in report.losses.items())
        raise TrainingError(
            f"the loss is {total} at step {self.progress.step + 1} (epoch {math.floor(self.epochs_done) + 1}).\n"
            f"  images: {files}\n  losses: {losses}\n"
            f"The last saved state is in {self.folder.last}. Try a lower optimizer.lr, optimizer.clip_norm=0.1, "
            "train.precision=float32, or look at these images with tools/check_data.py."
        )

    def _after_step(self) -> None:
        if self.progress.step % self.settings.log_every == 0:
            self._log_window()
        stop = self._watch.signal_number is not None
        if stop or self.progress.step % self.settings.checkpoint_every == 0:
            self.save()
        if stop:
            self._stop_if_asked()

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
        self.result = self.evaluate(self.evaluation_model, self._stop_if_asked)
        self.metrics.write("val", self.progress.step, {"epoch": epoch, **self.result.metrics})
        logger.info("epoch %d, step %d: %s", epoch, self.progress.step, self.result)
        improved = self.result.score > self.progress.best_score
        self.progress.best_score = max(self.result.score, self.progress.best_score)
        self.progress.evaluated_step = self.progress.step
        return improved

    def _stop_if_asked(self) -> None:
        """Called where ``last.pt`` holds all that was done."""
        if self._watch.signal_number is not None:
            raise Interrupted(
                self._watch.signal_number,
                f"stopped at step {self.progress.step}; everything is saved in {self.folder.last}. "
                "Go on with the same command and --resume.",
            )

    def _log_window(self) -> None:
        """Write the means since the last record."""
        seconds = time.perf_counter() - self._window_start
        self._window_start = time.perf_counter()
        if not self._window:
            return
        means = {name: torch.stack(values).float().mean().item() for name, values in self._window.items()}
        steps = len(self._window["grad_norm"])
        record = {
            "epoch": self.epochs_done,
            **{f"lr/{group['name']}": group["lr"] for group in self.optimizer.param_groups},
            "lr": self.optimizer.param_groups[0]["lr"],
            "step_seconds": seconds / max(steps, 1),
            **means,
        }
        self.metrics.write("train", self.progress.step, record)
        self._window.clear()

    def _bar(self) -> tqdm:
        return progress_bar(total=self.total_steps, initial=self.progress.step, desc="training", unit="step")


def _averaged(model: nn.Module, decay: float | None) -> AveragedModel | None:
    if decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
