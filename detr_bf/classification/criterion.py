"""Training loss of classifiers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.batchformer import StreamLoss
from detr_bf.errors import InputError
from detr_bf.labelled import ClassTargets
from detr_bf.losses import STREAM_NAMES, LossReport
from detr_bf.losses.classification import at_least_float32, check_labels
from detr_bf.plugins import num_streams, plugin_losses


def cross_entropy(label_smoothing: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """(logits (R, K), labels (R,) or soft labels (R, K)) -> the mean over the rows, in float32.

    Smoothing is of labels alone: soft_labels have theirs from where they were mixed.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        smoothing = 0.0 if targets.is_floating_point() else label_smoothing
        return F.cross_entropy(at_least_float32(logits), targets, label_smoothing=smoothing)

    return loss


class ClassifierCriterion(nn.Module):
    """The mean over the streams of the loss of the logits, and the losses of the model's plug-ins.

    Args:
        model: the bare model whose logits it gets; its plug-ins keep what they work on from each forward pass.
        loss: (logits, labels or soft_labels) -> mean over the rows.
        localization_weight: epoch -> lambda of relative localization; None leaves it as it is.
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
        self._model = (model,)  # in a tuple, because an attribute would make it a child

    def forward(self, logits: Tensor, targets: ClassTargets) -> LossReport:
        """Logits (R, K), clean stream first, of B images.

        Raises:
            InputError: labels outside the classes, or the model gives something else than logits of every image.
        """
        model = self._model[0]
        streams, wanted = num_streams(model), targets.labels if targets.soft_labels is None else targets.soft_labels
        _check(logits, targets)
        weight = None if self.localization_weight is None else self.localization_weight(targets.epoch)
        terms, weights = plugin_losses(model, targets.patch_labels, localization_weight=weight)
        loss = self.loss(logits, wanted, streams)
        logged = {"accuracy": _accuracy(logits, targets)}
        if streams > 1:
            each = self.loss.of_each_stream(logits.detach(), wanted, streams)
            logged |= {f"stream/{name}": loss for name, loss in zip(STREAM_NAMES, each, strict=True)}
        return LossReport({"loss_ce": loss}, {"loss_ce": 1.0}, logged).extended(terms, weights)


def _check(logits: Tensor, targets: ClassTargets) -> None:
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(
            f"the model gives {given} in training, expected logits (images, classes): distilled models and auxiliary "
            "classifiers are not supported"
        )
    check_labels(targets.labels, logits.shape[1])


@torch.no_grad()
def _accuracy(logits: Tensor, targets: ClassTargets) -> Tensor:
    """Of the clean stream against the labels before mixing."""
    clean = logits[: len(targets.labels)]
    return (clean.argmax(1) == targets.labels).float().mean()
