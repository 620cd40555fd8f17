"""Between detectron2's values and ours, on plain tensors; detectron2 itself is not imported.

Shape legend: B images, T objects of one image, N detections, H x W pixels of the padded batch, h x w of one image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision.ops import box_convert

from detr_bf.errors import InputError
from detr_bf.structures import Batch, Detections, Masks, PanopticMap, Target, padding_mask

Size = tuple[int, int]  # height, width in pixels


class Fields(NamedTuple):
    """What an ``Instances`` of predictions is made of."""

    boxes: Tensor  # (N, 4) float32, x0, y0, x1, y1 in pixels of the output
    scores: Tensor  # (N,) float32
    classes: Tensor  # (N,) int64
    masks: Tensor | None  # (N, h, w) bool at the size of the output


def batch_of(images: Tensor, sizes: Sequence[Size], targets: Sequence[Target] = ()) -> Batch:
    """Padded images (B, 3, H, W) with the size of each."""
    height, width = images.shape[-2:]
    return Batch(images, padding_mask(sizes, (height, width), images.device), tuple(targets))


def target_of(instances: Any, *, num_classes: int, masks: bool, number: int = 0) -> Target:
    """Ground truth of one image.

    Args:
        instances: a detectron2 ``Instances`` with ``gt_boxes``, ``gt_classes`` and, for ``masks``, ``gt_masks``, which
            are polygons or bit masks.
        num_classes: of the model.
        masks: whether the model has a mask head.
        number: of the image, for messages.

    Raises:
        InputError: a field is missing, a class is outside the model's, a box is not finite, masks have another size.
    """
    wanted = ("gt_boxes", "gt_classes", *(("gt_masks",) if masks else ()))
    missing = [name for name in wanted if not instances.has(name)]
    if missing and not (missing == ["gt_masks"] and len(instances.gt_boxes.tensor) == 0):  # detectron2 sets none then
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
            f"image {number} of the batch has classes from {int(labels.min())} to {int(labels.max())}, the model knows "
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
    """Detectron2's ``PolygonMasks`` or ``BitMasks`` of T objects, None for none -> (T, h, w) bool.

    Raises:
        InputError: bit masks of another size than the image's, or another kind of masks.
    """
    if masks is None:
        return torch.zeros(0, *size, dtype=torch.bool, device=device)
    if hasattr(masks, "polygons"):
        return drawn(masks.polygons, size).to(device)
    found = getattr(masks, "tensor", masks)
    if not isinstance(found, Tensor) or found.ndim != 3:
        raise InputError(f"gt_masks must be PolygonMasks or BitMasks, got {type(masks).__name__}")
    if tuple(found.shape[1:]) != tuple(size):
        raise InputError(
            f"gt_masks are of {tuple(found.shape[1:])} pixels (height, width), the image is of {tuple(size)}"
        )
    return found.to(device, torch.bool)


def cropped(masks: Masks, padded: Size, size: Size) -> Masks:
    """Masks over a batch that was padded further than to its largest image, cut to that ``size``."""

    def of(row: Tensor, query: Tensor) -> Tensor:
        logits = F.interpolate(masks.of(row, query)[:, None], size=padded, mode="bilinear")
        return logits[:, 0, : size[0], : size[1]]

    return replace(masks, of=of)


def drawn(objects: Sequence[Sequence[Any]], size: Size) -> Tensor:
    """Polygons of T objects, each a list of x, y, x, y, ... in pixels -> (T, h, w) bool."""
    masks = np.zeros((len(objects), *size), dtype=np.uint8)
    for mask, polygons in zip(masks, objects, strict=True):
        if len(polygons):
            outlines = [np.asarray(polygon, dtype=np.float64) for polygon in polygons]
            mask[:] = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(outlines, *size)))
    return torch.from_numpy(masks).bool()


def output_target(number: int, size: Size, output_size: Size) -> Target:
    """What postprocessing has to know of an image: its size in the batch, and that of the output."""
    return Target(number, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), size=size, original_size=output_size)


def fields_of(found: Detections, size: Size, kept_classes: Sequence[bool] | None = None) -> Fields:
    """What the model found in one image.

    Args:
        found: boxes in pixels of the output.
        size: of the output.
        kept_classes: of each class, whether its detections are kept; None: all are. Of a panoptic model things are.
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
    """A panoptic map as detectron2 has it: ids (h, w) int32, 0 = no segment, and what is known of each segment."""
    segments = [
        {"id": one.id, "isthing": bool(is_thing[one.label]), "category_id": one.label, "area": one.area}
        for one in found.segments
    ]
    return found.ids, segments
