"""Values of COCO annotations, read and validated.

The data checks, the data sets and the evaluators call these functions, so they accept the same values. Every function
raises :class:`ValueError` for an invalid value; the message does not name the annotation.

The functions of :class:`Entries` return masks of the annotations that may be invalid, so that only those are examined.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from detr_bf.common.errors import InputError
from detr_bf.common.files import is_number
from detr_bf.data.columns import INT, JSON, AnnotatedSizes, Entries

MAX_ID = 256**3 - 1  # of a segment: three bytes in a PNG
BOX_ROUNDING = 1.0  # pixels by which a box may exceed its image: neither told nor, in evaluation, clipped
MAX_INT = 2**63 - 1  # an int64, the largest id that the evaluation engines read
LARGEST = 1e9  # pixels of a coordinate
_LARGEST_AREA = 1e10  # pixels; upper limit of COCO's evaluation
_LONGEST_NAME = 255  # bytes; limit of nearly every file system
_MOST_BOXES = 100_000  # from which the unit of the boxes is told
_FITTING = 0.95  # share of the boxes that must be possible corners

_text = reprlib.Repr()
_text.maxlevel, _text.maxlist, _text.maxdict, _text.maxstring, _text.maxlong, _text.maxother = 3, 8, 8, 60, 60, 60


class AnnotationValues(NamedTuple):
    """Values of an annotation without its ids and its mask."""

    bbox: list[float]  # x, y, width, height in pixels
    area: float  # pixels
    is_crowd: bool


def annotation_values(annotation: Mapping[str, Any], *, pixels: bool = False) -> AnnotationValues:
    """Return the values of an annotation.

    Args:
        annotation: of a detection file, or a segment of a panoptic one.
        pixels: the annotation is a panoptic segment, which must have an area and ``iscrowd``.
    """
    area = segment_area(annotation) if pixels else object_area(annotation)
    return AnnotationValues(box_of(annotation), area, is_crowd(annotation, required=pixels))


def value_text(value: object) -> str:
    """Return a value of a JSON file as text of at most a few hundred characters."""
    return _text.repr(value)


def is_id(value: object, lowest: int = 0, highest: int = MAX_INT) -> bool:
    """Return True for an integer (not a bool) between the bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def is_box(bbox: object) -> bool:
    """Return True for a list of four finite numbers."""
    return isinstance(bbox, list) and len(bbox) == 4 and all(is_number(value, -LARGEST, LARGEST) for value in bbox)


def box_of(annotation: Mapping[str, Any]) -> list[float]:
    """Return x, y, width and height in pixels."""
    bbox = annotation.get("bbox")
    if not is_box(bbox):
        raise ValueError(
            f"bbox {value_text(bbox)}, expected four finite numbers x, y, width, height, none beyond {LARGEST:.0e}"
        )
    return list(bbox)  # type: ignore[arg-type]


def object_area(annotation: Mapping[str, Any]) -> float:
    """Return the area in pixels; the area of the box if none is given."""
    area = annotation.get("area")
    if area is None:
        _, _, width, height = box_of(annotation)
        return max(0, width) * max(0, height)
    if not is_number(area, 0, _LARGEST_AREA):
        raise ValueError(f"area {value_text(area)}, expected a number of pixels from 0 to {_LARGEST_AREA:.0e}")
    return float(area)


def segment_area(segment: Mapping[str, Any]) -> int:
    """Return the area of a panoptic segment in pixels."""
    area = segment.get("area")
    if not is_id(area, 1):
        raise ValueError(f"area {value_text(area)}, expected a whole number of pixels, 1 or more")
    return int(area)  # type: ignore[arg-type]


def is_crowd(annotation: Mapping[str, Any], required: bool = False) -> bool:
    """Return ``iscrowd``; False if it is missing, which is an error if ``required``."""
    value = annotation.get("iscrowd")
    if (value is not None or required) and not (isinstance(value, (int, float)) and value in (0, 1)):
        raise ValueError(f"iscrowd {value_text(value)}, expected 0 or 1")
    return bool(value)


def segment_id(segment: Mapping[str, Any]) -> int:
    """Return the id of a panoptic segment, the value of its pixels in the PNG."""
    if not is_id(segment.get("id"), 1, MAX_ID):
        raise ValueError(f"id is {value_text(segment.get('id'))}, expected 1 to {MAX_ID}, the range of a PNG's pixels")
    return int(segment["id"])


def png_name(file_name: str) -> str:
    """Return the name of the result PNG of an image, relative to the folder of the results."""
    name = PurePosixPath(file_name)
    if not name.name or name.is_absolute() or ".." in name.parts:
        raise ValueError(f"the file name {value_text(file_name)}, expected a relative one without '..'")
    written = name.with_suffix(".png")
    if "\0" in file_name or len(written.name.encode(errors="surrogatepass")) > _LONGEST_NAME:
        raise ValueError(f"the file name {value_text(file_name)}, which cannot be turned into the name of a PNG file")
    return str(written)


def suspect_ids(annotations: Entries) -> np.ndarray:
    """Return a mask (N,) that includes all annotations with an ``id`` that is no id."""
    return ~((annotations.kinds("id") == INT) & (annotations.numbers("id") >= 0))


def suspect_repeats(annotations: Entries) -> np.ndarray:
    """Return a mask (N,) of the annotations whose ``id`` is not the only one with its number."""
    ids = annotations.numbers("id")
    values, counts = np.unique(ids, return_counts=True)
    return np.isin(ids, values[counts > 1])


def suspect_boxes(annotations: Entries) -> np.ndarray:
    """Return a mask (N,) that includes all annotations for which :func:`is_box` is False."""
    boxes = annotations.boxes
    if boxes is None:
        return np.ones(len(annotations), dtype=bool)
    return np.logical_not(((boxes >= -LARGEST) & (boxes <= LARGEST)).all(axis=1))


def suspect_copies(annotations: Entries) -> np.ndarray:
    """Return a mask (N,) that includes all annotations with image, category and box of another one."""
    if annotations.boxes is None:
        return np.ones(len(annotations), dtype=bool)
    columns = [annotations.numbers(key).astype(np.int64) for key in ("image_id", "category_id")]
    columns += [side.astype(np.float64) + 0.0 for side in annotations.boxes.T]  # + 0.0 makes 0 of -0
    mixed = np.zeros(len(annotations), dtype=np.uint64)
    for column in columns:  # equal annotations have equal hashes, others hardly ever
        mixed = (mixed ^ np.ascontiguousarray(column).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
    _, index, counts = np.unique(mixed, return_inverse=True, return_counts=True)
    return np.asarray(counts[index] > 1)


def suspect_areas(annotations: Entries) -> np.ndarray:
    """Return a mask (N,) that includes all annotations with a box and an invalid area."""
    areas = annotations.numbers("area")
    valid = annotations.is_number("area") & (areas >= 0) & (areas <= _LARGEST_AREA)
    return ~(valid | annotations.is_none("area"))


def suspect_crowds(annotations: Entries) -> np.ndarray:
    """Return a mask (N,) that includes all annotations with an invalid ``iscrowd``."""
    values = annotations.numbers("iscrowd")
    valid = annotations.is_number("iscrowd") & ((values == 0) | (values == 1))
    valid |= _equal_to("iscrowd", annotations, True) | _equal_to("iscrowd", annotations, False)
    return ~(valid | annotations.is_none("iscrowd"))


def crowd_mask(annotations: Entries) -> np.ndarray:
    """Return a mask (N,) of the crowds; an annotation with an invalid ``iscrowd`` is none."""
    numbers = annotations.is_number("iscrowd") & (annotations.numbers("iscrowd") == 1)
    return numbers | _equal_to("iscrowd", annotations, True)


def _equal_to(key: str, annotations: Entries, value: bool) -> np.ndarray:
    """Return a mask (N,) of the annotations whose value under ``key`` is true or false, as given."""
    rows = np.flatnonzero(annotations.kinds(key) == JSON)
    found = np.zeros(len(annotations), dtype=bool)
    if len(rows):
        found[rows] = [each is value for each in annotations.listed(key, rows)]
    return found


def unknown_ids(annotations: Entries, key: str, known: Collection[int]) -> np.ndarray:
    """Return a mask (N,) of the annotations whose id under ``key`` is not known."""
    return ~np.isin(annotations.numbers(key), np.fromiter(known, np.int64, len(known)))


def narrowed(
    annotations: Sequence[Mapping[str, Any]], suspects: Callable[[Entries], np.ndarray]
) -> Sequence[Mapping[str, Any]]:
    """Return the suspect annotations of columns, or all annotations of a list, to be examined one by one."""
    return annotations.where(suspects(annotations)) if isinstance(annotations, Entries) else annotations


def unit_problem(
    annotations: Sequence[Mapping[str, Any]], size_of: Callable[[int], tuple[int, int] | None]
) -> str | None:
    """Return the reason why the boxes of a file cannot be x, y, width and height in pixels; None if they can.

    They are fractions if none is larger than a pixel. They are corners if half of them or more leave their image by
    more than a tenth of its side, although the same numbers as x1, y1, x2, y2 are boxes inside of it.

    Args:
        annotations: with valid boxes, or any others, which are left out. Of many only a part is examined.
        size_of: returns (height, width) of the image with an id, None if it is not known.
    """
    step = max(1, len(annotations) // _MOST_BOXES)
    part = (
        annotations.where(np.arange(0, len(annotations), step))
        if isinstance(annotations, Entries)
        else annotations[::step]
    )
    found = [
        (each["bbox"], each["image_id"]) for each in part if is_box(each.get("bbox")) and min(each["bbox"][2:]) > 0
    ]
    if not found:
        return None
    boxes = np.array([box for box, _ in found], dtype=np.float64)
    x, y, width, height = boxes.T
    if min(boxes[:, 2:].max(), (boxes[:, :2] + boxes[:, 2:]).max()) <= 1:
        return (
            f"no box is larger than a pixel, the first is {value_text(found[0][0])}: these look like fractions of the "
            "image; multiply x and width by the width of the image, and y and height by its height"
        )
    heights, widths = np.array([size_of(image_id) or (np.nan, np.nan) for _, image_id in found]).T
    known = ~np.isnan(heights)
    leaves = (x + width > 1.1 * widths) | (y + height > 1.1 * heights)
    fits = (width > x) & (height > y) & (width <= widths + BOX_ROUNDING) & (height <= heights + BOX_ROUNDING)
    if leaves.any() and leaves.sum() >= known.sum() / 2 and fits[known].mean() > _FITTING:
        example = int(np.flatnonzero(leaves)[0])
        return (
            f"{leaves.sum()} of {known.sum()} boxes leave their image as x, y, width, height, and fit into it as the "
            f"corners x1, y1, x2, y2, such as {value_text(found[example][0])}: write x1, y1, x2 - x1, y2 - y1"
        )
    return None


def annotated_size(image: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (height, width) of an entry of ``images``, or None if missing.

    Raises:
        InputError: they are not numbers.
    """
    height, width = image.get("height"), image.get("width")
    if height is None or width is None:
        return None
    if not (is_number(height, 0, LARGEST) and is_number(width, 0, LARGEST)):
        raise InputError(
            f"image {image['id']} has height {value_text(height)} and width {value_text(width)}, expected numbers of "
            "pixels"
        )
    return int(height), int(width)


def annotated_sizes(images: Sequence[Mapping[str, Any]]) -> Sequence[tuple[int, int] | None]:
    """Return :func:`annotated_size` of all images.

    Raises:
        InputError: a size is not a number.
    """
    if isinstance(images, Entries):
        sides = [images.numbers(key) for key in ("height", "width")]
        known = ~(images.is_none("height") | images.is_none("width"))
        valid = images.is_number("height") & images.is_number("width")
        for side in sides:
            valid &= (side >= 0) & (side <= LARGEST)
        if not (known & ~valid).any():
            sizes = np.stack([side.astype(np.int32) for side in sides], axis=1)
            sizes[~known] = -1
            return AnnotatedSizes(sizes)
    return [annotated_size(image) for image in images]
