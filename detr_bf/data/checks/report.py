"""Splits, checks and findings, and the texts that name images and annotations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from detr_bf.common.text import printable
from detr_bf.data.annotation_values import annotated_size, crowd_mask, is_crowd, value_text
from detr_bf.data.checks.alignment import Alignment, OwnReferences
from detr_bf.data.checks.files import ImageRecord, MapRecord
from detr_bf.data.coco import CocoAnnotations
from detr_bf.data.columns import Entries, integers, values_of
from detr_bf.data.duplicates import exported_from, nearest
from detr_bf.data.image_headers import boxes_as_stored
from detr_bf.data.images import RGB, PixelFormat
from detr_bf.data.masks import MapFile, SegmentExtent, covers_a_pixel, has_mask, parts_of

_LONGEST_EXAMPLE = 2000  # characters
COMPARED = 100  # images of a split, evenly spaced, that are compared with their references

Severity = Literal["error", "warning"]
Find = Callable[..., Iterator[str]]


@dataclass(frozen=True)
class Finding:
    """Problem of one kind in one split."""

    severity: Severity
    split: str
    code: str
    meaning: str  # the problem, and for a warning how it is handled
    count: int
    example: str


@dataclass(frozen=True)
class Split:
    """Annotation file and records of its image files."""

    name: str
    folder: Path
    content: CocoAnnotations
    files: Mapping[str, ImageRecord]
    num_queries: int
    masks: bool = False  # train and evaluate masks
    maps: Mapping[str, MapRecord] = field(default_factory=dict)  # of the panoptic PNGs
    joined: int = 1  # images that augmentation joins in one
    pixel_format: PixelFormat = RGB  # of the images
    max_detections: int | None = None  # of an image that the evaluation counts; None: the split is not evaluated
    references: OwnReferences | None = None  # None: they are not read
    skipped: Sequence[str] = ()  # images that cannot be decoded and are left out, each with the reason

    @cached_property
    def images(self) -> Mapping[int, Mapping[str, Any]]:
        """Images by id."""
        images = self.content.images
        if isinstance(images, Entries):
            return _ImagesById(images)
        return {image["id"]: image for image in images}

    @cached_property
    def objects(self) -> Sequence[Mapping[str, Any]]:
        """Annotations except crowds."""
        annotations = self.content.annotations
        if isinstance(annotations, Entries):
            return annotations.where(~crowd_mask(annotations))
        return [annotation for annotation in annotations if not _is_valid_crowd(annotation)]

    @cached_property
    def objects_per_image(self) -> Counter[int]:
        return Counter(values_of(self.objects, "image_id"))

    @cached_property
    def names(self) -> dict[int, str]:
        """Class names by category id."""
        class_map = self.content.class_map
        return dict(zip(class_map.category_ids, class_map.names, strict=True))

    def file(self, image: Mapping[str, Any]) -> ImageRecord | None:
        return self.files.get(image["file_name"])

    def size(self, image: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return (height, width) that the boxes refer to, or None if not known."""
        record = self.file(image)
        return annotated_size(image) or (record.sizes.rotated if record and record.sizes else None)

    def sizes_of(self, objects: Entries) -> np.ndarray:
        """Return :meth:`size` of the image of each object: (N, 2) float64, NaN if the image or its size is unknown."""
        images = self.content.images
        sizes = np.array([self.size(image) or (np.nan, np.nan) for image in images], dtype=np.float64).reshape(-1, 2)
        known = integers(values_of(images, "id"))
        order = np.argsort(known, kind="stable")
        ids = objects.numbers("image_id")
        found = order[np.searchsorted(known, ids, side="right", sorter=order) - 1]  # of equal ids the last
        return np.where((known[found] == ids)[:, None], sizes[found], np.nan)

    @cached_property
    def unusable_segmentations(self) -> tuple[list[str], list[str], list[str]]:
        """Annotations of a detection file without mask, with an invalid one, and with one outside the image."""
        missing, invalid, empty = [], [], []
        for annotation in self.content.annotations:  # crowds too: the evaluation ignores detections in them
            image = self.images.get(annotation["image_id"])
            if not has_mask(annotation):
                file = f", {printable(image['file_name'])}" if image else ""
                missing.append(f"{box_text(annotation)}{file}")
                continue
            size = self.size(image) if image else None
            try:
                parts = parts_of(annotation.get("segmentation"), size)
            except ValueError as error:
                invalid.append(f"{annotation_text(annotation)}: {error}")
                continue
            if size and not _is_valid_crowd(annotation) and not covers_a_pixel(parts, size):
                empty.append(f"{annotation_text(annotation)} in {size[1]} x {size[0]} pixels")
        return missing, invalid, empty

    @cached_property
    def as_stored(self) -> bool | None:
        """True if boxes refer to images without EXIF rotation, see :func:`~detr_bf.data.images.boxes_as_stored`."""
        return boxes_as_stored(self.folder, ((i["file_name"], annotated_size(i)) for i in self.content.images))

    def sizes_of_pair(self, image: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Return (height, width) of an image and of its reference as they are read, None if one is unknown."""
        own, record = self.file(image), self._reference_records.get(image["id"])
        if not (own and own.sizes and record and record.sizes):
            return None
        with suppress(ValueError):  # another size than annotated has its own check
            turned = own.sizes.wants_rotation(annotated_size(image), bool(self.as_stored))
            ours, theirs = own.sizes.rotated if turned else own.sizes.stored, record.sizes
            with suppress(ValueError):  # of another size
                if not theirs.wants_rotation(ours, bool(self.as_stored)):
                    return ours, theirs.stored
            return ours, theirs.rotated
        return None

    @cached_property
    def _reference_records(self) -> dict[int, ImageRecord | None]:
        """Records of the references by the ids of their images."""
        if self.references is None:
            return {}
        pairs = zip(self.content.images, self.references.files, strict=True)
        return {image["id"]: self.references.records.get(file) for image, file in pairs if file is not None}

    @cached_property
    def alignments(self) -> dict[int, Alignment]:
        """Alignment of at most :data:`COMPARED` images with their references, by the index of the image."""
        if self.references is None:
            return {}
        usable = []
        for index, image in enumerate(self.content.images):
            sizes = self.sizes_of_pair(image)
            if sizes and sizes[0] == sizes[1]:
                usable.append(index)
        spaced = np.linspace(0, len(usable) - 1, min(len(usable), COMPARED)).round().astype(int)
        images = {index: self.content.images[index] for index in (usable[number] for number in spaced)}
        pairs = {index: (self.folder / image["file_name"], annotated_size(image)) for index, image in images.items()}
        return self.references.alignments(pairs, pixel_format=self.pixel_format, as_stored=bool(self.as_stored))

    @property
    def map_files(self) -> tuple[MapFile, ...]:
        """Panoptic PNGs, if masks are trained."""
        return self.content.maps or () if self.masks else ()

    @property
    def maps_wanted(self) -> bool:
        """True if panoptic maps are trained on and evaluated."""
        return self.masks and self.content.maps is not None

    @cached_property
    def extents(self) -> dict[str, dict[int, SegmentExtent]]:
        """Segments of the readable PNGs, by file name and segment id."""
        return {
            name: {segment.id: segment for segment in record.segments}
            for name, record in self.maps.items()
            if record.size
        }


class _ImagesById(Mapping[int, Mapping[str, Any]]):
    """Images of columns by id; of images with the same id the last."""

    def __init__(self, images: Entries) -> None:
        self._images = images
        self._indices = {image_id: index for index, image_id in enumerate(images.values("id"))}

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __contains__(self, image_id: object) -> bool:
        return image_id in self._indices

    def __getitem__(self, image_id: int) -> Mapping[str, Any]:
        return self._images[self._indices[image_id]]


@dataclass(frozen=True)
class Check:
    """Kind of problem; ``find`` returns a description of each case in one split, or in both."""

    severity: Severity
    code: str
    meaning: str
    find: Find
    examples: int = 1  # cases that the finding describes

    def on(self, name: str, *splits: Any) -> Finding | None:
        """Run the check and return its finding, with the first cases as example, or None."""
        cases = list(self.find(*splits))
        if not cases:
            return None
        example = printable("; ".join(cases[: self.examples]), _LONGEST_EXAMPLE)
        return Finding(self.severity, name, self.code, self.meaning, len(cases), example)


class CheckList(list[Check]):
    """Checks in the order in which they run; the decorator :meth:`add` appends a function."""

    def add(self, severity: Severity, code: str, meaning: str, examples: int = 1) -> Callable[[Find], Find]:
        """Return a decorator that appends a check with the decorated function as its ``find``."""

        def append(find: Find) -> Find:
            self.append(Check(severity, code, meaning, find, examples))
            return find

        return append


def _is_valid_crowd(annotation: Mapping[str, Any]) -> bool:
    with suppress(ValueError):  # invalid values have their own check
        return is_crowd(annotation)
    return False


def repeated(values: Iterable[Any]) -> Iterator[Any]:
    """Return every value that occurs n > 1 times, n - 1 times."""
    return (value for value, count in Counter(values).items() for _ in range(count - 1))


def shared_images(train: Any, val: Any) -> Iterator[str]:
    """Return the files with the same content in both splits, which have ``folder`` and ``files``."""
    by_content = {record.sha256: name for name, record in train.files.items() if record.sha256}
    for name, record in val.files.items():
        if record.sha256 in by_content:
            yield f"{printable(val.folder / name)} is {printable(train.folder / by_content[record.sha256])}"


def near_duplicates(train: Any, val: Any) -> Iterator[str]:
    """Return the images of val that show the same as a training image, except those with the same content."""
    contents = {record.sha256 for record in train.files.values()}
    originals = {original: name for name in train.files if (original := exported_from(name))}
    names = []
    for name, record in val.files.items():
        if record.sha256 in contents:
            continue
        if (other := originals.get(exported_from(name) or "")) is not None:
            yield f"{printable(val.folder / name)} and {printable(train.folder / other)} are copies by their names"
        elif record.phash:
            names.append(name)
    known = [name for name, record in train.files.items() if record.phash]
    pairs = nearest([val.files[name].phash for name in names], [train.files[name].phash for name in known])
    for number, other in pairs:
        yield f"{printable(val.folder / names[number])} is like {printable(train.folder / known[other])}"


def image_text(image: Mapping[str, Any]) -> str:
    """Return the id and the file of an image."""
    return f"image {image['id']}, {printable(image['file_name'])}"


def annotation_text(annotation: Mapping[str, Any]) -> str:
    """Return the id of an annotation and of its image."""
    return f"annotation {value_text(annotation.get('id'))} of image {annotation['image_id']}"


def box_text(annotation: Mapping[str, Any]) -> str:
    """Return the id of an annotation and its box."""
    return f"{annotation_text(annotation)}: bbox {value_text(annotation.get('bbox'))}"
