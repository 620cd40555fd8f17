"""Escaping and shortening of text from outside (names, keys, library messages) for terminals, logs and CSV files."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from itertools import islice

_LONGEST = 200  # characters
_JOINERS = "\u200c\u200d\u00ad"  # zero-width non-joiner and joiner, soft hyphen
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # a spreadsheet executes a cell that begins with one of these


def printable(text: object, limit: int = _LONGEST) -> str:
    """Return ``str(text)`` as one line without control characters, at most ``limit`` characters long.

    Control characters, line breaks, format characters that reorder text and lone surrogates become backslash escapes
    such as ``\\n``, ``\\x1b`` and ``\\u202e``; joiners, which some scripts and emoji need, stay. In longer text an
    ellipsis replaces the middle, so a path keeps its file name.
    """
    whole = str(text)
    if len(whole) > limit:  # escapes only lengthen it
        whole = f"{whole[:limit]}{whole[-limit:]}"
    shown = "".join(map(_escaped, whole))
    if len(shown) <= limit:
        return shown
    half = limit // 2
    return f"{shown[: limit - half - 1]}…{shown[len(shown) - half :]}"


def listed(items: Iterable[object], limit: int = 8, *, total: int | None = None, separator: str = ", ") -> str:
    """Return the first ``limit`` items as printable text, followed by the number of the others.

    ``total`` is the number of items; if given, only the first ones are taken from ``items``.
    """
    if total is None:
        items = list(items)
        total = len(items)
    few = [printable(item) for item in islice(items, limit)]
    more = f" and {total - len(few)} more" if total > len(few) else ""
    return separator.join(few) + more


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return for example ``2 images``; the default plural is the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def safe_message(text: object) -> str:
    """Return ``str(text)`` escaped as in :func:`printable`, with its line breaks and in full length."""
    return "".join(letter if letter == "\n" else _escaped(letter) for letter in str(text))


def csv_cell(text: str) -> str:
    """Return ``text`` for a CSV file, with an apostrophe before text that a spreadsheet would execute as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _escaped(letter: str) -> str:
    # Cc control, Cf format, Cs surrogate, Zl and Zp line and paragraph separators
    if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") and letter not in _JOINERS:
        return letter.encode("unicode_escape").decode("ascii")
    return letter


def duration(seconds: float) -> str:
    """Return a time to its two largest units, such as ``1 h 20 min``."""
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    hours, rest = divmod(round(minutes), 60)
    days, rest_hours = divmod(hours, 24)
    if days:
        return f"{days} d {rest_hours} h"
    return f"{hours} h {rest} min" if hours else f"{rest} min"
