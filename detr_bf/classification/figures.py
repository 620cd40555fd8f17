"""Figures of a classifier's result: confusion matrix, and accuracy of classes by training images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from detr_bf.classification.metrics import ClassAccuracy, ClassificationResult
from detr_bf.common.errors import InputError
from detr_bf.report.figures import (
    BLUE,
    FAINT,
    INK,
    MOST_NUMBERS,
    ORANGE,
    VERMILION,
    check_suffix,
    clear_lines,
    draw_confusion,
    save_figure,
    shortened,
    title,
)
from detr_bf.report.fonts import plain

GROUP_COLOURS = {"many": BLUE, "medium": ORANGE, "few": VERMILION}
_MAX_NAMES = 100  # classes; more have no names


def save_confusion(path: str | Path, result: ClassificationResult) -> None:
    """Draw the confusion matrix as :func:`detr_bf.report.figures.draw_confusion`.

    Raises:
        InputError: the result has no matrix (more than 100 classes), or the suffix of ``path`` is not ``.png``,
            ``.svg`` or ``.pdf``.
    """
    check_suffix(path, "confusion matrices are")
    if result.confusion is None:
        raise InputError(
            f"the result has {len(result.per_class)} classes and no confusion matrix: it exists for up to 100 classes"
        )
    images = np.array([known.images for known in result.per_class.values()])
    shares = np.array(result.confusion, dtype=np.float64) / np.maximum(images, 1)[:, None]
    save_figure(path, draw_confusion(shares, list(result.per_class), "Confusion (% of the images of a class)"))


def save_class_accuracies(path: str | Path, result: ClassificationResult) -> None:
    """Draw training images and accuracy of every class, ordered by training images.

    Raises:
        InputError: the suffix is not ``.png``, ``.svg`` or ``.pdf``.
    """
    check_suffix(path, "accuracies of classes are")
    names = [plain(shortened(name), f"#{index}") for index, name in enumerate(result.per_class)]
    pairs = sorted(zip(names, result.per_class.values(), strict=True), key=lambda pair: -pair[1].train_images)
    names, classes = [name for name, _ in pairs], [of_class for _, of_class in pairs]
    figure = Figure(figsize=(13, 5.2), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.2))
    _plot_training_images(above, classes)
    _plot_accuracies(below, classes, result)
    below.set_xlim(-0.6, len(classes) - 0.4)
    below.set_xticks([])
    if len(classes) <= _MAX_NAMES:
        few = len(classes) <= 12
        below.set_xticks(range(len(classes)), names, rotation=0 if few else 90, fontsize=9 if few else 6.5)
    else:
        below.set_xlabel("classes, from those with the most training images to those with the fewest", color=INK)
    save_figure(path, figure)


def _plot_training_images(axes: Axes, classes: list[ClassAccuracy]) -> None:
    counts = [known.train_images for known in classes]
    bars = axes.bar(range(len(classes)), counts, width=_bar_width(classes), color="#b6bdc7")
    lowest, highest = min(counts), max(counts)
    if lowest > 0 and highest >= 10 * lowest:
        axes.set_yscale("log")
        axes.set_ylim(0.5 * lowest, highest * (2 * highest / lowest) ** 0.2)  # space for the numbers
        axes.minorticks_off()
    else:
        axes.set_ylim(0, 1.2 * highest or 1)
    if len(classes) <= MOST_NUMBERS:
        _write_above(axes, bars, [f"{number:,}" for number in counts])
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
    title(axes, "Training images")
    clear_lines(axes)


def _plot_accuracies(axes: Axes, classes: list[ClassAccuracy], result: ClassificationResult) -> None:
    for group, colour in GROUP_COLOURS.items():
        indices = [index for index, known in enumerate(classes) if known.group == group]
        if not indices:
            continue
        accuracies = [classes[index].accuracy for index in indices]
        mean = result.metrics[group]
        label = f"{group}-shot" + ("" if mean is None else f" {100 * mean:.1f}")
        heights = [100 * (share or 0) for share in accuracies]
        bars = axes.bar(indices, heights, width=_bar_width(classes), color=colour, label=label)
        if len(classes) <= MOST_NUMBERS:
            _write_above(axes, bars, ["no images" if share is None else f"{100 * share:.1f}" for share in accuracies])
    axes.set_ylim(0, 108)
    if len(classes) > MOST_NUMBERS:
        axes.set_yticks(range(0, 101, 20))
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
    title(axes, "Accuracy (%)")
    clear_lines(axes)
    axes.legend(
        frameon=False, labelcolor=INK, fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.99), ncols=3, borderaxespad=0
    )


def _bar_width(classes: list[ClassAccuracy]) -> float:
    """Return the width of bars, without gaps for many classes."""
    return 0.8 if len(classes) <= _MAX_NAMES else 1.0


def _write_above(axes: Axes, bars: BarContainer, texts: list[str]) -> None:
    """Write numbers above the bars and remove the scale."""
    axes.bar_label(bars, texts, padding=3, fontsize=9, color=INK)
    axes.set_yticks([])
