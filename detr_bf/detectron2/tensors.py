"""Conversions between detectron2's values and ours on plain tensors, without importing detectron2.

Shape legend: B images, T objects of one image, N detections, H x W pixels of the padded batch, h x w of one image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision.ops import box_convert

from detr_bf.common.errors import InputError
from detr_bf.common.masks import Masks, ProductMasks
from detr_bf.common.structures import Batch, Detections, PanopticMap, Target, padding_mask

Size = tuple[int, int]  # height, width in pixels


class Fields(NamedTuple):
    """Fields of a predicted ``Instances``."""

    boxes: Tensor  # (N, 4) float32, x0, y0, x1, y1 in pixels of the output
    scores: Tensor  # (N,) float32
    classes: Tensor  # (N,) int64
    masks: Tensor | None  # (N, h, w) bool at the size of the output


def batch_of(images: Tensor, sizes: Sequence[Size], targets: Sequence[Target] = ()) -> Batch:
    """Build a batch from padded images (B, 3, H, W) and the size of each."""
    height, width = images.shape[-2:]
    return Batch(images, padding_mask(sizes, (height, width), images.device), tuple(targets))


def target_of(instances: Any, *, num_classes: int, masks: bool, number: int = 0) -> Target:
    """Convert the ground truth of one image.

    Args:
        instances: a detectron2 ``Instances`` with ``gt_boxes``, ``gt_classes`` and, for ``masks``, ``gt_masks``
            (polygons or bit masks).
        num_classes: of the model.
        masks: True if the model has a mask head.
        number: index of the image in the batch, for messages.

    Raises:
        InputError: a field is missing, a class is out of range, a box is not finite, or masks have another size.
    """
    wanted = ("gt_boxes", "gt_classes", *(("gt_masks",) if masks else ()))
    missing = [name for name in wanted if not instances.has(name)]
    if missing and not (missing == ["gt_masks"] and len(instances.gt_boxes.tensor) == 0):  # as detectron2 does
        raise InputError(
            f"image {number} of the batch: its instances lack {', '.join(missing)}; "
            "a mask head needs a mapper that keeps masks (MODEL.MASK_ON True)"
        )
    height, width = instances.image_size
    corners, labels = instances.gt_boxes.tensor.float(), instances.gt_classes.long()
    if not corners.isfinite().all():
        raise InputError(f"image {number} of the batch has boxes with infinity or NaN: {corners.tolist()}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise InputError(
            f"image {number} of the batch has classes from {int(labels.min())} to {int(labels.max())}, the model has "
            f"0 to {num_classes - 1}: set MODEL.DETR_BF.NUM_CLASSES to the number of classes of the data set"
        )
    return Target(
        image_id=number,
        boxes=box_convert(corners / corners.new_tensor([width, height] * 2), "xyxy", "cxcywh"),
        labels=labels,
        size=(height, width),
        original_size=(height, width),
        masks=masks_of(instances.get_fields().get("gt_masks"), (height, width), corners.device) if masks else None,
    )


def masks_of(masks: Any, size: Size, device: torch.device | str = "cpu") -> Tensor:
    """Convert ``PolygonMasks`` or ``BitMasks`` of T objects, or None for T = 0, to (T, h, w) bool.

    Raises:
        InputError: bit masks of another size than the image, or an unknown type.
    """
    if masks is None:
        return torch.zeros(0, *size, dtype=torch.bool, device=device)
    if hasattr(masks, "polygons"):
        return drawn(masks.polygons, size).to(device)
    found = getattr(masks, "tensor", masks)
    if not isinstance(found, Tensor) or found.ndim != 3:
        raise InputError(f"gt_masks must be PolygonMasks or BitMasks, got {type(masks).__name__}")
    if tuple(found.shape[1:]) != tuple(size):
        raise InputError(f"gt_masks have {tuple(found.shape[1:])} pixels (height, width), the image {tuple(size)}")
    return found.to(device, torch.bool)


def cropped(masks: Masks | ProductMasks, padded: Size, size: Size) -> Masks:
    """Crop masks of a batch of size ``padded`` to ``size``, that of its largest image."""

    def of(row: Tensor, query: Tensor) -> Tensor:
        logits = F.interpolate(masks.of(row, query)[:, None], size=padded, mode="bilinear")
        return logits[:, 0, : size[0], : size[1]]

    return Masks(of, masks.rows, masks.queries)


def drawn(objects: Sequence[Sequence[Any]], size: Size) -> Tensor:
    """Draw the polygons of T objects, each a list of x, y, x, y, ... in pixels, to (T, h, w) bool."""
    masks = np.zeros((len(objects), *size), dtype=np.uint8)
    for mask, polygons in zip(masks, objects, strict=True):
        if len(polygons):
            outlines = [np.asarray(polygon, dtype=np.float64) for polygon in polygons]
            mask[:] = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(outlines, *size)))
    return torch.from_numpy(masks).bool()


def output_target(number: int, size: Size, output_size: Size) -> Target:
    """Target without objects for postprocessing: size of the image in the batch and of the output."""
    return Target(number, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), size=size, original_size=output_size)


def fields_of(found: Detections, size: Size, kept_classes: Sequence[bool] | None = None) -> Fields:
    """Convert the detections of one image.

    Args:
        found: detections with boxes in pixels of the output.
        size: of the output.
        kept_classes: for each class, True to keep its detections (the things of a panoptic model); None: keep all.
    """
    keep = torch.ones(len(found.labels), dtype=torch.bool)
    if kept_classes is not None:
        keep = torch.tensor(kept_classes)[found.labels]
    masks = None
    if found.masks is not None:
        coded = [dict(found.masks[index]) for index in keep.nonzero()[:, 0].tolist()]
        pixels = coco_mask.decode(coded) if coded else np.zeros((*size, 0), dtype=np.uint8)
        masks = torch.from_numpy(pixels).permute(2, 0, 1).bool()
    return Fields(found.boxes[keep], found.scores[keep], found.labels[keep], masks)


def panoptic_of(found: PanopticMap, is_thing: Sequence[bool]) -> tuple[Tensor, list[dict[str, Any]]]:
    """Convert a panoptic map to detectron2's form: ids (h, w) int32, 0 = no segment, and a dictionary per segment."""
    segments = [
        {"id": one.id, "isthing": bool(is_thing[one.label]), "category_id": one.label, "area": one.area}
        for one in found.segments
    ]
    return found.ids, segments
