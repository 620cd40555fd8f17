"""Checks of the images' own references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from detr_bf.common.text import counted, printable
from detr_bf.data.annotation_values import is_box
from detr_bf.data.checks.files import ImageRecord
from detr_bf.data.checks.report import COMPARED, CheckList, Split, image_text

REFERENCE_CHECKS = CheckList()  # of one split
UNLIKE = 0.2  # share of pixels, beyond that of the boxes, that differ in the median pair if the references are mixed up


def _pairs(split: Split) -> Iterator[tuple[Mapping[str, Any], str, ImageRecord | None]]:
    """Yield each image that has a reference, the text about both, and the record of the reference's file."""
    if split.references is not None:
        for image, file in zip(split.content.images, split.references.files, strict=True):
            if file is not None:
                yield image, f"{image_text(image)}: {printable(file)}", split.references.records.get(file)


@REFERENCE_CHECKS.add("error", "reference-missing", "the file of the reference does not exist")
def _missing(split: Split) -> Iterator[str]:
    return (text for _, text, record in _pairs(split) if record is None)


@REFERENCE_CHECKS.add("error", "reference-unreadable", "the reference cannot be decoded")
def _unreadable(split: Split) -> Iterator[str]:
    return (f"{text}: {record.problem}" for _, text, record in _pairs(split) if record and record.problem)


@REFERENCE_CHECKS.add("error", "reference-size-differs", "the reference has another size than its image")
def _other_sizes(split: Split) -> Iterator[str]:
    for image, text, _ in _pairs(split):
        sizes = split.sizes_of_pair(image)
        if sizes and sizes[0] != sizes[1]:
            ours, theirs = (f"{width} x {height}" for height, width in sizes)
            yield f"{text} has {theirs} pixels (width x height), the image {ours}"


@REFERENCE_CHECKS.add("warning", "reference-none", "no reference: the image attends to itself, or is its own")
def _without(split: Split) -> Iterator[str]:
    if split.references is not None:
        for image, file in zip(split.content.images, split.references.files, strict=True):
            if file is None:
                yield image_text(image)


@REFERENCE_CHECKS.add(
    "warning", "reference-not-aligned", f"moved, the reference fits clearly better; at most {COMPARED} are compared"
)
def _not_aligned(split: Split) -> Iterator[str]:
    for index, found in split.alignments.items():
        if found.moved:
            moves = zip(found.shift[::-1], (("to the left", "to the right"), ("up", "down")), strict=True)
            moved = " and ".join(f"{counted(abs(by), 'pixel')} {ways[by > 0]}" for by, ways in moves if by)
            yield (
                f"{image_text(split.content.images[index])}: {100 * found.differing:.1f} % of the pixels differ, and "
                f"{100 * found.shifted:.1f} % if the reference is moved by {moved}"
            )


@REFERENCE_CHECKS.add(
    "warning", "reference-unlike", f"perhaps the reference of another image; at most {COMPARED} are compared"
)
def _unlike(split: Split) -> Iterator[str]:
    """Yield the pairs that differ outside of their objects far more than the median pair, or most if that one does."""
    if split.references is None:
        return
    covered = _covered(split)
    differing = {index: min(found.differing, found.shifted) for index, found in split.alignments.items()}
    shares = {index: max(0.0, share - covered[index]) for index, share in differing.items()}
    median = float(np.median([*shares.values()])) if shares else 0.0
    limit = UNLIKE if median > UNLIKE else UNLIKE / 2 + 3 * median
    for index in sorted(shares, key=shares.__getitem__, reverse=True):
        if shares[index] > limit:
            yield (
                f"{image_text(split.content.images[index])}: {100 * differing[index]:.1f} % of the pixels differ from "
                f"{printable(split.references.files[index])}, and its boxes cover {100 * covered[index]:.1f} %; in the "
                f"median pair {100 * median:.1f} % more pixels differ than boxes cover"
            )


def _covered(split: Split) -> dict[int, float]:
    """Return the sum of the boxes' shares of each compared image, by its index."""
    indices = {split.content.images[index]["id"]: index for index in split.alignments}
    found = dict.fromkeys(split.alignments, 0.0)
    for annotation in split.content.annotations:
        index = indices.get(annotation["image_id"])
        size = split.size(split.content.images[index]) if index is not None else None
        if index is not None and size and is_box(annotation.get("bbox")):
            width, height = annotation["bbox"][2:]
            found[index] += max(0, width) * max(0, height) / (size[0] * size[1])
    return found


@REFERENCE_CHECKS.add("warning", "reference-is-image", "the image, which has objects, is its own reference", 3)
def _own_images(split: Split) -> Iterator[str]:
    for image, text, record in _pairs(split):
        own = split.file(image)
        if split.objects_per_image[image["id"]] and record and own and record.sha256 == own.sha256 != "":
            yield text


@REFERENCE_CHECKS.add("warning", "reference-has-objects", "the reference is another image, which has objects", 3)
def _marked(split: Split) -> Iterator[str]:
    with_objects = {
        own.sha256: image
        for image in split.content.images
        if split.references is not None and split.objects_per_image[image["id"]] and (own := split.file(image))
    }
    for image, text, record in _pairs(split):
        own, other = split.file(image), with_objects.get(record.sha256 if record else "")
        if other is not None and own and record and record.sha256 not in ("", own.sha256):
            yield f"{text} is {image_text(other)}"


def held_out_references(train: Split, val: Split) -> Iterator[str]:
    """Return the references of training images that are images of val."""
    held_out = {record.sha256: name for name, record in val.files.items() if record.sha256}
    for _, text, record in _pairs(train):
        if record and record.sha256 in held_out:
            yield f"{text} is {printable(val.folder / held_out[record.sha256])}"
