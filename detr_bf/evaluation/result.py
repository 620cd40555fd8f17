"""All that one evaluation measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from detr_bf.evaluation.panoptic import PanopticSummary
from detr_bf.evaluation.summary import CocoSummary


@dataclass(frozen=True)
class Result:
    """Boxes; masks where the model has a mask head; panoptic maps where the data has panoptic annotations too."""

    boxes: CocoSummary
    masks: CocoSummary | None = None
    panoptic: PanopticSummary | None = None

    @property
    def metrics(self) -> dict[str, float | None]:
        """All numbers by name; those of masks begin with ``mask/``."""
        masks = {f"mask/{name}": value for name, value in self.masks.metrics.items()} if self.masks else {}
        return self.boxes.metrics | masks | (self.panoptic.metrics if self.panoptic else {})

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by: PQ where it is measured, else AP; without ground truth the lowest."""
        score = self.panoptic.PQ if self.panoptic else self.boxes.AP
        return -math.inf if score is None else score

    def __str__(self) -> str:
        names = [*(("PQ", "SQ", "RQ") if self.panoptic else ()), "AP", *(("mask/AP",) if self.masks else ("AP50",))]
        shown = ((name.replace("/", " "), self.metrics[name]) for name in names)
        return "  ".join(f"{name} {'n/a' if value is None else f'{value:.3f}'}" for name, value in shown)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers, ready for JSON: those of the boxes, ``masks`` and ``panoptic``."""
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
