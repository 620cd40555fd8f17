"""CUDA kernels of ms_deform_attn on an emulated GPU, compared with the reference in float64.

The emulation also checks every access to memory: inside its tensor, aligned to its size, written where it may be.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from detr_bf.ops.reference import ms_deform_attn_reference
from tests.ops.emulation.harness import Emulated, EmulationError, build, compiler, starts_of

FOUR_LEVELS = ((5, 7), (3, 4), (2, 1), (1, 3))


class Case(NamedTuple):
    dtype: torch.dtype = torch.float32
    images: int = 2
    queries: int = 11
    heads: int = 2
    channels: int = 32
    shapes: Sequence[tuple[int, int]] = FOUR_LEVELS
    points: int = 4

    def __str__(self) -> str:
        sizes = f"B{self.images}Q{self.queries}H{self.heads}D{self.channels}L{len(self.shapes)}P{self.points}"
        return f"{str(self.dtype).removeprefix('torch.')}-{sizes}"


CASES = [
    Case(),  # 8 lanes per row, one head per block
    Case(torch.float64, queries=3, channels=6, points=3),
    Case(torch.float16, queries=37),  # 4 lanes, two heads per block
    Case(torch.bfloat16, queries=37, heads=3),
    Case(torch.bfloat16, channels=20, queries=5),  # not a multiple of 16 bytes
    Case(channels=4, heads=5, queries=9, points=3),
    Case(channels=7, queries=4, shapes=((4, 6),), points=1),
    Case(channels=33, queries=3, shapes=FOUR_LEVELS[:3], points=3),  # more channels than lanes, one by one
    Case(channels=64, queries=5, shapes=FOUR_LEVELS[:1]),
    Case(channels=132, queries=2, images=1, heads=1, points=3),  # more channels than lanes, four by four
    Case(channels=8, queries=70, images=1, heads=9, shapes=((1, 1), (1, 5)), points=5),
    Case(channels=1, queries=3, heads=1, shapes=((1, 1),), points=1),
    Case(images=7, channels=4, queries=2, heads=1, shapes=((2, 3),), points=2),  # more images than the grid has
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if compiler() is None:
        pytest.skip("g++ is not installed")
    return build(tmp_path_factory.mktemp("emulation"))


class Tensors(NamedTuple):
    value: Tensor
    locations: Tensor
    weights: Tensor
    grad_output: Tensor


def example(case: Case) -> Tensors:
    """Return random tensors; about a fifth of the samples lie partly or fully outside."""
    generator = torch.Generator().manual_seed(0)
    cells, levels = sum(height * width for height, width in case.shapes), len(case.shapes)

    def random(*sizes: int) -> Tensor:
        return torch.rand(*sizes, dtype=torch.float64, generator=generator)

    row = (case.images, case.queries, case.heads)
    return Tensors(
        (random(case.images, cells, case.heads, case.channels) - 0.5).to(case.dtype),
        (1.3 * random(*row, levels, case.points, 2) - 0.15).to(torch.promote_types(case.dtype, torch.float32)),
        random(*row, levels, case.points).to(case.dtype),
        (random(case.images, case.queries, case.heads * case.channels) - 0.5).to(case.dtype),
    )


def expected(case: Case, tensors: Tensors) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return output and gradients of the same values, in float64."""
    inputs = [tensor.double().requires_grad_() for tensor in tensors[:3]]
    output = ms_deform_attn_reference(inputs[0], case.shapes, starts_of(case.shapes), inputs[1], inputs[2])
    return output.detach(), torch.autograd.grad(output, inputs, tensors.grad_output.double())


def emulated(library: ctypes.CDLL, case: Case, tensors: Tensors, variants: str | None = None) -> Emulated:
    return Emulated(library, tensors.value, case.shapes, tensors.locations, tensors.weights, variants)


def assert_close(actual: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Compare relative to the largest number: sums of many terms lose small summands."""
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=tolerance * scale)


@pytest.mark.default_tier(
    "float32-B2Q11H2D32L4P4", "float16-B2Q37H2D32L4P4", "float32-B1Q70H9D8L2P5", "float32-B2Q3H2D33L3P3"
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(library: ctypes.CDLL, case: Case) -> None:
    tensors = example(case)
    assert_close(emulated(library, case, tensors).forward(), expected(case, tensors)[0], TOLERANCE[case.dtype])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(library: ctypes.CDLL, case: Case, deterministic: bool) -> None:
    tensors = example(case)
    actual = emulated(library, case, tensors).backward(tensors.grad_output, deterministic)
    for one, wanted in zip(actual, expected(case, tensors)[1], strict=True):
        assert_close(one, wanted, TOLERANCE[case.dtype])


def test_sums_in_order_do_not_depend_on_what_is_sorted_together(library: ctypes.CDLL) -> None:
    case = Case(queries=30, heads=3)
    tensors = example(case)
    problem = emulated(library, case, tensors)
    at_once = problem.gather(tensors.grad_output)
    assert torch.equal(at_once, problem.gather(tensors.grad_output, most_entries=1))
    assert torch.equal(at_once, problem.gather(tensors.grad_output, most_entries=4 * 30 * 16))


def test_on_cell_centres_and_edges(library: ctypes.CDLL) -> None:
    """Exact values at the kinks of the hat functions: one cell, half of a cell, or zero."""
    case = Case(torch.float64, images=1, queries=6, heads=1, channels=2, shapes=((1, 4),), points=1)
    tensors = example(case)
    x = torch.tensor([0.5, 3.5, 0.0, 4.0, -0.5, 4.5]) / 4
    locations = torch.stack((x, torch.full_like(x, 0.5)), -1).double().view(1, 6, 1, 1, 1, 2)
    weights = torch.ones_like(tensors.weights)
    output = Emulated(library, tensors.value, case.shapes, locations, weights).forward()
    first, last = tensors.value[0, 0, 0], tensors.value[0, 3, 0]
    torch.testing.assert_close(output[0], torch.stack((first, last, first / 2, last / 2, 0 * first, 0 * first)))


def test_gradients_on_cell_centres_and_edges(library: ctypes.CDLL) -> None:
    """The derivative at a kink is the right-hand one, like the reference."""
    case = Case(torch.float64, images=1, queries=6, heads=1, channels=2, shapes=((2, 4),), points=1)
    tensors = example(case)
    tensors.locations[..., 0] = torch.tensor([0.5, 3.5, 0.0, 4.0, -0.5, 4.5]).view(1, 6, 1, 1, 1) / 4
    tensors.locations[..., 1] = torch.tensor([0.5, 1.5, 2.0, 1.0, -0.5, 0.0]).view(1, 6, 1, 1, 1) / 2
    actual = emulated(library, case, tensors).backward(tensors.grad_output)
    for one, wanted in zip(actual, expected(case, tensors)[1], strict=True):
        assert_close(one, wanted, 1e-10)


@pytest.mark.parametrize("far", [-1e30, 1e30, -3e38, 3e38, -3.0, 5.0])
def test_far_outside_is_nothing(library: ctypes.CDLL, far: float) -> None:
    case = Case(queries=3)
    tensors = example(case)
    tensors.locations[:, 1, ..., 0] = far
    problem = emulated(library, case, tensors)
    output = problem.forward()
    assert not output[:, 1].any()
    assert output[:, 0].all()
    for deterministic in (False, True):
        of_value, of_locations, of_weights = problem.backward(tensors.grad_output, deterministic)
        assert of_value.isfinite().all()
        assert not of_locations[:, 1].any()
        assert not of_weights[:, 1].any()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_location_that_is_not_finite_is_seen(library: ctypes.CDLL, number: float) -> None:
    case = Case(queries=5)
    tensors = example(case)
    tensors.locations[1, 2, 0, 3, 1, 0] = number
    problem = emulated(library, case, tensors)
    nan = problem.forward().view(2, 5, 2, 32).isnan()
    assert nan[1, 2, 0].all()
    assert nan.sum() == 32
    for deterministic in (False, True):
        of_value, of_locations, _ = problem.backward(tensors.grad_output, deterministic)
        assert of_value[1, :, 0].isnan().any()
        assert not of_value[0].isnan().any()
        assert of_locations[1, 2, 0, 3, 1].isnan().all()
        assert of_locations.isnan().sum() == 2


def test_nan_outside_the_corners_of_a_sample_is_not_met(library: ctypes.CDLL) -> None:
    """NaN is read neither by samples partly outside nor by lanes without a sample."""
    case = Case(images=1, queries=3, heads=1, shapes=((3, 3),), points=3)
    tensors = example(case)
    tensors.value[:, 0] = torch.nan
    tensors.locations[..., 0] = torch.where(tensors.locations[..., 0] < 0.5, -1.0, 0.9)
    tensors.locations[..., 1] = 0.9
    problem = emulated(library, case, tensors)
    assert not problem.forward().isnan().any()
    assert not problem.backward(tensors.grad_output)[1].isnan().any()
    tensors.grad_output[:, 0] = torch.nan
    of_value = problem.gather(tensors.grad_output)
    assert of_value.isnan().any(dim=-1).flatten().tolist() == [False] * 8 + [True]


@pytest.mark.parametrize("empty", [{"images": 0}, {"queries": 0}], ids=str)
def test_nothing_to_do(library: ctypes.CDLL, empty: dict[str, int]) -> None:
    case = Case()._replace(**empty)
    tensors = example(case)
    problem = emulated(library, case, tensors)
    assert problem.forward().numel() == 0
    assert not any(gradient.any() for gradient in problem.backward(tensors.grad_output))


@pytest.mark.parametrize("pad", [(0, 4), (4, 0), (0, 3)])
def test_strides(library: ctypes.CDLL, pad: tuple[int, int]) -> None:
    """Strided channels of wider cells, aligned and unaligned; memory with cells before images."""
    case = Case(queries=4)
    tensors = example(case)
    swapped = tensors.value.transpose(0, 1).contiguous()
    wider = torch.nn.functional.pad(swapped, pad, value=torch.nan).transpose(0, 1)
    strided = wider[..., pad[0] : pad[0] + case.channels]
    assert strided.stride() != tensors.value.stride()
    problem = Emulated(library, strided, case.shapes, tensors.locations, tensors.weights)
    contiguous = emulated(library, case, tensors)
    assert_close(problem.forward(), contiguous.forward().double(), 1e-6)
    for one, other in zip(problem.backward(tensors.grad_output), contiguous.backward(tensors.grad_output), strict=True):
        assert_close(one, other.double(), 1e-6)


def test_memory_that_is_not_aligned(library: ctypes.CDLL) -> None:
    case = Case(queries=4)
    tensors = example(case)
    memory = torch.cat((torch.zeros(1), tensors.value.flatten()))
    shifted = memory[1:].view_as(tensors.value)
    problem = Emulated(library, shifted, case.shapes, tensors.locations, tensors.weights)
    assert_close(problem.forward(), expected(case, tensors)[0], 2e-5)
    memory = torch.cat((torch.zeros(1), tensors.grad_output.flatten()))
    shifted = memory[1:].view_as(tensors.grad_output)
    for deterministic in (False, True):
        actual = emulated(library, case, tensors).backward(shifted, deterministic)
        for one, wanted in zip(actual, expected(case, tensors)[1], strict=True):
            assert_close(one, wanted, 2e-5)


def test_sums_in_16_bits_need_aligned_memory(library: ctypes.CDLL) -> None:
    case = Case(torch.bfloat16, queries=4)
    tensors = example(case)
    memory = torch.cat((torch.zeros(1, dtype=case.dtype), tensors.grad_output.flatten()))
    shifted = memory[1:].view_as(tensors.grad_output)
    of_value = emulated(library, case, tensors, "half_atomics").backward(shifted)[0]
    assert torch.equal(of_value, emulated(library, case, tensors).backward(shifted)[0])
    assert emulated(library, case, tensors, "half_atomics").backward(tensors.grad_output)[0].dtype == case.dtype


def test_cells_between_levels(library: ctypes.CDLL) -> None:
    case = Case(queries=4, shapes=((3, 4), (2, 2)))
    tensors = example(case)
    gaps = torch.full((2, 2, 2, 32), torch.nan)
    apart = torch.cat((gaps, tensors.value[:, :12], gaps, tensors.value[:, 12:], gaps), 1)
    problem = Emulated(library, apart, case.shapes, tensors.locations, tensors.weights)
    problem.starts = [2, 16]
    together = emulated(library, case, tensors)
    assert torch.equal(problem.forward(), together.forward())
    of_value = problem.gather(tensors.grad_output)
    assert not of_value[:, [0, 1, 14, 15, 20, 21]].any()
    assert torch.equal(of_value[:, [*range(2, 14), *range(16, 20)]], together.gather(tensors.grad_output))


def cells_of(case: Case) -> Case:
    """Return the case with one query for every cell."""
    return case._replace(queries=sum(height * width for height, width in case.shapes))


PARTIAL_PATCHES = ((9, 17), (1, 8), (4, 3), (1, 1))  # 8 x 4 queries each: 3 x 3, then single ones
IN_PATCHES = [
    *(cells_of(case) for case in CASES),
    cells_of(Case(shapes=PARTIAL_PATCHES, images=1)),  # more blocks than the grid has
    cells_of(Case(torch.bfloat16, heads=3, shapes=PARTIAL_PATCHES, images=1)),  # the last block has a head too many
    cells_of(Case(torch.float16, heads=1, shapes=((17, 9),), images=1)),  # 8 x 8 queries
    cells_of(Case(channels=64, heads=1, shapes=((3, 9),), images=4)),  # 8 x 2 queries; more images than the grid has
    cells_of(Case(channels=128, heads=1, shapes=((3, 9),))),  # 8 queries a block: not in patches
]


@pytest.mark.full
@pytest.mark.parametrize("case", IN_PATCHES, ids=str)
def test_patches_of_queries(library: ctypes.CDLL, case: Case) -> None:
    """Each row is computed as without patches, so it has the same bits; the order of atomic additions differs."""
    tensors = example(case)
    present, patches = (emulated(library, case, tensors, variants) for variants in (None, "tiles"))
    assert torch.equal(patches.forward(), present.forward())
    of_value, *others = patches.backward(tensors.grad_output)
    assert_close(of_value, expected(case, tensors)[1][0], TOLERANCE[case.dtype])
    for one, other in zip(others, present.backward(tensors.grad_output)[1:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.full
def test_patches_are_used_only_if_the_queries_are_the_cells(library: ctypes.CDLL) -> None:
    """The order of the additions to memory, and so the rounding of the gradient of value, tells which kernel ran."""

    def use_patches(case: Case, shapes: Sequence[tuple[int, int]] = (), starts: Sequence[int] = ()) -> bool:
        tensors = example(case)
        present, patches = (emulated(library, case, tensors, variants) for variants in (None, "tiles"))
        of_value = []
        for problem in (present, patches):
            problem.shapes, problem.starts = shapes or problem.shapes, list(starts) or problem.starts
            of_value.append(problem.backward(tensors.grad_output)[0])
        assert_close(of_value[0], of_value[1].double(), TOLERANCE[case.dtype])
        return not torch.equal(*of_value)

    case = cells_of(Case(images=1, shapes=((9, 17), (4, 5))))
    assert use_patches(case)
    assert not use_patches(case._replace(queries=case.queries - 1))
    assert use_patches(case._replace(queries=169), ((9, 17), (4, 4)), (0, 153))
    assert not use_patches(case._replace(queries=169), ((9, 17), (4, 4)), (0, 154))
    assert not use_patches(case._replace(channels=128))
    assert not use_patches(case._replace(channels=31))
    assert not use_patches(case._replace(dtype=torch.float64))


HALF = [case for case in (*IN_PATCHES, *CASES) if case.dtype in (torch.bfloat16, torch.float16)]


TOLERANCE_OF_16_BIT_SUMS = {torch.float16: 6e-3, torch.bfloat16: 5e-2}  # of up to 700 terms


@pytest.mark.default_tier("bfloat16-B2Q37H3D32L4P4-half_atomics", "float16-B2Q52H2D32L4P4-tiles,half_atomics")
@pytest.mark.parametrize("variants", ["half_atomics", "tiles,half_atomics"])
@pytest.mark.parametrize("case", HALF, ids=str)
def test_sums_in_16_bits(library: ctypes.CDLL, case: Case, variants: str) -> None:
    """Only the gradient of value differs, and only where 16 bytes are added at once; sums in order stay as they are."""
    tensors = example(case)
    present, narrow = (emulated(library, case, tensors, names) for names in (None, variants))
    of_value, *others = narrow.backward(tensors.grad_output)
    wide = case.channels % 8 != 0
    assert of_value.dtype == (torch.float32 if wide else case.dtype)
    assert_close(of_value, expected(case, tensors)[1][0], TOLERANCE_OF_16_BIT_SUMS[case.dtype])
    for one, other in zip(others, present.backward(tensors.grad_output)[1:], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(narrow.backward(tensors.grad_output, True)[0], present.gather(tensors.grad_output))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors_of_sums_in_16_bits(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Compare with float64: the norm of the error of a level's gradient, divided by the norm of the gradient.

    Sums in float32, rounded once, have errors of 0.17 % in bfloat16 and 0.02 % in float16, for any number of terms.
    Sums in 16 bits have 0.8 % and 0.1 % for about 60 terms a cell (8 x 8 cells), 1.5 % and 0.2 % for 230 (4 x 4), and
    2.6 % and 0.4 % for 900 (2 x 2): they grow with the square root of the number of terms.
    """
    case = Case(dtype, images=1, queries=300, shapes=((8, 8), (4, 4), (2, 2)))
    tensors = example(case)
    wanted = expected(case, tensors)[1][0]
    levels = [height * width for height, width in case.shapes]

    def errors(variants: str | None) -> list[float]:
        of_value = emulated(library, case, tensors, variants).backward(tensors.grad_output)[0].to(dtype).double()
        parts = zip(of_value.split(levels, 1), wanted.split(levels, 1), strict=True)
        return [float((one - other).norm() / other.norm()) for one, other in parts]

    finer = 8 if dtype == torch.float16 else 1  # three more bits
    assert max(errors(None)) < 0.002 / finer
    for error, about in zip(errors("half_atomics"), (0.008, 0.015, 0.026), strict=True):
        assert 0.8 * about < finer * error < 1.3 * about


def test_an_unknown_variant_is_an_error(library: ctypes.CDLL) -> None:
    case = Case(queries=4)
    tensors = example(case)
    for variants in ("tile", "tiles,fast", " tiles"):
        with pytest.raises(
            EmulationError,
            match=r"DETR_BF_CUDA_VARIANTS: '.*' is unknown; the variants are tiles, half_atomics and one_pass",
        ):
            emulated(library, case, tensors, variants).forward()
    emulated(library, case, tensors, "").forward()


def test_the_emulation_sees_what_is_wrong(library: ctypes.CDLL) -> None:
    case = Case(queries=4)
    tensors = example(case)
    with pytest.raises(EmulationError, match="a write of 16 bytes is outside all buffers"):
        emulated(library, case, tensors).forward(output=tensors.grad_output[:, :3])
    short = tensors._replace(locations=tensors.locations[:1])
    with pytest.raises(EmulationError, match="a read of 4 bytes is outside all buffers"):
        emulated(library, case, short).forward()
