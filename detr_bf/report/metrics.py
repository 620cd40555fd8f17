"""Reading ``metrics.jsonl``: one JSON object a line, training records and evaluation records mixed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detr_bf.errors import InputError
from detr_bf.files import read_records

logger = logging.getLogger(__name__)

_LARGEST = 1e100  # absolute value that is drawn: sums and margins of it stay finite
_MAX_EPOCH = 1e9

Record = dict[str, Any]


@dataclass(frozen=True)
class Metrics:
    """Records by kind, by ascending step, one a step."""

    train: tuple[Record, ...] = ()
    val: tuple[Record, ...] = ()


def read_metrics(path: str | Path) -> Metrics:
    """Read a metrics file; a run that was killed and resumed may hold a step twice: the later line counts.

    Lines that hold no record with kind, step and epoch are left out, with a warning that says how many.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"metrics file not found: {path}. A run writes it into its output folder")
    lines = [record for _, record in read_records(path)]
    records = [record for record in lines if record is not None and _is_epoch(record.get("epoch"))]
    if damaged := len(lines) - len(records):
        logger.warning("%s: %d of %d lines are damaged and left out", path, damaged, len(lines))
    return Metrics(_by_step(records, "train"), _by_step(records, "val"))


def series(records: Iterable[Record], name: str) -> tuple[list[float], list[float]]:
    """Epochs and values of one quantity; records in which it is absent or not a finite number are left out."""
    points = [(record["epoch"], record[name]) for record in records if _is_number(record.get(name))]
    return [float(epoch) for epoch, _ in points], [float(value) for _, value in points]


def _by_step(records: Iterable[Record], kind: str) -> tuple[Record, ...]:
    latest = {record["step"]: record for record in records if record["kind"] == kind}
    return tuple(latest[step] for step in sorted(latest))


def _is_epoch(value: Any) -> bool:
    return _is_number(value) and 0 <= value < _MAX_EPOCH


def _is_number(value: Any) -> bool:
    """Return whether it is a finite number that can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
