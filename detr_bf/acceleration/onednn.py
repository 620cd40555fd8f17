"""Linear layers and convolutions for which oneDNN is faster than what torch chooses, in float32 on some processors.

torch computes matrix products with MKL, and with one thread and fewer than 16 images also 1 x 1 convolutions. On
processors of AMD with AVX-512, MKL was about as fast as AVX2 allows, and oneDNN took 0.8 to 0.9 of its time with many
rows (benchmarks/README.md, "Matrix products on processors of AMD"). Elsewhere, and where nothing is gained, the
functions are those of ``torch.nn.functional``. FLOP counters of torch do not know oneDNN's operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

SMALLEST_PRODUCT = 1 << 27  # multiply-adds; below, a new size costs oneDNN more than it gains
FEWEST_ROWS = 2048  # of a gradient with respect to the input, for which the weights are transposed


def _is_faster() -> bool:
    processor: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    is_meant = "AMD" in processor.get("cpu_name", "") and bool(processor.get("avx512_f", False))
    return is_meant and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


FASTER = _is_faster()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``.

    Args:
        x: (..., I).
        weight: (O, I).
        bias: (O,) or None.
    """
    if not _is_plain(x, weight, bias) or weight.dim() != 2 or x.numel() * len(weight) < SMALLEST_PRODUCT:
        return F.linear(x, weight, bias)
    if x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return F.linear(x, weight, bias)  # with torch's message if that is an error
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)):
        result: Tensor = _Linear.apply(rows, weight, bias)
    else:
        result = _product(rows, weight, bias)
    return result.view(*x.shape[:-1], len(weight))  # here, as autograd forbids to change a view from a Function


def convolution(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``module._conv_forward(x, weight, bias)`` of (B, C, h, w) maps; with gradients always torch's own."""
    padding = module.padding
    is_usual = module.padding_mode == "zeros" and isinstance(padding, tuple) and x.dim() == 4 and bool(x.numel())
    if torch.is_grad_enabled() or not is_usual or not _is_plain(x, weight, bias):
        return type(module)._conv_forward(module, x, weight, bias)
    result: Tensor = torch.ops.mkldnn._convolution_pointwise(
        x, weight, bias, padding, module.stride, module.dilation, module.groups, "none", [], ""
    )
    return result


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether oneDNN is faster here and accepts the tensors: float32 on a CPU, of no subclass, not transformed.

    No autocast, graph, forward-mode derivative or transform of ``torch.func`` may ask for something else.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    return (
        FASTER
        and not torch.compiler.is_compiling()  # before anything that depends on a size
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in given)
        and all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in given)
        and not torch.is_autocast_enabled("cpu")
        and not is_transformed()
        and bool(torch.backends.mkldnn.enabled)
    )


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` or forward-mode differentiation may have replaced tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


class _Linear(torch.autograd.Function):
    """:func:`linear` of oneDNN, rows (N, I) -> (N, O), with gradients that can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_rows = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            is_long = len(rows) >= FEWEST_ROWS
            of_rows = linear(gradient, weight.T.contiguous()) if is_long else gradient @ weight
        if ctx.needs_input_grad[1]:
            of_weight = gradient.T @ rows
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0)
        return of_rows, of_weight, of_bias
