"""Plots and sheets that compare runs: one colour or column per run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from detr_bf.errors import InputError
from detr_bf.report.figures import BLACK, BLUE, FAINT, GREEN, INK, ORANGE, PINK, SKY, VERMILION, clear_lines, title
from detr_bf.report.fonts import plain

COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK)
_CELL = 1.5  # inches, side of an image on a sheet
_LETTERS = 28  # most characters of the title of a cell


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


def draw_sheet(heading: str, columns: Mapping[str, Sequence[Cell]], across: int = 2) -> Figure:
    """Draw columns of equal length under their names, wrapped into ``across`` groups side by side."""
    count = len(next(iter(columns.values())))
    across = min(across, count)
    lines, wide = math.ceil(count / across), across * len(columns)
    figure = Figure(figsize=(wide * _CELL, lines * (_CELL + 0.3) + 0.6), layout="constrained", facecolor="white")
    figure.suptitle(heading, fontsize=11, fontweight="bold", color=INK)
    grid = figure.subplots(lines, wide, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
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
