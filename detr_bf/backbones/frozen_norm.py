"""Frozen batch norms computed by the convolutions before them.

A frozen norm multiplies each channel by a constant and adds one: a convolution with scaled weights and a bias does the
same without another pass over its output. Names, weights and state dicts stay as they are.

Limits: the norms must not be replaced afterwards (the convolution would still apply the former one), and a compiled
part must hold a convolution together with its norm.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.norm_act import FrozenBatchNormAct2d
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torchvision.ops import FrozenBatchNorm2d

from detr_bf.backbones.same_padding import EndPaddedConv2d, pad_for
from detr_bf.transformer.convolution import FoldedWeights

TRIAL_SIDE = 64  # pixels of the image with which the order of the layers is found


class _NormedConv(nn.Conv2d):
    """Convolution that applies the frozen norm after it, except while torch compiles or exports."""

    followed_by: tuple[nn.Module]  # the norm; a tuple, so that it is not a submodule
    folded: FoldedWeights

    def with_norm(self, x: Tensor, padding: tuple[int, int] | None = None) -> Tensor:
        """Return the normalised convolution of (B, C, h, w) maps; ``padding`` replaces that of the convolution."""
        return self.folded.convolve(x, [(self, self.followed_by[0])], padding=padding)


class NormedConv2d(_NormedConv):
    """torch's convolution with the frozen norm after it."""

    def forward(self, input: Tensor) -> Tensor:  # name of the base class
        if torch.compiler.is_compiling():
            return super().forward(input)
        return self.with_norm(input)


class NormedEndPaddedConv2d(_NormedConv, EndPaddedConv2d):
    """timm's convolution with TensorFlow's padding, with the frozen norm after it."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return EndPaddedConv2d.forward(self, x)
        return self.with_norm(pad_for(self, x), (0, 0))


class PassedNorm2d(FrozenBatchNorm2d):
    """Identity in the place of torchvision's frozen norm, except while torch compiles or exports."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.compiler.is_compiling() else x


class PassedNormAct2d(FrozenBatchNormAct2d):
    """Activation of timm's frozen norm; with the norm itself while torch compiles or exports."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x) if torch.compiler.is_compiling() else self.act(self.drop(x))
        return output


CONVOLUTIONS = {nn.Conv2d: NormedConv2d, EndPaddedConv2d: NormedEndPaddedConv2d}
NORMS = {FrozenBatchNorm2d: PassedNorm2d, FrozenBatchNormAct2d: PassedNormAct2d}


def fold_frozen_norms(body: nn.Module) -> None:
    """Let the convolutions of ``body`` apply the frozen norms after them (in-place).

    A norm stays if its input is not the output of one convolution, if something else reads this output as well, and
    after a convolution that pads with other values than zeros or by name ("same").

    Args:
        body: accepts (B, 3, H, W) images; all submodules in training mode.
    """
    for convolution, norm in _pairs(body):
        if convolution.padding_mode != "zeros" or isinstance(convolution.padding, str):
            continue
        convolution.followed_by, convolution.folded = (norm,), FoldedWeights()  # type: ignore[assignment]
        convolution.__class__ = CONVOLUTIONS[type(convolution)]
        norm.__class__ = NORMS[type(norm)]


class _Readers(TorchFunctionMode):
    """Collect all tensors that functions outside frozen norms are called with, alive so that no id is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = 0  # frozen norms that are running
        self.read: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.norms:
            self.read += tree_leaves((args, kwargs))
        return func(*args, **(kwargs or {}))


def _pairs(body: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return convolutions and the frozen norms that alone get their outputs, found with a small image."""
    if not any(type(module) in NORMS for module in body.modules()):
        return []
    outputs: list[tuple[nn.Module, Tensor]] = []
    inputs: list[tuple[nn.Module, Tensor]] = []
    readers = _Readers()

    def enter(norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs.append((norm, given[0]))
        readers.norms += 1

    def leave(*_: Any) -> None:
        readers.norms -= 1

    hooks = []
    for module in body.modules():
        if type(module) in CONVOLUTIONS:
            hooks.append(module.register_forward_hook(lambda it, _, output: outputs.append((it, output))))
        elif type(module) in NORMS:
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    parameter = next(body.parameters())
    try:
        with torch.no_grad(), readers:
            result = body.eval()(parameter.new_zeros(1, 3, TRIAL_SIDE, TRIAL_SIDE))
    finally:
        body.train()
        for hook in hooks:
            hook.remove()
    read = {id(leaf) for leaf in (*readers.read, *tree_leaves(result))}
    pairs = [(source, norm) for norm, given in inputs for source, it in outputs if it is given and id(it) not in read]
    used = [id(module) for pair in pairs for module in pair]
    called = [id(module) for module, _ in (*outputs, *inputs)]
    return [pair for pair in pairs if all(used.count(id(it)) == called.count(id(it)) == 1 for it in pair)]
