"""Convolutions that apply the norms after them; their weights are kept for inference.

Limits: torch does not count changes through ``tensor.data`` or NumPy, those of the running statistics in training, nor
those of fused optimizers. Modules release the weights when gradients or training mode are on; other such changes
between two calls without gradients are not noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.ops import convolution
from detr_bf.ops.onednn import is_transformed


class _Weights(NamedTuple):
    """Weights and bias of a convolution, with the state of the tensors that they were computed from."""

    state: tuple[object, ...]
    sources: tuple[Tensor, ...]  # keep the memory, so that no other tensor gets the same address
    weight: Tensor
    bias: Tensor


class FoldedWeights:
    """Weights of convolutions with norms after them, as one convolution; without gradients kept until a source changes.

    Copies and pickled objects are empty.
    """

    def __init__(self) -> None:
        self.kept: _Weights | None = None

    def __reduce__(self) -> tuple[type[FoldedWeights], tuple[()]]:
        return FoldedWeights, ()

    def convolve(
        self,
        x: Tensor,
        branches: Sequence[tuple[nn.Conv2d, Any]],
        *,
        padding: tuple[int, int] | None = None,
        activation: str = "none",
    ) -> Tensor:
        """Return the sum of convolutions of (B, C, h, w) maps, each with the norm after it, and its activation.

        Args:
            x: maps.
            branches: convolutions with norms of fixed statistics: ``nn.BatchNorm2d`` in evaluation or frozen ones.
                Stride, dilation, groups and padding are those of the first, whose kernel is the largest.
            padding: rows and columns on each side, instead of the first convolution's.
            activation: as of :func:`detr_bf.ops.convolution`.
        """
        kept = None
        if not (torch.is_grad_enabled() or is_transformed()):
            sources = [tensor for branch in branches for tensor in _sources(*branch)]
            if not any(tensor.is_inference() for tensor in sources):  # their changes are not counted
                kept, state = self.kept, tuple((tensor.data_ptr(), tensor._version, tensor.dtype) for tensor in sources)
                if kept is None or kept.state != state:
                    kept = _Weights(state, tuple(tensor.detach() for tensor in sources), *_fold(branches))
        self.kept = kept
        weight, bias = _fold(branches) if kept is None else (kept.weight, kept.bias)
        first: Any = branches[0][0]
        return convolution(
            x,
            weight,
            bias,
            stride=first.stride,
            padding=first.padding if padding is None else padding,
            dilation=first.dilation,
            groups=first.groups,
            activation=activation,
        )


class FoldingModule(nn.Module):
    """Base of modules that convolve with folded weights in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.folded = FoldedWeights()

    def train(self, mode: bool = True) -> FoldingModule:
        """Set the mode, and release the kept weights: not all changes in training can be noticed."""
        self.folded.kept = None
        return super().train(mode)

    def folds(self, *norms: nn.BatchNorm2d) -> bool:
        """Return whether the norms have fixed statistics, gradients are off, and torch does not compile or export.

        Otherwise the kept weights are released.
        """
        if torch.compiler.is_compiling():
            return False
        fixed = all(not norm.training and norm.running_mean is not None for norm in norms)
        if torch.is_grad_enabled() or not fixed:
            self.folded.kept = None
            return False
        return True


def _sources(conv: nn.Conv2d, norm: Any) -> list[Tensor]:
    """Return the tensors that :func:`_fold` reads of a branch."""
    sources = [conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var]
    return sources if conv.bias is None else [*sources, conv.bias]


def _fold(branches: Sequence[tuple[nn.Conv2d, Any]]) -> tuple[Tensor, Tensor]:
    """Return weights (O, C / groups, kh, kw) and bias (O,) of the sum of the branches."""
    folded = []
    for conv, norm in branches:
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        weight = (conv.weight * scale[:, None, None, None]).to(conv.weight.dtype)
        mean = norm.running_mean if conv.bias is None else norm.running_mean - conv.bias
        folded.append((weight, (norm.bias - mean * scale).to(conv.weight.dtype)))
    (weight, bias), *others = folded
    for other, other_bias in others:
        margin = (weight.shape[-1] - other.shape[-1]) // 2
        weight, bias = weight + F.pad(other, (margin, margin, margin, margin)), bias + other_bias
    return weight, bias
