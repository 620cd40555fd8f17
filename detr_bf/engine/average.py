"""Averaged weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class AveragedWeights(AveragedModel):
    """An exponential moving average of a model's parameters, and of the statistics of its batch norms.

    Those belong to the weights they were seen with; torch would average all buffers, or none. Other buffers are the
    model's.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move on towards ``model``; the first time become it."""
        first = not self.n_averaged
        before = [(statistic, statistic.clone()) for statistic in self._statistics()]
        super().update_parameters(model)
        for statistic, average in [] if first else before:
            statistic.copy_(average.lerp(statistic, 1 - self.decay))

    def _statistics(self) -> list[Tensor]:
        norms = [module for module in self.module.modules() if isinstance(module, _BatchNorm)]
        found = (statistic for norm in norms for statistic in (norm.running_mean, norm.running_var))
        return [statistic for statistic in found if statistic is not None]
