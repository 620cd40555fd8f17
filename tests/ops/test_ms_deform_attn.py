"""Deformable attention compared with loops; derivatives, precision, torch.compile, and refused arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from detr_bf.ops import library, ms_deform_attn
from tests.kernels import compile_whole, compilers, needs_kernels
from tests.references.deformable_attention import loops

SHAPES = [(4, 6), (3, 2), (1, 1)]


def example(
    rows: int = 2,
    queries: int = 3,
    heads: int = 2,
    width: int = 3,
    points: int = 2,
    spread: float = 1.4,
    shapes: list[tuple[int, int]] = SHAPES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return value, locations (some outside the image) and weights (not normalised), float64."""
    generator = torch.Generator().manual_seed(0)
    cells = sum(h * w for h, w in shapes)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    value = random(rows, cells, heads, width) - 0.5
    locations = (random(rows, queries, heads, len(shapes), points, 2) - 0.5) * spread + 0.5
    return value, locations, random(rows, queries, heads, len(shapes), points)


def with_gradients(
    value: Tensor, locations: Tensor, weights: Tensor, shapes: list[tuple[int, int]] = SHAPES
) -> list[Tensor]:
    """Return the output and the gradients of all inputs for a fixed, uneven gradient of the output."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (value, locations, weights)]
    output = ms_deform_attn(leaves[0], shapes, None, leaves[1], leaves[2])
    output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("width", [1, 3, 4, 8, 20, 32, 64, 130])
@pytest.mark.parametrize("points", [1, 4, 5])
def test_against_loops(backend: str, width: int, points: int) -> None:
    value, locations, weights = example(width=width, points=points)
    assert ((locations < 0) | (locations > 1)).any(), "some points lie outside"
    torch.testing.assert_close(
        ms_deform_attn(value, SHAPES, None, locations, weights), loops(value, SHAPES, locations, weights)
    )


def test_a_point_on_a_cell_centre_is_that_cell(backend: str) -> None:
    value = torch.arange(24.0).view(1, 24, 1, 1)
    locations = torch.tensor([(2 + 0.5) / 6, (1 + 0.5) / 4]).view(1, 1, 1, 1, 1, 2)
    found = ms_deform_attn(value, [(4, 6)], None, locations, torch.ones(1, 1, 1, 1, 1))
    assert found.item() == pytest.approx(1 * 6 + 2)


def test_points_far_outside_find_nothing(backend: str) -> None:
    value, locations, weights = example()
    for distance in (3.0, -3.0, 1e30, -1e30):
        found = with_gradients(value, locations + distance, weights)
        assert not any(tensor.any() for tensor in found), distance


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_location_that_is_not_finite_is_seen(backend: str, number: float) -> None:
    value, locations, weights = example()
    locations[0, 1, 0, 0, 0, 1] = number
    found = ms_deform_attn(value, SHAPES, None, locations, weights).view(2, 3, 2, 3).isnan()
    assert found[0, 1, 0].all()
    assert found.sum() == 3


@pytest.mark.parametrize("width", [2, 8, 33])
def test_gradients(backend: str, width: int) -> None:
    """Use points away from the grid lines, where the derivative jumps."""
    value, locations, weights = example(rows=1, queries=2, width=width)
    sizes = torch.tensor([(w, h) for h, w in SHAPES])[:, None]
    places = locations * sizes - 0.5
    assert (places - places.round()).abs().min() > 1e-3
    leaves = [tensor.requires_grad_() for tensor in (value, locations, weights)]
    assert torch.autograd.gradcheck(lambda v, x, w: ms_deform_attn(v, SHAPES, None, x, w), leaves)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("queries", "spread"), [(3, 1.0), (200, 1.0), (200, 3.0)])
def test_kernels_and_reference_agree(
    dtype: torch.dtype, queries: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass packs rows only for many queries; test few and many."""
    inputs = [tensor.to(dtype) for tensor in example(queries=queries, width=32, points=4, spread=spread)]
    found = with_gradients(*inputs)
    monkeypatch.setitem(library.PROBLEMS, "cpu", "the test uses the reference")
    expected = with_gradients(*(tensor.double() for tensor in inputs))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_inputs_that_are_not_contiguous(backend: str) -> None:
    value, locations, weights = example(width=8)
    expected = with_gradients(value, locations, weights)
    packed = torch.stack([value, value], dim=3)[:, :, :, 0]  # channels contiguous, all other dimensions strided
    for strided in (packed, value.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)):
        assert not strided.is_contiguous()
        moved = locations.transpose(0, 3).contiguous().transpose(0, 3)
        output = ms_deform_attn(strided, SHAPES, None, moved, weights)
        torch.testing.assert_close(output, expected[0])
    leaves = [tensor.clone().requires_grad_() for tensor in (value, locations, weights)]
    ms_deform_attn(leaves[0], SHAPES, None, leaves[1], leaves[2]).sum().backward()  # a gradient with strides of zero
    assert leaves[0].grad is not None


@pytest.mark.parametrize(("rows", "queries", "points"), [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_nothing_to_do(backend: str, rows: int, queries: int, points: int) -> None:
    value, locations, weights = (
        tensor.requires_grad_() for tensor in example(rows=rows, queries=queries, points=points)
    )
    output = ms_deform_attn(value, SHAPES, None, locations, weights)
    assert output.shape == (rows, queries, 6)
    assert not output.any()
    output.sum().backward()
    assert value.grad is not None
    assert not value.grad.any()


def test_levels_may_lie_apart(backend: str) -> None:
    value, locations, weights = example()
    gaps = torch.full((2, 40, 2, 3), torch.nan, dtype=value.dtype)
    starts = [3, 28, 39]
    first = 0
    for (height, width), start in zip(SHAPES, starts, strict=True):
        gaps[:, start : start + height * width] = value[:, first : first + height * width]
        first += height * width
    expected = ms_deform_attn(value, SHAPES, None, locations, weights)
    torch.testing.assert_close(ms_deform_attn(gaps, SHAPES, starts, locations, weights), expected)
    as_tensors = ms_deform_attn(gaps, torch.tensor(SHAPES), torch.tensor(starts), locations, weights)
    torch.testing.assert_close(as_tensors, expected)


@pytest.mark.parametrize("width", [3, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(backend: str, dtype: torch.dtype, width: int) -> None:
    """Value and weights are rounded, locations are not, and sums are float32: one rounding at the end."""
    value, locations, weights = example(queries=200, width=width, points=4)
    value, weights, locations = value.to(dtype), weights.to(dtype), locations.float()
    low = with_gradients(value, locations, weights)
    assert [tensor.dtype for tensor in low] == [dtype, dtype, torch.float32, dtype]
    exact = with_gradients(value.double(), locations.double(), weights.double())
    tolerance = torch.finfo(dtype).eps
    for rounded, expected in zip(low, exact, strict=True):
        assert (rounded.double() - expected).abs().max() <= tolerance * expected.abs().max()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_float_is_read_and_written_exactly(dtype: torch.dtype) -> None:
    """All values, including zeros and subnormal numbers, as channels of one cell sampled at its centre."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    centre, one = torch.full((1, 1, 1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 1, 1, dtype=dtype)
    found = ms_deform_attn(every.view(1, 1, 1, -1), [(1, 1)], None, centre, one)
    assert torch.equal(found.flatten(), every)


@needs_kernels
def test_rounding_to_half_floats_is_that_of_torch() -> None:
    """One sample of weight one between two cells gives sums that need rounding."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float16, torch.bfloat16):
        value = (torch.randn(1, 2, 1, 4096, generator=generator) * 10 ** torch.randint(-7, 5, (4096,))).to(dtype)
        locations = torch.tensor([0.55, 0.5]).view(1, 1, 1, 1, 1, 2)
        weights = torch.ones(1, 1, 1, 1, 1, dtype=dtype)
        exact = ms_deform_attn(value.float(), [(1, 2)], None, locations, weights)
        assert torch.equal(ms_deform_attn(value, [(1, 2)], None, locations, weights), exact.to(dtype))


@needs_kernels
@pytest.mark.parametrize(("rows", "heads"), [(2, 4), (1, 1)])
@pytest.mark.parametrize("queries", [5, 300])
def test_any_number_of_threads_gives_the_same_bits(rows: int, heads: int, queries: int) -> None:
    """With one image and head the backward pass splits the work by level."""
    inputs = [tensor.float() for tensor in example(rows=rows, heads=heads, queries=queries, width=32, points=4)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = with_gradients(*inputs)
        for number in (2, 3, 8):
            torch.set_num_threads(number)
            assert all(torch.equal(a, b) for a, b in zip(alone, with_gradients(*inputs), strict=True)), number
    finally:
        torch.set_num_threads(threads)


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize("instructions", ["baseline", "v3"])
def test_lower_instruction_sets(instructions: str) -> None:
    """Run the same tests in a process with a lower instruction set."""
    root = Path(__file__).parents[2]
    wanted = "loops or gradients or low_precision or agree or rounding or half_float"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", __file__]
    command += ["-o", "pythonpath="]
    environment = os.environ | {"DETR_BF_ISA": instructions, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*command, "-k", wanted], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    code = "import torch; from detr_bf.ops import library; print(torch.ops.detr_bf.cpu_instruction_set())"
    said = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert said.stdout.split()[-1] in {"baseline": ("baseline",), "v3": ("x86-64-v3", "baseline")}[instructions]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    value, locations, weights = example(width=8)
    inputs = [value.to(dtype).requires_grad_(), locations.float().requires_grad_(), weights.to(dtype).requires_grad_()]
    flat = [size for shape in SHAPES for size in shape]
    arguments = (inputs[0], flat, [0, 24, 30], inputs[1], inputs[2])
    torch.library.opcheck(torch.ops.detr_bf.ms_deform_attn.default, arguments, rtol=1e-2, atol=1e-2)
    detached = [argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments]
    output = torch.ops.detr_bf.ms_deform_attn(*detached)
    torch.library.opcheck(
        torch.ops.detr_bf.ms_deform_attn_backward.default, (output, *detached, False), rtol=1e-2, atol=1e-2
    )


@compilers
@needs_kernels
def test_compile_and_export(compiler: str) -> None:
    """One graph serves all sizes: another number of queries or cells compiles nothing again."""

    def whole(value: Tensor, locations: Tensor, weights: Tensor, height: int) -> Tensor:
        return ms_deform_attn(value.relu(), [(height, 6)], None, locations, weights) * 2

    compiled = compile_whole(whole, compiler)
    for height, queries in ((4, 3), (5, 7), (6, 9)):
        leaves = [t.requires_grad_() for t in example(queries=queries, shapes=[(height, 6)])]
        expected = torch.autograd.grad(whole(*leaves, height).sum(), leaves)
        found = torch.autograd.grad(compiled(*leaves, height).sum(), leaves)
        torch.testing.assert_close(found, expected)

    class Module(torch.nn.Module):
        def forward(self, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
            return ms_deform_attn(value, SHAPES, None, locations, weights)

    inputs = example()
    rows = torch.export.Dim("rows", min=1, max=64)
    exported = torch.export.export(Module(), inputs, dynamic_shapes=({0: rows},) * 3)
    assert any("ms_deform_attn" in str(node.target) for node in exported.graph.nodes)
    other = example(rows=5)
    torch.testing.assert_close(exported.module()(*other), Module()(*other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v, x, w: (v[:, :-1], x, w), "30 cells"),
        (lambda v, x, w: (v[..., 0], x, w), r"expected value \(B, S, H, D\)"),
        (lambda v, x, w: (v, x[:, :, :, :2], w), "sampling_locations"),
        (lambda v, x, w: (v, x, w[..., :1]), "attention_weights must be"),
        (lambda v, x, w: (v[:1], x, w), "attention_weights must be"),
        (lambda v, x, w: (v.long(), x, w), "floating-point tensors, got value torch.int64"),
        (lambda v, x, w: (v.to("meta"), x, w), "one device, got value meta"),
    ],
)
def test_tensors_that_do_not_belong_together(change: object, message: str) -> None:
    value, locations, weights = change(*example())  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        ms_deform_attn(value, SHAPES, None, locations, weights)


@pytest.mark.parametrize(
    ("shapes", "starts", "message"),
    [
        ([(4, 6), (3, 2), (0, 1)], None, "1 or more"),
        (SHAPES, [0, 24], "2 entries, spatial_shapes 3 levels"),
        (SHAPES, [0, 23, 30], "does not ascend"),
        (SHAPES, [0, 24, 31], "reach to cell 32"),
    ],
)
def test_levels_that_do_not_fit(shapes: list[tuple[int, int]], starts: list[int] | None, message: str) -> None:
    value, locations, weights = example()
    with pytest.raises(ValueError, match=message):
        ms_deform_attn(value, shapes, starts, locations, weights)


@needs_kernels
def test_the_operator_itself_refuses_what_would_crash() -> None:
    value, locations, weights = example()
    with pytest.raises(RuntimeError, match="level 2 of 1 x 1 cells, from cell 30, does not fit into the 30 cells"):
        torch.ops.detr_bf.ms_deform_attn(value[:, :-1], [4, 6, 3, 2, 1, 1], [0, 24, 30], locations, weights)
    with pytest.raises(RuntimeError, match="sampling_locations must be float32"):
        torch.ops.detr_bf.ms_deform_attn(value, [4, 6, 3, 2, 1, 1], [0, 24, 30], locations.float(), weights)
