"""Sigmoid focal loss (Lin et al. 2017, arXiv 1708.02002), with Deformable DETR's matching cost (arXiv 2010.04159)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from detr_bf.errors import InputError
from detr_bf.losses.classification import gather_labels


@dataclass(frozen=True)
class Focal:
    """One logit a class, none for no-object; the sum over queries and classes is divided by the number of boxes."""

    alpha: float = 0.25
    gamma: float = 2.0

    def __post_init__(self) -> None:
        if not (0 <= self.alpha <= 1 and 0 <= self.gamma < math.inf):
            raise InputError(
                f"Focal: alpha={self.alpha} must be between 0 and 1, gamma={self.gamma} must be 0 or more and finite"
            )

    def num_logits(self, num_classes: int) -> int:
        return num_classes

    def match_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of calling a query the label, less the loss of calling it nothing."""
        logit = gather_labels(logits, labels)
        probability = logit.sigmoid()
        positive = self.alpha * (1 - probability) ** self.gamma * -(probability + 1e-8).log()
        negative = (1 - self.alpha) * probability**self.gamma * -(1 - probability + 1e-8).log()
        return positive - negative

    def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor) -> Tensor:
        target = F.one_hot(classes + 1, logits.shape[-1] + 1)[..., 1:].to(logits.dtype)
        losses = sigmoid_focal_loss(logits, target, alpha=self.alpha, gamma=self.gamma, reduction="none")
        return losses.sum((1, 2, 3)) / num_boxes

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def candidates(self, scores: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """The best of all pairs of query and class."""
        best, place = scores.flatten().sort(descending=True, stable=True)
        place = place[:limit]
        return best[:limit], place // scores.shape[1], place % scores.shape[1]

    def is_object(self, logits: Tensor, threshold: float = 0.5) -> Tensor:
        return logits.sigmoid().max(-1).values > threshold
