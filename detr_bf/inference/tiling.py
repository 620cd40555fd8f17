"""Detection in parts of a large image.

The image is covered with squares of equal size that overlap. An object in the common area of two squares is found
twice, and one at the border of a square is cut. Two detections of the same class are taken for one object if their
parts in the common area of their squares have an IoU of at least ``SAME``. The joint detection has the highest score of
them, and of the boxes that no border cuts the one with the highest score; if all are cut, the box around all of them.

Shape legend: N detections, H x W pixels of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from pycocotools import mask as coco_mask
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Detections
from detr_bf.common.text import printable
from detr_bf.losses.postprocess import encoded

TilePlace = tuple[int, int, int, int]  # x0, y0, x1, y1 of a part, in pixels of the image
SAME = 0.5  # IoU in the common area
_CUT = 0.02  # of the size of a part: how near its border a box is cut
MOST_TILES = 100_000


def check_tile(tile: Any) -> tuple[int, int] | None:
    """Return the size and overlap of the parts.

    Raises:
        InputError: not None and not two whole numbers, of which the second is at least 0 and less than the first.
    """
    if tile is None:
        return None
    given = tile if isinstance(tile, (tuple, list)) else ()
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in given)
    if not (len(given) == 2 and whole and 0 <= given[1] < given[0]):
        raise InputError(
            "tile must be None or (size, overlap) in pixels, with an overlap from 0 to less than the size; got "
            f"{printable(repr(tile))}"
        )
    return given[0], given[1]


def tiles_of(size: tuple[int, int], tile: tuple[int, int] | None) -> list[TilePlace]:
    """Cover an image of height and width ``size``, row by row; the last parts of rows and columns end at its border.

    Raises:
        InputError: there would be more than ``MOST_TILES`` parts.
    """
    height, width = size
    if tile is None:
        return [(0, 0, width, height)]
    side, overlap = tile
    counts = [1 + max(0, -(-(extent - side) // (side - overlap))) for extent in size]
    if counts[0] * counts[1] > MOST_TILES:
        raise InputError(
            f"tile=({side}, {overlap}) divides an image of {width} x {height} pixels (width x height) into "
            f"{counts[0] * counts[1]:,} parts, at most {MOST_TILES:,}: give a larger size or a smaller overlap"
        )
    tops, lefts = (
        [max(0, min(number * (side - overlap), extent - side)) for number in range(count)]
        for count, extent in zip(counts, size, strict=True)
    )
    return [(x, y, min(x + side, width), min(y + side, height)) for y, x in product(tops, lefts)]


def join_tiles(found: Sequence[tuple[TilePlace, Detections]], size: tuple[int, int]) -> Detections:
    """Return the detections of an image of height and width ``size`` from those of its parts, best first.

    Args:
        found: place of each part, and its detections in pixels of the part.
    """
    if len(found) == 1:
        return found[0][1]
    offsets = [torch.tensor([x, y, x, y], dtype=torch.float32) for (x, y, _, _), _ in found]
    boxes = torch.cat([part.boxes + offset for offset, (_, part) in zip(offsets, found, strict=True)])
    scores, labels = (torch.cat([getattr(part, name) for _, part in found]) for name in ("scores", "labels"))
    tile = torch.cat([torch.full((len(part.boxes),), number) for number, (_, part) in enumerate(found)])
    places = torch.tensor([place for place, _ in found], dtype=torch.float32)[tile]
    groups = _same_objects(boxes, scores, labels, tile, places)
    cut = _cut(boxes, places, size)
    joint = []
    for group in groups:
        whole = [each for each in group if not cut[each]]
        around = boxes[whole[:1] or group]
        joint.append(torch.cat([around[:, :2].amin(0), around[:, 2:].amax(0)]))
    best = [group[0] for group in groups]
    masks = None
    if found[0][1].masks is not None:
        coded = [(place, mask) for place, part in found for mask in part.masks or ()]
        masks = tuple(_joint_mask([coded[each] for each in group], size) for group in groups)
    return Detections(
        found[0][1].image_id, torch.stack(joint) if joint else boxes.reshape(0, 4), scores[best], labels[best], masks
    )


def _same_objects(boxes: Tensor, scores: Tensor, labels: Tensor, tile: Tensor, places: Tensor) -> list[list[int]]:
    """Return the groups of detections of one object, best first; in a group, too, the best is first.

    A detection joins all groups of detections that it is the same object as; a group has at most one detection of each
    part.
    """
    order = torch.argsort(scores, descending=True, stable=True)
    rank = {each: number for number, each in enumerate(order.tolist())}
    group_of: dict[int, list[int]] = {}
    for number, each in enumerate(rank):
        group_of[each] = [each]
        before = order[:number]
        before = before[(labels[before] == labels[each]) & (tile[before] != tile[each])]
        overlap = _common_iou(boxes[each], places[each], boxes[before], places[before])
        for other in before[overlap >= SAME].tolist():
            own, found = group_of[each], group_of[other]
            if own is not found and {int(tile[x]) for x in own}.isdisjoint(int(tile[x]) for x in found):
                joint = sorted([*own, *found], key=rank.__getitem__)
                group_of |= dict.fromkeys(joint, joint)
    return sorted({id(group): group for group in group_of.values()}.values(), key=lambda group: rank[group[0]])


def _common_iou(box: Tensor, place: Tensor, boxes: Tensor, places: Tensor) -> Tensor:
    """Return the IoU (N,) of ``box`` (4,) with ``boxes`` (N, 4), all cut to the common area of their parts."""
    low, high = torch.maximum(place[:2], places[:, :2]), torch.minimum(place[2:], places[:, 2:])

    def area(top_left: Tensor, bottom_right: Tensor) -> Tensor:
        return (bottom_right.minimum(high) - top_left.maximum(low)).clamp(min=0).prod(1)

    shared = area(box[:2].maximum(boxes[:, :2]), box[2:].minimum(boxes[:, 2:]))
    union = area(box[:2], box[2:]) + area(boxes[:, :2], boxes[:, 2:]) - shared
    return torch.where(union > 0, shared / union, 0.0)


def _cut(boxes: Tensor, places: Tensor, size: tuple[int, int]) -> list[bool]:
    """Return whether each box (N, 4) ends at a border of its part (N, 4) that is not one of the image."""
    near = _CUT * (places[:, 2:] - places[:, :2]).amax(1, keepdim=True)
    inside = torch.tensor([0.0, 0.0, size[1], size[0]])
    found: list[bool] = (((boxes - places).abs() <= near) & (places != inside)).any(1).tolist()
    return found


def _joint_mask(parts: Sequence[tuple[TilePlace, Any]], size: tuple[int, int]) -> Any:
    """Return the union of the masks of some parts as a mask of the image."""
    whole = np.zeros(size, dtype=np.uint8)
    for (x0, y0, x1, y1), mask in parts:
        whole[y0:y1, x0:x1] |= coco_mask.decode(dict(mask))
    return encoded(torch.from_numpy(whole))
