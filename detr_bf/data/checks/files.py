"""What the doctor must know about image files, with a cache so that an unchanged file is read once.

A file counts as unchanged when its size and modification time are those of the record. Every record holds the
SHA-256 of the bytes it was made from, which is what finds the same image in two data sets.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path, PureWindowsPath
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote

from detr_bf.data.images import MAX_PIXELS, ImageSizes, TooLargeError, check_image, image_bytes
from detr_bf.data.masks import SegmentExtent, read_ids, segment_extents
from detr_bf.errors import InputError
from detr_bf.files import is_file, read_json, write_json
from detr_bf.progress import progress_bar
from detr_bf.text import printable

log = logging.getLogger(__name__)

_VERSION = 2  # of the cache file; raise it when a record changes its meaning
_MAX_CACHE_BYTES = 2**31
_SHA256 = re.compile("[0-9a-f]{64}")
_Data = bytes  # whose name is a field's below


@dataclass(frozen=True)
class FileRecord(ABC):
    """One file as it was when it was read."""

    CACHE: ClassVar[str]  # what the name of the cache file ends with

    bytes: int
    modified: int  # nanoseconds
    sha256: str  # empty where the file was not read as a whole
    problem: str = ""  # why it cannot be used

    @staticmethod
    @abstractmethod
    def look(path: Path, data: _Data, max_pixels: int) -> dict[str, Any]:
        """The further fields of a record; raises :class:`ValueError` for a file that cannot be used."""

    @staticmethod
    @abstractmethod
    def restored(fields: dict[str, Any]) -> dict[str, Any]:
        """The further fields of a record, from what JSON made of them; raises :class:`ValueError` for other values."""

    @property
    @abstractmethod
    def pixels(self) -> int:
        """How many pixels were decoded."""


@dataclass(frozen=True)
class ImageRecord(FileRecord):
    """An image."""

    CACHE = ""

    sizes: ImageSizes | None = None  # None for a file that cannot be decoded
    depth: int | None = None  # of a 16-bit image: the bits that count

    @staticmethod
    def look(path: Path, data: _Data, max_pixels: int) -> dict[str, Any]:
        facts = check_image(data, max_pixels)
        return {"sizes": facts.sizes, "depth": facts.depth}

    @staticmethod
    def restored(fields: dict[str, Any]) -> dict[str, Any]:
        sizes, depth = fields["sizes"], fields["depth"]
        if sizes is not None:
            stored, rotated = (_whole_numbers(sizes[key], 2) for key in ("stored", "rotated"))
            sizes = ImageSizes((stored[0], stored[1]), (rotated[0], rotated[1]))
        return {"sizes": sizes, "depth": None if depth is None else _whole_numbers([depth], 1)[0]}

    @property
    def pixels(self) -> int:
        return math.prod(self.sizes.stored) if self.sizes else 0


@dataclass(frozen=True)
class MapRecord(FileRecord):
    """A PNG of segment ids."""

    CACHE = "-segments"

    size: tuple[int, int] | None = None  # (height, width); None for a file that cannot be decoded
    segments: tuple[SegmentExtent, ...] = ()

    @staticmethod
    def look(path: Path, data: _Data, max_pixels: int) -> dict[str, Any]:
        ids = read_ids(path, max_pixels)
        return {"size": tuple(ids.shape), "segments": segment_extents(ids)}

    @staticmethod
    def restored(fields: dict[str, Any]) -> dict[str, Any]:
        size, count = fields["size"], len(SegmentExtent._fields)
        segments = tuple(SegmentExtent(*_whole_numbers(segment, count)) for segment in fields["segments"])
        return {"size": None if size is None else tuple(_whole_numbers(size, 2)), "segments": segments}

    @property
    def pixels(self) -> int:
        return math.prod(self.size) if self.size else 0


Record = TypeVar("Record", bound=FileRecord)


def check_files(
    kind: type[Record],
    folder: Path,
    names: Iterable[str],
    cache_dir: Path,
    workers: int,
    max_pixels: int = MAX_PIXELS,
) -> dict[str, Record]:
    """Records of the named files; a name without a file has none.

    Files that the cache does not know are decoded by ``workers`` threads behind a progress bar, those of more than
    ``max_pixels`` pixels are not. What was read is kept even when the check is interrupted.
    """
    digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:24]
    cache_file = cache_dir / f"{digest}{kind.CACHE}.json"
    known = _load(kind, cache_file)
    present = {name: status for name in dict.fromkeys(names) if (status := _status(folder, name))}
    to_read = [
        name
        for name, status in present.items()
        if name not in known or (known[name].bytes, known[name].modified) != status or known[name].pixels > max_pixels
    ]
    if to_read:
        try:
            with ThreadPool(max(1, workers)) as pool:
                read = pool.imap_unordered(
                    lambda name: (name, _read(kind, folder / name, present[name], max_pixels)), to_read, chunksize=8
                )
                title = f"checking {printable(folder)}"
                known.update(progress_bar(read, total=len(to_read), desc=title, unit="image"))
        finally:
            _save(cache_file, known)
    return {name: known[name] for name in present}


def existing_name(folder: Path, name: str) -> str | None:
    """Return another form of the ``name`` of a missing file under which there is one, if there is.

    Exported annotations often name a file with folders of another machine, or as a part of a URL.
    """
    forms = [name, unquote(name)]
    forms += [PureWindowsPath(form).name for form in forms]  # which knows both kinds of slash
    return next((form for form in forms if form and is_file(folder / form)), None)


def _status(folder: Path, name: str) -> tuple[int, int] | None:
    """Bytes and modification time, before reading: a file that changes meanwhile is read again next time.

    ``None`` where there is no file; zeros where there may be one that cannot be looked at.
    """
    try:
        status = (folder / name).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _read(kind: type[Record], path: Path, stamp: tuple[int, int], max_pixels: int) -> Record:
    sha256 = ""
    try:
        data = image_bytes(path, max_pixels)
        sha256 = hashlib.sha256(data).hexdigest()
        return kind(*stamp, sha256, **kind.look(path, data, max_pixels))
    except TooLargeError as error:  # another limit may allow it
        return kind(*stamp, sha256="", problem=str(error))
    except (OSError, ValueError) as error:
        return kind(*stamp, sha256, problem=str(error))


def _load(kind: type[Record], cache_file: Path) -> dict[str, Record]:
    """Records of an earlier check; none when there is no cache, or not one of ours."""
    try:
        content = read_json(cache_file, _MAX_CACHE_BYTES)
        if content["version"] != _VERSION:
            return {}
        return {name: _restored(kind, record) for name, record in content["files"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning(
            "Ignoring the unreadable cache file %s (%s: %s); all images are read again.",
            printable(cache_file),
            type(error).__name__,
            printable(error),
        )
        return {}


def _restored(kind: type[Record], record: dict[str, Any]) -> Record:
    size, modified = _whole_numbers([record["bytes"], record["modified"]], 2)
    sha256, problem = record["sha256"], record["problem"]
    if not (isinstance(sha256, str) and _SHA256.fullmatch(sha256) and isinstance(problem, str)):
        raise ValueError("it holds another checksum or problem than this program writes")
    return kind(size, modified, sha256, problem, **kind.restored(record))


def _whole_numbers(values: Any, count: int) -> list[int]:
    """``values`` if they are a list of so many whole numbers from 0 to 2**63 - 1."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"it holds no list of {count} numbers where this program writes one")
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError("it holds other values than the whole numbers that this program writes")
    return values


def _save(cache_file: Path, records: Mapping[str, FileRecord]) -> None:
    files = {name: asdict(record) for name, record in records.items() if record.sha256}  # a denied one may be allowed
    content = {"version": _VERSION, "files": files}
    try:
        write_json(cache_file, content)
    except (OSError, InputError) as error:
        log.warning("Cannot write %s (%s): the next check reads all images again.", printable(cache_file), error)
