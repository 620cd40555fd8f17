"""``comparison.json``, ``comparison.csv`` and ``index.html`` of a comparison, and its Markdown table.

All are made from the result document (:mod:`detr_bf.comparison.document`), which holds fractions. Metrics are shown
x 100 with one decimal, as COCO results are published; the JSON and CSV files hold the numbers as they are.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.files import write_json, write_text
from detr_bf.common.text import counted, csv_cell, printable, safe_message
from detr_bf.comparison.figures import (
    Difference,
    Document,
    arm_plot,
    change_text,
    forest_plot,
    overview_plot,
    signed,
    span_text,
)
from detr_bf.report.page import escaped, html_page, number, percent, section

_FORMAT = "detr_bf comparison 1"
_JSON, _CSV, _PAGE = "comparison.json", "comparison.csv", "index.html"
_MARKS = {
    _JSON: '"format": "detr_bf comparison',
    _CSV: "arm,against,metric,cells,",
    _PAGE: 'content="detr_bf"',
}  # of our files
_COLUMNS = (
    *("arm", "against", "metric", "cells", "mean", "low", "high", "difference", "seeds_low", "seeds_high"),
    *("images_low", "images_high", "both_low", "both_high"),
    *("p", "p_holm", "p_sign_flip", "detectable", "verdict"),
)
_NOTHING = "—"
_CLASS = "AP/"  # prefix of the metrics of classes
_CLASS_PLOTS = 12  # most plots of classes; the table has all
_BANDS = 3  # most arms whose bands are drawn in one plot
_STYLE = """
header p { max-width: 75ch; }
h3 { font-size: 1rem; margin: 28px 0 8px; overflow-wrap: anywhere; }
h2 { overflow-wrap: anywhere; }
.plot { max-width: 520px; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 16px;
  margin: 16px 0; align-items: start; }
.narrow { grid-template-columns: repeat(auto-fill, minmax(min(47%, 230px), 1fr)); gap: 8px; max-width: 960px; }
figcaption { color: #1c1e22; font-size: 0.86rem; font-weight: 600; overflow-wrap: anywhere; padding: 2px 4px; }
figure + .scroll { margin-top: 16px; }
table { border-collapse: separate; border-spacing: 0; }
thead th { white-space: normal; vertical-align: bottom; }
.arms thead th, .arms td { white-space: normal; overflow-wrap: anywhere; min-width: 8em; }
tbody th { white-space: normal; overflow-wrap: anywhere; min-width: 7.5em; max-width: 20em; text-align: left; }
tbody th, thead th:first-child { position: sticky; left: 0; background: var(--paper); padding-right: 8px; }
td small { display: block; color: var(--faint); font-size: 0.82rem; }
.facts th { width: 25%; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def check_result_files(folder: Path) -> None:
    """Check that no file of other origin has the name of a result.

    Raises:
        InputError: one has.
    """
    for name, mark in _MARKS.items():
        if (folder / name).is_file() and mark not in (folder / name).read_text(encoding="utf-8", errors="replace"):
            raise InputError(
                f"{printable(folder / name)} was not written by a comparison and would be replaced: choose another "
                "folder or rename it"
            )


def write_page(document: Document, folder: str | Path) -> Path:
    """Write ``comparison.json``, ``comparison.csv`` and ``index.html`` into a folder; return the path of the page.

    The page is self-contained: it opens offline, without scripts. Files of an earlier comparison are replaced.

    Raises:
        InputError: the document has another format, or one of the names is taken by a file of other origin.
        ValueError: the document holds a number that is not finite.
    """
    if document.get("format") != _FORMAT:
        raise InputError(
            f"the result has the format '{printable(document.get('format'))}', expected '{_FORMAT}': compute it again "
            "with `detr-bf compare report`"
        )
    document = json.loads(json.dumps(document, allow_nan=False))
    folder = Path(folder)
    check_result_files(folder)
    title = document.get("title") or "Comparison"
    page, table = html_page(title, "\n".join(_sections(document, title)), _STYLE), _csv(document)
    write_json(folder / _JSON, document)
    write_text(folder / _CSV, table)
    write_text(folder / _PAGE, page)
    return folder / _PAGE


def markdown_table(document: Document) -> str:
    """Return a Markdown table with one line per arm, aligned for the terminal as well.

    Columns: the primary metric and a second one (AP50 if there is one) x 100 with the confidence interval of the
    mean, the difference from the baseline with its interval over seeds and images, p after Holm's correction,
    verdict, step time relative to the baseline, and the number of runs.
    """
    primary, changes = document["primary"], _changes(document, document["primary"])
    others = [metric for metric in _metrics(document) if metric != primary]
    second = ["AP50"] if "AP50" in others else [metric for metric in others if not metric.startswith(_CLASS)][:1]
    titles = ["Arm", *(f"{metric} x 100" for metric in (primary, *second)), "Difference x 100", "Holm p", "Verdict"]
    lines = [[*titles, "Step time", "Runs"]]
    for arm in document["arms"]:
        change = changes.get(arm["name"], {})
        means = (" ".join(_mean(arm["metrics"].get(metric))).rstrip() for metric in (primary, *second))
        difference = f"{signed(change.get('mean'))} {span_text(change.get('both'))}".rstrip()
        verdict = "baseline" if arm["name"] == document["baseline"] else change.get("verdict") or _NOTHING
        costs = (_ratio(arm, "step_seconds_ratio")[0], str(len(arm["cells"])))
        lines.append([arm["name"], *means, difference, _p(change.get("p_holm")), verdict, *costs])
    table, contrasts = _aligned(lines), _contrasts(document)
    if not contrasts:
        return table
    lines = [["Arms", f"{primary} difference x 100", "Holm p", "Verdict", "Pairs"]]
    for name, change in contrasts.items():
        difference = f"{signed(change['mean'])} {span_text(change.get('both'))}".rstrip()
        verdict = change.get("verdict") or _NOTHING
        lines.append([name, difference, _p(change.get("p_holm")), verdict, str(_runs(change))])
    return f"{table}\n{_aligned(lines)}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, with the first line as its head and columns of equal width; names are escaped."""
    cells = [[re.sub(r"([\\|<>&*`\[\]])", r"\\\1", printable(name)), *others] for name, *others in lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    rows = [
        " | ".join([line[0].ljust(widths[0]), *(x.rjust(n) for x, n in zip(line[1:], widths[1:], strict=True))])
        for line in (cells[0], rule, *cells[1:])
    ]
    return "".join(f"| {row} |\n" for row in rows)


def _csv(document: Document) -> str:
    """Return one row per arm and metric, with unrounded numbers."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for arm in document["arms"]:
        for metric, stat in arm["metrics"].items():
            change = _changes(document, metric).get(arm["name"], {})
            names = (arm["name"], document["baseline"] if change else "", metric)
            table.writerow(_csv_row(names, stat, change))
    for contrast in document.get("contrasts") or ():
        for metric, change in contrast["metrics"].items():
            names = (contrast["arm"], contrast["against"], metric)
            table.writerow(_csv_row(names, None, change))
    return text.getvalue()


def _csv_row(names: Sequence[str], arm: Mapping[str, Any] | None, change: Difference) -> list[Any]:
    """Return the names of arm, other arm and metric, the mean of the arm if there is one, and the difference."""
    runs, own = _runs(change if arm is None else arm), arm or {}
    ends = [(change.get(kind) or {}).get(end) for kind in ("seeds", "images", "both") for end in ("low", "high")]
    numbers = [runs, *(own.get(key) for key in ("mean", "low", "high")), change.get("mean"), *ends]
    return [*(csv_cell(safe_message(name)) for name in names), *numbers, *(change.get(key) for key in _COLUMNS[-5:])]


def _sections(document: Document, title: str) -> Iterator[str]:
    primary, baseline = document["primary"], printable(document["baseline"])
    metrics = _metrics(document)
    classes = [metric for metric in metrics if metric.startswith(_CLASS)]
    others = [metric for metric in metrics if metric not in (primary, *classes)]
    yield _header(document, title)
    yield section(f"Difference in {printable(primary)} from {baseline}", _main_difference(document))
    if contrasts := _contrasts(document):
        plot = _figure(forest_plot(contrasts, primary), _in_words(contrasts), "plot")
        content = plot + _difference_table(contrasts, "Differences between other arms", "Arms")
        yield section(f"Differences in {printable(primary)} between other arms", content)
    yield section(f"{printable(primary)} over training", _curves(document))
    yield section("Arms", _arms_table(document, [primary, *others]))
    if others:
        yield section(f"Differences from {baseline} in other metrics", _small_plots(document, others))
    if classes:
        plots = _small_plots(document, classes[:_CLASS_PLOTS])
        note = f"The plots show the first {_CLASS_PLOTS} of {len(classes)} classes." * (len(classes) > _CLASS_PLOTS)
        yield section("AP by class", f"{_class_table(document, classes)}{_note(note)}{plots}")
    yield section(f"Cost relative to {baseline}", _cost_table(document))
    yield section("Settings that differ", _settings_table(document))
    yield section("How to read this page", _reading(document))
    yield section("Circumstances", _circumstances(document.get("circumstances") or {}))


def _header(document: Document, title: str) -> str:
    arms = document["arms"]
    runs = sum(len(arm["cells"]) for arm in arms)
    sentences = "".join(f"<p>{escaped(sentence)}</p>\n" for sentence in document.get("sentences") or ())
    note = (
        f"{counted(len(arms), 'arm')}, {counted(runs, 'run')}, baseline {printable(document['baseline'])}. Metrics are "
        f"shown x 100, intervals are at {_confidence(document)}. {_JSON} and {_CSV} have all numbers without rounding."
    )
    return f"<header><h1>{escaped(title)}</h1>\n{sentences}{_note(note)}</header>"


def _main_difference(document: Document) -> str:
    changes = _changes(document, document["primary"])
    if not changes:
        return _note("There is no difference to show: no arm was compared with the baseline.")
    words = _description(document, document["primary"], changes)
    plot = _figure(forest_plot(changes, document["primary"]), words, "plot")
    left = [arm["name"] for arm in document["arms"] if arm["name"] not in (document["baseline"], *changes)]
    note = _note(f"Not compared with the baseline: {', '.join(map(printable, left))}." * bool(left))
    return plot + _difference_table(changes, "Differences from the baseline") + note


def _difference_table(changes: Mapping[str, Difference], label: str, names: str = "Arm") -> str:
    """Return a table of differences; keys are the names of the rows, ``names`` is the title of their column."""
    titles = (
        *("Difference", "Over both", "Holm p", "Verdict", "Over seeds", "Over images", "p", "Sign-flip p"),
        *("Detectable", "Pairs"),
    )
    rows = []
    for name, change in changes.items():
        both, seeds, images = (span_text(change.get(kind)) or _NOTHING for kind in ("both", "seeds", "images"))
        verdict, others = change.get("verdict") or _NOTHING, (percent(change.get("detectable")), str(_runs(change)))
        p, p_holm, p_sign_flip = (_p(change.get(name)) for name in ("p", "p_holm", "p_sign_flip"))
        cells = [signed(change["mean"]), both, p_holm, verdict, seeds, images, p, p_sign_flip, *others]
        rows.append((name, cells))
    return _table(label, [names, *titles], rows)


def _curves(document: Document) -> str:
    primary = document["primary"]
    arms = sorted(
        (arm for arm in document["arms"] if any(point["mean"] is not None for point in arm.get("curve") or ())),
        key=lambda arm: arm["name"] != document["baseline"],  # the baseline first, the others in their order
    )
    if not arms:
        return _note("No evaluation during training was recorded.")
    last = [next(point for point in reversed(arm["curve"]) if point["mean"] is not None) for arm in arms]
    ends = [
        f"{printable(arm['name'])}: {' '.join(_mean(point)).rstrip()} at epoch {point['epoch']:g}."
        for arm, point in zip(arms, last, strict=True)
    ]
    words = f"Mean {primary} x 100 over epochs with {_confidence(document)} intervals. " + " ".join(ends)
    content = _figure(overview_plot(arms, primary, len(arms) <= _BANDS), words, "plot")
    bands = f"Bands: {_confidence(document)} intervals of the mean over the runs."
    if not any(point.get("low") is not None for arm in arms for point in arm["curve"]):
        bands = "No bands: intervals need at least two runs of an arm."
    if len(arms) <= _BANDS:
        return content + _note(bands)
    plots = "".join(
        _figure(arm_plot(arms, index, primary), f"{ends[0]} {ends[index]}", caption=arms[index]["name"])
        for index in range(1, len(arms))
    )
    first = printable(arms[0]["name"])
    note = f"Below: each arm with {first}, the black line, after the first third of the training. {bands}"
    return f'{content}{_note(note)}<div class="plots narrow">{plots}</div>'


def _arms_table(document: Document, metrics: Sequence[str]) -> str:
    changes = _changes(document, document["primary"])
    rows: list[tuple[str, list[_Cell]]] = []
    for arm in document["arms"]:
        change = changes.get(arm["name"])
        difference = (signed(change["mean"]), span_text(change.get("both"))) if change else _NOTHING
        values: list[_Cell] = [_mean(arm["metrics"].get(metric)) for metric in metrics]
        rows.append((arm["name"], [str(len(arm["cells"])), values[0], difference, *values[1:]]))
    return _table("Means of the arms", ["Arm", "Runs", metrics[0], "Difference", *metrics[1:]], rows)


def _class_table(document: Document, classes: Sequence[str]) -> str:
    arms = document["arms"]
    rows = [(name[len(_CLASS) :], [_mean(arm["metrics"].get(name)) for arm in arms]) for name in classes]
    return _table("AP by class", ["Class", *(arm["name"] for arm in arms)], rows, "arms")


def _small_plots(document: Document, metrics: Sequence[str]) -> str:
    """Return a plot for each metric and one table of their numbers, which can be opened."""
    plots, rows = [], {}
    for metric in metrics:
        changes = _changes(document, metric)
        if changes:
            shown, words = metric.removeprefix(_CLASS), _description(document, metric, changes)
            svg = forest_plot(changes, "AP" if shown != metric else metric, False)
            plots.append(_figure(svg, words, caption=shown))
            rows.update({f"{shown}, {name}": change for name, change in changes.items()})
    if not plots:
        return _note("There is no difference to show.")
    note = _note("Marks as in the first figure. p is not corrected for the number of metrics.")
    table = _difference_table(rows, "Differences in further metrics", "Metric, arm")
    details = f"<details><summary>Numbers of these plots</summary>{table}</details>"
    return f'{note}<div class="plots">{"".join(plots)}</div>{details}'


def _cost_table(document: Document) -> str:
    rows = [
        (arm["name"], [_ratio(arm, f"{name}_ratio") for name in ("train_seconds", "step_seconds", "memory", "rows")])
        for arm in document["arms"]
    ]
    titles = ["Arm", "Time of training", "Time of a step", "Peak memory", "Rows in the decoder"]
    note = "Ratios to the baseline, of runs with the same seed and fold."
    if any(setting["key"] == "command" for setting in document.get("settings") or ()):
        note += " The time of a command is the processor time of its process, with start and evaluation."
    return _table("Cost", titles, rows) + _note(note)


def _settings_table(document: Document) -> str:
    names = [arm["name"] for arm in document["arms"]]
    settings = document.get("settings") or ()
    if not settings:
        return _note("The configs of the arms do not differ.")
    rows = []
    for setting in settings:
        texts = {name: _setting(value) for name, value in setting["values"].items()}
        rows.append((setting["key"], [texts.get(name, _NOTHING) for name in names]))
    return _table("Settings", ["Setting", *names], rows, "arms")


def _reading(document: Document) -> str:
    risk = 1 - document["confidence"]
    sentences = (
        "The interval over seeds covers other seeds on the same test images, the interval over images covers other "
        "test images with the same trained models, and the interval over both covers the two together.",
        f"Holm p belongs to the interval over both in {printable(document['primary'])}, corrected for the number of "
        f"comparisons: if no arms differed, a value below {risk:.2g} for any of them would occur in at most "
        f"{100 * risk:.3g} % of such experiments.",
        "The smallest detectable difference is the one that this number of runs would probably have shown: "
        "“undecided” means that the arms may still differ by less than that.",
    )
    return "".join(f"<p>{escaped(sentence)}</p>\n" for sentence in sentences)


def _circumstances(circumstances: Mapping[str, Any]) -> str:
    parts = []
    for title, content in (("Versions", circumstances.get("versions")), ("Data", circumstances.get("data"))):
        if content:
            parts.append(f"<h3>{title}</h3>{_facts(content)}")
    machines = circumstances.get("machines") or ()
    for index, machine in enumerate(machines, 1):
        parts.append(f"<h3>Machine{f' {index}' if len(machines) > 1 else ''}</h3>{_facts(machine)}")
    if commands := circumstances.get("commands"):
        parts.append(f'<h3>Commands</h3><pre tabindex="0">{escaped(chr(10).join(commands))}</pre>')
    return "\n".join(parts) or _note("Nothing was recorded.")


def _facts(content: Any) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_name(key)}</th><td>{escaped(value)}</td></tr>\n' for key, value in _flat(content)
    )
    return f'<div class="scroll"><table class="facts"><tbody>\n{rows}</tbody></table></div>'


def _flat(content: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted key and text of every value of nested objects and lists."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(content, Mapping):
        items = content.items()
    elif isinstance(content, list) and any(isinstance(each, (Mapping, list)) for each in content):
        items = enumerate(content, 1)
    else:
        yield path, ", ".join(map(_setting, content)) if isinstance(content, list) else _setting(content)
        return
    for key, value in items:
        yield from _flat(value, f"{path}.{key}" if path else str(key))


_Cell = str | tuple[str, str]  # text, or text with a second, smaller line


def _table(label: str, titles: Sequence[str], rows: Iterable[tuple[str, Sequence[_Cell]]], kind: str = "") -> str:
    """Return a table that scrolls sideways in its own box; a row is its name and its cells."""
    lines = []
    for name, cells in rows:
        pairs = [cell if isinstance(cell, tuple) else (cell, "") for cell in cells]
        content = "".join(f"<td>{escaped(text)}{f'<small>{escaped(x)}</small>' if x else ''}</td>" for text, x in pairs)
        lines.append(f'<tr><th scope="row">{_name(name)}</th>{content}</tr>\n')
    heads = "".join(f'<th scope="col">{_name(title)}</th>' for title in titles)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(label)}"><table class="{kind}">\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody></table></div>"
    )


def _figure(svg: str, description: str, kind: str = "", caption: str = "") -> str:
    source = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode("ascii")
    title = f"<figcaption>{_name(caption)}</figcaption>" if caption else ""
    return f'<figure class="{kind}">{title}<img alt="{escaped(description)}" src="{source}"></figure>'


def _description(document: Document, metric: str, changes: Mapping[str, Difference]) -> str:
    """Return the description of a plot of differences from the baseline."""
    return (
        f"Paired differences in {printable(metric)} x 100 from {printable(document['baseline'])}, with "
        f"{_confidence(document)} intervals over seeds and images. {_in_words(changes)}"
    )


def _in_words(changes: Mapping[str, Difference]) -> str:
    return " ".join(f"{printable(name)}: {change_text(change)}." for name, change in changes.items())


def _metrics(document: Document) -> list[str]:
    """Return the names of all metrics of all arms, the primary first."""
    names = dict.fromkeys(metric for arm in document["arms"] for metric in arm["metrics"])
    return list({document["primary"]: None, **names})


def _changes(document: Document, metric: str) -> dict[str, Difference]:
    """Return arm -> difference from the baseline in one metric, without arms that have none."""
    return _known({pair["arm"]: pair["metrics"].get(metric) for pair in document["differences"]})


def _contrasts(document: Document) -> dict[str, Difference]:
    """Return "arm - other" -> difference in the primary metric for the pairs of arms without the baseline."""
    primary, pairs = document["primary"], document.get("contrasts") or ()
    return _known({f"{pair['arm']} - {pair['against']}": pair["metrics"].get(primary) for pair in pairs})


def _known(changes: Mapping[str, Difference | None]) -> dict[str, Difference]:
    return {name: change for name, change in changes.items() if change and change.get("mean") is not None}


def _runs(stat: Mapping[str, Any]) -> int:
    return sum(value is not None for value in stat.get("values") or ())


def _mean(stat: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return mean and interval x 100, for example ``("44.1", "[42.0, 46.2]")``."""
    stat = stat or {}
    ends = [stat.get("low"), stat.get("high")]
    return percent(stat.get("mean")), f"[{', '.join(map(percent, ends))}]" if None not in ends else ""


def _ratio(arm: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return a ratio of the cost with its interval, if it has one."""
    value = (arm.get("cost") or {}).get(name)
    stat = value if isinstance(value, Mapping) else {"mean": value}
    ends = [stat.get("low"), stat.get("high")]
    interval = f"[{', '.join(number(end, 2) for end in ends)}]" if None not in ends else ""
    return number(stat.get("mean"), 2), interval


def _p(value: float | None) -> str:
    return _NOTHING if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def _confidence(document: Document) -> str:
    return f"{100 * document['confidence']:g} %"


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _name(text: object) -> str:
    """Return a name from outside, which may be broken after each of its separators."""
    return re.sub(r"(?<=[_./])", "<wbr>", escaped(printable(text)))


def _note(text: str) -> str:
    return f'<p class="faint">{escaped(text)}</p>' if text else ""
