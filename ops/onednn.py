"""Linear layers and convolutions for which oneDNN is faster than what torch chooses on a CPU, in float32.

torch computes matrix products with MKL, and with one thread and fewer than 16 images also 1 x 1 convolutions. MKL has
no AVX-512 kernels for processors of AMD: with many rows oneDNN takes about 0.8 of the time there
(benchmarks/README.md). Where nothing is gained, the functions are those of ``torch.nn.functional``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALLEST_PRODUCT = 1 << 27  # multiply-adds; below, a new size costs oneDNN more than it gains
FEWEST_ROWS = 2048  # of a gradient with respect to the input, for which the weights are transposed
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "swish": F.silu}  # by oneDNN's names

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_convolution_pointwise")


def _has_faster_products() -> bool:
    processor: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return ONEDNN and "AMD" in processor.get("cpu_name", "") and bool(processor.get("avx512_f", False))


FASTER_PRODUCTS = _has_faster_products()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``.

    Args:
        x: (..., I).
        weight: (O, I).
        bias: (O,) or None.
    """
    if not FASTER_PRODUCTS or x.numel() * len(weight) < SMALLEST_PRODUCT or not _is_plain(x, weight):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]  # the result of a Function that is a view cannot be changed
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)):
        result: Tensor = _Linear.apply(rows, weight, bias)
    else:
        result = _product(rows, weight, bias)
    return result.view(*x.shape[:-1], len(weight))


class LinearLayer(nn.Linear):
    """``nn.Linear`` that calls :func:`linear`."""

    def forward(self, input: Tensor) -> Tensor:  # name of the base class
        return linear(input, self.weight, self.bias)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    activation: str = "none",
) -> Tensor:
    """Return the convolution and activation of (B, C, h, w) maps; oneDNN's only without gradients.

    Args:
        x: maps.
        weight: (O, C / groups, kh, kw).
        bias: (O,) or None.
        stride, padding, dilation: in rows and columns.
        groups: of channels.
        activation: key of ``ACTIVATIONS``.
    """
    if torch.is_grad_enabled() or not ONEDNN or not x.numel() or not _is_plain(x, weight):
        return ACTIVATIONS[activation](F.conv2d(x, weight, bias, stride, padding, dilation, groups))
    result: Tensor = torch.ops.mkldnn._convolution_pointwise(
        x, weight, bias, padding, stride, dilation, groups, activation, [], ""
    )
    return result


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Return whether both are float32 on a CPU, not fake, and nothing asks for another dtype, a graph or no oneDNN."""
    return (
        type(x) is Tensor
        and x.dtype is torch.float32 is weight.dtype
        and x.device.type == "cpu" == weight.device.type
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and bool(torch.backends.mkldnn.enabled)
    )


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
