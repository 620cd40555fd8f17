"""Softmax cross-entropy with a down-weighted no-object class (Carion et al. 2020, arXiv 2005.12872, section 3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf import distributed
from detr_bf.errors import InputError
from detr_bf.losses.classification import gather_labels


@dataclass(frozen=True)
class CrossEntropy:
    """The last logit is no-object, weighted ``no_object_weight``; the mean divides by the sum of the weights."""

    no_object_weight: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.no_object_weight < math.inf:
            raise InputError(f"CrossEntropy: no_object_weight={self.no_object_weight} must be 0 or more and finite")

    def num_logits(self, num_classes: int) -> int:
        return num_classes + 1

    def match_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        return -gather_labels(logits.softmax(-1), labels)

    def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor) -> Tensor:
        no_object = logits.shape[-1] - 1
        target = torch.where(classes < 0, no_object, classes)
        weight = torch.where(classes < 0, self.no_object_weight, 1.0).to(logits.dtype)
        entropy = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none").view_as(target)
        return (entropy * weight).sum((1, 2)) / distributed.all_reduce_mean(weight.sum((1, 2)))

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)[..., :-1]

    def candidates(self, scores: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Every query with its best class."""
        best, label = scores.max(-1)
        best, query = best.sort(descending=True, stable=True)
        return best[:limit], query[:limit], label[query[:limit]]

    def is_object(self, logits: Tensor, threshold: float = 0.0) -> Tensor:
        best, label = logits.softmax(-1).max(-1)
        return (label != logits.shape[-1] - 1) & (best > threshold)
