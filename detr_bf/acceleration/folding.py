"""Norms with fixed statistics that are computed by the convolutions before them.

Such a norm multiplies each channel by a constant and adds one: a convolution with scaled weights and a bias does the
same without another pass over its output. Frozen norms are always computed so, batch norms in evaluation without
gradients.

Limits: a compiled part must hold a convolution together with its norm. Without gradients the scaled weights are kept
until a tensor changes that they were computed from; torch does not count changes through ``tensor.data`` or NumPy,
those of the running statistics in training, nor those of fused optimizers. The weights are released in every call with
gradients or in training mode; other such changes between two calls without gradients are not noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from timm.layers.norm_act import BatchNormAct2d, FrozenBatchNormAct2d
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torchvision.ops import FrozenBatchNorm2d

from detr_bf.acceleration import onednn

TRIAL_SIDES = (64, 256)  # pixels of the image with which the order of the layers is found; some need the larger one
FROZEN = (FrozenBatchNorm2d, FrozenBatchNormAct2d)


class _Weights(NamedTuple):
    """Weights and bias of a convolution, with the state of the tensors that they were computed from."""

    state: tuple[object, ...]
    sources: tuple[Tensor, ...]  # keep the memory, so that no other tensor gets the same address
    weight: Tensor
    bias: Tensor


class AcceleratedConvolution:
    """``_conv_forward`` of a convolution, with the norm after it if there is one; copies keep no weights."""

    def __init__(self, module: nn.Conv2d, norm: nn.Module | None) -> None:
        self.module, self.norm = module, norm
        self.kept: _Weights | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "kept": None}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            return type(self.module)._conv_forward(self.module, x, weight, bias)
        if self.norm is not None and _is_folded(self.norm):
            weight, bias = self._folded(self.norm, weight, bias)
        else:
            self.kept = None
        return onednn.convolution(self.module, x, weight, bias)

    def _folded(self, norm: Any, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the kept weights and bias if their sources are unchanged, else new ones."""
        sources = [weight, norm.weight, norm.bias, norm.running_mean, norm.running_var]
        sources += [] if bias is None else [bias]
        kept = None
        # The changes of inference tensors are not counted.
        if not (torch.is_grad_enabled() or onednn.is_transformed() or any(tensor.is_inference() for tensor in sources)):
            kept, state = self.kept, tuple((tensor.data_ptr(), tensor._version, tensor.dtype) for tensor in sources)
            if kept is None or kept.state != state:
                kept = _Weights(state, tuple(tensor.detach() for tensor in sources), *_fold(norm, weight, bias))
        self.kept = kept
        return _fold(norm, weight, bias) if kept is None else (kept.weight, kept.bias)


def passed(norm: Any, x: Tensor) -> Tensor:
    """Return what a norm still has to compute after its convolution: timm's norms have activations."""
    if torch.compiler.is_compiling() or not _is_folded(norm):
        result: Tensor = type(norm).forward(norm, x)
        return result
    return norm.act(norm.drop(x)) if isinstance(norm, (FrozenBatchNormAct2d, BatchNormAct2d)) else x


def pairs(model: nn.Module, network: nn.Module | None) -> dict[nn.Module, nn.Module]:
    """Map convolutions to the norms that alone get their outputs.

    Args:
        model: in each ``nn.Sequential`` of it, a batch norm after a convolution is found.
        network: part that accepts images with the channels of its first convolution; its norms are found with a small
            image.
    """
    found = dict(() if network is None else _pairs_of_trial(network))
    for module in model.modules():
        if type(module).forward is nn.Sequential.forward:
            found |= {
                conv: norm
                for conv, norm in pairwise(module.children())
                if type(conv) is nn.Conv2d and _can_be_folded(norm)
            }
    return found


def _can_be_folded(norm: nn.Module) -> bool:
    return isinstance(norm, FROZEN) or (isinstance(norm, nn.BatchNorm2d) and norm.affine)


def _is_folded(norm: Any) -> bool:
    """Return whether the convolution computes the norm: it is frozen, or in evaluation and gradients are off."""
    if isinstance(norm, FROZEN):
        return True
    return not (torch.is_grad_enabled() or norm.training or norm.running_mean is None)


def _fold(norm: Any, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights (O, C / groups, kh, kw) and bias (O,) of a convolution and the norm after it."""
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    mean = norm.running_mean if bias is None else norm.running_mean - bias
    return (weight * scale[:, None, None, None]).to(weight.dtype), (norm.bias - mean * scale).to(weight.dtype)


class _Readers(TorchFunctionMode):
    """Collect all tensors that functions outside the norms are called with, alive so that no id is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = 0  # norms that are running
        self.read: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.norms:
            self.read += tree_leaves((args, kwargs))
        return func(*args, **(kwargs or {}))


def _pairs_of_trial(network: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield convolutions and the norms that alone get their outputs, found with a small image."""
    if not any(_can_be_folded(module) for module in network.modules()):
        return
    outputs: list[tuple[nn.Module, Tensor]] = []
    inputs: list[tuple[nn.Module, Tensor]] = []
    readers = _Readers()

    def convolved(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = type(module)._conv_forward(module, x, weight, bias)
        if weight is module.weight and bias is module.bias:  # not standardised ones
            outputs.append((module, output))
        return output

    def enter(norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs.append((norm, given[0]))
        readers.norms += 1

    def leave(*_: Any) -> None:
        readers.norms -= 1

    modes = {module: module.training for module in network.modules()}
    hooks = []
    for module in modes:
        if isinstance(module, nn.Conv2d):
            module._conv_forward = partial(convolved, module)  # type: ignore[method-assign]
        elif _can_be_folded(module):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    parameter = next(network.parameters())
    first = next((module for module in modes if isinstance(module, nn.Conv2d)), None)
    channels = 3 if first is None else first.in_channels
    try:
        for side in TRIAL_SIDES:
            for collected in (outputs, inputs, readers.read):
                collected.clear()
            readers.norms = 0
            with torch.no_grad(), readers, suppress(RuntimeError, AssertionError):
                result = network.eval()(parameter.new_zeros(1, channels, side, side))
                break
        else:  # the network accepts no such image, and keeps its norms
            return
    finally:
        for module, mode in modes.items():
            module.training = mode
            if isinstance(module, nn.Conv2d):
                del module._conv_forward
        for hook in hooks:
            hook.remove()
    read = {id(leaf) for leaf in (*readers.read, *tree_leaves(result))}
    found = [(source, norm) for norm, given in inputs for source, it in outputs if it is given and id(it) not in read]
    used = [id(module) for pair in found for module in pair]
    called = [id(module) for module, _ in (*outputs, *inputs)]
    yield from (pair for pair in found if all(used.count(id(it)) == called.count(id(it)) == 1 for it in pair))
