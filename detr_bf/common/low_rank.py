"""Low-rank changes of linear layers for fine-tuning (LoRA, Hu et al. 2021, arXiv 2106.09685, section 4.1).

Shape legend: I inputs, O outputs, N rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable

BASE, DOWN, UP = "base_weight", "lora_a", "lora_b"  # parameters of a layer


class LowRankLinear(nn.Module):
    """A linear layer with frozen weight and bias, to whose weight a product of two trained matrices is added.

    ``base_weight`` (O, I) is the weight of ``layer``, ``lora_a`` (N, I) random and ``lora_b`` (O, N) zero at first, so
    that nothing changes. The paper's factor alpha / N is 1. In training the product is not computed: the layer keeps no
    second matrix (O, I), nor its gradient. In evaluation it computes what :func:`merged` weights give.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = layer.in_features, layer.out_features, rank
        self.base_weight = layer.weight.requires_grad_(False)
        self.bias = None if layer.bias is None else layer.bias.requires_grad_(False)
        self.lora_a = nn.Parameter(self.base_weight.new_empty(rank, self.in_features))
        self.lora_b = nn.Parameter(self.base_weight.new_zeros(self.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # the scale of torch's linear layers

    @property
    def weight(self) -> Tensor:
        """The changed weight (O, I); networks that read it instead of calling the layer train with it."""
        return merged_weight(self.base_weight, self.lora_a, self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        if not self.training:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.base_weight, self.bias) + F.linear(F.linear(x, self.lora_a), self.lora_b)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.rank}"
        )


def merged_weight(base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``base + b @ a`` without autocast."""
    with torch.autocast(base.device.type, enabled=False):
        return torch.addmm(base, b, a)


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict in which the weights of linear layers replace those of :class:`LowRankLinear`, if any.

    Raises:
        InputError: see :func:`check_low_rank`.
    """
    if not (prefixes := check_low_rank(state)):
        return state
    result = dict(state)
    for prefix in prefixes:
        base, a, b = (result.pop(prefix + name) for name in (BASE, DOWN, UP))
        result[prefix + "weight"] = merged_weight(base, a, b)
    return result


def check_low_rank(state: Mapping[str, Tensor]) -> list[str]:
    """Return the prefixes of the low-rank layers in a state dict.

    Raises:
        InputError: the parameters of such a layer are not complete, or do not fit together.
    """
    prefixes = [name.removesuffix(BASE) for name in state if name.endswith(f".{BASE}")]
    for prefix in prefixes:
        base, a, b = state[prefix + BASE], state.get(prefix + DOWN), state.get(prefix + UP)
        if (
            (a is None or b is None)
            or not (base.is_floating_point() and base.dtype == a.dtype == b.dtype and a.dim() == b.dim() == 2)
            or base.shape != (len(b), a.shape[1])
            or len(a) != b.shape[1]
        ):
            raise InputError(
                f"{printable(prefix)}{BASE}, {DOWN} and {UP} must be floating-point matrices (O, I), (N, I) and (O, N) "
                "of one type: use another copy of the file"
            )
    return prefixes


def add_low_rank(model: nn.Module, names: list[str], rank: int) -> None:
    """Replace the linear layers of those names by :class:`LowRankLinear` (in-place); one of two names stays one.

    Raises:
        InputError: a layer has a hook, which would be lost.
    """
    built: dict[nn.Module, LowRankLinear] = {}
    for name in names:
        layer = model.get_submodule(name)
        if layer not in built:
            assert isinstance(layer, nn.Linear)
            if layer._forward_pre_hooks or layer._forward_hooks:
                raise InputError(
                    f"a plug-in changes the inputs or outputs of {name}, as plugins.context_broadcasting.position=mid "
                    "does, which low-rank changes cannot: choose another position, or freeze.lora=null"
                )
            built[layer] = LowRankLinear(layer, rank)
        model.set_submodule(name, built[layer])
