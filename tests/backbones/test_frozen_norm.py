"""Frozen batch norms that convolutions apply: the same outputs and gradients as with the norms of the libraries."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from timm.layers.norm_act import FrozenBatchNormAct2d, freeze_batch_norm_2d
from torch import Tensor, nn
from torchvision.models import resnet as torchvision_resnet
from torchvision.ops import FrozenBatchNorm2d

from detr_bf.acceleration.model import accelerate, restore
from detr_bf.backbones import build_backbone
from detr_bf.backbones.same_padding import pad_at_the_end

NAMES = [
    "resnet50",
    "resnet18vd",
    "timm:tf_efficientnet_lite0",
    "timm:resnet10t",
    "timm:resnetv2_50",
    "timm:vgg11_bn",  # its convolutions have biases
    "timm:resnest14d",  # some of its convolutions have biases
    "timm:hgnetv2_b0",
]


def reference(name: str) -> nn.Module:
    """Return the library's network with its own frozen norms, with random statistics."""
    torch.manual_seed(0)
    if name == "resnet50":
        network = torchvision_resnet.resnet50(norm_layer=FrozenBatchNorm2d)
        network.forward = lambda x: _stages(network, x)
    elif name == "resnet18vd":
        network = _resnet_vd()
    else:
        more = {"zero_init_last": False} if "resne" in name else {}  # else the last norms of blocks give zeros
        network = timm.create_model(name.removeprefix("timm:"), features_only=True, out_indices=(2, 3), **more)
        network = freeze_batch_norm_2d(network)
        pad_at_the_end(network)  # images() have sides that are no multiples of the strides
    for module in network.modules():
        if isinstance(module, FrozenBatchNorm2d | FrozenBatchNormAct2d):
            for buffer, low in ((module.weight, 0.5), (module.running_var, 0.5), (module.bias, -1.0)):
                buffer.uniform_(low, low + 1)
            module.running_mean.normal_()
        elif isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.normal_(module.bias)
    return network.double()


def _resnet_vd() -> nn.Module:
    settings = {"strides": [8, 16], "dilation": False, "frozen_stages": 0}
    return freeze_batch_norm_2d(
        build_backbone("resnet18vd", weights="none", **settings, frozen_norm=False).body  # type: ignore[arg-type]
    )


def _stages(network: torchvision_resnet.ResNet, images: Tensor) -> list[Tensor]:
    x = network.maxpool(network.relu(network.bn1(network.conv1(images))))
    second = network.layer2(network.layer1(x))
    return [second, network.layer3(second)]


def folded(network: nn.Module) -> nn.Module:
    """Return a copy of the network whose convolutions apply its norms."""
    if isinstance(network, torchvision_resnet.ResNet):
        body = build_backbone(
            "resnet50", weights="none", strides=[8, 16], dilation=False, frozen_stages=0, frozen_norm=True
        ).body.double()
        accelerate(body, body)
        missing, _ = body.load_state_dict(network.state_dict(), strict=False)
        assert not missing
        return body
    body = copy.deepcopy(network).train()
    return accelerate(body, body)


def images(size: int = 96) -> Tensor:
    return torch.randn(2, 3, size, size + 35, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def outputs_and_gradients(network: nn.Module) -> list[Tensor]:
    network.zero_grad()
    maps = network(images())
    sum(level.square().mean() for level in maps).backward()
    named = sorted(network.named_parameters())
    return [*maps, *(parameter.grad for _, parameter in named if parameter.grad is not None)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.allclose(a, b, rtol=1e-9, atol=1e-9 * float(b.detach().abs().max()))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.default_tier("resnet50", "timm:tf_efficientnet_lite0", "timm:vgg11_bn")
@pytest.mark.parametrize("name", NAMES)
def test_outputs_gradients_and_names_are_those_of_the_library(name: str) -> None:
    network = reference(name)
    body = folded(network)
    norms = [module for module in body.modules() if isinstance(module, FrozenBatchNorm2d | FrozenBatchNormAct2d)]
    passed = [module for module in norms if "forward" in vars(module)]
    # A network with norms before its convolutions has none after the last one.
    assert len(passed) == len(norms) or (name == "timm:resnetv2_50" and passed)
    assert [key for key in network.state_dict() if key in body.state_dict()] == list(body.state_dict())
    assert same(outputs_and_gradients(body), outputs_and_gradients(network))
    assert all(module.training for module in body.modules())


@pytest.mark.full
def test_weights_kept_in_inference_follow_every_change() -> None:
    network = reference("timm:tf_efficientnet_lite0")
    body = folded(network)
    twin = copy.deepcopy(body)
    first = next(module for module in body.modules() if isinstance(module, nn.Conv2d))

    def check() -> None:
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                expected = network(images())
                assert same(body(images()), expected)
                assert same(body(images()), expected)  # with the kept weights
                assert same(pickle.loads(pickle.dumps(body))(images()), expected)

    check()
    assert first._conv_forward.kept is not None
    for module in (network, body):
        with torch.no_grad():
            next(module.parameters()).mul_(2)
            module.get_buffer("bn1.running_mean").add_(0.5)
    check()
    other = {key: value + 0.1 for key, value in network.state_dict().items()}
    network.load_state_dict(other)
    body.load_state_dict(other)
    check()
    for module in (network, body):
        for parameter in module.parameters():
            parameter.data = parameter.data * 0.9
    check()
    assert not same(twin(images()), body(images()))  # the copy has norms and weights of its own
    assert first._conv_forward.kept is None  # released in training


@pytest.mark.parametrize("name", ["resnet50", "timm:tf_efficientnet_lite0"])
def test_an_exported_graph_has_the_same_outputs(name: str) -> None:
    body = folded(reference(name)).eval()
    with torch.no_grad():
        program = torch.export.export(body, (images(),), strict=False)
        assert same(list(program.module()(images())), list(body(images())))
    weights = {node.target for node in program.graph.nodes if node.op == "placeholder"}
    assert not any("kept" in str(target) for target in weights)


def test_shared_and_other_layers_keep_their_norms() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 3, 1)
            self.norms = nn.ModuleList(FrozenBatchNorm2d(3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for norm in self.norms[:2]:
                x = norm(self.convolution(x))
            return self.norms[2](x.relu())

    network = Shared()
    for norm in network.norms:
        norm.running_mean.normal_()
    before = network(torch.ones(1, 3, 4, 4))
    accelerate(network, network)
    assert not any("forward" in vars(module) for module in network.norms)
    assert torch.equal(network(torch.ones(1, 3, 4, 4)), before)


@pytest.mark.parametrize("returns", [False, True])
def test_a_convolution_that_others_read_keeps_its_norm(returns: bool) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(3, 3, 1), FrozenBatchNorm2d(3)

        def forward(self, x: Tensor) -> list[Tensor]:
            y = self.convolution(x)
            z = self.norm(y)
            return [y, z] if returns else [z + y]

    network = Read()
    network.norm.running_mean.normal_()
    before = network(torch.ones(1, 3, 4, 4))
    accelerate(network, network)
    assert "forward" not in vars(network.norm)
    assert all(map(torch.equal, network(torch.ones(1, 3, 4, 4)), before))


@pytest.mark.parametrize("settings", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}])
def test_norms_after_other_paddings(settings: dict[str, object]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 3, 3, **settings), FrozenBatchNorm2d(3))  # type: ignore[arg-type]
    network[1].running_mean.normal_()
    with torch.no_grad():
        before = network(torch.ones(1, 3, 6, 6))
        accelerate(network, network)
        assert "forward" in vars(network[1])
        assert torch.allclose(network(torch.ones(1, 3, 6, 6)), before, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet50", "timm:tf_efficientnet_lite0"])
def test_one_call_undoes_all(name: str) -> None:
    network = reference(name)
    body = folded(network)
    before = {module: dict(vars(module)) for module in restore(copy.deepcopy(body)).modules()}
    assert not any({"forward", "_conv_forward"} & set(state) for state in before.values() if state is not None)
    assert all(map(torch.equal, outputs_and_gradients(restore(body)), outputs_and_gradients(restore(body))))
