"""Checks of images with maps of classes before training; one report lists all findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

from detr_bf.common.errors import InputError
from detr_bf.common.files import cache_folder
from detr_bf.common.progress import progress_bar
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import counted, printable
from detr_bf.data.checks.annotations import Report
from detr_bf.data.checks.files import ImageRecord, check_files
from detr_bf.data.checks.report import Check, shared_images
from detr_bf.segmentation.batch import IGNORE
from detr_bf.segmentation.data import LabelledFiles, PixelSplits


@dataclass
class ExaminedMaps:
    """Files of a split with what was read of them."""

    split: LabelledFiles
    class_map: ClassMap
    files: dict[str, ImageRecord]  # of the images
    pixels: np.ndarray  # (K,) int64, of each class in all maps
    ignored: int  # pixels without a class
    faults: list[str] = field(default_factory=list)  # maps that cannot be used
    empty: list[str] = field(default_factory=list)  # maps without a pixel of any class

    @property
    def folder(self) -> Path:
        return self.split.images


def examine_maps(splits: PixelSplits, workers: int = 1) -> Report:
    """Read all images and maps of both splits.

    Args:
        workers: threads that read the files; images are read once and cached.
    """
    parts = {
        name: _examined(name, files, splits.class_map, workers)
        for name, files in (("train", splits.train), ("val", splits.val))
    }
    findings = [check.on(name, part) for name, part in parts.items() for check in MAP_CHECKS]
    findings += [check.on("train, val", parts["train"], parts["val"]) for check in MAP_PAIR_CHECKS]
    found = sorted((finding for finding in findings if finding), key=lambda finding: finding.severity)
    return Report(tuple(_summary(name, part) for name, part in parts.items()), tuple(found))


def _examined(name: str, files: LabelledFiles, class_map: ClassMap, workers: int) -> ExaminedMaps:
    records = check_files(ImageRecord, files.images, files.names, cache_folder("doctor"), workers, files.max_pixels)
    part = ExaminedMaps(files, class_map, records, np.zeros(class_map.num_classes, dtype=np.int64), 0)

    def counts(index: int) -> np.ndarray | str:
        try:
            labels = files.read_labels(index)
        except (InputError, ValueError) as error:
            return str(error)
        record = records.get(files.names[index])
        size = (labels.shape[0], labels.shape[1])
        if record is not None and record.sizes is not None and size not in (record.sizes.rotated, record.sizes.stored):
            height, width = record.sizes.rotated
            path = printable(files.labels / files.label_names[index])
            return f"{path} has {size[1]} x {size[0]} pixels (width x height), its image {width} x {height}"
        return np.bincount(labels.numpy().ravel(), minlength=IGNORE + 1)

    with ThreadPool(max(1, workers)) as pool:
        every = pool.imap(counts, range(len(files)))
        for index, found in enumerate(progress_bar(every, total=len(files), desc=f"checking {name} maps", unit="map")):
            if isinstance(found, str):
                part.faults.append(found)
                continue
            part.pixels += found[: class_map.num_classes]
            part.ignored += int(found[IGNORE])
            if not found[: class_map.num_classes].any():
                part.empty.append(printable(files.labels / files.label_names[index]))
    return part


def _summary(name: str, part: ExaminedMaps) -> str:
    total = int(part.pixels.sum()) + part.ignored
    share = f", {part.ignored / total:.1%} of the pixels without a class" if part.ignored else ""
    classes = counted(part.class_map.num_classes, "class", "classes")
    return f"{name}: {counted(len(part.split), 'image')}, {classes}{share}; from {printable(part.folder)}"


def _unreadable(part: ExaminedMaps) -> Iterator[str]:
    for name in part.split.names:
        if (record := part.files.get(name)) and record.problem:
            yield f"{printable(part.folder / name)}: {record.problem}"


def _absent_classes(part: ExaminedMaps) -> Iterator[str]:
    return (name for name, count in zip(part.class_map.names, part.pixels.tolist(), strict=True) if not count)


MAP_CHECKS = (
    Check("error", "file-unreadable", "the image cannot be decoded", _unreadable),
    Check("error", "map-unusable", "the map cannot be used", lambda part: iter(part.faults)),
    Check("warning", "map-empty", "no pixel of the map has a class", lambda part: iter(part.empty)),
    Check("warning", "class-absent", "no map has the class", _absent_classes),
)
MAP_PAIR_CHECKS = (Check("warning", "train-val-overlap", "the same image in both: mIoU is too high", shared_images),)
