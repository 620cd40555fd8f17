"""Linear layers and convolutions of oneDNN: the results of torch's own, and used where they are meant to be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile

from detr_bf.acceleration import onednn
from detr_bf.acceleration.model import accelerate
from detr_bf.acceleration.onednn import convolution, linear

ONEDNN = torch.backends.mkldnn.is_available()
needs_onednn = pytest.mark.skipif(not ONEDNN, reason="this torch has no oneDNN")
LINEAR, CONVOLUTION = "mkldnn::_linear_pointwise", "mkldnn::_convolution_pointwise"


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN's products for all sizes, on processors of any vendor."""
    for name, value in (("FASTER", ONEDNN), ("SMALLEST_PRODUCT", 0), ("FEWEST_ROWS", 0)):
        monkeypatch.setattr(onednn, name, value)


def operators(function: Callable[[], object]) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        function()
    return {event.key for event in found.key_averages()}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_onednn
def test_this_torch_has_the_operators() -> None:
    """torch may rename operators of this namespace without notice; then nothing here would be faster any more."""
    assert hasattr(torch.ops.mkldnn, "_linear_pointwise")
    assert hasattr(torch.ops.mkldnn, "_convolution_pointwise")


@needs_onednn
@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 5, 7), (2, 3, 5, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_results_and_gradients_are_those_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    given = [random(*shape), random(3, 7), *([random(3)] if bias else [])]
    results = []
    for function in (linear, F.linear):
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        result = function(*inputs)
        first = torch.autograd.grad(result.square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), inputs)
        with torch.no_grad():
            results.append([result, function(*given), *first, *second])
    assert LINEAR in operators(lambda: linear(*given))
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))


@needs_onednn
@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("learned", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_gradients_that_are_needed_are_computed(learned: tuple[bool, ...]) -> None:
    given = (random(4, 7), random(3, 7), random(3))
    inputs = [tensor.requires_grad_(is_learned) for tensor, is_learned in zip(given, learned, strict=True)]
    linear(*inputs).sum().backward()
    assert tuple(tensor.grad is not None for tensor in inputs) == learned


@needs_onednn
@pytest.mark.usefixtures("any_size")
def test_a_result_can_be_changed_in_place() -> None:
    x, weight = random(2, 5, 7), random(3, 7).requires_grad_()
    (linear(x, weight).masked_fill_(x[..., :1] > 0, 0.0) ** 2).sum().backward()
    expected = random(3, 7).requires_grad_()
    (F.linear(x, expected).masked_fill(x[..., :1] > 0, 0.0) ** 2).sum().backward()
    assert torch.allclose(weight.grad, expected.grad, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_products_that_gain_nothing_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "FASTER", True)
    large, weight = random(2048, 256), random(256, 256)
    assert large.numel() * 256 == onednn.SMALLEST_PRODUCT
    layer = accelerate(nn.Linear(256, 256))
    assert LINEAR in operators(lambda: layer(large))
    assert LINEAR not in operators(lambda: linear(large[:-1], weight))
    assert LINEAR not in operators(lambda: linear(large.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(large).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert LINEAR not in operators(lambda: linear(large, weight))
    monkeypatch.setattr(onednn, "FASTER", False)
    assert LINEAR not in operators(lambda: linear(large, weight))


@needs_onednn
@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("kernel", "groups"), list(product((1, 3), (1, 2))))
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_are_those_of_torch(kernel: int, groups: int, bias: bool, layout: torch.memory_format) -> None:
    x = random(2, 4, 9, 7).contiguous(memory_format=layout)
    module = nn.Conv2d(4, 6, kernel, stride=(2, 1), padding=(1, 0), groups=groups, bias=bias)
    expected = module(x)
    accelerate(module)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found = module(x)
            assert CONVOLUTION in operators(lambda: module(x))
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous(memory_format=layout)


@needs_onednn
@pytest.mark.usefixtures("any_size")
def test_convolutions_with_gradients_or_other_inputs_are_those_of_torch() -> None:
    x, module = random(2, 4, 9, 7), accelerate(nn.Conv2d(4, 6, 3, padding=1))
    assert CONVOLUTION not in operators(lambda: module(x))  # gradients are on
    with torch.no_grad():
        assert CONVOLUTION in operators(lambda: module(x))
        assert CONVOLUTION not in operators(lambda: copy.deepcopy(module).double()(x.double()))
        assert module(x[:0]).shape == (0, 6, 9, 7)
        assert module(x[0]).shape == (6, 9, 7)
        for settings in ({"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}):
            other = nn.Conv2d(4, 6, 3, **settings)  # type: ignore[arg-type]
            assert torch.equal(accelerate(copy.deepcopy(other))(x), other(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x).dtype == torch.bfloat16


@needs_onednn
@pytest.mark.usefixtures("any_size")
def test_transforms_of_functions_get_torchs_own() -> None:
    x, weight, images, kernel = random(5, 7), random(3, 7), random(2, 4, 9, 7), random(6, 4, 3, 3)
    convolved = partial(convolution, nn.Conv2d(4, 6, 3), bias=None)
    found = torch.func.grad(lambda w: linear(x, w).sum())(weight)
    assert torch.allclose(found, x.sum(0).expand(3, -1), atol=1e-5)
    stacked = torch.stack([weight, 2 * weight])
    assert torch.allclose(torch.func.vmap(linear, (None, 0))(x, stacked)[1], 2 * F.linear(x, weight), atol=1e-5)
    with torch.no_grad():
        for function, given in ((linear, (x, weight)), (convolved, (images, kernel))):
            value, tangent = torch.func.jvp(lambda *it, f=function: f(*it), given, given)
            assert torch.allclose(tangent, 2 * value, atol=1e-4)  # bilinear in its two tensors
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        assert torch.allclose(forward_ad.unpack_dual(linear(dual, weight)).tangent, F.linear(x, weight), atol=1e-5)


@needs_onednn
@pytest.mark.usefixtures("any_size")
def test_traced_layers_are_those_of_torch() -> None:
    layer, x = accelerate(nn.Linear(7, 3)), random(5, 7)
    assert torch.allclose(torch.jit.trace(layer, x)(x), F.linear(x, layer.weight, layer.bias), atol=1e-5)


def test_exported_layers_take_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "FASTER", True)
    layer = accelerate(nn.Linear(256, 256))
    rows = {"input": {0: torch.export.Dim.DYNAMIC}}
    for example, other in ((10, 4096), (4096, 10)):
        program = torch.export.export(layer, (random(example, 256),), dynamic_shapes=rows)
        assert program.module()(random(other, 256)).shape == (other, 256)


@needs_onednn
@pytest.mark.usefixtures("any_size")
def test_other_shapes_and_subclasses_are_left_to_torch() -> None:
    class Doubled(Tensor):
        @classmethod
        def __torch_function__(cls, func: object, types: object, args: tuple = (), kwargs: object = None) -> Tensor:  # type: ignore[type-arg]
            assert func is F.linear
            return F.linear(args[0], 2 * args[1].as_subclass(Tensor))

    x, weight = random(5, 7), random(3, 7)
    doubled = weight.as_subclass(Doubled)
    assert torch.equal(linear(x, doubled), F.linear(x, 2 * weight))
    assert torch.equal(linear(x, weight, torch.ones(1)), F.linear(x, weight, torch.ones(1)))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(x, random(3, 6))
