"""Small residual networks for images of 32 x 32 pixels (He et al. 2016, CVPR, arXiv 1512.03385, section 4.2).

Shape legend: B images, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.common.errors import InputError


class BasicBlock(nn.Module):
    """Two convolutions and a parameter-free shortcut (option A): every ``stride``-th pixel, zeros as new channels."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _convolution(channels_in, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _convolution(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.new_channels = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C, H / stride, W / stride), rounded up."""
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        before, after = self.new_channels // 2, (self.new_channels + 1) // 2
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, after))
        return F.relu(shortcut + residual)


class CifarResNet(nn.Module):
    """Three stages of ``blocks`` blocks with the given ``channels``, at full, half and quarter size."""

    def __init__(self, blocks: int, num_classes: int, channels: Sequence[int] = (16, 32, 64)) -> None:
        super().__init__()
        first, second, third = channels
        self.conv1 = _convolution(3, first)
        self.bn1 = nn.BatchNorm2d(first)
        self.act1 = nn.ReLU()
        self.layer1 = _stage(blocks, first, first, stride=1)
        self.layer2 = _stage(blocks, first, second, stride=2)
        self.layer3 = _stage(blocks, second, third, stride=2)
        self.fc = nn.Linear(third, num_classes)

    def get_classifier(self) -> nn.Linear:
        """Return the linear classifier, like timm's models."""
        return self.fc

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, K)."""
        x = self.act1(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def cifar_resnet(depth: int, num_classes: int, width: int = 16, *, narrow: bool = False) -> CifarResNet:
    """Build ResNet-20, 32, 44, 56, ... of section 4.2.

    Args:
        depth: layers with weights, 6n + 2.
        num_classes: K.
        width: channels of the first stage; the second and third have 2 and 4 times as many.
        narrow: 3/4 of these channels in the second and third stage, for the experts of RIDE.

    Raises:
        InputError: ``depth`` is not 6n + 2, or there are no classes or channels.
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise InputError(f"a CIFAR ResNet has 6n + 2 layers, 20, 32, 44 or 56 in the paper; got depth={depth}")
    if num_classes < 1 or width < 1:
        raise InputError(f"num_classes={num_classes} and width={width} must be 1 or more")
    channels = (width, 3 * width // 2, 3 * width) if narrow else (width, 2 * width, 4 * width)
    return CifarResNet(blocks, num_classes, channels)


def _stage(blocks: int, channels_in: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(channels_in, channels, stride), *(BasicBlock(channels, channels) for _ in range(blocks - 1))
    )


def _convolution(channels_in: int, channels: int, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution
