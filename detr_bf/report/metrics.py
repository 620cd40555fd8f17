"""Reading ``metrics.jsonl``: one JSON object a line, training records and evaluation records mixed."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detr_bf.errors import InputError

logger = logging.getLogger(__name__)

Record = dict[str, Any]


@dataclass(frozen=True)
class Metrics:
    """Records by kind, by ascending step, one a step."""

    train: tuple[Record, ...] = ()
    val: tuple[Record, ...] = ()


def read_metrics(path: str | Path) -> Metrics:
    """Read a metrics file; a run that was killed and resumed may hold a step twice: the later line counts.

    A last line that a killed run left unfinished is reported in the log and left out.

    Raises:
        InputError: the file is missing, or a line other than the last is not a record.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise InputError(f"metrics file not found: {path}. A run writes it into its output folder") from error
    records = list(_parse(lines, path))
    return Metrics(_by_step(records, "train"), _by_step(records, "val"))


def series(records: Iterable[Record], name: str) -> tuple[list[float], list[float]]:
    """Epochs and values of one quantity; records in which it is absent, null or not finite are left out."""
    points = [(record["epoch"], record[name]) for record in records if _is_number(record.get(name))]
    return [float(epoch) for epoch, _ in points], [float(value) for _, value in points]


def _parse(lines: Sequence[str], path: Path) -> Iterable[Record]:
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            yield {"kind": record["kind"], "step": int(record["step"]), "epoch": float(record["epoch"]), **record}
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise InputError(
                    f"{path}, line {number}, is not a record with kind, step and epoch: {error}"
                ) from error
            logger.warning("%s: the last line is incomplete and left out", path)


def _by_step(records: Iterable[Record], kind: str) -> tuple[Record, ...]:
    latest = {record["step"]: record for record in records if record["kind"] == kind}
    return tuple(latest[step] for step in sorted(latest))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
