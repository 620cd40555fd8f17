"""Cell records: all that a report needs of a finished run, in one JSON file.

An experiment folder holds ``runs/ARM/seed_S`` (the run folders), ``logs`` (what the commands print) and ``cells``:
``experiment.json`` with the arms, and ``ARM/seed_S.json``, a record for each finished cell. A report is made of
``cells`` alone.
"""

from __future__ import annotations

import json
import logging
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.files import is_number, read_json, read_records, write_json
from detr_bf.common.text import listed, printable
from detr_bf.comparison.experiment import (
    ARM_NAME,
    MOST,
    RESAMPLES,
    Experiment,
    ExperimentCell,
    default_primary,
    flat_settings,
)
from detr_bf.config import RunConfig, config_from_dict, saved_config
from detr_bf.engine import RunFolder
from detr_bf.tasks import task_of

logger = logging.getLogger(__name__)

CELL_FORMAT = "detr_bf cell 1"
EXPERIMENT_FORMAT = "detr_bf experiment 1"
NOT_COMPARED = (  # settings without influence on what a run learns and on its metrics
    *("data.check", "data.root", "data.workers", "eval.loss", "eval.picture_threshold", "eval.pictures"),
    *("report", "train.loggers"),
    # places of the data; reports compare the fingerprints of the validation data
    *(
        f"data.{part}.{kind}"
        for part in ("train", "val")
        for kind in ("images", "annotations", "panoptic", "references")
    ),
)
_MAX_BYTES = 2**30  # of a record


@dataclass(frozen=True)
class ExperimentFolder:
    """Folder of an experiment, and the paths in it."""

    path: Path

    @property
    def description(self) -> Path:
        return self.path / "cells" / "experiment.json"

    def record(self, cell: ExperimentCell) -> Path:
        return self.path / "cells" / f"{cell.name}.json"

    def run(self, cell: ExperimentCell) -> RunFolder:
        return RunFolder(self.path / "runs" / cell.name)

    def log(self, cell: ExperimentCell) -> Path:
        return self.path / "logs" / f"{cell.name}.txt"

    def trained(self) -> list[ExperimentCell]:
        """Return the cells with a record or a finished run, sorted."""
        records = [(path.parent.name, path.stem) for path in self.path.glob("cells/*/*.json")]
        runs = [path.parent for path in self.path.glob("runs/*/*/evaluation.json")]
        names = {*records, *((run.parent.name, run.name) for run in runs if not RunFolder(run).in_use())}
        return sorted(
            (cell for arm, name in names if (cell := ExperimentCell.named(arm, name))),
            key=lambda cell: (cell.arm, cell.seed, -1 if cell.fold is None else cell.fold),
        )

    def describe(self, experiment: Experiment) -> None:
        """Write the arms, the baseline and the metric of the experiment for later reports."""
        description = {
            "format": EXPERIMENT_FORMAT,
            "title": experiment.title,
            "baseline": experiment.baseline,
            "contrasts": [list(pair) for pair in experiment.contrasts],
            "contrasts_only": experiment.contrasts_only,
            "primary": experiment.primary,
            "resamples": experiment.resamples,
            "arms": {
                name: [*own, *(f"{key}={value}" for key, value in experiment.commands.get(name, {}).items())]
                for name, own in experiment.arms.items()
            },
        }
        write_json(self.description, description)


def run_settings(run: RunFolder) -> dict[str, Any]:
    """Return the settings of a run as :meth:`Experiment.settings` does, with ``command`` if a command trained it.

    Raises:
        InputError: a file of the run is missing or damaged.
    """
    return {**flat_settings(saved_config(run.config)), **(_json(run.command) if run.command.exists() else {})}


def cell_record(run: RunFolder, cell: ExperimentCell) -> dict[str, Any]:
    """Return the record of a finished run: settings, metrics, cost, machine, data and the table of its images.

    Raises:
        InputError: a file of the run is missing or damaged.
    """
    from detr_bf.comparison.resampling import table_of  # reads the results with pycocotools, which reports do not need

    config = saved_config(run.config)
    records = [record for _, record in read_records(run.metrics) if record is not None]
    curve = [
        {"epoch": each["epoch"], "step": each["step"], "metrics": _metrics(each)}
        for each in records
        if each["kind"] == "val"
    ]
    if not curve:
        raise InputError(f"{printable(run.metrics)} has no evaluation: train the run to its end")
    return {
        "format": CELL_FORMAT,
        "arm": cell.arm,
        "seed": cell.seed,
        "fold": cell.fold,
        "settings": run_settings(run),
        "metrics": curve[-1]["metrics"],
        "curve": [] if run.command.exists() else curve,  # a command has no epochs
        "cost": _cost(run, config, [record for record in records if record["kind"] == "train"]),
        "machine": _json(run.machine),
        "data": task_of(config).fingerprints(),
        "table": table_of(run.path).to_dict(),
    }


def _metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a record, without those where less is better: a comparison takes more for better.

    The scores of raw and averaged weights are none of the weights that are used.
    """
    left_out, beginnings = ("kind", "step", "epoch", "score", "ece"), ("loss", "score/")
    return {name: value for name, value in record.items() if name not in left_out and not name.startswith(beginnings)}


def _cost(run: RunFolder, config: RunConfig, windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return time and memory of training; ``train_seconds`` is the time of all steps, without evaluations.

    Of a command it is the processor time of its process; nothing else is known.
    """
    if run.command.exists():
        return _json(run.cost)
    memory = _json(run.cost) if run.cost.exists() else {}
    starts = [0, *(window["step"] for window in windows)]
    steps = [end - start for start, end in pairwise(starts)]
    seconds = [window.get("step_seconds") for window in windows]
    known = [(each, count) for each, count in zip(seconds, steps, strict=True) if each is not None and count > 0]
    return {
        "train_seconds": sum(each * count for each, count in known),
        "steps": starts[-1],
        "step_seconds": statistics.median(each for each, _ in known) if known else None,
        "peak_memory_mib": memory.get("peak_memory_mib"),
        "device_memory_mib": memory.get("device_memory_mib"),
        "rows": num_rows(config),
    }


def num_rows(config: RunConfig) -> float:
    """Return the rows of a training batch behind batch attention: the batch size times the number of streams.

    With ``batch_former.until_epoch`` it is the mean over all epochs.
    """
    plugins = getattr(config, "plugins", None)
    found = [getattr(config, "batch_former", None), getattr(plugins, "batchformer_v2", None)]
    streams = any(each.enabled and getattr(each, "mode", "") != "single_stream" for each in found if each is not None)
    v1 = getattr(plugins, "batchformer", None)  # its second stream is the one of a shared classifier
    if not (streams or (v1 is not None and v1.enabled and v1.shared_classifier)):
        return config.train.batch_size
    ends = getattr(found[0], "until_epoch", None)
    return config.train.batch_size * (2 if ends is None else 1 + ends / config.train.epochs)


def read_cell(path: Path) -> dict[str, Any]:
    """Return a cell record.

    Raises:
        InputError: the file is not one.
    """
    record = _json(path)
    try:
        valid = record["format"] == CELL_FORMAT and _is_cell(record)
    except (KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise InputError(f"{printable(path)} is not a cell record of this version ({CELL_FORMAT}): move it away")
    return record


def _is_cell(record: Mapping[str, Any]) -> bool:
    """Return True if all values have their types; KeyError, TypeError or AttributeError for some others."""
    splits = [record["data"][split] for split in ("train", "val")]
    counts = [count for split in splits for count in (split["images"], split["objects"])]
    points = [(point["epoch"], point["step"]) for point in record["curve"]]
    return (
        ARM_NAME.fullmatch(record["arm"]) is not None
        and all(type(value) is int and value >= 0 for value in (record["seed"], record["fold"] or 0, *counts))
        and all(is_number(value) for point in points for value in point)
        and all(isinstance(split["sha256"], str) for split in splits)
        and all(isinstance(record[key], dict) for key in ("settings", "machine", "table"))
        and all(isinstance(value, str) for value in (*record["machine"].values(), record["table"]["kind"]))
        and all(
            value is None or is_number(value)
            for tree in (record["metrics"], record["cost"], *(point["metrics"] for point in record["curve"]))
            for value in tree.values()
        )
    )


def _read_description(path: Path) -> dict[str, Any]:
    """Return the content of ``experiment.json``, empty if there is none.

    Raises:
        InputError: the file is not what this program writes.
    """
    if not path.exists():
        return {}
    found = _json(path)
    arms, resamples, contrasts = (found.get(key) for key in ("arms", "resamples", "contrasts"))
    if not (
        found.get("format") == EXPERIMENT_FORMAT
        and all(isinstance(found.get(key), str) for key in ("title", "baseline", "primary"))
        and type(found.get("contrasts_only")) is bool
        and type(resamples) is int
        and 1 <= resamples <= MOST["resamples"]
        and isinstance(arms, dict)
        and all(isinstance(own, list) and all(isinstance(each, str) for each in own) for own in arms.values())
        and isinstance(contrasts, list)
        and all(
            isinstance(pair, list) and len(pair) == 2 and set(map(repr, pair)) <= set(map(repr, arms))
            for pair in contrasts
        )
    ):
        raise InputError(f"{printable(path)} is not a description of this version ({EXPERIMENT_FORMAT}): move it away")
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, _MAX_BYTES)
    except FileNotFoundError:
        raise InputError(f"{printable(path)} is missing") from None
    except ValueError as error:
        raise InputError(f"{printable(path)} cannot be used: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{printable(path)} is not a JSON object")
    return found


def changed_settings(one: Mapping[str, Any], other: Mapping[str, Any], ignored: Sequence[str] = ()) -> list[str]:
    """Return the keys whose values differ, without those that have no influence on a run, sorted.

    A setting that was added to the program after a record was written has its default value there.
    """
    keys = ({*one} | {*other}) - {*NOT_COMPARED, *ignored}
    if one.get("data.transforms.square") and other.get("data.transforms.square"):
        keys.discard("data.transforms.size_divisor")  # the sides of squares are given
    defaults = _defaults(str(other.get("task", one.get("task"))))
    return sorted(key for key in keys if one.get(key, defaults.get(key)) != other.get(key, defaults.get(key)))


@lru_cache
def _defaults(task: str) -> dict[str, Any]:
    """Return the defaults of all settings of a task, no settings for an unknown task."""
    try:
        return flat_settings(config_from_dict({"task": task}))
    except InputError:
        return {}


# Input of a report.


def collect(folder: ExperimentFolder, baseline: str | None = None, primary: str | None = None) -> dict[str, Any]:
    """Return the arguments of :func:`detr_bf.comparison.document.analyze` for the finished cells of a folder.

    Records of runs that have finished without one are written. Without ``cells/experiment.json`` the arms are those of
    the records, and the baseline is ``off`` or the first by name.

    Raises:
        InputError: there are no finished cells, or they cannot be compared with each other.
    """
    records = []
    for cell in folder.trained():
        path = folder.record(cell)
        if not path.exists():
            write_json(path, cell_record(folder.run(cell), cell))
        record = read_cell(path)
        if (record["arm"], record["seed"], record["fold"]) != tuple(cell):
            raise InputError(f"{printable(path)} is the record of another cell: give it the name of its arm and seed")
        records.append(record)
    if not records:
        raise InputError(
            f"{printable(folder.path)} has no finished cells: expected records in cells/ARM/seed_S.json, or finished "
            "runs in runs/ARM/seed_S"
        )
    return _arguments(records, _read_description(folder.description), folder.path, baseline, primary)


def collect_runs(paths: Sequence[Path], baseline: str | None = None, primary: str | None = None) -> dict[str, Any]:
    """Return the arguments of :func:`detr_bf.comparison.document.analyze` for run folders.

    Runs whose settings are equal, apart from seed, fold and folder, are one arm. Its name is that of its first run
    folder, or of the folder above one called ``seed_S``; the first arm is the baseline.

    Raises:
        InputError: a folder holds no finished run, two runs are equal, or runs cannot be compared with each other.
    """
    names: dict[str, str] = {}  # of an arm, by its settings
    known: dict[tuple[str, int, int | None], Path] = {}
    records = []
    for path in paths:
        run = RunFolder(path)
        if not (run.config.exists() and run.evaluation.exists()):
            missing = [each.name for each in (run.config, run.evaluation) if not each.exists()]
            raise InputError(f"{printable(path)} is not the folder of a finished run: {listed(missing)} missing")
        config = saved_config(run.config)
        settings = run_settings(run)
        fold = settings["data.fold"] if settings.get("data.folds") else None
        shared = {key: value for key, value in settings.items() if key not in (*NOT_COMPARED, "data.fold")}
        key = json.dumps(shared, sort_keys=True)
        names.setdefault(key, _arm_name(path, names.values()))
        cell = ExperimentCell(names[key], config.seed, fold)
        if cell in known:
            raise InputError(
                f"{printable(path)} and {printable(known[cell])} have the same settings and the same seed: give one of "
                "them"
            )
        known[cell] = path
        records.append(cell_record(run, cell))
    return _arguments(records, {"baseline": next(iter(names.values()))}, Path("comparison"), baseline, primary)


def _arm_name(path: Path, taken: Iterable[str]) -> str:
    path = path.resolve()
    name = path.parent.name if ExperimentCell.named("", path.name) else path.name
    name = re.sub(r"[^A-Za-z0-9_.-]+|^[.-]+", "_", re.sub(r"[_-]?seed_?\d+$", "", name)) or "run"
    taken, number = set(taken), 2
    while (numbered := name if number == 2 else f"{name}-{number - 1}") in taken:
        number += 1
    return numbered


def _arguments(
    records: Sequence[dict[str, Any]],
    description: Mapping[str, Any],
    folder: Path,
    baseline: str | None,
    primary: str | None,
) -> dict[str, Any]:
    present = list(dict.fromkeys(record["arm"] for record in records))
    base = baseline or description.get("baseline") or ("off" if "off" in present else present[0])
    if base not in present:
        raise InputError(f"the baseline '{printable(base)}' has no finished cells; arms with cells: {listed(present)}")
    names = [name for name in description.get("arms", present) if name in present]
    if base not in names:
        raise InputError(f"the baseline '{printable(base)}' is not an arm of the experiment: {listed(names)}")
    if left_out := [name for name in present if name not in names]:
        logger.warning("left out, because the experiment does not have these arms: %s", listed(left_out))
    kept = [record for record in records if record["arm"] in names]
    if len(names) < 2:
        raise InputError(f"there is nothing to compare: only the arm '{printable(base)}' has finished cells")
    _check_comparable(kept)
    first = {record["arm"]: record["settings"] for record in reversed(kept)}
    names.sort(key=lambda name: name != base)
    overrides = description.get("arms") or {name: _differences(first[name], first[base]) for name in names}
    return {
        "cells": sorted(kept, key=lambda record: names.index(record["arm"])),
        "title": description.get("title") or folder.resolve().name,
        "baseline": base,
        "arms": {name: list(overrides[name]) for name in names},
        "contrasts": [(one, other) for one, other in description.get("contrasts", ()) if {one, other} <= {*names}],
        "contrasts_only": description.get("contrasts_only", False),
        "primary": primary or description.get("primary") or default_primary(first[base]),
        "resamples": description.get("resamples", RESAMPLES),
    }


def _differences(settings: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    changed = changed_settings(settings, baseline, ("data.fold",))
    return [f"{key}={json.dumps(settings.get(key), ensure_ascii=False)}" for key in changed]


def _check_comparable(records: Sequence[Mapping[str, Any]]) -> None:
    """Check that all cells measure the same thing on the same images, and that those of an arm have equal settings.

    Raises:
        InputError: they do not.
    """
    first: dict[str, Mapping[str, Any]] = {}
    data: dict[int | None, Mapping[str, Any]] = {}
    for record in records:
        own, same_arm = _name(record), first.setdefault(record["arm"], record)
        if changed := changed_settings(record["settings"], same_arm["settings"], ("data.fold",)):
            raise InputError(
                f"{own} and {_name(same_arm)} are of one arm and have different settings: {listed(changed)}"
            )
        if record["table"]["kind"] != records[0]["table"]["kind"]:
            raise InputError(
                f"{own} measures {record['table']['kind']}, {_name(records[0])} {records[0]['table']['kind']}: compare "
                "runs of one task"
            )
        same_fold = data.setdefault(record["fold"], record)
        if record["data"]["val"]["sha256"] != same_fold["data"]["val"]["sha256"]:
            raise InputError(
                f"{own} and {_name(same_fold)} were evaluated on different validation data (other annotations, image "
                "names or file sizes): compare runs with the same"
            )


def _name(record: Mapping[str, Any]) -> str:
    return printable(ExperimentCell(record["arm"], record["seed"], record["fold"]).name)
