"""Dropout fused with a residual addition: random numbers, rate, derivatives and torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from detr_bf.ops import relu_dropout, residual_dropout
from detr_bf.ops.reference import dropout_reference, random_numbers
from tests.kernels import compile_whole, compilers, needs_kernels
from tests.references.batch_attention import philox_numbers

SEED = torch.tensor(0x0123_4567_89AB_CDEF)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def kept_of(shape: tuple[int, ...], p: float) -> Tensor:
    """Return the dropout factor of each element, computed with loops."""
    numbers = torch.tensor(philox_numbers(int(SEED), torch.Size(shape).numel()))
    dropped = round(p * 65536)
    return ((numbers >= dropped) * 65536 / max(65536 - dropped, 1)).view(shape)


def test_random_numbers_are_those_that_the_authors_of_philox_published() -> None:
    """Key and counter zero: the first known answer of Random123's kat_vectors."""
    call = random_numbers(128, torch.tensor(0)).view(8, 16)[:, 0].tolist()
    words = [low | high << 16 for low, high in zip(call[::2], call[1::2], strict=True)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_random_numbers_in_loops() -> None:
    assert random_numbers(300, SEED).tolist() == philox_numbers(int(SEED), 300)


def test_random_numbers_beyond_32_bits_of_calls_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda n, **settings: arange(n, **settings) + 2**32)
    far = random_numbers(128, SEED)
    monkeypatch.undo()
    assert (far != random_numbers(128, SEED)).float().mean() > 0.99


@pytest.mark.parametrize("count", [1, 15, 127, 128, 300])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_what_is_kept(backend: str, count: int, p: float) -> None:
    kept = kept_of((count,), p)
    x, y = torch.randn(count, dtype=torch.float64), torch.randn(count, dtype=torch.float64)
    torch.testing.assert_close(residual_dropout(x, y, p, seed=SEED), x + y * kept)
    torch.testing.assert_close(relu_dropout(x, p, seed=SEED), x.relu() * kept)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_and_reference_agree_to_the_bit(dtype: torch.dtype) -> None:
    x = torch.randn(3, 1000, 7).to(dtype)
    assert torch.equal(torch.ops.detr_bf.dropout_add(x, None, 0.3, SEED), dropout_reference(x, 0.3, SEED))
    assert torch.equal(torch.ops.detr_bf.relu_dropout(x, 0.3, SEED), dropout_reference(x.relu(), 0.3, SEED))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_large_results_agree_with_the_reference_to_the_bit(dtype: torch.dtype, threads: int) -> None:
    """Results of 16 MiB or more are written past the caches."""
    x = torch.randn(2**24 // dtype.itemsize + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradient = x.flip(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        dropped = torch.ops.detr_bf.dropout_add(x, None, 0.3, SEED)
        leaf = x.clone().requires_grad_()
        output = relu_dropout(leaf, 0.3, seed=SEED)
        (found,) = torch.autograd.grad(output, leaf, gradient)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(dropped, dropout_reference(x, 0.3, SEED))
    assert torch.equal(output.detach(), dropout_reference(x.relu(), 0.3, SEED))
    assert torch.equal(found, torch.where(output > 0, dropout_reference(gradient, 0.3, SEED), 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision(backend: str, dtype: torch.dtype) -> None:
    """The reference rounds the update before adding it."""
    x, y = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    expected = x.double() + dropout_reference(y.double(), 0.3, SEED)
    found = residual_dropout(x, y, 0.3, seed=SEED)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()


def test_rate_and_mean(backend: str) -> None:
    """Compare within five standard deviations of a million draws."""
    ones, p = torch.ones(1_000_000), 0.1
    result = relu_dropout(ones, p, seed=SEED)
    assert abs((result == 0).double().mean().item() - p) < 5 * (p * (1 - p) / len(ones)) ** 0.5 + 1e-5
    assert abs(result.double().mean().item() - 1) < 5 * (p / (1 - p) / len(ones)) ** 0.5
    dropped = (result == 0).double()
    neighbours = ((dropped[1:] - p) * (dropped[:-1] - p)).mean() / (p * (1 - p))
    assert neighbours.abs() < 5 / len(ones) ** 0.5, "neighbours are independent"


def test_seeds_come_from_torch(backend: str) -> None:
    x = torch.ones(1000)
    torch.manual_seed(1)
    first, second = relu_dropout(x, 0.5), relu_dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(relu_dropout(x, 0.5), first)
    assert 0.4 < (first != second).float().mean() < 0.6


def residual(x: Tensor, y: Tensor) -> Tensor:
    return residual_dropout(x, y, 0.4, seed=SEED)


def rectified(x: Tensor, y: Tensor) -> Tensor:
    return relu_dropout(x * y, 0.4, seed=SEED)


@pytest.mark.parametrize("function", [residual, rectified])
def test_gradients(backend: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    leaves = [torch.randn(5, 31, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("function", [residual, rectified])
def test_strides_do_not_matter(backend: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = torch.randn(6, 40), torch.randn(6, 40)
    expected = function(x, y)
    turned = [tensor.T.contiguous().T.requires_grad_() for tensor in (x, y)]
    found = function(*turned)
    torch.testing.assert_close(found, expected)
    found.sum().backward()  # a gradient with strides of zero
    straight = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    function(*straight).backward(torch.ones(6, 40))
    torch.testing.assert_close([t.grad for t in turned], [t.grad for t in straight])


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing_to_do(backend: str, shape: tuple[int, ...]) -> None:
    assert residual_dropout(torch.ones(shape), torch.ones(shape), 0.5).shape == shape
    assert relu_dropout(torch.ones(shape), 0.5).shape == shape


def test_dropped_is_dropped_and_nan_is_seen(backend: str) -> None:
    x = torch.full((1000,), torch.nan)
    result = relu_dropout(x, 0.5, seed=SEED)
    assert torch.equal(result.isnan(), kept_of((1000,), 0.5) > 0)
    assert not result[~result.isnan()].any()


@needs_kernels
def test_any_number_of_threads_gives_the_same_bits() -> None:
    x, threads = torch.randn(100_000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = residual_dropout(x, x, 0.5, seed=SEED)
        for number in (2, 3, 8):
            torch.set_num_threads(number)
            assert torch.equal(residual_dropout(x, x, 0.5, seed=SEED), alone)
    finally:
        torch.set_num_threads(threads)


@needs_kernels
def test_opcheck() -> None:
    x, y = (torch.randn(3, 50, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.detr_bf.dropout_add.default, (x, y, 0.5, SEED))
    torch.library.opcheck(torch.ops.detr_bf.dropout_add.default, (x, None, 0.5, SEED))
    torch.library.opcheck(torch.ops.detr_bf.relu_dropout.default, (x, 0.5, SEED))
    torch.library.opcheck(torch.ops.detr_bf.relu_dropout_backward.default, (x.detach(), y.detach(), 0.5))


@pytest.mark.full
@compilers
def test_compile_draws_as_eager_does(backend: str, compiler: str) -> None:
    def block(x: Tensor, y: Tensor) -> Tensor:
        return residual_dropout(x, relu_dropout(y, 0.5), 0.5)

    compiled = compile_whole(block, compiler)
    for count in (5, 70, 300):
        leaves = [torch.randn(2, count, requires_grad=True) for _ in range(2)]
        torch.manual_seed(count)
        expected = torch.autograd.grad(block(*leaves).sum(), leaves)
        torch.manual_seed(count)
        torch.testing.assert_close(torch.autograd.grad(compiled(*leaves).sum(), leaves), expected)


@pytest.mark.slow  # compiles
def test_inductors_own_seed_serves_both_passes(backend: str) -> None:
    """Elements dropped in the forward pass have no gradient, for any seed."""
    torch._dynamo.reset()
    update = torch.ones(3, 100, requires_grad=True)
    output = torch.compile(residual_dropout)(torch.zeros(3, 100), update, 0.5)
    assert set(output.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(torch.autograd.grad(output.sum(), update)[0], output)


def test_checkpointing_draws_the_same_again(backend: str) -> None:
    def block(x: Tensor) -> Tensor:
        return relu_dropout(residual_dropout(x, x.tanh(), 0.5), 0.5)

    x = torch.randn(1000, requires_grad=True)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    torch.manual_seed(0)
    (found,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x)
    assert torch.equal(found, expected)


def test_mixed_precision_adds_in_the_wider(backend: str) -> None:
    """Under autocast the residual stream is float32 and the output of a linear layer is not."""
    x, y = torch.randn(1000), torch.randn(1000).bfloat16()
    found = residual_dropout(x, y, 0.5, seed=SEED)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x + dropout_reference(y.float(), 0.5, SEED))


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_a_probability_that_is_none(backend: str, p: float) -> None:
    with pytest.raises(ValueError, match=r"in \[0, 1\], got"):
        relu_dropout(torch.ones(3), p)


def test_tensors_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match=r"residual \(3,\).*update \(2,\)"):
        residual_dropout(torch.ones(3), torch.ones(2), 0.5)
    with pytest.raises(ValueError, match=r"update .* on meta"):
        residual_dropout(torch.ones(3), torch.ones(3, device="meta"), 0.5)


@needs_kernels
def test_the_operator_itself_refuses_what_would_crash() -> None:
    x = torch.ones(300)
    with pytest.raises(RuntimeError, match="one shape, dtype and device"):
        torch.ops.detr_bf.dropout_add(x, x[:-1], 0.5, SEED)
    with pytest.raises(RuntimeError, match="one int64"):
        torch.ops.detr_bf.relu_dropout(x, 0.5, SEED.float())
    with pytest.raises(RuntimeError, match=r"in \[0, 1\], got 2"):
        torch.ops.detr_bf.relu_dropout(x, 2.0, SEED)
    with pytest.raises(RuntimeError, match="float64, float32, float16 or bfloat16"):
        torch.ops.detr_bf.relu_dropout(x.long(), 0.5, SEED)


def test_second_derivatives_are_those_of_the_formula() -> None:
    x = torch.randn(4, 33, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(5)

    def second(function: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        (derivative,) = torch.autograd.grad(first.pow(2).sum(), x)
        return derivative

    kept = relu_dropout(torch.ones_like(x), 0.3, seed=seed).detach()
    expected = second(lambda y: y.relu() * kept)
    assert expected.abs().max() > 1
    torch.testing.assert_close(second(lambda y: relu_dropout(y, 0.3, seed=seed)), expected)
