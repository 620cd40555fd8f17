"""Charts: positions, axes, thinning and the data for the pointer."""

from __future__ import annotations

import json
import math
import re
from html import unescape

import numpy as np
import pytest

from detr_bf.report.charts import CHART_COLOURS, Chart, Line, chart, chart_group
from tests.report.page import Page

LEFT, RIGHT, TOP, BOTTOM = 50.0, 392.0, 8.0, 190.0  # of the area with the lines


def points(html: str, kind: str) -> np.ndarray:
    """Return the positions of one line, (N, 2)."""
    (found,) = re.findall(f'<polyline class="{kind}" points="([^"]*)"', html)
    return np.array([[float(value) for value in point.split(",")] for point in found.split()])


def data(html: str) -> dict[str, object]:
    (found,) = re.findall('data-chart="([^"]*)"', html)
    return json.loads(unescape(found))


@pytest.mark.parametrize("log", [False, True])
def test_points_lie_where_the_axes_say(log: bool) -> None:
    x, y = [0.0, 1.0, 4.0], [1.0, 10.0, 100.0]
    html = chart(Chart("t", [Line("a", x, y, "blue")], x_range=(0.0, 4.0), low=0.0, high=100.0, log=log))
    places = points(html, "blue")
    np.testing.assert_allclose(places[:, 0], LEFT + (RIGHT - LEFT) * np.array(x) / 4, atol=0.06)
    low, high = data(html)["y"]
    if log:
        assert low == pytest.approx(1 / 1.2)
        assert high == pytest.approx(120)
        share = np.log(np.array(y) / low) / math.log(high / low)
    else:
        share = np.array(y) / 100
    np.testing.assert_allclose(places[:, 1], BOTTOM - (BOTTOM - TOP) * share, atol=0.06)
    for text, place in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)</text>', html):
        value = float(place)
        share = math.log(value / low) / math.log(high / low) if log else value / 100
        assert float(text) == pytest.approx(BOTTOM - (BOTTOM - TOP) * share + 4, abs=0.06)


def test_the_pointer_finds_the_values_of_each_line() -> None:
    lines = [Line("a & b", [0.0, 2.0], [1.23456789, 3.0], "blue"), Line("c", [1.0], [2.0], "red"), Line("d", [], [])]
    html = chart(Chart("<t>", lines, "least score"))
    assert data(html) == {
        "label": "least score",
        "x": [0.0, 2.0],
        "y": [0.0, 3.18],
        "log": False,
        "lines": [[[0.0, 2.0], [1.2346, 3.0]], [[1.0], [2.0]]],
    }
    page = Page(html)
    assert page.tags.count("li") == 2
    for text in ("<t>", "a & b", "c", "3", "2"):
        assert text in page.texts, text
    assert page.tags.count("circle") == 1  # a single point is a dot
    assert "<t> over least score. Last values: a & b 3, c 2." in unescape(html)


def test_long_lines_are_thinned_and_keep_their_ends_and_peaks() -> None:
    x = np.arange(10_000.0)
    y, raw = x / 1_000, np.ones(10_000)
    raw[[77, 5_432]] = 9.0, -5.0
    html = chart(Chart("t", [Line("a", x.tolist(), y.tolist(), "blue", raw.tolist())]))
    assert len(html) < 60_000
    kept = data(html)["lines"][0]
    assert len(kept[0]) == 600
    assert (kept[0][0], kept[0][-1], kept[1][-1]) == (0.0, 9_999.0, 9.999)
    outline = points(html, "raw blue")
    assert len(outline) <= 600
    assert outline[:, 1].min() < outline[:, 1].max()


def test_equal_values_have_an_axis_too() -> None:
    for values in ([0.0, 0.0], [5.0, 5.0]):
        for log in (False, True):
            html = chart(Chart("t", [Line("a", [1.0, 1.0], values)], log=log))
            assert "nan" not in html
            assert np.isfinite(points(html, "black")).all()


def test_values_outside_the_axis_end_beside_the_area() -> None:
    places = points(chart(Chart("t", [Line("a", [0.0, 1.0], [-9.0, 9.0])], low=0.0, high=1.0)), "black")
    assert BOTTOM < places[0, 1] < BOTTOM + 10
    assert TOP - 10 < places[1, 1] < TOP


def test_bars_marks_and_colours() -> None:
    bars = [((at + 0.5) / 4, at / 4, str(at)) for at in range(4)]
    lines = [Line(name, [0.0, 1.0], [0.0, 1.0], name) for name in CHART_COLOURS]
    html = chart_group([Chart("t", lines, x_range=(0.0, 1.0), high=1.0, bars=bars, mark=(0.25, "here"))])
    heights = [float(height) for height in re.findall(r'class="column"[^>]*height="([\d.]+)"', html)]
    np.testing.assert_allclose(heights, [(BOTTOM - TOP) * at / 4 for at in range(4)], atol=0.11)
    assert f'class="mark" d="M{LEFT + (RIGHT - LEFT) / 4:.1f}' in html
    assert "here" in Page(html).texts


def test_negative_values_lie_inside_the_area() -> None:
    html = chart(Chart("t", [Line("a", [0.0, 1.0], [-1.0, -3.0])]))
    assert data(html)["y"] == [-3.0, pytest.approx(-0.88)]
    assert (np.diff(points(html, "black")[:, 1]) > 0).all()
