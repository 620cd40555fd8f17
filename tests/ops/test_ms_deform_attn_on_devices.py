"""Deformable attention on a CPU and on a GPU: precision, memory layouts, sizes, special values, repeated results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.ops import ms_deform_attn
from detr_bf.ops.reference import ms_deform_attn_reference
from tests.kernels import on_cuda, on_devices, sized
from tests.ops.on_devices import (
    DTYPES,
    ENCODER,
    SHAPES,
    Shapes,
    assert_close,
    assert_same_bits,
    deformable,
    deterministic_algorithms,
    poison,
    with_gradients,
)
from tests.references.deformable_attention import by_index

CPU = torch.device("cpu")

# channels, heads, points, queries, images, levels; a lane reads up to 16 bytes, a group has 4 to 32 lanes
GRID: list[tuple[int, int, int, int, int, Shapes]] = [
    (32, 8, 4, 71, 2, SHAPES),
    (33, 8, 4, 71, 2, SHAPES),
    (7, 3, 1, 1, 3, SHAPES[:1]),
    (64, 4, 3, 37, 1, SHAPES),
    (132, 2, 4, 37, 2, SHAPES[:2]),
    (4, 5, 3, 9, 2, SHAPES),
    (16, 8, 8, 33, 2, SHAPES),
    (256, 1, 5, 7, 1, SHAPES),
    (600, 1, 2, 3, 2, SHAPES[2:]),
    (1, 1, 1, 1, 1, [(1, 1)]),
    (8, 9, 5, 70, 1, [(1, 1), (1, 5), (4, 1)]),
]
both_modes = pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "deterministic"])


def operator(shapes: Shapes = SHAPES, starts: Sequence[int] | None = None) -> Callable[..., Tensor]:
    return lambda value, locations, weights: ms_deform_attn(value, shapes, starts, locations, weights)


def exact(inputs: Sequence[Tensor], shapes: Shapes = SHAPES, device: torch.device = CPU) -> list[Tensor]:
    """Return output and gradients in float64, computed by index."""
    return with_gradients(lambda v, x, w: by_index(v, shapes, x, w), inputs, device, torch.float64)


def check(
    inputs: Sequence[Tensor], device: torch.device, shapes: Shapes = SHAPES, exact_on: torch.device = CPU
) -> None:
    """Compare both modes with float64; deterministic passes have the same bits. Nothing is left unwritten."""
    expected = exact(inputs, shapes, exact_on)
    for deterministic in (False, True):
        with deterministic_algorithms(deterministic):
            first = with_gradients(operator(shapes), inputs, device)
            poison(first)
            found = with_gradients(operator(shapes), inputs, device)
        assert_close(found, expected, what=f"deterministic={deterministic}")
        if deterministic:
            assert_same_bits(found, first)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", GRID, ids=lambda sizes: "D{}H{}P{}Q{}B{}".format(*sizes))
def test_output_and_gradients(device: torch.device, dtype: torch.dtype, sizes: tuple[Any, ...]) -> None:
    channels, heads, points, queries, images, shapes = sizes
    settings = {"channels": channels, "heads": heads, "points": points, "queries": queries, "images": images}
    check(deformable(dtype, shapes, **settings), device, shapes)


@sized("shapes", on_cpu=SHAPES, on_cuda=ENCODER)
def test_an_encoder(device: torch.device, shapes: Shapes) -> None:
    queries = sum(height * width for height, width in shapes)
    check(deformable(shapes=shapes, queries=queries, images=1), device, shapes, exact_on=device)


# ---- memory layouts ----

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "first dimensions swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "wider rows": lambda t: F.pad(t, (4, 4))[..., 4:-4],
    "rows of odd width": lambda t: F.pad(t, (1, 2))[..., 1:-2],
    "unaligned": lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view_as(t),
    "last dimension not contiguous": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
}


@on_devices
@both_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(device: torch.device, deterministic: bool, dtype: torch.dtype, layout: str) -> None:
    plain = deformable(dtype)
    expected = exact(plain)
    inputs = [LAYOUTS[layout](tensor.to(device)) for tensor in plain]
    with deterministic_algorithms(deterministic):
        of_value = with_gradients(operator(), [inputs[0], *(tensor.to(device) for tensor in plain[1:])])
        of_all = with_gradients(operator(), inputs)
    assert_close(of_value, expected)
    assert_close(of_all, expected)


@on_devices
@both_modes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_gradient(device: torch.device, deterministic: bool, layout: str) -> None:
    inputs = [tensor.to(device).requires_grad_() for tensor in deformable()]
    output = operator()(*inputs)
    gradient = torch.rand_like(output)
    with deterministic_algorithms(deterministic):
        expected = torch.autograd.grad(output, inputs, gradient, retain_graph=True)
        found = torch.autograd.grad(output, inputs, LAYOUTS[layout](gradient), retain_graph=True)
        of_sum = torch.autograd.grad(output.sum(), inputs, retain_graph=True)  # strides of zero
        of_ones = torch.autograd.grad(output, inputs, torch.ones_like(output))
    assert_close(found, expected)
    assert_close(of_sum, of_ones)


@on_devices
@both_modes
def test_one_image_expanded_to_several(device: torch.device, deterministic: bool) -> None:
    expanded = [tensor.to(device).expand(3, *tensor.shape[1:]) for tensor in deformable(images=1)]
    with deterministic_algorithms(deterministic):
        found = with_gradients(operator(), expanded)
        expected = with_gradients(operator(), [tensor.contiguous() for tensor in expanded])
    assert_close(found, expected)


@on_devices
@both_modes
def test_cells_between_levels(device: torch.device, deterministic: bool) -> None:
    """NaN there is not read, and its gradient is zero."""
    shapes = ((3, 4), (2, 2))
    inputs = [tensor.to(device) for tensor in deformable(shapes=shapes)]
    expected = with_gradients(operator(shapes), inputs)
    value = inputs[0]
    gap = torch.full_like(value[:, :2], torch.nan)
    apart = torch.cat((gap, value[:, :12], gap, value[:, 12:], gap), 1)
    with deterministic_algorithms(deterministic):
        output, of_value, *others = with_gradients(operator(shapes, [2, 16]), [apart, *inputs[1:]])
    used = [*range(2, 14), *range(16, 20)]
    assert_close([output, of_value[:, used], *others], expected)
    assert not of_value[:, [0, 1, 14, 15, 20, 21]].any()


@on_devices
@both_modes
@pytest.mark.parametrize("empty", [{"images": 0}, {"queries": 0}, {"points": 0}], ids=str)
def test_nothing_to_do(device: torch.device, deterministic: bool, empty: dict[str, int]) -> None:
    inputs = deformable(**empty)
    poison([inputs[0].to(device), torch.empty(2, 71, 256, device=device)])
    with deterministic_algorithms(deterministic):
        output, *gradients = with_gradients(operator(), inputs, device)
    assert output.shape == (len(inputs[0]), inputs[1].shape[1], 256)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in inputs]
    assert not any(tensor.any() for tensor in (output, *gradients))


# ---- sizes ----


@sized("images", on_cpu=300, on_cuda=66_000)
def test_more_images_than_a_grid_has(device: torch.device, images: int) -> None:
    shapes = ((2, 3),)
    check(deformable(shapes=shapes, images=images, queries=1, heads=1, channels=8, points=1), device, shapes)


@sized("queries", on_cpu=8 * 65 + 5, on_cuda=8 * 65_536 + 5)
def test_more_queries_than_a_grid_has(device: torch.device, queries: int) -> None:
    """A block takes eight queries of 17 channels, and a grid 65,535 blocks."""
    shapes = ((64, 64),)
    inputs = deformable(shapes=shapes, images=1, queries=queries, heads=1, channels=17, points=1)
    check(inputs, device, shapes, exact_on=device)


@sized("side", on_cpu=64, on_cuda=2048)
@pytest.mark.usefixtures("much_memory")
@both_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_elements_than_32_bits_count(
    device: torch.device, side: int, deterministic: bool, dtype: torch.dtype
) -> None:
    """Sample the last 8 rows of a level; on a GPU it has 2,048 rows, and value 2.4e9 elements."""
    last = 8
    last_rows, places, weights = deformable(
        torch.float64, ((last, side),), images=1, queries=64, channels=72, reach=0.8
    )
    scale, shift = torch.tensor([1, last / side]), torch.tensor([0, 1 - last / side])
    locations = (places * scale + shift).float()
    exact_places = (locations.double() - shift) / scale
    last_rows, weights = last_rows.to(dtype), weights.to(dtype)
    value = torch.full((1, side * side, 8, 72), torch.nan, device=device, dtype=dtype)
    value[:, -last * side :] = last_rows.to(device)

    poison([value], copies=1)
    with deterministic_algorithms(deterministic):
        output, of_value, of_locations, of_weights = with_gradients(
            operator(((side, side),)), [value, locations.to(device), weights.to(device)]
        )
    found = [output, of_value[:, -last * side :], of_locations * scale.to(device), of_weights]
    assert_close(found, exact([last_rows, exact_places, weights], ((last, side),)))
    assert not of_value[:, : -last * side].any()


# ---- special values ----


@on_devices
@both_modes
@pytest.mark.parametrize("far", [-1e30, 1e30, -3e38, 3e38, -3.0, 5.0])
def test_far_outside_is_nothing(device: torch.device, deterministic: bool, far: float) -> None:
    value, locations, weights = deformable(queries=5)
    locations[:, 1, ..., 0] = far
    with deterministic_algorithms(deterministic):
        output, of_value, of_locations, of_weights = with_gradients(operator(), [value, locations, weights], device)
    assert not any(tensor[:, 1].any() for tensor in (output, of_locations, of_weights))
    assert output[:, 0].all()
    assert of_value.isfinite().all()


@on_devices
@both_modes
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_location_that_is_not_finite_is_seen(
    device: torch.device, deterministic: bool, number: float, axis: int
) -> None:
    value, locations, weights = deformable(queries=5, heads=2)
    locations[1, 2, 0, 3, 1, axis] = number
    with deterministic_algorithms(deterministic):
        output, of_value, of_locations, _ = with_gradients(operator(), [value, locations, weights], device)
    seen = output.view(2, 5, 2, 32).isnan()
    assert seen[1, 2, 0].all()
    assert seen.sum() == 32
    assert of_value[1, :, 0].isnan().any()
    assert not of_value[0].isnan().any()
    assert of_locations[1, 2, 0, 3, 1].isnan().all()
    assert of_locations.isnan().sum() == 2


@on_devices
@both_modes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_cell_centres_and_edges(device: torch.device, deterministic: bool, dtype: torch.dtype) -> None:
    """A derivative that jumps there is the right-hand one, as that of the reference on a CPU."""
    shapes = ((2, 4),)
    value, _, weights = deformable(dtype, shapes, images=1, queries=36, heads=1, channels=8, points=1)
    x, y = torch.tensor([0.5, 3.5, 0.0, 4.0, -0.5, 4.5]) / 4, torch.tensor([0.5, 1.5, 2.0, 1.0, -0.5, 0.0]) / 2
    locations = torch.cartesian_prod(x, y).to(dtype).view(1, 36, 1, 1, 1, 2)
    inputs = [value, locations, weights]
    with deterministic_algorithms(deterministic):
        found = with_gradients(operator(shapes), inputs, device)
    reference = with_gradients(
        lambda v, x, w: ms_deform_attn_reference(v, shapes, [0], x, w), inputs, CPU, torch.float64
    )
    assert_close(found, reference)


# ---- repeated results ----


@sized("shapes", on_cpu=SHAPES, on_cuda=ENCODER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_repeated_passes(device: torch.device, shapes: Shapes, dtype: torch.dtype) -> None:
    """Deterministic ones have the same bits; others differ in the rounding of the gradient of value only."""
    queries = sum(height * width for height, width in shapes)
    inputs = [tensor.to(device) for tensor in deformable(dtype, shapes, queries=queries, reach=1.05)]
    with deterministic_algorithms(True):
        ordered = with_gradients(operator(shapes), inputs)
        poison(ordered)
        assert_same_bits(with_gradients(operator(shapes), inputs), ordered)
    poison(ordered)
    first = with_gradients(operator(shapes), inputs)
    output, of_value, *others = with_gradients(operator(shapes), inputs)
    assert_same_bits([output, *others], [first[0], *first[2:]])
    assert_close([of_value], [first[1]])
    assert_close(first, ordered)


# ---- refused ----


@on_cuda
def test_tensors_on_two_devices(device: torch.device) -> None:
    inputs = deformable(queries=2)
    flat, starts = [size for shape in SHAPES for size in shape], [0, 540, 680, 715]
    for away in range(3):
        value, locations, weights = (each if at == away else each.to(device) for at, each in enumerate(inputs))
        with pytest.raises(ValueError, match="expected tensors on one device"):
            ms_deform_attn(value, SHAPES, None, locations, weights)
        with pytest.raises(RuntimeError, match=r"must be on the device of value|not for the device of value"):
            torch.ops.detr_bf.ms_deform_attn(value, flat, starts, locations, weights)


@on_cuda
@pytest.mark.parametrize(
    ("shapes", "points", "message"),
    [
        ([(1, 1)] * 65, 1, "at most 64 levels, got 65"),
        ([(1, 1)], 2**15 + 1, "at most 32768 points, got 32769"),
        ([(1, 2**23)], 1, "level 0 is too wide for a GPU: 8388608 cells"),
    ],
)
def test_sizes_beyond_the_limits_of_the_kernels(
    device: torch.device, shapes: Shapes, points: int, message: str
) -> None:
    inputs = deformable(shapes=shapes, images=1, queries=1, heads=1, channels=1, points=points)
    with pytest.raises(RuntimeError, match=message):
        operator(shapes)(*(tensor.to(device) for tensor in inputs))
