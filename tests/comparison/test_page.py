"""Page, CSV file and Markdown table of a comparison, from generated result documents."""

from __future__ import annotations

import base64
import copy
import csv
import io
import itertools
import json
import re
import statistics
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from detr_bf.common.errors import InputError
from detr_bf.comparison import figures
from detr_bf.comparison.figures import arm_plot, change_text, forest_plot, overview_plot, signed
from detr_bf.comparison.page import markdown_table, write_page
from tests.report.page import Page

NAMES = (
    "off", "two_stream", "duplicate", "self_only", "mixup", "single_stream", "two_stream_until_three_quarters_of_it",
    "off_with_the_epochs_of_the_same_time_now", "before", "after", "first", "last",
)  # fmt: skip
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AP/RBC", "AP/WBC", "AP/Platelets")


def span(values: list[float], width: float) -> dict[str, float | None]:
    """Return an interval of ``width`` standard errors to each side; without ends for one value."""
    if len(values) < 2:
        return {"low": None, "high": None}
    half = width * statistics.stdev(values) / len(values) ** 0.5
    return {"low": statistics.mean(values) - half, "high": statistics.mean(values) + half}


def difference(values: list[float], primary: bool, rng: np.random.Generator) -> dict[str, Any]:
    mean, both = statistics.mean(values), span(values, 3.5)
    low, high = both["low"], both["high"]
    verdict = "undecided" if low is None or high is None or low <= 0 <= high else "better" if mean > 0 else "worse"
    p = float(rng.uniform(0, 1)) if len(values) > 1 else None
    return {
        "mean": mean,
        "values": values,
        "seeds": span(values, 2.8),
        "images": {"low": mean - 0.0213, "high": mean + 0.0227},
        "both": both,
        "p": p,
        "p_holm": min(1.0, 2 * p) if primary and p is not None else None,
        "p_sign_flip": 0.25 if len(values) > 1 else None,
        "detectable": 0.0187 if len(values) > 1 else None,
        "verdict": verdict,
    }


def document(arms: int = 5, seeds: int = 5, seed: int = 0, epochs: int = 12) -> dict[str, Any]:
    """Return a result document with random but plausible numbers; the last arm has one cell fewer."""
    rng = np.random.default_rng(seed)
    names = NAMES[:arms]
    base = np.clip(rng.normal([0.45, 0.8, 0.47, 0.2, 0.4, 0.5, 0.55, 0.6, 0.2], 0.01, (seeds, len(METRICS))), 0, 1)
    results, differences = [], []
    for index, name in enumerate(names):
        cells = [[s, None] for s in range(max(1, seeds - (index == arms - 1 and arms > 1)))]
        effect = 0 if index == 0 else float(rng.normal(0, 0.012))
        values = base[: len(cells)] + (effect + rng.normal(0, 0.008, (len(cells), len(METRICS))) if index else 0)
        curve = []
        for epoch in range(1, epochs + 1):
            mean = float(values[:, 0].mean()) * (1 - np.exp(-epoch / 3))
            ends = {"low": mean - 0.012, "high": mean + 0.014} if len(cells) > 1 else {"low": None, "high": None}
            curve.append({"epoch": epoch, "mean": mean, **ends, "count": len(cells)})
        metrics = {
            metric: {"mean": float(column.mean()), **span(column.tolist(), 2.8), "values": column.tolist()}
            for metric, column in zip(METRICS, values.T, strict=True)
        }
        ratio = 1.0 + 0.31 * index
        cost = {
            "train_seconds_ratio": {"mean": 2 * ratio, "low": None, "high": None},
            "step_seconds_ratio": {"mean": ratio, "low": ratio - 0.02, "high": ratio + 0.03},
            "memory_ratio": {"mean": ratio * 0.9, "low": None, "high": None},
            "rows_ratio": 2.0 if index else 1.0,
        }
        overrides = [f"batch_former.mode={name}"]
        results.append(
            {"name": name, "overrides": overrides, "cells": cells, "metrics": metrics, "curve": curve, "cost": cost}
        )
        if index:
            change = values - base[: len(cells)]
            columns = zip(METRICS, change.T, strict=True)
            found = {metric: difference(column.tolist(), metric == "AP", rng) for metric, column in columns}
            differences.append({"arm": name, "against": names[0], "pairs": cells, "metrics": found})
    return {
        "format": "detr_bf comparison 1",
        "title": "Blood cells, Deformable DETR",
        "baseline": names[0],
        "primary": "AP",
        "confidence": 0.95,
        "resamples": 2000,
        "arms": results,
        "differences": differences,
        "settings": [
            {"key": "batch_former.enabled", "values": {name: bool(i) for i, name in enumerate(names)}},
            {"key": "batch_former.mode", "values": {name: name for name in names[1:]}},
            {"key": "optimizer.lr", "values": {name: 1e-4 * (i + 1) for i, name in enumerate(names)}},
        ],
        "circumstances": {
            "data": {
                "train": {"sha256": "ab" * 32, "images": 292, "objects": 3901},
                "val": {"sha256": "cd" * 32, "images": 72, "objects": 987},
            },
            "machines": [{"CPU": "Some CPU @ 2.5 GHz, 2 of 2 cores usable", "python": "3.11.9", "torch": "2.15.0"}],
            "commands": ["detr-bf compare run configs/compare/bccd.yaml"],
            "versions": {"detr_bf": "0.1.0", "torch": "2.15.0"},
        },
        "sentences": [
            "two_stream is undecided against off: AP +0.4, 95 % interval -0.9 to +1.7 over seeds and images.",
            "These five seeds would have shown a difference of 1.9 AP with a probability of 80 %.",
        ],
    }


class Tables(HTMLParser):
    """Cells of every table by the label of its box, and the attributes of the pictures."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.images: list[dict[str, str | None]] = []
        self.headings: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html.replace("<wbr>", "").replace("<small>", " "))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "div" and values.get("role") == "region":
            self.rows = self.tables.setdefault(str(values["aria-label"]), [])
        elif tag == "table" and values.get("class") == "facts":
            self.rows = self.tables.setdefault("facts", [])
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "img":
            self.images.append(values)
        elif tag in ("h1", "h2", "h3"):
            self.headings.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.rows = []

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.rstrip("\n")


def read(path: Path) -> Tables:
    return Tables(path.read_text(encoding="utf-8"))


def pictures(path: Path) -> list[str]:
    """Return the SVG texts embedded in a page."""
    sources = [str(image["src"]) for image in read(path).images]
    return [base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode() for source in sources]


def hundred(value: float | None, sign: str = "") -> str:
    """Return an own rendering of a fraction, to compare with that of the page."""
    if value is None:
        return "—"
    return format(value * 100, sign + ".1f") if abs(value) >= 0.0005 else "0.0"


def ends(interval: dict[str, Any], sign: str = "") -> str:
    return f"[{hundred(interval['low'], sign)}, {hundred(interval['high'], sign)}]"


SIZES = [(2, 1), (5, 5), (12, 3)]


@pytest.mark.parametrize(("arms", "seeds"), SIZES)
def test_the_page_is_whole_and_loads_nothing(tmp_path: Path, arms: int, seeds: int) -> None:
    result = document(arms, seeds)
    path = write_page(result, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "index.html"
    html = path.read_text(encoding="utf-8")
    assert len(html) < 1_000_000
    page = Page(html.replace("<wbr>", ""))
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    assert page.tags.count("script") == 1
    assert not {"link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"url\(|@import|https?:", re.sub(r'src="[^"]*"', "", html))
    assert "width=device-width" in html
    assert "color-scheme: light dark" in html
    for text in (result["title"], *result["sentences"], *NAMES[:arms], "Blood cells, Deformable DETR"):
        assert text in page.texts, text
    assert not re.search(r"\b(nan|inf|None)\b", " ".join(page.texts))
    headings = read(path).headings
    assert headings[0] == "h1"
    assert headings.count("h1") == 1
    assert all(int(after[1]) <= int(before[1]) + 1 for before, after in itertools.pairwise(headings))


def test_every_table_has_the_numbers_of_the_document(tmp_path: Path) -> None:
    result = document(5, 5)
    tables = read(write_page(result, tmp_path)).tables
    off, *others = result["arms"]
    changes = [each["metrics"] for each in result["differences"]]
    plain = [metric for metric in METRICS if "/" not in metric]

    def mean(arm: dict[str, Any], metric: str) -> str:
        return f"{hundred(arm['metrics'][metric]['mean'])} {ends(arm['metrics'][metric])}"

    expected = [[arm["name"], str(len(arm["cells"])), mean(arm, "AP")] for arm in result["arms"]]
    for row, arm, change in zip(expected, (off, *others), [None, *changes], strict=True):
        row.append(f"{hundred(change['AP']['mean'], '+')} {ends(change['AP']['both'], '+')}" if change else "—")
        row += [mean(arm, metric) for metric in plain[1:]]
    assert tables["Means of the arms"] == [["Arm", "Runs", "AP", "Difference", *plain[1:]], *expected]

    def numbers(name: str, change: dict[str, Any]) -> list[str]:
        holm = "—" if change["p_holm"] is None else f"{change['p_holm']:.3f}"
        both, seeds, images = (ends(change[kind], "+") for kind in ("both", "seeds", "images"))
        others = [seeds, images, f"{change['p']:.3f}", "0.250", "1.9", str(len(change["values"]))]
        return [name, hundred(change["mean"], "+"), both, holm, change["verdict"], *others]

    names = [arm["name"] for arm in others]
    main = [numbers(name, change["AP"]) for name, change in zip(names, changes, strict=True)]
    assert tables["Differences from the baseline"][1:] == main
    further = [row for row in tables["Differences in further metrics"] if row[0] != "Metric, arm"]
    assert further == [
        numbers(f"{metric.removeprefix('AP/')}, {name}", change[metric])
        for metric in METRICS[1:]
        for name, change in zip(names, changes, strict=True)
    ]
    classes = [[metric[3:], *(mean(arm, metric) for arm in result["arms"])] for metric in METRICS[6:]]
    assert tables["AP by class"] == [["Class", *NAMES[:5]], *classes]
    cost = tables["Cost"][1:]
    assert cost[1] == ["two_stream", "2.62", "1.31 [1.29, 1.34]", "1.18", "2.00"]
    assert tables["Settings"][1:3] == [
        ["batch_former.enabled", "false", "true", "true", "true", "true"],
        ["batch_former.mode", "—", *NAMES[1:5]],
    ]
    facts = dict(tables["facts"])
    assert facts["train.sha256"] == "ab" * 32
    assert facts["val.objects"] == "987"
    assert facts["CPU"] == "Some CPU @ 2.5 GHz, 2 of 2 cores usable"


def test_pictures_have_their_numbers_in_words(tmp_path: Path) -> None:
    result = document(5, 5)
    path = write_page(result, tmp_path)
    images = read(path).images
    assert len(images) == 1 + 1 + 4 + 8, "main differences, all curves, curves of four arms, eight further metrics"
    main, overview = str(images[0]["alt"]), str(images[1]["alt"])
    for each in result["differences"]:
        change = each["metrics"]["AP"]
        words = f"{each['arm']}: {hundred(change['mean'], '+')} {ends(change['both'], '+')}, {change['verdict']}."
        assert words in main
    for arm in result["arms"]:
        last = arm["curve"][-1]
        assert f"{arm['name']}: {hundred(last['mean'])} {ends(last)} at epoch 12." in overview
    texts = [element.text for element in ElementTree.fromstring(pictures(path)[0]).iter() if element.text]
    assert {"two_stream", "mixup", change_text(result["differences"][0]["metrics"]["AP"])} <= set(texts)


def test_the_same_document_gives_the_same_files(tmp_path: Path) -> None:
    paths = [write_page(document(3, 2), tmp_path / name) for name in "ab"]
    for name in ("index.html", "comparison.csv", "comparison.json"):
        assert paths[0].with_name(name).read_bytes() == paths[1].with_name(name).read_bytes()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures instead of writing them."""
    collected: list[Figure] = []
    monkeypatch.setattr(figures, "_svg", lambda figure: collected.append(figure) or "")
    return collected


def lines_with(figure: Figure, **properties: object) -> list[Line2D]:
    lines = figure.axes[0].lines
    return [line for line in lines if all(getattr(line, f"get_{key}")() == value for key, value in properties.items())]


def x_values(lines: list[Line2D]) -> list[list[float]]:
    return [np.ravel(line.get_xdata()).tolist() for line in lines]


def test_differences_are_drawn_where_they_are(drawn: list[Figure]) -> None:
    changes = {each["arm"]: each["metrics"]["AP"] for each in document(4, 5)["differences"]}
    forest_plot(changes, "AP")
    [figure] = drawn
    for kind, style in (("seeds", {"linewidth": 7}), ("both", {"linewidth": 1.4, "linestyle": "-", "marker": "None"})):
        expected = [[100 * change[kind]["low"], 100 * change[kind]["high"]] for change in changes.values()]
        np.testing.assert_allclose(x_values(lines_with(figure, **style)), expected)
    pairs, means = x_values(lines_with(figure, marker="o")), x_values(lines_with(figure, marker="D"))
    for found, mean, change in zip(pairs, means, changes.values(), strict=True):
        np.testing.assert_allclose(found, np.multiply(change["values"], 100))
        np.testing.assert_allclose(mean, [100 * change["mean"]])
    bands = [band.get_datalim(figure.axes[0].transData).intervalx for band in figure.axes[0].collections]
    np.testing.assert_allclose(bands, [[-1.87, 1.87]] * 3)
    low, high = figure.axes[0].get_xlim()
    assert low < min(min(each) for each in x_values(figure.axes[0].lines) if len(each) > 1)
    assert high > max(max(each) for each in x_values(figure.axes[0].lines) if len(each) > 1)
    assert not lines_with(figure, marker=">"), "no interval is cut off"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[1:3] == ["interval over seeds", "one pair of runs"]


def test_a_very_long_interval_ends_in_arrows(drawn: list[Figure]) -> None:
    changes = {each["arm"]: each["metrics"]["AP"] for each in document(5, 5)["differences"]}
    changes["mixup"]["both"] = {"low": -0.4, "high": 0.5}
    forest_plot(changes, "AP")
    low, high = drawn[0].axes[0].get_xlim()
    assert -30 < low < 0 < high < 30
    assert x_values(lines_with(drawn[0], marker="<")) == [[low]]
    assert x_values(lines_with(drawn[0], marker=">")) == [[high]]


def test_one_pair_shows_the_interval_over_images_dotted(drawn: list[Figure]) -> None:
    change = document(2, 1)["differences"][0]["metrics"]["AP"]
    forest_plot({"two_stream": change}, "AP")
    expected = [[100 * change["images"]["low"], 100 * change["images"]["high"]]]
    np.testing.assert_allclose(x_values(lines_with(drawn[0], linestyle=":")), expected)
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == ["mean, interval over images alone", "one pair of runs"]
    assert not drawn[0].axes[0].collections, "no smallest detectable difference is known"


def test_curves_are_drawn_with_bands_and_different_without_colours(drawn: list[Figure]) -> None:
    arms = document(12, 3)["arms"]
    overview_plot(arms, "AP", bands=False)
    arm_plot(arms, 7, "AP")
    overview, small = drawn
    assert [line.get_label() for line in overview.axes[0].lines] == list(NAMES)
    for line, arm in zip(overview.axes[0].lines, arms, strict=True):
        np.testing.assert_allclose(line.get_ydata(), [100 * point["mean"] for point in arm["curve"]])
    looks = {(line.get_linestyle(), line.get_marker()) for line in overview.axes[0].lines}
    assert len(looks) == 12
    assert not overview.axes[0].collections
    assert len(small.axes[0].collections) == 2
    later = [100 * point["mean"] for point in arms[7]["curve"] if point["epoch"] >= 4]
    np.testing.assert_allclose(small.axes[0].lines[1].get_ydata(), later)
    assert small.axes[0].lines[0].get_color() != small.axes[0].lines[1].get_color()


def test_csv_has_every_number_without_rounding(tmp_path: Path) -> None:
    result = document(4, 3)
    result["arms"][1]["name"] = result["differences"][0]["arm"] = '=1+2,"x"'
    result["arms"][3]["metrics"]["APl"] = {"mean": None, "low": None, "high": None, "values": [None, None]}
    write_page(result, tmp_path)
    text = (tmp_path / "comparison.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 4 * len(METRICS)
    assert text.splitlines()[0] == (
        "arm,against,metric,cells,mean,low,high,difference,seeds_low,seeds_high,images_low,images_high,both_low,both_high,p,"
        "p_holm,p_sign_flip,detectable,verdict"
    )
    found = {(row["arm"], row["metric"]): row for row in rows}
    assert ('\'=1+2,"x"', "AP") in found, "a spreadsheet must not compute it"
    for arm, each in zip(result["arms"][1:], result["differences"], strict=True):
        name = arm["name"] if arm["name"] in NAMES else f"'{arm['name']}"
        for metric, change in each["metrics"].items():
            row, stat = found[name, metric], arm["metrics"][metric]
            values = [stat["mean"], stat["low"], stat["high"], change["mean"]]
            values += [change[kind][end] for kind in ("seeds", "images", "both") for end in ("low", "high")]
            values += [change[name] for name in ("p", "p_holm", "p_sign_flip", "detectable")]
            assert list(row.values())[4:-1] == ["" if value is None else repr(value) for value in values]
            assert row["verdict"] == change["verdict"]
    assert found["off", "AP"]["difference"] == found["off", "AP"]["verdict"] == ""
    assert [found[name, "APl"]["cells"] for name in ("off", "self_only")] == ["3", "0"]


def with_contrast(result: dict[str, Any]) -> dict[str, Any]:
    """Add the difference of the second and third arm, with all metrics."""
    second, third = (arm["name"] for arm in result["arms"][1:3])
    metrics = copy.deepcopy(result["differences"][1]["metrics"])
    for number, change in enumerate(metrics.values()):
        change.update(mean=0.01234 + number / 1000, both={"low": 0.001, "high": 0.025}, p_holm=0.031, verdict="better")
    contrast = {"arm": second, "against": third, "pairs": [[0, None], [1, None]], "metrics": metrics}
    return {**result, "contrasts": [contrast]}


def test_contrasts_are_on_the_page_and_in_the_files(tmp_path: Path) -> None:
    result = with_contrast(document(3, 3))
    path = write_page(result, tmp_path)
    assert ">Differences in AP between other arms<" in path.read_text(encoding="utf-8")
    table = read(path).tables["Differences between other arms"]
    [row] = [line for line in table if line[0] == "two_stream - duplicate"]
    assert row[1:5] == ["+1.2", "[+0.1, +2.5]", "0.031", "better"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text(encoding="utf-8"))))
    own = [row for row in rows if row["against"] == "duplicate"]
    assert [row["metric"] for row in own] == list(METRICS)
    assert (own[0]["arm"], own[0]["mean"], own[0]["difference"]) == ("two_stream", "", "0.01234")
    assert own[0]["both_high"] == "0.025"
    assert markdown_table(result).splitlines()[-1] == (
        "| two_stream - duplicate |   +1.2 [+0.1, +2.5] |  0.031 |  better |     2 |"
    )


def test_json_is_the_document(tmp_path: Path) -> None:
    result = document(3, 2)
    write_page(result, tmp_path)
    read_back = json.loads((tmp_path / "comparison.json").read_text())
    assert read_back == result
    assert list(read_back) == list(result), "in the order given"


def test_a_number_that_is_not_finite_is_refused_before_writing(tmp_path: Path) -> None:
    result = document(2, 2)
    result["arms"][0]["metrics"]["AP"]["mean"] = float("nan")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_page(result, tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has the format 'detr_bf cell 1', expected 'detr_bf comparison 1'"):
        write_page({**document(2, 2), "format": "detr_bf cell 1"}, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["index.html", "comparison.csv", "comparison.json"])
def test_files_of_other_origin_are_kept_and_own_ones_replaced(tmp_path: Path, name: str) -> None:
    write_page(document(2, 2), tmp_path)
    before = (tmp_path / name).read_bytes()
    write_page(document(3, 2), tmp_path)
    assert (tmp_path / name).read_bytes() != before
    (tmp_path / name).write_text("<html>mine</html>")
    others = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match=rf"{name} was not written by a comparison"):
        write_page(document(2, 2), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == others


HOSTILE = (
    "<script>alert(1)</script>",
    '=cmd|"/c calc"!A1',
    "W" * 40,
    r"a\" onload='x' & $\frac{$",
    "\x1b[2J\n\ud800",
    "猫",
)


def test_names_from_outside_have_no_effect(tmp_path: Path) -> None:
    text = json.dumps(document(6, 3))
    for name, hostile in zip(NAMES, HOSTILE, strict=False):
        text = text.replace(f'"{name}"', json.dumps(hostile))
    text = text.replace('"AP/RBC"', json.dumps("AP/<b>RBC</b>"))
    result = json.loads(text)
    result["title"] = result["sentences"][0] = "</title><script>"
    result["circumstances"]["machines"][0]["CPU"] = result["circumstances"]["commands"][0] = "<img src=x>"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = write_page(result, tmp_path)
    html = path.read_text(encoding="utf-8")
    page = Page(html.replace("<wbr>", ""))
    assert page.tags.count("script") == 1
    assert "b" not in page.tags
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    assert not set(html) & {"\x1b", "\ud800"}
    for shown in (*HOSTILE[:4], r"\x1b[2J\n\ud800", "猫", "<b>RBC</b>", "</title><script>", "<img src=x>"):
        assert shown in page.texts, shown
    for svg in pictures(path):
        assert not {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()} & {"script", "b"}


def test_missing_values_are_dashes(tmp_path: Path) -> None:
    nothing = {"mean": None, "low": None, "high": None}
    result = document(6, 3, epochs=1)
    del result["arms"][1]["metrics"]["AP/WBC"], result["differences"][0]["metrics"]["AP/WBC"]
    for each in (*result["arms"], *result["differences"]):
        each["metrics"]["APl"] = {**nothing, "values": [None], "seeds": None, "both": nothing, "verdict": "undecided"}
    for each in result["arms"][2], result["arms"][3]:
        each["curve"] = []
        each["cost"] = {
            "train_seconds_ratio": None,
            "step_seconds_ratio": None,
            "memory_ratio": nothing,
            "rows_ratio": None,
        }
    del result["arms"][3]["cost"]
    result["arms"][0]["curve"].append({"epoch": 30, "mean": None, "low": None, "high": None, "count": 0})
    result["differences"].pop()
    result["settings"], result["sentences"], result["circumstances"] = [], [], {}
    path = write_page(result, tmp_path)
    page, everything = read(path), " ".join(Page(path.read_text().replace("<wbr>", "")).texts)
    assert page.tables["AP by class"][2][2] == "—"
    assert [row[-1] for row in page.tables["Means of the arms"]] == ["APl", *["—"] * 6]
    assert page.tables["Cost"][3:5] == [[arm, "—", "—", "—", "—"] for arm in ("duplicate", "self_only")]
    assert "Not compared with the baseline: single_stream." in everything
    assert "The configs of the arms do not differ." in everything
    assert "Nothing was recorded." in everything
    assert len(page.images) == 1 + 4 + 4 + 3, "no plot of the metric without values"
    result["differences"] = []
    for arm in result["arms"]:
        arm["curve"] = []
    path = write_page(result, tmp_path)
    assert not read(path).images
    assert "No evaluation during training was recorded." in path.read_text()


def test_many_classes_are_in_the_table_and_few_are_drawn(tmp_path: Path) -> None:
    result = document(2, 2)
    for each in (result["arms"][0], result["arms"][1], result["differences"][0]):
        for number in range(80):
            each["metrics"][f"AP/class {number}"] = copy.deepcopy(each["metrics"]["AP"])
    path = write_page(result, tmp_path)
    assert len(read(path).tables["AP by class"]) == 1 + 3 + 80
    assert len(read(path).images) == 1 + 1 + 5 + 12
    assert "The plots show the first 12 of 83 classes." in path.read_text()
    assert path.stat().st_size < 1_000_000


def test_markdown_by_hand() -> None:
    result = document(3, 2)
    for arm, mean in zip(result["arms"], (0.5, 0.51234, 0.4), strict=True):
        arm["metrics"] = {"AP": {"mean": mean, "low": mean - 0.01, "high": mean + 0.02, "values": [mean] * 2}}
    result["arms"][1]["metrics"]["AP50"] = {"mean": 0.8, "low": None, "high": None, "values": [0.8]}
    result["arms"][2]["name"] = result["differences"][1]["arm"] = "a|b"
    result["differences"][0]["metrics"]["AP"] = {
        **{"mean": 0.01234, "both": {"low": -0.0004, "high": 0.025}, "p_holm": 0.0004, "verdict": "better"}
    }
    result["differences"][1]["metrics"] = {}
    assert markdown_table(result) == (
        "| Arm        |          AP x 100 | AP50 x 100 | Difference x 100 | Holm p |  Verdict | Step time | Runs |\n"
        "| :--------- | ----------------: | ---------: | ---------------: | -----: | -------: | --------: | ---: |\n"
        "| off        | 50.0 [49.0, 52.0] |          — |                — |      — | baseline |      1.00 |    2 |\n"
        "| two_stream | 51.2 [50.2, 53.2] |       80.0 | +1.2 [0.0, +2.5] | <0.001 |   better |      1.31 |    2 |\n"
        "| a\\|b       | 40.0 [39.0, 42.0] |          — |                — |      — |        — |      1.62 |    1 |\n"
    )


def test_markdown_takes_the_second_metric_of_other_tasks() -> None:
    text = json.dumps(document(2, 2)).replace('"AP"', '"PQ"').replace('"AP50"', '"SQ"')
    titles = [title.strip() for title in markdown_table(json.loads(text)).splitlines()[0].split("|")]
    assert titles[1:5] == ["Arm", "PQ x 100", "SQ x 100", "Difference x 100"]
    lone = document(2, 2)
    for each in (*lone["arms"], *lone["differences"]):
        each["metrics"] = {name: value for name, value in each["metrics"].items() if name == "AP" or "/" in name}
    assert markdown_table(lone).splitlines()[0].count("x 100") == 2, "the primary metric and the difference"


@pytest.mark.parametrize(
    ("value", "text"), [(-0.0004, "0.0"), (0.0004, "0.0"), (0.0126, "+1.3"), (-0.5, "-50.0"), (None, "—")]
)
def test_signed_numbers(value: float | None, text: str) -> None:
    assert signed(value) == text
