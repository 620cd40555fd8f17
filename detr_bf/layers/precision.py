"""Where half precision would cost whole pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def full_precision(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)`` in the precision of the module's parameters, whatever autocast says."""
    with torch.autocast(x.device.type, enabled=False):
        result: Tensor = module(x.to(next(module.parameters()).dtype))
    return result
