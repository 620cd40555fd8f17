"""All that one evaluation measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from detr_bf.evaluation.panoptic import PanopticSummary
from detr_bf.evaluation.summary import CocoSummary


@dataclass(frozen=True)
class Result:
    """Boxes, and panoptic maps where the model has a mask head and the data panoptic annotations."""

    boxes: CocoSummary
    panoptic: PanopticSummary | None = None

    @property
    def metrics(self) -> dict[str, float | None]:
        """All numbers by name."""
        return self.boxes.metrics | (self.panoptic.metrics if self.panoptic else {})

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by: PQ where it is measured, else AP; -1 without ground truth."""
        score = self.panoptic.PQ if self.panoptic else self.boxes.AP
        return -1.0 if score is None else score

    def __str__(self) -> str:
        names = ["PQ", "SQ", "RQ", "AP"] if self.panoptic else ["AP", "AP50"]
        shown = ((name, self.metrics[name]) for name in names)
        return "  ".join(f"{name} {'n/a' if value is None else f'{value:.3f}'}" for name, value in shown)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers, ready for JSON: those of the boxes, and ``panoptic``."""
        return {**self.boxes.to_dict(), "panoptic": self.panoptic and self.panoptic.to_dict()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Result:
        """Inverse of :meth:`to_dict`."""
        boxes = dict(state)
        panoptic = boxes.pop("panoptic", None)
        return cls(CocoSummary.from_dict(boxes), panoptic and PanopticSummary.from_dict(panoptic))
