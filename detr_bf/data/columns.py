"""Entries of a large COCO file as NumPy arrays, one column for each key, and sequences that show them as dictionaries.

A list of 26 million dictionaries needs 15 GB or more in every process; their columns need 1.5 GB and may be mapped from
a file. An entry is made when it is read and equals the one that json returns: integers stay integers, missing keys stay
missing, the keys have the order of the first entry.

msgspec's structs alone decode faster, but every process would hold them: 800,000 boxes of 100,000 images (187 MB of
JSON, ``benchmarks/reading.py``) took 0.5 s of processor time and 322 MiB as structs of fixed keys, 0.8 s and 95 MiB as
columns, 2.9 s and 524 MiB as msgspec's dictionaries.

Shape legend: N entries of a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, overload

import msgspec
import numpy as np

ABSENT, NULL, INT, FLOAT, TEXT, JSON = range(6)  # kinds of values; JSON: lists, objects, true and false
_KIND_OF = {msgspec.UnsetType: ABSENT, type(None): NULL, int: INT, float: FLOAT, str: TEXT}
_BLOCK = 4096  # entries that are made together
_EXACT = 2**53  # limit of the integers that float64 holds exactly


class UnsupportedError(Exception):
    """Content that columns cannot hold exactly; such a file is read as Python objects."""


@dataclass(frozen=True, eq=False)
class Column:
    """Values of one key. Arrays that the kinds do not need are empty."""

    kinds: np.ndarray  # (N,) uint8, or (1,) if all values are of one kind
    numbers: np.ndarray  # (N,) integers or float64, 0 for a value that is no number
    ends: np.ndarray  # (N + 1,) int64: value n is text[ends[n]:ends[n + 1]]
    text: np.ndarray  # (bytes,) uint8: UTF-8 strings, and JSON

    def values(self, rows: np.ndarray) -> list[Any]:
        """Return the values of the entries ``rows``; :data:`msgspec.UNSET` for a missing key."""
        if len(self.kinds) != 1:
            return self._mixed(rows)
        kind = int(self.kinds[0])
        if kind in (INT, FLOAT):
            return self.numbers[rows].tolist()
        if kind in (TEXT, JSON):
            texts = self._texts(rows)
            return texts if kind == TEXT else [json.loads(each) for each in texts]
        return [None if kind == NULL else msgspec.UNSET] * len(rows)

    def _mixed(self, rows: np.ndarray) -> list[Any]:
        kinds = self.kinds[rows].tolist()
        numbers = self.numbers[rows].tolist() if len(self.numbers) else [0] * len(rows)
        texts = self._texts(rows) if len(self.ends) else [""] * len(rows)
        make: tuple[Callable[[Any, str], Any], ...] = (
            lambda number, text: msgspec.UNSET,
            lambda number, text: None,
            lambda number, text: int(number),
            lambda number, text: float(number),
            lambda number, text: text,
            lambda number, text: json.loads(text),
        )
        return [make[kind](number, text) for kind, number, text in zip(kinds, numbers, texts, strict=True)]

    def _texts(self, rows: np.ndarray) -> list[str]:
        text = self.text.data
        spans = zip(self.ends[rows].tolist(), self.ends[rows + 1].tolist(), strict=True)
        return [str(text[start:end], "utf-8") for start, end in spans]


@dataclass(frozen=True, eq=False)
class BoxColumn:
    """Lists of four numbers."""

    numbers: np.ndarray  # (N, 4) integers or float64
    whole: np.ndarray  # (N,) uint8, or (1,) if all are equal: bit k: number k is an integer

    @property
    def kinds(self) -> np.ndarray:
        return np.array([JSON], dtype=np.uint8)

    def values(self, rows: np.ndarray) -> list[Any]:
        """Return the lists of the entries ``rows``."""
        boxes = self.numbers[rows].tolist()
        if self.numbers.dtype.kind == "f" and (len(self.whole) != 1 or self.whole[0]):
            for box, bits in zip(boxes, np.broadcast_to(self.whole, len(self.numbers))[rows].tolist(), strict=True):
                for index in range(4) if bits else ():
                    if bits >> index & 1:
                        box[index] = int(box[index])
        return boxes


@dataclass(frozen=True, eq=False)
class ColumnStore:
    """Columns of the lists of one file.

    A store that is mapped from a cache file is pickled as the file's name: processes share its memory.
    """

    columns: Mapping[str, Mapping[str, Column | BoxColumn]]  # list -> key -> values
    lengths: Mapping[str, int]  # list -> N
    categories: str  # the list of categories, JSON
    reopen: tuple[Any, ...] = field(default=())  # function and arguments that return the store in another process

    def __reduce__(self) -> tuple[Any, ...]:
        if self.reopen:
            return self.reopen[0], self.reopen[1:]
        return ColumnStore, (self.columns, self.lengths, self.categories)


class Entries(Sequence[Mapping[str, Any]]):
    """Entries of one list of a :class:`ColumnStore`, all or those of some rows, as dictionaries made when read."""

    def __init__(self, store: ColumnStore, part: str, rows: np.ndarray | None = None) -> None:
        self._store, self._part, self._rows = store, part, rows
        self._columns = store.columns[part]
        # the usual case: every entry has every key
        self._complete = all(len(each.kinds) == 1 and each.kinds[0] != ABSENT for each in self._columns.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return Entries, (self._store, self._part, self._rows)

    def __len__(self) -> int:
        return self._store.lengths[self._part] if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(index, slice):
            return self._made(np.arange(*index.indices(len(self))))
        return self._made(np.array([range(len(self))[index]]))[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for start in range(0, len(self), _BLOCK):
            yield from self._made(np.arange(start, min(start + _BLOCK, len(self))))

    def __eq__(self, other: object) -> bool:
        return _equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    def where(self, chosen: np.ndarray) -> Entries:
        """Return the entries for which a mask (N,) is True, or those of the given indices, in their order."""
        indices = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        return Entries(self._store, self._part, indices if self._rows is None else self._rows[indices])

    def kinds(self, key: str) -> np.ndarray:
        """Return the kinds (N,) of the values of a key."""
        if key not in self._columns:
            return np.broadcast_to(np.uint8(ABSENT), len(self))
        kinds = self._columns[key].kinds
        return np.broadcast_to(kinds, len(self)) if len(kinds) == 1 else self._chosen(kinds)

    def numbers(self, key: str) -> np.ndarray:
        """Return the numbers (N,) of a key, 0 for a value that is no number; (N, 4) for boxes."""
        found = self._columns[key].numbers if key in self._columns else np.zeros(0)
        return self._chosen(found) if len(found) else np.broadcast_to(np.int8(0), len(self))

    def is_number(self, key: str) -> np.ndarray:
        """Return a mask (N,) of the entries with a number as the value of a key."""
        kinds = self.kinds(key)
        return (kinds == INT) | (kinds == FLOAT)

    def is_none(self, key: str) -> np.ndarray:
        """Return a mask (N,) of the entries without a key, or with null."""
        return self.kinds(key) <= NULL

    @property
    def boxes(self) -> np.ndarray | None:
        """Values of ``bbox`` (N, 4); None if the entries have none."""
        if not len(self):
            return np.zeros((0, 4))
        return self.numbers("bbox") if isinstance(self._columns.get("bbox"), BoxColumn) else None

    def values(self, key: str) -> Values:
        """Return the values of a key that every entry has."""
        return Values(self, key)

    def listed(self, key: str, indices: np.ndarray) -> list[Any]:
        """Return the values of a key of the entries ``indices``."""
        return self._columns[key].values(self._chosen(indices, inverse=True))

    def _chosen(self, values: np.ndarray, *, inverse: bool = False) -> np.ndarray:
        if self._rows is None:
            return values
        return self._rows[values] if inverse else values[self._rows]

    def _made(self, indices: np.ndarray) -> list[Mapping[str, Any]]:
        rows, keys = self._chosen(indices, inverse=True), tuple(self._columns)
        if not keys:
            return [{} for _ in rows]
        made = zip(*(column.values(rows) for column in self._columns.values()), strict=True)
        if self._complete:
            return [dict(zip(keys, values, strict=True)) for values in made]
        return [
            {key: value for key, value in zip(keys, values, strict=True) if value is not msgspec.UNSET}
            for values in made
        ]


class Values(Sequence[Any]):
    """Values of one key of all entries."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, entries: Entries, key: str) -> None:
        self._entries, self._key = entries, key

    def __eq__(self, other: object) -> bool:
        return _equal(self, other)

    @property
    def numbers(self) -> np.ndarray:
        return self._entries.numbers(self._key)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._entries.listed(self._key, np.arange(*index.indices(len(self))))
        return self._entries.listed(self._key, np.array([range(len(self))[index]]))[0]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _BLOCK):
            yield from self[start : start + _BLOCK]


def _equal(values: Sequence[Any], other: object) -> bool:
    """Return True for a sequence of equal values."""
    if not isinstance(other, Sequence) or len(values) != len(other):
        return False
    return all(one == another for one, another in zip(values, other, strict=True))


def values_of(entries: Sequence[Mapping[str, Any]], key: str) -> Sequence[Any]:
    """Return the values of a key that every entry has."""
    return entries.values(key) if isinstance(entries, Entries) else [entry[key] for entry in entries]


def distinct(entries: Sequence[Mapping[str, Any]], key: str) -> set[Any]:
    """Return the distinct values of a key; every entry has it, with a whole number."""
    return (
        set(np.unique(entries.numbers(key)).tolist()) if isinstance(entries, Entries) else set(values_of(entries, key))
    )


def integers(values: Sequence[int]) -> np.ndarray:
    """Return integers as an array (N,); those of a column without a copy."""
    return values.numbers if isinstance(values, Values) else np.fromiter(values, np.int64, len(values))


class ColumnBuilder:
    """Column that grows by the values of consecutive entries."""

    def __init__(self, absent: int) -> None:
        """Begin with ``absent`` entries that lack the key."""
        self._parts: list[tuple[int, np.ndarray, np.ndarray, np.ndarray, bytes]] = []
        if absent:
            none = np.zeros(0, dtype=np.int8)
            self._parts.append((absent, np.array([ABSENT], dtype=np.uint8), none, none, b""))

    def add(self, values: Sequence[Any]) -> None:
        """Append values as msgspec decodes them.

        Raises:
            UnsupportedError: a number that no column holds exactly.
        """
        if not values:
            return
        types, none = set(map(type, values)), np.zeros(0, dtype=np.int8)
        kind = _KIND_OF.get(next(iter(types)), JSON) if len(types) == 1 else None
        kinds = (
            np.fromiter(map(_kind_of, values), np.uint8, len(values))
            if kind is None
            else np.array([kind], dtype=np.uint8)
        )
        numbers, lengths, text = none, none, b""
        try:
            if kind in (INT, FLOAT):
                numbers = np.fromiter(values, np.int64 if kind == INT else np.float64, len(values))
            elif {int, float} & types:
                numbers = _numbers(values, kinds)
            if kind == TEXT and (joined := "".join(values)).isascii():
                lengths, text = np.fromiter(map(len, values), np.int64, len(values)), joined.encode()
            elif kinds.max() >= TEXT:
                texts = list(map(_encoded, values))
                lengths, text = np.fromiter(map(len, texts), np.int64, len(texts)), b"".join(texts)
        except (OverflowError, UnicodeEncodeError) as error:
            raise UnsupportedError(f"a value that columns cannot hold ({error})") from error
        self._parts.append((len(values), kinds, _narrow(numbers), _narrow(lengths), text))

    def finish(self) -> Column:
        """Return the column and drop the parts."""
        parts, self._parts = self._parts, []
        counts = [count for count, *_ in parts]
        kinds = _joined([part[1] for part in parts], counts)
        numbers = np.zeros(0, dtype=np.int8)
        if any(len(part[2]) for part in parts):
            if len({part[2].dtype.kind for part in parts if len(part[2])}) > 1:
                _require_exact([part[2] for part in parts if part[2].dtype.kind == "i"])
            padded = [part[2] if len(part[2]) else np.zeros(part[0], dtype=np.int8) for part in parts]
            numbers = np.concatenate(padded)
        ends = np.zeros(0, dtype=np.int64)
        if any(len(part[3]) for part in parts):
            ends = np.zeros(sum(counts) + 1, dtype=np.int64)
            lengths = [part[3] if len(part[3]) else np.zeros(part[0], dtype=np.int8) for part in parts]
            np.cumsum(np.concatenate(lengths), dtype=np.int64, out=ends[1:])
        text = b"".join(part[4] for part in parts)
        return Column(kinds, numbers, ends, np.frombuffer(text, dtype=np.uint8))


class BoxBuilder:
    """Column of boxes that grows by those of consecutive entries."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, boxes: Sequence[Any]) -> None:
        """Append tuples of four numbers.

        Raises:
            UnsupportedError: an entry has no box, or an integer has more than 53 bits.
        """
        if set(map(type, boxes)) - {tuple}:
            raise UnsupportedError("an annotation without bbox")
        flat = list(chain.from_iterable(boxes))
        try:
            numbers = np.fromiter(flat, np.float64, len(flat))
        except OverflowError as error:
            raise UnsupportedError("a bbox beyond float64") from error
        whole = np.zeros(len(flat), dtype=np.uint8)
        for index in np.flatnonzero(numbers == np.floor(numbers)).tolist():
            whole[index] = type(flat[index]) is int
        if np.abs(numbers[whole == 1]).max(initial=0) >= _EXACT:
            raise UnsupportedError("an integer of more than 53 bits in a bbox")
        bits = (whole.reshape(-1, 4) << np.arange(4, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)
        numbers = numbers.reshape(-1, 4)
        uniform = len(bits) and (bits == bits[0]).all()
        if uniform and bits[0] == 15:
            numbers = _narrow(numbers.astype(np.int64))
        self._parts.append((numbers, bits[:1] if uniform else bits))

    def finish(self) -> BoxColumn:
        """Return the column and drop the parts."""
        parts, self._parts = self._parts, []
        whole = _joined([bits for _, bits in parts], [len(numbers) for numbers, _ in parts])
        numbers = np.concatenate([numbers for numbers, _ in parts])
        return BoxColumn(numbers.astype(np.float64) if numbers.dtype.kind == "f" else numbers, whole)


def _kind_of(value: Any) -> int:
    return _KIND_OF.get(type(value), JSON)


def _encoded(value: Any) -> bytes:
    """Return a string in UTF-8, other values that are no numbers as JSON that reads equal in every parser."""
    kind = _KIND_OF.get(type(value), JSON)
    return value.encode() if kind == TEXT else msgspec.json.encode(value) if kind == JSON else b""


def _numbers(values: Sequence[Any], kinds: np.ndarray) -> np.ndarray:
    """Return integers, or float64 if there is a float; 0 for a value that is no number."""
    found = [value if kind in (INT, FLOAT) else 0 for value, kind in zip(values, kinds.tolist(), strict=True)]
    if not (kinds == FLOAT).any():
        return np.fromiter(found, np.int64, len(found))
    _require_exact([np.fromiter((each for each in found if type(each) is int), np.int64)])
    return np.fromiter(found, np.float64, len(found))


def _require_exact(integers: Sequence[np.ndarray]) -> None:
    for each in integers:
        if len(each) and (each.max() > _EXACT or each.min() < -_EXACT):
            raise UnsupportedError("an integer of more than 53 bits beside floating-point numbers")


def _narrow(numbers: np.ndarray) -> np.ndarray:
    """Return integers in the smallest type that holds them; other arrays as they are."""
    if numbers.dtype.kind != "i" or not numbers.size:
        return numbers
    low, high = numbers.min(), numbers.max()
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return numbers.astype(dtype)
    return numbers


def _joined(parts: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    """Join arrays (count,) or (1,), which stand for ``count`` equal values, to (N,), or (1,) if all are equal."""
    if parts and all(len(each) == 1 and each[0] == parts[0][0] for each in parts):
        return np.array(parts[0])
    found = [np.broadcast_to(each, count) for each, count in zip(parts, counts, strict=True)]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.uint8)


class AnnotatedSizes(Sequence[tuple[int, int] | None]):
    """Sizes (height, width) of images in an array (N, 2), in which -1 is an unknown one."""

    def __init__(self, sizes: np.ndarray) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(AnnotatedSizes(self._sizes[index]))
        height, width = self._sizes[index].tolist()
        return None if height < 0 else (height, width)

    def __iter__(self) -> Iterator[tuple[int, int] | None]:
        for start in range(0, len(self), 4096):
            for height, width in self._sizes[start : start + 4096].tolist():
                yield None if height < 0 else (height, width)
