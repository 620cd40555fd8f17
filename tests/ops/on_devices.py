"""Inputs, gradients and comparison for tests of the operators on a CPU and on a GPU.

Inputs are drawn on the CPU and the expected results computed there in float64: every device gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Shapes = Sequence[tuple[int, int]]
SHAPES = ((20, 27), (10, 14), (5, 7), (3, 4))
ENCODER = ((100, 134), (50, 67), (25, 34), (13, 17))  # of 800 x 1066 pixels
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Relative to the largest number of a tensor: sums are float32 or float64, and half floats are rounded once.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}
KINK = 0.01  # cells


def deformable(
    dtype: torch.dtype = torch.float32,
    shapes: Shapes = SHAPES,
    *,
    images: int = 2,
    queries: int = 71,
    heads: int = 8,
    channels: int = 32,
    points: int = 4,
    reach: float = 1.2,
) -> list[Tensor]:
    """Return value, locations and weights of ms_deform_attn; some samples lie partly or fully outside.

    No sample is as close to a line between cell centres, where the derivative jumps, as rounding could move it.
    """
    generator = torch.Generator().manual_seed(channels)
    cells, rows = sum(height * width for height, width in shapes), (images, queries, heads, len(shapes), points)

    def random(*sizes: int) -> Tensor:
        return torch.rand(*sizes, dtype=torch.float64, generator=generator)

    value = (random(images, cells, heads, channels) - 0.5).to(dtype)
    sizes = torch.tensor([(width, height) for height, width in shapes])[:, None]
    places = (reach * random(*rows, 2) - (reach - 1) / 2) * sizes - 0.5
    beside = places - places.round()
    away = torch.where(beside < 0, -1, 1) * beside.abs().clamp(min=KINK)
    locations = (places.round() + away + 0.5) / sizes
    return [value, locations.to(torch.promote_types(dtype, torch.float32)), random(*rows).to(dtype)]


def with_gradients(
    call: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Return the output and the gradients of all inputs for an uneven gradient of the output.

    Args:
        device, dtype: of the calculation; None: those of the inputs. The gradient of the output has the precision of
            the first input in any case.
    """
    leaves = [tensor.to(device=device, dtype=dtype).detach().requires_grad_() for tensor in inputs]
    output = call(*leaves)
    uneven = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).to(inputs[0].dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad(output, leaves, uneven.to(output))]


def assert_close(
    found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float | None = None, what: object = ""
) -> None:
    """Compare each tensor with that of the same index, relative to its largest number; by default with TOLERANCE."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.shape == theirs.shape, (what, number)
        if not ours.numel():
            continue
        exact = theirs.detach().double().to(ours.device)
        error = float((ours.detach().double() - exact).abs().max() / exact.abs().max().clamp(min=1e-3))
        limit = TOLERANCE[ours.dtype] if tolerance is None else tolerance
        assert error <= limit, f"{what} tensor {number}: error {error:.1e}, allowed {limit:.1e}"


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor], what: object = "") -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, theirs), f"{what} tensor {number}"


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Select them within the block, as ``torch.use_deterministic_algorithms``."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def poison(results: Sequence[Tensor], copies: int = 3) -> None:
    """Leave NaN in free memory of the size of each result, so that elements which are not written show."""
    for dtype in (None, torch.float32):  # the results, and sums that are rounded later
        blocks = [torch.full_like(each, torch.nan, dtype=dtype) for each in results for _ in range(copies)]
        del blocks
