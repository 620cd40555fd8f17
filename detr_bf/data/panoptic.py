"""COCO panoptic data: segments as objects, and their masks in PNG files.

Format: https://cocodataset.org/#format-data, "Panoptic Segmentation".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from detr_bf.data.images import MAX_PIXELS, image_bytes, is_deep, open_image
from detr_bf.errors import InputError
from detr_bf.text import printable


class MapFile(NamedTuple):
    """Which PNG cuts an image into segments."""

    image_id: int
    file_name: str


class SegmentExtent(NamedTuple):
    """The pixels of one id in a PNG."""

    id: int
    area: int  # pixels
    x0: int
    y0: int
    x1: int  # last column + 1
    y1: int  # last row + 1


def flat_annotations(entries: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[MapFile, ...]]:
    """One annotation for each segment, as in a detection file, and the PNG of each entry.

    ``id`` is the segment's, which only its image knows, ``file_name`` the PNG's.
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


class SegmentMasks:
    """The masks of many segments: the pixels of a PNG that have the segment's id.

    Args:
        folder: where the PNGs lie.
        files: names, one for each image.
        ids: (N,) int32 ids of all segments.
        max_pixels: that a PNG may have.
    """

    def __init__(self, folder: Path, files: Sequence[str], ids: Tensor, max_pixels: int = MAX_PIXELS) -> None:
        self._folder = folder
        self._files = list(files)
        self._ids = ids
        self._max_pixels = max_pixels

    def read(self, index: int, rows: slice, size: tuple[int, int]) -> Tensor:
        """Masks (T, h, w) uint8 of the segments in ``rows``, for the image at ``index``, of ``size`` (h, w).

        Raises:
            InputError: the PNG is missing or cannot be read.
            ValueError: it has another size.
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
    """What (H, W) segment ids hold, by ascending id, void left out."""
    values, places = np.unique(ids.numpy(), return_inverse=True)
    areas = np.bincount(places.ravel())
    boxes = ndimage.find_objects(places.reshape(ids.shape) + 1)
    return tuple(
        SegmentExtent(int(value), int(area), columns.start, rows.start, columns.stop, rows.stop)
        for value, area, (rows, columns) in zip(values, areas, boxes, strict=True)
        if value
    )
