"""Detections of single images matched with the objects, and the type of each error.

Detections are matched with the objects of their class as in COCO's evaluation at IoU 0.5: highest score first, each
with the free object of the highest IoU. A detection that is matched with a crowd region instead counts nowhere. Error
types are those of TIDE (Bolya et al., ECCV 2020).

Shape legend: D detections, O objects without crowds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from pycocotools import mask as coco_mask

from detr_bf.common.structures import ClassMap, Detections

MATCH_IOU, BACKGROUND_IOU = 0.5, 0.1
HIT, IGNORED = "hit", "ignored"
NO_OBJECT, CROWD = -1, -2  # instead of an object


@dataclass(frozen=True, eq=False)
class ImageErrors:
    """Detections of one image by descending score, its objects, and how they belong together."""

    image_id: int
    boxes: np.ndarray  # (D, 4) float64, x0, y0, x1, y1 in pixels
    scores: np.ndarray  # (D,) float64
    labels: np.ndarray  # (D,) int64
    object_boxes: np.ndarray  # (O, 4) float64
    object_labels: np.ndarray  # (O,) int64
    ious: np.ndarray  # (D, O) float64, of boxes or of masks
    matches: np.ndarray  # (D,) int64, the matched object; negative: none, or a crowd
    types: tuple[str, ...]  # D: hit, ignored, or one of ERROR_TYPES
    causes: np.ndarray  # (D,) int64, the object that a class, localisation or duplicate error is about, else negative

    @property
    def missed(self) -> np.ndarray:
        """Return for each object whether no match, class error or localisation error is about it."""
        explained = [at for at, kind in zip(self.causes, self.types, strict=True) if kind in ("class", "localisation")]
        seen = np.zeros(len(self.object_labels), dtype=bool)
        seen[self.matches[self.matches >= 0]] = True
        seen[explained] = True
        return ~seen

    def above(self, threshold: float) -> ImageErrors:
        """Return the errors that remain if only the detections with a score of at least ``threshold`` are kept.

        Matches stay the same, because higher scores are matched first.
        """
        kept = int((self.scores >= threshold).sum())
        return ImageErrors(
            self.image_id,
            self.boxes[:kept],
            self.scores[:kept],
            self.labels[:kept],
            self.object_boxes,
            self.object_labels,
            self.ious[:kept],
            self.matches[:kept],
            self.types[:kept],
            self.causes[:kept],
        )


def image_errors(
    ground_truth: Mapping[str, Any], detections: Iterable[Detections], class_map: ClassMap, *, masks: bool = False
) -> list[ImageErrors]:
    """Match the detections of each image and find the type of each error; images ascend by id.

    Args:
        ground_truth: COCO data set with ``bbox``, ``iscrowd`` and ``category_id`` in every annotation; for masks also
            ``segmentation``, as compressed run lengths.
        detections: of the images to examine.
        class_map: the classes.
        masks: take the IoU of masks, and things only.
    """
    is_thing = np.array(class_map.is_thing, dtype=bool)
    objects = _Objects.of(ground_truth["annotations"], class_map)
    if masks:
        objects = objects.at(np.flatnonzero(is_thing[objects.labels]))
    images = sorted(detections, key=lambda each: each.image_id)
    ids = np.array([image.image_id for image in images], dtype=np.int64)
    begins, ends = (np.searchsorted(objects.image_ids, ids, side=side) for side in ("left", "right"))
    boxes, scores, labels = columns_of(images)
    xywh = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
    found, orders, compared, end = [], [], [], 0
    for image, *place in zip(images, begins, ends, strict=True):
        begin, end = end, end + len(image.scores)
        order = np.argsort(-scores[begin:end], kind="stable") + begin
        order = order[is_thing[labels[order]]] if masks else order
        own, encoded = objects.at(slice(*place)), xywh[order]
        if masks:
            assert image.masks is not None, "the detections have masks"
            encoded = [image.masks[row - begin] for row in order]
        ious, comparison = _compared(encoded, labels[order], own, masks)
        found.append((image.image_id, own if not own.is_crowd.any() else own.at(~own.is_crowd), ious))
        orders.append(order)
        compared.append(comparison)
    if not found:
        return []
    types, causes = _error_types(_Comparison(*(np.concatenate(parts) for parts in zip(*compared, strict=True))))
    order, end, errors = np.concatenate(orders), 0, []
    boxes, scores, labels = boxes[order], scores[order], labels[order]
    for (image_id, own, ious), comparison in zip(found, compared, strict=True):
        rows = slice(end, end + len(comparison.matches))
        end = rows.stop
        detected, kinds = (boxes[rows], scores[rows], labels[rows]), tuple(types[rows])
        result = ImageErrors(
            image_id, *detected, own.corners, own.labels, ious, comparison.matches, kinds, causes[rows]
        )
        errors.append(result)
    return errors


class _Objects(NamedTuple):
    """Annotations as columns, by ascending image id; N of them."""

    image_ids: np.ndarray  # (N,) int64
    labels: np.ndarray  # (N,) int64
    boxes: np.ndarray  # (N, 4) float64 x, y, width, height
    corners: np.ndarray  # (N, 4) float64 x0, y0, x1, y1
    is_crowd: np.ndarray  # (N,) bool
    annotations: np.ndarray  # (N,) of dictionaries

    @classmethod
    def of(cls, annotations: Sequence[Mapping[str, Any]], class_map: ClassMap) -> _Objects:
        image_ids = np.array([each["image_id"] for each in annotations], dtype=np.int64)
        labels = np.array([class_map.index[each["category_id"]] for each in annotations], dtype=np.int64)
        boxes = np.array([each["bbox"] for each in annotations], dtype=np.float64).reshape(-1, 4)
        is_crowd = np.array([bool(each["iscrowd"]) for each in annotations], dtype=bool)
        own = np.fromiter(annotations, dtype=object, count=len(annotations))
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        return cls(image_ids, labels, boxes, corners, is_crowd, own).at(np.argsort(image_ids, kind="stable"))

    def at(self, rows: np.ndarray | slice) -> _Objects:
        return _Objects(*(column[rows] for column in self))


def columns_of(detections: Sequence[Detections]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return boxes (D, 4) float64 x0, y0, x1, y1, scores (D,) float64 and labels (D,) int64 of all images together."""
    empty = torch.empty(0, 4), torch.empty(0), torch.empty(0, dtype=torch.int64)
    parts = ([getattr(image, name).detach().cpu() for image in detections] for name in ("boxes", "scores", "labels"))
    boxes, scores, labels = (torch.cat([none, *part]) for none, part in zip(empty, parts, strict=True))
    return boxes.double().numpy(), scores.double().numpy(), labels.numpy()


class _Comparison(NamedTuple):
    """Detections compared with the objects of their image, (D,) each."""

    matches: np.ndarray  # int64, of match_objects
    same: np.ndarray  # int64, object of the same class with the highest IoU
    iou_same: np.ndarray  # its IoU, 0 if there is none
    other: np.ndarray  # int64, the same for objects of other classes
    iou_other: np.ndarray


def _compared(
    detected: Sequence[Any] | np.ndarray, labels: np.ndarray, objects: _Objects, masks: bool
) -> tuple[np.ndarray, _Comparison]:
    """Return the IoU (D, O) of detections, by descending score, and the comparison.

    ``detected`` are boxes (D, 4) x, y, width, height, with ``masks`` run lengths.
    """
    is_crowd = objects.is_crowd
    own = [each["segmentation"] for each in objects.annotations] if masks else objects.boxes
    ious, of_class = pairwise_ious(detected, own, is_crowd), labels[:, None] == objects.labels
    on_crowd = None
    if is_crowd.any():
        on_crowd = ((ious >= MATCH_IOU) & is_crowd & of_class).any(1)
        ious, of_class = ious[:, ~is_crowd], of_class[:, ~is_crowd]
    same = np.where(of_class, ious, 0.0)
    matches = match_objects(same, on_crowd)
    if not ious.size:
        none, nothing = np.zeros(len(labels), dtype=np.int64), np.zeros(len(labels))
        return ious, _Comparison(matches, none, nothing, none, nothing)
    other, at = ious - same, np.arange(len(labels))
    nearest_same, nearest_other = same.argmax(1), other.argmax(1)
    pairs = nearest_same, same[at, nearest_same], nearest_other, other[at, nearest_other]
    return ious, _Comparison(matches, *pairs)


def pairwise_ious(
    one: Sequence[Any] | np.ndarray, other: Sequence[Any] | np.ndarray, is_crowd: np.ndarray
) -> np.ndarray:
    """Return the IoU (N, M) of N and M boxes x, y, width, height, or run lengths, with crowds as COCO defines it."""
    if not (len(one) and len(other)):
        return np.zeros((len(one), len(other)))
    return np.asarray(coco_mask.iou(one, other, is_crowd.astype(np.uint8)))


def match_objects(ious: np.ndarray, on_crowd: np.ndarray | None = None) -> np.ndarray:
    """Return the object (or a negative number) of each detection, (D,), from the IoU with objects of its class."""
    matches = np.full(len(ious), NO_OBJECT, dtype=np.int64)
    taken: set[int] = set()
    rows, columns = np.nonzero(ious >= MATCH_IOU)
    near = zip(rows.tolist(), ious[rows, columns].tolist(), columns.tolist(), strict=True)
    for number, own in groupby(near, key=itemgetter(0)):
        left = [(iou, column) for _, iou, column in own if column not in taken]
        if left:
            _, best = max(left)  # of several the last, as in pycocotools
            taken.add(best)
            matches[number] = best
    if on_crowd is not None:
        matches[(matches == NO_OBJECT) & on_crowd] = CROWD
    return matches


def _error_types(found: _Comparison) -> tuple[list[str], np.ndarray]:
    """Return type and cause of each detection: TIDE, section 2.2, for what several types fit in this order."""
    causes = np.full(len(found.matches), NO_OBJECT, dtype=np.int64)
    types = np.full(len(found.matches), "background", dtype=object)
    types[found.iou_other >= BACKGROUND_IOU] = "both"
    near = found.iou_same >= MATCH_IOU
    for kind, fits, cause in (
        ("duplicate", near, found.same),
        ("class", found.iou_other >= MATCH_IOU, found.other),
        ("localisation", (found.iou_same >= BACKGROUND_IOU) & ~near, found.same),
    ):
        rows = np.flatnonzero((found.matches == NO_OBJECT) & fits)
        types[rows], causes[rows] = kind, cause[rows]
    types[found.matches >= 0], types[found.matches == CROWD] = HIT, IGNORED
    return types.tolist(), causes
