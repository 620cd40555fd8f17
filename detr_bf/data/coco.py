"""COCO-format detection data: reading an annotation file, and the dataset that turns it into training samples."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.ops import box_convert, clip_boxes_to_image
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Image

from detr_bf.data.images import read_image
from detr_bf.data.transforms import SampleTransform, has_area
from detr_bf.errors import InputError
from detr_bf.structures import ClassMap, Target

_PARTS = ("images", "annotations", "categories")
_REQUIRED = {"images": ("id", "file_name"), "annotations": ("image_id", "category_id"), "categories": ("id",)}


@dataclass(frozen=True)
class CocoAnnotations:
    """The three lists of a COCO detection file, as they stand there; :func:`read_annotations` checked their form."""

    path: Path
    images: Sequence[Mapping[str, Any]]
    annotations: Sequence[Mapping[str, Any]]
    categories: Sequence[Mapping[str, Any]]

    @property
    def class_map(self) -> ClassMap:
        return ClassMap.from_categories(self.categories)


class Source(NamedTuple):
    """Where a split lies."""

    images: Path  # folder
    annotations: Path  # COCO JSON


class SampleKey(NamedTuple):
    """What a batch sampler asks the dataset for; the epoch is part of it because the augmentation depends on it."""

    epoch: int
    place: int  # in the dataset, from 0


def read_annotations(path: Path) -> CocoAnnotations:
    """Read a COCO detection file and check its form, not its values (the doctor does that).

    Raises :class:`InputError` when the file is missing, is not JSON, or lacks what every COCO file has.
    """
    if not path.is_file():
        raise InputError(f"there is no annotation file {path}; expected a COCO detection JSON")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        foreign = path.suffix in (".txt", ".yaml", ".yml", ".xml")
        hint = "; YOLO and Pascal VOC labels must be converted to COCO first" if foreign else ""
        raise InputError(f"annotation file {path} is not JSON ({error}){hint}") from None
    _check_form(path, content)
    return CocoAnnotations(path, *(content[part] for part in _PARTS))


def annotated_size(image: Mapping[str, Any]) -> tuple[int, int] | None:
    """(height, width) that an entry of ``images`` names, if it does; :class:`InputError` if they are not numbers."""
    height, width = image.get("height"), image.get("width")
    if height is None or width is None:
        return None
    if not all(isinstance(side, (int, float)) and math.isfinite(side) for side in (height, width)):
        raise InputError(f"image {image['id']} has height {height!r} and width {width!r}, expected numbers of pixels")
    return int(height), int(width)


def is_box(bbox: object) -> bool:
    """Whether this is a list of four finite numbers."""
    return (
        isinstance(bbox, list)
        and len(bbox) == 4
        and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in bbox)
        and all(math.isfinite(value) for value in bbox)
    )


def mixed_seed(*parts: int) -> int:
    """A 64-bit seed from several whole numbers, unrelated for neighbouring ones."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class CocoDetection(Dataset[tuple[Tensor, Target]]):
    """Images of a folder with the objects of a COCO file; sample = (3, h, w) uint8 image and its :class:`Target`.

    Crowd regions (``iscrowd`` 1) are left out, boxes are clipped to the image, boxes without area are dropped, and
    images without objects are kept. Without ``class_map`` it is made from the file's categories; validation data
    gets the map of the training data.

    Augmentation is a function of (seed, epoch, index) alone, whichever process loads the sample, and leaves torch's
    generators as they were.

    Raises :class:`InputError` for anything wrong with the files that would spoil training; the doctor lists it all.
    """

    def __init__(
        self,
        images: Path,
        annotations: Path,
        transform: SampleTransform,
        class_map: ClassMap | None = None,
        seed: int = 0,
    ) -> None:
        check_folder(images)
        content = read_annotations(annotations)
        self.folder = images
        self.transform = transform
        self.class_map = class_map if class_map is not None else content.class_map
        self.seed = seed
        self.image_ids = [int(image["id"]) for image in content.images]
        self.file_names = [image["file_name"] for image in content.images]
        self.sizes = [annotated_size(image) for image in content.images]
        self._boxes, self._labels, self._starts = _object_tables(content, self.image_ids, self.class_map)

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, Target]:
        epoch, index = key
        pixels = read_image(self.folder / self.file_names[index], self.sizes[index])
        original_size = (pixels.shape[-2], pixels.shape[-1])
        boxes, labels = self._objects(index, original_size)
        with torch.random.fork_rng(devices=[]):
            # not torch.manual_seed, which would seed the generators of every accelerator too
            torch.default_generator.manual_seed(mixed_seed(self.seed, epoch, index))
            image, boxes, labels = self.transform(Image(pixels), boxes, labels)
        height, width = image.shape[-2:]
        fractions = box_convert(boxes.as_subclass(Tensor), "xyxy", "cxcywh") / torch.tensor([width, height] * 2)
        target = Target(
            image_id=self.image_ids[index],
            boxes=fractions,
            labels=labels,
            size=(height, width),
            original_size=original_size,
            file_name=self.file_names[index],
        )
        return image.as_subclass(Tensor), target

    def _objects(self, index: int, size: tuple[int, int]) -> tuple[BoundingBoxes, Tensor]:
        """Boxes (T, 4) in pixels, clipped to ``size`` (height, width), and labels (T,)."""
        rows = slice(int(self._starts[index]), int(self._starts[index + 1]))
        boxes = clip_boxes_to_image(self._boxes[rows], size)
        keep = has_area(boxes)
        return BoundingBoxes(boxes[keep], format=BoundingBoxFormat.XYXY, canvas_size=size), self._labels[rows][keep]


def check_folder(images: Path) -> None:
    """Raise :class:`InputError` unless the image folder exists."""
    if not images.is_dir():
        raise InputError(f"image folder {images} does not exist or is not a folder")


def _check_form(path: Path, content: object) -> None:
    where = f"{path} is not a COCO detection file"
    if isinstance(content, list):
        hint = ": it looks like detection results, which are not annotations" if _are_results(content) else ""
        raise InputError(f"{where}: expected an object with {', '.join(_PARTS)}, got a list{hint}")
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected an object with {', '.join(_PARTS)}, got {type(content).__name__}")
    missing = [part for part in _PARTS if part not in content]
    if missing:
        found = ", ".join(map(str, content)) or "nothing"
        raise InputError(f"{where}: {', '.join(missing)} missing; found {found}")
    for part in _PARTS:
        if not isinstance(content[part], list):
            raise InputError(f"{where}: {part} is {type(content[part]).__name__}, expected a list")
        for number, entry in enumerate(content[part]):
            _check_entry(f"{where}: {part}[{number}]", entry, _REQUIRED[part])
    if not content["images"]:
        raise InputError(f"{path} lists no images")
    category_ids = [category["id"] for category in content["categories"]]
    if not category_ids or len(set(category_ids)) < len(category_ids):
        raise InputError(f"{path}: categories must be given, each id once; got ids {category_ids}")


def _check_entry(where: str, entry: object, required: Sequence[str]) -> None:
    if not isinstance(entry, dict):
        raise InputError(f"{where} is {type(entry).__name__}, expected an object")
    for key in required:
        kind = str if key == "file_name" else int
        if key not in entry:
            raise InputError(f"{where} has no {key}; it has {', '.join(entry) or 'nothing'}")
        if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
            expected = "a string" if kind is str else "a whole number"
            raise InputError(f"{where}: {key} is {entry[key]!r}, expected {expected}")


def _are_results(content: list[Any]) -> bool:
    return bool(content) and isinstance(content[0], dict) and "score" in content[0]


def _object_tables(
    content: CocoAnnotations, image_ids: Sequence[int], class_map: ClassMap
) -> tuple[Tensor, Tensor, Tensor]:
    """All objects as three tensors, in the order of the images.

    Boxes (N, 4) float32 x0, y0, x1, y1 in pixels of the original image, class indices (N,), and where each image's
    rows start (images + 1,). Tensors, not dicts: of COCO's 860,000 Python objects every worker would end up with a
    copy, because reading them changes their reference counts.
    """
    place = {image_id: index for index, image_id in enumerate(image_ids)}
    objects = [annotation for annotation in content.annotations if not annotation.get("iscrowd")]
    problem = _first_problem(objects, image_ids, class_map.index)
    if problem:
        raise InputError(f"{content.path}: {problem}; tools/check_data.py lists everything that is wrong with the data")
    objects.sort(key=lambda annotation: place[annotation["image_id"]])
    corners = torch.tensor([annotation["bbox"] for annotation in objects], dtype=torch.float64).reshape(-1, 4)
    boxes = box_convert(corners, "xywh", "xyxy").float()
    labels = torch.tensor([class_map.index[annotation["category_id"]] for annotation in objects], dtype=torch.int64)
    places = torch.tensor([place[annotation["image_id"]] for annotation in objects], dtype=torch.int64)
    return boxes, labels, torch.searchsorted(places, torch.arange(len(image_ids) + 1))


def _first_problem(
    objects: Sequence[Mapping[str, Any]], image_ids: Sequence[int], category_ids: Collection[int]
) -> str | None:
    """What makes it impossible to build the tables, if anything does."""
    listed = set(image_ids)
    if len(listed) < len(image_ids):
        return f"{len(image_ids) - len(listed)} image ids are listed more than once"
    unknown = sorted({annotation["category_id"] for annotation in objects}.difference(category_ids))
    if unknown:
        return f"category ids {unknown} are used, but the known ones are {list(category_ids)}"
    for annotation in objects:
        if annotation["image_id"] not in listed:
            return f"an annotation names image {annotation['image_id']}, which is not listed"
        if not is_box(annotation.get("bbox")):
            bbox = annotation.get("bbox")
            return f"image {annotation['image_id']} has bbox {bbox}, expected four finite numbers x, y, width, height"
    return None
