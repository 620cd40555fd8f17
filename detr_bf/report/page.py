"""Building blocks of HTML reports: the page itself, the parts that depend on the task, and small pieces of HTML.

:func:`escaped` is applied to all text here; arguments called ``content`` are HTML already.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from detr_bf.files import SHEET_FILE
from detr_bf.report.curves import CurvePlan
from detr_bf.report.drawing import tolerating
from detr_bf.text import printable, safe_message

_MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".svg": "image/svg+xml"}
_NO_VALUE = "—"
_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1e22; --faint: #666d76; --line: #e2e5e9; --panel: #f6f7f9;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171a; --ink: #e7e9ec; --faint: #9aa1ab; --line: #2c3036; --panel: #1e2125; --accent: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 96px; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 16px; padding-top: 20px; border-top: 1px solid var(--line); }
section { margin-top: 44px; }
p { margin: 12px 0 0; }
.lead { font-size: 1.05rem; color: var(--faint); max-width: 75ch; }
.faint { color: var(--faint); font-size: 0.92rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 12px; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px;
  display: flex; flex-direction: column; }
.card span, .card small { color: var(--faint); font-size: 0.86rem; }
.card strong { font-size: 1.4rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.large .card strong { font-size: 2.4rem; line-height: 1.2; }
.large .card:first-child strong { color: var(--accent); }
figure { margin: 0; background: #ffffff; border: 1px solid var(--line); border-radius: 10px; padding: 12px; }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--faint); font-weight: 500; font-size: 0.86rem; }
tbody th { font-weight: 500; }
.bar { width: 45%; }
.bar i { display: block; height: 8px; border-radius: 4px; background: var(--accent); }
.facts th { width: 1%; color: var(--faint); vertical-align: top; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
summary { cursor: pointer; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 16px; overflow-x: auto;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media (max-width: 480px) {
  main { padding: 28px 16px 64px; }
  h1 { font-size: 1.6rem; }
  section { margin-top: 32px; }
  figure { padding: 6px; }
  .bar { display: none; }
  tbody th { white-space: normal; min-width: 7rem; }
}
@media print { main { padding: 0; } section { break-inside: avoid; } }
"""

Card = tuple[str, str, str]  # name, value, note


@dataclass(frozen=True)
class TaskPage:
    """The parts of ``report.html`` that depend on the task; config and result have the task's types."""

    task: str  # as in the config
    curves: CurvePlan
    curves_description: str
    read_result: Callable[[Mapping[str, Any]], Any]  # inverse of the result's to_dict
    sentences: Callable[[Any], list[str]]  # config -> summary of what was trained
    results: Callable[[Any], Iterable[str]]  # result or None -> sections above the curves
    details: Callable[[Path, Any], Iterable[str]]  # run folder, result or None -> sections below the curves


def html_page(title: str, body: str, style: str = "") -> str:
    """Return a self-contained page: styles are inline, no script runs, nothing is loaded.

    Args:
        title: text of the browser's title bar.
        body: HTML.
        style: CSS rules in addition to the common ones.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="generator" content="detr_bf">\n'
        f"<title>{escaped(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def escaped(text: object) -> str:
    """Return text as HTML without markup and without control characters."""
    return escape(safe_message(text))


def section(title: str, content: str) -> str:
    """Return a titled part of the page."""
    return f"<section><h2>{escaped(title)}</h2>\n{content}</section>"


def missing(file_name: str, content_name: str) -> str:
    """Return the sentence shown instead of a file that the run folder lacks."""
    return f'<p class="faint">This run has no {escaped(content_name)}: {escaped(file_name)} is missing or empty.</p>'


def headline(large: Sequence[Card], small: Sequence[Card], note: str) -> str:
    """Return the main numbers in large cards, others in small cards, and a note that defines them."""
    further = f'<div class="cards">{_cards(small)}</div>\n' if small else ""
    return f'<div class="cards large">{_cards(large)}</div>\n{further}<p class="faint">{escaped(note)}</p>'


def table(titles: Sequence[str], rows: Iterable[str]) -> str:
    """Return rows made by :func:`row` under column titles; the column of bars has no title."""
    first, *others = (f'<th scope="col">{escaped(title)}</th>' for title in titles)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{first}<th class="bar"></th>{"".join(others)}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody></table></div>"
    )


def row(name: str, share: float | None, values: Iterable[str], kind: str = "") -> str:
    """Return a table row: name, faint ``kind``, a bar of length ``share`` (0 to 1), and values."""
    note = f' <span class="faint">{escaped(kind)}</span>' if kind else ""
    cells = "".join(f"<td>{escaped(value)}</td>" for value in values)
    return (
        f'<tr><th scope="row">{escaped(printable(name))}{note}</th>'
        f'<td class="bar"><i style="width:{100 * (share or 0):.1f}%"></i></td>{cells}</tr>\n'
    )


def picture(path: Path, description: str, draw: Callable[[Path], None] | None = None) -> str:
    """Return a PNG, JPEG or SVG file as embedded image, after ``draw(path)`` has written it.

    If that fails, the error is logged and a sentence that says so is returned.
    """
    with tolerating(str(path)):
        if draw is not None:
            draw(path)
        content = base64.b64encode(path.read_bytes()).decode("ascii")
        source = f"data:{_MEDIA_TYPES[path.suffix]};base64,{content}"
        return f'<figure><img alt="{escaped(description)}" src="{source}"></figure>'
    return f'<p class="faint">{escaped(path.name)} was not drawn: log.txt has the reason.</p>'


def validation_sheet(path: Path, description: str) -> str:
    """Return the picture of validation images, or a sentence if the run has none."""
    return picture(path, description) if path.is_file() else missing(SHEET_FILE, "validation pictures")


def percent(value: float | None) -> str:
    """Return a fraction in percent with one decimal; a dash for None."""
    return _NO_VALUE if value is None else f"{100 * value:.1f}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` decimals; a dash for None."""
    return _NO_VALUE if value is None else f"{value:.{digits}f}"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return for example ``2 images``; the default plural is the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _cards(cards: Iterable[Card]) -> str:
    return "".join(
        f'<div class="card"><span>{escaped(name)}</span><strong>{escaped(value)}</strong>'
        f"<small>{escaped(note)}</small></div>"
        for name, value, note in cards
    )
