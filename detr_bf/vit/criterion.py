"""Training losses of classifiers and of detectors with plug-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.batchformer import StreamLoss
from detr_bf.errors import InputError
from detr_bf.labelled import ClassTargets
from detr_bf.losses.balanced_softmax import check_labels
from detr_bf.losses.classification import at_least_float32
from detr_bf.losses.report import STREAM_NAMES, LossReport
from detr_bf.vit.batch_former import BatchFormerV2Plugin, num_streams
from detr_bf.vit.diverse_patch import DiversePatchLoss
from detr_bf.vit.plugin import PREFIX
from detr_bf.vit.relative_localization import RelativeLocalizationLoss


def cross_entropy(label_smoothing: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """(logits (R, K), labels (R,) or shares (R, K)) -> the mean over the rows, in float32.

    Smoothing is of labels alone: shares have theirs from where they were mixed.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        smoothing = 0.0 if targets.is_floating_point() else label_smoothing
        return F.cross_entropy(at_least_float32(logits), targets, label_smoothing=smoothing)

    return loss


class ClassifierCriterion(nn.Module):
    """The mean over the streams of the loss of the logits, and the losses of the model's plug-ins.

    Args:
        model: the bare model whose logits it gets; its plug-ins keep what they work on from each forward pass.
        loss: (logits, labels or shares) -> mean over the rows.
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
        streams, wanted = num_streams(model), targets.labels if targets.shares is None else targets.shares
        _check(logits, targets)
        weight = None if self.localization_weight is None else self.localization_weight(targets.epoch)
        terms, weights = plugin_losses(model, targets.patch_labels, localization_weight=weight)
        loss = self.loss(logits, wanted, streams)
        logged = {"accuracy": _accuracy(logits, targets)}
        if streams > 1:
            each = self.loss.of_each_stream(logits.detach(), wanted, streams)
            logged |= {f"stream/{name}": loss for name, loss in zip(STREAM_NAMES, each, strict=True)}
        return LossReport({"loss_ce": loss}, {"loss_ce": 1.0}, logged).extended(terms, weights)


class PluginCriterion:
    """A criterion, and the losses of the plug-ins of a part of the model, such as a detector's encoder.

    Args:
        criterion: (outputs, targets) -> its report.
        part: what the plug-ins were added to; they keep what they work on from each forward pass.
    """

    def __init__(self, criterion: Callable[[Any, Any], LossReport], part: nn.Module) -> None:
        self.criterion = criterion
        self.part = part

    def __call__(self, outputs: Any, targets: Any) -> LossReport:
        return self.criterion(outputs, targets).extended(*plugin_losses(self.part))


def plugin_losses(
    model: nn.Module,
    patch_labels: Tensor | None = None,
    *,
    localization_weight: float | None = None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Losses of the plug-ins of ``model`` for its last forward pass in training, not weighted, and their weights.

    Args:
        patch_labels: as :class:`DiversePatchLoss` wants them.
        localization_weight: lambda of relative localization from here on; None leaves it as it is.
    """
    losses: dict[str, Tensor] = {}
    weights: dict[str, float] = {}
    plugins = getattr(model, PREFIX, {})
    among_blocks = BatchFormerV2Plugin.name in plugins  # BatchFormer forks behind all tokens
    streams = num_streams(model) if among_blocks else 1
    for plugin in plugins.values():
        if isinstance(plugin, DiversePatchLoss):
            losses |= {f"loss_{name}": loss for name, loss in plugin(patch_labels, streams, weighted=False).items()}
            weights |= {f"loss_{name}": weight for name, weight in plugin.weights.items() if f"loss_{name}" in losses}
        elif isinstance(plugin, RelativeLocalizationLoss):
            plugin.weight = plugin.weight if localization_weight is None else localization_weight
            losses["loss_localization"], weights["loss_localization"] = plugin(weighted=False), plugin.weight
    return losses, weights


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
