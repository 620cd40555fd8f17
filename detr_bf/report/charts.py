"""Line charts as inline SVG, in the colours of the page, with a legend below.

The script of the page shows the values at the pointer, in all charts of one group at the same horizontal
position. Without scripts the legend has the last value of each line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator

from detr_bf.common.text import printable
from detr_bf.report.page import escaped

CHART_COLOURS = ("blue", "red", "green", "pink", "orange", "sky", "black")  # classes of page.css
_WIDTH, _HEIGHT = 400, 226  # of the drawing; lengths below are in its units
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 392.0, 8.0, 190.0  # of the area with the lines
_MOST_POINTS = 600  # of a line; longer ones are thinned
_SMALLEST = 1e-100  # smallest value on a logarithmic axis
_DECADES = 12  # most decades of a logarithmic axis


@dataclass(frozen=True)
class Line:
    """A line of a chart: ``y`` over ``x``, of equal length, ``x`` in ascending order."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "black"  # one of CHART_COLOURS
    raw: Sequence[float] = ()  # values drawn faintly below the line, of the same length
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of at least one line with points.

    ``low`` and ``high`` are the ends of the vertical axis; None takes them from the lines, ``low`` at most 0.
    """

    title: str
    lines: Sequence[Line]
    x_label: str = "epoch"
    y_label: str = ""
    x_range: tuple[float, float] | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False  # logarithmic vertical axis; ``low`` and ``high`` are not used
    mark: tuple[float, str] | None = None  # position and name of a dashed vertical line
    bars: Sequence[tuple[float, float, str]] = field(default=())  # centre, height, text; all of equal width
    show_last: bool = True  # the last value of each line in the legend


def chart_group(charts: Iterable[Chart]) -> str:
    """Return the charts side by side; those with the same horizontal axis share the pointer."""
    return f'<div class="charts">{"".join(map(chart, charts))}</div>'


def chart(content: Chart) -> str:
    """Return one chart as HTML."""
    lines = [line for line in content.lines if len(line.x)]
    x_range = content.x_range or _padded(min(line.x[0] for line in lines), max(line.x[-1] for line in lines))
    scale = _Scale(x_range, _vertical_range(content, lines), content.log)
    data = {
        "label": content.x_label,
        "x": x_range,
        "y": scale.y_range,
        "log": content.log,
        "lines": [
            [[float(f"{value:.5g}") for value in values] for values in _thinned(line.x, line.y)] for line in lines
        ],
    }
    drawing = [*_axes(content, scale), *_bars(content.bars, scale)]
    for line in lines:
        if len(line.raw):
            drawing.append(_polyline(scale, *_outline(line.x, line.raw), f"raw {line.colour}"))
        drawing.append(_polyline(scale, *_thinned(line.x, line.y), line.colour + (" dashed" if line.dashed else "")))
    if content.mark is not None:
        place, name = content.mark
        drawing.append(_mark(scale.x(place), name))
    legend = "".join(
        f'<li class="{line.colour}"><i></i>{escaped(printable(line.name))} '
        f"<b>{shown_number(line.y[-1]) if content.show_last else ''}</b></li>"
        for line in lines
    )
    names = ", ".join(f"{printable(line.name)} {shown_number(line.y[-1])}" for line in lines)
    label = f"{content.title} over {content.x_label}. " + (f"Last values: {names}." if content.show_last else "")
    return (
        f'<figure class="chart" data-chart="{escaped(json.dumps(data, separators=(",", ":")))}">'
        f'<figcaption>{escaped(content.title)} <span aria-live="polite"></span></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" tabindex="0" aria-label="{escaped(label)}">'
        f'<rect class="area" x="{_LEFT:g}" y="{_TOP:g}" width="{_RIGHT - _LEFT:g}" height="{_BOTTOM - _TOP:g}"/>'
        f'{"".join(drawing)}</svg><ul class="legend">{legend}</ul></figure>\n'
    )


def shown_number(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:.4g}"


@dataclass(frozen=True)
class _Scale:
    """Positions in the drawing of values."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log: bool

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (_RIGHT - _LEFT) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """Return the vertical position; that of values outside the axis is a little outside the area."""
        low, high = self.y_range
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, _SMALLEST))
        return _BOTTOM - (_BOTTOM - _TOP) * min(1.03, max(-0.03, (value - low) / (high - low)))


def _vertical_range(content: Chart, lines: Sequence[Line]) -> tuple[float, float]:
    values = np.concatenate([np.asarray(line.y, dtype=float) for line in lines])
    if content.log:
        values = values[values > _SMALLEST]
        top = 1.2 * float(values.max()) if values.size else 1.0
        return max(float(values.min()) / 1.2 if values.size else 0.1, top / 10**_DECADES), top
    low = min(0.0, float(values.min())) if content.low is None else content.low
    high = content.high
    if high is None:
        high = max([low, float(values.max()), *(height for _, height, _ in content.bars)])
        high += 0.06 * (high - low)
    return _padded(low, high)


def _padded(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis, one unit apart if they are equal."""
    return (low, high) if high > low else (low, low + 1.0)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        wide = math.log10(high / low) > 2.5
        found = LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=8).tick_values(low, high)
    else:
        found = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    margin = 0.0 if log else 1e-9 * (high - low)
    return [float(value) for value in found if low - margin <= value <= high + margin]


def _axes(content: Chart, scale: _Scale) -> Iterator[str]:
    """Yield grid lines with their numbers, and the names of the axes."""
    for value in _ticks(*scale.y_range, scale.log):
        y = scale.y(value)
        yield f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{_RIGHT:g}"/>'
        yield f'<text x="{_LEFT - 5:g}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>'
    for value in _ticks(*scale.x_range, False):
        x = scale.x(value)
        yield f'<path class="grid" d="M{x:.1f} {_TOP:g}V{_BOTTOM:g}"/>'
        yield f'<text x="{x:.1f}" y="{_BOTTOM + 15:g}" text-anchor="middle">{value:.6g}</text>'
    middle = (_LEFT + _RIGHT) / 2
    label = f"{content.y_label} over {content.x_label}" if content.y_label else content.x_label
    yield f'<text x="{middle:g}" y="{_HEIGHT - 5}" text-anchor="middle">{escaped(label)}</text>'


def _bars(bars: Sequence[tuple[float, float, str]], scale: _Scale) -> Iterator[str]:
    width = 0.86 * (_RIGHT - _LEFT) / max(1, len(bars))
    for centre, height, text in bars:
        x, y = scale.x(centre), scale.y(height)
        yield (
            f'<rect class="column" x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BOTTOM - y:.1f}"/>'
        )
        yield f'<text class="small" x="{x:.1f}" y="{_BOTTOM - 3:g}" text-anchor="middle">{escaped(text)}</text>'


def _mark(x: float, name: str) -> str:
    after = x < (_LEFT + _RIGHT) / 2
    return (
        f'<path class="mark" d="M{x:.1f} {_TOP:g}V{_BOTTOM:g}"/><text x="{x + (4 if after else -4):.1f}" '
        f'y="{_TOP + 10:g}" text-anchor="{"start" if after else "end"}">{escaped(name)}</text>'
    )


def _polyline(scale: _Scale, x: Sequence[float], y: Sequence[float], kind: str) -> str:
    """Return a line; a single point is a dot."""
    points = [f"{scale.x(a):.1f},{scale.y(b):.1f}" for a, b in zip(x, y, strict=True)]
    if len(points) == 1:
        left, top = points[0].split(",")
        return f'<circle class="dot {kind}" cx="{left}" cy="{top}" r="3"/>'
    return f'<polyline class="{kind}" points="{" ".join(points)}"/>'


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return at most 600 evenly spread points, with the first and the last."""
    if len(x) <= _MOST_POINTS:
        return x, y
    kept = np.linspace(0, len(x) - 1, _MOST_POINTS).round().astype(int)
    return [x[at] for at in kept], [y[at] for at in kept]


def _outline(x: Sequence[float], y: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the points, or of many the smallest and the largest value of each part, so that no peak is lost."""
    if len(x) <= _MOST_POINTS:
        return x, y
    kept = {
        int(place)
        for part in np.array_split(np.arange(len(x)), _MOST_POINTS // 2)
        for place in (part[np.argmin(np.take(y, part))], part[np.argmax(np.take(y, part))])
    }
    order = sorted(kept)
    return [x[at] for at in order], [y[at] for at in order]
