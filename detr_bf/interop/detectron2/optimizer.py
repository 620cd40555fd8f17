"""Optimizers with DETR's parameter groups, and the gradients of the whole model clipped together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.solver.build import maybe_add_gradient_clipping

from detr_bf.engine import parameter_groups
from detr_bf.errors import InputError
from detr_bf.interop.detectron2.meta_arch import DetrBf

FULL_MODEL = "full_model"  # SOLVER.CLIP_GRADIENTS.CLIP_TYPE


def detector_parameters(
    model: DetrBf,
    *,
    lr: float,
    weight_decay: float = 1e-4,
    backbone_multiplier: float = 0.1,
    point_multiplier: float = 1.0,
    batch_former_multiplier: float = 1.0,
    batch_former_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Up to five groups of the trainable parameters; multipliers are of ``lr``.

    See :func:`detr_bf.engine.parameter_groups`.
    """
    return parameter_groups(
        model.detector,
        lr=lr,
        backbone_lr=lr * backbone_multiplier,
        weight_decay=weight_decay,
        point_lr_factor=point_multiplier,
        batch_former_lr_factor=batch_former_multiplier,
        batch_former_weight_decay=batch_former_weight_decay,
    )


def build_optimizer(
    params: Sequence[dict[str, Any]],
    *,
    name: str = "ADAMW",
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip_norm: float = 0.1,
) -> torch.optim.Optimizer:
    """AdamW or SGD over the groups.

    Args:
        params: groups with learning rates and weight decay of their own.
        name: ADAMW or SGD.
        lr: of groups that have none.
        momentum, nesterov: of SGD.
        clip_norm: largest norm of all gradients together; 0 leaves them alone.

    Raises:
        InputError: another name.
    """
    if name == "ADAMW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=lr)
    elif name == "SGD":
        optimizer = torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=nesterov)
    else:
        raise InputError(f"the optimizer must be ADAMW or SGD, got '{name}': set SOLVER.OPTIMIZER")
    if clip_norm > 0:
        clip_all(optimizer, clip_norm)
    return optimizer


def clip_all(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Before every step scale the gradients of all groups so that their common norm is at most ``max_norm``.

    A gradient scaler undoes its factor before the step, so that the norm is that of the gradients themselves. That
    holds for optimizers that do not undo it in their own step, which fused ones do.

    Raises:
        InputError: a fused optimizer.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        raise InputError("a fused optimizer sees gradients before its step that are not unscaled: use fused=False")

    def clip(stepping: torch.optim.Optimizer, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in stepping.param_groups for p in group["params"]], max_norm)

    optimizer.register_step_pre_hook(clip)


def optimizer_of(cfg: CfgNode, model: DetrBf) -> torch.optim.Optimizer:
    """The optimizer that ``SOLVER`` describes.

    Raises:
        InputError: as of :func:`build_optimizer`.
    """
    solver, batch_former = cfg.SOLVER, cfg.MODEL.DETR_BF.BATCHFORMER
    clipping = solver.CLIP_GRADIENTS
    whole = clipping.ENABLED and clipping.CLIP_TYPE == FULL_MODEL
    if whole and clipping.NORM_TYPE != 2.0:
        raise InputError(f"{FULL_MODEL} clips the 2-norm, got SOLVER.CLIP_GRADIENTS.NORM_TYPE {clipping.NORM_TYPE}")
    groups = detector_parameters(
        model,
        lr=solver.BASE_LR,
        weight_decay=solver.WEIGHT_DECAY,
        backbone_multiplier=solver.BACKBONE_MULTIPLIER,
        point_multiplier=solver.POINT_MULTIPLIER,
        batch_former_multiplier=batch_former.LR_FACTOR,
        batch_former_weight_decay=batch_former.WEIGHT_DECAY,
    )
    optimizer = build_optimizer(
        groups,
        name=solver.OPTIMIZER,
        lr=solver.BASE_LR,
        momentum=solver.MOMENTUM,
        nesterov=solver.NESTEROV,
        clip_norm=clipping.CLIP_VALUE if whole else 0.0,
    )
    return optimizer if whole else maybe_add_gradient_clipping(cfg, optimizer)
