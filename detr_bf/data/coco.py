"""COCO-format data: reading an annotation file, and the dataset that turns it into training samples."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.ops import box_convert, clip_boxes_to_image, masks_to_boxes
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Image, Mask

from detr_bf.data.annotation_values import (
    MAX_INT,
    annotation_values,
    is_crowd,
    is_id,
    is_number,
    png_name,
    segment_id,
    value_text,
)
from detr_bf.data.batches import SampleKey, read_or_replace
from detr_bf.data.images import MAX_PIXELS, read_image
from detr_bf.data.masks import MapFile, Segmentations, SegmentMasks, flat_annotations, parts_of
from detr_bf.data.transforms import Sample, SampleTransform, has_area, has_pixels
from detr_bf.errors import InputError
from detr_bf.files import is_folder, read_json
from detr_bf.structures import ClassMap, Target
from detr_bf.text import printable

logger = logging.getLogger(__name__)

_PARTS = ("images", "annotations", "categories")
_REQUIRED = {"images": ("id", "file_name"), "annotations": ("image_id", "category_id"), "categories": ("id",)}
_REQUIRED_PANOPTIC = {**_REQUIRED, "annotations": ("image_id", "file_name", "segments_info")}
_KINDS = {"file_name": (str, "a string"), "segments_info": (list, "a list")}  # of values; the rest are whole numbers


@dataclass(frozen=True)
class CocoAnnotations:
    """The three lists of a COCO file, as they stand there; :func:`read_annotations` checked their form.

    Of a panoptic file ``annotations`` are the segments (:func:`flat_annotations`).
    """

    path: Path
    images: Sequence[Mapping[str, Any]]
    annotations: Sequence[Mapping[str, Any]]
    categories: Sequence[Mapping[str, Any]]
    maps: tuple[MapFile, ...] | None = None  # the PNGs of a panoptic file; None for a detection file

    @cached_property
    def class_map(self) -> ClassMap:
        """The classes: all categories but :attr:`parents`."""
        parents = {category["id"] for category in self.parents}
        return ClassMap.from_categories([category for category in self.categories if category["id"] not in parents])

    @cached_property
    def parents(self) -> tuple[Mapping[str, Any], ...]:
        """Categories that only group others, as Roboflow exports them: no annotation uses them, others name them.

        A category of its own ``supercategory`` (COCO's person) is named by itself alone and is none of them.
        """
        used = {annotation["category_id"] for annotation in self.annotations}
        named = Counter(name for c in self.categories if isinstance(name := c.get("supercategory"), str))
        found = tuple(
            category
            for category in self.categories
            if category["id"] not in used
            and isinstance(name := category.get("name"), str)
            and named[name] > (category.get("supercategory") == name)
        )
        return found if len(found) < len(self.categories) else ()


class Source(NamedTuple):
    """Where a split lies."""

    images: Path  # folder
    annotations: Path  # COCO JSON, detection or panoptic
    panoptic: Path | None = None  # folder of the PNGs of a panoptic file; boxes do not need it


def read_annotations(path: Path) -> CocoAnnotations:
    """Read a COCO file and check its form, not its values (the doctor does that).

    A file is panoptic when its annotations have ``segments_info``, and a detection file otherwise. Raises
    :class:`InputError` when the file is missing, is not JSON, or lacks what every such file has.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise InputError(f"there is no annotation file {printable(path)}; expected a COCO JSON") from None
    except ValueError as error:
        foreign = path.suffix in (".txt", ".yaml", ".yml", ".xml")
        hint = "; YOLO and Pascal VOC labels must be converted to COCO first" if foreign else ""
        raise InputError(f"annotation file {printable(path)} is not JSON ({error}){hint}") from None
    panoptic = _check_form(path, content)
    images, annotations, categories = (content[part] for part in _PARTS)
    maps = None
    if panoptic:
        annotations, maps = flat_annotations(annotations)
    return CocoAnnotations(path, images, annotations, categories, maps)


def check_maps(content: CocoAnnotations, folder: Path | None, masks: bool) -> None:
    """Raise :class:`InputError` unless the folder of panoptic PNGs belongs to the file, and is there for ``masks``."""
    where = printable(content.path)
    if folder is None:
        if masks and content.maps is not None:
            raise InputError(
                f"{where} is a COCO panoptic file, whose masks are PNGs, and their folder is not given: "
                "set data.train.panoptic, for validation data data.val.panoptic"
            )
    elif content.maps is None:
        raise InputError(
            f"{where} is a COCO detection file, to which no folder of panoptic PNGs belongs, got {printable(folder)}: "
            "give the panoptic JSON as annotations, or leave data.train.panoptic (data.val.panoptic) empty"
        )
    elif not is_folder(folder):
        raise InputError(f"panoptic folder {printable(folder)} does not exist or is not a folder")


def annotated_size(image: Mapping[str, Any]) -> tuple[int, int] | None:
    """(height, width) that an entry of ``images`` names, if it does; :class:`InputError` if they are not numbers."""
    height, width = image.get("height"), image.get("width")
    if height is None or width is None:
        return None
    if not (is_number(height, 0) and is_number(width, 0)):
        raise InputError(
            f"image {image['id']} has height {value_text(height)} and width {value_text(width)}, expected numbers of "
            "pixels"
        )
    return int(height), int(width)


class _MaskSource(Protocol):
    """Where the masks of the objects come from."""

    def read(self, index: int, rows: slice, size: tuple[int, int]) -> Tensor:
        """Masks (T, h, w) uint8 of the objects in ``rows``, those of the image at ``index``, of ``size`` (h, w).

        Raises:
            ValueError: they cannot be read, or have another size.
        """


class CocoDetection(Dataset[tuple[Tensor, Target]]):
    """Images of a folder with the objects of a COCO file; sample = (3, h, w) uint8 image and its :class:`Target`.

    Crowd regions (``iscrowd`` 1) are left out, boxes are clipped to the image, boxes without area are dropped, and
    images without objects are kept. Without ``class_map`` it is made from the file's categories; validation data
    gets the map of the training data.

    With ``masks`` the targets have masks: of a panoptic file the pixels of the PNGs in the folder ``panoptic``, whose
    extents are the boxes then; of a detection file its polygons and run lengths. Objects without a pixel are dropped.

    Augmentation is a function of (seed, epoch, index) alone, whichever process loads the sample, and leaves torch's
    generators as they were. With ``replace_unreadable`` a random image, a function of the same, stands in for one whose
    image or mask file cannot be read; it is augmented as that one would have been, so that it does not come twice alike
    in an epoch.

    Raises :class:`InputError` for anything wrong with the files that would spoil training; the doctor lists it all.
    """

    def __init__(
        self,
        images: Path,
        annotations: Path,
        transform: SampleTransform,
        class_map: ClassMap | None = None,
        seed: int = 0,
        masks: bool = False,
        panoptic: Path | None = None,
        replace_unreadable: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        check_folder(images)
        content = read_annotations(annotations)
        check_maps(content, panoptic, masks)
        self.folder = images
        self.transform = transform
        self.class_map = class_map if class_map is not None else content.class_map
        if class_map is None and content.parents:
            names = printable(", ".join(str(category["name"]) for category in content.parents))
            logger.info("%s: no class is made of %s, which only groups others", printable(annotations), names)
        self.seed = seed
        self.replace_unreadable = replace_unreadable
        self.max_pixels = max_pixels
        self.image_ids = [int(image["id"]) for image in content.images]
        self.file_names = [image["file_name"] for image in content.images]
        self.sizes = [annotated_size(image) for image in content.images]
        maps = masks and panoptic is not None
        objects = _ordered_objects(content, self.image_ids, self.class_map.index, maps)
        self._boxes, self._labels, self._starts = _object_tables(objects, self.image_ids, self.class_map)
        self._boxes_of_masks = maps
        self._masks: _MaskSource | None = None
        if masks and panoptic is not None:
            self._masks = _segment_masks(content, objects, panoptic, max_pixels)
        elif masks:
            self._masks = _segmentations(content, objects, dict(zip(self.image_ids, self.sizes, strict=True)))

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, Target]:
        index, sample, replaced = read_or_replace(
            self._read, key, len(self), seed=self.seed, replace=self.replace_unreadable
        )
        with torch.random.fork_rng(devices=[]):
            # not torch.manual_seed, which would seed the generators of every accelerator too
            torch.default_generator.manual_seed(key.sample_seed(self.seed))
            image, boxes, labels, masks = self.transform(sample)
        height, width = image.shape[-2:]
        fractions = box_convert(boxes.as_subclass(Tensor), "xyxy", "cxcywh") / torch.tensor([width, height] * 2)
        target = Target(
            image_id=self.image_ids[index],
            boxes=fractions,
            labels=labels,
            size=(height, width),
            original_size=(sample.image.shape[-2], sample.image.shape[-1]),
            file_name=printable(self.file_names[index]),
            masks=None if masks is None else masks.as_subclass(Tensor).bool(),
            replaced=replaced,
        )
        return image.as_subclass(Tensor), target

    def _read(self, index: int) -> Sample:
        pixels = read_image(self.folder / self.file_names[index], self.sizes[index], self.max_pixels)
        return Sample(Image(pixels), *self._objects(index, (pixels.shape[-2], pixels.shape[-1])))

    def _objects(self, index: int, size: tuple[int, int]) -> tuple[BoundingBoxes, Tensor, Mask | None]:
        """Boxes (T, 4) in pixels, clipped to ``size`` (height, width), labels (T,) and masks (T, height, width)."""
        rows = slice(int(self._starts[index]), int(self._starts[index + 1]))
        boxes, labels, masks = clip_boxes_to_image(self._boxes[rows], size), self._labels[rows], None
        if self._masks is not None:
            masks = self._read_masks(self._masks, index, rows, size)
            seen = has_pixels(masks)
            boxes, labels, masks = boxes[seen], labels[seen], masks[seen]
            if self._boxes_of_masks:
                boxes = _extents(masks)
        keep = has_area(boxes)
        boxes = BoundingBoxes(boxes[keep], format=BoundingBoxFormat.XYXY, canvas_size=size)
        return boxes, labels[keep], None if masks is None else Mask(masks[keep])

    def _read_masks(self, source: _MaskSource, index: int, rows: slice, size: tuple[int, int]) -> Tensor:
        try:
            return source.read(index, rows, size)
        except ValueError as error:
            image = f"image {self.image_ids[index]}, {printable(self.file_names[index])}"
            raise InputError(f"{image} has no usable masks: {error}; mend its annotation or drop the image") from error


def check_folder(images: Path) -> None:
    """Raise :class:`InputError` unless the image folder exists."""
    if not is_folder(images):
        raise InputError(f"image folder {printable(images)} does not exist or is not a folder")


def _check_form(file: Path, content: object) -> bool:
    """Whether the file is panoptic; :class:`InputError` if it is no COCO file."""
    path = printable(file)
    where = f"{path} is not a COCO detection file"
    if isinstance(content, list):
        hint = ": it looks like detection results, which are not annotations" if _are_results(content) else ""
        raise InputError(f"{where}: expected an object with {', '.join(_PARTS)}, got a list{hint}")
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected an object with {', '.join(_PARTS)}, got {type(content).__name__}")
    missing = [part for part in _PARTS if part not in content]
    if missing:
        found = printable(", ".join(content)) or "nothing"
        raise InputError(f"{where}: {', '.join(missing)} missing; found {found}")
    for part in _PARTS:
        if not isinstance(content[part], list):
            raise InputError(f"{where}: {part} is {type(content[part]).__name__}, expected a list")
    panoptic = any(isinstance(entry, dict) and "segments_info" in entry for entry in content["annotations"])
    where = f"{path} is not a COCO panoptic file" if panoptic else where
    for part, required in (_REQUIRED_PANOPTIC if panoptic else _REQUIRED).items():
        for number, entry in enumerate(content[part]):
            _check_entry(f"{where}: {part}[{number}]", entry, required)
    if not content["images"]:
        raise InputError(f"{path} lists no images")
    category_ids = [category["id"] for category in content["categories"]]
    if not category_ids or len(set(category_ids)) < len(category_ids):
        raise InputError(f"{path}: categories must be given, each id once; got ids {value_text(category_ids)}")
    for number, category in enumerate(content["categories"]):
        name = category.get("name")
        if not (name is None or isinstance(name, str) or is_number(name)):
            raise InputError(f"{where}: categories[{number}]: name is {value_text(name)}, expected a string")
    if panoptic:
        _check_segments(where, content["annotations"])
    return panoptic


def _check_segments(where: str, annotations: Sequence[Mapping[str, Any]]) -> None:
    for number, entry in enumerate(annotations):
        try:
            png_name(entry["file_name"])  # a file outside of the folder is none of the data set's
        except ValueError as error:
            raise InputError(f"{where}: annotations[{number}] has {error}") from None
        for place, segment in enumerate(entry["segments_info"]):
            here = f"{where}: annotations[{number}].segments_info[{place}]"
            _check_entry(here, segment, ("id", "category_id"))
            try:
                segment_id(segment)
            except ValueError as error:
                raise InputError(f"{here}: {error}") from None


def _check_entry(where: str, entry: object, required: Sequence[str]) -> None:
    if not isinstance(entry, dict):
        raise InputError(f"{where} is {type(entry).__name__}, expected an object")
    for key in required:
        kind, expected = _KINDS.get(key, (int, f"a whole number from 0 to {MAX_INT}"))
        if key not in entry:
            raise InputError(f"{where} has no {key}; it has {printable(', '.join(entry)) or 'nothing'}")
        value = entry[key]
        if not (is_id(value) if kind is int else isinstance(value, kind)):
            raise InputError(f"{where}: {key} is {value_text(value)}, expected {expected}")


def _are_results(content: list[Any]) -> bool:
    return bool(content) and isinstance(content[0], dict) and "score" in content[0]


def _ordered_objects(
    content: CocoAnnotations, image_ids: Sequence[int], category_ids: Collection[int], maps: bool
) -> list[Mapping[str, Any]]:
    """All annotations but crowds, in the order of the images; :class:`InputError` for those that cannot be used."""
    place = {image_id: index for index, image_id in enumerate(image_ids)}
    problem = _first_problem(content.annotations, image_ids, category_ids, maps)
    if problem:
        raise _unusable(content, problem)
    objects = [annotation for annotation in content.annotations if not is_crowd(annotation)]
    return sorted(objects, key=lambda annotation: place[annotation["image_id"]])


def _object_tables(
    objects: Sequence[Mapping[str, Any]], image_ids: Sequence[int], class_map: ClassMap
) -> tuple[Tensor, Tensor, Tensor]:
    """All objects as three tensors, in the order of the images.

    Boxes (N, 4) float32 x0, y0, x1, y1 in pixels of the original image, class indices (N,), and where each image's
    rows start (images + 1,). Tensors, not dicts: of COCO's 860,000 Python objects every worker would end up with a
    copy, because reading them changes their reference counts.
    """
    place = {image_id: index for index, image_id in enumerate(image_ids)}
    corners = torch.tensor([annotation["bbox"] for annotation in objects], dtype=torch.float64).reshape(-1, 4)
    boxes = box_convert(corners, "xywh", "xyxy").float()
    labels = torch.tensor([class_map.index[annotation["category_id"]] for annotation in objects], dtype=torch.int64)
    places = torch.tensor([place[annotation["image_id"]] for annotation in objects], dtype=torch.int64)
    return boxes, labels, torch.searchsorted(places, torch.arange(len(image_ids) + 1))


def _segment_masks(
    content: CocoAnnotations, objects: Sequence[Mapping[str, Any]], folder: Path, max_pixels: int
) -> SegmentMasks:
    """The masks of a panoptic file; every image must have one PNG, and every segment its own id there.

    The maps that are found must have names of their own, too.
    """
    files = dict(content.maps or ())
    if len(files) < len(content.maps or ()):
        raise _unusable(content, "several annotations are for one image")
    for image in content.images:
        if image["id"] not in files:
            raise _unusable(content, f"image {image['id']} has no annotation, so that its masks are not known")
    names: dict[str, int] = {}
    for image in content.images:
        try:
            other = names.setdefault(png_name(image["file_name"]), image["id"])
        except ValueError as error:
            raise _unusable(content, f"image {image['id']} has {error}") from None
        if other != image["id"]:
            raise _unusable(content, f"the panoptic PNGs found for the images {other} and {image['id']} have one name")
    if len({(segment["image_id"], segment["id"]) for segment in content.annotations}) < len(content.annotations):
        raise _unusable(content, "several segments of an image have the same id")
    ids = torch.tensor([segment["id"] for segment in objects], dtype=torch.int32)
    return SegmentMasks(folder, [files[image["id"]] for image in content.images], ids, max_pixels)


def _segmentations(
    content: CocoAnnotations,
    objects: Sequence[Mapping[str, Any]],
    sizes: Mapping[int, tuple[int, int] | None],
) -> Segmentations:
    """The masks of a detection file; ``sizes`` of the images by id, where the file names them."""
    parts = []
    for annotation in objects:
        image_id = annotation["image_id"]
        try:
            parts.append(parts_of(annotation.get("segmentation"), sizes[image_id]))
        except ValueError as error:
            raise _unusable(content, f"annotation {annotation.get('id')} of image {image_id}: {error}") from None
    return Segmentations(parts)


def _extents(masks: Tensor) -> Tensor:
    """(T, 4) float32 x0, y0, x1, y1 that hold all pixels of masks (T, h, w), none of which is empty."""
    boxes = masks_to_boxes(masks)
    boxes[:, 2:] += 1  # from the last pixel to its end
    return boxes


def _unusable(content: CocoAnnotations, problem: str) -> InputError:
    return InputError(
        f"{printable(content.path)}: {problem}; tools/check_data.py lists everything that is wrong with the data"
    )


def _first_problem(
    annotations: Sequence[Mapping[str, Any]], image_ids: Sequence[int], category_ids: Collection[int], maps: bool
) -> str | None:
    """Return the reason why the tables cannot be built, or nothing can be evaluated; None if there is none."""
    listed = set(image_ids)
    if len(listed) < len(image_ids):
        return f"{len(image_ids) - len(listed)} image ids are listed more than once"
    unknown = sorted({annotation["category_id"] for annotation in annotations}.difference(category_ids))
    if unknown:
        return f"category ids {unknown} are used, but the known ones are {list(category_ids)}"
    for annotation in annotations:
        if annotation["image_id"] not in listed:
            return f"an annotation names image {annotation['image_id']}, which is not listed"
        try:
            annotation_values(annotation, pixels=maps)
        except ValueError as error:
            return f"annotation {value_text(annotation.get('id'))} of image {annotation['image_id']} has {error}"
    return None
