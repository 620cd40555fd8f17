"""Dropout with its neighbouring operation on a CPU and on a GPU.

With a given seed the same elements are dropped as by the reference on the CPU. Without one a GPU draws as torch does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from detr_bf.ops import relu_dropout, residual_dropout
from detr_bf.ops.reference import dropout_reference, random_numbers
from tests.kernels import on_cuda, on_devices
from tests.ops.on_devices import DTYPES, assert_close, assert_same_bits, poison, with_gradients

SEED = torch.tensor(-(2**41) + 3)
P = 0.3
COUNTS = (1, 4, 15, 127, 128, 130, 1000, 4099, 100_000)
# Relative to the largest number; the update may be rounded before it is added.
PRECISION = {torch.float64: 1e-14, **{dtype: 2 * torch.finfo(dtype).eps for dtype in DTYPES[1:]}}


def random(count: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, dtype=torch.float64, generator=generator).to(dtype) for _ in range(2)]


def unaligned(tensor: Tensor) -> Tensor:
    return torch.cat((tensor.new_zeros(1), tensor))[1:]


def operators(device: torch.device) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    seed = SEED.to(device)
    return {
        "residual": lambda x, y: residual_dropout(x, y, P, seed=seed),
        "relu": lambda x, y: relu_dropout(x, P, seed=seed) + 0 * y,
    }


REFERENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "residual": lambda x, y: x + dropout_reference(y, P, SEED),
    "relu": lambda x, y: dropout_reference(x.relu(), P, SEED) + 0 * y,
}


@on_devices
def test_random_numbers_are_the_same_on_every_device(device: torch.device) -> None:
    assert torch.equal(random_numbers(3000, SEED.to(device)).cpu(), random_numbers(3000, SEED))


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REFERENCES)
def test_output_and_gradients(device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Elements in any number, aligned to 16 bytes or not; nothing is left unwritten."""
    call = operators(device)[name]
    for count in COUNTS:
        inputs = random(count, dtype)
        expected = with_gradients(REFERENCES[name], inputs, "cpu", torch.float64)
        for layout in (Tensor.clone, unaligned):
            moved = [layout(tensor.to(device)) for tensor in inputs]
            first = with_gradients(call, moved)
            poison(first)
            found = with_gradients(call, moved)
            assert_close(found, expected, PRECISION[dtype], f"{count} elements, {layout.__name__},")
            assert_same_bits(found, first)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_sum_the_bits_are_those_of_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    x, gradient = random(10_001, dtype)
    leaf, seed = x.to(device).requires_grad_(), SEED.to(device)
    dropped = residual_dropout(torch.zeros_like(leaf), leaf, P, seed=seed)
    output = relu_dropout(leaf, P, seed=seed)
    (of_input,) = torch.autograd.grad(output, leaf, gradient.to(device))
    rectified, kept = dropout_reference(x.relu(), P, SEED), dropout_reference(gradient, P, SEED)
    expected = [dropout_reference(x, P, SEED), rectified, torch.where(rectified > 0, kept, 0)]
    assert_same_bits([each.detach().cpu() for each in (dropped, output, of_input)], expected)


@on_devices
@pytest.mark.parametrize("name", REFERENCES)
def test_drawn_seeds(device: torch.device, name: str) -> None:
    """They come from torch's generator; each pass drops the same elements, at the given rate."""

    def run() -> Tensor:
        leaf = torch.ones(100_000, device=device, requires_grad=True)
        output = relu_dropout(leaf, P) if name == "relu" else residual_dropout(torch.zeros_like(leaf), leaf, P)
        (gradient,) = torch.autograd.grad(output.sum(), leaf)
        assert torch.equal(gradient, output)
        return output.detach()

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert torch.equal(run(), first)
    assert not torch.equal(first, second)
    kept = first > 0
    assert first[kept].sub(1 / (1 - P)).abs().max() < 1e-4
    assert abs(float(kept.double().mean()) - (1 - P)) < 5 * (P * (1 - P) / len(kept)) ** 0.5


@on_devices
@pytest.mark.parametrize("p", [0.0, 1e-6, 0.5, 1.0])
def test_probabilities(device: torch.device, p: float) -> None:
    x, y = random(1000, torch.float32)
    found = residual_dropout(x.to(device), y.to(device), p, seed=SEED.to(device))
    assert_close([found], [x.double() + dropout_reference(y.double(), p, SEED)], PRECISION[torch.float32])


@on_devices
def test_mixed_precision_adds_in_the_wider(device: torch.device) -> None:
    """The update times two needs no rounding."""
    (x, _), (_, y) = random(1000, torch.float32), random(1000, torch.bfloat16)
    found = residual_dropout(x.to(device), y.to(device), 0.5, seed=SEED.to(device))
    assert found.dtype == torch.float32
    assert_close([found], [x.double() + dropout_reference(y.double(), 0.5, SEED)], PRECISION[torch.float32])


@on_devices
@pytest.mark.parametrize("name", REFERENCES)
def test_strides_do_not_matter(device: torch.device, name: str) -> None:
    inputs = [tensor.view(40, 25) for tensor in random(1000, torch.float32)]
    expected = with_gradients(REFERENCES[name], inputs, "cpu", torch.float64)
    turned = [tensor.to(device).T.contiguous().T for tensor in inputs]
    assert_close(with_gradients(operators(device)[name], turned), expected, PRECISION[torch.float32])


@on_devices
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing_to_do(device: torch.device, shape: tuple[int, ...]) -> None:
    empty = [torch.ones(shape, device=device)] * 2
    for call in operators(device).values():
        assert all(tensor.shape == shape for tensor in with_gradients(call, empty))


@on_devices
def test_dropped_is_dropped_and_nan_is_seen(device: torch.device) -> None:
    x, kept = torch.full((1000,), torch.nan, device=device), dropout_reference(torch.ones(1000), P, SEED) > 0
    for result in (
        relu_dropout(x, P, seed=SEED.to(device)),
        residual_dropout(0 * kept.to(x), x, P, seed=SEED.to(device)),
    ):
        assert torch.equal(result.isnan().cpu(), kept)
        assert not result.nan_to_num().any()


@on_cuda
def test_tensors_on_two_devices(device: torch.device) -> None:
    x, y = random(300, torch.float32)
    with pytest.raises(ValueError, match="expected two tensors of one shape and device"):
        residual_dropout(x.to(device), y, P)
