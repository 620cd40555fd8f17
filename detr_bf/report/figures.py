"""Common style of matplotlib figures, plots that compare runs, and sheets of images.

White background, few lines, colours for colour-blind readers.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from detr_bf.common.errors import InputError
from detr_bf.common.files import atomic_write
from detr_bf.common.text import printable
from detr_bf.report.fonts import add_fallback_fonts, plain

INK, FAINT = "#3a3f46", "#d9dce1"
# Okabe and Ito, "Color Universal Design" (2008)
BLACK, BLUE, ORANGE, GREEN, PINK = "#1c1e22", "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION = "#56b4e9", "#d55e00"
FIGURE_SUFFIXES = (".svg", ".png", ".pdf")
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK)
_BLUES = LinearSegmentedColormap.from_list("paper to blue", ["#ffffff", "#cfe3f1", "#56a5d3", BLUE, "#003b5e"])
MOST_NUMBERS = 20  # classes; cells and bars of more have no numbers
_NAME_LENGTH = 24  # letters
_LISTED = 12  # most frequent mistakes
_CELL = 1.5  # inches, side of an image on a sheet
_LETTERS = 28  # most characters of the title of a cell
_LETTER_WIDTH, _HEADING_LINE = 0.085, 0.17  # inches of a heading


def check_suffix(output: str | Path, what: str) -> None:
    """Check the suffix of a figure's file; the message begins with ``what``, for example ``curves are``.

    Raises:
        InputError: the suffix is not one of ``FIGURE_SUFFIXES``.
    """
    if Path(output).suffix not in FIGURE_SUFFIXES:
        raise InputError(f"{what} written as .svg, .png or .pdf; got '{output}'")


def save_figure(output: str | Path, figure: Figure) -> None:
    """Atomically write a figure; the suffix, already checked, chooses the format.

    Text from outside must have passed :func:`~detr_bf.report.fonts.plain`.
    """
    add_fallback_fonts(figure)
    with atomic_write(output) as temporary:
        figure.savefig(temporary, format=Path(output).suffix[1:], dpi=150)


def title(axes: Axes, text: str) -> None:
    """Set a bold title above the left end of the axes."""
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color=INK)


def clear_lines(axes: Axes, sides: tuple[str, ...] = ("bottom",)) -> None:
    """Remove tick marks and the frame, except for faint lines at the given ``sides``."""
    axes.tick_params(colors=INK, length=0)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in sides)
        spine.set_color(FAINT)


def run_colours(runs: Mapping[str, object]) -> dict[str, str]:
    """Return the colour of each run."""
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(runs)}


def one_plot(heading: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Create a figure with one empty plot."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    title(axes, heading)
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.grid(color=FAINT, linewidth=0.8)
    clear_lines(axes)
    return figure, axes


def picture_grid(heading: str, lines: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    """Create a figure of ``width`` x ``height`` inches with a heading and (lines, columns) axes without frames.

    A heading that is wider than the figure is wrapped, and the figure is higher by the added lines.
    """
    letters = max(20, int(width / _LETTER_WIDTH))
    given = heading.splitlines()
    wrapped = [part for line in given for part in textwrap.wrap(line, letters) or [""]]
    height += (len(wrapped) - len(given)) * _HEADING_LINE
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    figure.suptitle("\n".join(wrapped), fontsize=10, fontweight="bold", color=INK)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    return figure, grid


def count_layers(axes: Axes) -> None:
    """Show only integers on the horizontal axis, which counts blocks."""
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))


def add_legend(axes: Axes) -> None:
    """Add the names of the lines."""
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


@dataclass(frozen=True)
class Cell:
    """One image on a sheet."""

    picture: np.ndarray  # (H, W, 3) float from 0 to 1
    caption: str = ""
    heat: np.ndarray | None = None  # (h, w) drawn instead of the picture, or over it if ``over``
    over: bool = False


def check_same_images(runs: Mapping[str, Sequence[tuple[int, str]]]) -> None:
    """Check that all runs have images of the same indices and classes, so that one row can show them.

    Raises:
        InputError: they have different images.
    """
    (first, expected), *others = runs.items()
    for name, images in others:
        if list(images) != list(expected):
            raise InputError(
                f"'{first}' and '{name}' show different images, {len(expected)} and {len(images)}: a sheet compares "
                "runs on the same data; draw one for each"
            )


def draw_sheet(heading: str, columns: Mapping[str, Sequence[Cell]]) -> Figure:
    """Draw columns of equal length under their names, wrapped into two groups side by side."""
    count = len(next(iter(columns.values())))
    across = min(2, count)
    lines, wide = math.ceil(count / across), across * len(columns)
    line = _CELL * max(cell.picture.shape[0] / cell.picture.shape[1] for cell in next(iter(columns.values()))) + 0.3
    figure, grid = picture_grid(heading, lines, wide, wide * _CELL, lines * line + 0.6)
    for column, (name, cells) in enumerate(columns.items()):
        for number, cell in enumerate(cells):
            line, group = divmod(number, across)
            above = f"{name}\n" if line == 0 else ""
            _draw_cell(grid[line, group * len(columns) + column], cell, above)
    return figure


def _draw_cell(axes: Axes, cell: Cell, name: str) -> None:
    height, width = cell.picture.shape[:2]
    extent = (0, width, height, 0)
    if cell.heat is None or cell.over:
        axes.imshow(cell.picture, extent=extent, interpolation="nearest")
    if cell.heat is not None:
        smooth = "bilinear" if cell.over else "nearest"
        axes.imshow(cell.heat, extent=extent, interpolation=smooth, cmap="inferno", alpha=0.55 if cell.over else 1.0)
    lines = (name + cell.caption).split("\n")
    axes.set_title("\n".join(plain(line, limit=_LETTERS) for line in lines), fontsize=7, color=INK)


def draw_confusion(shares: np.ndarray, class_names: Sequence[str], heading: str) -> Figure:
    """Draw a confusion matrix: true classes by line, predicted classes by column, shares of the true class.

    Colour grows with the square root of the share, to show small shares. The most frequent mistakes are listed beside
    the matrix.
    """
    names = [plain(shortened(name), f"#{index}") for index, name in enumerate(class_names)]
    side = max(6.2, 0.125 * len(names))
    figure = Figure(figsize=(side + 5.5, side), layout="constrained", facecolor="white")
    matrix, mistakes = figure.subplots(1, 2, width_ratios=(side, 3.6))
    matrix.imshow(shares, cmap=_BLUES, norm=PowerNorm(0.5, vmin=0, vmax=1))
    _name_classes(matrix, names)
    if len(names) <= MOST_NUMBERS:
        _write_shares(matrix, shares)
    title(matrix, heading)
    _plot_mistakes(mistakes, shares, names)
    return figure


def shortened(name: str) -> str:
    """Return a name as one line of at most 24 letters."""
    name = printable(name)
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1].rstrip() + "…"


def _name_classes(axes: Axes, names: list[str]) -> None:
    """Label both axes of a confusion matrix."""
    size = 10 if len(names) <= 12 else max(5.0, 9.0 - len(names) / 20)
    vertical = max(map(len, names)) > 4 or len(names) > MOST_NUMBERS
    axes.set_xticks(range(len(names)), names, rotation=90 if vertical else 0, fontsize=size)
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.set_xlabel("predicted", color=INK)
    axes.set_ylabel("true", color=INK)
    clear_lines(axes, sides=())
    edges = np.arange(len(names) + 1) - 0.5
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(
        which="minor", color="#ffffff" if len(names) <= MOST_NUMBERS else "#eef0f3", linewidth=1.0 / len(names) + 0.3
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
