"""Dataset mapper of detectron2 with DETR's augmentation.

Augmentation: Carion et al. 2020 (arXiv 2005.12872, section 4, "Technical details"). All randomness is from numpy, as in
detectron2, so its worker seeds apply.

Shape legend: T objects of one image, h x w its pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from detectron2.config import CfgNode, configurable
from detectron2.data import detection_utils
from detectron2.data import transforms as T
from detectron2.structures import BitMasks, Boxes, BoxMode, Instances, PolygonMasks
from pycocotools import mask as coco_mask
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.data.masks import read_ids
from detr_bf.detectron2.tensors import Size, drawn

logger = logging.getLogger(__name__)

FLIPS = ("horizontal", "vertical", "none")
MASK_FORMATS = ("polygon", "bitmask")
_GROUND_TRUTH = ("annotations", "segments_info", "pan_seg_file_name", "sem_seg_file_name")


def train_augmentations(
    *,
    short_sides: Sequence[int] = tuple(range(480, 801, 32)),
    max_size: int = 1333,
    sampling: str = "choice",
    flip: str = "horizontal",
    crop_probability: float = 0.5,
    crop_short_sides: Sequence[int] = (400, 500, 600),
    crop_type: str = "absolute_range",
    crop_size: Sequence[float] = (384, 600),
) -> list[T.Augmentation]:
    """Flip with probability 0.5, crop with ``crop_probability``, resize; the defaults are DETR's on COCO.

    Args:
        short_sides: pixels of the shorter side after resizing: one of these, or with ``sampling`` "range" any number
            between the first and the second.
        max_size: largest longer side, pixels.
        sampling: "choice" or "range".
        flip: "horizontal", "vertical" or "none".
        crop_probability: 0 for no crops.
        crop_short_sides: pixels of the shorter side before cropping; one is chosen.
        crop_type, crop_size: arguments of detectron2's ``RandomCrop``; for "absolute_range" the size is the shortest
            and the longest side in pixels.

    Raises:
        InputError: unknown ``flip``.
    """
    if flip not in FLIPS:
        raise InputError(f"flip (INPUT.RANDOM_FLIP) must be one of {', '.join(FLIPS)}; got '{flip}'")
    found: list[T.Augmentation] = []
    if flip != "none":
        found.append(T.RandomFlip(horizontal=flip == "horizontal", vertical=flip == "vertical"))
    if crop_probability:
        crop = [
            T.ResizeShortestEdge(tuple(crop_short_sides), sample_style="choice"),
            T.RandomCrop(crop_type, tuple(crop_size)),
        ]
        found.append(T.RandomApply(T.AugmentationList(crop), prob=crop_probability))
    return [*found, T.ResizeShortestEdge(tuple(short_sides), max_size, sampling)]


def eval_augmentations(*, short_side: int = 800, max_size: int = 1333) -> list[T.Augmentation]:
    """Resize the shorter side to ``short_side`` pixels, the longer to at most ``max_size``; 0 turns resizing off."""
    return [T.ResizeShortestEdge((short_side,), max_size, "choice")]


class DetrBfDatasetMapper:
    """Reads the image of a data set dictionary and returns the input of the model.

    This is ``image`` (3, h, w) uint8, and in training ``instances`` of that size with ``gt_boxes``, ``gt_classes`` and,
    with ``masks``, ``gt_masks``. Crowds are left out, boxes are clipped to a crop, and objects without area or with
    empty masks are dropped. In panoptic data (``segments_info`` and ``pan_seg_file_name``) the boxes are the extents of
    the masks in the whole image; without ``masks`` they are read from the JSON. All other entries are kept; ``height``
    and ``width`` are those of the file.

    Args:
        is_train: False: no ground truth is read.
        augmentations: see :func:`train_augmentations`, :func:`eval_augmentations`.
        image_format: channel order, "RGB" or "BGR".
        masks: read the masks of the objects too.
        mask_format: "polygon", or "bitmask", which also reads run lengths and arrays. Panoptic masks are bitmaps.

    Raises:
        InputError: unknown mask format; on use, a mask is missing, of another format or of another size than the
            image.
    """

    @configurable
    def __init__(
        self,
        is_train: bool = True,
        *,
        augmentations: Sequence[T.Augmentation],
        image_format: str = "RGB",
        masks: bool = False,
        mask_format: str = "bitmask",
    ) -> None:
        if mask_format not in MASK_FORMATS:
            raise InputError(f"INPUT.MASK_FORMAT must be one of {', '.join(MASK_FORMATS)}; got '{mask_format}'")
        self.is_train = is_train
        self.augmentations = T.AugmentationList(augmentations)
        self.image_format = image_format
        self.mask_format = mask_format if masks else None
        logger.info("augmentation in %s: %s", "training" if is_train else "evaluation", self.augmentations)

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        """Return the constructor arguments for a config extended by ``add_detr_bf_config``."""
        given = cfg.INPUT
        if is_train:
            augmentations = train_augmentations(
                short_sides=given.MIN_SIZE_TRAIN,
                max_size=given.MAX_SIZE_TRAIN,
                sampling=given.MIN_SIZE_TRAIN_SAMPLING,
                flip=given.RANDOM_FLIP,
                crop_probability=given.CROP_PROBABILITY if given.CROP.ENABLED else 0.0,
                crop_short_sides=given.CROP_SHORT_SIDES,
                crop_type=given.CROP.TYPE,
                crop_size=given.CROP.SIZE,
            )
        else:
            augmentations = eval_augmentations(short_side=given.MIN_SIZE_TEST, max_size=given.MAX_SIZE_TEST)
        return {
            "is_train": is_train,
            "augmentations": augmentations,
            "image_format": given.FORMAT,
            "masks": cfg.MODEL.MASK_ON,
            "mask_format": given.MASK_FORMAT,
        }

    def __call__(self, dataset_dict: Mapping[str, Any]) -> dict[str, Any]:
        sample = dict(dataset_dict)
        truth = {key: sample.pop(key) for key in _GROUND_TRUTH if key in sample}
        image = detection_utils.read_image(sample["file_name"], format=self.image_format)
        detection_utils.check_image_size(sample, image)
        augmented = T.AugInput(image)
        transforms = self.augmentations(augmented)
        sample["image"] = torch.from_numpy(np.ascontiguousarray(augmented.image.transpose(2, 0, 1)))
        if not self.is_train:
            return sample
        change = Change(transforms, image.shape[:2], augmented.image.shape[:2])
        try:
            if "segments_info" in truth and self.mask_format:
                png = Path(truth["pan_seg_file_name"])
                sample["instances"] = instances_of_map(png, truth["segments_info"], change)
            elif "segments_info" in truth:
                boxes = [{**segment, "bbox_mode": BoxMode.XYWH_ABS} for segment in truth["segments_info"]]
                sample["instances"] = instances_of(boxes, change, None)
            elif "annotations" in truth:
                sample["instances"] = instances_of(truth["annotations"], change, self.mask_format)
        except InputError as error:
            raise InputError(f"{sample['file_name']}: {error}") from error
        return sample


class Change(NamedTuple):
    """Transforms applied to an image, with its size before and after (height, width in pixels)."""

    transforms: T.TransformList
    before: Size
    after: Size


def instances_of(annotations: Sequence[Mapping[str, Any]], change: Change, mask_format: str | None) -> Instances:
    """Convert the ``annotations`` of a data set dictionary to ground truth; ``mask_format`` None: no masks.

    Raises:
        InputError: the mask of an object is missing or unreadable in this format.
    """
    objects = [one for one in annotations if not one.get("iscrowd")]
    boxes = [BoxMode.convert(one["bbox"], one["bbox_mode"], BoxMode.XYXY_ABS) for one in objects]
    masks = None
    if mask_format == "polygon":
        masks = PolygonMasks([_outlines(one.get("segmentation"), change) for one in objects])
    elif mask_format == "bitmask":
        pixels = [_pixels(one.get("segmentation"), change) for one in objects]
        masks = BitMasks(torch.stack(pixels) if pixels else torch.zeros(0, *change.after, dtype=torch.bool))
    return _instances(np.array(boxes, dtype=np.float64), [one["category_id"] for one in objects], masks, change)


def instances_of_map(png: Path, segments: Sequence[Mapping[str, Any]], change: Change) -> Instances:
    """Convert a panoptic PNG and its ``segments_info`` to ground truth.

    Raises:
        InputError: the PNG is missing, cannot be read, or has another size than the image.
    """
    ids = read_ids(png)
    if tuple(ids.shape) != tuple(change.before):
        raise InputError(
            f"the panoptic PNG {png} has {tuple(ids.shape)} pixels (height, width), the image {change.before}"
        )
    objects = [segment for segment in segments if not segment.get("iscrowd")]
    wanted = torch.tensor([segment["id"] for segment in objects], dtype=torch.int32)[:, None, None]
    extents = BitMasks(ids == wanted).get_bounding_boxes().tensor.double().numpy()
    # as three bytes: detectron2 resizes int32 arrays to other pixels than uint8 images
    coloured = torch.stack([ids & 255, ids >> 8 & 255, ids >> 16], dim=-1).to(torch.uint8).numpy()
    moved = change.transforms.apply_segmentation(coloured).astype(np.int32) @ np.array([1, 256, 65536], dtype=np.int32)
    masks = BitMasks(torch.from_numpy(moved) == wanted)
    return _instances(extents, [segment["category_id"] for segment in objects], masks, change)


def _instances(
    boxes: np.ndarray, classes: Sequence[int], masks: PolygonMasks | BitMasks | None, change: Change
) -> Instances:
    """Keep the visible objects. Boxes (T, 4) are x0, y0, x1, y1 in pixels before the change, masks are after it."""
    moved = Boxes(change.transforms.apply_box(boxes.reshape(-1, 4)))
    moved.clip(change.after)
    instances = Instances(change.after, gt_boxes=moved, gt_classes=torch.tensor(classes, dtype=torch.int64))
    seen = moved.nonempty()
    if masks is not None:
        instances.gt_masks = masks
        pixels = masks.tensor if isinstance(masks, BitMasks) else drawn(masks.polygons, change.after)
        seen &= pixels.flatten(1).any(dim=1)
    return instances[seen]


def _outlines(segmentation: object, change: Change) -> list[np.ndarray]:
    """Transform polygons to pixels of the changed image; they are clipped later, when drawn."""
    if not isinstance(segmentation, list) or not segmentation:
        given = "missing" if segmentation is None or segmentation == [] else f"a {type(segmentation).__name__}"
        raise InputError(
            f"the segmentation of an object is {given}, expected polygons: give every object a mask; run lengths "
            "and arrays need INPUT.MASK_FORMAT bitmask"
        )
    corners = (np.array(polygon, dtype=np.float64).reshape(-1, 2) for polygon in segmentation)
    return [change.transforms.apply_coords(points).reshape(-1) for points in corners]


def _pixels(segmentation: Any, change: Change) -> Tensor:
    """Convert polygons, run lengths (compressed or not) or an array to a mask (h, w) bool of the changed image."""
    if not isinstance(segmentation, dict | np.ndarray):
        return drawn([_outlines(segmentation, change)], change.after)[0]
    size = tuple(segmentation["size"] if isinstance(segmentation, dict) else segmentation.shape)
    if size != tuple(change.before):
        raise InputError(f"a mask has {size} pixels (height, width), the image {change.before}")
    if isinstance(segmentation, dict):
        plain = isinstance(segmentation["counts"], list)
        segmentation = coco_mask.decode(coco_mask.frPyObjects(segmentation, *size) if plain else segmentation)
    moved = change.transforms.apply_segmentation(segmentation.astype(np.uint8))
    return torch.from_numpy(np.ascontiguousarray(moved)).bool()
