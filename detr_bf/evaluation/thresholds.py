"""Precision, recall and F1 of detections against the score from which they are kept, and the best thresholds.

Detections are matched with the objects of their class as in COCO's evaluation, at one IoU. Detections that are matched
with a crowd region do not count.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from detr_bf.structures import ClassMap

IOU = 0.5


@dataclass(frozen=True)
class OperatingPoint:
    """Precision and recall of the detections with a score of at least ``threshold``."""

    threshold: float
    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


@dataclass(frozen=True)
class ScoredHits:
    """Detections of some classes with their scores, highest first.

    Shape legend: D detections.
    """

    scores: np.ndarray  # (D,) float64, descending
    hits: np.ndarray  # (D,) bool: matched with an object
    objects: int  # that can be found

    @classmethod
    def of(cls, scores: np.ndarray, hits: np.ndarray, objects: int) -> ScoredHits:
        """Sort detections by score."""
        order = np.argsort(-scores, kind="stable")
        return cls(scores[order], hits[order], objects)

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return thresholds (descending), precision and recall at each distinct score: three times (D',)."""
        last = np.flatnonzero(np.append(np.diff(self.scores) < 0, True)) if len(self.scores) else np.empty(0, np.int64)
        found = np.cumsum(self.hits)[last]
        return self.scores[last], found / (last + 1), found / max(1, self.objects)

    def best(self) -> OperatingPoint | None:
        """Return the threshold with the highest F1, None without objects or detections.

        The threshold lies in the middle between the lowest score that it keeps and the next one, so that it does not
        depend on the last digits of a score. Of several with the same F1 it is the highest.
        """
        thresholds, precision, recall = self.curve()
        if not (self.objects and len(thresholds)):
            return None
        total = precision + recall
        f1 = np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
        at = int(f1.argmax())
        below = thresholds[at + 1] if at + 1 < len(thresholds) else thresholds[at]
        return OperatingPoint(float((thresholds[at] + below) / 2), float(precision[at]), float(recall[at]))

    def at(self, threshold: float) -> OperatingPoint:
        """Return precision and recall at any threshold; the precision of nothing is 1."""
        kept = int((self.scores >= threshold).sum())
        found = int(self.hits[:kept].sum())
        return OperatingPoint(threshold, found / kept if kept else 1.0, found / max(1, self.objects))


def scored_hits(
    ground_truth: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    class_map: ClassMap,
    *,
    max_detections: int = 100,
    iou: float = IOU,
) -> dict[int, ScoredHits]:
    """Match detections with objects and return them by class index.

    Args:
        ground_truth: COCO data set with ``area``, ``iscrowd`` and ids from 1 in every annotation.
        results: detections in COCO's results format, with ``bbox``.
        class_map: the classes.
        max_detections: limit per image and class, highest scores first.
        iou: from which a detection matches an object.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        truth, found = COCO(), COCO()
        truth.dataset = {
            key: [dict(each) for each in ground_truth[key]] for key in ("images", "annotations", "categories")
        }
        truth.createIndex()
        listed = [dict(result) for result in results]
        found = truth.loadRes(listed) if listed else found
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.params.iouThrs = np.array([iou])
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.params.maxDets = [max_detections]
        evaluation.evaluate()
    by_class: dict[int, list[Mapping[str, Any]]] = {}
    for image in evaluation.evalImgs:
        if image is not None:
            by_class.setdefault(class_map.index[image["category_id"]], []).append(image)
    return {label: _joined(images) for label, images in sorted(by_class.items())}


def _joined(images: list[Mapping[str, Any]]) -> ScoredHits:
    scores = np.concatenate([np.asarray(image["dtScores"], dtype=np.float64) for image in images])
    hits = np.concatenate([np.asarray(image["dtMatches"])[0] > 0 for image in images])
    counted = np.concatenate([np.asarray(image["dtIgnore"])[0] == 0 for image in images])
    objects = sum(int((np.asarray(image["gtIgnore"]) == 0).sum()) for image in images)
    return ScoredHits.of(scores[counted], hits[counted], objects)


def pooled(classes: Iterable[ScoredHits]) -> ScoredHits:
    """Return the detections of several classes together."""
    found = list(classes)
    return ScoredHits.of(
        np.concatenate([np.empty(0), *(each.scores for each in found)]),
        np.concatenate([np.empty(0, bool), *(each.hits for each in found)]),
        sum(each.objects for each in found),
    )
