"""Variants of an experiment against their baseline: means over seeds, and paired differences, with their intervals.

Runs of one seed see the same data in the same order, so what the seed does to both falls out of their difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from detr_bf.errors import InputError
from detr_bf.report.figures import BLUE, FAINT, GREEN, INK, VERMILION, check_suffix, clear_lines, save_figure, title
from detr_bf.report.fonts import plain
from detr_bf.text import printable

_NOTHING = "—"


@dataclass(frozen=True)
class Interval:
    """A mean and, on each side of it, how far it is known; None of a single value."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = 0.95) -> Interval:
        """Student's t interval of the mean of independent values."""
        mean = float(np.mean(values))
        if len(values) < 2:
            return cls(mean, None)
        factor = stats.t.ppf((1 + confidence) / 2, len(values) - 1)
        return cls(mean, float(factor * stats.sem(values)))

    @property
    def excludes_zero(self) -> bool:
        """Whether the values differ from 0 by more than chance would explain, at the confidence asked for."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def text(self, digits: int, signed: bool = False) -> str:
        """``83.5 ± 0.4``."""
        width = "" if self.half_width is None else f" ± {self.half_width:.{digits}f}"
        return f"{self.mean:{'+' if signed else ''}.{digits}f}{width}"


@dataclass(frozen=True)
class Comparison:
    """One variant."""

    name: str
    values: tuple[float, ...]  # one a seed
    mean: Interval
    difference: Interval | None  # from the baseline, seed by seed; None of the baseline itself


def compare(values: Mapping[str, Sequence[float]], baseline: str, confidence: float = 0.95) -> tuple[Comparison, ...]:
    """Every variant against ``baseline``, in the order given.

    Args:
        values: one finite number a seed, of the same seeds in the same order in every variant.
        baseline: a name in ``values``.
        confidence: of the intervals, between 0 and 1.

    Raises:
        InputError: the baseline is no variant, a variant has no values or not as many as the baseline, or one is not
            finite; the confidence is not between 0 and 1.
    """
    if baseline not in values:
        raise InputError(f"the baseline must be one of the variants {', '.join(values)}; got '{baseline}'")
    if not 0 < confidence < 1:
        raise InputError(f"confidence must be between 0 and 1, got {confidence}")
    seeds = len(values[baseline])
    for name, measured in values.items():
        if len(measured) != seeds or not seeds:
            raise InputError(
                f"'{name}' has {len(measured)} values and the baseline {seeds}: give one of each seed, of the same "
                "seeds in the same order"
            )
        if not all(math.isfinite(value) for value in measured):
            raise InputError(
                f"'{name}' holds a value that is not finite: {list(measured)}. Run it again or leave it out"
            )
    return tuple(
        Comparison(
            name,
            tuple(map(float, measured)),
            Interval.of(measured, confidence),
            None if name == baseline else Interval.of(np.subtract(measured, values[baseline]).tolist(), confidence),
        )
        for name, measured in values.items()
    )


def comparison_table(rows: Sequence[Comparison], measured: str, digits: int = 1) -> str:
    """A Markdown table; a difference whose interval excludes 0 is bold.

    Args:
        rows: of :func:`compare`.
        measured: title of the column of means, with the unit: ``top-1 (%)``.
        digits: behind the point.
    """
    lines = [f"| Variant | {_cell(measured)} | Difference, paired | Seeds |", "|:--|--:|--:|--:|"]
    for row in rows:
        change = row.difference.text(digits, signed=True) if row.difference else _NOTHING
        strong = f"**{change}**" if row.difference and row.difference.excludes_zero else change
        lines.append(f"| {_cell(row.name)} | {row.mean.text(digits)} | {strong} | {len(row.values)} |")
    return "\n".join(lines) + "\n"


def save_comparison(path: str | Path, rows: Sequence[Comparison], measured: str) -> None:
    """Draw a dot a seed with mean and interval of each variant, and beside it its difference from the baseline.

    The suffix of ``path`` (``.svg``, ``.png`` or ``.pdf``) chooses the format.

    Raises:
        InputError: the suffix is another one.
    """
    check_suffix(path, "comparisons are")
    figure = Figure(figsize=(11, 1.5 + 0.55 * len(rows)), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for place, row in enumerate(rows):
        _plot_seeds(left, place, row.values, "#9aa1ab")
        _plot_interval(left, place, row.mean, INK if row.difference is None else BLUE)
        if row.difference:
            _plot_interval(right, place, row.difference, _colour_of(row.difference))
    right.axvline(0, color=INK, linewidth=1)
    left.set_yticks(range(len(rows)), [plain(row.name) for row in rows], fontsize=10)
    left.set_ylim(len(rows) - 0.5, -0.5)
    for axes, text in ((left, plain(measured)), (right, "Difference, seed by seed")):
        title(axes, text)
        axes.grid(axis="x", color=FAINT, linewidth=0.8)
        clear_lines(axes)
    save_figure(path, figure)


def _plot_seeds(axes: Axes, place: int, values: Sequence[float], colour: str) -> None:
    axes.scatter(values, np.full(len(values), place + 0.2), s=18, color=colour, linewidths=0)


def _plot_interval(axes: Axes, place: int, interval: Interval, colour: str) -> None:
    if interval.half_width is not None:
        ends = interval.mean - interval.half_width, interval.mean + interval.half_width
        axes.plot(ends, (place, place), color=colour, linewidth=2.4, solid_capstyle="round")
    axes.scatter([interval.mean], [place], s=52, color=colour, edgecolors="white", linewidths=1, zorder=3)


def _colour_of(difference: Interval) -> str:
    """Green above 0, vermilion below it, grey where the interval holds 0."""
    if not difference.excludes_zero:
        return "#7b828c"
    return GREEN if difference.mean > 0 else VERMILION


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")
