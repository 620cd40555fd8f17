"""Masks of the objects in COCO files, stored compactly and decoded when a sample is loaded.

Detection files hold polygons or run lengths, panoptic files refer to PNGs of segment ids.
Formats: https://cocodataset.org/#format-data, "Object Detection" and "Panoptic Segmentation"; run lengths as in
``pycocotools.mask``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask
from scipy import ndimage
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.data.annotation_values import MAX_ID, is_id, value_text
from detr_bf.data.images import MAX_PIXELS, image_bytes, is_deep, open_image

_MIN_NUMBERS = 6  # x and y of the three corners of the smallest polygon
FARTHEST = 1e6  # pixels; pycocotools allocates memory for every pixel on an outline
_MAX_MASK = 2**32 - 1  # pixels; pycocotools counts them with 32 bits
_EDGES = (  # neighbour y, x outside of a pixel inside; the edge between them, clockwise: its start and end y, x
    ((-1, 0), (0, 0), (0, 1)),
    ((0, 1), (0, 1), (1, 1)),
    ((1, 0), (1, 1), (1, 0)),
    ((0, -1), (1, 0), (0, 0)),
)
_MAX_CHARACTERS = 7  # of one number in compressed run lengths, five bits each


class Part(NamedTuple):
    """One polygon or one run-length mask of a segmentation, as bytes."""

    data: bytes  # float64 x, y of a polygon, or compressed run lengths
    size: tuple[int, int]  # (height, width) of the run lengths' image; (0, 0) for a polygon


class Segmentations:
    """Masks of many objects of a detection file, stored as one byte string and three tensors.

    Python lists of COCO's tens of millions of coordinates would be copied into every worker process.

    Args:
        parts: for each object, the result of :func:`parts_of`.
    """

    def __init__(self, parts: Iterable[tuple[Part, ...]]) -> None:
        objects = list(parts)
        flat = [part for parts_of_object in objects for part in parts_of_object]
        self.run_lengths_and_polygons = b"".join(part.data for part in flat)
        self._byte_starts = _starts(len(part.data) for part in flat)  # (parts + 1,)
        self._sizes = torch.tensor([part.size for part in flat], dtype=torch.int32).reshape(-1, 2)
        self._part_starts = _starts(map(len, objects))  # (objects + 1,)

    def read(self, index: int, rows: slice, size: tuple[int, int]) -> Tensor:
        """Return masks (T, h, w) uint8 of the objects in ``rows``, for an image of ``size`` (h, w).

        ``index`` of the image is not used.

        Raises:
            ValueError: run lengths are for an image of another size.
        """
        masks = np.zeros((rows.stop - rows.start, *size), dtype=np.uint8)
        for mask, number in zip(masks, range(rows.start, rows.stop), strict=True):
            mask[:] = coco_mask.decode(self._run_lengths(number, size))
        return torch.from_numpy(masks)

    def _run_lengths(self, number: int, size: tuple[int, int]) -> dict[str, Any]:
        """Return the union of all parts of an object as compressed run lengths."""
        found = []
        for part in range(int(self._part_starts[number]), int(self._part_starts[number + 1])):
            data = self.run_lengths_and_polygons[int(self._byte_starts[part]) : int(self._byte_starts[part + 1])]
            height, width = self._sizes[part].tolist()
            if height:
                _check_size((height, width), size)
                found.append({"size": [height, width], "counts": data})
            else:
                found += coco_mask.frPyObjects([np.frombuffer(data)], *size)
        return coco_mask.merge(found)


def has_mask(annotation: Mapping[str, Any]) -> bool:
    """Return True if an annotation of a detection file has a segmentation; some tools write [] for a box alone."""
    return annotation.get("segmentation") not in (None, [])


def parts_of(segmentation: object, size: tuple[int, int] | None = None) -> tuple[Part, ...]:
    """Return the parts of a COCO ``segmentation``: polygons, or run lengths, compressed or not.

    Polygons of fewer than three corners are left out. ``size`` is the (height, width) of the image, if known.

    Raises:
        ValueError: the segmentation is not valid.
    """
    if isinstance(segmentation, dict):
        return (_run_length_part(segmentation, size),)
    if not isinstance(segmentation, list):
        given = "none" if segmentation is None else type(segmentation).__name__
        raise ValueError(f"segmentation is {given}, expected a list of polygons or run lengths")
    polygons = [_polygon(points) for points in segmentation]
    parts = tuple(Part(points.tobytes(), (0, 0)) for points in polygons if len(points) >= _MIN_NUMBERS)
    if not parts:
        raise ValueError("segmentation has no polygon of three or more corners")
    return parts


def covers_a_pixel(parts: Sequence[Part], size: tuple[int, int]) -> bool:
    """Return True if the mask of :func:`parts_of` has a pixel in an image of ``size`` (height, width)."""
    for data, (height, _) in parts:
        if not height and _is_large(np.frombuffer(data).tolist(), size):
            return True
        encoded = (
            {"size": [*size], "counts": data} if height else coco_mask.frPyObjects([np.frombuffer(data)], *size)[0]
        )
        if coco_mask.area(encoded):
            return True
    return False


def _is_large(points: list[float], size: tuple[int, int]) -> bool:
    """Return True for a polygon inside the image whose area exceeds half the circumference of its extent.

    It has a pixel, and need not be drawn, which takes longer.
    """
    xs, ys = points[::2], points[1::2]
    left, top, right, bottom = min(xs), min(ys), max(xs), max(ys)
    if left < 0 or top < 0 or right > size[1] or bottom > size[0]:
        return False
    return polygon_area(points) > right - left + bottom - top


def polygon_area(points: Sequence[float]) -> float:
    """Return the area of a polygon x1, y1, x2, y2, ... without crossings, by the shoelace formula."""
    xs, ys = points[::2], points[1::2]
    return abs(sum(map(mul, xs, [*ys[1:], ys[0]])) - sum(map(mul, ys, [*xs[1:], xs[0]]))) / 2


def _polygon(points: object) -> np.ndarray:
    """Return the coordinates as a float64 array (2 x corners,)."""
    try:
        array = np.array(points if isinstance(points, list) else None)
    except ValueError:  # lists of different lengths
        array = np.array(None)
    numbers = array.ndim == 1 and array.dtype.kind in "if" and np.isfinite(array).all()
    if not numbers or len(array) % 2 or (np.abs(array) > FARTHEST).any():
        raise ValueError(f"polygon {value_text(points)}, expected numbers x, y, x, y, ... in pixels")
    return array.astype(np.float64)


def _run_length_part(segmentation: dict[str, Any], size: tuple[int, int] | None) -> Part:
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
        raise ValueError(f"counts are {value_text(counts)}, expected whole numbers or a compressed string")
    if min(lengths, default=0) < 0 or sum(lengths) != height * width:
        raise ValueError(
            f"run lengths cover {sum(lengths)} pixels, expected lengths of 0 or more that cover {height * width}"
        )
    if isinstance(counts, str):
        return Part(counts.encode("ascii"), (height, width))
    return Part(coco_mask.frPyObjects(segmentation, height, width)["counts"], (height, width))


def _decompressed(counts: str) -> list[int]:
    """Decode compressed run lengths, with checks: pycocotools would read beyond the end of invalid ones.

    A character is 48 + five bits of a number, lowest bits first, + 32 if more follow; the highest bit is the sign. From
    the fourth number on, the difference to the last number but one is stored.
    """
    codes = np.frombuffer(counts.encode("ascii", errors="replace"), dtype=np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(codes < 32)
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or ends[-1:].tolist() != [len(codes) - 1]:
        raise ValueError(f"counts {value_text(counts)} are not compressed run lengths")
    begins = np.concatenate([[0], ends[:-1] + 1])
    characters = ends - begins + 1
    if characters.max() > _MAX_CHARACTERS:
        raise ValueError(f"counts {value_text(counts)} hold a number of more than {_MAX_CHARACTERS * 5} bits")
    digit = np.arange(len(codes)) - np.repeat(begins, characters)
    numbers = np.add.reduceat((codes & 31) << 5 * digit, begins)
    numbers -= np.where(codes[ends] & 16, np.int64(1) << 5 * characters, 0)
    for first in (1, 2):
        numbers[first::2] = numbers[first::2].cumsum()
    return numbers.tolist()


def _check_size(mask: tuple[int, int], image: tuple[int, int]) -> None:
    if mask != image:
        raise ValueError(
            f"run lengths are for {mask[1]} x {mask[0]} pixels (width x height), the image has {image[1]} x {image[0]}"
        )


def _starts(lengths: Iterable[int]) -> Tensor:
    """Return the start of each part, and the end of the last one."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(dim=0)


def outlines(mask: NDArray[np.bool_]) -> list[list[float]]:
    """Return the outline of each connected region of a mask (H, W) as a polygon x1, y1, x2, y2, ..., the largest first.

    The polygons follow the edges of the pixels, so that :func:`parts_of` gives the same mask again, except for holes,
    which are filled: no form of polygons here has them.
    """
    if not mask.any():
        return []
    [(all_rows, all_columns)] = ndimage.find_objects(mask.astype(np.uint8))  # a photograph may be large
    regions, _ = ndimage.label(ndimage.binary_fill_holes(mask[all_rows, all_columns]))
    left, top = all_columns.start - 1, all_rows.start - 1
    found = []
    for number, (rows, columns) in enumerate(ndimage.find_objects(regions), 1):
        inside = np.pad(regions[rows, columns] == number, 1)
        following: dict[tuple[int, int], tuple[int, int]] = {}  # corner of a pixel -> next one, clockwise
        for (dy, dx), (y0, x0), (y1, x1) in _EDGES:
            at = np.argwhere(inside & ~np.roll(inside, (-dy, -dx), (0, 1)))
            following |= {(x + x0, y + y0): (x + x1, y + y1) for y, x in at.tolist()}
        corners = [start := next(iter(following))]
        while (corner := following[corners[-1]]) != start:
            corners.append(corner)
        turns = [
            (x + columns.start + left, y + rows.start + top)
            for (xa, ya), (x, y), (xb, yb) in zip(
                corners[-1:] + corners, corners, corners[1:] + corners[:1], strict=False
            )
            if (x - xa, y - ya) != (xb - x, yb - y)
        ]
        found.append([float(value) for turn in turns for value in turn])
    return sorted(found, key=polygon_area, reverse=True)


def joined(polygons: Sequence[Sequence[float]]) -> list[float]:
    """Return polygons as one, in which lines without width, there and back, lead from the first one to the others."""
    first, *others = polygons
    start = list(first[:2])
    return [*first, *(value for each in others for value in (*start, *each, *each[:2])), *(start if others else [])]


class MapFile(NamedTuple):
    """PNG of segment ids of one image."""

    image_id: int
    file_name: str


class SegmentExtent(NamedTuple):
    """Area and bounding box of one segment id in a PNG."""

    id: int
    area: int  # pixels
    x0: int
    y0: int
    x1: int  # last column + 1
    y1: int  # last row + 1


def flat_annotations(entries: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[MapFile, ...]]:
    """Return the annotations of a panoptic file as one annotation a segment, as in a detection file, and its PNGs.

    ``id`` is the segment's, unique only within its image; ``file_name`` is the PNG's.
    """
    entries = list(entries)
    annotations = [
        {**segment, "image_id": entry["image_id"], "file_name": entry["file_name"]}
        for entry in entries
        for segment in entry["segments_info"]
    ]
    return annotations, tuple(MapFile(entry["image_id"], entry["file_name"]) for entry in entries)


def read_ids(path: Path, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Return the (H, W) int32 segment ids of a PNG, R + 256 G + 65,536 B; 0 is no segment.

    Raises:
        InputError: the file is missing, cannot be read, has more than ``max_pixels`` pixels or no three 8-bit channels.
    """
    try:
        data = image_bytes(path, max_pixels)
        image = open_image(data, max_pixels)
    except FileNotFoundError:
        raise InputError(f"there is no panoptic PNG {printable(path)}") from None
    except ValueError as error:
        raise InputError(f"the panoptic PNG {printable(path)} cannot be read: {error}") from error
    if image.mode not in ("RGB", "RGBA") or is_deep(image, data):
        kind = f"{image.mode} image of 16 bits" if is_deep(image, data) else f"{image.mode} image"
        raise InputError(
            f"{printable(path)} is a {kind}; a COCO panoptic PNG is RGB of 8 bits, its ids R + 256 G + 65536 B"
        )
    pixels = np.asarray(image)[..., :3].astype(np.int32)
    return torch.from_numpy(pixels @ np.array([1, 256, 65536], dtype=np.int32))


def encoded_ids(ids: Tensor) -> bytes:
    """Return (H, W) segment ids as the bytes of a PNG, the inverse of :func:`read_ids`."""
    assert 0 <= int(ids.min()) <= int(ids.max()) <= MAX_ID, "a PNG holds ids of three bytes"
    pixels = torch.stack([ids & 255, ids >> 8 & 255, ids >> 16 & 255], dim=-1).to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.cpu().numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


class SegmentMasks:
    """Masks of many segments of a panoptic file: the pixels of a PNG that have the segment's id.

    Args:
        folder: of the PNGs.
        files: name of the PNG of each image.
        ids: (N,) int32 ids of all segments.
        max_pixels: limit for a PNG.
    """

    def __init__(self, folder: Path, files: Sequence[str], ids: Tensor, max_pixels: int = MAX_PIXELS) -> None:
        self._folder = folder
        self._files = list(files)
        self._ids = ids
        self._max_pixels = max_pixels

    def read(self, index: int, rows: slice, size: tuple[int, int]) -> Tensor:
        """Return masks (T, h, w) uint8 of the segments in ``rows``, for the image at ``index``, of ``size`` (h, w).

        Raises:
            InputError: the PNG is missing or cannot be read.
            ValueError: the PNG has another size.
        """
        path = self._folder / self._files[index]
        pixels = read_ids(path, self._max_pixels)
        if pixels.shape != size:
            height, width = pixels.shape
            raise ValueError(
                f"the panoptic PNG {printable(path)} has {width} x {height} pixels (width x height), "
                f"the image has {size[1]} x {size[0]}"
            )
        return (pixels == self._ids[rows, None, None]).to(torch.uint8)


def segment_extents(ids: Tensor) -> tuple[SegmentExtent, ...]:
    """Return the extents of all segments in (H, W) ids, by ascending id, without void (0)."""
    values, inverse = np.unique(ids.numpy(), return_inverse=True)
    areas = np.bincount(inverse.ravel())
    boxes = ndimage.find_objects(inverse.reshape(ids.shape) + 1)
    return tuple(
        SegmentExtent(int(value), int(area), columns.start, rows.start, columns.stop, rows.stop)
        for value, area, (rows, columns) in zip(values, areas, boxes, strict=True)
        if value
    )
