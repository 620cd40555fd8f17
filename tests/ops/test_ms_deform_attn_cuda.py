"""Compiled operator on a GPU, compared with the reference in float64 on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from detr_bf.ops import library, ms_deform_attn
from detr_bf.ops.reference import ms_deform_attn_reference

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)
if library.PROBLEMS["cuda"] is not None:
    pytest.skip(f"the kernels for CUDA do not run: {library.PROBLEMS['cuda']}", allow_module_level=True)

SHAPES = [(20, 27), (10, 14), (5, 7), (3, 4)]
ENCODER = [(100, 134), (50, 67), (25, 34), (13, 17)]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
Inputs = tuple[Tensor, Tensor, Tensor]


def starts_of(shapes: list[tuple[int, int]]) -> list[int]:
    return [sum(height * width for height, width in shapes[:level]) for level in range(len(shapes))]


def example(
    shapes: list[tuple[int, int]] = SHAPES,
    queries: int = 71,
    heads: int = 8,
    channels: int = 32,
    points: int = 4,
    dtype: torch.dtype = torch.float32,
    images: int = 2,
) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.rand(*sizes, device="cuda", dtype=torch.float64, generator=generator)

    cells, row = sum(height * width for height, width in shapes), (images, queries, heads, len(shapes), points)
    value = (random(images, cells, heads, channels) - 0.5).to(dtype)
    locations = (1.2 * random(*row, 2) - 0.1).to(torch.promote_types(dtype, torch.float32))
    return value, locations, random(*row).to(dtype)


def run(inputs: Inputs, shapes: list[tuple[int, int]], reference: bool = False) -> tuple[Tensor, ...]:
    """Compare output and gradients of value, locations and weights with the reference in float64."""
    inputs = tuple((tensor.double() if reference else tensor).detach().requires_grad_() for tensor in inputs)
    call = ms_deform_attn_reference if reference else ms_deform_attn
    output = call(inputs[0], shapes, starts_of(shapes), inputs[1], inputs[2])
    gradient = torch.linspace(-1, 1, output.numel(), device="cuda", dtype=torch.float64).view_as(output)
    return output.detach(), *torch.autograd.grad(output, inputs, gradient.to(output.dtype))


def assert_close(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(actual, wanted, strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * scale)


@pytest.fixture(params=[False, True], ids=["unordered", "deterministic"])
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels", [32, 33, 7, 64, 132])
def test_against_the_reference(dtype: torch.dtype, channels: int) -> None:
    inputs = example(dtype=dtype, channels=channels)
    assert_close(run(inputs, SHAPES), run(inputs, SHAPES, reference=True), TOLERANCE[dtype])


@pytest.mark.usefixtures("deterministic")
def test_an_encoder() -> None:
    queries = sum(height * width for height, width in ENCODER)
    inputs = example(ENCODER, queries=queries, images=1)
    assert_close(run(inputs, ENCODER), run(inputs, ENCODER, reference=True), TOLERANCE[torch.float32])


def test_deterministic_repeats_bit_by_bit() -> None:
    inputs = example(queries=5000)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(inputs, SHAPES), run(inputs, SHAPES)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.usefixtures("deterministic")
def test_strides() -> None:
    value, locations, weights = example()
    strided = value.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(run((strided, locations, weights), SHAPES), run((value, locations, weights), SHAPES), 2e-5)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("empty", [{"images": 0}, {"queries": 0}, {"points": 0}], ids=str)
def test_nothing_to_do(empty: dict[str, int]) -> None:
    output, *gradients = run(example(**empty), SHAPES)
    assert not output.any()
    assert not any(gradient.any() for gradient in gradients)


def test_a_location_that_is_nan_is_seen() -> None:
    value, locations, weights = example()
    locations[1, 3, 2, 1, 0, 1] = torch.nan
    nan = ms_deform_attn(value, SHAPES, None, locations, weights).view(2, 71, 8, 32).isnan()
    assert nan[1, 3, 2].all()
    assert nan.sum() == 32


def test_on_another_stream() -> None:
    inputs = example()
    expected = ms_deform_attn(inputs[0], SHAPES, None, *inputs[1:])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # work on the default stream would overtake the copy below
        moved = tuple(tensor.clone() for tensor in inputs)
        actual = ms_deform_attn(moved[0], SHAPES, None, *moved[1:])
    stream.synchronize()
    assert torch.equal(actual, expected)


def test_no_wait_for_the_gpu(deterministic: bool) -> None:
    inputs = example()
    run(inputs, SHAPES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        value, locations, weights = (tensor.detach().requires_grad_() for tensor in inputs)
        output = ms_deform_attn(value, SHAPES, None, locations, weights)
        torch.autograd.grad(output, (value, locations, weights), torch.ones_like(output))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert deterministic == torch.are_deterministic_algorithms_enabled()


def test_tensors_on_two_devices() -> None:
    value, locations, weights = example()
    flat = [size for shape in SHAPES for size in shape]
    with pytest.raises(RuntimeError, match="one GPU"):
        torch.ops.detr_bf.ms_deform_attn(value, flat, starts_of(SHAPES), locations.cpu(), weights)


def test_too_many_levels() -> None:
    shapes = [(1, 1)] * 65
    with pytest.raises(RuntimeError, match="at most 64 levels"):
        run(example(shapes, queries=2), shapes)


def test_opcheck() -> None:
    value, locations, weights = example(queries=3, channels=4, heads=2)
    flat = [size for shape in SHAPES for size in shape]
    torch.library.opcheck(torch.ops.detr_bf.ms_deform_attn, (value, flat, starts_of(SHAPES), locations, weights))
