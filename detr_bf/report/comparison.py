"""Variants of an experiment against a baseline: means over seeds and paired differences, with confidence intervals.

Runs with the same seed see the same data in the same order, so their difference cancels the effect of the seed.
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
    """Mean and half width of its confidence interval; the half width of a single value is None."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = 0.95) -> Interval:
        """Return Student's t interval of the mean of independent values."""
        mean = float(np.mean(values))
        if len(values) < 2:
            return cls(mean, None)
        factor = stats.t.ppf((1 + confidence) / 2, len(values) - 1)
        return cls(mean, float(factor * stats.sem(values)))

    @property
    def excludes_zero(self) -> bool:
        """True if the mean differs significantly from 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def text(self, digits: int, signed: bool = False) -> str:
        """Return for example ``83.5 ± 0.4``."""
        width = "" if self.half_width is None else f" ± {self.half_width:.{digits}f}"
        return f"{self.mean:{'+' if signed else ''}.{digits}f}{width}"


@dataclass(frozen=True)
class Comparison:
    """Results of one variant."""

    name: str
    values: tuple[float, ...]  # one for each seed
    mean: Interval
    difference: Interval | None  # from the baseline, paired by seed; None for the baseline itself


def compare_variants(
    values: Mapping[str, Sequence[float]], baseline: str, confidence: float = 0.95
) -> tuple[Comparison, ...]:
    """Compare every variant with ``baseline``, in the given order.

    Args:
        values: variant -> one finite number for each seed, the same seeds in the same order for all variants.
        baseline: a key of ``values``.
        confidence: confidence level of the intervals, between 0 and 1.

    Raises:
        InputError: unknown baseline, a different number of values, no values, a value that is not finite, or a
            confidence outside 0 to 1.
    """
    if baseline not in values:
        raise InputError(f"the baseline must be one of the variants {', '.join(values)}; got '{baseline}'")
    if not 0 < confidence < 1:
        raise InputError(f"confidence must be between 0 and 1, got {confidence}")
    seeds = len(values[baseline])
    for name, measured in values.items():
        if len(measured) != seeds or not seeds:
            raise InputError(
                f"'{name}' has {len(measured)} values and the baseline {seeds}: give one value for each seed, the same "
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
    """Return a Markdown table; differences whose interval excludes 0 are bold.

    Args:
        rows: the result of :func:`compare_variants`.
        measured: title of the column of means, with the unit, for example ``top-1 (%)``.
        digits: number of decimals.
    """
    lines = [f"| Variant | {_cell(measured)} | Difference, paired | Seeds |", "|:--|--:|--:|--:|"]
    for row in rows:
        change = row.difference.text(digits, signed=True) if row.difference else _NOTHING
        strong = f"**{change}**" if row.difference and row.difference.excludes_zero else change
        lines.append(f"| {_cell(row.name)} | {row.mean.text(digits)} | {strong} | {len(row.values)} |")
    return "\n".join(lines) + "\n"


def save_comparison(path: str | Path, rows: Sequence[Comparison], measured: str) -> None:
    """Draw all values with mean and interval for each variant, and the difference from the baseline beside them.

    Raises:
        InputError: the suffix of ``path`` is not ``.svg``, ``.png`` or ``.pdf``.
    """
    check_suffix(path, "comparisons are")
    figure = Figure(figsize=(11, 1.5 + 0.55 * len(rows)), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for line, row in enumerate(rows):
        left.scatter(row.values, np.full(len(row.values), line + 0.2), s=18, color="#9aa1ab", linewidths=0)
        _plot_interval(left, line, row.mean, INK if row.difference is None else BLUE)
        if row.difference:
            _plot_interval(right, line, row.difference, _colour_of(row.difference))
    right.axvline(0, color=INK, linewidth=1)
    left.set_yticks(range(len(rows)), [plain(row.name) for row in rows], fontsize=10)
    left.set_ylim(len(rows) - 0.5, -0.5)
    for axes, text in ((left, plain(measured)), (right, "Difference, seed by seed")):
        title(axes, text)
        axes.grid(axis="x", color=FAINT, linewidth=0.8)
        clear_lines(axes)
    save_figure(path, figure)


def _plot_interval(axes: Axes, line: int, interval: Interval, colour: str) -> None:
    if interval.half_width is not None:
        ends = interval.mean - interval.half_width, interval.mean + interval.half_width
        axes.plot(ends, (line, line), color=colour, linewidth=2.4, solid_capstyle="round")
    axes.scatter([interval.mean], [line], s=52, color=colour, edgecolors="white", linewidths=1, zorder=3)


def _colour_of(difference: Interval) -> str:
    """Return green above 0, vermilion below 0, grey if the interval contains 0."""
    if not difference.excludes_zero:
        return "#7b828c"
    return GREEN if difference.mean > 0 else VERMILION


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")
