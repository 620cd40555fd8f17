"""Batch attention on a CPU and on a GPU, compared with the reference in float64 on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.ops import batch_attention, batch_attention_packed
from detr_bf.ops.reference import batch_attention_reference
from tests.kernels import on_cuda, on_devices, sized
from tests.ops.on_devices import DTYPES, assert_close, assert_same_bits, poison, with_gradients

SEED = torch.tensor(2**40 + 17)
# The kernels hold up to 4 or 8 queries in registers, and a warp has 32 lanes.
IMAGES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64)
CHANNELS = (1, 7, 8, 32, 33, 64, 128, 130, 256, 600)
PRECISION = {torch.float64: 1e-12, torch.float32: 1e-5}  # relative to the largest number; others: TOLERANCE
DROPOUT = 0.3


def random(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return query, key and value."""
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(sizes, dtype=torch.float64, generator=generator).to(dtype) for _ in range(3)]


def random_mask(images: int, positions: int) -> Tensor:
    """Return a mask that ignores all keys at the first position and none at the last."""
    mask = torch.rand(images, positions, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[:, 0], mask[:, -1] = True, False
    return mask


def operator(mask: Tensor | None, p: float, device: torch.device) -> Callable[..., Tensor]:
    ignored, seed = None if mask is None else mask.to(device), SEED.to(device)
    return lambda query, key, value: batch_attention(query, key, value, ignored, p, seed=seed)


def exact(inputs: list[Tensor], mask: Tensor | None = None, p: float = 0.0) -> list[Tensor]:
    """Return output and gradients in float64, with the same weights dropped."""
    seed = SEED if p else None
    reference = lambda query, key, value: batch_attention_reference(query, key, value, mask, p, seed)  # noqa: E731
    return with_gradients(reference, inputs, "cpu", torch.float64)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
def test_output_and_gradients(device: torch.device, dtype: torch.dtype, channels: int) -> None:
    """Repeated passes have the same bits, and nothing is left unwritten."""
    for images, p, masked in itertools.product(IMAGES, (0.0, DROPOUT), (False, True)):
        inputs, mask = random(images, 3, 2, channels, dtype=dtype), random_mask(images, 3) if masked else None
        call = operator(mask, p, device)
        first = with_gradients(call, inputs, device)
        poison(first)
        found = with_gradients(call, inputs, device)
        what = f"{images} images, p={p}, mask: {masked},"
        assert_close(found, exact(inputs, mask, p), PRECISION.get(dtype), what)
        assert_same_bits(found, first, what)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("images", [2, 4, 7, 16])
def test_more_positions_than_a_block_has(device: torch.device, dtype: torch.dtype, images: int) -> None:
    inputs, mask = random(images, 301, 4, 64, dtype=dtype), random_mask(images, 301)
    found = with_gradients(operator(mask, DROPOUT, device), inputs, device)
    assert_close(found, exact(inputs, mask, DROPOUT), PRECISION.get(dtype))


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("images", [3, 6, 12])
def test_packed(device: torch.device, dtype: torch.dtype, images: int) -> None:
    inputs, mask = random(images, 5, 2, 32, dtype=dtype), random_mask(images, 5)
    expected = with_gradients(operator(mask, DROPOUT, device), inputs, device)
    seed, ignored = SEED.to(device), mask.to(device)
    output, of_packed = with_gradients(
        lambda packed: batch_attention_packed(packed, ignored, DROPOUT, seed=seed), [torch.stack(inputs, 2)], device
    )
    assert_close([output, *of_packed.unbind(2)], expected)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "first dimensions swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "heads before positions": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "wider rows": lambda t: F.pad(t, (4, 4))[..., 4:-4],
    "rows of odd width": lambda t: F.pad(t, (1, 2))[..., 1:-2],
    "unaligned": lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view_as(t),
    "channels not contiguous": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "one position expanded": lambda t: t[:, :1].expand_as(t),
}


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("images", [3, 6, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(device: torch.device, dtype: torch.dtype, images: int, layout: str) -> None:
    """Change the layout of each argument alone, of all, and of the gradient."""
    plain = random(images, 5, 2, 32, dtype=dtype)
    changed, call = [LAYOUTS[layout](tensor.to(device)) for tensor in plain], operator(None, 0.0, device)
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        inputs = [changed[at] if at in which else plain[at].to(device) for at in range(3)]
        assert_close(with_gradients(call, inputs), exact([tensor.cpu() for tensor in inputs]), PRECISION.get(dtype))
    leaves = [tensor.to(device).requires_grad_() for tensor in plain]
    output, gradient = call(*leaves), LAYOUTS[layout](plain[0].flip(0).to(device))
    found = torch.autograd.grad(output, leaves, gradient, retain_graph=True)
    assert_close(found, torch.autograd.grad(output, leaves, gradient.contiguous(), retain_graph=True))
    of_sum = torch.autograd.grad(output.sum(), leaves, retain_graph=True)  # strides of zero
    assert_close(of_sum, torch.autograd.grad(output, leaves, torch.ones_like(output)))


@on_devices
@pytest.mark.parametrize("sizes", [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0)])
def test_nothing_to_do(device: torch.device, sizes: tuple[int, int, int, int]) -> None:
    mask = torch.zeros(sizes[:2], dtype=torch.bool)
    results = with_gradients(operator(mask, DROPOUT, device), random(*sizes), device)
    assert all(tensor.shape == sizes for tensor in results)


@on_devices
def test_a_position_without_keys_is_zero_and_so_are_its_gradients(device: torch.device) -> None:
    for images in (2, 6, 12):
        results = with_gradients(operator(random_mask(images, 5), DROPOUT, device), random(images, 5, 2, 32), device)
        assert not any(tensor[:, 0].any() for tensor in results)
        assert results[0][:, -1].any()


@on_devices
@pytest.mark.parametrize("size", [30.0, 1e4, 1e30])
def test_large_products_do_not_overflow(device: torch.device, size: float) -> None:
    for images in (2, 6, 12):
        query, key, value = random(images, 5, 2, 32)
        results = with_gradients(operator(None, 0.0, device), [query * size, key, value], device)
        assert all(tensor.isfinite().all() for tensor in results)


@on_devices
@pytest.mark.parametrize("images", [3, 7, 12])
def test_nan_is_seen_where_it_is_and_nowhere_else(device: torch.device, images: int) -> None:
    query, key, value = random(images, 5, 2, 8)
    query[1, 2, 0, 3] = torch.nan
    nan = operator(None, 0.0, device)(query.to(device), key.to(device), value.to(device)).isnan()
    assert nan[1, 2, 0].all()
    assert nan.sum() == 8


@pytest.mark.usefixtures("much_memory")
@sized("positions", on_cpu=1000, on_cuda=2**31 // (2 * 3 * 4 * 64) + 1000)
def test_more_elements_than_32_bits_count(device: torch.device, positions: int) -> None:
    """The last positions have the same bits as if they were alone."""
    packed = torch.empty(2, positions, 3, 4, 64, device=device, dtype=torch.bfloat16).uniform_(-1, 1)
    whole = with_gradients_of_sum(packed)
    alone = with_gradients_of_sum(packed[:, -500:])
    assert_same_bits([tensor[:, -500:] for tensor in whole], alone)


def with_gradients_of_sum(packed: Tensor) -> list[Tensor]:
    leaf = packed.detach().requires_grad_()
    output = batch_attention_packed(leaf)
    return [output.detach(), *torch.autograd.grad(output, leaf, output.detach())]


@on_cuda
def test_tensors_on_two_devices(device: torch.device) -> None:
    query, key, value = random(2, 3, 2, 8)
    with pytest.raises(ValueError, match="expected tensors on one device"):
        batch_attention(query.to(device), key, value.to(device))
    with pytest.raises(RuntimeError, match="key must be on the device of query"):
        torch.ops.detr_bf.batch_attention(query.to(device), key, value.to(device), None, 0.0, None)
    with pytest.raises(RuntimeError, match="the seed must be on the device of query"):
        batch_attention(query.to(device), key.to(device), value.to(device), None, DROPOUT, seed=SEED)
