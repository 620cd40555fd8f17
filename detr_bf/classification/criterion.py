"""Training losses of classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.batchformer import StreamLoss
from detr_bf.classification.batch import ClassTargets
from detr_bf.errors import InputError
from detr_bf.losses import STREAM_NAMES, LossReport
from detr_bf.losses.classification import at_least_float32, check_labels
from detr_bf.plugins import num_streams, plugin_losses


def cross_entropy(label_smoothing: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss (logits (R, K), labels (R,) or soft labels (R, K)) -> mean over the rows, in float32.

    Smoothing applies to labels only; soft labels were smoothed when they were mixed.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        smoothing = 0.0 if targets.is_floating_point() else label_smoothing
        return F.cross_entropy(at_least_float32(logits), targets, label_smoothing=smoothing)

    return loss


class BalancedSoftmax(nn.Module):
    """Mean cross-entropy of ``logits + log n`` with the training images n of each class (Ren et al. 2020, 2007.10740).

    For training on long tails only; predictions use the logits themselves.

    Args:
        class_counts: n, one per class.
        loss_scale: a factor. BatchFormer's released code sums three means, one per stream and one over both, which is
            3 times the mean over both.

    Raises:
        InputError: a class has no images.
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
        """Logits (R, K) and labels (R,) int64, or soft labels (R, K) after mixup -> ().

        Raises:
            InputError: the logits have another number of classes, or labels are outside them.
        """
        classes = len(self.log_counts)
        if logits.shape[-1] != classes:
            raise InputError(f"got logits of {logits.shape[-1]} classes and class_counts of {classes}: they must agree")
        if not targets.is_floating_point():
            check_labels(targets, classes)
        logits = at_least_float32(logits)
        return self.loss_scale * F.cross_entropy(logits + self.log_counts.to(logits.dtype), targets)


class ClassifierCriterion(nn.Module):
    """Mean over the streams of the loss of the logits, and the losses of the model's plug-ins.

    Args:
        model: the bare model that computes the logits; its plug-ins keep the features they need of each forward pass.
        loss: (logits, labels or soft labels) -> mean over the rows.
        localization_weight: epoch -> lambda of relative localization; None: unchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        localization_weight: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__()
        self.loss = StreamLoss(loss)
        self.localization_weight = localization_weight
        self._model = (model,)  # in a tuple, because an attribute would register it as a child

    def forward(self, logits: Tensor, targets: ClassTargets) -> LossReport:
        """Logits (R, K), clean stream first, of B images.

        Raises:
            InputError: labels are outside the classes, or ``logits`` are not one row of logits per image.
        """
        model = self._model[0]
        streams, wanted = num_streams(model), targets.labels if targets.soft_labels is None else targets.soft_labels
        _check(logits, targets)
        weight = None if self.localization_weight is None else self.localization_weight(targets.epoch)
        terms, weights = plugin_losses(model, targets.patch_labels, localization_weight=weight)
        loss = self.loss(logits, wanted, streams)
        with torch.no_grad():  # accuracy of the clean stream on the labels before mixing
            clean = logits[: len(targets.labels)]
            logged = {"accuracy": (clean.argmax(1) == targets.labels).float().mean()}
        if streams > 1:
            each = self.loss.of_each_stream(logits.detach(), wanted, streams)
            logged |= {f"stream/{name}": loss for name, loss in zip(STREAM_NAMES, each, strict=True)}
        return LossReport({"loss_ce": loss}, {"loss_ce": 1.0}, logged).extended(terms, weights)


def _check(logits: Tensor, targets: ClassTargets) -> None:
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(
            f"the model returns {given} in training, expected logits (images, classes): distilled models and auxiliary "
            "classifiers are not supported"
        )
    check_labels(targets.labels, logits.shape[1])
