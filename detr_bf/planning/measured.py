"""The time of a step as benchmarks/step.py measured it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detr_bf.config import DetectionConfig
from detr_bf.errors import InputError
from detr_bf.files import read_json
from detr_bf.planning.machine import MAX_SECONDS, usual_size
from detr_bf.text import listed, printable


@dataclass(frozen=True)
class Measured:
    """Of an optimiser step at the usual image size."""

    seconds: float
    source: str  # what was measured, in words


def read_measured(path: Path, config: DetectionConfig) -> Measured:
    """The row of the config's precision and batch size, in proportion to the pixels of an image.

    Raises:
        InputError: the file is missing, is not what benchmarks/step.py writes, or has no such row.
    """
    shown = printable(path)
    try:
        content = read_json(path, limit=2**27)
        known = {(row["precision"], row["batch_size"]): row["step"] for row in content["rows"]}
        pixels = _positive(content["height"]) * _positive(content["width"])
        title = f"{content['recipe']} {content['height']} x {content['width']}"
        medians = {key: _positive(step["median"]) for key, step in known.items() if step is not None}  # out of memory
    except FileNotFoundError:
        raise InputError(f"--measured: file not found: {shown}") from None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputError(
            f"--measured: {shown} is not what benchmarks/step.py --output writes without --compare "
            f"({type(error).__name__}: {printable(error)})"
        ) from error
    train = config.train
    if (train.precision, train.batch_size) not in medians:
        found = [f"{precision} {size}" for precision, size in medians]
        raise InputError(
            f"--measured: {shown} has no step of train.precision={train.precision} "
            f"train.batch_size={train.batch_size}; it has {listed(found) or 'nothing'}: measure it, or plan one of "
            "those"
        )
    height, width = usual_size(config.data.transforms)
    seconds = medians[train.precision, train.batch_size] * train.accumulate * height * width / pixels
    return Measured(seconds, f"measured: {printable(title)} in {shown}, in proportion to pixels")


def _positive(value: Any) -> float:
    """Return a number as it stands in JSON.

    Raises:
        ValueError: it is none, or not above 0 and at most ``MAX_SECONDS``, which no height or width reaches either.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
        raise ValueError(f"{printable(value)} is no number above 0 and at most {MAX_SECONDS}")
    return float(value)
