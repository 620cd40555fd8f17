"""Results of one evaluation: COCO average precision, panoptic quality, and both together.

All metrics are fractions in [0, 1]. ``None`` (JSON null) means that there is no ground truth to measure; it is not 0
and never enters an average. Definitions: https://cocodataset.org/#detection-eval and ``#panoptic-eval``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from detr_bf.evaluation.thresholds import OperatingPoint, ScoreThresholds

BOX_METRIC_NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
PANOPTIC_METRIC_NAMES = ("PQ", "SQ", "RQ", "PQ_th", "SQ_th", "RQ_th", "PQ_st", "SQ_st", "RQ_st")
SIZE_NAMES = ("small", "medium", "large")


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
    """Twelve COCO metrics; ``AR100`` is the recall at ``max_detections`` detections."""

    AP: float | None  # mean over IoU 0.50, 0.55, ..., 0.95
    AP50: float | None
    AP75: float | None
    APs: float | None  # objects up to 32 x 32 pixels of the original file
    APm: float | None  # up to 96 x 96
    APl: float | None  # above
    AR1: float | None  # recall with one detection per class and image
    AR10: float | None
    AR100: float | None
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
    """Summaries of boxes, of masks (with a mask head) and of panoptic maps (with panoptic annotations)."""

    boxes: CocoSummary
    masks: CocoSummary | None = None
    panoptic: PanopticSummary | None = None

    @property
    def metrics(self) -> dict[str, float | None]:
        """Return all metrics by name; those of masks begin with ``mask/``."""
        masks = {f"mask/{name}": value for name, value in self.masks.metrics.items()} if self.masks else {}
        return self.boxes.metrics | masks | (self.panoptic.metrics if self.panoptic else {})

    @property
    def score(self) -> float:
        """Return the score that selects the best checkpoint: PQ if measured, else AP; -inf without ground truth."""
        score = self.panoptic.PQ if self.panoptic else self.boxes.AP
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
        return "  ".join(f"{name} {'n/a' if value is None else f'{value:.3f}'}" for name, value in shown)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and numbers for JSON: those of the boxes, ``masks`` and ``panoptic``."""
        return {
            **self.boxes.to_dict(),
            "masks": self.masks and self.masks.to_dict(),
            "panoptic": self.panoptic and self.panoptic.to_dict(),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Result:
        """Inverse of :meth:`to_dict`."""
        boxes = dict(state)
        masks, panoptic = (boxes.pop(name, None) for name in ("masks", "panoptic"))
        return cls(
            CocoSummary.from_dict(boxes),
            masks and CocoSummary.from_dict(masks),
            panoptic and PanopticSummary.from_dict(panoptic),
        )
