from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from detr_bf.backbones import build_backbone
from detr_bf.batchformer import BatchFormer, BatchFormerV2
from detr_bf.common.errors import InputError
from detr_bf.detectors import Options
from detr_bf.detectors.deformable_detr import deformable_detr
from detr_bf.detectors.detr import detr
from detr_bf.engine import LearningRate, build_optimizer, parameter_groups
from detr_bf.engine.optimizer import image_parameter_groups, load_optimizer
from detr_bf.plugins import add_batchformer, add_batchformer_v2, add_context_broadcasting, add_diverse_patch
from tests.checkpoints import training
from tests.detectors import tiny as tiny_detectors
from tests.plugins import tiny


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


def test_batch_former_of_pooled_features_is_in_the_same_group() -> None:
    model = nn.Sequential(nn.Linear(4, 8), BatchFormer(8), nn.Linear(8, 2))
    groups = {
        group["name"]: group["params"]
        for group in parameter_groups(model, lr=1.0, backbone_lr=0.1, weight_decay=0.01, batch_former_lr_factor=0.1)
    }
    assert {name: len(params) for name, params in groups.items()} == {"transformer": 4, "batch_former": 12}
    assert {id(p) for p in groups["batch_former"]} == {id(p) for p in model[1].parameters()}


def by_group(model: nn.Module, **changes: Any) -> dict[str, set[str]]:
    """Return the names of the parameters in each group; check that none occurs twice."""
    settings = {"lr": 1.0, "weight_decay": 0.05} | changes
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {
        group["name"]: [names[id(p)] for p in group["params"]] for group in image_parameter_groups(model, **settings)
    }
    together = [name for members in groups.values() for name in members]
    assert sorted(together) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    return {name: set(members) for name, members in groups.items()}


def classifier(add: Callable[..., Any] = add_batchformer) -> nn.Module:
    """Classifier with plug-ins and one frozen parameter."""
    model = tiny.vit()
    add(model, **({"layers": [1]} if add is add_batchformer_v2 else {}))
    add_context_broadcasting(model, "all", scaled=True)
    add_diverse_patch(model, tiny.CLASSES)
    model.patch_embed.proj.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("add", [add_batchformer, add_batchformer_v2])
def test_images_matrices_decay_and_vectors_positions_and_tokens_do_not(add: Callable[..., Any]) -> None:
    model = classifier(add)
    groups = by_group(model)
    assert set(groups) == {"network", "network_no_decay", "batch_former", "batch_former_no_decay"}
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    for name in groups["network"] | groups["batch_former"]:
        assert shapes[name] == 2, name
        assert name.endswith("weight"), name
    assert {name for name in groups["network_no_decay"] if shapes[name] > 1} == {"pos_embed", "cls_token"}
    assert "plugins.context_broadcasting.scales.0" in groups["network_no_decay"]
    assert "plugins.diverse_patch.patch_head.weight" in groups["network"]
    batch_attention = {name for name in shapes if name.startswith("plugins.batchformer")}
    assert groups["batch_former"] | groups["batch_former_no_decay"] == batch_attention


def test_images_batch_attention_has_its_own_rate_and_decay_on_matrices() -> None:
    groups = image_parameter_groups(
        classifier(), lr=1.0, weight_decay=0.05, batch_former_lr_factor=0.1, batch_former_weight_decay=0.5
    )
    assert {group["name"]: (group["lr"], group["weight_decay"]) for group in groups} == {
        "network": (1.0, 0.05),
        "network_no_decay": (1.0, 0.0),
        "batch_former": (0.1, 0.5),
        "batch_former_no_decay": (0.1, 0.0),
    }
    default = image_parameter_groups(classifier(), lr=1.0, weight_decay=0.05)
    assert {group["weight_decay"] for group in default if group["name"] == "batch_former"} == {0.05}


def test_images_vectors_decay_where_they_are_told_to() -> None:
    """Except the scales of Context Broadcasting, which start at 0 (spec/vit_plugins.md: no weight decay)."""
    groups = by_group(classifier(), decay_vectors=True)
    assert set(groups) == {"network", "network_no_decay", "batch_former"}
    assert groups["network_no_decay"] == {f"plugins.context_broadcasting.scales.{block}" for block in range(4)}
    assert set(by_group(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))) == {"network", "network_no_decay"}


def test_images_tables_that_timm_spares_are_spared() -> None:
    spared = {name for name in by_group(tiny.swin())["network_no_decay"] if "relative_position" in name}
    assert len(spared) == 4, "one per block"


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
        "Adam's first step equals the learning rate"
    )
    assert moved["backbone.1.weight"] == pytest.approx(0.001, rel=1e-3)
    assert moved["backbone.0.weight"] == 0


def test_step_schedule() -> None:
    rate = LearningRate("step", total_steps=30, drop_steps=(10, 20), drop_factor=0.1)
    assert [rate(step) for step in (0, 9, 10, 19, 20, 29)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_cosine_ends_at_the_least_factor() -> None:
    rate = LearningRate("cosine", total_steps=100, warmup_steps=3, min_factor=0.2)
    free = LearningRate("cosine", total_steps=100, warmup_steps=3)
    assert rate(3) == pytest.approx(1)
    assert rate(100) == rate(200) == pytest.approx(0.2)
    assert rate(40) == pytest.approx(0.2 + 0.8 * free(40))
    assert rate(0) == pytest.approx(0.25)


def test_cosine_schedule() -> None:
    rate = LearningRate("cosine", total_steps=100)
    assert rate(0) == pytest.approx(1)
    assert rate(50) == pytest.approx(0.5)
    assert rate(75) == pytest.approx(0.5 * (1 + math.cos(0.75 * math.pi)))
    assert rate(100) == pytest.approx(0)
    assert all(rate(step + 1) < rate(step) for step in range(100))


def test_flat_cosine_schedule() -> None:
    rate = LearningRate("flat_cosine", total_steps=100, min_factor=0.5, flat_steps=40, final_steps=20)
    assert [rate(step) for step in (0, 20, 40)] == [1, 1, 1]
    assert rate(60) == pytest.approx(0.75)
    assert rate(50) == pytest.approx(0.5 + 0.25 * (1 + math.cos(0.25 * math.pi)))
    assert [rate(step) for step in (80, 90, 100)] == pytest.approx([0.5, 0.5, 0.5])
    assert all(rate(step + 1) < rate(step) for step in range(40, 80))


def test_warmup_with_an_exponent() -> None:
    rate = LearningRate("step", total_steps=1000, warmup_steps=9, warmup_power=2)
    assert [rate(step) for step in (0, 4, 9, 10)] == pytest.approx([0.01, 0.25, 1, 1])


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


def test_gradient_descent_as_a_loop() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    groups = [{"params": [parameter], "lr": 0.1, "weight_decay": 0.01}]
    optimizer = build_optimizer(groups, "sgd", momentum=0.8, nesterov=True)
    value, velocity = parameter.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for step in range(3):
        parameter.grad = torch.tensor([0.3, -0.1], dtype=torch.float64) * (step + 1)
        gradient = parameter.grad + 0.01 * value
        velocity = gradient if step == 0 else 0.8 * velocity + gradient
        value = value - 0.1 * (gradient + 0.8 * velocity)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), value)
    assert optimizer.param_groups[0]["base_lr"] == 0.1


def test_lars_scales_the_steps_of_decayed_parameters() -> None:
    """The rate of a parameter with weight decay is 0.001 |w| / (|g| + decay |w|) times the rate of SGD."""
    values = [torch.tensor([[3.0, -1.0], [0.5, 2.0]]), torch.tensor([1.0, -2.0])]
    parameters = [nn.Parameter(value.clone()) for value in values]
    groups = [
        {"params": [one], "lr": 0.5, "weight_decay": decay} for one, decay in zip(parameters, (0.01, 0.0), strict=True)
    ]
    optimizer, velocities = build_optimizer(groups, "lars", momentum=0.9), [torch.zeros(2, 2), torch.zeros(2)]
    for step in range(3):
        for at, (parameter, decay) in enumerate(zip(parameters, (0.01, 0.0), strict=True)):
            gradient = torch.full_like(parameter, 0.1 * (step + 1))
            parameter.grad = gradient.clone()
            norm = values[at].norm()
            ratio = 0.001 * norm / (gradient.norm() + decay * norm) if decay else 1.0
            velocities[at] = 0.9 * velocities[at] + ratio * (gradient + decay * values[at])
            values[at] = values[at] - 0.5 * velocities[at]
        optimizer.step()
    for parameter, value in zip(parameters, values, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


def test_settings_reach_the_optimizer() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1}]
    assert build_optimizer(groups, betas=[0.8, 0.95]).param_groups[0]["betas"] == (0.8, 0.95)
    assert build_optimizer(groups).param_groups[0]["betas"] == (0.9, 0.999)
    assert build_optimizer(groups, "sgd", momentum=0.0).param_groups[0]["momentum"] == 0
    with pytest.raises(InputError, match="adamw, lars or sgd; got 'lamb'"):
        build_optimizer(groups, "lamb")
    with pytest.raises(InputError, match="momentum greater than 0"):
        build_optimizer(groups, "sgd", momentum=0.0, nesterov=True)


@pytest.mark.parametrize(("old", "new"), [("adamw", "sgd"), ("sgd", "adamw"), ("lars", "sgd"), ("adamw", "lars")])
def test_another_kind_of_optimizer_is_not_resumed(old: str, new: str) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1}]
    state = build_optimizer(groups, old).state_dict()
    with pytest.raises(InputError, match=rf"last.pt was trained with {old} and optimizer.name is {new}"):
        load_optimizer(build_optimizer(groups, new), state, "last.pt")


@pytest.mark.parametrize(
    ("moment", "message"),
    [
        (torch.full((2,), math.nan), r"last.pt holds NaN or infinite weights.* in optimizer\.0\.exp_avg"),
        (torch.zeros(3), r"last.pt: optimizer\.0\.exp_avg must have the shape of the parameter"),
        (torch.zeros(2).to_sparse(), r"last.pt holds what cannot be weights: optimizer\.0\.exp_avg \(sparse\)"),
        (3, r"last.pt holds what cannot be weights: optimizer\.0\.exp_avg \(a value of type int\)"),
        (..., "last.pt: its optimizer state is damaged, it holds exp_avg_sq, step; expected exp_avg, exp_avg_sq, step"),
    ],
)
def test_moments_that_would_spoil_the_next_step_are_refused(moment: Any, message: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    state = training(parameter=parameter)["optimizer"]
    state["state"][0]["exp_avg"] = moment
    if moment is ...:
        del state["state"][0]["exp_avg"]
    with pytest.raises(InputError, match=message):
        load_optimizer(build_optimizer([{"params": [parameter], "lr": 0.1}], "adamw"), state, "last.pt")


@pytest.mark.parametrize("name", ["adamw", "sgd", "lars"])
@pytest.mark.parametrize("before", [False, True])
def test_moments_take_the_layout_of_their_parameter(before: bool, name: str) -> None:
    """A run may be resumed with another train.channels_last."""

    def convolution(channels_last: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)

    def steps(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            module(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    images = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    weights = []
    for after in (before, not before):
        first, second = convolution(before), convolution(after)
        groups = [parameter_groups(module, lr=0.1, backbone_lr=0.1, weight_decay=0.0) for module in (first, second)]
        optimizer, resumed = (build_optimizer(parameters, name) for parameters in groups)
        steps(first, optimizer)
        second.load_state_dict(first.state_dict())
        load_optimizer(resumed, optimizer.state_dict(), "last.pt")
        assert resumed.state[second.weight].keys() == optimizer.state[first.weight].keys()
        steps(second, resumed)
        weights.append(second.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0])


def test_vectors_without_weight_decay() -> None:
    """Compare with RT-DETR's rule: biases and norms of all parts have none, and their part's learning rate."""
    model = tiny_detectors.model("rtdetr", batch_former=tiny_detectors.batch_former())
    model.backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    settings = {"lr": 1.0, "backbone_lr": 0.1, "weight_decay": 0.01}
    groups = {group["name"]: group for group in parameter_groups(model, **settings, decay_vectors=False)}
    former = {id(p) for p in model.encoder.encoder.batch_former.parameters()}
    found = {id(p): group for group in groups.values() for p in group["params"]}
    for name, parameter in model.named_parameters():
        group = found[id(parameter)]
        decays = parameter.ndim > 1 or id(parameter) in former
        assert group["weight_decay"] == (0.01 if decays else 0.0), name
        assert group["lr"] == (0.1 if name.startswith("backbone") else 1.0), name
    assert {group["name"] for group in parameter_groups(model, **settings)} == {
        "transformer",
        "backbone",
        "batch_former",
        "points",
    }


def rates(model: nn.Module, decay: float, **changes: Any) -> dict[str, float]:
    """Return the learning rate of each parameter by name; check that each is in one group."""
    groups = parameter_groups(model, lr=1.0, backbone_lr=0.1, weight_decay=0.01, layer_decay=decay, **changes)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [(names[id(parameter)], group["lr"]) for group in groups for parameter in group["params"]]
    assert sorted(name for name, _ in found) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert len({group["name"] for group in groups}) == len(groups)
    return dict(found)


@pytest.mark.parametrize("name", tiny_detectors.WITH_ENCODER)
@pytest.mark.parametrize("vectors", [True, False])
def test_layer_decay_lowers_the_rate_from_the_output_to_the_input(name: str, vectors: bool) -> None:
    """The factor is that of one forward pass: each layer before another one has a smaller rate, by the same factor."""
    model = tiny_detectors.model(name, batch_former=tiny_detectors.batch_former(), decoder_layers=3)
    model.backbone = nn.Conv2d(3, 4, 1)
    options = {"decay_vectors": vectors, "point_lr_factor": 0.2, "batch_former_lr_factor": 0.3}
    plain, decayed = rates(model, 1.0, **options), rates(model, 0.5, **options)
    factors = {name: decayed[name] / plain[name] for name in plain}

    def of(part: str) -> set[float]:
        return {factor for key, factor in factors.items() if key.startswith(part) and "batch_former" not in key}

    heads = [key for key in factors if key.startswith("decoder.heads.") or "class_head" in key or "box_head" in key]
    assert {factors.pop(key) for key in heads} == {1.0}, "also those that choose the queries of two-stage detectors"
    assert [of(f"decoder.layers.{layer}.") for layer in range(3)] == [{0.125}, {0.25}, {0.5}]
    inner = "encoder.encoder." if of("encoder.encoder.") else "encoder."
    layers = len({name.removeprefix(inner).split(".")[1] for name in factors if name.startswith(f"{inner}layers.")})
    ends = [0.125 * 0.5 ** (layers - layer) for layer in range(layers)]
    assert [of(f"{inner}layers.{layer}.") for layer in range(layers)] == [{factor} for factor in ends]
    assert of("tokens.") == {ends[0]}
    assert of("backbone.") == {ends[0] / 2}
    assert {factor for name, factor in factors.items() if "batch_former" in name} == {1.0}
    assert of("decoder.queries.") == {0.125}


@pytest.mark.parametrize(
    ("backbone", "parts"),
    [
        ("resnet18", ("conv1", "layer1", "layer2", "layer3", "layer4")),
        ("resnet18vd", ("conv1", "layer1", "layer2", "layer3", "layer4")),
        ("timm:convnext_atto", ("stages_0", "stages_1", "stages_2", "stages_3")),
        ("timm:tf_efficientnet_lite0", ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.5")),
    ],
)
def test_layer_decay_of_the_stages_of_a_backbone(backbone: str, parts: tuple[str, ...]) -> None:
    model = tiny_detectors.model()
    settings: dict[str, Any] = {"weights": "none", "dilation": False, "frozen_stages": 0, "frozen_norm": False}
    model.backbone = build_backbone(backbone, strides=[32], **settings)
    found = rates(model, 0.5)
    first = 0.1 * 0.5 ** (2 * tiny_detectors.LAYERS)
    for before, part in enumerate(reversed(parts), start=1):
        names = {name for name in found if name.startswith(f"backbone.body.{part}.")}
        assert names
        assert {found[name] for name in names} == {first * 0.5**before}, part


@pytest.mark.parametrize("name", ["detr", "rfdetr"])
def test_layer_decay_of_the_backbone_alone(name: str) -> None:
    """The rate falls from its last stage on; that of all else stays, and together with layer_decay both apply."""
    model = tiny_detectors.model(name)
    settings: dict[str, Any] = {"weights": "none", "dilation": False, "frozen_stages": 0, "frozen_norm": False}
    model.backbone = build_backbone("resnet18", strides=[32], **settings)
    found, both, one = (
        rates(model, 1.0, backbone_layer_decay=0.5),
        rates(model, 0.8, backbone_layer_decay=0.5),
        rates(model, 0.8),
    )
    assert {rate for key, rate in found.items() if not key.startswith("backbone.")} == {1.0}
    for before, part in enumerate(("layer4", "layer3", "layer2", "layer1", "conv1"), start=1):
        names = [key for key in found if key.startswith(f"backbone.body.{part}.")]
        assert {found[key] for key in names} == {0.1 * 0.5**before}, part
        assert [both[key] for key in names] == pytest.approx([one[key] * 0.5**before for key in names])
    assert {both[key] / rate for key, rate in one.items() if not key.startswith("backbone.")} == {1.0}


def test_no_layer_decay_leaves_groups_as_they_are() -> None:
    model = network()
    plain = parameter_groups(model, lr=1.0, backbone_lr=0.1, weight_decay=0.01)
    assert [group["name"] for group in plain] == ["transformer", "backbone", "batch_former"]
    decayed = parameter_groups(model, lr=1.0, backbone_lr=0.1, weight_decay=0.01, layer_decay=0.9)
    assert decayed[0]["name"] == "transformer", "the rate that curves show is that of the output"
    assert decayed[0]["lr"] == 1.0


def test_linear_falls_straight_to_zero_after_the_warm_up() -> None:
    rate = LearningRate(schedule="linear", total_steps=100, warmup_steps=9)
    assert [rate(step) for step in (20, 50, 75, 100, 120)] == pytest.approx([0.8, 0.5, 0.25, 0, 0])
    assert rate(4) == pytest.approx(0.5 * 0.96)
