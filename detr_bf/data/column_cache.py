"""Cache of the columns of large COCO files, which processes map instead of having copies.

A cache file belongs to one annotation file and has the name ``<hash of its path>.columns``. It is used if size, time of
modification and samples of the content of the annotation file are those that it states: :data:`SAMPLES` blocks of
:data:`SAMPLE_BYTES`, evenly spaced, the first and the last included. The arrays are verified by CRC-32 when the file
is opened. A file that is stale, damaged, of another version or no cache file at all is replaced. Without a folder that
can be written nothing is cached, which is no error.

Format: safetensors. The metadata are JSON: the state of the annotation file, and either its content besides the arrays
with a BLAKE2b, or the reason why columns cannot hold it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from detr_bf.common.errors import InputError
from detr_bf.common.files import UNFINISHED, atomic_write, cache_folder, is_file, remove_unfinished
from detr_bf.common.text import printable
from detr_bf.data.coco_reader import decode_columns
from detr_bf.data.columns import BoxColumn, Column, ColumnStore, UnsupportedError

logger = logging.getLogger(__name__)

CACHE_VERSION = 1
MOST_CACHE_BYTES = 2**34  # of all cache files together; the oldest are removed
SAMPLES, SAMPLE_BYTES = 64, 2**16
_SUFFIX = ".columns"
_MOST_HEADER = 2**26  # bytes; the categories are in it
_PATIENCE = 900.0  # seconds to wait for a process that reads the same file


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
                    _write(target, {}, {"source": source, "unsupported": str(error)})
                raise
            if _state(path) != source:  # replaced before it was read: the columns are of another state
                return store
            arrays, content = _content(store)
            _write(target, arrays, {"source": source, "content": content, "digest": _digest(content)})
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
    with suppress(_InvalidError):
        found = _mapped(Path(target), Path(path), verify=False)
        if found.reopen[2] == digest:
            return found
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


def _state(path: Path) -> str:
    """Return size, time of modification and a hash of samples of a file, and the version of the cache, as JSON."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        digest = hashlib.blake2b(digest_size=32)
        for start in np.linspace(0, max(0, status.st_size - SAMPLE_BYTES), SAMPLES).astype(np.int64).tolist():
            digest.update(os.pread(handle, SAMPLE_BYTES, start))
        state = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "samples": digest.hexdigest()}
        return json.dumps({"version": CACHE_VERSION} | state)
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


def _content(store: ColumnStore) -> tuple[dict[str, np.ndarray], str]:
    """Return the arrays of a store by name, and what else it holds as JSON."""
    arrays: dict[str, np.ndarray] = {}
    columns: dict[str, dict[str, list[tuple[str, int]]]] = {}
    for part, found in store.columns.items():
        columns[part] = {key: [] for key in found}
        for key, column in found.items():
            for array in vars(column).values():
                name = f"{len(arrays):06}"
                arrays[name] = np.ascontiguousarray(array)
                columns[part][key].append((name, _checksum(arrays[name])))
    return arrays, json.dumps({"lengths": dict(store.lengths), "categories": store.categories, "columns": columns})


def _digest(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=32).hexdigest()


def _write(target: Path | None, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a cache file, if possible, and remove the oldest ones beyond the limit."""
    header, size = json.dumps(metadata), sum(array.nbytes for array in arrays.values())
    if target is None or len(header) > _MOST_HEADER or size > MOST_CACHE_BYTES:
        return
    try:
        with atomic_write(target) as temporary:
            save_file(arrays, temporary, {"detr_bf": header})
        _limit(target)
    except (OSError, InputError, SafetensorError) as error:
        logger.info("the annotations are not cached: %s", printable(error))


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


def _opened(target: Path | None, source: str, path: Path) -> ColumnStore | None:
    """Return the columns in a cache file if it is valid and belongs to this state of the annotation file.

    Raises:
        UnsupportedError: columns cannot hold the content of the annotation file, as an earlier reading found.
    """
    if target is None:
        return None
    try:
        store = _mapped(target, path, verify=True, source=source)
    except _InvalidError:
        return None
    with suppress(OSError):
        os.utime(target)  # used now
    return store


def _mapped(target: Path, path: Path, *, verify: bool, source: str = "") -> ColumnStore:
    """Return the columns of a cache file, mapped.

    Raises:
        _InvalidError: it is not a whole cache file, or not of ``source``.
        UnsupportedError: it states that columns cannot hold the content of the annotation file.
    """
    if not is_file(target):
        raise _InvalidError
    columns: dict[str, dict[str, Column | BoxColumn]] = {}
    try:
        with safe_open(target, "pt") as file:  # torch maps the file, NumPy would copy
            metadata = json.loads((file.metadata() or {})["detr_bf"])
            if source and metadata["source"] != source:
                raise _InvalidError
            if source and "unsupported" in metadata:
                raise UnsupportedError(metadata["unsupported"])
            content = metadata["content"]
            if _digest(content) != metadata["digest"]:
                raise _InvalidError
            header = json.loads(content)
            for part, keys in header["columns"].items():
                columns[part] = {}
                for key, named in keys.items():
                    arrays = [file.get_tensor(name).numpy() for name, _ in named]
                    if verify and [_checksum(array) for array in arrays] != [checksum for _, checksum in named]:
                        raise _InvalidError
                    for array in arrays:
                        array.flags.writeable = False
                    columns[part][key] = (BoxColumn if len(arrays) == 2 else Column)(*arrays)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _InvalidError from error
    reopen = (reopened, str(target), metadata["digest"], str(path))
    return ColumnStore(columns, header["lengths"], header["categories"], reopen)


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, zlib.crc32(f"{array.dtype}{array.shape}".encode()))
