"""Reading ``metrics.jsonl``, and drawing its training and evaluation records as curves over epochs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from detr_bf.errors import InputError
from detr_bf.files import read_records
from detr_bf.report.figures import (
    BLACK,
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    check_suffix,
    clear_lines,
    save_figure,
    title,
)
from detr_bf.report.fonts import plain

logger = logging.getLogger(__name__)

_Record = dict[str, Any]
_Line = tuple[str, str, str]  # name in metrics.jsonl, name in the legend, colour
_TOTAL: tuple[_Line, ...] = (
    ("loss", "total", BLACK),
    ("stream/clean", "clean stream", BLUE),
    ("stream/batchformer", "BatchFormer stream", VERMILION),
)
_TERM_COLOURS = (BLACK, ORANGE, GREEN, PINK, SKY, VERMILION, BLUE)
_TERM_NAMES = {"loss_ce": "cross-entropy", "loss_localization": "relative localization"}
_TERM = re.compile(r"loss_[a-z][a-z0-9_]{0,30}")
_ATTENTION = re.compile(r"attention/\d+(\.\d+)?/(others|entropy)")
_REPEATED = re.compile(r".*_(\d+|enc)")  # terms of auxiliary layers and encoder proposals
_SMALLEST = 1e-100  # smallest value on a logarithmic axis; smaller ones count as 0
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
    """Curves to draw in addition to the training loss and the loss of each stream."""

    terms: tuple[_Line, ...] = ()  # loss terms on a linear axis; other logged terms get a logarithmic one
    terms_title: str = "Terms"
    others_title: str = "Unweighted terms, logarithmic"
    scores: tuple[_Line, ...] = ()  # validation scores, fractions
    groups: tuple[_Line, ...] = ()  # scores of groups of classes, drawn if more than one group was logged
    validation_loss: bool = False  # in the panel of the training loss


DETECTION_CURVES = CurvePlan(
    terms=(
        ("loss_ce", "class", BLUE),
        ("loss_bbox", "box L1", ORANGE),
        ("loss_giou", "box GIoU", GREEN),
        ("loss_mask", "mask focal", PINK),
        ("loss_dice", "mask DICE", SKY),
    ),
    terms_title="Unweighted terms, last decoder layer",
    others_title="Plug-ins, unweighted, logarithmic",
    scores=(
        ("PQ", "PQ", VERMILION),
        ("mask/AP", "mask AP", GREEN),
        ("AP50", "AP50", SKY),
        ("AP", "AP", BLACK),
        ("AP75", "AP75", PINK),
    ),
)


def draw_curves(source: Metrics | str | Path, output: str | Path, plan: CurvePlan = DETECTION_CURVES) -> None:
    """Draw training loss, loss terms and validation scores over epochs and write the figure atomically.

    Long loss curves are drawn faint, with their running mean on top.

    Args:
        source: the metrics or their file.
        output: ``.svg``, ``.png`` or ``.pdf``; the suffix chooses the format.
        plan: names and colours of the curves.

    Raises:
        InputError: there are no records to draw, or the suffix is another one.
    """
    check_suffix(output, "curves are")
    metrics = source if isinstance(source, Metrics) else read_metrics(source)
    if not (metrics.train or metrics.val):
        raise InputError(
            f"{'the run' if isinstance(source, Metrics) else source} has no training and no evaluation record: let it "
            "log at least one step"
        )
    save_figure(output, _figure(metrics, plan))


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
    records = [
        record
        for record in lines
        if record is not None and _is_number(record.get("epoch")) and 0 <= record["epoch"] < _MAX_EPOCH
    ]
    if damaged := len(lines) - len(records):
        logger.warning("%s: %d of %d lines are damaged and left out", path, damaged, len(lines))
    return Metrics(_by_step(records, "train"), _by_step(records, "val"))


def series(records: Iterable[_Record], name: str) -> tuple[list[float], list[float]]:
    """Return epochs and values of one quantity, without records where it is missing or not a finite number."""
    points = [(record["epoch"], record[name]) for record in records if _is_number(record.get(name))]
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


def _is_number(value: Any) -> bool:
    """Check for a finite number that can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _figure(metrics: Metrics, plan: CurvePlan) -> Figure:
    further = _further_terms(metrics, plan)
    attention = _attention_lines(metrics)
    panels = 1 + bool(plan.terms) + bool(further) + bool(plan.scores) + bool(attention)
    figure = Figure(figsize=(max(13, 4.4 * panels), 3.9), layout="constrained", facecolor="white")
    first, *others = figure.subplots(1, panels, squeeze=False)[0]
    _plot_losses(first, metrics.train, _TOTAL)
    if plan.validation_loss:
        epochs, values = series(metrics.val, "loss")
        if values:
            _plot(first, epochs, values, "validation", GREEN)
    _finish_losses(first, "Loss" if plan.validation_loss else "Training loss")
    if plan.terms:
        _plot_losses(others[0], metrics.train, plan.terms)
        _finish_losses(others[0], plan.terms_title)
    if further:
        _plot_losses(others[bool(plan.terms)], metrics.train, further)
        _finish_logarithmic(others[bool(plan.terms)], plan.others_title)
    if attention:
        axes = others[bool(plan.terms) + bool(further)]
        _plot_losses(axes, metrics.train, attention)
        _finish(axes, "Batch attention")
        axes.set_ylim(0, 1)
    if plan.scores:
        _plot_scores(others[-1], metrics.val, plan)
    last_epoch = max(record["epoch"] for record in (*metrics.train, *metrics.val))
    for axes in (first, *others):
        axes.set_xlim(0, 1.02 * last_epoch or 1.0)
    return figure


def _further_terms(metrics: Metrics, plan: CurvePlan) -> tuple[_Line, ...]:
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
    logged = [name for name in names if series(metrics.train, name)[1]][: len(_TERM_COLOURS)]
    if len(logged) < 2 and not plan.terms:
        return ()
    return tuple(
        (name, _with_weight(metrics.train, name), colour) for name, colour in zip(logged, _TERM_COLOURS, strict=False)
    )


def _attention_lines(metrics: Metrics) -> tuple[_Line, ...]:
    """Return the logged shares and entropies of batch attention, without those of single heads."""
    names = dict.fromkeys(name for record in metrics.train for name in record if _ATTENTION.fullmatch(name))
    found = [name for name in names if series(metrics.train, name)[1]][: len(_TERM_COLOURS)]
    labels = {"others": "share on other images", "entropy": "entropy over the batch"}
    return tuple(
        (name, f"layer {name.split('/')[1]}: {labels[name.split('/')[2]]}", colour)
        for name, colour in zip(found, _TERM_COLOURS, strict=False)
    )


def _with_weight(records: tuple[_Record, ...], name: str) -> str:
    """Return the name of a term with its weight in the total unless it is 1: ``relative localization x 0.01``."""
    text = _TERM_NAMES.get(name) or name.removeprefix("loss_").replace("_", " ")
    weights = series(records, f"weight/{name}")[1]
    low, high = min(weights, default=1.0), max(weights, default=1.0)
    if low == high == 1:
        return text
    return f"{text} x {low:.3g}" + (f" to {high:.3g}" if low != high else "")


def _plot_losses(axes: Axes, records: tuple[_Record, ...], lines: tuple[_Line, ...]) -> None:
    for name, label, colour in lines:
        epochs, values = series(records, name)
        if len(values) >= _SMOOTH_FROM:
            axes.plot(epochs, values, color=colour, linewidth=0.8, alpha=0.2)
            values = running_mean(np.asarray(values), max(5, len(values) // 25)).tolist()
        if values:
            _plot(axes, epochs, values, label, colour)


def _finish_losses(axes: Axes, text: str) -> None:
    _finish(axes, text)
    axes.set_ylim(bottom=0)


def _finish_logarithmic(axes: Axes, text: str) -> None:
    """Make the axis logarithmic, with the legend below the curves; only positive values are drawn."""
    _finish(axes, text)
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines] or [np.empty(0)])
    values = values[values > _SMALLEST]
    if not values.size:
        return
    high = 1.2 * values.max()
    low = np.clip(values.min(), 1e-12 * high, high / 4)
    decades = np.log10(high / low) / (1 - 0.07 * (1 + len(axes.get_legend_handles_labels()[0])))
    axes.set_yscale("log")
    axes.set_ylim(high / 10**decades, high)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2 else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _plot_scores(axes: Axes, records: tuple[_Record, ...], plan: CurvePlan) -> None:
    groups = [line for line in plan.groups if series(records, line[0])[1]]
    highest = 0.0
    for name, label, colour in (*(groups if len(groups) > 1 else ()), *plan.scores):
        epochs, values = series(records, name)
        if values:
            _plot(axes, epochs, [100 * value for value in values], f"{label} {100 * values[-1]:.1f}", colour)
            highest = max(highest, 100 * max(values))
    _finish(axes, "Validation (%)")
    axes.set_ylim(0, min(102.0, 1.15 * highest) or 1.0)


def _plot(axes: Axes, epochs: list[float], values: list[float], label: str, colour: str) -> None:
    marker = "o" if len(values) <= 20 else ""
    axes.plot(epochs, values, color=colour, linewidth=1.8, marker=marker, markersize=4, label=plain(label))


def _finish(axes: Axes, text: str) -> None:
    title(axes, text)
    axes.set_xlabel("epoch", color=INK)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    clear_lines(axes)
    if axes.lines:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    else:
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", va="center", color=INK)
        axes.set_yticks([])
