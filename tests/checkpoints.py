"""Example contents of a training checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from detr_bf.engine.checkpoint import rng_state
from detr_bf.engine.state import Progress


def training(step: int = 4, parameter: nn.Parameter | None = None) -> dict[str, Any]:
    """Training state after one AdamW step on one parameter."""
    parameter = nn.Parameter(torch.zeros(2)) if parameter is None else parameter
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "optimizer": optimizer.state_dict(),
        "scaler": {},
        "progress": asdict(Progress(step=step, best_score=0.25)),
        "data": {},
        "rng": [rng_state()],
        "averaged": 0,
    }
