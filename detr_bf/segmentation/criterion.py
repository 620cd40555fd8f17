"""Training loss and evaluation of semantic segmentation.

Shape legend: B images, K classes, H x W pixels of the padded batch, h x w pixels of one map.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.evaluation.semantic import SemanticResult, confusion_counts, summarize_counts
from detr_bf.losses import LossReport
from detr_bf.segmentation.batch import IGNORE, SegmentationBatch
from detr_bf.segmentation.network import SegmentationOutputs, interpolated


class SegmentationCriterion:
    """Mean cross-entropy of the pixels with a class, ``loss_ce``, and that of the second head, ``loss_auxiliary``.

    The logits are interpolated to the size of the batch.

    Args:
        auxiliary_weight: of the second head.
        class_weights: K weights of the pixels in the mean; empty: all 1.
    """

    def __init__(self, auxiliary_weight: float, class_weights: Sequence[float] = ()) -> None:
        self.auxiliary_weight = auxiliary_weight
        self.class_weights = torch.tensor(class_weights) if class_weights else None

    def __call__(self, outputs: SegmentationOutputs, labels: Sequence[Tensor]) -> LossReport:
        """Return the losses for maps (h, w) uint8, one for each image."""
        stacked = stacked_labels(labels, outputs.size)
        factors = None if self.class_weights is None else self.class_weights.to(stacked.device)
        losses, weights = {"loss_ce": pixel_cross_entropy(outputs.logits, stacked, factors)}, {"loss_ce": 1.0}
        if outputs.auxiliary is not None:
            losses["loss_auxiliary"] = pixel_cross_entropy(outputs.auxiliary, stacked, factors)
            weights["loss_auxiliary"] = self.auxiliary_weight
        return LossReport(losses, weights)


def pixel_cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy over the pixels with a class, 0 without any.

    Args:
        logits: (B, K, h', w'), interpolated to the size of the labels, in float32.
        labels: (B, H, W) int64, IGNORE: no class.
        class_weights: (K,), of the pixels in the mean; None: all 1.
    """
    full = interpolated(logits.float(), labels.shape[-2:])
    total = F.cross_entropy(full, labels, class_weights, ignore_index=IGNORE, reduction="sum")
    known = labels[labels != IGNORE]
    amount = torch.tensor(len(known)) if class_weights is None else class_weights[known].sum()
    return total / (amount.to(total.device) if len(known) else 1.0)


def stacked_labels(labels: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """Return maps (h, w) uint8 as (B, H, W) int64, each in the upper left corner and IGNORE elsewhere."""
    stacked = torch.full((len(labels), *size), IGNORE, dtype=torch.int64, device=labels[0].device)
    for row, each in zip(stacked, labels, strict=True):
        row[: each.shape[0], : each.shape[1]] = each
    return stacked


class SegmentationEvaluator:
    """Evaluator of the maps of a split, each image once, by exact counts of pixels."""

    def __init__(self, class_map: ClassMap) -> None:
        self.class_map = class_map
        self._counts = np.zeros((class_map.num_classes, class_map.num_classes + 1), dtype=np.int64)
        self._images: set[int] = set()

    def update(self, batch: SegmentationBatch, outputs: SegmentationOutputs) -> None:
        """Add the images of a batch (InputError: one was added before)."""
        self._add({target.image_id for target in batch.inputs.targets})
        for index, (target, labels) in enumerate(zip(batch.inputs.targets, batch.targets, strict=True)):
            found = outputs.labels(index, target.size, (labels.shape[0], labels.shape[1]))
            self._counts += confusion_counts(labels, found, self.class_map.num_classes).cpu().numpy()

    def merge(self, other: SegmentationEvaluator) -> None:
        """Add the images of another rank (InputError: it has one of ours)."""
        self._add(other._images)
        self._counts += other._counts

    def summarize(self) -> SemanticResult:
        """Return the metrics of all images, which do not depend on how they were divided among ranks."""
        return summarize_counts(self._counts, self.class_map.distinct_names, len(self._images))

    def _add(self, images: set[int]) -> None:
        if repeated := self._images & images:
            raise InputError(f"image {min(repeated)} was evaluated twice: every image counts once")
        self._images |= images
