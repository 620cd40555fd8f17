"""Reader of large COCO files: decodes the lists of images and annotations in pieces, into columns.

It accepts a subset of what json accepts, with equal values. Anything else is an :class:`UnsupportedError`, after which
the file is read with json, for its result or its message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import astuple

from detr_bf.acceleration.allocator import without_garbage_collection
from detr_bf.common.progress import progress_bar
from detr_bf.data.columns import INT, TEXT, BoxBuilder, BoxColumn, Column, ColumnBuilder, ColumnStore, UnsupportedError

PIECE_BYTES = 2**18  # of a list that are decoded together; objects of larger pieces do not fit a processor's cache
_LONGEST_VALUE = 2**28  # bytes of one entry, or of a value that is not read
_MOST_KEYS = 64
_TAIL = 2**13  # bytes of a piece in which the end of an entry is searched
_LISTS = ("images", "annotations")
_SPACE = b" \t\n\r"
_Number = int | float
_Box = tuple[_Number, _Number, _Number, _Number]
# exactly the values that every entry needs
_REQUIRED = {
    "images": {"id": INT, "file_name": TEXT},
    "annotations": {"image_id": INT, "category_id": INT},
}


def decode_columns(path: Path) -> ColumnStore:
    """Read the lists of a COCO detection file.

    Raises:
        UnsupportedError: the file has a form that only json reads, or an error.
        OSError: it cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        before = os.fstat(handle)
        name = f"reading {path.name}"
        bar = progress_bar(total=before.st_size, unit="B", unit_scale=True, desc=name, leave=False)
        with bar, without_garbage_collection():
            store = _Document(handle, bar.update).read()
        after = os.fstat(handle)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise UnsupportedError("changed while it was read")
        return store
    except (RecursionError, MemoryError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise UnsupportedError(str(error) or type(error).__name__) from error
    finally:
        os.close(handle)


class _Document:
    """Object of a JSON file, read from front to back through one handle."""

    def __init__(self, handle: int, progress: Callable[[int], object]) -> None:
        self._handle, self._progress = handle, progress
        self._scan = json.JSONDecoder().raw_decode

    def read(self) -> ColumnStore:
        columns: dict[str, dict[str, Column | BoxColumn]] = {}
        lengths: dict[str, int] = {}
        categories, seen = "", set[str]()
        position = self._after(0, b"{")
        while True:
            position, raw = self._value(position)
            key = json.loads(raw)
            if not isinstance(key, str) or key in seen:
                raise UnsupportedError("a key of the file that is given twice, or no key")
            seen.add(key)
            position = self._after(position, b":")
            if key in _LISTS:
                entries = _EntryList(key)
                position = self._list(self._after(position, b"["), entries)
                columns[key], lengths[key] = entries.finish()
            else:
                position, raw = self._value(position)
                categories = raw.decode() if key == "categories" else categories
            position, found = self._next(position)
            if found == b"}":
                break
            if found != b",":
                raise UnsupportedError("no JSON")
        if self._next(position)[1] or not categories or len(columns) < len(_LISTS):
            raise UnsupportedError("no COCO file")
        return ColumnStore(columns, lengths, categories)

    def _next(self, position: int) -> tuple[int, bytes]:
        """Return the next byte that is no white space, b"" at the end, and the position after it."""
        while piece := os.pread(self._handle, 2**16, position):
            if rest := piece.lstrip(_SPACE):
                return position + len(piece) - len(rest) + 1, rest[:1]
            position += len(piece)
        return position, b""

    def _after(self, position: int, expected: bytes) -> int:
        position, found = self._next(position)
        if found != expected:
            raise UnsupportedError(f"no {expected.decode()}")
        return position

    def _value(self, position: int) -> tuple[int, bytes]:
        """Return a value, as JSON, and the position after it."""
        position = self._next(position)[0] - 1
        size = 2**16
        while size <= _LONGEST_VALUE:
            piece = os.pread(self._handle, size, position)
            try:
                # every byte is a character, and none of another character of UTF-8 has a meaning in JSON
                end = self._scan(piece.decode("latin-1"))[1]
            except ValueError:
                end = len(piece) + 1
            if end < len(piece):  # the next byte shows that a number ends here
                raw = piece[:end]
                raw.decode()
                return position + end, raw
            if len(piece) < size:
                break
            size *= 4
        raise UnsupportedError("no JSON, or a long value")

    def _list(self, position: int, entries: _EntryList) -> int:
        """Decode the entries of a list from the position after its bracket; return the position after the list."""
        after, found = self._next(position)
        if found == b"]":
            return after
        size = PIECE_BYTES
        while True:
            piece = os.pread(self._handle, size, position)
            used, last = self._decoded(piece, entries)
            if used:
                self._progress(used)
                position += used
                size = PIECE_BYTES
                if last:
                    return position
            elif len(piece) < size or size >= _LONGEST_VALUE:
                raise UnsupportedError("no JSON, or a long entry")
            else:
                size *= 4

    def _decoded(self, piece: bytes, entries: _EntryList) -> tuple[int, bool]:
        """Decode the complete entries at the beginning of a piece of a list.

        Returns:
            The bytes used, with the comma or bracket after them, and True if that is the bracket.
        """
        # Text between brackets that is a JSON list was cut between two entries, not inside one or in a string
        if (cut := _last_comma(piece)) and entries.try_to_add(piece[:cut]):
            return cut + 1, False
        text, start, end, last = piece.decode("latin-1"), 0, 0, False
        while not last:
            try:
                stop = self._scan(text, _skip_space(text, start))[1]
            except (ValueError, IndexError):
                break
            stop = _skip_space(text, stop)
            if text[stop : stop + 1] not in (",", "]") or not text[stop : stop + 1]:
                break
            last = text[stop] == "]"
            end, start = stop, stop + 1
        if end and not entries.try_to_add(piece[:end]):
            raise UnsupportedError("an entry that cannot be decoded")
        return (end + 1 if end else 0), last


def _last_comma(piece: bytes) -> int:
    """Return the last position of a comma between objects, 0 if there is none near the end."""
    start = max(0, len(piece) - _TAIL)
    found = max(piece.rfind(separator, start) for separator in (b"},{", b"}, {", b"},\n"))
    return found + 1 if found >= 0 else 0


_SPACES = re.compile(r"[ \t\n\r]*")


def _skip_space(text: str, start: int) -> int:
    found = _SPACES.match(text, start)
    assert found is not None
    return found.end()


class _EntryList:
    """Columns of a list that grow by its entries."""

    def __init__(self, name: str) -> None:
        self._name, self._length = name, 0
        self._builders: dict[str, ColumnBuilder | BoxBuilder] = {}
        self._decoder: msgspec.json.Decoder[Any] | None = None

    def try_to_add(self, entries: bytes) -> bool:
        """Append entries that are separated by commas; return False if they are not.

        Raises:
            UnsupportedError: they are JSON, but columns cannot hold them.
        """
        content = b"[%b]" % entries
        if not content.isascii():
            content.decode()
        try:
            rows = self._decode(content)
        except msgspec.ValidationError as error:
            raise UnsupportedError(str(error)) from error
        except msgspec.DecodeError:
            return False
        for builder, values in zip(self._builders.values(), zip(*map(astuple, rows), strict=True), strict=False):
            builder.add(values)
        self._length += len(rows)
        return True

    def _decode(self, content: bytes) -> list[Any]:
        if self._decoder is not None:
            try:
                return self._decoder.decode(content)
            except msgspec.ValidationError:  # a key that entries before did not have
                pass
        keys = dict.fromkeys(key for row in msgspec.json.decode(content, type=list[dict[str, Any]]) for key in row)
        self._extend([key for key in keys if key not in self._builders])
        assert self._decoder is not None
        return self._decoder.decode(content)

    def _extend(self, keys: list[str]) -> None:
        if "segments_info" in keys:
            raise UnsupportedError("a panoptic file")
        for key in keys:
            box = self._name == "annotations" and key == "bbox"
            if box and self._length:
                raise UnsupportedError("an annotation without bbox")
            self._builders[key] = BoxBuilder() if box else ColumnBuilder(self._length)
        if len(self._builders) > _MOST_KEYS:
            raise UnsupportedError("entries with many different keys")
        fields = [
            (f"f{index}", _Box if isinstance(builder, BoxBuilder) else Any, msgspec.UNSET)
            for index, builder in enumerate(self._builders.values())
        ]
        names = dict(zip((name for name, *_ in fields), self._builders, strict=True))
        entry = msgspec.defstruct("Entry", fields, rename=names, forbid_unknown_fields=True, gc=False)
        self._decoder = msgspec.json.Decoder(list[entry])  # type: ignore[valid-type]

    def finish(self) -> tuple[dict[str, Column | BoxColumn], int]:
        """Return the columns and the number of entries.

        Raises:
            UnsupportedError: an entry lacks a required value.
        """
        columns: dict[str, Column | BoxColumn] = {}
        for key in list(self._builders):
            columns[key] = self._builders.pop(key).finish()
        for key, kind in _REQUIRED[self._name].items() if self._length else ():
            found = columns.get(key)
            if not isinstance(found, Column) or found.kinds.tolist() != [kind]:
                raise UnsupportedError(f"{self._name} without {key}")
            if kind == INT and found.numbers.min() < 0:
                raise UnsupportedError(f"a negative {key}")
        return columns, self._length
