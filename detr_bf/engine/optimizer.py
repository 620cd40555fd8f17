"""Parameter groups and the learning rate over the steps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.errors import InputError


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    backbone_lr: float,
    weight_decay: float,
    point_lr_factor: float = 1.0,
    batch_former_lr_factor: float = 1.0,
    batch_former_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Up to four groups of the trainable parameters: transformer, backbone, batch_former, points.

    ``points`` holds what predicts reference points and sampling offsets (Zhu et al. 2021, arXiv 2010.04159, appendix
    A.4). ``batch_former_weight_decay`` None means ``weight_decay``.
    """
    bf_decay = weight_decay if batch_former_weight_decay is None else batch_former_weight_decay
    groups: dict[str, dict[str, Any]] = {
        "transformer": {"lr": lr, "weight_decay": weight_decay},
        "backbone": {"lr": backbone_lr, "weight_decay": weight_decay},
        "batch_former": {"lr": lr * batch_former_lr_factor, "weight_decay": bf_decay},
        "points": {"lr": lr * point_lr_factor, "weight_decay": weight_decay},
    }
    places = _special_parameters(model)
    members: dict[str, list[nn.Parameter]] = {name: [] for name in groups}
    for parameter in model.parameters():
        if parameter.requires_grad:
            members[places.get(id(parameter), "transformer")].append(parameter)
    return [{"name": name, "params": members[name], **groups[name]} for name in groups if members[name]]


def _special_parameters(model: nn.Module) -> dict[int, str]:
    """The group of every parameter, by identity, that is not simply of the transformer."""
    places: dict[int, str] = {}
    for name, module in model.named_modules():
        if name == "backbone":
            group = "backbone"
        elif isinstance(module, BatchFormerV2):
            group = "batch_former"
        elif isinstance(module, nn.Linear) and re.search(r"\.sampling_offsets$|\bqueries\.reference\b", name):
            group = "points"
        else:
            continue
        places |= {id(parameter): group for parameter in module.parameters()}
    return places


def build_optimizer(groups: Sequence[dict[str, Any]]) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101), fused. ``base_lr`` of a group: before the schedule."""
    return torch.optim.AdamW([{**group, "base_lr": group["lr"]} for group in groups], fused=True)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], source: str) -> None:
    """Take over the moments of ``state``; learning rates and weight decay stay those of ``optimizer``.

    Raises:
        InputError: the state belongs to other parameters.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise InputError(
            f"{source} was trained with other parameters frozen ({error}): resume with the model.backbone settings it "
            "was started with, or start anew with init_from"
        ) from error
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for parameter, moments in optimizer.state.items():  # the fused step takes for granted that layouts agree
        for name, moment in moments.items():
            if moment.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter).copy_(moment)


@dataclass(frozen=True)
class LearningRate:
    """The factor every group's learning rate is multiplied with at an optimiser step counted from 0.

    ``step``: times ``drop_factor`` at each of ``drop_steps``. ``cosine``: half a cosine down to 0 at ``total_steps``.
    Both rise linearly over ``warmup_steps``.
    """

    schedule: str
    total_steps: int
    warmup_steps: int = 0
    drop_steps: tuple[int, ...] = ()
    drop_factor: float = 0.1

    def __call__(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        if self.schedule == "step":
            return float(warmup * self.drop_factor ** sum(step >= drop for drop in self.drop_steps))
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return warmup * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
