"""The time of a step as benchmarks/step.py measured it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from detr_bf.config import Config
from detr_bf.errors import InputError
from detr_bf.planning.machine import usual_size


@dataclass(frozen=True)
class Measured:
    """Of an optimiser step at the usual image size."""

    seconds: float
    source: str  # what was measured, in words


def read_measured(path: Path, config: Config) -> Measured:
    """The row of the config's precision and batch size, in proportion to the pixels of an image.

    Raises:
        InputError: the file is missing, is not what benchmarks/step.py writes, or has no such row.
    """
    if not path.is_file():
        raise InputError(f"--measured: file not found: {path}")
    train = config.train
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {(row["precision"], row["batch_size"]): row["step"] for row in content["rows"]}
        pixels = content["height"] * content["width"]
        title = f"{content['recipe']} {content['height']} x {content['width']}"
        medians = {key: float(step["median"]) for key, step in known.items() if step is not None}  # None: out of memory
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--measured: {path} is not what benchmarks/step.py --output writes without --compare ({error!r})"
        ) from error
    if (train.precision, train.batch_size) not in medians:
        found = ", ".join(f"{precision} {size}" for precision, size in medians) or "nothing"
        raise InputError(
            f"--measured: {path} has no step of train.precision={train.precision} train.batch_size={train.batch_size}; "
            f"it has {found}: measure it, or plan one of those"
        )
    height, width = usual_size(config.data.transforms)
    seconds = medians[train.precision, train.batch_size] * train.accumulate * height * width / pixels
    return Measured(seconds, f"measured: {title} in {path}, in proportion to pixels")
