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

from detr_bf.structures import ClassMap, Detections

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
    found, end = [], 0
    for image, *place in zip(images, begins, ends, strict=True):
        begin, end = end, end + len(image.scores)
        rows = np.arange(begin, end)
        rows = rows[is_thing[labels[rows]]] if masks else rows
        rows = rows[np.argsort(-scores[rows], kind="stable")]
        encoded = None
        if masks:
            assert image.masks is not None, "the detections have masks"
            encoded = [image.masks[row - begin] for row in rows]
        parts = image.image_id, boxes[rows], scores[rows], labels[rows]
        found.append(_examined(*parts, objects.at(slice(*place)), encoded))
    return found


class _Objects(NamedTuple):
    """Annotations as columns, by ascending image id; N of them."""

    image_ids: np.ndarray  # (N,) int64
    labels: np.ndarray  # (N,) int64
    boxes: np.ndarray  # (N, 4) float64 x, y, width, height
    is_crowd: np.ndarray  # (N,) bool
    annotations: np.ndarray  # (N,) of dictionaries

    @classmethod
    def of(cls, annotations: Sequence[Mapping[str, Any]], class_map: ClassMap) -> _Objects:
        image_ids = np.array([each["image_id"] for each in annotations], dtype=np.int64)
        labels = np.array([class_map.index[each["category_id"]] for each in annotations], dtype=np.int64)
        boxes = np.array([each["bbox"] for each in annotations], dtype=np.float64).reshape(-1, 4)
        is_crowd = np.array([bool(each["iscrowd"]) for each in annotations], dtype=bool)
        own = np.fromiter(annotations, dtype=object, count=len(annotations))
        return cls(image_ids, labels, boxes, is_crowd, own).at(np.argsort(image_ids, kind="stable"))

    def at(self, rows: np.ndarray | slice) -> _Objects:
        return _Objects(*(column[rows] for column in self))


def columns_of(detections: Sequence[Detections]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return boxes (D, 4) float64 x0, y0, x1, y1, scores (D,) float64 and labels (D,) int64 of all images together."""
    empty = torch.empty(0, 4), torch.empty(0), torch.empty(0, dtype=torch.int64)
    parts = ([getattr(image, name).detach().cpu() for image in detections] for name in ("boxes", "scores", "labels"))
    boxes, scores, labels = (torch.cat([none, *part]) for none, part in zip(empty, parts, strict=True))
    return boxes.double().numpy(), scores.double().numpy(), labels.numpy()


def _examined(
    image_id: int,
    boxes: np.ndarray,
    scores: np.ndarray,
    labels: np.ndarray,
    objects: _Objects,
    masks: Sequence[Any] | None,
) -> ImageErrors:
    """Match the detections of one image, by descending score, and find the type of each error."""
    is_crowd, xywh = objects.is_crowd, objects.boxes
    if masks is not None:
        ious = pairwise_ious(masks, [each["segmentation"] for each in objects.annotations], is_crowd)
    else:
        ious = pairwise_ious(np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1), xywh, is_crowd)
    of_class = labels[:, None] == objects.labels
    corners = np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], axis=1)
    own_labels, on_crowd = objects.labels, np.zeros(len(labels), dtype=bool)
    if is_crowd.any():
        on_crowd = ((ious >= MATCH_IOU) & is_crowd & of_class).any(1)
        ious, of_class = ious[:, ~is_crowd], of_class[:, ~is_crowd]
        corners, own_labels = corners[~is_crowd], own_labels[~is_crowd]
    same = np.where(of_class, ious, 0.0)
    matches = match_objects(same, on_crowd)
    types, causes = _error_types(same, np.where(of_class, 0.0, ious), matches)
    return ImageErrors(image_id, boxes, scores, labels, corners, own_labels, ious, matches, types, causes)


def pairwise_ious(
    one: Sequence[Any] | np.ndarray, other: Sequence[Any] | np.ndarray, is_crowd: np.ndarray
) -> np.ndarray:
    """Return the IoU (N, M) of N and M boxes x, y, width, height, or run lengths, with crowds as COCO defines it."""
    if not (len(one) and len(other)):
        return np.zeros((len(one), len(other)))
    return np.asarray(coco_mask.iou(one, other, is_crowd.astype(np.uint8)))


def match_objects(ious: np.ndarray, on_crowd: np.ndarray) -> np.ndarray:
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
    matches[(matches == NO_OBJECT) & on_crowd] = CROWD
    return matches


def _error_types(same: np.ndarray, other: np.ndarray, matches: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """Return type and cause of each detection: TIDE, section 2.2, for what several types fit in this order.

    Args:
        same: IoU with the objects of its class, else 0.
        other: IoU with the objects of other classes, else 0.
        matches: of :func:`match_objects`.
    """
    causes = np.full(len(matches), NO_OBJECT, dtype=np.int64)
    types = np.full(len(matches), "background", dtype=object)
    if same.size:
        at = np.arange(len(matches))
        own, strange = same.argmax(1), other.argmax(1)
        iou_same, iou_other = same[at, own], other[at, strange]
        free = matches == NO_OBJECT
        types[iou_other >= BACKGROUND_IOU] = "both"
        for kind, fits, object_ in (
            ("duplicate", iou_same >= MATCH_IOU, own),
            ("class", iou_other >= MATCH_IOU, strange),
            ("localisation", (iou_same >= BACKGROUND_IOU) & (iou_same < MATCH_IOU), own),
        ):
            rows = np.flatnonzero(free & fits)
            types[rows], causes[rows] = kind, object_[rows]
    types[matches >= 0], types[matches == CROWD] = HIT, IGNORED
    return tuple(types.tolist()), causes
