"""Loss and AP curves of a run, drawn from its ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from detr_bf.errors import InputError
from detr_bf.files import atomic_write
from detr_bf.report.metrics import Metrics, Record, read_metrics, series

# name in metrics.jsonl, name in the legend, colour (Okabe and Ito 2008)
_Line = tuple[str, str, str]
_TOTAL: tuple[_Line, ...] = (
    ("loss", "total", "#1c1e22"),
    ("stream/clean", "clean stream", "#0072b2"),
    ("stream/batchformer", "BatchFormer stream", "#d55e00"),
)
_TERMS: tuple[_Line, ...] = (
    ("loss_ce", "class", "#0072b2"),
    ("loss_bbox", "box L1", "#e69f00"),
    ("loss_giou", "box GIoU", "#009e73"),
    ("loss_mask", "mask focal", "#cc79a7"),
    ("loss_dice", "mask DICE", "#56b4e9"),
)
_SCORES: tuple[_Line, ...] = (
    ("PQ", "PQ", "#d55e00"),
    ("mask/AP", "mask AP", "#009e73"),
    ("AP50", "AP50", "#56b4e9"),
    ("AP", "AP", "#1c1e22"),
    ("AP75", "AP75", "#cc79a7"),
)
_SMOOTH_FROM = 40  # points; shorter curves are drawn as they are
_INK, _FAINT = "#3a3f46", "#d9dce1"


def draw_curves(metrics_file: str | Path, output: str | Path) -> None:
    """Draw the training loss, its terms in the last decoder layer, and the validation AP over epochs.

    Long loss curves are drawn faint, with their running mean on top. ``output`` is written atomically; its suffix
    (``.svg``, ``.png`` or ``.pdf``) chooses the format.

    Raises:
        InputError: there are no metrics to draw, or the suffix is another one.
    """
    suffix = Path(output).suffix
    if suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"curves are written as .svg, .png or .pdf; got '{output}'")
    metrics = read_metrics(metrics_file)
    if not (metrics.train or metrics.val):
        raise InputError(
            f"{metrics_file} holds no training and no evaluation record: let the run log at least one step"
        )
    figure = _figure(metrics)
    with atomic_write(output) as temporary:
        figure.savefig(temporary, format=suffix[1:], dpi=150)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last ``window`` values, of fewer at the start; (N,) float64 -> (N,) float64."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return (sums[last] - sums[first]) / (last - first)


def _figure(metrics: Metrics) -> Figure:
    figure = Figure(figsize=(13, 3.9), layout="constrained", facecolor="white")
    total, terms, scores = figure.subplots(1, 3)
    _plot_losses(total, metrics.train, _TOTAL, "Training loss")
    _plot_losses(terms, metrics.train, _TERMS, "Terms, last decoder layer")
    _plot_scores(scores, metrics.val)
    last_epoch = max(record["epoch"] for record in (*metrics.train, *metrics.val))
    for axes in (total, terms, scores):
        axes.set_xlim(0, 1.02 * last_epoch or 1.0)
    return figure


def _plot_losses(axes: Axes, records: tuple[Record, ...], lines: tuple[_Line, ...], title: str) -> None:
    for name, label, colour in lines:
        epochs, values = series(records, name)
        if len(values) >= _SMOOTH_FROM:
            axes.plot(epochs, values, color=colour, linewidth=0.8, alpha=0.2)
            values = running_mean(np.asarray(values), max(5, len(values) // 25)).tolist()
        if values:
            _plot(axes, epochs, values, label, colour)
    _finish(axes, title)
    axes.set_ylim(bottom=0)


def _plot_scores(axes: Axes, records: tuple[Record, ...]) -> None:
    highest = 0.0
    for name, label, colour in _SCORES:
        epochs, values = series(records, name)
        if values:
            _plot(axes, epochs, [100 * value for value in values], f"{label} {100 * values[-1]:.1f}", colour)
            highest = max(highest, 100 * max(values))
    _finish(axes, "Validation (%)")
    axes.set_ylim(0, min(102.0, 1.15 * highest) or 1.0)


def _plot(axes: Axes, epochs: list[float], values: list[float], label: str, colour: str) -> None:
    marker = "o" if len(values) <= 20 else ""
    axes.plot(epochs, values, color=colour, linewidth=1.8, marker=marker, markersize=4, label=label)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.set_xlabel("epoch", color=_INK)
    axes.tick_params(colors=_INK, length=0)
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_FAINT)
    if axes.lines:
        axes.legend(frameon=False, labelcolor=_INK, fontsize=9)
    else:
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", va="center", color=_INK)
        axes.set_yticks([])
