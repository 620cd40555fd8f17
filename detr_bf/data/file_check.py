"""What the doctor must know about image files, with a cache so that an unchanged file is read once.

A file counts as unchanged when its size and modification time are those of the record. Every record holds the
SHA-256 of the bytes that were decoded, which is what finds the same image in two data sets.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from detr_bf.data.images import ImageSizes, check_image
from detr_bf.files import write_json
from detr_bf.progress import progress_bar

log = logging.getLogger(__name__)

_VERSION = 1  # of the cache file; raise it when a record changes its meaning


@dataclass(frozen=True)
class FileRecord:
    """One image file as it was when it was read."""

    bytes: int
    modified: int  # nanoseconds
    sha256: str
    sizes: ImageSizes | None  # None for a file that cannot be decoded
    problem: str = ""  # why not


def check_files(folder: Path, names: Iterable[str], cache_dir: Path, workers: int) -> dict[str, FileRecord]:
    """Records of the named files; a name without a file has none.

    Files that the cache does not know are decoded by ``workers`` threads behind a progress bar. What was read is
    kept even when the check is interrupted.
    """
    cache_file = cache_dir / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]}.json"
    known = _load(cache_file)
    present = {name: status for name in dict.fromkeys(names) if (status := _status(folder / name))}
    to_read = [name for name, status in present.items() if name not in known or _stamp(known[name]) != status]
    if to_read:
        try:
            with ThreadPool(max(1, workers)) as pool:
                read = pool.imap_unordered(lambda name: (name, _read(folder / name)), to_read, chunksize=8)
                known.update(progress_bar(read, total=len(to_read), desc=f"checking {folder}", unit="image"))
        finally:
            _save(cache_file, known)
    return {name: known[name] for name in present}


def _status(path: Path) -> tuple[int, int] | None:
    """Bytes and modification time, ``None`` where there is no file."""
    if not path.is_file():
        return None
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _stamp(record: FileRecord) -> tuple[int, int]:
    return record.bytes, record.modified


def _read(path: Path) -> FileRecord:
    status = path.stat()  # before reading: a file that changes meanwhile is read again next time
    stamp = (status.st_size, status.st_mtime_ns)
    try:
        data = path.read_bytes()
    except OSError as error:
        return FileRecord(*stamp, sha256="", sizes=None, problem=str(error))
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        return FileRecord(*stamp, sha256, check_image(data))
    except ValueError as error:
        return FileRecord(*stamp, sha256, sizes=None, problem=str(error))


def _load(cache_file: Path) -> dict[str, FileRecord]:
    """Records of an earlier check; none when there is no cache, or not one of ours."""
    try:
        content = json.loads(cache_file.read_bytes())
        if content["version"] != _VERSION:
            return {}
        return {name: _from_json(record) for name, record in content["files"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("Ignoring the unreadable cache file %s (%s); all images are read again.", cache_file, error)
        return {}


def _from_json(record: dict[str, Any]) -> FileRecord:
    sizes = record.pop("sizes")
    return FileRecord(**record, sizes=sizes and ImageSizes(tuple(sizes["stored"]), tuple(sizes["rotated"])))


def _save(cache_file: Path, records: dict[str, FileRecord]) -> None:
    files = {name: asdict(record) for name, record in records.items() if record.sha256}  # a denied one may be allowed
    content = {"version": _VERSION, "files": files}
    try:
        write_json(cache_file, content)
    except OSError as error:
        log.warning("Cannot write %s (%s): the next check reads all images again.", cache_file, error)
