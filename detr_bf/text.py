"""Text from outside (names, keys, messages of libraries) made safe for a terminal, a log, a table or a CSV file."""

from __future__ import annotations

import unicodedata

_LONGEST = 200  # characters of a name that are shown
_JOINERS = "\u200c\u200d\u00ad"  # zero-width non-joiner and joiner, soft hyphen
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # a spreadsheet runs a cell that begins with one of these


def printable(text: object, limit: int = _LONGEST) -> str:
    """Return ``str(text)`` as one line without control characters, at most ``limit`` characters long.

    Control characters, line breaks, format characters that reorder text and lone surrogates become backslash escapes
    such as ``\\n``, ``\\x1b`` and ``\\u202e``; joiners, which some scripts and emoji need, stay. Longer text loses its
    middle to an ellipsis, so that of a path the file's name stays.
    """
    whole = str(text)
    if len(whole) > limit:  # escapes only lengthen it
        whole = f"{whole[:limit]}{whole[-limit:]}"
    shown = "".join(map(_escaped, whole))
    if len(shown) <= limit:
        return shown
    half = limit // 2
    return f"{shown[: limit - half - 1]}…{shown[len(shown) - half :]}"


def safe_message(text: object) -> str:
    """Return ``str(text)`` escaped as by :func:`printable`, but with its line breaks and of any length."""
    return "".join(letter if letter == "\n" else _escaped(letter) for letter in str(text))


def csv_cell(text: str) -> str:
    """Return ``text`` for a CSV file; an apostrophe before it stops spreadsheets from running it as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _escaped(letter: str) -> str:
    # Cc control, Cf format, Cs surrogate, Zl and Zp line and paragraph separators
    if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") and letter not in _JOINERS:
        return letter.encode("unicode_escape").decode("ascii")
    return letter
