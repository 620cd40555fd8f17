"""TensorFlow's SAME padding, with the same cells for images of every size.

TensorFlow, and timm after it, divide the padding of a layer with a stride between both ends by the size of the input:
the same pixel may lie elsewhere in its cell when an image is one pixel larger. Here the padding at the upper left is
that of sizes that are multiples of the stride, and the rest lies at the lower right. The outputs are timm's to the bit
if the size is a multiple of all strides, and of the same shape otherwise.

Shape legend: B images, C channels, h x w cells.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from timm.layers.cond_conv2d import CondConv2d
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.pool2d_same import MaxPool2dSame
from timm.layers.std_conv import ScaledStdConv2dSame
from torch import Tensor, nn


def pad_for(layer: Any, x: Tensor) -> Tensor:
    """Pad maps (B, C, h, w) with zeros for a convolution that then gives ceil(h / stride) rows without padding itself.

    The amounts depend on the layer alone; the last rows and columns are not always read.
    """
    amounts: list[int] = []
    for kernel, stride, dilation in zip(layer.kernel_size, layer.stride, layer.dilation, strict=True):
        whole = dilation * (kernel - 1)
        before = max(whole + 1 - stride, 0) // 2
        amounts = [before, whole - before, *amounts]  # columns first
    return F.pad(x, amounts)


class EndPaddedConv2d(Conv2dSame):
    """timm's ``Conv2dSame`` with :func:`pad_for`."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Conv2d.forward(self, pad_for(self, x))


class EndPaddedScaledStdConv2d(ScaledStdConv2dSame):
    """timm's ``ScaledStdConv2dSame`` (NFNets) with :func:`pad_for`; it does not pad itself."""

    same_pad = False

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(pad_for(self, x))
        return output


class EndPaddedCondConv2d(CondConv2d):
    """timm's ``CondConv2d`` with :func:`pad_for`; it does not pad itself."""

    dynamic_padding = False

    def forward(self, x: Tensor, routing_weights: Tensor) -> Tensor:
        output: Tensor = super().forward(pad_for(self, x), routing_weights)
        return output


_END_PADDED: dict[type[nn.Module], type[nn.Module]] = {
    Conv2dSame: EndPaddedConv2d,
    ScaledStdConv2dSame: EndPaddedScaledStdConv2d,
    CondConv2d: EndPaddedCondConv2d,
}
_PADS_BY_SIZE = ("same_pad", "dynamic_padding")  # attributes of the classes that also serve for fixed padding


def pad_at_the_end(body: nn.Module) -> None:
    """Let the convolutions of ``body`` that pad by the size of their input use :func:`pad_for` (in-place).

    NASNet and PNASNet stay as they are: their first convolution does not pad, so that no size gives maps whose sides
    are multiples of the strides, and their pretrained weights know other cells.
    """
    if any(isinstance(module, MaxPool2dSame) for module in body.modules()):
        return
    for module in body.modules():
        found = _END_PADDED.get(type(module))
        if found is None or not all(vars(module).get(name, True) for name in _PADS_BY_SIZE):
            continue
        for name in _PADS_BY_SIZE:
            vars(module).pop(name, None)  # now False, of the class
        module.__class__ = found
