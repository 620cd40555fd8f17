"""Alternative CUDA kernels on a GPU (DETR_BF_CUDA_VARIANTS), compared with the present ones in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from detr_bf.ops import batch_attention, library, ms_deform_attn

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)
if library.PROBLEMS["cuda"] is not None:
    pytest.skip(f"the kernels for CUDA do not run: {library.PROBLEMS['cuda']}", allow_module_level=True)

pytestmark = pytest.mark.gpu
SHAPES = [(50, 67), (25, 34), (13, 17), (7, 9)]
CELLS = sum(height * width for height, width in SHAPES)
DEVICE = "cuda"


def random(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.rand(sizes, dtype=torch.float64, generator=generator).to(DEVICE)


def deformable(dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of value, locations and weights; the queries are the cells."""
    row = (2, CELLS, 8, len(SHAPES), 4)
    value = (random(2, CELLS, 8, 32) - 0.5).bfloat16().to(dtype)  # the same numbers in every dtype
    locations = (1.2 * random(*row, 2) - 0.1).float().to(torch.promote_types(dtype, torch.float32))
    leaves = [tensor.requires_grad_() for tensor in (value, locations, random(*row).bfloat16().to(dtype))]
    output = ms_deform_attn(leaves[0], SHAPES, None, leaves[1], leaves[2])
    gradient = (random(*output.shape) - 0.5).bfloat16().to(dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def attention(images: int, channels: int, masked: bool, p: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of query, key and value."""
    packed = (random(images, 37, 3, 4, channels) * 4 - 2).bfloat16().to(dtype)
    leaves = [tensor.detach().requires_grad_() for tensor in packed.unbind(2)]
    mask = random(images, 37) < 0.3 if masked else None
    output = batch_attention(*leaves, mask, p, seed=torch.tensor(7, device=DEVICE))
    gradient = (random(*output.shape) - 0.5).bfloat16().to(dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerances: list[float]) -> None:
    for one, other, tolerance in zip(found, wanted, tolerances, strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("variants", ["", "tiles", "half_atomics", "tiles,half_atomics"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_deformable_attention(dtype: torch.dtype, variants: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, present = deformable(torch.float64), deformable(dtype)
    monkeypatch.setenv("DETR_BF_CUDA_VARIANTS", variants)
    found = deformable(dtype)
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    of_value = 3 * tolerance if "half_atomics" in variants else tolerance
    # Gradients of locations jump between cells, and rounding decides on which side some of the samples are.
    assert_close(found, wanted, [tolerance, of_value, torch.inf, tolerance])
    for part in (0, 2, 3):
        assert torch.equal(found[part], present[part])


@pytest.mark.parametrize("images", range(1, 10))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("masked", "p"), [(False, 0.0), (True, 0.4)])
def test_batch_attention(
    images: int, dtype: torch.dtype, masked: bool, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DETR_BF_CUDA_VARIANTS", "one_pass")
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for channels in (32, 64):
        wanted = attention(images, channels, masked, p, torch.float64)
        assert_close(attention(images, channels, masked, p, dtype), wanted, [tolerance] * 4)


def test_an_unknown_variant_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETR_BF_CUDA_VARIANTS", "one_pas")
    for call in (lambda: deformable(torch.float32), lambda: attention(2, 32, False, 0.0, torch.float32)):
        with pytest.raises(RuntimeError, match="'one_pas' is unknown; the variants are tiles"):
            call()
