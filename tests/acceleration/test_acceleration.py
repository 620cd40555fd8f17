"""Compilation, memory format and recomputation: names, values and gradients do not change."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from detr_bf.acceleration import folding, onednn
from detr_bf.acceleration import model as tricks
from detr_bf.acceleration.model import REPLACED, accelerate, restore
from detr_bf.assembly import build_model
from detr_bf.assembly import compilation as assembly
from detr_bf.assembly.compilation import compile_model
from detr_bf.backbones import build_backbone
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Outputs
from detr_bf.config import load_config
from detr_bf.detectors import Detector, MaskHead
from detr_bf.transformer import Decoder, Encoder
from tests.detectors.tiny import CHANNELS, DETECTORS, DIM, WITH_ENCODER, Averages, batch_former, images, model, shaken

COMPILED = load_config(None, ["train.compile=true", "device=cpu"])
SMALL = [
    "batch_former.enabled=true",
    "model.hidden_dim=32",
    "model.heads=2",
    "model.encoder_layers=2",
    "model.decoder_layers=1",
    "model.feedforward_dim=32",
    "model.num_queries=5",
    "model.backbone.name=resnet18",
    "model.backbone.weights=none",
    "device=cpu",
]

every_detector = pytest.mark.parametrize("name", DETECTORS)
# Inductor takes a minute for each; aot_eager traces the same way but generates no C++.
slowly = [pytest.param(name, "inductor", marks=pytest.mark.slow) for name in DETECTORS]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


def loss(outputs: Outputs) -> Tensor:
    total = outputs.logits.float().square().mean() + outputs.boxes.square().mean()
    if outputs.masks is not None:
        total = total + outputs.masks.all().square().mean()
    if outputs.proposals is not None:
        total = total + outputs.proposals.logits.square().mean() + outputs.proposals.boxes[..., :2].square().mean()
    return total


def trained(module: Detector, batch: Batch) -> tuple[Outputs, dict[str, Tensor]]:
    """Return outputs in training mode and the gradients of all trainable parameters, with fixed random numbers."""
    torch.manual_seed(7)
    module.zero_grad()
    outputs = module.train()(batch)
    loss(outputs).backward()
    return outputs, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def of_images(count: int, height: int, width: int) -> Batch:
    generator = torch.Generator().manual_seed(height)
    mask = torch.zeros(count, height, width, dtype=torch.bool)
    mask[-1, height // 2 :] = True
    return Batch(torch.randint(256, (count, 3, height, width), generator=generator, dtype=torch.uint8), mask)


# ---- recomputation ----


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage")
@every_detector
@pytest.mark.usefixtures("float64")
def test_recomputed_encoder_layers_give_the_same_bits(name: str) -> None:
    """Compare with dropout, and the random numbers drawn afterwards."""
    found = []
    for recompute in (False, True):
        settings = {"batch_former": batch_former(layers=[0, 1]), "activation_checkpointing": recompute}
        outputs, gradients = trained(shaken(model(name, dropout=0.3, **settings)), images())
        found.append((outputs.logits, outputs.boxes, torch.rand(5), gradients))
    (*plain, expected), (*recomputed, actual) = found
    assert all(torch.equal(*pair) for pair in zip(recomputed, plain, strict=True))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_recomputation_is_in_the_precision_of_the_first_pass(precision: torch.dtype) -> None:
    found = []
    for recompute in (False, True):
        module = shaken(model(dropout=0.3, batch_former=batch_former(), activation_checkpointing=recompute))
        torch.manual_seed(7)
        with torch.autocast("cpu", precision):
            outputs = module.train()(images())
        loss(outputs).backward()
        found.append({key: parameter.grad for key, parameter in module.named_parameters()})
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_the_setting_reaches_the_encoder() -> None:
    for recompute in (False, True):
        config = load_config(None, [*SMALL, f"train.recompute_encoder={str(recompute).lower()}"])
        assert build_model(config, num_classes=3).encoder.activation_checkpointing == recompute


# ---- compilation ----


@every_detector
def test_backbone_and_layers_are_compiled_and_no_name_changes(name: str) -> None:
    module = model(name, batch_former=batch_former())
    names = list(module.state_dict())
    compile_model(module, COMPILED)
    compiled = {part for part in module.modules() if part._compiled_call_impl is not None}
    layers = [layer for part in module.modules() if isinstance(part, (Encoder, Decoder)) for layer in part.layers]
    assert len(layers) == (4 if name in WITH_ENCODER else 2)
    assert compiled == {module.backbone, *layers}
    assert list(module.state_dict()) == names
    assert all(part._compiled_call_impl is None for part in copy.deepcopy(module).modules()), "the averaged weights"


def test_nothing_is_done_unasked() -> None:
    module = build_model(load_config(None, SMALL), num_classes=3)
    compile_model(module, load_config(None, SMALL))
    assert all(part._compiled_call_impl is None for part in module.modules())
    assert all(parameter.is_contiguous() for parameter in module.parameters())


@pytest.mark.full
@pytest.mark.parametrize(("name", "compiler"), [("detr", "aot_eager"), *slowly])
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_training_and_evaluation(name: str, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams from the second layer on, with changing sizes and numbers of images."""
    usual = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **settings: usual(self, backend=compiler, **settings))
    plain = shaken(model(name, dropout=0.0, batch_former=batch_former(layers=[1])), std=0.1)
    compiled = copy.deepcopy(plain)
    compile_model(compiled, COMPILED)
    for batch in (images(), of_images(3, 48, 32), of_images(2, 32, 64)):
        (outputs, gradients), (expected, wanted) = trained(compiled, batch), trained(plain, batch)
        assert outputs.num_streams == 2
        same(outputs, expected)
        assert gradients.keys() == wanted.keys()
        for key, gradient in wanted.items():
            torch.testing.assert_close(gradients[key], gradient, atol=1e-5, rtol=1e-3, msg=lambda m, key=key: key + m)
        with torch.no_grad():
            same(compiled.eval()(batch), plain.eval()(batch))
    assert not torch._dynamo.utils.counters["graph_break"]


def same(actual: Outputs, expected: Outputs) -> None:
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual.boxes, expected.boxes, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_mask_stage_and_recomputation_with_dropout() -> None:
    """Train the complete detector, then the mask head alone, with and without recomputed layers."""
    found = []
    for recompute in (False, True):
        head = MaskHead(DIM, heads=2, finer_channels=[CHANNELS])
        settings = {"mask_head": head, "batch_former": batch_former(), "activation_checkpointing": recompute}
        module = shaken(model(dropout=0.2, **settings), std=0.1)
        module.backbone = Averages(2)
        compile_model(module, COMPILED)
        whole = trained(module, images())
        module.freeze_all_but_masks(keep_dropout=True)
        found.append((*whole, *trained(module, images())))
    for (outputs, gradients), (expected, wanted) in zip(_pairs(found[1]), _pairs(found[0]), strict=True):
        same(outputs, expected)
        assert gradients.keys() == wanted.keys()
        assert all(torch.equal(gradients[key], gradient) for key, gradient in wanted.items())
    assert all(key.startswith("mask_head.") for key in found[0][3]), "no other parameter has a gradient"


def _pairs(run: tuple) -> list[tuple[Outputs, dict[str, Tensor]]]:
    return [(run[0], run[1]), (run[2], run[3])]


def test_without_a_compiler_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -pipe")
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler on a CPU, and no-such-compiler -pipe is not found"):
        compile_model(model(), COMPILED)


def test_without_triton_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = load_config(None, ["train.compile=true", "device=cuda"])
    compile_model(model(), config)
    known = importlib.util.find_spec
    monkeypatch.setattr(assembly, "find_spec", lambda name: None if name == "triton" else known(name))
    with pytest.raises(InputError, match="needs the package triton on a GPU"):
        compile_model(model(), config)


# ---- memory format ----


def test_channels_last_is_a_matter_of_layout_alone() -> None:
    config = load_config(
        None, [*SMALL, "train.channels_last=true", "model.dropout=0", "model.backbone.frozen_stages=0"]
    )
    torch.manual_seed(0)
    plain = build_model(config, num_classes=3)
    other = copy.deepcopy(plain)
    compile_model(other, config)
    other.load_state_dict(plain.state_dict())
    kernels = [parameter for parameter in other.backbone.parameters() if parameter.dim() == 4]
    assert kernels
    for kernel in kernels:
        assert kernel.is_contiguous(memory_format=torch.channels_last)
        assert kernel.is_contiguous() == (1 in (kernel.shape[1], kernel.shape[2] * kernel.shape[3]))
    assert all(parameter.is_contiguous() for parameter in other.encoder.parameters())
    batch = of_images(2, 64, 96)
    (outputs, gradients), (expected, wanted) = trained(other, batch), trained(plain, batch)
    same(outputs, expected)
    for key, gradient in wanted.items():
        torch.testing.assert_close(gradients[key], gradient, atol=1e-5, rtol=1e-3)
    weights = {key: value.contiguous() for key, value in other.state_dict().items()}
    assert all(torch.equal(weights[key], value) for key, value in plain.state_dict().items())


# ---- tricks for CPUs ----


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), FrozenBatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network[1].running_mean.normal_()
    return network.append(nn.Linear(4, 2))


@pytest.mark.usefixtures("_fresh_compiler")
def test_tricks_are_left_out_while_torch_compiles_and_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FASTER", torch.backends.mkldnn.is_available()), ("SMALLEST_PRODUCT", 0)):
        monkeypatch.setattr(onednn, name, value)
    x, plain = torch.randn(2, 3, 8, 8), normed()
    network = copy.deepcopy(plain)
    torch.testing.assert_close(accelerate(network, network)(x), plain(x))
    assert "forward" in vars(network[1])
    torch.testing.assert_close(torch.compile(network, backend="aot_eager", fullgraph=True)(x), plain(x))
    graph = torch.export.export(network.eval(), (x,)).graph
    assert any("batch_norm" in str(node.target) or "rsqrt" in str(node.target) for node in graph.nodes)
    assert not any("mkldnn" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize(("value", "on"), [(None, True), ("on", True), ("off", False), ("OFF", False), ("0", False)])
def test_the_variable_is_read_by_a_new_process(value: str | None, on: bool) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "DETR_BF_ACCELERATION"}
    environment |= {} if value is None else {"DETR_BF_ACCELERATION": value}
    code = f"import sys; from detr_bf.acceleration import ON; sys.exit(ON is not {on} or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_one_call_undoes_the_tricks_and_one_setting_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "FASTER", True)
    network = accelerate(normed())
    accelerate(network, network)
    assert {*REPLACED} <= {name for module in network for name in vars(module)}
    restore(network)
    monkeypatch.setattr(tricks, "ON", False)
    for module in (network, accelerate(network, network)):
        assert not {*REPLACED} & {name for part in module for name in vars(part)}


@pytest.mark.parametrize("norm", [FrozenBatchNorm2d, nn.BatchNorm2d])
def test_a_network_that_refuses_a_small_image(norm: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norms are found with the larger one; without it they stay as they are."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(3, 4, 80), norm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.convolution(x))

    network = Wide()
    for sides, expected in ((folding.TRIAL_SIDES, {network.convolution: network.norm}), ((64,), {})):
        monkeypatch.setattr(folding, "TRIAL_SIDES", sides)
        assert folding.pairs(network, network) == expected
        assert "_conv_forward" not in vars(network.convolution)


@pytest.mark.parametrize("name", ["hgnetv2_b0", "timm:tf_efficientnet_lite0"])
def test_batch_norms_are_folded_in_evaluation_alone(name: str) -> None:
    """Compare with the plain network in evaluation, in a training step, and in evaluation after it."""
    torch.manual_seed(0)
    plain = build_backbone(
        name, weights="none", strides=[8, 16, 32], dilation=False, frozen_stages=0, frozen_norm=False
    ).body
    for norm in (module for module in plain.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_mean, -0.2, 0.2)
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
    folded = copy.deepcopy(plain)
    accelerate(folded, folded)
    norms = [module for module in folded.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert all("forward" in vars(norm) for norm in norms)
    x = torch.rand(2, 3, 64, 96)
    for _ in range(2):
        with torch.no_grad():
            for actual, expected in zip(folded.eval()(x), plain.eval()(x), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        for network in (folded, plain):
            network.train()
            optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
            sum(level.square().mean() for level in network(x)).backward()
            optimizer.step()
        for (key, actual), (_, expected) in zip(folded.state_dict().items(), plain.state_dict().items(), strict=True):
            assert torch.equal(actual, expected), key
