"""Records of image files for the data checks, with a cache, so an unchanged file is read only once.

A file is unchanged if it has the size and the modification time of its record. A record has the SHA-256 of the file,
which finds the same image in two data sets.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from detr_bf.common.errors import InputError
from detr_bf.common.files import is_file, read_json, write_json
from detr_bf.common.progress import progress_bar
from detr_bf.common.text import printable
from detr_bf.data.image_headers import ImageSizes, TooLargeError, any_grey_16
from detr_bf.data.images import MAX_PIXELS, RGB, MissingPackageError, PixelFormat, check_image, image_bytes
from detr_bf.data.masks import SegmentExtent, read_ids, segment_extents
from detr_bf.data.paths import longest_end, path_spellings

log = logging.getLogger(__name__)

_VERSION = 5  # of the cache file; increase it when the meaning of a record changes
_MAX_CACHE_BYTES = 2**31
_SHA256 = re.compile("[0-9a-f]{64}")  # a perceptual hash has the same form
_Data = bytes  # the class below has a field ``bytes``


@dataclass(frozen=True)
class FileRecord(ABC):
    """Content of one file at the time of reading."""

    CACHE: ClassVar[str]  # end of the name of the cache file

    bytes: int
    modified: int  # nanoseconds
    sha256: str  # empty if the file was not read completely
    problem: str = ""  # why it cannot be used

    @staticmethod
    @abstractmethod
    def look(path: Path, data: _Data, max_pixels: int, pixel_format: PixelFormat) -> dict[str, Any]:
        """Return the remaining fields of a record; raise :class:`ValueError` for an unusable file."""

    @staticmethod
    @abstractmethod
    def restored(fields: dict[str, Any]) -> dict[str, Any]:
        """Return the remaining fields of a record read from JSON; raise :class:`ValueError` if invalid."""

    @property
    @abstractmethod
    def pixels(self) -> int:
        """Number of decoded pixels."""


@dataclass(frozen=True)
class ImageRecord(FileRecord):
    """Record of an image."""

    CACHE = ""

    sizes: ImageSizes | None = None  # None for a file that cannot be decoded
    depth: int | None = None  # bits in use of a 16-bit grey image, 0 for 16-bit colour
    phash: str = ""  # perceptual hash; empty for an image of almost one colour
    stored: tuple[int, int] | None = None  # channels and bits of a TIFF file that is read as RGB of 8 bits
    moments: tuple[tuple[float, float], ...] = ()  # mean and mean square of each channel, see CheckedImage

    @staticmethod
    def look(path: Path, data: _Data, max_pixels: int, pixel_format: PixelFormat) -> dict[str, Any]:
        return check_image(data, max_pixels, pixel_format)._asdict()

    @staticmethod
    def restored(fields: dict[str, Any]) -> dict[str, Any]:
        sizes, depth, phash = fields["sizes"], fields["depth"], fields["phash"]
        moments = tuple((float(mean), float(square)) for mean, square in fields["moments"])
        if not all(0 <= value <= 1 for pair in moments for value in pair):
            raise ValueError("invalid moments")
        if not (isinstance(phash, str) and (not phash or _SHA256.fullmatch(phash))):
            raise ValueError("invalid perceptual hash")
        if sizes is not None:
            stored, rotated = (_whole_numbers(sizes[key], 2) for key in ("stored", "rotated"))
            [orientation] = _whole_numbers([sizes["orientation"]], 1)
            sizes = ImageSizes((stored[0], stored[1]), (rotated[0], rotated[1]), orientation)
        depth = None if depth is None else _whole_numbers([depth], 1)[0]
        channels = None if fields["stored"] is None else tuple(_whole_numbers(fields["stored"], 2))
        return {"sizes": sizes, "depth": depth, "phash": phash, "stored": channels, "moments": moments}

    @property
    def pixels(self) -> int:
        return math.prod(self.sizes.stored) if self.sizes else 0


@dataclass(frozen=True)
class MapRecord(FileRecord):
    """Record of a PNG of segment ids."""

    CACHE = "-segments"

    size: tuple[int, int] | None = None  # (height, width); None for a file that cannot be decoded
    segments: tuple[SegmentExtent, ...] = ()

    @staticmethod
    def look(path: Path, data: _Data, max_pixels: int, pixel_format: PixelFormat) -> dict[str, Any]:
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
    pixel_format: PixelFormat = RGB,
) -> dict[str, Record]:
    """Return the records of the named files that exist.

    ``workers`` threads decode the files that are not in the cache, with a progress bar; files of more than
    ``max_pixels`` pixels are not decoded. An interrupted check saves its records in the cache, too. Records in another
    ``pixel_format`` than RGB of 8 bits have a cache of their own.
    """
    digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:24]
    form = "" if pixel_format.is_rgb else f"-{pixel_format.channels}x{pixel_format.depth}"
    if (pixel_format.channels, pixel_format.depth) == (1, 8) and pixel_format.grey_bits is not None:
        form += f"-{pixel_format.grey_bits}"  # the moments are of scaled pixels
    cache_file = cache_dir / f"{digest}{kind.CACHE}{form}.json"
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
                    lambda name: (name, _read(kind, folder / name, present[name], max_pixels, pixel_format)),
                    to_read,
                    chunksize=8,
                )
                title = f"checking {printable(folder)}"
                known.update(progress_bar(read, total=len(to_read), desc=title, unit="image"))
        finally:
            _save(cache_file, known)
    return {name: known[name] for name in present}


def grey_bits_of(folder: Path, names: Sequence[str], records: Callable[[], Mapping[str, ImageRecord]]) -> int | None:
    """Return the bits from which the 16-bit grey images of a data set are scaled to 8 bits: the most that one uses.

    None if it has no such images, by the headers of 500 files. Only otherwise are the ``records`` of all images read.
    """
    if not any_grey_16(folder, names):
        return None
    return max((record.depth or 0 for record in records().values()), default=0) or None


def channel_statistics(records: Iterable[ImageRecord]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel over all pixels, 1 is full brightness; empty without images.

    A channel that is the same everywhere gets a deviation of 0.001.
    """
    known = [record for record in records if record.moments]
    if not known:
        return [], []
    weights = np.array([record.pixels for record in known], dtype=np.float64)
    mean, square = np.average([record.moments for record in known], axis=0, weights=weights).T
    std = np.sqrt(np.maximum(square - mean**2, 1e-6))
    mean, std = ([float(f"{value:.6g}") for value in values] for values in (mean, std))
    return mean, std


def existing_name(folder: Path, name: str) -> str | None:
    """Return the path, relative to ``folder``, of the file that a path to a missing file means, or None.

    Exported annotations often contain a path of another machine or a part of a URL, a suffix in another case, or
    accents in another Unicode form.
    """

    def file_of(end: str) -> str | None:
        return next((spelling for spelling in path_spellings(end) if is_file(folder / spelling)), None)

    return file_of(name) or longest_end(name, file_of)


def _status(folder: Path, name: str) -> tuple[int, int] | None:
    """Return bytes and modification time before reading; a file that changes meanwhile is read again next time.

    None if there is no file; zeros if the file cannot be accessed.
    """
    try:
        status = (folder / name).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _read(
    kind: type[Record], path: Path, status: tuple[int, int], max_pixels: int, pixel_format: PixelFormat
) -> Record:
    sha256 = ""
    try:
        data = image_bytes(path, max_pixels)
        sha256 = hashlib.sha256(data).hexdigest()
        return kind(*status, sha256, **kind.look(path, data, max_pixels, pixel_format))
    except MissingPackageError:  # no fault of the file
        raise
    except TooLargeError as error:  # another limit may allow it
        return kind(*status, sha256="", problem=str(error))
    except (OSError, ValueError) as error:
        return kind(*status, sha256, problem=str(error))


def _load(kind: type[Record], cache_file: Path) -> dict[str, Record]:
    """Return the records of an earlier check; none if there is no valid cache."""
    try:
        content = read_json(cache_file, _MAX_CACHE_BYTES)
        if content["version"] != _VERSION:
            return {}
        return {name: _restored(kind, record) for name, record in content["files"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning(
            "the cache file %s is not valid (%s: %s) and is ignored; all images are read again",
            printable(cache_file),
            type(error).__name__,
            printable(error),
        )
        return {}


def _restored(kind: type[Record], record: dict[str, Any]) -> Record:
    size, modified = _whole_numbers([record["bytes"], record["modified"]], 2)
    sha256, problem = record["sha256"], record["problem"]
    if not (isinstance(sha256, str) and _SHA256.fullmatch(sha256) and isinstance(problem, str)):
        raise ValueError("invalid checksum or problem")
    return kind(size, modified, sha256, problem, **kind.restored(record))


def _whole_numbers(values: Any, count: int) -> list[int]:
    """Return ``values``, checked to be a list of ``count`` integers from 0 to 2**63 - 1."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"expected a list of {count} numbers")
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError("expected integers from 0 to 2**63 - 1")
    return values


def _save(cache_file: Path, records: Mapping[str, FileRecord]) -> None:
    files = {name: asdict(record) for name, record in records.items() if record.sha256}  # read errors are not cached
    content = {"version": _VERSION, "files": files}
    try:
        write_json(cache_file, content)
    except (OSError, InputError) as error:
        log.warning("cannot write %s (%s); the next check will read all images again", printable(cache_file), error)
