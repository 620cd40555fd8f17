"""Quality of semantic maps: mean intersection over union (mIoU) and accuracies, from exact counts of pixels.

Definitions: Long et al. 2015, "Fully Convolutional Networks for Semantic Segmentation", section 5 (arXiv 1411.4038).
Pixels without a true class count nowhere. Shape legend: K classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detr_bf.common.structures import PanopticMap

SEMANTIC_METRIC_NAMES = ("mIoU", "mean_accuracy", "pixel_accuracy")


@dataclass(frozen=True)
class SemanticClassResult:
    """Quality of one class."""

    iou: float | None  # None: neither the truth nor the prediction has a pixel of it
    accuracy: float | None  # share of its pixels that are found; None: the truth has no pixel of it
    pixels: int  # of the truth


@dataclass(frozen=True)
class SemanticResult:
    """Quality of the semantic maps of a split; the means leave out the classes that have no value."""

    mIoU: float | None  # noqa: N815, the field's name of it
    mean_accuracy: float | None
    pixel_accuracy: float | None
    per_class: Mapping[str, SemanticClassResult]  # by class name, in the order of the class map
    num_images: int

    @property
    def metrics(self) -> dict[str, float | None]:
        """All metrics by name."""
        return {name: getattr(self, name) for name in SEMANTIC_METRIC_NAMES}

    @property
    def score(self) -> float:
        """Value that selects the best checkpoint: mIoU, -inf without it."""
        return -math.inf if self.mIoU is None else self.mIoU

    @property
    def thresholds(self) -> None:
        """None: semantic maps have no thresholds."""

    def __str__(self) -> str:
        values = ((name.replace("_", " "), getattr(self, name)) for name in SEMANTIC_METRIC_NAMES)
        return "  ".join(f"{name} {'n/a' if value is None else f'{value:.3f}'}" for name, value in values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and numbers for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SemanticResult:
        """Inverse of :meth:`to_dict`."""
        per_class = {name: SemanticClassResult(**result) for name, result in state["per_class"].items()}
        return cls(**{**state, "per_class": per_class})


def confusion_counts(truth: Tensor, found: Tensor, num_classes: int) -> Tensor:
    """Return the number of pixels (K, K + 1) int64 of each true class (row) that got each class (column).

    Args:
        truth: class of each pixel, integers of any shape; those outside 0 to K - 1 count nowhere.
        found: predicted classes of the same shape and device; those outside 0 to K - 1 are in column K.
    """
    truth, found = truth.long().flatten(), found.long().flatten()
    known = (truth >= 0) & (truth < num_classes)
    column = found.where((found >= 0) & (found < num_classes), num_classes)
    pairs = (truth * (num_classes + 1) + column)[known]
    return torch.bincount(pairs, minlength=num_classes * (num_classes + 1)).view(num_classes, num_classes + 1)


def merge_segments(panoptic: PanopticMap, void: int) -> Tensor:
    """Return the class of each pixel of a panoptic map (H, W) as uint8, ``void`` where no listed segment is."""
    values, inverse = np.unique(panoptic.ids.cpu().numpy(), return_inverse=True)
    label_of = {segment.id: segment.label for segment in panoptic.segments}
    table = np.array([label_of.get(value, void) for value in values.tolist()], dtype=np.uint8)
    return torch.from_numpy(table[inverse.reshape(panoptic.ids.shape)])


def summarize_counts(counts: np.ndarray, names: Sequence[str], num_images: int) -> SemanticResult:
    """Return the metrics of summed :func:`confusion_counts`, (K, K + 1) of integers, for classes of these names."""
    right, true, found = counts.diagonal(), counts.sum(1), counts[:, : len(names)].sum(0)
    per_class = {}
    for name, hits, pixels, claimed in zip(names, right.tolist(), true.tolist(), found.tolist(), strict=True):
        union = pixels + claimed - hits
        per_class[name] = SemanticClassResult(
            hits / union if union else None, hits / pixels if pixels else None, pixels
        )
    total = int(true.sum())
    return SemanticResult(
        mIoU=_mean([each.iou for each in per_class.values()]),
        mean_accuracy=_mean([each.accuracy for each in per_class.values()]),
        pixel_accuracy=int(right.sum()) / total if total else None,
        per_class=per_class,
        num_images=num_images,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
