"""COCO annotation files, and the data set of images with their targets."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.ops import box_convert, clip_boxes_to_image, masks_to_boxes
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Image, Mask

from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.files import MAX_JSON_BYTES, file_size, is_folder, is_number, read_json
from detr_bf.common.structures import ClassMap, Target
from detr_bf.common.text import printable
from detr_bf.data.annotation_values import (
    MAX_INT,
    annotated_sizes,
    annotation_values,
    crowd_mask,
    is_crowd,
    is_id,
    png_name,
    segment_id,
    suspect_areas,
    suspect_boxes,
    suspect_crowds,
    unit_problem,
    unknown_ids,
    value_text,
)
from detr_bf.data.augment import Augmentation
from detr_bf.data.batches import SampleKey, read_or_replace
from detr_bf.data.column_cache import read_columns
from detr_bf.data.columns import Entries, distinct, integers, values_of
from detr_bf.data.image_headers import boxes_as_stored
from detr_bf.data.images import MAX_PIXELS, RGB, PixelFormat, check_folder, pixel_values, read_image
from detr_bf.data.masks import MapFile, Segmentations, SegmentMasks, flat_annotations, parts_of
from detr_bf.data.references import Pair, References
from detr_bf.data.transforms import Sample, SampleTransform, has_area, has_pixels

logger = logging.getLogger(__name__)

LARGE_FILE = 2**24  # bytes of a file that is read into columns
LoadedSample: TypeAlias = tuple[Tensor, Target] | tuple[Tensor, Target, Tensor | None]  # see CocoDetection
_BLOCK = 2**20  # objects whose boxes are converted together
_PARTS = ("images", "annotations", "categories")
REQUIRED_KEYS = {"images": ("id", "file_name"), "annotations": ("image_id", "category_id"), "categories": ("id",)}
_REQUIRED_PANOPTIC = {**REQUIRED_KEYS, "annotations": ("image_id", "file_name", "segments_info")}
_FIX = "; 'detr-bf check CONFIG --fix OUT' writes a copy without such entries of data.train.annotations and data.val"
_KINDS = {"file_name": (str, "a string"), "segments_info": (list, "a list")}  # other values are whole numbers


@dataclass(frozen=True, eq=False)
class CocoAnnotations:
    """Images, annotations and categories of a COCO file, or of a data set of another format converted to COCO.

    :func:`read_annotations` has checked them. Those of a large file are :class:`Entries`, whose dictionaries are made
    when they are read. The ``annotations`` of a panoptic file are its segments (:func:`flat_annotations`).
    """

    path: Path  # for messages
    images: Sequence[Mapping[str, Any]]
    annotations: Sequence[Mapping[str, Any]]
    categories: Sequence[Mapping[str, Any]]
    maps: tuple[MapFile, ...] | None = None  # PNGs of a panoptic file; None for a detection file

    @cached_property
    def class_map(self) -> ClassMap:
        """Classes: all categories except :attr:`parents`."""
        parents = {category["id"] for category in self.parents}
        return ClassMap.from_categories([category for category in self.categories if category["id"] not in parents])

    @cached_property
    def parents(self) -> tuple[Mapping[str, Any], ...]:
        """Categories without annotations that are the ``supercategory`` of others, as in Roboflow exports.

        A category that is only its own ``supercategory`` (COCO's person) is not a parent.
        """
        used = distinct(self.annotations, "category_id")
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
    """Images and annotations of one split."""

    images: Path  # folder
    annotations: Path | CocoAnnotations  # COCO JSON, detection or panoptic, or its content
    panoptic: Path | None = None  # folder with the PNGs of a panoptic file; not needed for boxes
    skipped: tuple[str, ...] = ()  # images that cannot be decoded and are left out, each with the reason


def read_annotations(path: Path | CocoAnnotations, content: Any = None) -> CocoAnnotations:
    """Read a COCO file and check its form; ``data/checks`` checks its values. Content in memory is returned as it is.

    ``content`` is that of the file, if it has been read.

    A file whose annotations have ``segments_info`` is a panoptic file, any other a detection file. A detection file of
    :data:`LARGE_FILE` bytes or more is read into columns, which are cached (:mod:`detr_bf.data.column_cache`).

    Raises:
        InputError: the file is missing, is not JSON, or lacks a required key.
    """
    if isinstance(path, CocoAnnotations):
        return path
    if content is None and LARGE_FILE <= file_size(path) <= MAX_JSON_BYTES and (large := _read_large(path)) is not None:
        return large
    try:
        content = read_json(path) if content is None else content
    except FileNotFoundError:
        raise InputError(f"there is no annotation file {printable(path)}; expected a COCO JSON") from None
    except ValueError as error:
        foreign = path.suffix in (".txt", ".yaml", ".yml", ".xml")
        hint = "; give the folder of a YOLO or Pascal VOC data set as data.root" if foreign else ""
        raise InputError(f"annotation file {printable(path)} is not JSON ({error}){hint}") from None
    panoptic = _check_form(path, content)
    images, annotations, categories = (content[part] for part in _PARTS)
    maps = None
    if panoptic:
        annotations, maps = flat_annotations(annotations)
    return CocoAnnotations(path, images, annotations, categories, maps)


def _read_large(path: Path) -> CocoAnnotations | None:
    """Read a file into columns; None for one that is not valid, or of another form, which json reads."""
    store = read_columns(path)
    if store is None:
        return None
    images, annotations = (Entries(store, part) for part in ("images", "annotations"))
    try:
        content = {"images": images[:1], "annotations": annotations[:1], "categories": json.loads(store.categories)}
        _check_form(path, content)  # the reader has checked the other entries
    except (InputError, ValueError, RecursionError):
        return None
    return CocoAnnotations(path, images, annotations, content["categories"])


def check_maps(content: CocoAnnotations, folder: Path | None, masks: bool) -> None:
    """Raise :class:`InputError` if a panoptic file lacks its PNG folder for ``masks``, or the folder does not fit."""
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


class _MaskSource(Protocol):
    """Source of the objects' masks: :class:`Segmentations` or :class:`SegmentMasks`."""

    def read(self, index: int, rows: slice, size: tuple[int, int]) -> Tensor:
        """Return masks (T, h, w) uint8 of the objects in ``rows``, for the image at ``index``, of ``size`` (h, w).

        Raises:
            InputError: a PNG cannot be read.
            ValueError: the masks are invalid or have another size.
        """


class CocoDetection(Dataset[LoadedSample]):
    """Data set of images and the objects of a COCO file; a sample is a (3, h, w) uint8 image and its :class:`Target`.

    With ``references`` it is image, target and reference (3, h, w) uint8, or None for an image without one. The
    reference goes through augmentation and transforms with the same random numbers as the image, and in a mosaic its
    parts are the references of the parts; there, an image without one stands for it.

    Crowd regions (``iscrowd`` 1) are left out, boxes are clipped to the image, boxes without area are dropped, and
    images without objects are kept. ``class_map`` defaults to the file's categories; validation data gets the map of
    the training data.

    With ``masks`` the targets have masks. For a panoptic file these are the pixels of the PNGs in the folder
    ``panoptic``, and the boxes are computed from them. For a detection file they are its polygons and run lengths.
    Objects without a pixel are dropped.

    The augmentation is a function of (seed, epoch, index), independent of the process that loads the sample, and does
    not change the state of torch's generators. With ``replace_unreadable`` a random image, a function of the same
    numbers, replaces one whose image or mask file cannot be read. It is augmented with the seed of the replaced image.

    ``augment`` is applied before ``transform``, in its epochs. The images that it needs beside the own one are drawn
    from all images by the same random numbers; one that cannot be read is replaced too, and counted when it is loaded
    for itself. A key with a ``side`` is transformed by ``sized[side]`` instead of ``transform``.

    ``groups`` are the numbers of the images' groups, for the batch sampler.

    Where the size of an image does not tell if its boxes have the EXIF rotation,
    :func:`~detr_bf.data.image_headers.boxes_as_stored` decides.

    Raises:
        InputError: the files have an error that would affect training; detr-bf check lists all of them.
    """

    def __init__(
        self,
        images: Path,
        annotations: Path | CocoAnnotations,
        transform: SampleTransform,
        class_map: ClassMap | None = None,
        seed: int = 0,
        masks: bool = False,
        panoptic: Path | None = None,
        replace_unreadable: bool = False,
        max_pixels: int = MAX_PIXELS,
        pixel_format: PixelFormat = RGB,
        augment: Augmentation | None = None,
        sized: Mapping[int, SampleTransform] | None = None,
        references: References | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        check_folder(images)
        content = read_annotations(annotations)
        pastes = augment is not None and augment.copy_paste > 0
        with prefix_errors("data.augment.copy_paste needs masks") if pastes and not masks else nullcontext():
            check_maps(content, panoptic, masks or pastes)
        self.folder = images
        self.transform = transform
        self.augment = augment
        self.sized = sized or {}
        self.references, self.groups = references, groups
        self.masks = masks
        self.class_map = class_map if class_map is not None else content.class_map
        if class_map is None and content.parents:
            names = printable(", ".join(str(category["name"]) for category in content.parents))
            logger.info("%s: no class for the supercategories %s without objects", printable(content.path), names)
        self.seed = seed
        self.replace_unreadable = replace_unreadable
        self.max_pixels, self.pixel_format = max_pixels, pixel_format
        self.image_ids: Sequence[int] = values_of(content.images, "id")
        self.file_names: Sequence[str] = values_of(content.images, "file_name")
        self.sizes = annotated_sizes(content.images)
        self.as_stored = bool(boxes_as_stored(images, zip(self.file_names, self.sizes, strict=True)))
        maps = (masks or pastes) and panoptic is not None
        objects = _ordered_objects(content, self.image_ids, self.class_map.index, maps)
        self._boxes, self._labels, self._starts = _object_tables(objects, self.image_ids, self.class_map)
        self._boxes_of_masks = maps
        self._masks: _MaskSource | None = None
        if maps and panoptic is not None:
            self._masks = _segment_masks(content, objects, panoptic, max_pixels)
        elif masks or pastes:
            with prefix_errors("data.augment.copy_paste needs masks") if not masks else nullcontext():
                self._masks = _segmentations(content, objects, dict(zip(self.image_ids, self.sizes, strict=True)))

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, key: SampleKey) -> LoadedSample:
        augment = self.augment and self.augment.at(key.epoch if key.phase is None else key.phase)
        masked = self.masks or (augment is not None and augment.copy_paste > 0)
        transform = self.transform if key.side is None else self.sized[key.side]

        def read(key: SampleKey) -> tuple[int, Pair, str]:
            found = partial(self._read, masked=masked, seed=key.sample_seed(self.seed))
            return read_or_replace(found, key, len(self), seed=self.seed, replace=self.replace_unreadable)

        index, pair, replaced = read(key)
        original_size, indices, drawn = (pair.image.image.shape[-2], pair.image.image.shape[-1]), [index], list[Pair]()

        def draw() -> Sample:
            other, found, _ = read(replace(key, index=int(torch.randint(len(self), ()))))
            indices.append(other)
            drawn.append(found)
            return found.image

        def draw_again() -> Sample:
            torch.randint(len(self), ())
            return drawn.pop(0).reference_or_image

        def transformed(sample: Sample, draw: Callable[[], Sample], masks: bool) -> Sample:
            # not torch.manual_seed, which also seeds the generators of the accelerators
            torch.default_generator.manual_seed(key.sample_seed(self.seed))
            if augment is not None:
                sample = augment(sample, draw, self.class_map.is_thing)
            return transform(sample if masks else sample._replace(masks=None))

        with torch.random.fork_rng(devices=[]):
            image, boxes, labels, masks = transformed(pair.image, draw, self.masks)
            reference = None
            if pair.reference is not None:
                reference = transformed(pair.reference, draw_again, False).image.as_subclass(Tensor)
        height, width = image.shape[-2:]
        fractions = box_convert(boxes.as_subclass(Tensor), "xyxy", "cxcywh") / torch.tensor([width, height] * 2)
        target = Target(
            image_id=self.image_ids[index],
            boxes=fractions,
            labels=labels,
            size=(height, width),
            original_size=original_size,
            file_name=" with ".join(printable(self.file_names[each]) for each in indices),
            masks=None if masks is None else masks.as_subclass(Tensor).bool(),
            replaced=replaced,
        )
        pixels = image.as_subclass(Tensor)
        return (pixels, target) if self.references is None else (pixels, target, reference)

    @property
    def class_counts_of_images(self) -> Tensor:
        """Number of objects of each image and class, (N, K) int64."""
        counts = torch.zeros(len(self), self.class_map.num_classes, dtype=torch.int64)
        rows = torch.repeat_interleave(torch.arange(len(self)), torch.as_tensor(self._starts).diff())
        return counts.index_put_((rows, self._labels), torch.ones(1, dtype=torch.int64), accumulate=True)

    def fingerprint(self, *, quick: bool = False) -> dict[str, Any]:
        """Return ``sha256`` of classes, objects, file names and file sizes, and the numbers ``images`` and ``objects``.

        It does not depend on the order of the images, nor on the folder that holds them. A ``quick`` one touches no
        image file; it covers masks, and has ``files``, the hash of the file names. ``references`` is another hash.
        """
        names = sorted(zip(self.file_names, range(len(self)), strict=True))
        digest = hashlib.sha256(json.dumps([self.class_map.category_ids, self.class_map.names]).encode())
        for name, index in names:
            rows = slice(int(self._starts[index]), int(self._starts[index + 1]))
            boxes, labels = self._boxes[rows], self._labels[rows]
            if quick:
                digest.update(name.encode(errors="surrogatepass") + boxes.numpy().tobytes() + labels.numpy().tobytes())
            else:  # the hash in recorded cells of comparisons
                entry = [name, file_size(self.folder / name), boxes.tolist(), labels.tolist()]
                digest.update(json.dumps(entry).encode())
        counts: dict[str, Any] = {"images": len(self), "objects": len(self._labels)}
        if self.references is not None:
            counts["references"] = self.references.fingerprint(quick=quick).hex()
        if not quick:
            return {"sha256": digest.hexdigest(), **counts}
        if isinstance(self._masks, Segmentations):
            digest.update(self._masks.run_lengths_and_polygons)
        files = hashlib.sha256(json.dumps([name for name, _ in names]).encode())
        return {"sha256": digest.hexdigest(), "files": files.hexdigest(), **counts}

    def _read(self, index: int, masked: bool, seed: int) -> Pair:
        path, size, form = self.folder / self.file_names[index], self.sizes[index], self.pixel_format
        read = partial(read_image, max_pixels=self.max_pixels, pixel_format=form, as_stored=self.as_stored)
        pixels = pixel_values(read(path, size))
        sample = Sample(Image(pixels), *self._objects(index, (pixels.shape[-2], pixels.shape[-1]), masked))
        file = None if self.references is None else self.references.file_of(index, seed)
        if self.references is None or file is None:
            return Pair(sample, None)
        # an own reference is rotated by its EXIF tag where its image would be
        size = self.sizes[index] if self.references.choice == "own" else None
        with prefix_errors(f"the reference of {printable(self.file_names[index])}, of the same size"):
            reference = pixel_values(read(file, size))
        fitted = self.references.fitted(reference, pixels, seed, printable(file.name))
        return Pair(sample, sample._replace(image=Image(fitted)))

    def _objects(
        self, index: int, size: tuple[int, int], masked: bool = True
    ) -> tuple[BoundingBoxes, Tensor, Mask | None]:
        """Return boxes (T, 4) in pixels, clipped to ``size`` (h, w), labels (T,), and masks (T, h, w) or None."""
        rows = slice(int(self._starts[index]), int(self._starts[index + 1]))
        boxes, labels, masks = clip_boxes_to_image(self._boxes[rows], size), self._labels[rows], None
        if self._masks is not None and masked:
            try:
                masks = self._masks.read(index, rows, size)
            except ValueError as error:
                image = f"image {self.image_ids[index]}, {printable(self.file_names[index])}"
                raise InputError(
                    f"{image} has no usable masks: {error}; correct it or drop the image, see detr-bf check --fix"
                ) from error
            seen = has_pixels(masks)
            boxes, labels, masks = boxes[seen], labels[seen], masks[seen]
            if self._boxes_of_masks:
                boxes = masks_to_boxes(masks)
                boxes[:, 2:] += 1  # from the index of the last pixel to its end
        keep = has_area(boxes)
        boxes = BoundingBoxes(boxes[keep], format=BoundingBoxFormat.XYXY, canvas_size=size)
        return boxes, labels[keep], None if masks is None else Mask(masks[keep])


def check_annotations(content: CocoAnnotations, category_ids: Collection[int], maps: bool) -> None:
    """Raise :class:`InputError` if training or evaluation cannot use an annotation.

    Args:
        content: of a file.
        category_ids: the known ones.
        maps: the annotations are panoptic segments whose masks are used.
    """
    image_ids = values_of(content.images, "id")
    problem = _first_problem(content.annotations, image_ids, category_ids, maps)
    if problem is None and not maps:
        sizes = dict(zip(image_ids, annotated_sizes(content.images), strict=True))
        problem = unit_problem(content.annotations, sizes.get)
    if problem:
        raise _unusable(content, problem)


def _check_form(file: Path, content: object) -> bool:
    """Return True for a panoptic file; raise :class:`InputError` if the file is not a COCO file."""
    path = printable(file)
    where = f"{path} is not a COCO detection file"
    if isinstance(content, list):
        is_results = content and isinstance(content[0], dict) and "score" in content[0]
        hint = ": it looks like detection results, which are not annotations" if is_results else ""
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
    for part, required in (_REQUIRED_PANOPTIC if panoptic else REQUIRED_KEYS).items():
        for number, entry in enumerate(content[part]):
            advice = "" if panoptic or part == "categories" else _FIX
            check_entry(f"{where}: {part}[{number}]", entry, required, advice)
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
            png_name(entry["file_name"])  # refuses paths outside the folder
        except ValueError as error:
            raise InputError(f"{where}: annotations[{number}] has {error}") from None
        for index, segment in enumerate(entry["segments_info"]):
            here = f"{where}: annotations[{number}].segments_info[{index}]"
            check_entry(here, segment, ("id", "category_id"))
            try:
                segment_id(segment)
            except ValueError as error:
                raise InputError(f"{here}: {error}") from None


def check_entry(where: str, entry: object, required: Sequence[str], advice: str = "") -> None:
    """Raise :class:`InputError` unless an entry of a COCO list is an object with the required keys."""
    if not isinstance(entry, dict):
        raise InputError(f"{where} is {type(entry).__name__}, expected an object{advice}")
    for key in required:
        kind, expected = _KINDS.get(key, (int, f"a whole number from 0 to {MAX_INT}"))
        if key not in entry:
            raise InputError(f"{where} has no {key}; it has {printable(', '.join(entry)) or 'nothing'}{advice}")
        value = entry[key]
        if not (is_id(value) if kind is int else isinstance(value, kind)):
            raise InputError(f"{where}: {key} is {value_text(value)}, expected {expected}{advice}")


def _ordered_objects(
    content: CocoAnnotations, image_ids: Sequence[int], category_ids: Collection[int], maps: bool
) -> Sequence[Mapping[str, Any]]:
    """Return all annotations except crowds, in the order of the images; :class:`InputError` if one is not usable."""
    check_annotations(content, category_ids, maps)
    if isinstance(annotations := content.annotations, Entries):
        found = annotations.where(~crowd_mask(annotations))
        return found.where(np.argsort(_indices_of(found.numbers("image_id"), image_ids), kind="stable"))
    order = {image_id: index for index, image_id in enumerate(image_ids)}
    objects = [annotation for annotation in content.annotations if not is_crowd(annotation)]
    return sorted(objects, key=lambda annotation: order[annotation["image_id"]])


def _object_tables(
    objects: Sequence[Mapping[str, Any]], image_ids: Sequence[int], class_map: ClassMap
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all objects as three tensors, in the order of the images.

    Boxes (N, 4) float32 x0, y0, x1, y1 in pixels of the original image, class indices (N,), and the first row of each
    image (images + 1,). With COCO's 860,000 Python objects instead of tensors every worker would get its own copy,
    because reading changes their reference counts.
    """
    if isinstance(objects, Entries):
        return _tables_of_columns(objects, image_ids, class_map)
    index_of = {image_id: index for index, image_id in enumerate(image_ids)}
    corners = torch.tensor([annotation["bbox"] for annotation in objects], dtype=torch.float64).reshape(-1, 4)
    boxes = box_convert(corners, "xywh", "xyxy").float()
    labels = torch.tensor([class_map.index[annotation["category_id"]] for annotation in objects], dtype=torch.int64)
    indices = torch.tensor([index_of[annotation["image_id"]] for annotation in objects], dtype=torch.int64)
    return boxes, labels, torch.searchsorted(indices, torch.arange(len(image_ids) + 1))


def _tables_of_columns(
    objects: Entries, image_ids: Sequence[int], class_map: ClassMap
) -> tuple[Tensor, Tensor, Tensor]:
    boxes, labels = torch.empty(len(objects), 4), torch.empty(len(objects), dtype=torch.int64)
    for start in range(0, len(objects), _BLOCK):  # the temporary arrays of all would be twice the result
        block = objects.where(np.arange(start, min(start + _BLOCK, len(objects))))
        rows = slice(start, start + len(block))
        corners = torch.from_numpy(np.array(block.boxes, dtype=np.float64))
        boxes[rows] = box_convert(corners, "xywh", "xyxy").float()
        labels[rows] = torch.from_numpy(_indices_of(block.numbers("category_id"), class_map.category_ids))
    counts = np.bincount(_indices_of(objects.numbers("image_id"), image_ids), minlength=len(image_ids))
    return boxes, labels, torch.from_numpy(np.concatenate(([0], np.cumsum(counts))))


def _indices_of(ids: np.ndarray, listed: Sequence[int]) -> np.ndarray:
    """Return the index in ``listed`` of each id; all are there."""
    known = integers(listed)
    if (np.diff(known) > 0).all():
        return np.searchsorted(known, ids)
    order = np.argsort(known, kind="stable")
    return order[np.searchsorted(known, ids, sorter=order)]


def _segment_masks(
    content: CocoAnnotations, objects: Sequence[Mapping[str, Any]], folder: Path, max_pixels: int
) -> SegmentMasks:
    """Return the masks of a panoptic file.

    Raises:
        InputError: an image has no PNG or several, two segments of an image have the same id, or the PNGs of two
            images' results would have the same name.
    """
    files = dict(content.maps or ())
    if len(files) < len(content.maps or ()):
        raise _unusable(content, "several annotations are for one image")
    for image in content.images:
        if image["id"] not in files:
            raise _unusable(content, f"image {image['id']} has no annotation, so its masks are unknown")
    names: dict[str, int] = {}
    for image in content.images:
        try:
            other = names.setdefault(png_name(image["file_name"]), image["id"])
        except ValueError as error:
            raise _unusable(content, f"image {image['id']} has {error}") from None
        if other != image["id"]:
            raise _unusable(content, f"the images {other} and {image['id']} would give result PNGs of the same name")
    if len({(segment["image_id"], segment["id"]) for segment in content.annotations}) < len(content.annotations):
        raise _unusable(content, "several segments of an image have the same id")
    ids = torch.tensor([segment["id"] for segment in objects], dtype=torch.int32)
    return SegmentMasks(folder, [files[image["id"]] for image in content.images], ids, max_pixels)


def _segmentations(
    content: CocoAnnotations,
    objects: Sequence[Mapping[str, Any]],
    sizes: Mapping[int, tuple[int, int] | None],
) -> Segmentations:
    """Return the masks of a detection file; ``sizes`` are (height, width) by image id, or None if not given."""
    parts = []
    for annotation in objects:
        image_id = annotation["image_id"]
        try:
            parts.append(parts_of(annotation.get("segmentation"), sizes[image_id]))
        except ValueError as error:
            raise _unusable(content, f"annotation {annotation.get('id')} of image {image_id}: {error}") from None
    return Segmentations(parts)


def _unusable(content: CocoAnnotations, problem: str) -> InputError:
    fix = "" if content.maps else "; with --fix OUT it writes a copy without it"
    return InputError(f"{printable(content.path)}: {problem}; detr-bf check lists all that is wrong with the data{fix}")


def _first_problem(
    annotations: Sequence[Mapping[str, Any]], image_ids: Sequence[int], category_ids: Collection[int], maps: bool
) -> str | None:
    """Return the first error that makes the annotations unusable for training or evaluation, or None."""
    listed = set(image_ids)
    if len(listed) < len(image_ids):
        return f"{len(image_ids) - len(listed)} image ids are listed more than once"
    unknown = sorted(distinct(annotations, "category_id").difference(category_ids))
    if unknown:
        return f"category ids {unknown} are used, but the known ones are {list(category_ids)}"
    if isinstance(annotations, Entries):
        suspect = unknown_ids(annotations, "image_id", listed) | suspect_boxes(annotations)
        annotations = annotations.where(suspect | suspect_areas(annotations) | suspect_crowds(annotations))
    for annotation in annotations:
        if annotation["image_id"] not in listed:
            return f"an annotation names image {annotation['image_id']}, which is not listed"
        try:
            annotation_values(annotation, pixels=maps)
        except ValueError as error:
            return f"annotation {value_text(annotation.get('id'))} of image {annotation['image_id']} has {error}"
    return None
