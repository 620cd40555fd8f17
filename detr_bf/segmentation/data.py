"""Images with a class for every pixel: files of a split, their maps, and the torch data set of both.

Shape legend: h x w pixels of an image and its map.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from detr_bf.common.errors import InputError
from detr_bf.common.files import file_size, is_folder, read_regular
from detr_bf.common.structures import ClassMap, Target
from detr_bf.common.text import counted, listed, printable
from detr_bf.data.batches import SampleKey, read_or_replace
from detr_bf.data.coco import read_annotations
from detr_bf.data.image_headers import header_size
from detr_bf.data.images import PixelFormat, image_bytes, is_deep, open_image, read_image
from detr_bf.data.inputs import is_image_file
from detr_bf.evaluation import PanopticFile
from detr_bf.evaluation.semantic import merge_segments
from detr_bf.segmentation.batch import IGNORE, LabelledPixels
from detr_bf.segmentation.config import LabelledSplitConfig, SegmentationDataConfig

_MOST_BYTES = 2**20  # of the file of class names
_GREY_MODES = ("L", "P", "1")  # of Pillow: one number of 8 bits a pixel

PixelTransform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # image, map -> image, map


@dataclass(frozen=True)
class LabelledFiles:
    """Image files of a split and the PNG map of each.

    ``panoptic`` holds panoptic maps by image id, and ``image_ids`` those of the images; None: the PNGs hold classes.
    """

    images: Path
    labels: Path
    names: tuple[str, ...]  # of the images, within their folder
    label_names: tuple[str, ...]  # of the maps, within theirs
    num_classes: int
    first_class: int
    ignore: int
    max_pixels: int
    grey_bits: int | None = None
    panoptic: PanopticFile | None = None
    image_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image (3, h, w) uint8 and its map (h, w) uint8.

        Raises:
            InputError: one of them cannot be read, their sizes differ, or a value of the map is no class.
        """
        labels = self.read_labels(index)
        height, width = labels.shape
        path = self.images / self.names[index]
        try:
            pixel_format = PixelFormat(grey_bits=self.grey_bits)
            return read_image(path, (height, width), self.max_pixels, pixel_format=pixel_format), labels
        except InputError as error:
            size = header_size(path)
            if size is None or (height, width) in (size, size[::-1]):
                raise
            raise InputError(
                f"the map {printable(self.labels / self.label_names[index])} has {width} x {height} pixels (width x "
                f"height), its image {size[1]} x {size[0]}: give a map of the image's size"
            ) from error

    def read_labels(self, index: int) -> Tensor:
        """Return the map of an image, (h, w) uint8 class indices, IGNORE: no class (InputError: as :meth:`read`)."""
        path = self.labels / self.label_names[index]
        if self.panoptic is not None:
            return merge_segments(self.panoptic[self.image_ids[index]], IGNORE)
        values = read_values(path, self.max_pixels)
        table = np.full(256, IGNORE, dtype=np.uint8)
        table[self.first_class : self.first_class + self.num_classes] = np.arange(self.num_classes)
        table[self.ignore] = IGNORE
        known = np.zeros(256, dtype=bool)
        known[: self.first_class + self.num_classes] = known[self.ignore] = True
        if not known[values].all():
            wrong = np.unique(values[~known[values]])
            raise InputError(
                f"the map {printable(path)} has the values {listed(wrong.tolist())}; expected classes from "
                f"{self.first_class} to {self.first_class + self.num_classes - 1}, or data.ignore={self.ignore}"
            )
        return torch.from_numpy(table[values])

    def fingerprint(self, classes: ClassMap, *, quick: bool = True) -> dict[str, Any]:
        """Return ``sha256`` of class names, file names and, unless ``quick``, sizes, and the number of images twice."""
        files = [self.images / name for name in self.names] + [self.labels / name for name in self.label_names]
        content = [classes.names, self.names, self.label_names, [] if quick else [file_size(file) for file in files]]
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return {"sha256": digest, "images": len(self), "objects": len(self)}


@dataclass(frozen=True)
class PixelSplits:
    """Files of both splits, with their classes."""

    train: LabelledFiles
    val: LabelledFiles
    class_map: ClassMap


def read_pixel_splits(data: SegmentationDataConfig) -> PixelSplits:
    """Find the files of both splits.

    Raises:
        InputError: settings are missing or exclude each other, a folder or file is missing, there are no images, or an
            image has no map.
    """
    for name, split in (("train", data.train), ("val", data.val)):
        if not (split.images and split.labels):
            raise InputError(
                f"data.{name}.images and data.{name}.labels must be given: the folders of the images and of their PNG "
                "maps (docs/segmentation.md)"
            )
    if bool(data.train.annotations) != bool(data.val.annotations):
        raise InputError("data.train.annotations and data.val.annotations must both be given, or neither")
    if bool(data.classes) == bool(data.train.annotations):
        raise InputError(
            "data.classes, a text file of the class names, and data.train.annotations, a panoptic JSON with its own, "
            "exclude each other, and one of them is needed"
        )
    if data.train.annotations:
        classes = read_annotations(Path(data.train.annotations)).class_map
    else:
        classes = _named_classes(Path(data.classes))
    if not 2 <= classes.num_classes <= IGNORE - data.first_class:
        source, count = data.classes or data.train.annotations, counted(classes.num_classes, "class", "classes")
        raise InputError(f"{printable(source)} has {count}, expected from 2 to {IGNORE - data.first_class}")
    return PixelSplits(_found(data, data.train, classes), _found(data, data.val, classes), classes)


def _named_classes(path: Path) -> ClassMap:
    """Read the names of the classes, one a line."""
    try:
        lines = read_regular(path, _MOST_BYTES).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(
            f"data.classes: {printable(path)} cannot be read ({printable(error)}); expected a text file with the name "
            "of one class a line"
        ) from error
    names = tuple(line.strip() for line in lines if line.strip())
    return ClassMap(tuple(range(len(names))), names)


def _found(data: SegmentationDataConfig, split: LabelledSplitConfig, classes: ClassMap) -> LabelledFiles:
    images, labels = Path(split.images), Path(split.labels)
    for folder in (images, labels):
        if not is_folder(folder):
            raise InputError(f"there is no folder {printable(folder)}: give those of the images and of their PNG maps")
    found = sorted(path.relative_to(images).as_posix() for path in images.rglob("*") if is_image_file(path))
    suffix, panoptic = split.image_suffix, None
    ids: dict[str, int] = {}  # of the images, by the name of their PNG
    names = [name for name in found if name.endswith(suffix)]
    if not names:
        raise InputError(f"{printable(images)} has no images{f' that end with {printable(suffix)}' if suffix else ''}")
    if split.annotations:
        panoptic = PanopticFile(split.annotations, labels, classes, data.max_pixels)
        ids = {name: image_id for image_id, name in panoptic.file_names.items()}
    stems = [name.removesuffix(suffix) if suffix else str(Path(name).with_suffix("")) for name in names]
    maps = [f"{stem}{split.label_suffix}" for stem in stems]
    missing = [name for name in maps if not (name in ids if split.annotations else (labels / name).is_file())]
    if missing:
        where = f"no entry in {printable(split.annotations)}" if split.annotations else "no file"
        raise InputError(
            f"{len(missing)} of {len(names)} images have no map: there is {where} for "
            f"{printable(labels / missing[0])}; add the maps, or remove the images"
        )
    return LabelledFiles(
        images,
        labels,
        tuple(names),
        tuple(maps),
        classes.num_classes,
        data.first_class,
        data.ignore,
        data.max_pixels,
        data.grey_bits,
        panoptic,
        tuple(ids[name] for name in maps) if split.annotations else (),
    )


def read_values(path: Path, max_pixels: int) -> np.ndarray:
    """Return the values of a grey or palette PNG, (h, w) uint8.

    Raises:
        InputError: the file is missing, cannot be read, or is not a PNG with one number of 8 bits a pixel.
    """
    shown = printable(path)
    try:
        data = image_bytes(path, max_pixels)
        image = open_image(data, max_pixels)
    except FileNotFoundError:
        raise InputError(f"there is no map {shown}; expected a PNG of classes") from None
    except ValueError as error:
        raise InputError(f"the map {shown} cannot be read: {error}") from error
    if image.format not in (None, "PNG") or image.mode not in _GREY_MODES or is_deep(image, data):
        kind = f"{image.mode} image of 16 bits" if is_deep(image, data) else f"{image.mode} image"
        raise InputError(
            f"the map {shown} is a {kind}; expected a grey or palette PNG whose values are classes, or for COCO's "
            "panoptic PNGs data.train.annotations and data.val.annotations"
        )
    return np.asarray(image).astype(np.uint8)


class LabelledPixelSet(Dataset[LabelledPixels]):
    """Transformed images of a split with their maps.

    Augmentation depends only on (seed, epoch, index), and leaves the global generator as it was. With
    ``replace_unreadable`` an unreadable image or map is replaced by those of a random image.
    """

    def __init__(
        self, files: LabelledFiles, transform: PixelTransform, *, seed: int = 0, replace_unreadable: bool = False
    ) -> None:
        self.files = files
        self.transform = transform
        self.seed = seed
        self.replace_unreadable = replace_unreadable

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: SampleKey) -> LabelledPixels:
        index, (image, labels), replaced = read_or_replace(
            self.files.read, key, len(self), seed=self.seed, replace=self.replace_unreadable
        )
        original = image.shape[1], image.shape[2]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key.sample_seed(self.seed))
            image, labels = self.transform(image, labels)
        target = replace(
            Target.without_objects(),
            image_id=index,
            size=(image.shape[1], image.shape[2]),
            original_size=original,
            file_name=printable(self.files.names[index]),
            replaced=replaced,
        )
        return LabelledPixels(image, labels, target)

    def subset(self, indices: Sequence[int]) -> LabelledPixelSet:
        """Return the data set of the images at ``indices``."""
        files, ids = self.files, self.files.image_ids
        chosen = replace(
            files,
            names=tuple(files.names[index] for index in indices),
            label_names=tuple(files.label_names[index] for index in indices),
            image_ids=tuple(ids[index] for index in indices) if ids else (),
        )
        return LabelledPixelSet(chosen, self.transform, seed=self.seed, replace_unreadable=self.replace_unreadable)

    @cached_property
    def sizes(self) -> list[tuple[int, int] | None]:
        """Height and width of each map, by its header; None if it cannot be read."""
        return [header_size(self.files.labels / name) for name in self.files.label_names]
