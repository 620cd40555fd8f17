"""The pieces of HTML that every page is made of; all text given to them is escaped here by :func:`shown`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from detr_bf.files import SHEET_FILE
from detr_bf.report.drawing import tolerating
from detr_bf.text import printable, safe_message

_MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
_NO_VALUE = "—"

Card = tuple[str, str, str]  # name, value, note


def shown(text: object) -> str:
    """Return text as HTML, without effect as markup or control characters."""
    return escape(safe_message(text))


def section(title: str, content: str) -> str:
    """A part of the page under its title; ``content`` is HTML."""
    return f"<section><h2>{shown(title)}</h2>\n{content}</section>"


def missing(file_name: str, what: str) -> str:
    """The sentence that stands in for what the run folder does not hold."""
    return f'<p class="faint">This run has no {shown(what)}: {shown(file_name)} is missing or empty.</p>'


def headline(large: Sequence[Card], small: Sequence[Card], note: str) -> str:
    """The numbers that count in large cards, further ones in small cards, and a sentence that says what they are."""
    further = f'<div class="cards">{_cards(small)}</div>\n' if small else ""
    return f'<div class="cards large">{_cards(large)}</div>\n{further}<p class="faint">{shown(note)}</p>'


def table(titles: Sequence[str], rows: Iterable[str]) -> str:
    """Rows of :func:`row` under the titles of their names and numbers."""
    first, *others = (f'<th scope="col">{shown(title)}</th>' for title in titles)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{first}<th></th>{"".join(others)}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody></table></div>"
    )


def row(name: str, share: float | None, values: Iterable[str], kind: str = "") -> str:
    """A line of a table: a name and of which kind it is, a bar as long as ``share`` (0 to 1) says, and values."""
    note = f' <span class="faint">{shown(kind)}</span>' if kind else ""
    cells = "".join(f"<td>{shown(value)}</td>" for value in values)
    return (
        f'<tr><th scope="row">{shown(printable(name))}{note}</th>'
        f'<td class="bar"><i style="width:{100 * (share or 0):.1f}%"></i></td>{cells}</tr>\n'
    )


def picture(path: Path, description: str) -> str:
    """A PNG or SVG file, embedded."""
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    source = f"data:{_MEDIA_TYPES[path.suffix]};base64,{content}"
    return f'<figure><img alt="{shown(description)}" src="{source}"></figure>'


def drawn(path: Path, description: str, draw: Callable[[Path], None]) -> str:
    """Return the picture that ``draw`` writes to ``path``, or a sentence where that fails, which is logged."""
    with tolerating(str(path)):
        draw(path)
        return picture(path, description)
    return f'<p class="faint">{shown(path.name)} was not drawn: log.txt has the reason.</p>'


def sheet(path: Path, description: str) -> str:
    """Return the picture of validation images, if the run has one."""
    return drawn(path, description, _nothing) if path.is_file() else missing(SHEET_FILE, "validation pictures")


def _nothing(path: Path) -> None:
    """Take a picture as it is in its file."""


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
        f'<div class="card"><span>{shown(name)}</span><strong>{shown(value)}</strong><small>{shown(note)}</small></div>'
        for name, value, note in cards
    )
