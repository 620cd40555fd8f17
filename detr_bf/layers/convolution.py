"""Convolutions that apply the norms after them; their weights are kept for inference.

Limit: weights that are changed through ``tensor.data`` or NumPy while gradients are off are not noticed until gradients
are on once; torch counts no such change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from detr_bf.ops import convolution


class _Weights(NamedTuple):
    """Weights and bias of a convolution, and the state of the tensors that they were computed from."""

    state: tuple[object, ...]
    weight: Tensor
    bias: Tensor


class Kernel:
    """Weights of a convolution that are computed from other tensors; without gradients kept until one of these changes.

    Copies and pickled objects are empty.
    """

    def __init__(self) -> None:
        self.kept: _Weights | None = None

    def __reduce__(self) -> tuple[type[Kernel], tuple[()]]:
        return Kernel, ()

    def convolve(
        self,
        x: Tensor,
        sources: Sequence[Tensor],
        compute: Callable[[], tuple[Tensor, Tensor]],
        geometry: nn.Conv2d,
        *,
        padding: tuple[int, int] | None = None,
        activation: str = "none",
    ) -> Tensor:
        """Return the convolution of (B, C, h, w) maps and its activation.

        Args:
            x: maps.
            sources: all tensors that ``compute`` reads.
            compute: returns weights (O, C / groups, kh, kw) and bias (O,).
            geometry: stride, dilation, groups and, unless given, padding are its.
            padding: rows and columns on each side.
            activation: as of :func:`detr_bf.ops.convolution`.
        """
        kept = None
        if not torch.is_grad_enabled() and not any(tensor.is_inference() for tensor in sources):  # no versions
            kept, state = self.kept, tuple((tensor.data_ptr(), tensor._version, tensor.dtype) for tensor in sources)
            if kept is None or kept.state != state:
                kept = _Weights(state, *compute())
        self.kept = kept
        weight, bias = compute() if kept is None else (kept.weight, kept.bias)
        settings: Any = {"stride": geometry.stride, "padding": padding or geometry.padding}
        settings |= {"dilation": geometry.dilation, "groups": geometry.groups, "activation": activation}
        return convolution(x, weight, bias, **settings)


def fold_norm(convolution: nn.Conv2d, norm: Any) -> tuple[Tensor, Tensor]:
    """Return weights (O, C / groups, kh, kw) and bias (O,) of a convolution with a norm of fixed statistics after it.

    Args:
        convolution: with O channels at the output.
        norm: ``nn.BatchNorm2d`` in evaluation or a frozen batch norm; its weight, bias, running mean and variance, eps.
    """
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    weight = (convolution.weight * scale[:, None, None, None]).to(convolution.weight.dtype)
    mean = norm.running_mean if convolution.bias is None else norm.running_mean - convolution.bias
    return weight, (norm.bias - mean * scale).to(convolution.weight.dtype)
