"""Checks of panoptic data and of instance masks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from detr_bf.common.text import printable
from detr_bf.data.annotation_values import annotated_size, is_box, is_id, png_name, value_text
from detr_bf.data.checks.report import CheckList, Split, box_text, image_text, repeated
from detr_bf.data.masks import MapFile, SegmentExtent

_TOLERANCE = 1.0  # pixels by which a side of a box may differ from the mask's without a warning

MASK_CHECKS = CheckList()  # of one split


@MASK_CHECKS.add("error", "isthing-missing", "isthing is not 0 (stuff) or 1 (thing)")
def _categories_without_isthing(split: Split) -> Iterator[str]:
    for category in split.content.categories:
        missing_is_fine = split.content.maps is None and "isthing" not in category
        if not missing_is_fine and category.get("isthing") not in (0, 1):
            name, given = printable(category.get("name")), value_text(category.get("isthing"))
            yield f"{category['id']} ({name}): isthing {given}"


@MASK_CHECKS.add("error", "segment-id-repeated", "one id for several segments of an image")
def _repeated_segment_ids(split: Split) -> Iterator[str]:
    if split.content.maps is not None:
        keys = ((a["image_id"], a["file_name"], a["id"]) for a in split.content.annotations)
        yield from (f"segment {i} of image {image_id}, {printable(name)}" for image_id, name, i in repeated(keys))


@MASK_CHECKS.add("error", "annotation-repeated", "several panoptic annotations for one image")
def _repeated_maps(split: Split) -> Iterator[str]:
    return (f"image {image_id}" for image_id in repeated(file.image_id for file in split.content.maps or ()))


@MASK_CHECKS.add("error", "annotation-missing", "the image has no panoptic annotation")
def _images_without_map(split: Split) -> Iterator[str]:
    if split.masks and split.content.maps is not None:
        with_map = {file.image_id for file in split.content.maps}
        yield from (image_text(image) for image in split.content.images if image["id"] not in with_map)


@MASK_CHECKS.add("error", "annotation-of-no-image", "the panoptic annotation's image is not in images")
def _maps_without_image(split: Split) -> Iterator[str]:
    return (_map(file) for file in split.content.maps or () if split.masks and file.image_id not in split.images)


@MASK_CHECKS.add("error", "output-name", "file_name cannot be turned into the name of a result PNG")
def _invalid_output_names(split: Split) -> Iterator[str]:
    for image in split.content.images if split.maps_wanted else ():
        try:
            png_name(image["file_name"])
        except ValueError as error:
            yield f"image {image['id']} has {error}"


@MASK_CHECKS.add("error", "output-name-repeated", "several images would give result PNGs of the same name")
def _repeated_output_names(split: Split) -> Iterator[str]:
    first: dict[str, Mapping[str, Any]] = {}
    for image in split.content.images if split.maps_wanted else ():
        with suppress(ValueError):
            other = first.setdefault(png_name(image["file_name"]), image)
            if other is not image:
                yield f"{image_text(image)} and {image_text(other)}"


@MASK_CHECKS.add("error", "png-missing", "the panoptic PNG does not exist")
def _missing_maps(split: Split) -> Iterator[str]:
    return (_map(file) for file in split.map_files if file.file_name not in split.maps)


@MASK_CHECKS.add("error", "png-unreadable", "the panoptic PNG cannot be decoded")
def _unreadable_maps(split: Split) -> Iterator[str]:
    for file in split.map_files:
        record = split.maps.get(file.file_name)
        if record and record.problem:
            yield f"{_map(file)}: {record.problem}"


@MASK_CHECKS.add("error", "png-size-differs", "the panoptic PNG and the image differ in size")
def _wrong_map_sizes(split: Split) -> Iterator[str]:
    for file in split.map_files:
        record, image = split.maps.get(file.file_name), split.images.get(file.image_id)
        size = split.size(image) if image else None
        if record and record.size and size and record.size != size:
            yield f"{_map(file)}: {record.size[1]} x {record.size[0]} pixels, the image has {size[1]} x {size[0]}"


@MASK_CHECKS.add("warning", "segment-not-listed", "id in the PNG that the JSON does not list: ignored in training")
def _unlisted_segments(split: Split) -> Iterator[str]:
    listed: dict[str, set[int]] = defaultdict(set)
    for annotation in split.content.annotations if split.map_files else ():
        listed[annotation["file_name"]].add(annotation["id"])
    for file in split.map_files:
        for extent in split.extents.get(file.file_name, {}).values():
            if extent.id not in listed[file.file_name]:
                yield f"{_map(file)}: id {extent.id}, {extent.area} pixels"


@MASK_CHECKS.add("warning", "segment-absent", "no pixel of the PNG has the id: dropped in training")
def _absent_segments(split: Split) -> Iterator[str]:
    return (_segment(annotation) for annotation, extent in _segments_with_extent(split) if extent is None)


@MASK_CHECKS.add("warning", "area-differs", "training uses the PNG's pixels, PQ uses the area")
def _wrong_areas(split: Split) -> Iterator[str]:
    for annotation, extent in _segments_with_extent(split):
        if extent and is_id(annotation.get("area"), 1) and annotation["area"] != extent.area:
            yield f"{_segment(annotation)}: area {annotation.get('area')}, the PNG has {extent.area} pixels"


@MASK_CHECKS.add("warning", "box-differs", "training uses the box of the PNG's pixels, not the bbox")
def _wrong_boxes(split: Split) -> Iterator[str]:
    for annotation, extent in _segments_with_extent(split):
        if extent and is_box(annotation.get("bbox")) and _largest_distance(annotation["bbox"], extent) > _TOLERANCE:
            size = [extent.x1 - extent.x0, extent.y1 - extent.y0]
            yield f"{box_text(annotation)}, the PNG has {[extent.x0, extent.y0, *size]}"


@MASK_CHECKS.add("error", "size-missing", "mask evaluation needs height and width of the image")
def _images_without_size(split: Split) -> Iterator[str]:
    """Return validation images without a size; in training the size of the file is used."""
    if split.masks and split.content.maps is None and split.name == "val":
        yield from (image_text(image) for image in split.content.images if annotated_size(image) is None)


@MASK_CHECKS.add(
    "error",
    "mask-missing",
    "the object has a box and no mask: draw its outline, or train boxes alone (model.masks=false, and no copy_paste)",
    examples=5,
)
def _objects_without_mask(split: Split) -> Iterator[str]:
    if split.masks and split.content.maps is None:
        yield from split.unusable_segmentations[0]


@MASK_CHECKS.add("error", "segmentation-unusable", "the segmentation is not valid")
def _invalid_segmentations(split: Split) -> Iterator[str]:
    if split.masks and split.content.maps is None:
        yield from split.unusable_segmentations[1]


@MASK_CHECKS.add("warning", "mask-outside", "no pixel of the mask is in the image: not trained on, but evaluated")
def _masks_without_pixels(split: Split) -> Iterator[str]:
    if split.masks and split.content.maps is None:
        yield from split.unusable_segmentations[2]


def _largest_distance(bbox: list[float], extent: SegmentExtent) -> float:
    """Return the largest difference of a side in pixels."""
    x, y, width, height = bbox
    return max(abs(x - extent.x0), abs(y - extent.y0), abs(x + width - extent.x1), abs(y + height - extent.y1))


def _segments_with_extent(split: Split) -> Iterator[tuple[Mapping[str, Any], SegmentExtent | None]]:
    """Return the segments of the readable PNGs, each with its extent in the PNG or None."""
    for annotation in split.content.annotations if split.map_files else ():
        extents = split.extents.get(annotation["file_name"])
        if extents is not None:
            yield annotation, extents.get(annotation["id"])


def _map(file: MapFile) -> str:
    return f"image {file.image_id}, {printable(file.file_name)}"


def _segment(annotation: Mapping[str, Any]) -> str:
    return f"segment {annotation['id']} of image {annotation['image_id']}"
