"""Numbers of a run: one JSON object a line, and TensorBoard when asked for."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detr_bf import distributed
from detr_bf.errors import InputError, TrainingError
from detr_bf.files import read_records, write_text
from detr_bf.losses import STREAM_NAMES

logger = logging.getLogger(__name__)

# beside the loss and its terms, the quantities that log.txt names: name in metrics.jsonl, text
_SUMMARIZED = {f"stream/{name}": f"{name} stream {{:.4g}}" for name in STREAM_NAMES} | {
    "class_error": "class error {:.3g} %",
    "accuracy": "accuracy {:.3f}",
    "grad_norm": "gradient norm {:.4g}",
    "step_seconds": "{:.3g} s a step",
}


class MetricsLog:
    """``metrics.jsonl``: records of kind ``train`` and ``val`` in the order of the steps.

    Args:
        path: the file; what it holds is dropped.
        resume_from: the last step of each kind that a resumed run keeps, so that no record appears twice. Damaged lines
            are dropped with a warning.
        tensorboard: folder for the same numbers.
    """

    def __init__(
        self, path: Path, resume_from: Mapping[str, int] | None = None, tensorboard: Path | None = None
    ) -> None:
        self._writer = _summary_writer(tensorboard, resume_from) if tensorboard else None
        write_text(path, "".join(f"{line}\n" for line in _kept(path, resume_from)) if resume_from else "")
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            TrainingError: it cannot be written, the disk being full for instance.
        """
        finite = {name: None if _not_finite(value) else value for name, value in values.items()}
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self._file.name} cannot be written ({error.strerror or error}): make room, then go on with the same "
                "command and --resume"
            ) from error
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written cannot be flushed either
            self._file.close()
        if self._writer is not None:
            self._writer.close()


class Means:
    """Scalars of some steps, collected where they are and averaged over steps and processes when they are taken."""

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
        """The means by name, with ``step_seconds``: ``per_step`` names what is added once a step. All start anew.

        All processes call it together, having added the same names.
        """
        now = time.perf_counter()
        own = torch.stack([torch.stack(values).double().mean() for values in self._values.values()])
        means = dict(zip(self._values, distributed.all_reduce_mean(own).tolist(), strict=True))
        means["step_seconds"] = (now - self._since) / max(1, len(self._values.get(per_step, ())))
        self._values.clear()
        self._since = now
        return means


class EpochMeans:
    """Means over several training records, each weighted by the batches that it stands for."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._batches: dict[str, int] = defaultdict(int)

    def add(self, record: Mapping[str, float], batches: int) -> None:
        """Add a record of means over ``batches``."""
        for name, value in record.items():
            self._sums[name] += batches * value
            self._batches[name] += batches

    def take(self) -> tuple[dict[str, float], int]:
        """Return the means by name and the number of batches, none where nothing was added; all start anew."""
        means = {name: value / self._batches[name] for name, value in self._sums.items() if self._batches[name]}
        batches = max(self._batches.values(), default=0)
        self._sums.clear()
        self._batches.clear()
        return means, batches


def training_line(means: Mapping[str, float]) -> str:
    """Return ``loss 26.55 (ce 1.203, bbox 0.456 x 5, ...), ...``: total, unweighted terms with their weights, streams.

    Terms of auxiliary layers and proposals, which have no weight of their own, are only counted.
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


def _not_finite(value: Any) -> bool:
    """JSON has no word for it; fp16 training meets infinite gradient norms and skips their steps."""
    return isinstance(value, float) and not math.isfinite(value)


def _kept(path: Path, resume_from: Mapping[str, int]) -> list[str]:
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
    return [line for line, record in lines if record is not None and record["step"] <= resume_from[record["kind"]]]


def _summary_writer(folder: Path, resume_from: Mapping[str, int] | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "train.tensorboard=true needs TensorBoard: pip install 'detr_bf[tensorboard]', or set it to false"
        ) from error
    return SummaryWriter(str(folder), purge_step=resume_from["train"] + 1 if resume_from else None)
