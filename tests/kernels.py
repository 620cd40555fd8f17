"""Helpers shared by the operator tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from detr_bf.ops import library

NO_GPU = "there is no GPU that torch can use"
CUDA_PROBLEM = library.PROBLEMS["cuda"] if torch.cuda.is_available() else NO_GPU

needs_kernels = pytest.mark.skipif(not library.DECLARED, reason=f"compiled kernels: {library.PROBLEMS['cpu']}")

# Devices of a test. What runs on a GPU also runs on a CPU, with smaller sizes: a test must be right before it gets to
# one of the few minutes on a GPU.
CPU_KERNELS = pytest.param(torch.device("cpu"), marks=needs_kernels, id="cpu")
A_GPU = pytest.param(
    torch.device("cuda"),
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)],
    id="cuda",
)
CUDA_KERNELS = pytest.param(
    torch.device("cuda"),
    marks=[pytest.mark.gpu, pytest.mark.skipif(CUDA_PROBLEM is not None, reason=f"kernels for CUDA: {CUDA_PROBLEM}")],
    id="cuda",
)
on_devices = pytest.mark.parametrize("device", [CPU_KERNELS, CUDA_KERNELS])
on_cuda = pytest.mark.parametrize("device", [CUDA_KERNELS])


def sized(name: str, on_cpu: Any, on_cuda: Any) -> pytest.MarkDecorator:
    """Parametrise a test over the devices, with a value of ``name`` for each."""
    pairs = ((CPU_KERNELS, on_cpu), (CUDA_KERNELS, on_cuda))
    return pytest.mark.parametrize(
        ("device", name), [pytest.param(*each.values, value, marks=each.marks, id=each.id) for each, value in pairs]
    )


# Inductor compiles C++ for each graph, which is slow.
compilers = pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


def compile_whole(function: Callable[..., Any], compiler: str) -> Callable[..., Any]:
    """Compile one graph for all sizes; Inductor uses PyTorch's random numbers, not its own."""
    torch._dynamo.reset()
    options = {"fallback_random": True} if compiler == "inductor" else None
    return torch.compile(function, fullgraph=True, dynamic=True, backend=compiler, options=options)
