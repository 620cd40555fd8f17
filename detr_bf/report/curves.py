"""Curves of a run over its epochs, drawn from its ``metrics.jsonl``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from detr_bf.errors import InputError
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
from detr_bf.report.metrics import Metrics, Record, read_metrics, series

# name in metrics.jsonl, name in the legend, colour
_Line = tuple[str, str, str]
_TOTAL: tuple[_Line, ...] = (
    ("loss", "total", BLACK),
    ("stream/clean", "clean stream", BLUE),
    ("stream/batchformer", "BatchFormer stream", VERMILION),
)
_TERM_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION)
_SMOOTH_FROM = 40  # points; shorter curves are drawn as they are


@dataclass(frozen=True)
class CurvePlan:
    """What is drawn beside the training loss and that of its streams."""

    terms: tuple[_Line, ...] | None = None  # of the loss; None: all that were logged, if they are more than one
    terms_title: str = "Terms"
    scores: tuple[_Line, ...] = ()  # of the validation, fractions
    groups: tuple[_Line, ...] = ()  # the same of parts of the classes, drawn where there is more than one part
    validation_loss: bool = False  # beside that of the training


DETECTION_CURVES = CurvePlan(
    terms=(
        ("loss_ce", "class", BLUE),
        ("loss_bbox", "box L1", ORANGE),
        ("loss_giou", "box GIoU", GREEN),
        ("loss_mask", "mask focal", PINK),
        ("loss_dice", "mask DICE", SKY),
        ("loss_localization", "relative localization", VERMILION),
    ),
    terms_title="Terms, last decoder layer",
    scores=(
        ("PQ", "PQ", VERMILION),
        ("mask/AP", "mask AP", GREEN),
        ("AP50", "AP50", SKY),
        ("AP", "AP", BLACK),
        ("AP75", "AP75", PINK),
    ),
)
CLASSIFICATION_CURVES = CurvePlan(
    scores=(("top5", "top-5", SKY), ("top1", "top-1", BLACK)),
    groups=(("many", "many-shot", BLUE), ("medium", "medium-shot", ORANGE), ("few", "few-shot", VERMILION)),
    validation_loss=True,
)
RECONSTRUCTION_CURVES = CurvePlan(validation_loss=True)


def draw_curves(metrics_file: str | Path, output: str | Path, plan: CurvePlan = DETECTION_CURVES) -> None:
    """Draw the training loss, its terms and the validation over epochs, those that ``plan`` names.

    Long loss curves are drawn faint, with their running mean on top. ``output`` is written atomically; its suffix
    (``.svg``, ``.png`` or ``.pdf``) chooses the format.

    Raises:
        InputError: there are no metrics to draw, or the suffix is another one.
    """
    check_suffix(output, "curves are")
    metrics = read_metrics(metrics_file)
    if not (metrics.train or metrics.val):
        raise InputError(
            f"{metrics_file} holds no training and no evaluation record: let the run log at least one step"
        )
    save_figure(output, _figure(metrics, plan))


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last ``window`` values, of fewer at the start; (N,) float64 -> (N,) float64."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return (sums[last] - sums[first]) / (last - first)


def _figure(metrics: Metrics, plan: CurvePlan) -> Figure:
    terms = _terms(metrics, plan)
    panels = 1 + bool(terms) + bool(plan.scores)
    figure = Figure(figsize=(13, 3.9), layout="constrained", facecolor="white")
    first, *others = figure.subplots(1, panels, squeeze=False)[0]
    _plot_losses(first, metrics.train, _TOTAL)
    if plan.validation_loss:
        epochs, values = series(metrics.val, "loss")
        if values:
            _plot(first, epochs, values, "validation", GREEN)
    _finish_losses(first, "Loss" if plan.validation_loss else "Training loss")
    if terms:
        _plot_losses(others[0], metrics.train, terms)
        _finish_losses(others[0], plan.terms_title)
    if plan.scores:
        _plot_scores(others[-1], metrics.val, plan)
    last_epoch = max(record["epoch"] for record in (*metrics.train, *metrics.val))
    for axes in (first, *others):
        axes.set_xlim(0, 1.02 * last_epoch or 1.0)
    return figure


def _terms(metrics: Metrics, plan: CurvePlan) -> tuple[_Line, ...]:
    """Those of the plan, or those that were logged, in their order; a single one is the loss itself."""
    if plan.terms is not None:
        return plan.terms
    logged = dict.fromkeys(name for record in metrics.train for name in record if name.startswith("loss_"))
    if len(logged) < 2:
        return ()
    return tuple(
        (name, name.removeprefix("loss_").replace("_", " "), _TERM_COLOURS[place % len(_TERM_COLOURS)])
        for place, name in enumerate(logged)
    )


def _plot_losses(axes: Axes, records: tuple[Record, ...], lines: tuple[_Line, ...]) -> None:
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


def _plot_scores(axes: Axes, records: tuple[Record, ...], plan: CurvePlan) -> None:
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
