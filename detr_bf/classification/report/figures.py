"""Figures of a classifier's result: confusion matrix, and accuracy of classes by their number of training images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from detr_bf.classification.metrics import ClassAccuracy, ClassificationResult
from detr_bf.errors import InputError
from detr_bf.report.figures import BLUE, FAINT, INK, ORANGE, VERMILION, check_suffix, clear_lines, save_figure, title
from detr_bf.report.fonts import plain
from detr_bf.text import printable

GROUP_COLOURS = {"many": BLUE, "medium": ORANGE, "few": VERMILION}
_BLUES = LinearSegmentedColormap.from_list("paper to blue", ["#ffffff", "#cfe3f1", "#56a5d3", BLUE, "#003b5e"])
_MAX_NUMBERS = 20  # classes; cells and bars of more have no numbers
_MAX_NAMES = 100  # classes; more have no names
_NAME_LENGTH = 24  # letters
_LISTED = 12  # most frequent mistakes


def save_confusion(path: str | Path, result: ClassificationResult) -> None:
    """Draw the confusion matrix: true classes by line, predicted classes by column, shares of the true class.

    Colour grows with the square root of the share, to show small shares. The most frequent mistakes are listed beside
    the matrix.

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
    names = [plain(shortened(name), f"#{index}") for index, name in enumerate(result.per_class)]
    side = max(6.2, 0.125 * len(names))
    figure = Figure(figsize=(side + 5.5, side), layout="constrained", facecolor="white")
    matrix, mistakes = figure.subplots(1, 2, width_ratios=(side, 3.6))
    matrix.imshow(shares, cmap=_BLUES, norm=PowerNorm(0.5, vmin=0, vmax=1))
    _name_classes(matrix, names)
    if len(names) <= _MAX_NUMBERS:
        _write_shares(matrix, shares)
    title(matrix, "Confusion (% of the images of a class)")
    _plot_mistakes(mistakes, shares, names)
    save_figure(path, figure)


def save_class_accuracies(path: str | Path, result: ClassificationResult) -> None:
    """Draw training images and accuracy of every class, ordered by training images.

    Raises:
        InputError: the suffix is not ``.png``, ``.svg`` or ``.pdf``.
    """
    check_suffix(path, "accuracies of classes are")
    names = [plain(shortened(name), f"#{index}") for index, name in enumerate(result.per_class)]
    pairs = sorted(zip(names, result.per_class.values(), strict=True), key=lambda pair: -pair[1].train_images)
    names, classes = [name for name, _ in pairs], [known for _, known in pairs]
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


def shortened(name: str) -> str:
    """Return a name as one line of at most 24 letters."""
    name = printable(name)
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1].rstrip() + "…"


def _name_classes(axes: Axes, names: list[str]) -> None:
    """Label both axes of a confusion matrix."""
    size = 10 if len(names) <= 12 else max(5.0, 9.0 - len(names) / 20)
    vertical = max(map(len, names)) > 4 or len(names) > _MAX_NUMBERS
    axes.set_xticks(range(len(names)), names, rotation=90 if vertical else 0, fontsize=size)
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.set_xlabel("predicted", color=INK)
    axes.set_ylabel("true", color=INK)
    clear_lines(axes, sides=())
    edges = np.arange(len(names) + 1) - 0.5
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(
        which="minor", color="#ffffff" if len(names) <= _MAX_NUMBERS else "#eef0f3", linewidth=1.0 / len(names) + 0.3
    )
    axes.tick_params(which="minor", length=0)


def _write_shares(axes: Axes, shares: np.ndarray) -> None:
    """Write the percentage into every cell above 0."""
    size = 10 if len(shares) <= 12 else 7
    for row, column in np.argwhere(shares > 0):
        share = shares[row, column]
        text = f"{100 * share:.0f}" if share >= 0.005 else "<1"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color="white" if share > 0.3 else INK)


def _plot_mistakes(axes: Axes, shares: np.ndarray, names: list[str]) -> None:
    """Draw the largest shares off the diagonal as bars, the largest on top."""
    wrong = shares * ~np.eye(len(shares), dtype=bool)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_LISTED]
    found = [(row, column) for row, column in zip(*np.unravel_index(order, wrong.shape), strict=True)]
    found = [pair for pair in found if wrong[pair] > 0]
    heights = [100 * wrong[pair] for pair in found]
    size = 9 if len(names) <= 30 else 11  # the picture is larger
    axes.barh(range(len(found)), heights, height=0.24, color=VERMILION)
    for line, ((row, column), height) in enumerate(zip(found, heights, strict=True)):
        axes.text(0, line - 0.22, f"{names[row]} taken for {names[column]}", va="bottom", fontsize=size, color=INK)
        axes.text(height, line, f" {height:.1f}", va="center", fontsize=size, color=INK)
    axes.set_xlim(0, 1.2 * max(heights, default=1.0))
    axes.set_ylim(_LISTED - 0.4, -0.7)
    axes.set_xticks([])
    axes.set_yticks([])
    title(axes, "Most frequent mistakes (%)" if found else "No mistakes")
    clear_lines(axes, sides=())


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
    if len(classes) <= _MAX_NUMBERS:
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
        if len(classes) <= _MAX_NUMBERS:
            _write_above(axes, bars, ["no images" if share is None else f"{100 * share:.1f}" for share in accuracies])
    axes.set_ylim(0, 108)
    if len(classes) > _MAX_NUMBERS:
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
