"""The doctor's checks of panoptic data and of instance masks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from detr_bf.data.annotation_values import is_box, is_id, png_name, value_text
from detr_bf.data.checks.report import Check, Split, annotation_text, box_text, image_text, repeated
from detr_bf.data.coco import annotated_size
from detr_bf.data.masks import MapFile, SegmentExtent, parts_of
from detr_bf.text import printable

_TOLERANCE = 1.0  # pixels by which a side of a box may lie beside the mask's before it is worth a warning


def _classes_of_no_kind(split: Split) -> Iterator[str]:
    for category in split.content.categories:
        missing_is_fine = split.content.maps is None and "isthing" not in category
        if not missing_is_fine and category.get("isthing") not in (0, 1):
            name, given = printable(category.get("name")), value_text(category.get("isthing"))
            yield f"{category['id']} ({name}): isthing {given}"


def _repeated_segment_ids(split: Split) -> Iterator[str]:
    if split.content.maps is not None:
        keys = ((a["image_id"], a["file_name"], a["id"]) for a in split.content.annotations)
        yield from (f"segment {i} of image {image_id}, {printable(name)}" for image_id, name, i in repeated(keys))


def _repeated_maps(split: Split) -> Iterator[str]:
    return (f"image {image_id}" for image_id in repeated(file.image_id for file in split.content.maps or ()))


def _images_without_map(split: Split) -> Iterator[str]:
    if split.masks and split.content.maps is not None:
        with_map = {file.image_id for file in split.content.maps}
        yield from (image_text(image) for image in split.content.images if image["id"] not in with_map)


def _maps_of_no_image(split: Split) -> Iterator[str]:
    return (_map(file) for file in split.content.maps or () if split.masks and file.image_id not in split.images)


def _sizes_not_given(split: Split) -> Iterator[str]:
    """Images without a size; checked in validation data alone, as in training the file tells the size."""
    if split.masks and split.content.maps is None and split.name == "val":
        yield from (image_text(image) for image in split.content.images if annotated_size(image) is None)


def _names_of_no_map(split: Split) -> Iterator[str]:
    for image in split.content.images if split.maps_wanted else ():
        try:
            png_name(image["file_name"])
        except ValueError as error:
            yield f"image {image['id']} has {error}"


def _maps_of_one_name(split: Split) -> Iterator[str]:
    first: dict[str, Mapping[str, Any]] = {}
    for image in split.content.images if split.maps_wanted else ():
        with suppress(ValueError):
            other = first.setdefault(png_name(image["file_name"]), image)
            if other is not image:
                yield f"{image_text(image)} and {image_text(other)}"


def _missing_maps(split: Split) -> Iterator[str]:
    return (_map(file) for file in split.map_files if file.file_name not in split.maps)


def _unreadable_maps(split: Split) -> Iterator[str]:
    for file in split.map_files:
        record = split.maps.get(file.file_name)
        if record and record.problem:
            yield f"{_map(file)}: {record.problem}"


def _map_sizes_that_disagree(split: Split) -> Iterator[str]:
    for file in split.map_files:
        record, image = split.maps.get(file.file_name), split.images.get(file.image_id)
        size = split.size(image) if image else None
        if record and record.size and size and record.size != size:
            yield f"{_map(file)}: {record.size[1]} x {record.size[0]} pixels, the image has {size[1]} x {size[0]}"


def _unlisted_segments(split: Split) -> Iterator[str]:
    listed: dict[str, set[int]] = defaultdict(set)
    for annotation in split.content.annotations if split.map_files else ():
        listed[annotation["file_name"]].add(annotation["id"])
    for file in split.map_files:
        for extent in split.extents.get(file.file_name, {}).values():
            if extent.id not in listed[file.file_name]:
                yield f"{_map(file)}: id {extent.id}, {extent.area} pixels"


def _absent_segments(split: Split) -> Iterator[str]:
    return (_segment(annotation) for annotation, extent in _segments(split) if extent is None)


def _areas_that_disagree(split: Split) -> Iterator[str]:
    for annotation, extent in _segments(split):
        if extent and is_id(annotation.get("area"), 1) and annotation["area"] != extent.area:
            yield f"{_segment(annotation)}: area {annotation.get('area')}, the PNG has {extent.area} pixels"


def _boxes_that_disagree(split: Split) -> Iterator[str]:
    for annotation, extent in _segments(split):
        if extent and is_box(annotation.get("bbox")) and _apart(annotation["bbox"], extent) > _TOLERANCE:
            size = [extent.x1 - extent.x0, extent.y1 - extent.y0]
            yield f"{box_text(annotation)}, the PNG has {[extent.x0, extent.y0, *size]}"


def _apart(bbox: list[float], extent: SegmentExtent) -> float:
    """Pixels by which the sides that differ most do."""
    x, y, width, height = bbox
    return max(abs(x - extent.x0), abs(y - extent.y0), abs(x + width - extent.x1), abs(y + height - extent.y1))


def _unusable_segmentations(split: Split) -> Iterator[str]:
    if split.masks and split.content.maps is None:
        for annotation in split.content.annotations:  # crowds too: the evaluation leaves what lies in them out
            image = split.images.get(annotation["image_id"])
            try:
                parts_of(annotation.get("segmentation"), split.size(image) if image else None)
            except ValueError as error:
                yield f"{annotation_text(annotation)}: {error}"


def _segments(split: Split) -> Iterator[tuple[Mapping[str, Any], SegmentExtent | None]]:
    """The segments of the readable PNGs, each with its pixels there, if it has any."""
    for annotation in split.content.annotations if split.map_files else ():
        extents = split.extents.get(annotation["file_name"])
        if extents is not None:
            yield annotation, extents.get(annotation["id"])


def _map(file: MapFile) -> str:
    return f"image {file.image_id}, {printable(file.file_name)}"


def _segment(annotation: Mapping[str, Any]) -> str:
    return f"segment {annotation['id']} of image {annotation['image_id']}"


MASK_CHECKS = (
    Check("error", "isthing-missing", "isthing is not 0 or 1: a thing or stuff?", _classes_of_no_kind),
    Check("error", "segment-id-repeated", "one id for several segments of an image", _repeated_segment_ids),
    Check("error", "annotation-repeated", "several panoptic annotations for one image", _repeated_maps),
    Check("error", "annotation-missing", "the image has no panoptic annotation", _images_without_map),
    Check("error", "annotation-of-no-image", "the panoptic annotation's image is not in images", _maps_of_no_image),
    Check("error", "output-name", "no name for the PNG of the result can be made of file_name", _names_of_no_map),
    Check("error", "output-name-repeated", "the PNGs of the results would have one name", _maps_of_one_name),
    Check("error", "png-missing", "the panoptic PNG does not exist", _missing_maps),
    Check("error", "png-unreadable", "the panoptic PNG cannot be decoded", _unreadable_maps),
    Check("error", "png-size-differs", "the panoptic PNG has not the image's size", _map_sizes_that_disagree),
    Check("warning", "segment-not-listed", "an id of the PNG only: its pixels train nothing", _unlisted_segments),
    Check("warning", "segment-absent", "no pixel of the PNG has the id: dropped in training", _absent_segments),
    Check("warning", "area-differs", "training takes the PNG's pixels, PQ the area", _areas_that_disagree),
    Check("warning", "box-differs", "masks train the PNG's box, not the bbox", _boxes_that_disagree),
    Check("error", "size-missing", "masks are evaluated at the image's height and width", _sizes_not_given),
    Check("error", "segmentation-unusable", "no mask can be made of it", _unusable_segmentations),
)
