"""Precision, recall and F1 of detections against the score from which they are kept, and the best thresholds.

Detections are matched with the objects of their class as in COCO's evaluation, at one IoU. Detections that are matched
with a crowd region do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

DEFAULT_THRESHOLD = 0.5  # of a model that was never evaluated


@dataclass(frozen=True)
class OperatingPoint:
    """Precision, recall and F1 of the detections with a score of at least ``threshold``."""

    threshold: float
    precision: float
    recall: float
    f1: float  # harmonic mean of both

    @classmethod
    def of(cls, threshold: float, precision: float, recall: float) -> OperatingPoint:
        """Compute F1; it is 0 if precision and recall are."""
        total = precision + recall
        return cls(threshold, precision, recall, 2 * precision * recall / total if total else 0.0)


@dataclass(frozen=True)
class ScoreThresholds:
    """Scores from which the detections of a trained model are shown."""

    overall: float  # for all classes
    by_class: tuple[float, ...]  # in the order of the class map

    @classmethod
    def same(cls, threshold: float, num_classes: int) -> ScoreThresholds:
        """One threshold for everything."""
        return cls(threshold, (threshold,) * num_classes)


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
        """Return the threshold with the highest F1, None if no detection is a hit.

        The threshold lies in the middle between the lowest score that it keeps and the next one, so that it does not
        depend on the last digits of a score. Of several with the same F1 it is the highest.
        """
        thresholds, precision, recall = self.curve()
        if not (self.objects and self.hits.any()):
            return None
        total = precision + recall
        f1 = np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
        at = int(f1.argmax())
        below = thresholds[at + 1] if at + 1 < len(thresholds) else thresholds[at]
        return OperatingPoint.of(float((thresholds[at] + below) / 2), float(precision[at]), float(recall[at]))

    def at(self, threshold: float) -> OperatingPoint:
        """Return precision and recall at any threshold; the precision of nothing is 1."""
        kept = int((self.scores >= threshold).sum())
        found = int(self.hits[:kept].sum())
        return OperatingPoint.of(threshold, found / kept if kept else 1.0, found / max(1, self.objects))


def all_classes(classes: Iterable[ScoredHits]) -> ScoredHits:
    """Return the detections of several classes together."""
    found = list(classes)
    return ScoredHits.of(
        np.concatenate([np.empty(0), *(each.scores for each in found)]),
        np.concatenate([np.empty(0, bool), *(each.hits for each in found)]),
        sum(each.objects for each in found),
    )
