"""The result document of a comparison, from the records of its cells.

A cell is a training run of one arm (variant of the settings) with one seed and, with cross-validation, one fold. Two
cells of different arms with the same seed and fold are a pair: they differ by the settings of the arm alone. All values
are fractions, and higher is better for every metric.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.files import CHOSEN_SETTINGS
from detr_bf.common.text import counted, listed, printable
from detr_bf.comparison.resampling import DifferenceEstimates, Resampled, resample, resample_differences
from detr_bf.comparison.statistics import (
    CONFIDENCE,
    EXACT_SIGNS,
    POWER,
    SIGNIFICANCE,
    Estimate,
    holm,
    sign_flip_p,
    student_estimate,
)
from detr_bf.comparison.tables import ImageTable, table_from_dict

RESULT_FORMAT = "detr_bf comparison 1"
_PRIMARY = {"boxes": "AP", "panoptic": "PQ", "classifier": "top1"}  # by kind of table
_PER_CELL = ("seed", "output_dir", "data.fold")  # settings that name a cell
_VERSIONS = ("commit", "python", "torch", "detr_bf", "torchvision", "timm", "numpy", "scipy", "pycocotools", "hotcoco")

_Record = Mapping[str, Any]
_Pair = tuple[int, int | None]  # seed and fold
_Key = tuple[str, int, int | None]  # arm, seed and fold


def analyze(
    cells: Iterable[_Record],
    *,
    title: str,
    baseline: str,
    arms: Mapping[str, Sequence[str]],
    contrasts: Sequence[tuple[str, str]] = (),
    contrasts_only: bool = False,
    primary: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the result document of a comparison, ready for JSON; equal arguments give an equal document.

    An arm is better or worse than another if the interval of the difference in the primary metric over new seeds and
    new images excludes 0 and its p, adjusted for all comparisons (Holm), is below 0.05. The sign-flip p, which ignores
    the choice of the test images, decides nothing. The other metrics are exploratory: their interval alone decides.

    Args:
        cells: cell records of format ``detr_bf cell 1``.
        baseline: the arm that the others are compared with.
        arms: name -> overrides of each arm, in the order of the report.
        contrasts: further pairs of arms to compare, the second taken from the first.
        contrasts_only: do not compare the other arms with the baseline, which is then that of the costs alone.
        primary: the metric that the verdicts are about; by default AP, PQ or top1.
        resamples, seed: of the bootstrap over images.

    Raises:
        InputError: the baseline has no cell, a cell is given twice, is damaged or measures another task or other images
            than the others, or the primary metric was not measured.
    """
    records = _by_key(cells, arms)
    present = list(dict.fromkeys(key[0] for key in records))
    if baseline not in present:
        start = f"the baseline '{printable(baseline)}' has no finished cell"
        raise InputError(f"{start}; arms with finished cells: {listed(present) or 'none'}")
    tables = _tables(records)
    found = resample(tables, resamples, seed)
    primary = primary or _PRIMARY[next(iter(tables.values())).kind]
    measured = next(iter(found.values())).values
    if primary not in measured:
        raise InputError(f"the primary metric '{printable(primary)}' was not measured; measured are {listed(measured)}")
    share = _test_share(records)
    planned = [] if contrasts_only else [(name, baseline) for name in present]
    planned += [pair for pair in contrasts if contrasts_only or baseline not in pair]
    compared = _differences(planned, primary, records, found, share)
    document = {
        "format": RESULT_FORMAT,
        "title": title,
        "baseline": baseline,
        "primary": primary,
        "confidence": CONFIDENCE,
        "resamples": resamples,
        "arms": [_arm(name, list(arms[name]), baseline, primary, records, found, share) for name in present],
        "differences": [own for own in compared if own["against"] == baseline],
        "contrasts": [own for own in compared if own["against"] != baseline],
        "settings": _settings(records, present),
        "circumstances": _circumstances(records),
    }
    return document | {"sentences": list(_sentences(document, records, found, arms, planned))}


def _by_key(cells: Iterable[_Record], arms: Mapping[str, Sequence[str]]) -> dict[_Key, _Record]:
    records: dict[_Key, _Record] = {}
    for record in cells:
        key = record["arm"], record["seed"], record["fold"]
        if key in records:
            raise InputError(f"{_cell_name(key)} is given twice: expected each cell once")
        if record["arm"] in arms:
            records[key] = record
    order = list(arms)
    return {key: records[key] for key in sorted(records, key=lambda key: (order.index(key[0]), *_sortable(key[1:])))}


def _sortable(pair: _Pair) -> tuple[int, int]:
    return pair[0], -1 if pair[1] is None else pair[1]


def _cell_name(key: _Key) -> str:
    fold = "" if key[2] is None else f", fold {key[2]}"
    return f"the cell of arm {printable(key[0])}, seed {key[1]}{fold}"


def _tables(records: Mapping[_Key, _Record]) -> dict[_Key, ImageTable]:
    """Read all tables; those of one fold must have the same images.

    Raises:
        InputError: a table is damaged, of another kind, or has other images.
    """
    tables: dict[_Key, ImageTable] = {}
    first: dict[int | None, _Key] = {}
    for key, record in records.items():
        with prefix_errors(_cell_name(key)):
            table = tables[key] = table_from_dict(record["table"])
            one = first.setdefault(key[2], key)
            reference = tables[next(iter(tables))]
            if table.kind != reference.kind:
                raise InputError(f"its results are of kind {table.kind}, others of {reference.kind}: compare one task")
            if table.image_ids != tables[one].image_ids:
                raise InputError(
                    f"it was evaluated on other images than {_cell_name(one)}: only runs with the same validation "
                    "images can be compared; give the fold of each cell"
                )
    return tables


def _test_share(records: Mapping[_Key, _Record]) -> float:
    """Return the mean of test images / training images over the cells."""
    counts = [(record["data"]["val"]["images"], record["data"]["train"]["images"]) for record in records.values()]
    return float(np.mean([test / max(1, train) for test, train in counts]))


def _pairs(records: Mapping[_Key, _Record], arm: str, baseline: str) -> list[_Pair]:
    return [key[1:] for key in records if key[0] == arm and (baseline, *key[1:]) in records]


def _arm(
    name: str,
    overrides: list[str],
    baseline: str,
    primary: str,
    records: Mapping[_Key, _Record],
    found: Mapping[_Key, Resampled],
    share: float,
) -> dict[str, Any]:
    keys = [key for key in records if key[0] == name]
    metrics = {}
    for metric in dict.fromkeys(metric for key in keys for metric in found[key].values):
        values = [found[key].values[metric] for key in keys]
        metrics[metric] = {**_mean(keys, values, share), "values": [_number(value) for value in values]}
    return {
        "name": name,
        "overrides": overrides,
        "cells": [list(key[1:]) for key in keys],
        "metrics": metrics,
        "curve": _curve(keys, primary, records, share),
        "cost": _cost(_pairs(records, name, baseline), name, baseline, records),
    }


def _mean(keys: Sequence[_Key], values: Sequence[float], share: float) -> dict[str, float | None]:
    """Return mean and interval of the finite values."""
    known = [(value, key[2]) for value, key in zip(values, keys, strict=True) if math.isfinite(value)]
    if not known:
        return {"mean": None, **_ends(None)}
    estimate = student_estimate([value for value, _ in known], [fold for _, fold in known], share)
    return {"mean": estimate.mean, **_ends(estimate)}


def _curve(keys: Sequence[_Key], primary: str, records: Mapping[_Key, _Record], share: float) -> list[dict[str, Any]]:
    """Return mean and interval of the primary metric at every epoch at which cells were evaluated."""
    points: dict[float, list[tuple[_Key, float]]] = {}
    for key in keys:
        for entry in records[key]["curve"]:
            value = entry["metrics"].get(primary)
            if value is not None:
                points.setdefault(entry["epoch"], []).append((key, value))
    curve = []
    for epoch, own in sorted(points.items()):
        mean = _mean([key for key, _ in own], [value for _, value in own], share)
        curve.append({"epoch": epoch, **mean, "count": len(own)})
    return curve


def _cost(pairs: Sequence[_Pair], arm: str, baseline: str, records: Mapping[_Key, _Record]) -> dict[str, Any]:
    """Return the paired ratios to the baseline; mean and interval are those of the logarithms, taken back.

    Memory is that of the device if both cells have it, else that of the process.
    """
    both = [(records[arm, seed, fold]["cost"], records[baseline, seed, fold]["cost"]) for seed, fold in pairs]
    has_device = all(cost.get("device_memory_mib") for costs in both for cost in costs)
    memory = "device_memory_mib" if has_device else "peak_memory_mib"
    ratios: dict[str, Any] = {}
    names = {"train_seconds_ratio": "train_seconds", "step_seconds_ratio": "step_seconds", "memory_ratio": memory}
    for name, key in names.items():
        logarithms = [math.log(own[key] / base[key]) for own, base in both if own.get(key) and base.get(key)]
        estimate = student_estimate(logarithms) if logarithms else None
        numbers = {"mean": estimate.mean if estimate else None, **_ends(estimate)}
        ratios[name] = {kind: None if value is None else math.exp(value) for kind, value in numbers.items()}
    rows = [own["rows"] / base["rows"] for own, base in both if own.get("rows") and base.get("rows")]
    return ratios | {"rows_ratio": rows[0] if rows else None}


def _differences(
    planned: Sequence[tuple[str, str]],
    primary: str,
    records: Mapping[_Key, _Record],
    found: Mapping[_Key, Resampled],
    share: float,
) -> list[dict[str, Any]]:
    """Return the differences, arm - other, of the planned pairs of arms that have cells in common."""
    differences: list[dict[str, Any]] = []
    for arm, other in planned:
        pairs = _pairs(records, arm, other)
        if arm == other or not pairs:
            continue
        cells = {(seed, fold): (found[arm, seed, fold], found[other, seed, fold]) for seed, fold in pairs}
        metrics = {name: _metric_difference(own) for name, own in resample_differences(cells, share).items()}
        differences.append({"arm": arm, "against": other, "pairs": [list(p) for p in pairs], "metrics": metrics})
    _adjust([own["metrics"][primary] for own in differences])
    return differences


def _metric_difference(found: DifferenceEstimates) -> dict[str, Any]:
    both = found.both
    known = [value for value in found.values if value is not None]
    interval = both.interval() if both else None
    verdict = "undecided"
    if interval is not None and interval[0] > 0:
        verdict = "better"
    elif interval is not None and interval[1] < 0:
        verdict = "worse"
    return {
        "mean": _number(found.seeds.mean),
        "values": list(found.values),
        "seeds": _ends(found.seeds),
        "images": _ends(found.images),
        "both": _ends(both),
        "p": both.p_value if both else None,
        "p_holm": None,
        "p_sign_flip": sign_flip_p(known) if known else None,
        "detectable": both.detectable() if both else None,
        "verdict": verdict,
    }


def _adjust(entries: Sequence[dict[str, Any]]) -> None:
    """Add Holm's p to the primary metric of each difference, and withdraw verdicts that it does not support."""
    tested = [entry for entry in entries if entry["p"] is not None]
    for entry, adjusted in zip(tested, holm([entry["p"] for entry in tested]), strict=True):
        entry["p_holm"] = adjusted
        if adjusted >= SIGNIFICANCE:
            entry["verdict"] = "undecided"


def _ends(estimate: Estimate | None) -> dict[str, float | None]:
    interval = estimate.interval() if estimate else None
    return {"low": interval[0], "high": interval[1]} if interval else {"low": None, "high": None}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _settings(records: Mapping[_Key, _Record], arms: Sequence[str]) -> list[dict[str, Any]]:
    """Return the settings that differ between arms, except for those that name a cell."""
    first = {arm: next(record["settings"] for key, record in records.items() if key[0] == arm) for arm in arms}
    keys = dict.fromkeys(key for settings in first.values() for key in settings if key not in _PER_CELL)
    values = {key: {arm: own[key] for arm, own in first.items() if key in own} for key in keys}
    return [
        {"key": key, "values": own}
        for key, own in values.items()
        if len(own) < len(arms) or any(value != next(iter(own.values())) for value in own.values())
    ]


def _circumstances(records: Mapping[_Key, _Record]) -> dict[str, Any]:
    """Return the data by split, fold and, where they differ, seed; distinct machines and versions; and all commands."""
    data: dict[str, Any] = {}
    for split in ("train", "val"):
        drawn = {(key[2], json.dumps(record["data"][split], sort_keys=True)) for key, record in records.items()}
        by_seed = len(drawn) > len({key[2] for key in records})
        for key, record in records.items():
            name = f"{split}{f', seed {key[1]}' if by_seed else ''}{'' if key[2] is None else f', fold {key[2]}'}"
            data[name] = record["data"][split]
    machines = [record["machine"] for record in records.values()]
    others = ("command", CHOSEN_SETTINGS, *_VERSIONS)
    hardware = [{k: v for k, v in machine.items() if k not in others} for machine in machines]
    versions = {
        name: listed(dict.fromkeys(machine[name] for machine in machines if name in machine))
        for name in _VERSIONS
        if any(name in machine for machine in machines)
    }
    commands = list(dict.fromkeys(machine["command"] for machine in machines if "command" in machine))
    distinct = [machine for place, machine in enumerate(hardware) if machine not in hardware[:place]]
    return {"data": data, "machines": distinct, "commands": commands, "versions": versions}


# Findings in words.


def _sentences(
    document: Mapping[str, Any],
    records: Mapping[_Key, _Record],
    found: Mapping[_Key, Resampled],
    arms: Iterable[str],
    planned: Sequence[tuple[str, str]],
) -> Iterator[str]:
    primary, baseline = document["primary"], document["baseline"]
    differences = [*document["differences"], *document["contrasts"]]
    for difference in differences:
        pairs = [(seed, fold) for seed, fold in difference["pairs"]]
        total = sum({fold: len(found[difference["arm"], seed, fold].image_ids) for seed, fold in pairs}.values())
        yield _finding(difference, primary, f"{_pairs_text(pairs)}, {counted(total, 'image')}")
        yield from _unpaired(difference["arm"], difference["against"], pairs, records)
    asked = {name for pair in planned for name in pair} - {baseline}
    compared = {difference[side] for difference in differences for side in ("arm", "against")}
    for arm in document["arms"]:
        if arm["name"] in asked - compared:
            name = printable(arm["name"])
            yield f"{name} is not compared: none of its cells has the seed and fold of a cell of the other arm."
    if missing := [name for name in arms if name not in {arm["name"] for arm in document["arms"]}]:
        yield f"Without a finished cell, and therefore left out: {listed(missing)}."
    if differences:
        yield from _tests(differences, primary)
        yield from _exploratory(differences, primary)
    if len(document["circumstances"]["machines"]) > 1:
        yield "The cells ran on different machines: the ratios of times contain the differences between them."
    commits = dict.fromkeys(str(record["machine"].get("commit", "unknown"))[:12] for record in records.values())
    if len(commits) > 1:
        yield f"The cells were trained with {len(commits)} versions of the code (commits {listed(commits)})."
    yield from _uneven(records)


def _finding(difference: Mapping[str, Any], primary: str, basis: str) -> str:
    own = difference["metrics"][primary]
    name = f"{printable(difference['arm'])} minus {printable(difference['against'])}: {printable(primary)}"
    if own["mean"] is None:
        return f"{name} cannot be compared: there is no ground truth for it ({basis})."
    start = f"{name} {_signed(own['mean'])}"
    if own["both"]["low"] is None:
        return f"{start} ({basis}): undecided. One pair does not tell how much results differ between seeds."
    text = f"{start}, {_interval_text(own['both'])} for new seeds and new images ({basis}): {own['verdict']}."
    if own["verdict"] == "undecided" and own["p"] < SIGNIFICANCE:
        text += (
            f" The interval excludes 0, but p is {own['p_holm']:.3f} after correction for the number of comparisons."
        )
    return (
        f"{text} Runs and images with this spread tell a difference of {own['detectable']:.3f} or more with "
        f"{100 * POWER:.0f} % power."
    )


def _pairs_text(pairs: Sequence[_Pair]) -> str:
    seeds, folds = {seed for seed, _ in pairs}, {fold for _, fold in pairs}
    if len(folds) < 2:
        return counted(len(pairs), "seed")
    if len(pairs) == len(folds):
        return f"{counted(len(folds), 'fold')} with one seed each"
    return f"{counted(len(folds), 'fold')} and {counted(len(seeds), 'seed')}, {len(pairs)} pairs"


def _unpaired(arm: str, baseline: str, pairs: Sequence[_Pair], records: Mapping[_Key, _Record]) -> Iterator[str]:
    own, other = ({key[1:] for key in records if key[0] == name} for name in (arm, baseline))
    alone = sorted(own ^ other, key=_sortable)
    if alone:
        texts = [f"seed {seed}" if fold is None else f"seed {seed} of fold {fold}" for seed, fold in alone]
        verb = "is" if len(texts) == 1 else "are"
        yield (
            f"{listed(texts)} {verb} not in both {printable(arm)} and {printable(baseline)}: the difference is that of "
            f"the {counted(len(pairs), 'common pair')}."
        )


def _tests(differences: Sequence[Mapping[str, Any]], primary: str) -> Iterator[str]:
    adjusted = sum(own["metrics"][primary]["p_holm"] is not None for own in differences)
    if adjusted > 1:
        yield (
            f"The verdicts on {printable(primary)} are adjusted for {adjusted} comparisons (Holm); the intervals and "
            "the differences told with 80 % power are not."
        )
    least = min(len(own["pairs"]) for own in differences)
    best, exact = 2 / 2**least if least else 1, "exact" if least <= EXACT_SIGNS else "estimated"
    if best >= SIGNIFICANCE:
        yield (
            f"With {counted(least, 'pair')} the exact sign-flip p cannot be below {min(1, best):.4g}, so that it could "
            "not call any difference significant; the verdicts rest on the interval for new seeds and new images."
        )
    else:
        yield (
            f"The {exact} sign-flip p does not take the choice of the test images into account and decides no verdict."
        )


def _exploratory(differences: Sequence[Mapping[str, Any]], primary: str) -> Iterator[str]:
    """Report the other metrics whose interval excludes 0, and how many would do so by chance."""
    others = [
        (own, metric, entry)
        for own in differences
        for metric, entry in own["metrics"].items()
        if metric != primary and entry["p"] is not None
    ]
    if not others:
        return
    told = [(own, metric, entry) for own, metric, entry in others if entry["verdict"] != "undecided"]
    chance = SIGNIFICANCE * len(others)
    yield (
        f"Exploratory: of {counted(len(others), 'comparison')} in other metrics, without adjustment, {len(told)} "
        f"{'excludes' if len(told) == 1 else 'exclude'} 0; if nothing differed, about {chance:.1f} would."
    )
    for own, metric, entry in told:
        yield (
            f"Exploratory: {printable(own['arm'])} is {entry['verdict']} than {printable(own['against'])} in "
            f"{printable(metric)}, {_signed(entry['mean'])}, {_interval_text(entry['both'])}."
        )


def _uneven(records: Mapping[_Key, _Record]) -> Iterator[str]:
    """Report settings that differ between the cells of one arm although they should not."""
    values: dict[tuple[str, str], list[Any]] = {}
    for key, record in records.items():
        for name, value in record["settings"].items():
            own = values.setdefault((key[0], name), [])
            if name not in _PER_CELL and value not in own:
                own.append(value)
    for (arm, name), own in values.items():
        if len(own) > 1:
            yield f"The cells of {printable(arm)} have different values of {printable(name)}: {listed(own)}."


def _interval_text(ends: Mapping[str, float]) -> str:
    return f"{100 * CONFIDENCE:.0f} % interval {_signed(ends['low'])} to {_signed(ends['high'])}"


def _signed(value: float) -> str:
    if 0 < abs(value) < 0.0005:
        return f"{value:+.1g}"
    return f"{value + 0.0:+.3f}"  # without the sign of -0.0
