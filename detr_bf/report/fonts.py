"""Text from outside made drawable: one line, letters that a font of this machine has, no mathematical notation.

DejaVu Sans, which comes with matplotlib, draws Latin, Greek, Cyrillic and more. For other scripts a font of the machine
is looked for. Where there is none, the category id stands for the name of a class.
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

from detr_bf.structures import ClassMap
from detr_bf.text import printable

logger = logging.getLogger(__name__)

_FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
_REGULAR, _BOLD = (str(_FONTS / name) for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf"))
_ALWAYS = frozenset(string.ascii_letters + string.digits + string.punctuation + " …")  # what is drawn beside a name
_PLACEHOLDERS = ("Last Resort",)  # fonts that draw a box for every letter


def class_labels(class_map: ClassMap) -> tuple[str, ...]:
    """Return what is drawn for each class: its name, or ``#`` and its category id where no font has all its letters.

    The latter is logged.
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
            "no font of this machine has all letters of some class names, so pictures show their ids: %s. A font for "
            "them, such as Noto Sans CJK, brings the names back",
            ", ".join(lacking),
        )
    return labels


def legible(text: object, spare: str | None = None, limit: int = 200) -> str:
    """Return ``text`` as one line of at most ``limit`` letters that can be drawn.

    A name that no font of this machine can draw, or that is blank, becomes ``spare``. Without ``spare`` its missing
    letters become escapes such as ``\\u732b``.
    """
    shown = printable(text, limit)
    if spare is not None and not shown.strip():
        return spare
    if _font_of(shown) is not None:
        return shown
    if spare is not None:
        return spare
    return "".join(x if x in _letters(_REGULAR) else x.encode("unicode_escape").decode("ascii") for x in shown)


def plain(text: object, spare: str | None = None, limit: int = 60) -> str:
    r"""Return :func:`legible` text for matplotlib: it does not read ``\$`` as mathematics nor hide a leading ``_``.

    At most ``limit`` letters, for matplotlib does not cut text and a longer one leaves no room for the plot.
    """
    shown = legible(text, spare, limit).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def add_fallback_fonts(figure: Figure) -> None:
    """Give every text of a figure the fonts that its letters need."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        content = text.get_text()
        missing = set(content) - _letters(_REGULAR) - {"\n"}
        if not missing:
            continue
        found = [_entry_with(frozenset(missing)) or _entry_with(frozenset(letter)) for letter in sorted(missing)]
        text.set_fontfamily(["DejaVu Sans", *dict.fromkeys(entry.name for entry in found if entry is not None)])


def load_font(size: int, bold: bool = False, text: str = "") -> ImageFont.FreeTypeFont:
    """Return a font of ``size`` pixels for ``text``, which :func:`legible` has returned; DejaVu Sans if it can."""
    path = _font_of(text) or _REGULAR
    return _loaded(_BOLD if bold and path == _REGULAR else path, size)


def shorten(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """``text``, cut and ended with an ellipsis where it is wider than ``width`` pixels."""
    most = min(len(text), max(1, int(width)))  # letters: each is a pixel wide or wider
    if most == len(text) and font.getlength(text) <= width:
        return text
    fitting = bisect.bisect_right(range(most), width, key=lambda count: font.getlength(text[:count] + "…"))
    return text[: max(0, fitting - 1)].rstrip() + "…"


@functools.cache
def _loaded(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


def _font_of(text: str) -> str | None:
    """The file of a font with all letters of ``text`` and those drawn beside it; None if there is none."""
    letters = frozenset(text)
    if letters <= _letters(_REGULAR):
        return _REGULAR
    entry = _entry_with(letters | _ALWAYS)
    return None if entry is None else entry.fname


@functools.cache
def _entry_with(letters: frozenset[str]) -> FontEntry | None:
    """The first font of this machine with all of these letters: upright, regular, without serifs if possible."""

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
    """All letters that the font in a file has; none if it cannot be read."""
    try:
        return frozenset(map(chr, FT2Font(path).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()
