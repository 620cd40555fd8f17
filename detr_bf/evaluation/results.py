"""Results of one evaluation: COCO average precision, panoptic quality, and both together.

All metrics are fractions in [0, 1]. ``None`` (JSON null) means that there is no ground truth to measure; it is not 0
and never enters an average. Definitions: https://cocodataset.org/#detection-eval and ``#panoptic-eval``.

Thresholds of scores: detections are matched with the objects of their class as in COCO's evaluation, at IoU 0.5.
Detections that are matched with a crowd region do not count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from detr_bf.common.text import counted

BOX_METRIC_NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR", "ARs", "ARm", "ARl")
PANOPTIC_METRIC_NAMES = ("PQ", "SQ", "RQ", "PQ_th", "SQ_th", "RQ_th", "PQ_st", "SQ_st", "RQ_st")
SIZE_NAMES = ("small", "medium", "large")
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


@dataclass(frozen=True)
class ClassResult:
    """Average precision of one class, its number of ground-truth objects (without crowds) and its best threshold."""

    AP: float | None
    AP50: float | None
    num_objects: int
    best: OperatingPoint | None = None  # highest F1 at IoU 0.5; None without objects or detections

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> ClassResult:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{**state, "best": _point(state.get("best"))})


@dataclass(frozen=True)
class CocoSummary:
    """Twelve COCO metrics; ``AR``, ``ARs``, ``ARm`` and ``ARl`` are recalls at ``max_detections`` (COCO's AR100)."""

    AP: float | None  # mean over IoU 0.50, 0.55, ..., 0.95
    AP50: float | None
    AP75: float | None
    APs: float | None  # objects up to 32 x 32 pixels of the original file
    APm: float | None  # up to 96 x 96
    APl: float | None  # above
    AR1: float | None  # recall with one detection per class and image
    AR10: float | None
    AR: float | None
    ARs: float | None
    ARm: float | None
    ARl: float | None
    per_class: Mapping[str, ClassResult]  # by class name
    num_objects_by_size: Mapping[str, int]  # small, medium, large; without crowds
    num_images: int
    num_detections: int
    max_detections: int  # per class and image
    engine: str  # pycocotools or hotcoco
    best: OperatingPoint | None = None  # highest F1 at IoU 0.5, one threshold for all classes together

    @property
    def metrics(self) -> dict[str, float | None]:
        """Return the twelve metrics by name, in COCO's order."""
        return {name: getattr(self, name) for name in BOX_METRIC_NAMES}

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and numbers for JSON."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "per_class": {name: dataclasses.asdict(result) for name, result in self.per_class.items()},
            "num_objects_by_size": dict(self.num_objects_by_size),
            "best": self.best and dataclasses.asdict(self.best),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> CocoSummary:
        """Inverse of :meth:`to_dict`."""
        per_class = {name: ClassResult.from_dict(result) for name, result in state["per_class"].items()}
        return cls(**{**state, "per_class": per_class, "best": _point(state.get("best"))})


def _point(state: Mapping[str, float] | None) -> OperatingPoint | None:
    return None if state is None else OperatingPoint(**state)


@dataclass(frozen=True)
class PanopticClassResult:
    """Panoptic quality of one class; None if it has neither ground truth nor predictions."""

    PQ: float | None
    SQ: float | None
    RQ: float | None
    tp: int  # segments
    fp: int
    fn: int
    is_thing: bool


@dataclass(frozen=True)
class PanopticSummary:
    """Panoptic, segmentation and recognition quality: means over classes, None if there is no class.

    Classes with neither ground truth nor predictions do not enter the means.
    """

    PQ: float | None
    SQ: float | None
    RQ: float | None
    PQ_th: float | None  # things
    SQ_th: float | None
    RQ_th: float | None
    PQ_st: float | None  # stuff
    SQ_st: float | None
    RQ_st: float | None
    per_class: Mapping[str, PanopticClassResult]  # by class name, in the order of the class map
    num_images: int
    mIoU: float | None = None  # noqa: N815, of the maps merged to classes, see detr_bf.evaluation.semantic

    @property
    def metrics(self) -> dict[str, float | None]:
        """Return the nine metrics by name."""
        return {name: getattr(self, name) for name in PANOPTIC_METRIC_NAMES}

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and numbers for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PanopticSummary:
        """Inverse of :meth:`to_dict`."""
        per_class = {name: PanopticClassResult(**result) for name, result in state["per_class"].items()}
        return cls(**{**state, "per_class": per_class})


@dataclass(frozen=True)
class Result:
    """Summaries of boxes, of masks (with a mask head) and of panoptic maps (with panoptic annotations), and losses.

    ``losses`` are ``loss`` and its unweighted terms, named as in training; None if not finite. Empty if not computed.
    ``num_skipped`` images of the data cannot be decoded and were left out before (``data.skip_unreadable``).
    """

    boxes: CocoSummary
    masks: CocoSummary | None = None
    panoptic: PanopticSummary | None = None
    losses: Mapping[str, float | None] = field(default_factory=dict)
    num_skipped: int = 0

    @property
    def metrics(self) -> dict[str, float | None]:
        """Return all metrics by name, with the losses; those of masks begin with ``mask/``."""
        masks = {f"mask/{name}": value for name, value in self.masks.metrics.items()} if self.masks else {}
        panoptic = self.panoptic.metrics | {"mIoU": self.panoptic.mIoU} if self.panoptic else {}
        return self.boxes.metrics | masks | panoptic | dict(self.losses)

    @property
    def score(self) -> float:
        """Return the score that selects the best checkpoint; -inf without ground truth.

        It is PQ if measured, else AP of masks if measured (those of good boxes alone are good), else AP of boxes.
        """
        score = self.panoptic.PQ if self.panoptic else (self.masks or self.boxes).AP
        return -math.inf if score is None else score

    @property
    def thresholds(self) -> ScoreThresholds | None:
        """Return the thresholds with the highest F1 of the boxes; None if there is none for all classes together.

        A class without objects or detections has that of all classes.
        """
        best = self.boxes.best
        if best is None:
            return None
        own = [result.best or best for result in self.boxes.per_class.values()]
        return ScoreThresholds(best.threshold, tuple(point.threshold for point in own))

    def __str__(self) -> str:
        names = [*(("PQ", "SQ", "RQ") if self.panoptic else ()), "AP", *(("mask/AP",) if self.masks else ("AP50",))]
        shown = ((name.replace("/", " "), self.metrics[name]) for name in names)
        values = [f"{name} {'n/a' if value is None else f'{value:.3f}'}" for name, value in shown]
        return "  ".join([*values, *([f"without {self.skipped_text}"] if self.num_skipped else [])])

    @property
    def skipped_text(self) -> str:
        """Return the images that were left out, as text."""
        return f"{counted(self.num_skipped, 'image')} that cannot be decoded"

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and numbers for JSON: those of the boxes, ``masks``, ``panoptic``, ``losses``."""
        return {
            **self.boxes.to_dict(),
            "masks": self.masks and self.masks.to_dict(),
            "panoptic": self.panoptic and self.panoptic.to_dict(),
            "losses": dict(self.losses),
            **({"num_skipped": self.num_skipped} if self.num_skipped else {}),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Result:
        """Inverse of :meth:`to_dict`."""
        boxes = dict(state)
        masks, panoptic, losses = (boxes.pop(name, None) for name in ("masks", "panoptic", "losses"))
        num_skipped = boxes.pop("num_skipped", 0)
        return cls(
            CocoSummary.from_dict(boxes),
            masks and CocoSummary.from_dict(masks),
            panoptic and PanopticSummary.from_dict(panoptic),
            losses or {},
            num_skipped,
        )
