"""Losses of the plug-ins of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from detr_bf.common.weights import PLUGINS
from detr_bf.losses import LossReport
from detr_bf.plugins.batchformer import BatchFormerV2Plugin, num_streams
from detr_bf.plugins.diverse_patch import DiversePatchLoss
from detr_bf.plugins.relative_localization import RelativeLocalizationLoss


class PluginCriterion:
    """Criterion plus the losses of the plug-ins of a part of the model, such as a detector's encoder.

    Args:
        criterion: (outputs, targets) -> its report.
        part: the module with the plug-ins, which keep the features they need of each forward pass.
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
    """Return unweighted losses of the plug-ins of ``model`` for its last forward pass in training, and their weights.

    Args:
        patch_labels: see :class:`DiversePatchLoss`.
        localization_weight: new lambda of relative localization; None: unchanged.
    """
    losses: dict[str, Tensor] = {}
    weights: dict[str, float] = {}
    plugins = getattr(model, PLUGINS, {})
    among_blocks = BatchFormerV2Plugin.name in plugins  # BatchFormer forks after the tokens
    streams = num_streams(model) if among_blocks else 1
    for plugin in plugins.values():
        if isinstance(plugin, DiversePatchLoss):
            losses |= {f"loss_{name}": loss for name, loss in plugin(patch_labels, streams, weighted=False).items()}
            weights |= {f"loss_{name}": weight for name, weight in plugin.weights.items() if f"loss_{name}" in losses}
        elif isinstance(plugin, RelativeLocalizationLoss):
            plugin.weight = plugin.weight if localization_weight is None else localization_weight
            losses["loss_localization"], weights["loss_localization"] = plugin(weighted=False), plugin.weight
    return losses, weights
