"""Convolutions that apply the norms after them; their weights are kept for inference.

Limits: torch does not count changes through ``tensor.data`` or NumPy, those of the running statistics in training, nor
those of fused optimizers. Modules release the weights when gradients or training mode are on; other such changes
between two calls without gradients are not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from detr_bf.ops import convolution


class _Weights(NamedTuple):
    """Weights and bias of a convolution, with the state of the tensors that they were computed from."""

    state: tuple[object, ...]
    sources: tuple[Tensor, ...]  # keep the memory, so that no other tensor gets the same address
    weight: Tensor
    bias: Tensor


class FoldedWeights:
    """Weights of a convolution that are computed from other tensors; without gradients kept until one of these changes.

    Copies and pickled objects are empty.
    """

    def __init__(self) -> None:
        self.kept: _Weights | None = None

    def __reduce__(self) -> tuple[type[FoldedWeights], tuple[()]]:
        return FoldedWeights, ()

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
            geometry: gives stride, dilation and groups, and the padding unless ``padding`` is given.
            padding: rows and columns on each side.
            activation: as of :func:`detr_bf.ops.convolution`.
        """
        kept = None
        if not torch.is_grad_enabled() and all(map(_has_version, sources)):
            kept, state = self.kept, tuple((tensor.data_ptr(), tensor._version, tensor.dtype) for tensor in sources)
            if kept is None or kept.state != state:
                kept = _Weights(state, tuple(tensor.detach() for tensor in sources), *compute())
        self.kept = kept
        weight, bias = compute() if kept is None else (kept.weight, kept.bias)
        settings: Any = {"stride": geometry.stride, "padding": geometry.padding if padding is None else padding}
        settings |= {"dilation": geometry.dilation, "groups": geometry.groups, "activation": activation}
        return convolution(x, weight, bias, **settings)


class FoldingModule(nn.Module):
    """Base of modules that convolve with folded weights in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.folded = FoldedWeights()

    def train(self, mode: bool = True) -> FoldingModule:
        """Set the mode, and release the kept weights: not all changes in training can be noticed."""
        self.folded.kept = None
        return super().train(mode)


def _has_version(tensor: Tensor) -> bool:
    """Return whether changes of the tensor can be noticed; no transform of ``torch.func`` may replace it."""
    return not tensor.is_inference() and torch._C._functorch.peek_interpreter_stack() is None


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
