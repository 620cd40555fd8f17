"""Figures of a comparison as SVG text: paired differences of the arms, and curves over training.

They are 3.6 inches wide, so that their text can be read on a phone. The letters stay text in the SVG: a page with
many figures stays small. All numbers are fractions in the result document and x 100 in the figures.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from detr_bf.report.figures import BLACK, BLUE, FAINT, GREEN, INK, ORANGE, PINK, SKY, VERMILION, clear_lines
from detr_bf.report.fonts import add_fallback_fonts, legible, load_font, plain

Document = Mapping[str, Any]
Difference = Mapping[str, Any]  # difference of one arm in one metric, from the result document

_WIDTH = 3.6  # inches
_SIDE, _TOP, _LINE, _MARKS, _GAP = 0.16, 0.05, 0.165, 0.3, 0.12  # inches: margins, text, intervals and dots, gap
_BOTTOM = 0.5  # inches: axis with its label
_NAME, _SMALL = 9.0, 8.0  # font sizes in points
_BAR, _BAND = "#9fc8e3", "#eceef1"  # interval over seeds, undetectable differences
_CLIP = 3  # intervals longer than this many times the median are cut off
_COLOURS = {"better": GREEN, "worse": VERMILION}
_LINES = ("-", "--", "-.", ":")
_MARKERS = "osD^vP<>X*ph"
_PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY)  # of arms; the baseline is black


def forest_plot(changes: Mapping[str, Difference], metric: str, key: bool = True) -> str:
    """Draw paired differences from the baseline as SVG: for each arm its pairs, mean and intervals.

    The interval over seeds is a broad bar, the one over seeds and images a thin line with caps. With a single pair
    the interval over images is drawn instead, dotted. Differences smaller than the smallest detectable one are shaded.
    An interval much longer than those of the other arms ends in an arrow.

    Args:
        changes: arm -> its difference in ``metric``, at least one.
        metric: name for the axis.
        key: add a legend.
    """
    names = [_wrapped(name, 72 * (_WIDTH - 2 * _SIDE)) for name in changes]
    heights = [_LINE * (len(lines) + 1) + _MARKS + _GAP for lines in names]
    entries = _key(list(changes.values())) if key else []
    bottom = _BOTTOM + _LINE * (len(entries) + bool(entries) / 2)
    total, whole = sum(heights), sum(heights) + bottom + _TOP
    figure = Figure(figsize=(_WIDTH, whole), facecolor="white")
    axes = figure.add_axes((_SIDE / _WIDTH, bottom / whole, 1 - 2 * _SIDE / _WIDTH, total / whole))
    axes.set_xlim(*_limits(changes.values()))
    axes.set_ylim(total, 0)  # inches from the top
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.set_yticks([])
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    top = 0.0
    for lines, height, change in zip(names, heights, changes.values(), strict=True):
        for number, text in enumerate([*lines, change_text(change)]):
            last = number == len(lines)
            axes.text(
                0, top + _LINE * number, text, transform=axes.get_yaxis_transform(), va="top", zorder=5,
                fontsize=_SMALL if last else _NAME, color=INK if last else BLACK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
        _plot_change(axes, change, top + height - _GAP - _MARKS)
        top += height
    axes.axvline(0, color=INK, linewidth=1, zorder=1.5)
    axes.set_xlabel(f"difference in {plain(metric, limit=24)} x 100 (right: better)", color=INK, fontsize=_SMALL)
    axes.tick_params(labelsize=_SMALL)
    clear_lines(axes)
    if key:
        figure.legend(handles=entries, loc="lower left", frameon=False, fontsize=_SMALL, labelcolor=INK)
    return _svg(figure)


def change_text(change: Difference) -> str:
    """Return for example ``+1.2 [-0.3, +2.7], undecided``: mean, interval over seeds and images, verdict."""
    shown = f"{signed(change['mean'])} {span_text(change.get('both'))}".rstrip()
    return f"{shown}, {change['verdict']}" if change.get("verdict") else shown


def span_text(span: Mapping[str, Any] | None) -> str:
    """Return ``[-0.3, +2.7]`` x 100, or nothing if an end is missing."""
    ends = _ends(span)
    return f"[{signed(ends[0] / 100)}, {signed(ends[1] / 100)}]" if ends else ""


def signed(value: float | None) -> str:
    """Return a fraction x 100 with sign and one decimal, ``0.0`` without sign; a dash for None."""
    if value is None:
        return "—"
    text = f"{100 * value:+.1f}"
    return text if float(text) else "0.0"


def overview_plot(arms: Sequence[Mapping[str, Any]], metric: str, bands: bool) -> str:
    """Draw mean curves of all arms into one SVG plot, with intervals if ``bands``, and a legend below."""
    labels = ["\n".join(_wrapped(arm["name"], 72 * (_WIDTH - 0.8))) for arm in arms]
    legend = _LINE * sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(_WIDTH, 2.6 + legend), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for index, (arm, label) in enumerate(zip(arms, labels, strict=True)):
        _plot_curve(axes, arm, index, band=bands, label=label)
    _finish_curves(axes, arms, bands, metric)
    figure.legend(loc="outside lower left", frameon=False, fontsize=_SMALL, labelcolor=INK, handlelength=3.5)
    return _svg(figure)


def arm_plot(arms: Sequence[Mapping[str, Any]], index: int, metric: str) -> str:
    """Draw the curve of one arm and that of the first arm, the baseline, with intervals, as a small SVG plot.

    It begins after a third of the training, where the curves are less steep and differences can be seen. The axes are
    those of all ``arms``, so that plots can be compared.
    """
    last = max(point["epoch"] for arm in arms for point in arm["curve"] if point["mean"] is not None)
    later = [{**arm, "curve": [point for point in arm["curve"] if point["epoch"] >= last / 3]} for arm in arms]
    figure = Figure(figsize=(_WIDTH / 2, 1.5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for each in (0, index):
        _plot_curve(axes, later[each], each, band=True)
    _finish_curves(axes, later, True, metric)
    return _svg(figure)


def _ends(span: Mapping[str, Any] | None) -> tuple[float, float] | None:
    """Return the ends of an interval x 100, or None if an end is missing."""
    if span is None or span.get("low") is None or span.get("high") is None:
        return None
    return 100 * span["low"], 100 * span["high"]


def _limits(changes: Iterable[Difference]) -> tuple[float, float]:
    """Return the limits of the axis, x 100: all pairs, zero, and intervals up to a multiple of the median one."""
    points, ends, reaches = [0.0], [0.0], []
    for change in changes:
        points += [100 * value for value in (change["mean"], *change.get("values", ())) if value is not None]
        detectable = 100 * (change.get("detectable") or 0)
        own: list[float] = [-detectable, detectable]
        for kind in ("seeds", "images", "both"):
            own += _ends(change.get(kind)) or ()
        reaches.append(max(map(abs, own)))
        ends += own
    most = max(_CLIP * statistics.median_low(reaches), *map(abs, points))
    low, high = max(-most, min(points + ends)), min(most, max(points + ends))
    margin = 0.04 * (high - low) or 1.0
    return low - margin, high + margin


def _plot_change(axes: Axes, change: Difference, top: float) -> None:
    """Plot band, intervals, mean and pairs below ``top``, inches from the top."""
    line, dots, end = top + 0.1, top + 0.22, top + _MARKS
    if change.get("detectable") is not None:
        width = 100 * change["detectable"]
        axes.fill_betweenx([top, end], -width, width, color=_BAND, linewidth=0, zorder=0.5)
    if seeds := _ends(change.get("seeds")):
        axes.plot(seeds, (line, line), color=_BAR, linewidth=7, solid_capstyle="butt", zorder=2)
    both, images = _ends(change.get("both")), _ends(change.get("images"))
    if span := both or images:
        axes.plot(span, (line, line), "-" if both else ":", color=INK, linewidth=1.4, zorder=3)
        low, high = axes.get_xlim()
        for x, arrow in zip(span, "<>", strict=True):
            inside = low <= x <= high
            axes.plot(
                min(max(x, low), high), line, "|" if inside else arrow, color=INK, markersize=9 if inside else 6,
                clip_on=False, zorder=3,
            )  # fmt: skip
    colour = _COLOURS.get(change.get("verdict", ""), INK)
    axes.plot(100 * change["mean"], line, "D", color=colour, markersize=6, markeredgecolor="white", zorder=4)
    pairs = [100 * value for value in change.get("values", ()) if value is not None]
    axes.plot(pairs, [dots] * len(pairs), "o", markersize=4.5, markerfacecolor="none", color=INK, zorder=3)


def _key(changes: Sequence[Difference]) -> list[Line2D | Patch]:
    """Return the legend's entries for the marks that are drawn."""
    drawn = {kind for kind in ("seeds", "images", "both") if any(_ends(change.get(kind)) for change in changes)}
    line: Literal["-", ":", ""] = "-" if "both" in drawn else ":" if "images" in drawn else ""
    interval = {"-": ", interval over seeds and images", ":": ", interval over images alone", "": ""}[line]
    key: list[Line2D | Patch] = [
        Line2D([], [], color=INK, marker="D", markersize=5, linewidth=1.4, linestyle=line, label=f"mean{interval}")
    ]
    if "seeds" in drawn:
        key.append(Line2D([], [], color=_BAR, linewidth=7, label="interval over seeds"))
    key.append(Line2D([], [], color=INK, marker="o", markersize=4.5, mfc="none", linewidth=0, label="one pair of runs"))
    if any(change.get("detectable") is not None for change in changes):
        key.append(Patch(facecolor=_BAND, label="below the smallest detectable difference"))
    return key


def _wrapped(name: object, width: float) -> list[str]:
    """Break the name of an arm into lines of at most ``width`` points at the size of names."""
    rest = legible(name, limit=120)
    font = load_font(int(10 * _NAME), text=rest)
    lines = []
    while rest:
        length = next((n for n in range(len(rest), 1, -1) if font.getlength(rest[:n]) <= 10 * width), 1)
        lines.append(plain(rest[:length], limit=240))
        rest = rest[length:]
    return lines or [""]


def _points(arm: Mapping[str, Any]) -> np.ndarray:
    """Return epoch, and mean, low and high x 100, as rows (N, 4); NaN for missing ends."""
    rows = [
        (each["epoch"], *(np.nan if each.get(name) is None else 100 * each[name] for name in ("mean", "low", "high")))
        for each in arm.get("curve") or ()
        if each.get("mean") is not None
    ]
    return np.array(rows, dtype=float).reshape(-1, 4)


def _plot_curve(axes: Axes, arm: Mapping[str, Any], index: int, band: bool, label: str = "") -> None:
    epochs, means, low, high = _points(arm).T
    colour, step = _PALETTE[(index - 1) % len(_PALETTE)] if index else BLACK, max(1, len(epochs) // 6)
    if band:
        axes.fill_between(epochs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        epochs, means, linestyle=_LINES[index % len(_LINES)], marker=_MARKERS[index % len(_MARKERS)], color=colour,
        linewidth=1.5, markersize=4, markevery=(index % step, step), label=label,
    )  # fmt: skip


def _finish_curves(axes: Axes, arms: Sequence[Mapping[str, Any]], bands: bool, metric: str) -> None:
    """Set axes that show the means of all arms, and their bands up to one range of the means beyond."""
    points = np.concatenate([_points(arm) for arm in arms])
    means = points[:, 1]
    extent = np.ptp(means) or 1.0
    ends = points[:, 1:][np.isfinite(points[:, 1:])] if bands else means
    low, high = max(ends.min(), means.min() - extent), min(ends.max(), means.max() + extent)
    axes.set_ylim(max(0, low - 0.03 * extent), min(100, high + 0.05 * extent))
    first, last = points[:, 0].min(), points[:, 0].max()
    margin = 0.03 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)
    axes.set_xlabel("epoch", color=INK, fontsize=_SMALL)
    axes.set_ylabel(f"{plain(metric, limit=24)} x 100", color=INK, fontsize=_SMALL)
    axes.grid(color=FAINT, linewidth=0.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=axis is axes.xaxis))
    axes.tick_params(labelsize=_SMALL)
    clear_lines(axes)


def _svg(figure: Figure) -> str:
    """Return a figure as SVG text, the same for the same figure."""
    add_fallback_fonts(figure)
    content = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "detr_bf"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()
