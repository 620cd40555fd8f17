"""Helpers shared by the operator tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from detr_bf.ops import library

needs_kernels = pytest.mark.skipif(not library.DECLARED, reason=f"compiled kernels: {library.PROBLEMS['cpu']}")

# Inductor compiles C++ for each graph, which is slow.
compilers = pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


def compile_whole(function: Callable[..., Any], compiler: str) -> Callable[..., Any]:
    """Compile one graph for all sizes; Inductor uses PyTorch's random numbers, not its own."""
    torch._dynamo.reset()
    options = {"fallback_random": True} if compiler == "inductor" else None
    return torch.compile(function, fullgraph=True, dynamic=True, backend=compiler, options=options)
