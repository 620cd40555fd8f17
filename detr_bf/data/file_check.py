"""What the doctor must know about image files, with a cache so that an unchanged file is read once.

A file counts as unchanged when its size and modification time are those of the record. Every record holds the
SHA-256 of the bytes it was made from, which is what finds the same image in two data sets.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from detr_bf.data.images import ImageSizes, check_image
from detr_bf.data.panoptic import SegmentExtent, segment_extents
from detr_bf.files import write_json
from detr_bf.panoptic_png import read_ids
from detr_bf.progress import progress_bar

log = logging.getLogger(__name__)

_VERSION = 1  # of the cache file; raise it when a record changes its meaning
_Data = bytes  # whose name is a field's below


@dataclass(frozen=True)
class FileRecord(ABC):
    """One file as it was when it was read."""

    CACHE: ClassVar[str]  # what the name of the cache file ends with

    bytes: int
    modified: int  # nanoseconds
    sha256: str
    problem: str = ""  # why it cannot be used

    @staticmethod
    @abstractmethod
    def look(path: Path, data: _Data) -> dict[str, Any]:
        """The further fields of a record; raises :class:`ValueError` for a file that cannot be used."""

    @staticmethod
    @abstractmethod
    def restored(fields: dict[str, Any]) -> dict[str, Any]:
        """All fields of a record, from what JSON made of them."""


@dataclass(frozen=True)
class ImageRecord(FileRecord):
    """An image."""

    CACHE = ""

    sizes: ImageSizes | None = None  # None for a file that cannot be decoded

    @staticmethod
    def look(path: Path, data: _Data) -> dict[str, Any]:
        return {"sizes": check_image(data)}

    @staticmethod
    def restored(fields: dict[str, Any]) -> dict[str, Any]:
        sizes = fields["sizes"]
        return {**fields, "sizes": sizes and ImageSizes(tuple(sizes["stored"]), tuple(sizes["rotated"]))}


@dataclass(frozen=True)
class MapRecord(FileRecord):
    """A PNG of segment ids."""

    CACHE = "-segments"

    size: tuple[int, int] | None = None  # (height, width); None for a file that cannot be decoded
    segments: tuple[SegmentExtent, ...] = ()

    @staticmethod
    def look(path: Path, data: _Data) -> dict[str, Any]:
        ids = read_ids(path)
        return {"size": tuple(ids.shape), "segments": segment_extents(ids)}

    @staticmethod
    def restored(fields: dict[str, Any]) -> dict[str, Any]:
        size, segments = fields["size"], fields["segments"]
        return {**fields, "size": size and tuple(size), "segments": tuple(SegmentExtent(*s) for s in segments)}


Record = TypeVar("Record", bound=FileRecord)


def check_files(
    kind: type[Record], folder: Path, names: Iterable[str], cache_dir: Path, workers: int
) -> dict[str, Record]:
    """Records of the named files; a name without a file has none.

    Files that the cache does not know are decoded by ``workers`` threads behind a progress bar. What was read is
    kept even when the check is interrupted.
    """
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]
    cache_file = cache_dir / f"{digest}{kind.CACHE}.json"
    known = _load(kind, cache_file)
    present = {name: status for name in dict.fromkeys(names) if (status := _status(folder / name))}
    to_read = [name for name, status in present.items() if name not in known or _stamp(known[name]) != status]
    if to_read:
        try:
            with ThreadPool(max(1, workers)) as pool:
                read = pool.imap_unordered(lambda name: (name, _read(kind, folder / name)), to_read, chunksize=8)
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


def _read(kind: type[Record], path: Path) -> Record:
    status = path.stat()  # before reading: a file that changes meanwhile is read again next time
    stamp = (status.st_size, status.st_mtime_ns)
    try:
        data = path.read_bytes()
    except OSError as error:
        return kind(*stamp, sha256="", problem=str(error))
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        return kind(*stamp, sha256, **kind.look(path, data))
    except ValueError as error:
        return kind(*stamp, sha256, problem=str(error))


def _load(kind: type[Record], cache_file: Path) -> dict[str, Record]:
    """Records of an earlier check; none when there is no cache, or not one of ours."""
    try:
        content = json.loads(cache_file.read_bytes())
        if content["version"] != _VERSION:
            return {}
        return {name: kind(**kind.restored(record)) for name, record in content["files"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("Ignoring the unreadable cache file %s (%s); all images are read again.", cache_file, error)
        return {}


def _save(cache_file: Path, records: Mapping[str, FileRecord]) -> None:
    files = {name: asdict(record) for name, record in records.items() if record.sha256}  # a denied one may be allowed
    content = {"version": _VERSION, "files": files}
    try:
        write_json(cache_file, content)
    except OSError as error:
        log.warning("Cannot write %s (%s): the next check reads all images again.", cache_file, error)
