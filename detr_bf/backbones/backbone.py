"""From padded pixels to feature maps with padding masks, whatever network does the work.

Shape legend: B images, H x W pixels of the padded batch, h x w and C the height, width and channels of one level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from detr_bf.errors import InputError
from detr_bf.structures import FeatureMap


def normalize(images: Tensor, padding_mask: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Standardise each channel, then set padding to 0, which is where DETR's transforms put it.

    Args:
        images: (B, 3, H, W), uint8 or float, 0 to 255.
        padding_mask: (B, H, W) bool, True = padding.
        mean: (3, 1, 1) float, in units of 0 to 255; its dtype is the result's.
        std: (3, 1, 1) float, likewise.

    Returns:
        (B, 3, H, W) float.
    """
    return ((images.to(mean.dtype) - mean) / std).masked_fill(padding_mask[:, None], 0.0)


def resize_mask(padding_mask: Tensor, size: Sequence[int]) -> Tensor:
    """(B, H, W) bool to (B, h, w) bool, each cell taking the value of its nearest pixel."""
    return F.interpolate(padding_mask[None].float(), size=tuple(size), mode="nearest")[0].bool()


@dataclass(frozen=True)
class Network:
    """A network cut after the deepest feature map in use, with what is known about it."""

    body: nn.Module  # (B, 3, H, W) normalised images to one (B, C, h, w) map per level in use, shallow to deep
    channels: tuple[int, ...]  # of each level in use
    strides: tuple[int, ...]  # of each level in use, pixels per cell
    stages: tuple[str, ...]  # submodules of `body` that end a stage, from the stem to the deepest
    mean: tuple[float, ...]  # per colour channel, in fractions of full brightness
    std: tuple[float, ...]


def select_levels(available: Mapping[int, int], strides: Sequence[int], name: str) -> list[int]:
    """The levels with the wanted strides, shallow to deep.

    Args:
        available: stride in pixels to level.
        strides: wanted, in ascending order.
        name: of the network, for the message.

    Raises:
        InputError: no stride, an unknown stride, or strides that do not ascend.
    """
    known = f"{name} has feature maps of strides {sorted(available)}"
    if not strides or list(strides) != sorted(set(strides)):
        raise InputError(f"backbone strides {list(strides)}: expected one or more, in ascending order; {known}")
    if unknown := [stride for stride in strides if stride not in available]:
        raise InputError(f"backbone strides {list(strides)}: there is no stride {unknown[0]}; {known}")
    return [available[stride] for stride in strides]


def check_consecutive(all_strides: Sequence[int], strides: Sequence[int], name: str) -> None:
    """Raise InputError unless ``strides`` are the last of ``all_strides``: a mask head refines them step by step."""
    if list(all_strides[-len(strides) :]) != list(strides):
        raise InputError(
            f"model.masks=true with backbone strides {list(strides)}: {name} has feature maps of strides "
            f"{list(all_strides)} up to there, and none between the chosen ones may be left out"
        )


def freeze_stages(network: Network, count: int) -> None:
    """Switch off the gradients of all parameters registered up to the end of stage number ``count``, counted from 1.

    Raises:
        InputError: there are fewer stages than ``count``, or it is negative.
    """
    if not 0 <= count <= len(network.stages):
        raise InputError(
            f"backbone frozen_stages {count}: this network has {len(network.stages)} stages; give 0 to that"
        )
    if count == 0:
        return
    last = network.stages[count - 1]
    names = [name for name, _ in network.body.named_modules()]
    assert last in names, f"no submodule {last}"
    end = max(index for index, name in enumerate(names) if name == last or name.startswith(f"{last}."))
    for module in list(network.body.modules())[: end + 1]:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)


class Backbone(nn.Module):
    """Normalisation on the device, a network, and a padding mask for each of its feature maps.

    ``channels`` and ``strides`` (pixels per cell) tell of each feature map, in ascending order of stride.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.body = network.body
        self.channels = network.channels
        self.strides = network.strides
        # Not persistent: they follow from the name of the network, and published checkpoints do not hold them.
        self.register_buffer("mean", 255.0 * torch.tensor(network.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", 255.0 * torch.tensor(network.std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor, padding_mask: Tensor) -> tuple[FeatureMap, ...]:
        """Feature maps of (B, 3, H, W) images, uint8 or float in 0 to 255, with a (B, H, W) bool padding mask."""
        pixels = normalize(images, padding_mask, self.mean, self.std).contiguous(memory_format=torch.channels_last)
        return tuple(FeatureMap(level, resize_mask(padding_mask, level.shape[-2:])) for level in self.maps(pixels))

    def maps(self, pixels: Tensor) -> Sequence[Tensor]:
        """Normalised images (B, 3, H, W) -> feature maps (B, C, h, w), from fine to coarse."""
        levels: Sequence[Tensor] = self.body(pixels)
        return levels
