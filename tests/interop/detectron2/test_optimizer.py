"""Parameter groups and clipping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("detectron2.config")

from detectron2.modeling import build_model

from detr_bf.assembly import build_groups
from detr_bf.errors import InputError
from detr_bf.interop.detectron2 import build_optimizer
from detr_bf.interop.detectron2.config import core_config
from detr_bf.interop.detectron2.optimizer import optimizer_of

FULL_MODEL = ["SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full_model"]


def plain(norm: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [{"params": list(layer.parameters()), "lr": 1.0, "weight_decay": 0.0} for layer in model]
    return model, build_optimizer(groups, name="SGD", lr=1.0, momentum=0.0, clip_norm=norm)


def test_groups_are_the_cores(tiny_cfg: Callable[..., Any]) -> None:
    cfg = tiny_cfg("deformable_detr", batch_former=True)
    cfg.merge_from_list(
        [
            *("SOLVER.BASE_LR", 2e-4, "SOLVER.BACKBONE_MULTIPLIER", 0.1, "SOLVER.POINT_MULTIPLIER", 0.5),
            *("SOLVER.WEIGHT_DECAY", 1e-3, "MODEL.DETR_BF.BATCHFORMER.LR_FACTOR", 0.3),
            *("MODEL.DETR_BF.BATCHFORMER.WEIGHT_DECAY", 0.7),
        ]
    )
    model = build_model(cfg)
    config = core_config(cfg)
    config.optimizer.lr, config.optimizer.backbone_lr = 2e-4, 2e-5
    config.optimizer.weight_decay, config.optimizer.point_lr_factor = 1e-3, 0.5
    wanted = build_groups(config, model.detector)
    found = optimizer_of(cfg, model).param_groups
    assert len(found) == len(wanted) == 4
    for ours, theirs in zip(found, wanted, strict=True):
        assert [id(p) for p in ours["params"]] == [id(p) for p in theirs["params"]]
        assert ours["lr"] == pytest.approx(theirs["lr"])
        assert ours["weight_decay"] == theirs["weight_decay"]


def test_all_gradients_are_clipped_together() -> None:
    model, optimizer = plain(norm=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(5, 3)).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    assert norm > 0.1
    optimizer.step()
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(parameter, old - gradient * 0.1 / norm)


def test_clipping_sees_gradients_without_the_factor_of_mixed_precision() -> None:
    model, optimizer = plain(norm=0.1)
    twin, twin_optimizer = plain(norm=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(torch.ones(5, 3)).square().sum()).backward()
    scaler.step(optimizer)
    twin(torch.ones(5, 3)).square().sum().backward()
    twin_optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_small_gradients_stay_as_they_are() -> None:
    model, optimizer = plain(norm=1e6)
    before = copy.deepcopy(model)
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(parameter, old - parameter.grad)


@pytest.mark.parametrize(("name", "kind"), [("ADAMW", torch.optim.AdamW), ("SGD", torch.optim.SGD)])
def test_the_config_names_the_optimizer(tiny_cfg: Callable[..., Any], name: str, kind: type) -> None:
    cfg = tiny_cfg()
    cfg.merge_from_list([*FULL_MODEL, "SOLVER.OPTIMIZER", name])
    assert isinstance(optimizer_of(cfg, build_model(cfg)), kind)


def test_detectron2s_own_clipping_stays_available(tiny_cfg: Callable[..., Any]) -> None:
    cfg = tiny_cfg()
    cfg.merge_from_list(["SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "value"])
    assert type(optimizer_of(cfg, build_model(cfg))).__name__ == "AdamWWithGradientClip"


def test_what_cannot_be_is_told(tiny_cfg: Callable[..., Any]) -> None:
    cfg = tiny_cfg()
    model = build_model(cfg)
    cfg.SOLVER.OPTIMIZER = "LION"
    with pytest.raises(InputError, match="must be ADAMW or SGD, got 'LION'"):
        optimizer_of(cfg, model)
    cfg.merge_from_list([*FULL_MODEL, "SOLVER.OPTIMIZER", "ADAMW", "SOLVER.CLIP_GRADIENTS.NORM_TYPE", 1.0])
    with pytest.raises(InputError, match=r"clips the 2-norm, got .*1\.0"):
        optimizer_of(cfg, model)
