"""Batch attention compared with loops; derivatives, precision, torch.compile, and refused arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from detr_bf.ops import batch_attention, batch_attention_packed, library
from detr_bf.ops.reference import dropout_reference
from tests.kernels import compile_whole, compilers, needs_kernels
from tests.references.batch_attention import batch_attention_loops

SEED = torch.tensor(0x0123_4567_89AB_CDEF)
SIZES = [(1, 3, 2, 8), (2, 40, 4, 16), (3, 7, 3, 20), (4, 9, 1, 1), (7, 2, 2, 130), (33, 2, 2, 3)]  # B, N, H, D


def example(images: int = 3, positions: int = 5, heads: int = 2, width: int = 8) -> list[Tensor]:
    """Return query, key and value in float64."""
    generator = torch.Generator().manual_seed(0)
    sizes = (images, positions, heads, width)
    return [torch.randn(sizes, dtype=torch.float64, generator=generator) for _ in range(3)]


def example_mask(images: int, positions: int) -> Tensor:
    """Return a mask that ignores some keys: all at the first position, none at the second."""
    mask = torch.rand(images, positions, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[:, 0] = True
    mask[:, 1] = False
    return mask


def kept_of(images: int, positions: int, heads: int, p: float) -> Tensor:
    return dropout_reference(torch.ones(images, positions, heads, images, dtype=torch.float64), p, SEED)


def with_gradients(tensors: list[Tensor], mask: Tensor | None = None, p: float = 0.0) -> list[Tensor]:
    """Return the output and the gradients of all inputs for a fixed, uneven gradient of the output."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = batch_attention(leaves[0], leaves[1], leaves[2], mask, p, seed=SEED if p else None)
    output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_against_loops(backend: str, sizes: tuple[int, int, int, int], p: float, masked: bool) -> None:
    tensors, mask = example(*sizes), example_mask(*sizes[:2]) if masked else None
    found = batch_attention(*tensors, mask, p, seed=SEED)
    expected = batch_attention_loops(*tensors, mask, kept_of(*sizes[:3], p) if p else None)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("images", [1, 2, 5])
@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradients(backend: str, images: int, width: int, p: float) -> None:
    leaves = [tensor.requires_grad_() for tensor in example(images, 3, 2, width)]
    mask = example_mask(images, 3)
    assert torch.autograd.gradcheck(lambda q, k, v: batch_attention(q, k, v, mask, p, seed=SEED), leaves)


@needs_kernels
@pytest.mark.parametrize("sizes", [*SIZES, (2, 300, 4, 64), (4, 100, 4, 64), (64, 3, 4, 64), (6, 11, 3, 20)])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)],
)
def test_kernels_and_reference_agree(
    sizes: tuple[int, int, int, int], p: float, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Low precision only rounds the result: sums are float32."""
    tensors, mask = [tensor.to(dtype) for tensor in example(*sizes)], example_mask(*sizes[:2])
    found = with_gradients(tensors, mask, p)
    monkeypatch.setitem(library.PROBLEMS, "cpu", "the test uses the reference")
    expected = with_gradients([tensor.double() for tensor in tensors], mask, p)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_a_position_without_keys_is_zero_and_so_are_its_gradients(backend: str) -> None:
    tensors = with_gradients(example(), example_mask(3, 5), p=0.5)
    assert not any(tensor[:, 0].any() for tensor in tensors)
    assert tensors[0][:, 1].any()


def test_an_ignored_key_gets_no_gradient(backend: str) -> None:
    mask = example_mask(3, 5)
    _, _, of_key, of_value = with_gradients(example(), mask)
    assert not of_key[mask].any()
    assert not of_value[mask].any()


@pytest.mark.parametrize("size", [30.0, 1e4, 1e30])
def test_large_products_do_not_overflow(backend: str, size: float) -> None:
    query, key, value = (tensor.float() for tensor in example())
    assert batch_attention(query * size, key, value).isfinite().all()


def test_nan_is_seen_where_it_is_and_nowhere_else(backend: str) -> None:
    tensors = example()
    tensors[0][1, 2, 0, 3] = torch.nan
    seen = batch_attention(*tensors).isnan()
    assert seen[1, 2, 0].all()
    assert seen.sum() == 8


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponential_is_right_to_four_units_in_the_last_place(dtype: torch.dtype) -> None:
    """Two keys, one with a logit lower by x: its weight is 1 / (1 + exp(x)), up to three more roundings."""
    x = torch.linspace(0, 80, 20_001, dtype=dtype)
    query, value = torch.ones(2, len(x), 1, 1, dtype=dtype), torch.zeros(2, len(x), 1, 1, dtype=dtype)
    key = torch.stack([torch.zeros_like(x), -x]).view(2, -1, 1, 1)
    value[1] = 1
    weight = batch_attention(query, key, value)[0].flatten()
    exact = torch.sigmoid(-x.double()) if dtype == torch.float32 else 1 / (1 + torch.exp(x))
    assert ((weight.double() - exact).abs() / exact).max() <= 4 * torch.finfo(dtype).eps


def test_any_strides(backend: str) -> None:
    tensors = example(width=8)
    expected = with_gradients(tensors, p=0.5)
    packed = torch.stack(tensors, 2).requires_grad_()
    turned = [tensor.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for tensor in tensors]
    for views in (packed.unbind(2), turned):
        assert not views[0].is_contiguous()
        torch.testing.assert_close(batch_attention(*views, None, 0.5, seed=SEED), expected[0])
    leaves = [tensor.requires_grad_() for tensor in tensors]
    batch_attention(*leaves).sum().backward()  # a gradient with strides of zero
    assert all(leaf.grad is not None for leaf in leaves)


def test_packed_is_the_same(backend: str) -> None:
    tensors, mask = example(), example_mask(3, 5)
    expected = with_gradients(tensors, mask, p=0.5)
    packed = torch.stack(tensors, 2).requires_grad_()
    output = batch_attention_packed(packed, mask, 0.5, seed=SEED)
    output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
    torch.testing.assert_close([output, *packed.grad.unbind(2)], expected)


@pytest.mark.parametrize("sizes", [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0)])
def test_nothing_to_do(backend: str, sizes: tuple[int, int, int, int]) -> None:
    leaves = [tensor.requires_grad_() for tensor in example(*sizes)]
    output = batch_attention(*leaves, torch.zeros(sizes[:2], dtype=torch.bool), 0.5)
    assert output.shape == sizes
    output.sum().backward()
    assert leaves[0].grad.shape == sizes


@needs_kernels
@pytest.mark.parametrize("images", [2, 5])
def test_any_number_of_threads_gives_the_same_bits(images: int) -> None:
    tensors = [tensor.float() for tensor in example(images, 3000, 4, 20)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = with_gradients(tensors, None, 0.5)
        for number in (2, 3, 8):
            torch.set_num_threads(number)
            assert all(torch.equal(a, b) for a, b in zip(alone, with_gradients(tensors, None, 0.5), strict=True))
    finally:
        torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "positions", "width"),
    [(torch.float32, 8192, 64), (torch.float64, 4096, 64), (torch.float32, 26_215, 20), (torch.bfloat16, 8192, 128)],
)
def test_large_results_agree_with_those_of_parts(dtype: torch.dtype, positions: int, width: int, threads: int) -> None:
    """Results of 16 MiB or more are written past the caches, those of a quarter are not."""
    tensors = [tensor.to(dtype) for tensor in example(2, positions, 4, width)]
    gradient = torch.randn(2, positions, 4, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert gradient.nbytes >= 2**24
    quarters = range(0, positions, positions // 4 + 1)

    def found(*inputs: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
        output = batch_attention(leaves[0], leaves[1], leaves[2])
        return [output.detach(), *torch.autograd.grad(output, leaves, inputs[3])]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = found(*tensors, gradient)
        parts = [found(*(each[:, at : at + positions // 4 + 1] for each in (*tensors, gradient))) for at in quarters]
    finally:
        torch.set_num_threads(before)
    for number, each in enumerate(whole):
        assert torch.equal(each, torch.cat([part[number] for part in parts], 1)), number


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize("instructions", ["baseline", "v3"])
def test_lower_instruction_sets(instructions: str) -> None:
    """Run the same tests in a process with a lower instruction set."""
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", str(here)]
    command += [str(here.parent / "test_dropout.py"), "-k", "agree or kept or exponential", "-o", "pythonpath="]
    environment = os.environ | {"DETR_BF_ISA": instructions, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=here.parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_opcheck(dtype: torch.dtype, p: float) -> None:
    ops, mask, seed = torch.ops.detr_bf, example_mask(3, 5), SEED if p else None
    tensors = [tensor.to(dtype).requires_grad_() for tensor in example()]
    packed = torch.stack(tensors, 2).detach().requires_grad_()
    precision = {"rtol": 1e-2, "atol": 1e-2}
    torch.library.opcheck(ops.batch_attention.default, (*tensors, mask, p, seed), **precision)
    torch.library.opcheck(ops.batch_attention.default, (*packed.detach().unbind(2), None, p, seed), **precision)
    torch.library.opcheck(ops.batch_attention_packed.default, (packed, mask, p, seed), **precision)
    detached = [tensor.detach() for tensor in tensors]
    torch.library.opcheck(ops.batch_attention_backward.default, (detached[0], *detached, mask, p, seed), **precision)


def check_compiled(call: Callable[[Tensor, Tensor], Tensor], compiler: str) -> None:
    """One graph serves all sizes, with the same dropout as without the compiler."""
    compiled = compile_whole(call, compiler)
    for images, positions in ((3, 7), (5, 4)):
        packed = torch.stack(example(images, positions), 2).requires_grad_()
        mask = example_mask(images, positions)
        torch.manual_seed(images)
        expected = call(packed, mask)
        torch.manual_seed(images)
        found = compiled(packed, mask)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(output.square().sum(), packed) for output in (found, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.default_tier("compiled-aot_eager")
@compilers
def test_compile_packed(backend: str, compiler: str) -> None:
    check_compiled(lambda packed, mask: batch_attention_packed(packed * 2, mask, 0.5), compiler)


@compilers
@needs_kernels
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_compile(p: float, compiler: str) -> None:
    check_compiled(lambda packed, mask: batch_attention(*packed.unbind(2), mask, p), compiler)


def test_export(backend: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, packed: Tensor) -> Tensor:
            return batch_attention_packed(packed)

    positions = torch.export.Dim("positions", min=2, max=64)
    exported = torch.export.export(Module(), (torch.stack(example(), 2),), dynamic_shapes=({1: positions},))
    other = torch.stack(example(positions=9), 2)
    torch.testing.assert_close(exported.module()(other), Module()(other))


def test_checkpointing_draws_the_same_again(backend: str) -> None:
    leaves = [tensor.requires_grad_() for tensor in example(positions=50)]

    def block(*tensors: Tensor) -> Tensor:
        return batch_attention(*tensors, None, 0.5).sin()

    torch.manual_seed(0)
    expected = torch.autograd.grad(block(*leaves).sum(), leaves)
    torch.manual_seed(0)
    found = torch.autograd.grad(checkpoint(block, *leaves, use_reentrant=False).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_seeds_come_from_torch(backend: str) -> None:
    tensors = example()
    torch.manual_seed(1)
    first, second = batch_attention(*tensors, None, 0.5), batch_attention(*tensors, None, 0.5)
    torch.manual_seed(1)
    assert torch.equal(batch_attention(*tensors, None, 0.5), first)
    assert not torch.equal(first, second)


def test_mean_over_seeds_is_the_result_without_dropout(backend: str) -> None:
    """2,000 equal positions are as many draws: compare within five standard deviations."""
    tensors = [tensor.expand(-1, 2000, -1, -1) for tensor in example(positions=1)]
    results = batch_attention(*tensors, None, 0.5)
    spread = results.std(1) / 2000**0.5
    assert ((results.mean(1) - batch_attention(*tensors)[:, 0]).abs() <= 5 * spread).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "query torch.Size"),
        (lambda q, k, v: (q, k[:2], v), "of one shape"),
        (lambda q, k, v: (q, k, v.float()), "value torch.float32"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), "floating-point dtype"),
        (lambda q, k, v: (q, k.to("meta"), v), "one device.*key meta"),
        (lambda q, k, v: (q, k, v, torch.zeros(5, 3, dtype=torch.bool)), r"key_mask \(3, 5\)"),
        (lambda q, k, v: (q, k, v, torch.zeros(3, 5)), "bool"),
        (lambda q, k, v: (q, k, v, None, 1.5), r"\[0, 1\]"),
    ],
)
def test_what_does_not_belong_together(change: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_attention(*change(*example()))  # type: ignore[operator]


def test_packed_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"\(B, N, 3, H, D\)"):
        batch_attention_packed(torch.ones(2, 3, 4, 5, 6))


@needs_kernels
def test_the_operator_itself_refuses_what_would_crash() -> None:
    query, key, value = example()
    op = torch.ops.detr_bf.batch_attention
    with pytest.raises(RuntimeError, match="key must have the shape"):
        op(query, key[:2], value, None, 0.0, None)
    with pytest.raises(RuntimeError, match="key_mask must be"):
        op(query, key, value, torch.zeros(3, 4, dtype=torch.bool), 0.0, None)
    with pytest.raises(RuntimeError, match="dropout needs a seed"):
        op(query, key, value, None, 0.5, None)
    with pytest.raises(RuntimeError, match="float64, float32, float16 or bfloat16"):
        op(query.long(), key.long(), value.long(), None, 0.0, None)
    with pytest.raises(RuntimeError, match="grad_output must have"):
        torch.ops.detr_bf.batch_attention_backward(query[:2], query, key, value, None, 0.0, None)
