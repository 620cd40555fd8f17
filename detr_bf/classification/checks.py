"""Checks of labelled images before training; one report lists all findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from detr_bf.classification.data import FileImages, LabelledSplit, LabelledSplits
from detr_bf.common.files import cache_folder
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import counted, printable
from detr_bf.data.checks.annotations import Report
from detr_bf.data.checks.files import ImageRecord, check_files, existing_name
from detr_bf.data.checks.report import Check, repeated, shared_images

_NAMED = 3  # most images of two classes that a message names


@dataclass(frozen=True)
class ExaminedSplit:
    """Split with the records of its files; images in memory have none."""

    split: LabelledSplit
    class_map: ClassMap
    folder: Path = Path()
    names: tuple[str, ...] = ()
    files: Mapping[str, ImageRecord] = field(default_factory=dict)

    def shown(self, name: str) -> str:
        """Return the path of a file for a message."""
        return printable(self.folder / name)

    def labelled_files(self) -> Iterator[tuple[str, int]]:
        """Iterate over file names and labels; empty for images in memory."""
        return zip(self.names, self.split.labels.tolist(), strict=False)


def examine_images(
    splits: LabelledSplits,
    *,
    classify: bool = True,
    cache_dir: Path | None = None,
    workers: int = 1,
) -> Report:
    """Run every check on both splits.

    Args:
        classify: run the checks that only matter to classifiers; False for pre-training.
        cache_dir: cache of file records.
        workers: threads that read the image files missing in the cache.
    """
    cache_dir = cache_dir or cache_folder("doctor")
    train, val = (_examined(split, splits.class_map, cache_dir, workers) for split in (splits.train, splits.val))
    findings = [check.on(name, part) for name, part in (("train", train), ("val", val)) for check in IMAGE_CHECKS]
    findings += [check.on("train", train) for check in TRAIN_CHECKS + (CLASS_CHECKS if classify else ())]
    findings += [check.on("val", val) for check in VAL_CHECKS]
    findings += [check.on("train, val", train, val) for check in IMAGE_PAIR_CHECKS]
    found = sorted((finding for finding in findings if finding), key=lambda finding: finding.severity)
    return Report((_summary("train", train), _summary("val", val)), tuple(found))


def _examined(split: LabelledSplit, class_map: ClassMap, cache_dir: Path, workers: int) -> ExaminedSplit:
    images = split.images
    if not isinstance(images, FileImages):
        return ExaminedSplit(split, class_map)
    files = check_files(ImageRecord, images.folder, images.names, cache_dir, workers, images.max_pixels)
    return ExaminedSplit(split, class_map, images.folder, tuple(images.names), files)


def _summary(name: str, part: ExaminedSplit) -> str:
    classes = counted(part.class_map.num_classes, "class", "classes")
    return f"{name}: {counted(len(part.split), 'image')}, {classes}; from {printable(part.split.origin)}"


def _missing_files(part: ExaminedSplit) -> Iterator[str]:
    for name in part.names:
        if name not in part.files:
            other = existing_name(part.folder, name)
            yield part.shown(name) + (f"; exists as {printable(other)}" if other else "")


def _unreadable_files(part: ExaminedSplit) -> Iterator[str]:
    for name in dict.fromkeys(part.names):
        record = part.files.get(name)
        if record and record.problem:
            yield f"{part.shown(name)}: {record.problem}"


def _deep_images(part: ExaminedSplit) -> Iterator[str]:
    for name in dict.fromkeys(part.names):
        record = part.files.get(name)
        if record and record.depth is not None:
            yield f"{part.shown(name)}: {f'{record.depth} of 16 bits' if record.depth else '16-bit colour'}"


def _repeated_files(part: ExaminedSplit) -> Iterator[str]:
    return (part.shown(name) for name in repeated(part.names))


def _labels_outside(part: ExaminedSplit) -> Iterator[str]:
    labels, classes = part.split.labels, part.class_map.num_classes
    for index in ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist():
        image = part.shown(part.names[index]) if part.names else f"image {index}"
        yield f"{image}: label {int(labels[index])}, {classes} classes"


def _classes_without_images(part: ExaminedSplit) -> Iterator[str]:
    labels, classes = part.split.labels, part.class_map.num_classes
    inside = labels[(labels >= 0) & (labels < classes)]
    for label in (torch.bincount(inside, minlength=classes) == 0).nonzero().flatten().tolist():
        yield f"{label} ({part.class_map.names[label]})"


def _files_of_two_classes(part: ExaminedSplit) -> Iterator[str]:
    labels: dict[str, set[int]] = {}
    for name, label in part.labelled_files():
        labels.setdefault(name, set()).add(label)
    for name, found in labels.items():
        if len(found) > 1:
            yield f"{part.shown(name)}: labels {', '.join(map(str, sorted(found)))}"


def _contents_of_two_classes(part: ExaminedSplit) -> Iterator[str]:
    """Report a pair of files per further class of the same image; the first message lists the first pairs."""
    first: dict[str, dict[int, str]] = {}  # by content: one file per class
    for name, label in part.labelled_files():
        record = part.files.get(name)
        if record and record.sha256:
            first.setdefault(record.sha256, {}).setdefault(label, name)
    cases = []
    for files in first.values():
        (label, name), *others = files.items()
        cases += [
            f"{part.shown(name)} (label {label}) is {part.shown(other)} (label {again})"
            for again, other in others
            if other != name
        ]
    if cases:
        yield "; ".join(cases[:_NAMED])
        yield from cases[1:]


IMAGE_CHECKS = (
    Check("error", "file-missing", "the image file does not exist", _missing_files),
    Check("error", "file-unreadable", "the image cannot be decoded", _unreadable_files),
    Check("warning", "image-16-bit", "scaled to 8 bits: grey from data.grey_bits, colour from 16", _deep_images),
    Check("warning", "file-repeated", "the file is listed twice and counts twice", _repeated_files),
    Check("error", "label-outside", "the label is not a class of the training data", _labels_outside),
)
TRAIN_CHECKS = (Check("error", "class-without-images", "no training image of the class", _classes_without_images),)
CLASS_CHECKS = (
    Check(
        "error",
        "single-class",
        "a classifier needs two or more",
        lambda part: iter(part.class_map.names if part.class_map.num_classes < 2 else ()),
    ),
    Check("error", "file-of-two-classes", "the file is listed with two labels", _files_of_two_classes),
    Check("warning", "image-of-two-classes", "the same image with two labels", _contents_of_two_classes),
)
VAL_CHECKS = (Check("warning", "class-without-images", "the class is not evaluated", _classes_without_images),)
IMAGE_PAIR_CHECKS = (
    Check("warning", "train-val-overlap", "the same image in both: accuracy is too high", shared_images),
)
