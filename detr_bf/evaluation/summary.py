"""What an evaluation says: the twelve COCO numbers, the same per class, and how much ground truth stands behind them.

All numbers are fractions in [0, 1]. ``None`` (JSON null) stands where there is no ground truth to measure: it is not 0
and never enters an average. Definitions: https://cocodataset.org/#detection-eval.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METRIC_NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
SIZE_NAMES = ("small", "medium", "large")


@dataclass(frozen=True)
class ClassResult:
    """One class: average precision, and how many objects (crowds left out) it was measured on."""

    AP: float | None
    AP50: float | None
    num_objects: int


@dataclass(frozen=True)
class CocoSummary:
    """The twelve numbers by their COCO names; ``AR100`` is the recall at ``max_detections`` detections."""

    AP: float | None  # mean over IoU 0.50, 0.55, ..., 0.95
    AP50: float | None
    AP75: float | None
    APs: float | None  # objects up to 32 x 32 pixels of the original file
    APm: float | None  # from there up to 96 x 96
    APl: float | None  # from there on
    AR1: float | None  # recall with one detection per class and image
    AR10: float | None
    AR100: float | None
    ARs: float | None
    ARm: float | None
    ARl: float | None
    per_class: Mapping[str, ClassResult]  # by class name
    num_objects_by_size: Mapping[str, int]  # small, medium, large; crowds left out
    num_images: int
    num_detections: int
    max_detections: int  # per class and image
    engine: str  # pycocotools or hotcoco

    @property
    def metrics(self) -> dict[str, float | None]:
        """The twelve numbers by name, in COCO's order."""
        return {name: getattr(self, name) for name in METRIC_NAMES}

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers, ready for JSON."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "per_class": {name: dataclasses.asdict(result) for name, result in self.per_class.items()},
            "num_objects_by_size": dict(self.num_objects_by_size),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> CocoSummary:
        """Inverse of :meth:`to_dict`."""
        per_class = {name: ClassResult(**result) for name, result in state["per_class"].items()}
        return cls(**{**state, "per_class": per_class})
