from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.detectors import Options, deformable_detr, detr
from detr_bf.engine import LearningRate, build_optimizer, parameter_groups
from detr_bf.engine.optimizer import load_optimizer


def network() -> nn.Module:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1))
    backbone[0].requires_grad_(False)
    batch_former = BatchFormerV2(16, layers=[0], num_encoder_layers=1)
    options = Options(num_logits=4, hidden_dim=16, heads=2, encoder_layers=1, batch_former=batch_former)
    return detr(backbone, [8], options)


def test_groups_hold_every_trainable_parameter_once() -> None:
    model = network()
    groups = parameter_groups(model, lr=1.0, backbone_lr=0.1, weight_decay=0.01)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert {group["name"]: len(group["params"]) for group in groups}["backbone"] == 2, "the frozen layer is left out"


def test_batch_former_has_its_own_rate_and_decay() -> None:
    model = network()
    groups = parameter_groups(
        model,
        lr=1.0,
        backbone_lr=0.1,
        weight_decay=0.01,
        batch_former_lr_factor=0.5,
        batch_former_weight_decay=0.3,
    )
    by_name = {group["name"]: group for group in groups}
    assert {name: (group["lr"], group["weight_decay"]) for name, group in by_name.items()} == {
        "transformer": (1.0, 0.01),
        "backbone": (0.1, 0.01),
        "batch_former": (0.5, 0.3),
    }
    assert {id(p) for p in by_name["batch_former"]["params"]} == {
        id(p) for name, p in model.named_parameters() if "batch_former" in name
    }


def test_weight_decay_of_batch_former_defaults_to_the_others() -> None:
    groups = parameter_groups(network(), lr=1.0, backbone_lr=0.1, weight_decay=0.01)
    assert {group["weight_decay"] for group in groups} == {0.01}


def test_optimizer_moves_each_group_by_its_rate() -> None:
    model = network()
    optimizer = build_optimizer(parameter_groups(model, lr=0.1, backbone_lr=0.001, weight_decay=0.0))
    before = {name: value.clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moved = {name: (before[name] - value).abs().max().item() for name, value in model.named_parameters()}
    assert moved["decoder.heads.classes.0.weight"] == pytest.approx(0.1, rel=1e-3), (
        "Adam's first step is the learning rate"
    )
    assert moved["backbone.1.weight"] == pytest.approx(0.001, rel=1e-3)
    assert moved["backbone.0.weight"] == 0


def test_step_schedule() -> None:
    rate = LearningRate("step", total_steps=30, drop_steps=(10, 20), drop_factor=0.1)
    assert [rate(step) for step in (0, 9, 10, 19, 20, 29)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_cosine_schedule() -> None:
    rate = LearningRate("cosine", total_steps=100)
    assert rate(0) == pytest.approx(1)
    assert rate(50) == pytest.approx(0.5)
    assert rate(75) == pytest.approx(0.5 * (1 + math.cos(0.75 * math.pi)))
    assert rate(100) == pytest.approx(0)
    assert all(rate(step + 1) < rate(step) for step in range(100))


@pytest.mark.parametrize("schedule", ["step", "cosine"])
def test_warmup_rises_linearly_to_the_schedule(schedule: str) -> None:
    rate = LearningRate(schedule, total_steps=1000, warmup_steps=9)
    assert [rate(step) for step in range(9)] == pytest.approx([(step + 1) / 10 for step in range(9)], rel=1e-3)
    assert rate(9) == pytest.approx(1)


def test_points_have_their_own_rate() -> None:
    options = Options(num_logits=4, hidden_dim=32, heads=2, encoder_layers=1, decoder_layers=1)
    model = deformable_detr(nn.Identity(), [8], options)
    groups = parameter_groups(model, lr=1.0, backbone_lr=0.1, weight_decay=0.01, point_lr_factor=0.25)
    by_name = {group["name"]: group for group in groups}
    assert by_name["points"]["lr"] == 0.25
    points = {id(p) for p in by_name["points"]["params"]}
    expected = [
        model.encoder.layers[0].attention.attention.sampling_offsets,
        model.decoder.layers[0].cross_attention.attention.sampling_offsets,
        model.decoder.queries.reference,
    ]
    assert points == {id(p) for module in expected for p in module.parameters()}
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("before", [False, True])
def test_moments_take_the_layout_of_their_parameter(before: bool) -> None:
    """A run may be resumed with another train.channels_last."""

    def convolution(channels_last: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)

    def steps(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            module(images).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    images = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    weights = []
    for after in (before, not before):
        first, second = convolution(before), convolution(after)
        groups = [parameter_groups(module, lr=0.1, backbone_lr=0.1, weight_decay=0.0) for module in (first, second)]
        optimizer, resumed = map(build_optimizer, groups)
        steps(first, optimizer)
        second.load_state_dict(first.state_dict())
        load_optimizer(resumed, optimizer.state_dict(), "last.pt")
        steps(second, resumed)
        weights.append(second.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0])
