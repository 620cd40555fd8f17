"""The masks of ground truth as COCO's compressed run lengths, whatever form they have in the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from detr_bf.data.annotation_values import value_text
from detr_bf.data.coco import CocoAnnotations, annotated_size, check_maps
from detr_bf.data.masks import Segmentations, parts_of, read_ids
from detr_bf.errors import InputError
from detr_bf.postprocess import encoded


def with_run_lengths(content: CocoAnnotations, panoptic: Path | None, max_pixels: int) -> CocoAnnotations:
    """The same annotations with ``segmentation`` as run lengths: from PNG files, polygons or other run lengths.

    PNGs may have ``max_pixels`` pixels.

    Raises:
        InputError: a file or a mask cannot be read, or the size of an image is not known.
    """
    check_maps(content, panoptic, masks=True)
    found = _of_maps(content, panoptic, max_pixels) if panoptic is not None else _of_segmentations(content)
    return replace(content, annotations=list(found))


def _of_maps(content: CocoAnnotations, folder: Path, max_pixels: int) -> Iterator[dict[str, Any]]:
    """Segments stand image by image in the file."""
    for file_name, segments in groupby(content.annotations, key=lambda segment: segment["file_name"]):
        ids = read_ids(folder / file_name, max_pixels)
        for segment in segments:
            yield {**segment, "segmentation": encoded((ids == segment["id"])[None])[0]}


def _of_segmentations(content: CocoAnnotations) -> Iterator[dict[str, Any]]:
    sizes = {image["id"]: annotated_size(image) for image in content.images}
    for annotation in content.annotations:
        if annotation["image_id"] in sizes:  # the others are not evaluated
            yield {**annotation, "segmentation": _run_lengths(annotation, sizes[annotation["image_id"]])}


def _run_lengths(annotation: Mapping[str, Any], size: tuple[int, int] | None) -> dict[str, Any]:
    where = f"annotation {value_text(annotation.get('id'))} of image {annotation['image_id']}"
    if size is None:
        raise InputError(f"{where}: masks are evaluated at the size of the image; give its height and width in images")
    try:
        masks = Segmentations([parts_of(annotation.get("segmentation"), size)]).read(0, slice(0, 1), size)
    except ValueError as error:
        raise InputError(f"{where} has no usable mask: {error}; tools/check_data.py lists all of them") from error
    return encoded(masks)[0]
