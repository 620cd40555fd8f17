"""Reading ``metrics.jsonl``, and charts of its training and evaluation records over epochs."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from detr_bf.common.errors import InputError
from detr_bf.common.files import is_number, read_records
from detr_bf.common.text import printable
from detr_bf.report.charts import CHART_COLOURS, Chart, Line

logger = logging.getLogger(__name__)

_Record = dict[str, Any]
_Name = tuple[str, str, str]  # name in metrics.jsonl, name in the legend, colour
_TOTAL: tuple[_Name, ...] = (
    ("loss", "total", "black"),
    ("stream/clean", "clean stream", "blue"),
    ("stream/batchformer", "BatchFormer stream", "red"),
)
_WEIGHTS: tuple[_Name, ...] = (("score/averaged", "averaged", "black"), ("score/raw", "raw", "orange"))
_TERM_NAMES = {"loss_ce": "cross-entropy", "loss_localization": "relative localization"}
_GROUP_NAMES = {"dn": "denoising"}
_TERM = re.compile(r"loss_[a-z][a-z0-9_]{0,30}")
_ATTENTION = re.compile(r"attention/\d+(\.\d+)?/(others|entropy)")
_REPEATED = re.compile(r".*_(\d+|enc)")  # terms of auxiliary layers and encoder proposals
_SMOOTH_FROM = 40  # points; shorter curves are drawn without a running mean
_LARGEST = 1e100  # largest absolute value that is drawn: sums and margins stay finite
_MAX_EPOCH = 1e9


@dataclass(frozen=True)
class Metrics:
    """Training and evaluation records, each in ascending order of unique steps."""

    train: tuple[_Record, ...] = ()
    val: tuple[_Record, ...] = ()


@dataclass(frozen=True)
class CurvePlan:
    """Curves in addition to the training loss, the loss of each stream, batch attention and the learning rates."""

    terms: tuple[_Name, ...] = ()  # loss terms on a linear axis; other logged terms get a logarithmic one
    terms_title: str = "Terms"
    others_title: str = "Unweighted terms, logarithmic"
    scores: tuple[_Name, ...] = ()  # validation scores, fractions
    groups: tuple[_Name, ...] = ()  # scores of groups of classes, drawn if more than one group was logged


DETECTION_CURVES = CurvePlan(
    terms=(
        ("loss_ce", "class", "blue"),
        ("loss_bbox", "box L1", "orange"),
        ("loss_giou", "box GIoU", "green"),
        ("loss_mask", "mask focal", "pink"),
        ("loss_dice", "mask DICE", "sky"),
    ),
    terms_title="Unweighted terms, last decoder layer",
    others_title="Further terms, unweighted, logarithmic",
    scores=(
        ("PQ", "PQ", "red"),
        ("mask/AP", "mask AP", "green"),
        ("AP50", "AP50", "sky"),
        ("AP", "AP", "black"),
        ("AP75", "AP75", "pink"),
    ),
)


def read_metrics(path: str | Path) -> Metrics:
    """Read a metrics file; if a resumed run logged a step twice, the later line counts.

    Lines without a valid kind, step and epoch are left out; a warning gives their number.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"metrics file not found: {path}. A run writes it into its output folder")
    lines = [record for _, record in read_records(path)]
    records = [record for record in lines if record is not None and is_number(record.get("epoch"), 0, _MAX_EPOCH)]
    if damaged := len(lines) - len(records):
        logger.warning("%s: %d of %d lines are damaged and left out", path, damaged, len(lines))
    return Metrics(_by_step(records, "train"), _by_step(records, "val"))


def series(records: Iterable[_Record], name: str) -> tuple[list[float], list[float]]:
    """Return epochs and values of one quantity, without records where it is missing or not a finite number."""
    points = [(record["epoch"], record[name]) for record in records if is_number(record.get(name), -_LARGEST, _LARGEST)]
    return [float(epoch) for epoch, _ in points], [float(value) for _, value in points]


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the last ``window`` values, fewer at the start; (N,) float64 -> (N,) float64."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return (sums[last] - sums[first]) / (last - first)


def _by_step(records: Iterable[_Record], kind: str) -> tuple[_Record, ...]:
    latest = {record["step"]: record for record in records if record["kind"] == kind}
    return tuple(latest[step] for step in sorted(latest))


def curves(metrics: Metrics, plan: CurvePlan, weights: bool = True) -> list[Chart]:
    """Return charts of the losses, their terms, learning rates and validation scores over epochs, as far as logged.

    Long curves of losses are drawn faint, with their running mean on top. ``weights`` adds those of loss terms to the
    names of the lines.
    """
    losses = _loss_lines(metrics.train, _TOTAL)
    epochs, values = series(metrics.val, "loss")
    if values:
        losses.append(Line("validation", epochs, values, "green"))
    rates = dict.fromkeys(name for record in metrics.train for name in record if name.startswith("lr/"))
    rate_lines = [
        Line(printable(name[3:]), *series(metrics.train, name), colour)
        for name, colour in zip(rates or ("lr",), CHART_COLOURS, strict=False)
    ]
    val_epochs, scores = series(metrics.val, "score")
    best = (val_epochs[scores.index(max(scores))], "best") if len(scores) > 1 else None
    found: tuple[tuple[str, list[Line], dict[str, Any]], ...] = (
        ("Loss", losses, {}),
        (plan.terms_title, _loss_lines(metrics.train, plan.terms), {}),
        (plan.others_title, _loss_lines(metrics.train, _further_terms(metrics, plan, weights)), {"log": True}),
        ("Batch attention", _loss_lines(metrics.train, _attention_lines(metrics)), {"high": 1.0}),
        ("Learning rates", rate_lines, {}),
        ("Validation (%)", _score_lines(metrics, plan), {"mark": best}),
        ("Score of the weights (%)", _percent_lines(metrics, _WEIGHTS if plan.scores else ()), {}),
    )
    last = max((record["epoch"] for record in (*metrics.train, *metrics.val)), default=0.0)
    drawn = ((title, [line for line in lines if len(line.x)], more) for title, lines, more in found)
    return [Chart(title, lines, x_range=(0.0, last or 1.0), **more) for title, lines, more in drawn if lines]


def curves_of_runs(runs: Mapping[str, Metrics], plan: CurvePlan) -> list[Chart]:
    """Return one chart for each quantity that at least one run has logged, with a line for each run.

    Raises:
        InputError: there are more runs than colours.
    """
    if len(runs) > len(CHART_COLOURS):
        raise InputError(f"{len(runs)} runs side by side: at most {len(CHART_COLOURS)} can be told apart")
    panels: dict[tuple[str, str], list[tuple[Chart, Line]]] = defaultdict(list)
    for (run, metrics), colour in zip(runs.items(), CHART_COLOURS, strict=False):
        for panel in curves(metrics, plan, weights=False):
            for line in panel.lines:
                panels[panel.title, line.name].append((panel, replace(line, name=run, colour=colour)))
    last = max((record["epoch"] for metrics in runs.values() for record in (*metrics.train, *metrics.val)), default=0.0)
    return [
        replace(
            first, title=f"{title}: {name}", lines=[line for _, line in found], x_range=(0.0, last or 1.0), mark=None
        )
        for (title, name), found in panels.items()
        for first, _ in found[:1]
    ]


def _further_terms(metrics: Metrics, plan: CurvePlan, weights: bool) -> tuple[_Name, ...]:
    """Return logged terms missing from the plan, in logged order.

    A single term of a plan without terms is left out: it may be the loss itself.
    """
    planned = {name for name, _, _ in plan.terms}
    names = dict.fromkeys(
        name
        for record in metrics.train
        for name in record
        if name not in planned and _TERM.fullmatch(name) and not _REPEATED.fullmatch(name)
    )
    logged = [name for name in names if series(metrics.train, name)[1]][: len(CHART_COLOURS)]
    if len(logged) < 2 and not plan.terms:
        return ()
    return tuple(
        (name, _term_name(metrics.train if weights else (), name, plan.terms), colour)
        for name, colour in zip(logged, CHART_COLOURS, strict=False)
    )


def _attention_lines(metrics: Metrics) -> tuple[_Name, ...]:
    """Return the logged shares and entropies of batch attention, without those of single heads."""
    names = dict.fromkeys(name for record in metrics.train for name in record if _ATTENTION.fullmatch(name))
    found = [name for name in names if series(metrics.train, name)[1]][: len(CHART_COLOURS)]
    labels = {"others": "share on other images", "entropy": "entropy over the batch"}
    return tuple(
        (name, f"layer {name.split('/')[1]}: {labels[name.split('/')[2]]}", colour)
        for name, colour in zip(found, CHART_COLOURS, strict=False)
    )


def _term_name(records: tuple[_Record, ...], name: str, planned: Iterable[_Name]) -> str:
    """Return the name of a term with its weight in the total unless it is 1: ``relative localization x 0.01``.

    A term of a group of queries has the name of the ``planned`` term: ``class, denoising`` for ``loss_ce_dn``.
    """
    text = _TERM_NAMES.get(name) or name.removeprefix("loss_").replace("_", " ")
    for term, label, _ in planned:
        if name.startswith(f"{term}_"):
            group = name.removeprefix(f"{term}_")
            text = f"{label}, {_GROUP_NAMES.get(group) or group.replace('_', ' ')}"
    weights = series(records, f"weight/{name}")[1]
    low, high = min(weights, default=1.0), max(weights, default=1.0)
    if low == high == 1:
        return text
    return f"{text} x {low:.3g}" + (f" to {high:.3g}" if low != high else "")


def _loss_lines(records: tuple[_Record, ...], lines: Iterable[_Name]) -> list[Line]:
    """Return lines over epochs; long ones as running means over the faint values."""
    found = []
    for name, label, colour in lines:
        epochs, values = series(records, name)
        raw: list[float] = []
        if len(values) >= _SMOOTH_FROM:
            raw, values = values, running_mean(np.asarray(values), max(5, len(values) // 25)).tolist()
        found.append(Line(label, epochs, values, colour, raw))
    return found


def _score_lines(metrics: Metrics, plan: CurvePlan) -> list[Line]:
    """Return the validation scores in percent."""
    groups = [line for line in plan.groups if series(metrics.val, line[0])[1]]
    return _percent_lines(metrics, (*(groups if len(groups) > 1 else ()), *plan.scores))


def _percent_lines(metrics: Metrics, names: Iterable[_Name]) -> list[Line]:
    found = ((label, *series(metrics.val, name), colour) for name, label, colour in names)
    return [Line(label, epochs, [100 * value for value in values], colour) for label, epochs, values, colour in found]
