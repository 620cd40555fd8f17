"""Metrics of a run: means over training steps, ``metrics.jsonl``, loggers and the lines of ``log.txt``."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detr_bf.common import distributed
from detr_bf.common.errors import InputError, TrainingError
from detr_bf.common.files import read_records, write_text
from detr_bf.common.text import counted
from detr_bf.engine.loggers import Logger
from detr_bf.engine.state import Progress
from detr_bf.losses import STREAM_NAMES, LossReport

logger = logging.getLogger(__name__)

# quantities of log.txt besides the loss and its terms: name in metrics.jsonl, text
_SUMMARIZED = {f"stream/{name}": f"{name} stream {{:.4g}}" for name in STREAM_NAMES} | {
    "class_error": "class error {:.3g} %",
    "accuracy": "accuracy {:.3f}",
    "grad_norm": "gradient norm {:.4g}",
    "step_seconds": "{:.3g} s a step",
}


class MetricsLog:
    """``metrics.jsonl``: records of kind ``train`` and ``val`` in the order of the steps, also given to loggers.

    A logger that fails gets nothing more, with a warning; the run and the file go on. As a context manager it closes
    the file and the loggers.

    Args:
        path: the file; it is overwritten.
        resume_from: the last step of each kind that a resumed run keeps, so that no record appears twice. Damaged lines
            are dropped with a warning.
        loggers: objects that get the same numbers after the file has them; context managers are entered here.
        new_val: the records that are kept are of other validation data, and lose their score, which chooses the best.

    Raises:
        InputError: a logger of a new run cannot be started; a resumed run goes on without it, with a warning.
    """

    def __init__(
        self,
        path: Path,
        resume_from: Mapping[str, int] | None = None,
        loggers: Sequence[Logger] = (),
        new_val: bool = False,
    ) -> None:
        self._loggers: list[Logger] = []
        with ExitStack() as started:
            for each in loggers:
                try:
                    if isinstance(each, AbstractContextManager):
                        started.enter_context(each)
                    self._loggers.append(each)
                except InputError as error:
                    if not resume_from:
                        raise
                    logger.warning("%s. The resumed run goes on without it", error)
            kept = _kept(path, resume_from, scores=not new_val) if resume_from else []
            write_text(path, "".join(f"{line}\n" for line in kept))
            self._file = path.open("a", encoding="utf-8")
            self._started = started.pop_all()

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one record, with null for numbers that are not finite: JSON has none.

        Raises:
            TrainingError: it cannot be written, for instance because the disk is full.
        """
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self._file.name} cannot be written ({error.strerror or error}): free some space, then run the same "
                "command with --resume"
            ) from error
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        self._give(lambda each: each.log_scalars(kind, step, numbers))

    def write_picture(self, name: str, step: int, path: Path) -> None:
        """Give a PNG or JPEG file that the run has written after ``step`` optimizer steps to the loggers."""
        self._give(lambda each: each.log_picture(name, step, path))

    def _give(self, log: Callable[[Logger], None]) -> None:
        for each in list(self._loggers):
            try:
                log(each)
            except Exception as error:
                self._loggers.remove(each)
                self._warn(f"{type(each).__name__} gets nothing more of this run", error)

    def _warn(self, what: str, error: Exception) -> None:
        logger.warning("%s (%s: %s); %s is complete", what, type(error).__name__, error, self._file.name)

    def close(self, error: BaseException | None = None) -> None:
        """Close the file and leave the loggers.

        Args:
            error: the exception that ended the run.
        """
        with suppress(OSError):  # a failed write fails again when flushed
            self._file.close()
        try:
            self._started.__exit__(type(error) if error else None, error, None)
        except Exception as failure:
            self._warn("A logger could not be closed", failure)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(error)


class Means:
    """Scalars of some steps, kept on their device and averaged over steps and ranks by :meth:`take`."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)
        self._since = time.perf_counter()

    def __bool__(self) -> bool:
        return bool(self._values)

    def count(self, name: str) -> int:
        """Return how often ``name`` was added since the last :meth:`take`."""
        return len(self._values.get(name, ()))

    def add(self, **values: Tensor) -> None:
        """Add the numbers of a batch or step."""
        for name, value in values.items():
            self._values[name].append(value.detach())

    def take(self, per_step: str) -> dict[str, float]:
        """Return the means by name, and start anew; a collective.

        ``step_seconds`` is the time divided by the number of values of ``per_step``, a name that is added once a step.

        All ranks must have added the same names.
        """
        now = time.perf_counter()
        rank_means = torch.stack([torch.stack(values).double().mean() for values in self._values.values()])
        means = dict(zip(self._values, distributed.all_reduce_mean(rank_means).tolist(), strict=True))
        means["step_seconds"] = (now - self._since) / max(1, len(self._values.get(per_step, ())))
        self._values.clear()
        self._since = now
        return means

    def restart_clock(self) -> None:
        """Leave the time since the last :meth:`take` out of ``step_seconds``, unless something was added since."""
        if not self:
            self._since = time.perf_counter()


class EpochMeans:
    """Means over several training records, weighted by their numbers of batches."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._batches: dict[str, int] = defaultdict(int)

    def add(self, record: Mapping[str, float], batches: int) -> None:
        """Add a record of means over ``batches``."""
        for name, value in record.items():
            self._sums[name] += batches * value
            self._batches[name] += batches

    def take(self) -> tuple[dict[str, float], int]:
        """Return the means by name and the number of batches, and start anew; empty and 0 if nothing was added."""
        means = {name: value / self._batches[name] for name, value in self._sums.items() if self._batches[name]}
        batches = max(self._batches.values(), default=0)
        self._sums.clear()
        self._batches.clear()
        return means, batches


class BatchLog(NamedTuple):
    """Numbers of a batch for the log."""

    values: dict[str, Tensor]  # scalars without gradient, on their device
    weights: dict[str, float]  # of the terms of the loss

    @classmethod
    def of(cls, report: LossReport) -> BatchLog:
        """Return the numbers of a report, without its graph."""
        values = {"loss": report.total, **report.losses, **report.logged}
        return cls({name: value.detach() for name, value in values.items()}, report.term_weights)


class TrainingLog:
    """Means of the training steps: a record in ``metrics.jsonl`` per window, a line in ``log.txt`` per epoch.

    Args:
        metrics: None on all ranks but the main one.
    """

    def __init__(self, metrics: MetricsLog | None) -> None:
        self._metrics = metrics
        self._window = Means()
        self._epoch = EpochMeans()
        self._weights: dict[str, float] = {}

    def add_step(self, batches: Sequence[BatchLog], grad_norm: Tensor | None = None) -> None:
        """Add the losses of the batches of an optimizer step, and its gradient norm unless the step is skipped."""
        for batch in batches:
            self._window.add(**batch.values)
            self._weights = batch.weights
        if grad_norm is not None:
            self._window.add(grad_norm=grad_norm)

    def write_window(self, epoch: float, progress: Progress, optimizer: torch.optim.Optimizer) -> None:
        """Write the means since the last record, if any; a collective.

        Args:
            epoch: epochs done, with the fraction of the current one.
        """
        if not self._window:
            return
        batches = self._window.count("loss")
        record = {
            "epoch": epoch,
            **{f"lr/{group['name']}": group["lr"] for group in optimizer.param_groups},
            "lr": optimizer.param_groups[0]["lr"],
            **({"skipped_steps": progress.skipped} if progress.skipped else {}),
            **({"minutes": progress.seconds / 60} if progress.seconds else {}),
            **({"replaced_images": progress.replaced} if progress.replaced else {}),
            **{f"weight/{name}": weight for name, weight in self._weights.items()},
            **self._window.take(per_step="grad_norm"),
        }
        self._epoch.add(record, batches)
        self.write("train", progress.step, record)

    def restart_clock(self) -> None:
        """Leave an evaluation or a saved checkpoint before the first step of a window out of its ``step_seconds``."""
        self._window.restart_clock()

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one record, on the main rank."""
        if self._metrics is not None:
            self._metrics.write(kind, step, values)

    def log_epoch(self, epoch: float, step: int, accumulate: int) -> None:
        """Log the means over the epoch, or over its part since the resumption, as one line.

        Args:
            accumulate: batches of an optimizer step.
        """
        means, batches = self._epoch.take()
        if means:
            steps = math.ceil(batches / accumulate)
            logger.info(
                "epoch %.3g, step %d, mean of %s: %s", epoch, step, counted(steps, "step"), training_line(means)
            )


def training_line(means: Mapping[str, float]) -> str:
    """Return ``loss 26.55 (ce 1.203, bbox 0.456 x 5, ...), ...``: total, unweighted terms with their weights, streams.

    Terms of auxiliary layers and proposals have no weight of their own and are only counted.
    """
    terms = {name: value for name, value in means.items() if name.startswith("loss_")}
    shown = []
    for name, value in terms.items():
        if (weight := means.get(f"weight/{name}")) is not None:
            shown.append(f"{name.removeprefix('loss_')} {value:.4g}" + (f" x {weight:.4g}" if weight != 1 else ""))
    if others := len(terms) - len(shown):
        shown.append(f"{others} of auxiliary layers and proposals")
    parts = [f"loss {means['loss']:.4g} ({', '.join(shown)})"]
    for name, text in _SUMMARIZED.items():
        if name in means:
            parts.append(text.format(means[name]))
    return ", ".join(parts)


def _kept(path: Path, resume_from: Mapping[str, int], *, scores: bool) -> list[str]:
    """Return the lines whose records a resumed run keeps."""
    lines = read_records(path)
    if damaged := [number for number, (_, record) in enumerate(lines, start=1) if record is None]:
        logger.warning(
            "%s: %d of %d lines are damaged and dropped, the first is line %d; a run that was killed can leave one",
            path,
            len(damaged),
            len(lines),
            damaged[0],
        )
    kept = []
    for line, record in lines:
        if record is not None and record["step"] <= resume_from[record["kind"]]:
            named = record if scores else {name: value for name, value in record.items() if name != "score"}
            kept.append(line if named == record else json.dumps(named))
    return kept
