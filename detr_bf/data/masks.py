"""Instance masks of COCO detection files: kept compactly, drawn when a sample is loaded.

Formats: https://cocodataset.org/#format-data, ``segmentation``; run lengths as in ``pycocotools.mask``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from pycocotools import mask as coco_mask
from torch import Tensor

from detr_bf.data.annotation_values import is_id, value_text

_MIN_NUMBERS = 6  # x and y of the three corners that a polygon needs to enclose anything
_FARTHEST = 1e6  # pixels; pycocotools takes memory for every pixel that an outline passes
_MAX_MASK = 2**32 - 1  # pixels; pycocotools counts them with 32 bits
_MAX_CHARACTERS = 7  # of one number in compressed run lengths, five bits each


class Part(NamedTuple):
    """One piece of a segmentation as bytes."""

    data: bytes  # float64 x, y of a polygon, or compressed run lengths
    size: tuple[int, int]  # (height, width) of the image the run lengths are for; (0, 0) for a polygon


class Segmentations:
    """The masks of many objects as one string of bytes and three tensors.

    Not as lists: COCO has tens of millions of coordinates, and of Python objects every worker would end up with a copy.

    Args:
        parts: what :func:`parts_of` made of each object's segmentation.
    """

    def __init__(self, parts: Iterable[tuple[Part, ...]]) -> None:
        objects = list(parts)
        flat = [part for parts_of_object in objects for part in parts_of_object]
        self._bytes = b"".join(part.data for part in flat)
        self._byte_starts = _starts(len(part.data) for part in flat)  # (parts + 1,)
        self._sizes = torch.tensor([part.size for part in flat], dtype=torch.int32).reshape(-1, 2)
        self._part_starts = _starts(map(len, objects))  # (objects + 1,)

    def read(self, index: int, rows: slice, size: tuple[int, int]) -> Tensor:
        """Masks (T, h, w) uint8 of the objects in ``rows``, for an image of ``size`` (h, w).

        Raises:
            ValueError: run lengths are for an image of another size.
        """
        masks = np.zeros((rows.stop - rows.start, *size), dtype=np.uint8)
        for mask, number in zip(masks, range(rows.start, rows.stop), strict=True):
            mask[:] = coco_mask.decode(self._run_lengths(number, size))
        return torch.from_numpy(masks)

    def _run_lengths(self, number: int, size: tuple[int, int]) -> dict[str, Any]:
        """All parts of an object in one mask, compressed."""
        found = []
        for part in range(int(self._part_starts[number]), int(self._part_starts[number + 1])):
            data = self._bytes[int(self._byte_starts[part]) : int(self._byte_starts[part + 1])]
            height, width = self._sizes[part].tolist()
            if height:
                _check_size((height, width), size)
                found.append({"size": [height, width], "counts": data})
            else:
                found += coco_mask.frPyObjects([np.frombuffer(data)], *size)
        return coco_mask.merge(found)


def parts_of(segmentation: object, size: tuple[int, int] | None = None) -> tuple[Part, ...]:
    """The pieces of a COCO ``segmentation``: polygons, or run lengths, compressed or not.

    Polygons of fewer than three corners enclose nothing and are left out. ``size`` is the (height, width) of the image,
    where it is known.

    Raises:
        ValueError: no mask can be made of it; the message says why.
    """
    if isinstance(segmentation, dict):
        return (_run_lengths(segmentation, size),)
    if not isinstance(segmentation, list):
        given = "none" if segmentation is None else type(segmentation).__name__
        raise ValueError(f"segmentation is {given}, expected a list of polygons or run lengths")
    polygons = [_polygon(points) for points in segmentation]
    parts = tuple(Part(points.tobytes(), (0, 0)) for points in polygons if len(points) >= _MIN_NUMBERS)
    if not parts:
        raise ValueError("segmentation has no polygon of three or more corners")
    return parts


def _polygon(points: object) -> np.ndarray:
    """(2 x corners,) float64."""
    try:
        array = np.array(points if isinstance(points, list) else None)
    except ValueError:  # lists of different lengths
        array = np.array(None)
    numbers = array.ndim == 1 and array.dtype.kind in "if" and np.isfinite(array).all()
    if not numbers or len(array) % 2 or (np.abs(array) > _FARTHEST).any():
        raise ValueError(f"polygon {value_text(points)}, expected numbers x, y, x, y, ... in pixels")
    return array.astype(np.float64)


def _run_lengths(segmentation: dict[str, Any], size: tuple[int, int] | None) -> Part:
    given, counts = segmentation.get("size"), segmentation.get("counts")
    if not (isinstance(given, list) and len(given) == 2 and all(is_id(side, 1) for side in given)):
        raise ValueError(f"run lengths of size {value_text(given)}, expected [height, width] in pixels")
    height, width = given
    if height * width > _MAX_MASK:
        raise ValueError(f"run lengths for {width} x {height} pixels, expected {_MAX_MASK} pixels at most")
    if size is not None:
        _check_size((height, width), size)
    if isinstance(counts, str):
        lengths = _decompressed(counts)
    elif isinstance(counts, list) and all(type(length) is int for length in counts):
        lengths = counts
    else:
        raise ValueError(f"counts are {value_text(counts)}, expected whole numbers or a string of compressed ones")
    if min(lengths, default=0) < 0 or sum(lengths) != height * width:
        raise ValueError(
            f"run lengths cover {sum(lengths)} pixels, expected lengths of 0 or more that cover {height * width}"
        )
    if isinstance(counts, str):
        return Part(counts.encode("ascii"), (height, width))
    return Part(coco_mask.frPyObjects(segmentation, height, width)["counts"], (height, width))


def _decompressed(counts: str) -> list[int]:
    """The lengths that compressed run lengths stand for; pycocotools would read beyond what does not add up.

    A character is 48 + five bits of a number, lowest first, + 32 if more follow; the highest bit is the sign. From the
    fourth number on, it is the difference to the last but one.
    """
    codes = np.frombuffer(counts.encode("ascii", errors="replace"), dtype=np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(codes < 32)
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or ends[-1:].tolist() != [len(codes) - 1]:
        raise ValueError(f"counts {value_text(counts)} are not compressed run lengths")
    begins = np.concatenate([[0], ends[:-1] + 1])
    characters = ends - begins + 1
    if characters.max() > _MAX_CHARACTERS:
        raise ValueError(f"counts {value_text(counts)} hold a number of more than {_MAX_CHARACTERS * 5} bits")
    place = np.arange(len(codes)) - np.repeat(begins, characters)
    numbers = np.add.reduceat((codes & 31) << 5 * place, begins)
    numbers -= np.where(codes[ends] & 16, np.int64(1) << 5 * characters, 0)
    for first in (1, 2):
        numbers[first::2] = numbers[first::2].cumsum()
    return numbers.tolist()


def _check_size(made_for: tuple[int, int], size: tuple[int, int]) -> None:
    if made_for != size:
        raise ValueError(
            f"run lengths are for {made_for[1]} x {made_for[0]} pixels (width x height), "
            f"the image has {size[1]} x {size[0]}"
        )


def _starts(lengths: Iterable[int]) -> Tensor:
    """Where pieces of these lengths start, and where the last one ends."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(dim=0)
