"""Contracts of the operators with torch on a CPU and on a GPU: autograd, dispatcher, compiler, streams, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from detr_bf.ops import batch_attention, batch_attention_packed, ms_deform_attn, relu_dropout, residual_dropout
from tests.kernels import CPU_KERNELS, CUDA_KERNELS, compile_whole, on_cuda, on_devices
from tests.ops.on_devices import assert_close, deformable, deterministic_algorithms

SHAPES = ((5, 4), (3, 2))
FLAT, STARTS = [5, 4, 3, 2], [0, 20]
P = 0.4
Call = Callable[..., Tensor]


def attention(seed: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Ignore every third key, with a mask that is made on the device."""
    images, positions = query.shape[:2]
    mask = (torch.arange(images * positions, device=query.device) % 3 == 0).view(images, positions)
    return batch_attention(query, key, value, mask, P, seed=seed)


# By name: a function of a seed, which is drawn if it is None, and of tensors.
CALLS: dict[str, Call] = {
    "ms_deform_attn": lambda seed, value, x, w: ms_deform_attn(value, SHAPES, None, x, w),
    "batch_attention": attention,
    "batch_attention_packed": lambda seed, packed: batch_attention_packed(packed, None, P, seed=seed),
    "residual_dropout": lambda seed, x, y: residual_dropout(x, y, P, seed=seed),
    "relu_dropout": lambda seed, x: relu_dropout(x, P, seed=seed),
}
DRAWING = [name for name in CALLS if name != "ms_deform_attn"]
every_call = pytest.mark.parametrize("name", CALLS)


def inputs_of(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return leaves with gradients."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"batch_attention": (3, 4, 2, 8), "batch_attention_packed": (3, 4, 3, 2, 8)}.get(name, (3, 50))
    count = {"batch_attention": 3, "residual_dropout": 2}.get(name, 1)
    if name == "ms_deform_attn":
        tensors = deformable(dtype, SHAPES, queries=3, heads=2, channels=4, points=2)
    else:
        tensors = [torch.randn(sizes, dtype=torch.float64, generator=generator).to(dtype) for _ in range(count)]
    return [tensor.to(device).requires_grad_() for tensor in tensors]


def seed_on(device: torch.device, number: int = 2**40 + 17) -> Tensor:
    return torch.full((), number, device=device, dtype=torch.int64)


def passes(call: Call, seed: Tensor | None, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return output and gradients, without a copy between host and device."""
    output = call(seed, *leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, output.detach() + 1)]


@on_devices
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "deterministic"])
@every_call
def test_gradients_are_the_derivatives(device: torch.device, deterministic: bool, name: str) -> None:
    seed = seed_on(device)
    with deterministic_algorithms(deterministic):
        torch.autograd.gradcheck(
            lambda *leaves: CALLS[name](seed, *leaves), inputs_of(name, device, torch.float64), nondet_tol=1e-9
        )


@on_devices
def test_second_derivative_of_relu_dropout(device: torch.device) -> None:
    seed = seed_on(device)
    (x,) = inputs_of("relu_dropout", device, torch.float64)
    torch.autograd.gradgradcheck(lambda x: relu_dropout(x, P, seed=seed).pow(3), [x])


def operator_calls(device: torch.device) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the names of the operators and valid arguments."""
    seed = seed_on(device)
    value, x, w = inputs_of("ms_deform_attn", device)
    mask = torch.zeros(3, 4, dtype=torch.bool, device=device)
    query, key, attended = inputs_of("batch_attention", device)
    detached = [tensor.detach() for tensor in (query, key, attended)]
    (packed,), (a, b) = inputs_of("batch_attention_packed", device), inputs_of("residual_dropout", device)
    gradient = torch.ones(2, 3, 8, device=device)
    yield "ms_deform_attn", (value, FLAT, STARTS, x, w)
    for deterministic in (False, True):
        yield (
            "ms_deform_attn_backward",
            (gradient, value.detach(), FLAT, STARTS, x.detach(), w.detach(), deterministic),
        )
    yield "batch_attention", (query, key, attended, mask, P, seed)
    yield "batch_attention_packed", (packed, None, P, seed)
    yield "batch_attention_backward", (detached[0], *detached, mask, P, seed)
    if device.type == "cuda":
        return  # whose dropout is torch's
    yield "dropout_add", (a, b, P, seed)
    yield "dropout_add", (a, None, P, seed)
    yield "relu_dropout", (a, P, seed)
    yield "relu_dropout_backward", (a.detach(), b.detach(), P)


@on_devices
def test_opcheck(device: torch.device) -> None:
    """Schema, registration of autograd, fake tensors, and graphs of dynamic sizes."""
    for name, arguments in operator_calls(device):
        torch.library.opcheck(getattr(torch.ops.detr_bf, name).default, arguments, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "compiler"),
    [
        pytest.param(*CPU_KERNELS.values, "aot_eager", marks=CPU_KERNELS.marks, id="cpu-aot_eager"),
        pytest.param(*CPU_KERNELS.values, "inductor", marks=[*CPU_KERNELS.marks, pytest.mark.slow], id="cpu-inductor"),
        pytest.param(*CUDA_KERNELS.values, "inductor", marks=CUDA_KERNELS.marks, id="cuda-inductor"),
    ],
)
def test_compile(device: torch.device, compiler: str) -> None:
    """One graph holds all operators, and draws as they do without the compiler."""

    def whole(seed: Tensor | None, *leaves: Tensor) -> Tensor:
        rest = list(leaves)
        results = [call(seed, *(rest.pop(0) for _ in range(counts[name]))) for name, call in CALLS.items()]
        return torch.cat([result.flatten() * 2 for result in results])

    counts = {name: len(inputs_of(name, device)) for name in CALLS}
    leaves = [leaf for name in CALLS for leaf in inputs_of(name, device)]
    torch.manual_seed(0)
    expected = passes(whole, None, leaves)
    torch.manual_seed(0)
    assert_close(passes(compile_whole(whole, compiler), None, leaves), expected)


# ---- GPU only ----


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Make torch raise where the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_cuda
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "deterministic"])
@every_call
def test_no_wait_for_the_gpu(device: torch.device, deterministic: bool, name: str) -> None:
    """Seeds are drawn on the GPU."""
    leaves = inputs_of(name, device)
    with deterministic_algorithms(deterministic):
        passes(CALLS[name], None, leaves)
        with waits_are_errors():
            passes(CALLS[name], None, leaves)


@on_cuda
def test_a_wait_would_be_seen(device: torch.device) -> None:
    with waits_are_errors(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones((), device=device).item()


@on_cuda
@every_call
def test_on_another_stream(device: torch.device, name: str) -> None:
    leaves, seed = inputs_of(name, device), seed_on(device)
    expected = passes(CALLS[name], seed, leaves)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # kernels on the default stream would overtake the copies
        moved = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        found = passes(CALLS[name], seed.clone(), moved)
    stream.synchronize()
    assert_close(found, expected)


def captured(call: Call, seed: Tensor | None, leaves: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Capture both passes after a first run, and return the graph with its results."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        passes(call, seed, leaves)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        results = passes(call, seed, leaves)
    return graph, results


@on_cuda
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "deterministic"])
@every_call
def test_cuda_graph(device: torch.device, deterministic: bool, name: str) -> None:
    """A replay reads the inputs and the seed that are there then."""
    leaves, seed = inputs_of(name, device), seed_on(device)
    with deterministic_algorithms(deterministic):
        graph, results = captured(CALLS[name], seed, leaves)
        for factor, number in ((1.0, 5), (0.5, 6)):
            with torch.no_grad():
                leaves[0].mul_(factor)
            seed.fill_(number)
            for result in results:
                result.fill_(torch.nan)
            graph.replay()
            assert_close(results, passes(CALLS[name], seed, leaves))


@on_cuda
@pytest.mark.parametrize("name", DRAWING)
def test_replays_of_a_cuda_graph_draw_other_seeds(device: torch.device, name: str) -> None:
    graph, (output, *_) = captured(CALLS[name], None, inputs_of(name, device))
    graph.replay()
    first = output.clone()
    graph.replay()
    assert not torch.equal(output, first)
