"""Checks of annotations and image files, and :func:`examine`, which runs all checks of both splits.

Errors stop training or make its results wrong. Warnings are handled as their line in the table says.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from detr_bf.common.files import cache_folder
from detr_bf.common.text import counted, listed, printable
from detr_bf.data.annotation_values import (
    BOX_ROUNDING,
    annotated_size,
    is_box,
    is_crowd,
    is_id,
    narrowed,
    object_area,
    segment_area,
    suspect_areas,
    suspect_boxes,
    suspect_copies,
    suspect_crowds,
    suspect_ids,
    suspect_repeats,
    unit_problem,
    unknown_ids,
    value_text,
)
from detr_bf.data.checks.alignment import open_references
from detr_bf.data.checks.files import (
    ImageRecord,
    MapRecord,
    channel_statistics,
    check_files,
    existing_name,
    grey_bits_of,
)
from detr_bf.data.checks.learning import Training, learned_from, learning_findings, learning_lines
from detr_bf.data.checks.masks import MASK_CHECKS
from detr_bf.data.checks.references import REFERENCE_CHECKS, held_out_references
from detr_bf.data.checks.report import (
    CheckList,
    Finding,
    Split,
    annotation_text,
    box_text,
    image_text,
    near_duplicates,
    repeated,
    shared_images,
)
from detr_bf.data.checks.statistics import describe_splits, statistics_lines
from detr_bf.data.coco import Source, check_maps, read_annotations
from detr_bf.data.columns import Entries, distinct, values_of
from detr_bf.data.images import MAX_PIXELS, RGB, PixelFormat, check_folder
from detr_bf.data.references import own_files

CHECKS = CheckList()  # of one split
PAIR_CHECKS = CheckList()  # of both splits

CORRECTED = frozenset(  # codes of errors that detr-bf check --fix corrects in detection files, see correction.py
    (
        *("file-missing", "file-unreadable", "size-differs", "image-id-repeated", "category-unknown", "image-unknown"),
        *("box-not-numbers", "iscrowd-unknown", "area-not-number", "mask-missing", "segmentation-unusable"),
        "class-unknown-to-train",
    )
)


@dataclass(frozen=True)
class Report:
    """Result of :func:`examine`."""

    contents: tuple[str, ...]  # one line a split: numbers of images, objects, classes
    findings: tuple[Finding, ...]  # errors first
    statistics: Mapping[str, Any] | None = None  # of detection data without errors, see describe_splits
    learning: tuple[str, ...] = ()  # lines about the boxes and steps of a run on data without errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    @property
    def outcome(self) -> str:
        """Numbers of errors and warnings."""
        return f"{counted(len(self.errors), 'error')}, {counted(len(self.warnings), 'warning')}"

    def __str__(self) -> str:
        """Return the contents, statistics, what is learned from, a table of findings, and a summary line."""
        statistics = statistics_lines(self.statistics) if self.statistics else ()
        table = _table(self.findings) if self.findings else ()
        return "\n".join((*self.contents, *statistics, *self.learning, *table, self.outcome))


def examine(
    train: Source,
    val: Source | None,
    *,
    num_queries: int,
    masks: bool = False,
    train_masks: bool = False,
    joined: int = 1,
    max_detections: int = 100,
    cache_dir: Path | None = None,
    workers: int = 1,
    max_pixels: int = MAX_PIXELS,
    pixel_format: PixelFormat = RGB,
    training: Training | None = None,
    references: Mapping[str, Path | None] | None = None,
) -> Report:
    """Run all checks on the training split and, if given, the validation split.

    Args:
        train, val: paths of the splits; val may be None.
        num_queries: number of objects that the detector can find in an image.
        masks: check the masks too.
        train_masks: check those of the training split too, even without ``masks``.
        joined: training images that augmentation joins in one, at most.
        max_detections: detections of a validation image that count.
        cache_dir: folder of the cache of image files that were read before.
        workers: threads that read image files.
        max_pixels: limit of an image.
        pixel_format: of the images; without grey_bits those that the training images use are taken.
        training: settings of a run, whose data and steps are then described and judged.
        references: by split the folder of the images' own references, None: that of the images.

    Raises:
        InputError: a folder is missing, a file is not a COCO file, or no image has a reference.
    """
    reading = cache_dir or cache_folder("doctor"), workers, max_pixels, pixel_format
    named = {"train": train} | ({"val": val} if val else {})
    splits = [
        _open(name, source, num_queries, masks or (train_masks and name == "train"), *reading)
        for name, source in named.items()
    ]
    splits = [_with_references(split, references or {}, *reading) for split in splits]
    splits[0] = replace(splits[0], joined=joined)
    bits = pixel_format.grey_bits or grey_bits_of(train.images, list(splits[0].files), lambda: splits[0].files)
    splits = [_scaled_from(split, bits, *reading) for split in splits]
    splits[1:] = [replace(split, max_detections=max_detections) for split in splits[1:]]
    checks = [(split, check) for split in splits for check in (*CHECKS, *MASK_CHECKS, *REFERENCE_CHECKS)]
    findings = [finding for split, check in checks if (finding := check.on(split.name, split))]
    if len(splits) == 2:
        findings += [finding for check in PAIR_CHECKS if (finding := check.on("train, val", *splits))]
    findings.sort(key=lambda finding: finding.severity)
    contents = tuple(_summary(split) for split in splits)
    if any(finding.severity == "error" for finding in findings):
        return Report(contents, tuple(findings))
    learning: tuple[str, ...] = ()
    if training is not None:
        learned = learned_from(splits[0], training)
        findings += learning_findings(learned, splits[1] if val else None, training)
        learning = tuple(learning_lines(learned, training))
    return Report(contents, tuple(findings), describe_splits(splits), learning)


def _open(
    name: str,
    source: Source,
    num_queries: int,
    masks: bool,
    cache: Path,
    workers: int,
    max_pixels: int,
    pixel_format: PixelFormat,
) -> Split:
    check_folder(source.images)
    content = read_annotations(source.annotations)
    check_maps(content, source.panoptic, masks)
    file_names = values_of(content.images, "file_name")
    files = check_files(ImageRecord, source.images, file_names, cache, workers, max_pixels, pixel_format)
    maps = {}
    if masks and source.panoptic is not None:
        map_names = [file.file_name for file in content.maps or ()]
        maps = check_files(MapRecord, source.panoptic, map_names, cache, workers, max_pixels)
    return Split(name, source.images, content, files, num_queries, masks, maps, skipped=source.skipped)


def _with_references(
    split: Split,
    folders: Mapping[str, Path | None],
    cache: Path,
    workers: int,
    max_pixels: int,
    pixel_format: PixelFormat,
) -> Split:
    if split.name not in folders:
        return split
    files = own_files(split.content.images, split.folder, folders[split.name])
    found = open_references(files, folders[split.name] or split.folder, cache, workers, max_pixels, pixel_format)
    return replace(split, references=found)


def _scaled_from(
    split: Split, bits: int | None, cache: Path, workers: int, max_pixels: int, pixel_format: PixelFormat
) -> Split:
    """Return the split with these grey_bits; images of one channel are read again, for the mean of scaled pixels."""
    form, files = replace(pixel_format, grey_bits=bits), split.files
    if (form.channels, form.depth) == (1, 8) and form != pixel_format:
        files = check_files(ImageRecord, split.folder, list(files), cache, workers, max_pixels, form)
    return replace(split, pixel_format=form, files=files)


def _summary(split: Split) -> str:
    counts = ((len(split.content.images), "image"), (len(split.objects), "object"), (len(split.names), "class"))
    numbers = ", ".join(counted(number, noun, "classes" if noun == "class" else "") for number, noun in counts)
    summary = f"{split.name}: {numbers}; file {printable(split.content.path)}"
    mean, std = channel_statistics(split.files.values())
    if not mean:
        return summary
    channels = (f"{number}: {m:.4g} +- {s:.4g}" for number, (m, s) in enumerate(zip(mean, std, strict=True), 1))
    return f"{summary}; mean and standard deviation of the channels: {listed(channels, 16)}"


@CHECKS.add("error", "file-missing", "the image file does not exist")
def _missing_files(split: Split) -> Iterator[str]:
    for image in split.content.images:
        if not split.file(image):
            other = existing_name(split.folder, image["file_name"])
            yield image_text(image) + (f"; exists as {printable(other)}: --fix renames it" if other else "")


@CHECKS.add("error", "file-unreadable", "the image cannot be decoded")
def _unreadable_files(split: Split) -> Iterator[str]:
    for image in split.content.images:
        record = split.file(image)
        if record and record.problem:
            yield f"{image_text(image)}: {record.problem}"


@CHECKS.add("warning", "file-skipped", "the image cannot be decoded: left out (data.skip_unreadable)", 3)
def _skipped_files(split: Split) -> Iterator[str]:
    yield from split.skipped


@CHECKS.add("error", "size-differs", "width and height are not the file's")
def _wrong_sizes(split: Split) -> Iterator[str]:
    for image in split.content.images:
        record = split.file(image)
        if record and record.sizes:
            try:
                record.sizes.wants_rotation(annotated_size(image))
            except ValueError as error:
                yield f"{image_text(image)}: {error}"


@CHECKS.add("warning", "size-not-rotated", "size before EXIF rotation, or that of other images: not rotated")
def _sizes_before_rotation(split: Split) -> Iterator[str]:
    for image in split.content.images:
        record, size = split.file(image), annotated_size(image)
        if record and record.sizes and size == record.sizes.stored != record.sizes.rotated:
            yield f"{image_text(image)}: {size[1]} x {size[0]} pixels"
    if split.as_stored:
        yield from _same_sizes(split)


@CHECKS.add("warning", "rotation-unknown", "EXIF rotation is applied: neither size nor other images tell")
def _unknown_rotations(split: Split) -> Iterator[str]:
    """Return the images that are rotated without knowing if their boxes are."""
    if split.as_stored is None:
        yield from _same_sizes(split)


def _same_sizes(split: Split) -> Iterator[str]:
    """Return the images with an EXIF rotation that have the annotated size before and after it."""
    for image in split.content.images:
        record = split.file(image)
        sizes = record.sizes if record else None
        if sizes and sizes.orientation != 1 and annotated_size(image) == sizes.stored == sizes.rotated:
            yield f"{image_text(image)}: EXIF orientation {sizes.orientation}"


@CHECKS.add("warning", "image-16-bit", "scaled to 8 bits: grey from data.grey_bits, colour from the upper 8")
def _images_of_16_bits(split: Split) -> Iterator[str]:
    scaled = "its own" if split.pixel_format.grey_bits is None else str(split.pixel_format.grey_bits)
    for image in split.content.images:
        record = split.file(image)
        if record and record.depth is not None:
            used = f"{record.depth} bits in use, scaled from {scaled}" if record.depth else "16-bit colour"
            yield f"{image_text(image)}: {used}"


@CHECKS.add("warning", "image-channels", "read as RGB of 8 bits, of several pages the first; see data.channels")
def _images_of_other_channels(split: Split) -> Iterator[str]:
    for image in split.content.images:
        record = split.file(image)
        if record and record.stored:
            yield f"{image_text(image)}: {record.stored[0]} channels of {record.stored[1]} bits"


@CHECKS.add("warning", "grey-bits-exceeded", "values beyond data.grey_bits become white")
def _too_deep_images(split: Split) -> Iterator[str]:
    for image in split.content.images:
        record = split.file(image)
        bits = split.pixel_format.grey_bits
        if record and (record.depth or 0) > (bits or 16):
            yield f"{image_text(image)}: {record.depth} bits in use, scaled from {bits}"


@CHECKS.add("error", "image-id-repeated", "one id for several images")
def _repeated_image_ids(split: Split) -> Iterator[str]:
    return (f"id {value}" for value in repeated(values_of(split.content.images, "id")))


@CHECKS.add("warning", "annotation-id-repeated", "ids are not used here, but other tools need distinct ones")
def _repeated_annotation_ids(split: Split) -> Iterator[str]:
    if split.content.maps is None:  # segment ids are unique only within an image
        ids = repeated(a["id"] for a in narrowed(split.content.annotations, suspect_repeats) if is_id(a.get("id")))
        yield from (f"id {value}" for value in ids)


@CHECKS.add("warning", "annotation-id-no-number", "ids are not used here, but other tools need numbers")
def _invalid_annotation_ids(split: Split) -> Iterator[str]:
    suspects = narrowed(split.content.annotations, suspect_ids)
    return (annotation_text(a) for a in suspects if "id" in a and not is_id(a["id"]))


@CHECKS.add("warning", "file-repeated", "the file is listed several times and counts each time")
def _repeated_files(split: Split) -> Iterator[str]:
    return (str(value) for value in repeated(values_of(split.content.images, "file_name")))


@CHECKS.add("error", "category-unknown", "the category is not in categories")
def _unknown_categories(split: Split) -> Iterator[str]:
    for annotation in narrowed(split.content.annotations, lambda all_: unknown_ids(all_, "category_id", split.names)):
        if annotation["category_id"] not in split.names:
            yield f"{annotation_text(annotation)}: category {annotation['category_id']}"


@CHECKS.add("error", "image-unknown", "the annotation's image is not in images")
def _unknown_images(split: Split) -> Iterator[str]:
    suspects = narrowed(split.content.annotations, lambda all_: unknown_ids(all_, "image_id", split.images))
    return (annotation_text(a) for a in suspects if a["image_id"] not in split.images)


@CHECKS.add("error", "box-not-numbers", "bbox is not four finite numbers")
def _invalid_boxes(split: Split) -> Iterator[str]:
    suspects = narrowed(split.content.annotations, suspect_boxes)
    return (box_text(annotation) for annotation in suspects if not is_box(annotation.get("bbox")))


@CHECKS.add("error", "box-units", "boxes are not x, y, width, height in pixels")
def _boxes_in_other_units(split: Split) -> Iterator[str]:
    def size_of(image_id: int) -> tuple[int, int] | None:
        image = split.images.get(image_id)
        return split.size(image) if image else None

    if not split.maps_wanted and (problem := unit_problem(split.content.annotations, size_of)):
        yield problem


@CHECKS.add("error", "iscrowd-unknown", "iscrowd is not 0 or 1")
def _invalid_iscrowd(split: Split) -> Iterator[str]:
    suspects = narrowed(split.content.annotations, suspect_crowds)
    return _invalid_values(suspects, partial(is_crowd, required=split.maps_wanted))


@CHECKS.add("error", "area-not-number", "area is not a number; the evaluation needs it")
def _invalid_areas(split: Split) -> Iterator[str]:
    suspects = narrowed(split.content.annotations, suspect_areas)
    boxes = (a for a in suspects if split.maps_wanted or is_box(a.get("bbox")))
    return _invalid_values(boxes, segment_area if split.maps_wanted else object_area)


@CHECKS.add("warning", "box-without-area", "width or height is not positive: dropped, in evaluation too")
def _boxes_without_area(split: Split) -> Iterator[str]:
    for annotation in narrowed(split.objects, _without_area):
        if is_box(annotation.get("bbox")) and min(annotation["bbox"][2:]) <= 0:
            yield box_text(annotation)


@CHECKS.add("warning", "box-outside", "the box exceeds the image: clipped (dropped if outside), in evaluation too")
def _boxes_outside(split: Split) -> Iterator[str]:
    for annotation in narrowed(split.objects, partial(_may_exceed, split)):
        image = split.images.get(annotation["image_id"])
        size = split.size(image) if image else None
        if size and is_box(annotation.get("bbox")) and exceeds(annotation["bbox"], size):
            yield f"{box_text(annotation)} in {size[1]} x {size[0]} pixels"


@CHECKS.add("warning", "object-repeated", "the image, class and box of another object: each copy must be found")
def _repeated_objects(split: Split) -> Iterator[str]:
    if split.content.maps is not None:  # segments of different pixels
        return
    seen = set()
    for annotation in narrowed(split.objects, suspect_copies):
        if is_box(annotation.get("bbox")):
            key = (annotation["image_id"], annotation["category_id"], *annotation["bbox"])
            if key in seen:
                yield box_text(annotation)
            seen.add(key)


@CHECKS.add("warning", "image-without-objects", "kept as a background image")
def _images_without_objects(split: Split) -> Iterator[str]:
    if split.objects:
        yield from (image_text(image) for image in split.content.images if not split.objects_per_image[image["id"]])


@CHECKS.add("error", "no-objects", "no image has an object")
def _no_objects(split: Split) -> Iterator[str]:
    if not split.objects:
        yield (
            f"{len(split.content.annotations)} annotations, all of them crowds" if split.content.annotations else "none"
        )


@CHECKS.add("warning", "too-many-objects", "more objects than queries: some cannot be found")
def _too_many_objects(split: Split) -> Iterator[str]:
    for image_id, count in split.objects_per_image.items():
        if count > split.num_queries:
            yield f"image {image_id}: {count} objects, {split.num_queries} queries"


@CHECKS.add("warning", "more-objects-than-detections", "more objects than eval.max_detections: the rest is not found")
def _more_objects_than_detections(split: Split) -> Iterator[str]:
    limit = split.max_detections
    if limit is not None and split.objects:
        most = max(split.objects_per_image.values())
        for image_id, count in split.objects_per_image.items():
            if count > limit:
                yield f"image {image_id}: {count} objects; set eval.max_detections={most} or more (now {limit})"


@CHECKS.add("warning", "too-many-joined", "mosaic and mixup join more objects than queries: some cannot be found")
def _too_many_joined(split: Split) -> Iterator[str]:
    objects = split.joined * len(split.objects) / max(1, len(split.content.images))
    if split.joined > 1 and objects > split.num_queries:
        yield f"{split.joined} images with {objects:.0f} objects on average, {split.num_queries} queries"


@CHECKS.add("warning", "class-without-examples", "the class has no object")
def _classes_without_examples(split: Split) -> Iterator[str]:
    used = distinct(split.objects, "category_id")
    return (f"{category_id} ({name})" for category_id, name in split.names.items() if category_id not in used)


@CHECKS.add("warning", "class-name-repeated", "classes whose names differ in case or spaces only, or not at all")
def _repeated_class_names(split: Split) -> Iterator[str]:
    same: dict[str, list[str]] = defaultdict(list)
    for category in split.content.categories:
        if category["id"] in split.names and isinstance(name := category.get("name"), str):
            same[unicodedata.normalize("NFC", name.strip().casefold())].append(f"{category['id']} ({value_text(name)})")
    return (", ".join(classes) for classes in same.values() if len(classes) > 1)


@CHECKS.add("warning", "category-dropped", "supercategory of others without objects: not a class")
def _parent_categories(split: Split) -> Iterator[str]:
    return (f"{category['id']} ({category['name']})" for category in split.content.parents)


@PAIR_CHECKS.add("error", "class-unknown-to-train", "val uses a class that train lacks")
def _classes_unknown_to_train(train: Split, val: Split) -> Iterator[str]:
    used = distinct(val.content.annotations, "category_id")
    return (f"{i} ({val.names[i]})" for i in sorted(used & set(val.names)) if i not in train.names)


@PAIR_CHECKS.add("error", "class-name-differs", "the category id has another name in the other split")
def _classes_with_two_names(train: Split, val: Split) -> Iterator[str]:
    for category_id, name in val.names.items():
        if train.names.get(category_id, name) != name:
            yield f"{category_id} is {train.names[category_id]} in train, {name} in val"


@PAIR_CHECKS.add("error", "class-kind-differs", "a thing in one split, stuff in the other")
def _classes_thing_and_stuff(train: Split, val: Split) -> Iterator[str]:
    kinds = dict(zip(train.names, train.content.class_map.is_thing, strict=True))
    for category_id, is_thing in zip(val.names, val.content.class_map.is_thing, strict=True):
        if train.maps_wanted and kinds.get(category_id, is_thing) != is_thing:
            yield f"{category_id} ({val.names[category_id]})"


PAIR_CHECKS.add("warning", "train-val-overlap", "the same image in both splits: the AP is too high", 3)(shared_images)
PAIR_CHECKS.add("warning", "reference-in-val", "the reference of a training image is an image of val", 3)(
    held_out_references
)
PAIR_CHECKS.add("warning", "near-duplicates", "copies of training images in val: the AP is too high", 3)(
    near_duplicates
)


def _invalid_values(
    annotations: Iterable[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Any]
) -> Iterator[str]:
    """Return the annotations for which ``read`` raises :class:`ValueError`."""
    for annotation in annotations:
        try:
            read(annotation)
        except ValueError as error:
            yield f"{annotation_text(annotation)}: {error}"


def _without_area(objects: Entries) -> np.ndarray:
    """Return a mask (N,) that includes all objects whose box has no area."""
    return suspect_boxes(objects) if objects.boxes is None else objects.boxes[:, 2:].min(axis=1) <= 0


def _may_exceed(split: Split, objects: Entries) -> np.ndarray:
    """Return a mask (N,) that includes all objects that :func:`exceeds` finds."""
    if objects.boxes is None:
        return suspect_boxes(objects)
    x, y, width, height = np.asarray(objects.boxes, dtype=np.float64).T
    heights, widths = split.sizes_of(objects).T
    return np.asarray(np.minimum.reduce([x, y, widths - (x + width), heights - (y + height)]) < -BOX_ROUNDING)


def exceeds(bbox: list[float], size: tuple[int, int]) -> bool:
    """Return True if a box x, y, width, height leaves an image of ``size`` (h, w) by more than a rounding error."""
    x, y, width, height = bbox
    return min(x, y, size[1] - (x + width), size[0] - (y + height)) < -BOX_ROUNDING


def _table(findings: Sequence[Finding]) -> list[str]:
    """Return the findings as lines of aligned columns."""
    rows = [("severity", "data", "check", "count", "meaning", "example")]
    rows += [(f.severity, f.split, f.code, str(f.count), f.meaning, f.example) for f in findings]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
