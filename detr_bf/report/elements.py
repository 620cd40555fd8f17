"""The pieces of HTML that every page is made of; all text given to them is escaped here."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.json"
CURVES_FILE = "pictures/curves.svg"
SHEET_FILE = "pictures/validation.png"
_MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
_NO_VALUE = "—"

Card = tuple[str, str, str]  # name, value, note


def section(title: str, content: str) -> str:
    """A part of the page under its title; ``content`` is HTML."""
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>"


def missing(file_name: str, what: str) -> str:
    """The sentence that stands in for what the run folder does not hold."""
    return f'<p class="faint">This run has no {escape(what)}: {escape(file_name)} is missing or empty.</p>'


def headline(large: Sequence[Card], small: Sequence[Card], note: str) -> str:
    """The numbers that count in large cards, further ones in small cards, and a sentence that says what they are."""
    further = f'<div class="cards">{_cards(small)}</div>\n' if small else ""
    return f'<div class="cards large">{_cards(large)}</div>\n{further}<p class="faint">{escape(note)}</p>'


def table(titles: Sequence[str], rows: Iterable[str]) -> str:
    """Rows of :func:`row` under the titles of their names and numbers."""
    first, *others = (f'<th scope="col">{escape(title)}</th>' for title in titles)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{first}<th></th>{"".join(others)}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody></table></div>"
    )


def row(name: str, share: float | None, values: Iterable[str], kind: str = "") -> str:
    """A line of a table: a name and of which kind it is, a bar as long as ``share`` (0 to 1) says, and values."""
    note = f' <span class="faint">{escape(kind)}</span>' if kind else ""
    cells = "".join(f"<td>{escape(value)}</td>" for value in values)
    return (
        f'<tr><th scope="row">{escape(name)}{note}</th>'
        f'<td class="bar"><i style="width:{100 * (share or 0):.1f}%"></i></td>{cells}</tr>\n'
    )


def picture(path: Path, description: str) -> str:
    """A PNG or SVG file, embedded."""
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    source = f"data:{_MEDIA_TYPES[path.suffix]};base64,{content}"
    return f'<figure><img alt="{escape(description)}" src="{source}"></figure>'


def sheet(path: Path, description: str) -> str:
    """The picture of validation images, if the run has one."""
    return picture(path, description) if path.is_file() else missing(SHEET_FILE, "validation pictures")


def percent(value: float | None) -> str:
    """A fraction in percent; a dash where there is nothing to measure."""
    return _NO_VALUE if value is None else f"{100 * value:.1f}"


def number(value: float | None, digits: int = 3) -> str:
    """With ``digits`` behind the point; a dash where there is nothing to measure."""
    return _NO_VALUE if value is None else f"{value:.{digits}f}"


def count(number: int, noun: str, plural: str = "") -> str:
    """``2 images``; the plural is that of the noun with an s if empty."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _cards(cards: Iterable[Card]) -> str:
    return "".join(
        f'<div class="card"><span>{escape(name)}</span><strong>{escape(value)}</strong>'
        f"<small>{escape(note)}</small></div>"
        for name, value, note in cards
    )
