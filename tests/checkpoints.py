"""Example contents of a training checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from detr_bf.engine.checkpoint import rng_state


def training(step: int = 4, parameter: nn.Parameter | None = None) -> dict[str, Any]:
    """Training state after one AdamW step on one parameter."""
    parameter = nn.Parameter(torch.zeros(2)) if parameter is None else parameter
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    progress = {"step": step, "evaluated_step": 0, "best_score": 0.25, "skipped": 0, "replaced": 0}
    return {
        "optimizer": optimizer.state_dict(),
        "scaler": {},
        "progress": progress,
        "rng": [rng_state()],
        "averaged": 0,
    }
