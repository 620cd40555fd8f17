"""Drawable text from any input: one line, letters that an installed font has, no mathematical notation.

DejaVu Sans, part of matplotlib, has Latin, Greek, Cyrillic and other letters. For other scripts the installed fonts are
searched. If none has all letters of a class name, the category id is drawn instead.
"""

from __future__ import annotations

import bisect
import functools
import logging
import string
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontEntry, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from PIL import ImageFont

from detr_bf.common.structures import ClassMap
from detr_bf.common.text import printable

logger = logging.getLogger(__name__)

_FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
_REGULAR, _BOLD = (str(_FONTS / name) for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf"))
_ALWAYS = frozenset(string.ascii_letters + string.digits + string.punctuation + " …")  # drawn beside names
_PLACEHOLDERS = ("Last Resort",)  # fonts that draw boxes instead of letters


def class_labels(class_map: ClassMap) -> tuple[str, ...]:
    """Return the label of each class: its name, or ``#`` and its category id if no font has all its letters.

    The latter is logged as a warning.
    """
    labels = tuple(
        legible(name, f"#{category_id}")
        for name, category_id in zip(class_map.distinct_names, class_map.category_ids, strict=True)
    )
    lacking = [
        f"{label} ({printable(name)})"
        for name, label in zip(class_map.distinct_names, labels, strict=True)
        if label != printable(name)
    ]
    if lacking:
        logger.warning(
            "no installed font has all letters of some class names, so pictures show their ids: %s. Install a font "
            "for them, for example Noto Sans CJK",
            ", ".join(lacking),
        )
    return labels


def legible(text: object, fallback: str | None = None, limit: int = 200) -> str:
    """Return ``text`` as one drawable line of at most ``limit`` letters.

    Blank text, and text that no installed font can draw, becomes ``fallback``. Without ``fallback``, missing letters
    become escapes such as ``\\u732b``.
    """
    shown = printable(text, limit)
    if fallback is not None and not shown.strip():
        return fallback
    if _font_of(shown) is not None:
        return shown
    if fallback is not None:
        return fallback
    return "".join(x if x in _letters(_REGULAR) else x.encode("unicode_escape").decode("ascii") for x in shown)


def plain(text: object, fallback: str | None = None, limit: int = 60) -> str:
    r"""Return :func:`legible` text for matplotlib: ``$`` starts no mathematics, a leading ``_`` is not hidden.

    At most ``limit`` letters, because matplotlib does not shorten text that is too long for the figure.
    """
    shown = legible(text, fallback, limit).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def add_fallback_fonts(figure: Figure) -> None:
    """Set, for every text of a figure, fonts that have all its letters."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        content = text.get_text()
        missing = set(content) - _letters(_REGULAR) - {"\n"}
        if not missing:
            continue
        found = [_entry_with(frozenset(missing)) or _entry_with(frozenset(letter)) for letter in sorted(missing)]
        text.set_fontfamily(["DejaVu Sans", *dict.fromkeys(entry.name for entry in found if entry is not None)])


def load_font(size: int, bold: bool = False, text: str = "") -> ImageFont.FreeTypeFont:
    """Return a font of ``size`` pixels for ``text`` from :func:`legible`; DejaVu Sans if it has all letters."""
    path = _font_of(text) or _REGULAR
    return _loaded(_BOLD if bold and path == _REGULAR else path, size)


def shorten(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """Return ``text``, shortened with an ellipsis to at most ``width`` pixels."""
    most = min(len(text), max(1, int(width)))  # letters, each at least one pixel wide
    if most == len(text) and font.getlength(text) <= width:
        return text
    fitting = bisect.bisect_right(range(most), width, key=lambda count: font.getlength(text[:count] + "…"))
    return text[: max(0, fitting - 1)].rstrip() + "…"


@functools.cache
def _loaded(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


def _font_of(text: str) -> str | None:
    """Return the file of a font with all letters of ``text`` and of text drawn beside it, or None."""
    letters = frozenset(text)
    if letters <= _letters(_REGULAR):
        return _REGULAR
    entry = _entry_with(letters | _ALWAYS)
    return None if entry is None else entry.fname


@functools.cache
def _entry_with(letters: frozenset[str]) -> FontEntry | None:
    """Return the first installed font with all of these letters: upright, regular, sans-serif if possible."""

    def preference(entry: FontEntry) -> tuple[bool, bool, bool, str]:
        return (
            entry.style != "normal",
            entry.weight not in (400, "normal", "regular"),
            "Sans" not in entry.name,
            entry.name,
        )

    usable = (
        entry
        for entry in sorted(fontManager.ttflist, key=preference)
        if not entry.name.startswith(_PLACEHOLDERS) and not getattr(entry, "index", 0)
    )
    return next((entry for entry in usable if letters <= _letters(entry.fname)), None)


@functools.cache
def _letters(path: str) -> frozenset[str]:
    """Return all letters of a font file; none if it cannot be read."""
    try:
        return frozenset(map(chr, FT2Font(path).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()
