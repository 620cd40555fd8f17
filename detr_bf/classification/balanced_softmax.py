"""Balanced Softmax for long-tailed training sets (Ren et al. 2020, arXiv 2007.10740)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.errors import InputError
from detr_bf.losses.classification import at_least_float32, check_labels


class BalancedSoftmax(nn.Module):
    """The mean cross-entropy of ``logits + log n``, with n the training images of each class.

    In training alone; predictions come from the logits themselves.

    Args:
        class_counts: n, one a class.
        loss_scale: a factor. The code that BatchFormer's authors released sums three means, of each stream and of
            both, which is 3 times the mean over both.

    Raises:
        InputError: a class without images.
    """

    def __init__(self, class_counts: Sequence[int], *, loss_scale: float = 1.0) -> None:
        super().__init__()
        empty = [label for label, count in enumerate(class_counts) if count <= 0]
        if empty or not class_counts:
            raise InputError(
                f"class_counts: the classes {empty} of {len(class_counts)} have no training images, and Balanced "
                "Softmax needs one or more of each: leave these classes out of the data set, or use cross-entropy"
            )
        self.loss_scale = loss_scale
        log_counts = torch.tensor(class_counts, dtype=torch.float64).log()
        self.register_buffer("log_counts", log_counts, persistent=False)
        self.log_counts: Tensor

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits (R, K) and labels (R,) int64, or soft labels (R, K) of each class after mixup -> ().

        Raises:
            InputError: logits of other classes, or labels outside them.
        """
        classes = len(self.log_counts)
        if logits.shape[-1] != classes:
            raise InputError(f"got logits of {logits.shape[-1]} classes and class_counts of {classes}: they must agree")
        if not targets.is_floating_point():
            check_labels(targets, classes)
        logits = at_least_float32(logits)
        return self.loss_scale * F.cross_entropy(logits + self.log_counts.to(logits.dtype), targets)
