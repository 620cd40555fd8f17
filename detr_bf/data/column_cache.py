"""Cache of the columns of large COCO files, which processes map instead of having copies.

A cache file belongs to one annotation file and has the name ``<hash of its path>.columns``. It is used if size, time of
modification and samples of the content of the annotation file are those that its header states: :data:`SAMPLES` blocks
of :data:`SAMPLE_BYTES`, evenly spaced, the first and the last included. The arrays are verified by CRC-32 when the file
is opened. A file that is stale, damaged, of another version or no cache file at all is replaced. Without a folder that
can be written nothing is cached, which is no error.

Layout: magic bytes, length of the header (8 bytes, little-endian), BLAKE2b of the header (32 bytes), header (JSON),
arrays, each aligned to 64 bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from detr_bf.common.errors import InputError
from detr_bf.common.files import UNFINISHED, atomic_write, cache_folder, remove_unfinished
from detr_bf.common.text import printable
from detr_bf.data.coco_reader import decode_columns
from detr_bf.data.columns import BoxColumn, Column, ColumnStore, UnsupportedError

logger = logging.getLogger(__name__)

CACHE_VERSION = 1
MOST_CACHE_BYTES = 2**34  # of all cache files together; the oldest are removed
SAMPLES, SAMPLE_BYTES = 64, 2**16
_MAGIC = b"detr_bf columns\n"
_SUFFIX = ".columns"
_ALIGNED = 64
_MOST_HEADER = 2**26  # bytes; the categories are in it
_DTYPES = frozenset(("|u1", "|i1", "<i2", "<i4", "<i8", "<f8"))
_BLOCK = 2**26  # bytes that are written or verified together
_PATIENCE = 900.0  # seconds to wait for a process that reads the same file

Header = dict[str, Any]


class _InvalidError(Exception):
    """Cache file that cannot be used."""


def read_columns(path: Path) -> ColumnStore | None:
    """Return the columns of a COCO detection file, mapped from the cache if possible.

    None for a file that only json can read, or that cannot be read.
    """
    try:
        target = _target(path)
        source = _state(path)
        if (found := _opened(target, source, path)) is not None:
            return found
        with _locked(target):
            source = _state(path)  # the file may have changed during a long wait
            if (found := _opened(target, source, path)) is not None:  # another process was faster
                return found
            try:
                store = decode_columns(path)
            except UnsupportedError as error:
                if _state(path) == source:
                    _write(target, {"version": CACHE_VERSION, "source": source, "unsupported": str(error)}, [])
                raise
            if _state(path) != source:  # replaced before it was read: the columns are of another state
                return store
            _write(target, *_content(store, source))
            return _opened(target, source, path) or store
    except UnsupportedError as error:
        logger.info("%s is read as Python objects: %s", printable(path), printable(error))
    except (OSError, ValueError):  # json's reader says why
        pass
    return None


def reopened(target: str, digest: str, path: str) -> ColumnStore:
    """Return the columns that another process has mapped.

    Raises:
        InputError: neither the cache file nor the annotation file has them any more.
    """
    with suppress(_InvalidError, OSError, ValueError):
        found, header = _mapped(Path(target), verify=False)
        if _identity(json.loads(header)) == digest:
            return _store(found, json.loads(header), Path(target), Path(path))
    store = read_columns(Path(path))
    if store is None or not store.reopen or store.reopen[2] != digest:
        raise InputError(f"{printable(path)} has changed since this run read it: start the run again")
    return store


def _target(path: Path) -> Path | None:
    """Return the cache file of an annotation file; None without a home folder."""
    try:
        name = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()
        return cache_folder("annotations") / f"{name}{_SUFFIX}"
    except RuntimeError:
        return None


def _state(path: Path) -> Header:
    """Return size, time of modification and a hash of samples of a file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        digest = hashlib.blake2b(digest_size=32)
        for start in np.linspace(0, max(0, status.st_size - SAMPLE_BYTES), SAMPLES).astype(np.int64).tolist():
            digest.update(os.pread(handle, SAMPLE_BYTES, start))
        return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "samples": digest.hexdigest()}
    finally:
        os.close(handle)


@contextmanager
def _locked(target: Path | None) -> Iterator[None]:
    """Hold the lock of a cache file, so that of several processes one reads and the others wait, where that works."""
    lock = None
    if target is not None:
        lock = FileLock(target.with_suffix(".lock"), timeout=_PATIENCE, fallback_to_soft=False)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            remove_unfinished(target.parent, target.stem)
        except (OSError, NotImplementedError, Timeout):
            lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _content(store: ColumnStore, source: Header) -> tuple[Header, list[np.ndarray]]:
    """Return the header and the arrays of the cache file of an annotation file in the state ``source``."""
    entries: dict[str, Any] = {}
    arrays: list[np.ndarray] = []
    for part, columns in store.columns.items():
        entries[part] = {key: _described(column, arrays) for key, column in columns.items()}
    sizes = [array.nbytes for array in arrays]
    offsets = np.cumsum([0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]).tolist()
    header = {
        "version": CACHE_VERSION,
        "source": source,
        "lengths": dict(store.lengths),
        "categories": store.categories,
        "columns": entries,
        "arrays": [
            [array.dtype.str, list(array.shape), offset, _checksum(array)]
            for array, offset in zip(arrays, offsets, strict=False)
        ],
        "bytes": offsets[-1],
    }
    return header, arrays


def _identity(header: Header) -> str:
    """Return a hash of the content that a header describes, whatever the state of the annotation file."""
    content = [header[key] for key in ("lengths", "categories", "columns", "arrays")]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=32).hexdigest()


def _write(target: Path | None, content: Header, arrays: Sequence[np.ndarray]) -> None:
    """Write a cache file, if possible, and remove the oldest ones beyond the limit."""
    header, size = json.dumps(content).encode(), content.get("bytes", 0)
    if target is None or len(header) > _MOST_HEADER or size > MOST_CACHE_BYTES:
        return
    try:
        with atomic_write(target) as temporary, temporary.open("wb") as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + hashlib.blake2b(header, digest_size=32).digest())
            file.write(header)
            start = _arrays_start(len(header))
            for array, (*_, offset, _) in zip(arrays, content.get("arrays", ()), strict=True):
                file.seek(start + offset)
                file.write(_bytes_of(array))
            file.truncate(start + size)
        _limit(target)
    except (OSError, InputError) as error:
        logger.info("the annotations are not cached: %s", printable(error))


def _described(column: Column | BoxColumn, arrays: list[np.ndarray]) -> list[int]:
    """Append the arrays of a column and return their indices."""
    if isinstance(column, BoxColumn):
        found = (column.numbers, column.whole)
    else:
        found = (column.kinds, column.numbers, column.ends, column.text)  # type: ignore[assignment]
    arrays += (np.ascontiguousarray(array) for array in found)
    return list(range(len(arrays) - len(found), len(arrays)))


def _limit(newest: Path) -> None:
    """Remove the cache files that were used least recently, until all together are within the limit."""
    found = []
    for path in newest.parent.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            status = path.lstat()
            if _is_ours(path) and stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total > MOST_CACHE_BYTES and path.name != newest.name:
            with suppress(OSError):
                path.unlink()
                total -= size


def _is_ours(path: Path) -> bool:
    """Return True for the name of a cache file."""
    stem = path.name.removesuffix(_SUFFIX)
    return len(stem) == 32 and set(stem) <= set("0123456789abcdef") and not path.name.startswith(UNFINISHED)


def _opened(target: Path | None, source: Header, path: Path) -> ColumnStore | None:
    """Return the columns in a cache file if it is valid and belongs to this state of the annotation file.

    Raises:
        UnsupportedError: columns cannot hold the content of the annotation file, as an earlier reading found.
    """
    if target is None:
        return None
    try:
        found, raw = _mapped(target, verify=True, source=source)
        store = _store(found, json.loads(raw), target, path)
    except (_InvalidError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
    with suppress(OSError):
        os.utime(target)  # used now
    return store


def _mapped(target: Path, *, verify: bool, source: Header | None = None) -> tuple[list[np.ndarray], bytes]:
    """Return the arrays of a cache file, mapped, and its header.

    Raises:
        _InvalidError: it is not a whole cache file, or not of ``source``.
        UnsupportedError: it states that columns cannot hold the content of the annotation file.
    """
    if not stat.S_ISREG(target.stat().st_mode):
        raise _InvalidError
    whole = np.asarray(np.memmap(target, dtype=np.uint8, mode="r"))
    prefix = len(_MAGIC) + 40
    length = int.from_bytes(whole[len(_MAGIC) : len(_MAGIC) + 8].tobytes(), "little")
    if whole[: len(_MAGIC)].tobytes() != _MAGIC or length > min(_MOST_HEADER, len(whole)):
        raise _InvalidError
    raw = whole[prefix : prefix + length].tobytes()
    if hashlib.blake2b(raw, digest_size=32).digest() != whole[len(_MAGIC) + 8 : prefix].tobytes():
        raise _InvalidError
    header = json.loads(raw)
    if header["version"] != CACHE_VERSION or (source is not None and header["source"] != source):
        raise _InvalidError
    if source is not None and isinstance(header.get("unsupported"), str):
        raise UnsupportedError(header["unsupported"])
    start = _arrays_start(length)
    if len(whole) != start + header["bytes"]:
        raise _InvalidError
    arrays = []
    for kind, shape, offset, checksum in header["arrays"]:
        if kind not in _DTYPES or offset % _ALIGNED:
            raise _InvalidError
        size = np.dtype(kind).itemsize * int(np.prod(shape))
        array = whole[start + offset : start + offset + size].view(kind).reshape(shape)
        if verify and _checksum(array) != checksum:
            raise _InvalidError
        arrays.append(array)
    return arrays, raw


def _store(arrays: list[np.ndarray], header: Header, target: Path, path: Path) -> ColumnStore:
    columns: dict[str, Mapping[str, Column | BoxColumn]] = {}
    for part, keys in header["columns"].items():
        columns[part] = {
            key: (BoxColumn if len(found) == 2 else Column)(*(arrays[index] for index in found))
            for key, found in keys.items()
        }
    reopen = (reopened, str(target), _identity(header), str(path))
    return ColumnStore(columns, header["lengths"], header["categories"], reopen)


def _arrays_start(header: int) -> int:
    """Return the offset of the arrays in a file whose header has this length."""
    return -(-(len(_MAGIC) + 40 + header) // _ALIGNED) * _ALIGNED


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _checksum(array: np.ndarray) -> int:
    content, found = _bytes_of(array), 0
    for start in range(0, len(content), _BLOCK):
        found = zlib.crc32(content[start : start + _BLOCK], found)
    return found
