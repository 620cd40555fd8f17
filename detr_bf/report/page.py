"""Building blocks of HTML reports: the page itself, the parts that depend on the task, and small pieces of HTML.

:func:`escaped` is applied to all text here; arguments called ``content`` are HTML already.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

from PIL import Image

from detr_bf.common.errors import InputError
from detr_bf.common.files import SHEET_FILE
from detr_bf.common.text import printable, safe_message
from detr_bf.data.images import open_image
from detr_bf.report.drawing import tolerating

_MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".svg": "image/svg+xml"}
_NO_VALUE = "—"
_STYLE, SCRIPT = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
_MOST_JPEG_SIDE = 65_500  # pixels
PICTURE_BYTES = 700_000  # of an embedded picture; a report has at most eight, and is to stay below 8 MB

Card = tuple[str, str, str]  # name, value, note


def html_page(title: str, body: str, style: str = "", generator: str = "detr_bf") -> str:
    """Return a self-contained page: its content security policy forbids every request, and all other scripts.

    The sections of the body are linked from a bar at the top of the page.

    Args:
        title: text of the browser's title bar.
        body: HTML, with sections made by :func:`section`, and without style attributes.
        style: CSS rules in addition to the common ones.
        generator: name of what writes the page, by which it knows its own pages.
    """
    style = _STYLE + style
    policy = f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(SCRIPT)}"
    headings = re.findall(r'<section id="([^"]+)"><h2>([^<]*)</h2>', body)
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading in headings)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="{escaped(generator)}">\n'
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + (f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n' if len(headings) > 1 else "")
        + f"{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _digest(text: str) -> str:
    """Return the source of a content security policy that allows exactly this inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def escaped(text: object) -> str:
    """Return text as HTML without markup and without control characters."""
    return escape(safe_message(text))


def section(title: str, content: str) -> str:
    """Return a titled part of the page; its id is made of the letters and digits of the title."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
    return f'<section id="{name}"><h2>{escaped(title)}</h2>\n{content}</section>'


def missing(file_name: str, content_name: str) -> str:
    """Return the sentence shown instead of a file that the run folder lacks."""
    return f'<p class="faint">This run has no {escaped(content_name)}: {escaped(file_name)} is missing or empty.</p>'


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors about the content of a run's file into an :class:`InputError` that says to evaluate again."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{printable(path)} is damaged ({printable(error)}): evaluate the run again") from error


def headline(large: Sequence[Card], small: Sequence[Card], note: str) -> str:
    """Return the main numbers in large cards, others in small cards, and a note that defines them."""
    further = f'<div class="cards">{_cards(small)}</div>\n' if small else ""
    return f'<div class="cards large">{_cards(large)}</div>\n{further}<p class="faint">{escaped(note)}</p>'


def table(titles: Sequence[str], rows: Iterable[str]) -> str:
    """Return rows made by :func:`row` under column titles; the column of bars has no title."""
    first, *others = (f'<th scope="col">{escaped(title)}</th>' for title in titles)
    return (
        f'{_scroll(titles[0])}<table>\n<thead><tr>{first}<th class="bar"></th>{"".join(others)}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody></table></div>"
    )


def _scroll(name: str) -> str:
    """Return the start of a box around a table, which scrolls sideways, also by keyboard."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(name)}">'


def row(name: str, share: float | None, values: Iterable[str], kind: str = "") -> str:
    """Return a table row: name, faint ``kind``, a bar of length ``share`` (0 to 1), and values."""
    note = f' <span class="faint">{escaped(kind)}</span>' if kind else ""
    cells = "".join(f"<td>{escaped(value)}</td>" for value in values)
    return (
        f'<tr><th scope="row">{escaped(printable(name))}{note}</th>'
        f'<td class="bar"><svg width="{100 * (share or 0):.1f}%" height="8" aria-hidden="true">'
        f'<rect width="100%" height="8" rx="4"/></svg></td>{cells}</tr>\n'
    )


def value_table(title: str, columns: Iterable[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table of texts, one for each row and column; empty without rows."""
    if not rows:
        return ""
    heads = "".join(f'<th scope="col">{escaped(printable(name))}</th>' for name in (title, *columns))
    lines = "".join(
        f'<tr><th scope="row">{escaped(printable(name))}</th>{"".join(f"<td>{escaped(x)}</td>" for x in values)}</tr>\n'
        for name, values in rows.items()
    )
    return f"{_scroll(title)}<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{lines}</tbody></table></div>"


def picture(
    path: Path, description: str, draw: Callable[[Path], None] | None = None, limit: int = PICTURE_BYTES
) -> str:
    """Return a PNG, JPEG or SVG file as embedded image, after ``draw(path)`` has written it.

    A PNG or JPEG file of more than ``limit`` bytes is embedded as a JPEG, smaller if need be, and a sentence says so.
    If reading or drawing fails, the error is logged and a sentence that says so is returned.
    """
    with tolerating(str(path)):
        if draw is not None:
            draw(path)
        content, media_type, note = path.read_bytes(), _MEDIA_TYPES[path.suffix], ""
        if path.suffix != ".svg" and len(content) > limit:
            content, scale = _compressed(path, limit)
            media_type = "image/jpeg"
            if scale < 1:
                note = f'<p class="faint">Shown at {scale:.0%} of the size of {escaped(path.name)}.</p>'
        source = f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"
        return f'<figure><img alt="{escaped(description)}" src="{source}"></figure>{note}'
    return f'<p class="faint">{escaped(path.name)} was not drawn: log.txt has the reason.</p>'


def _compressed(path: Path, limit: int) -> tuple[bytes, float]:
    """Return a picture as JPEG of at most ``limit`` bytes, and its scale."""
    whole = open_image(path.read_bytes(), max_pixels=2**31).convert("RGB")  # the run has drawn it: any size
    scale = min(1.0, _MOST_JPEG_SIDE / max(whole.size))
    while True:
        size = max(1, round(scale * whole.width)), max(1, round(scale * whole.height))
        stream = io.BytesIO()
        (whole if scale == 1 else whole.resize(size, Image.Resampling.LANCZOS)).save(stream, "JPEG", quality=82)
        if stream.tell() <= limit or max(size) == 1:
            return stream.getvalue(), scale
        scale *= 0.95 * math.sqrt(limit / stream.tell())


def validation_sheet(path: Path, description: str) -> str:
    """Return the picture of validation images, or a sentence if the run has none."""
    return picture(path, description) if path.is_file() else missing(SHEET_FILE, "validation pictures")


def percent(value: float | None) -> str:
    """Return a fraction in percent with one decimal; a dash for None."""
    return _NO_VALUE if value is None else f"{100 * value:.1f}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` decimals; a dash for None."""
    return _NO_VALUE if value is None else f"{value:.{digits}f}"


def _cards(cards: Iterable[Card]) -> str:
    return "".join(
        f'<div class="card"><span>{escaped(name)}</span><strong>{escaped(value)}</strong>'
        f"<small>{escaped(note)}</small></div>"
        for name, value, note in cards
    )
