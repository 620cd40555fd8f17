"""Backbone: padded images to feature maps with padding masks; and torchvision's ResNets as its network.

Shape legend: B images, R rows (streams x images), H x W pixels of the padded batch, h x w and C the height, width and
channels of one level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet as torchvision_resnet
from torchvision.models._api import WeightsEnum

from detr_bf.backbones.weights import download_failed, load_network_weights, read_network_file
from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.errors import InputError
from detr_bf.common.structures import FeatureMap, resize_mask

# The IMAGENET1K_V1 weights are those that DETR and its successors start from.
RESNETS: dict[str, tuple[Callable[..., torchvision_resnet.ResNet], WeightsEnum]] = {
    "resnet18": (torchvision_resnet.resnet18, torchvision_resnet.ResNet18_Weights.IMAGENET1K_V1),
    "resnet34": (torchvision_resnet.resnet34, torchvision_resnet.ResNet34_Weights.IMAGENET1K_V1),
    "resnet50": (torchvision_resnet.resnet50, torchvision_resnet.ResNet50_Weights.IMAGENET1K_V1),
    "resnet101": (torchvision_resnet.resnet101, torchvision_resnet.ResNet101_Weights.IMAGENET1K_V1),
}
STEM = ("conv1", "bn1", "relu", "maxpool")
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def normalize(images: Tensor, padding_mask: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Standardise each channel, then set padding to 0, as DETR's transforms do.

    Args:
        images: (B, C, H, W), uint8 or float, 0 to 255; C is 3 except with other channels.
        padding_mask: (B, H, W) bool, True = padding.
        mean: (C, 1, 1) float, in units of 0 to 255; its dtype is the result's.
        std: (C, 1, 1) float, likewise.

    Returns:
        (B, C, H, W) float.
    """
    pixels = images.to(mean.dtype, copy=True)  # changed in place: new memory for each result takes most of the time
    return pixels.sub_(mean).div_(std).masked_fill_(padding_mask[:, None], 0.0)


@dataclass(frozen=True)
class Network:
    """A network up to the deepest feature map in use, with its channels, strides and normalisation."""

    body: nn.Module  # (B, 3, H, W) normalised images to one (B, C, h, w) map per level in use, shallow to deep
    channels: tuple[int, ...]  # of each level in use
    strides: tuple[int, ...]  # of each level in use, pixels per cell
    stages: tuple[str, ...]  # submodules of `body` that end a stage, from the stem to the deepest
    mean: tuple[float, ...]  # per colour channel, in fractions of full brightness
    std: tuple[float, ...]
    reads_padding: bool = False  # `body` also receives the mask (B, H, W); its maps may extend beyond the images
    blocks: int = 0  # blocks of a plain vision transformer up to the last map; `body` also receives batch attention
    block_dim: int = 0  # channels of the tokens between them


@dataclass(frozen=True)
class VitOptions:
    """Settings of a plain vision transformer that its weights do not determine.

    Args:
        window: side of the windows of attention, in patches; 0: every block attends to the whole image.
        global_blocks: blocks, from 0, that attend to the whole image nevertheless; empty: four, evenly spaced, the last
            block among them (section 3).
        maps: blocks, from 0, whose outputs are the feature maps, all of the stride of a patch (RF-DETR); empty: the
            last one, of which maps of other strides are made.
        windows: with ``maps``, the number of windows per side of an image.
        class_token: with ``maps``, keep the class and register tokens; false: patches alone (LW-DETR).
        antialias: interpolate the learned positions with antialiasing (DINOv2, RF-DETR).
        options: further arguments of ``timm.create_model``, such as ``patch_size``.
    """

    window: int = 0
    global_blocks: Sequence[int] = field(default_factory=list)
    maps: Sequence[int] = field(default_factory=list)
    windows: int = 1
    class_token: bool = True
    antialias: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_VIT = VitOptions()


def select_levels(available: Mapping[int, int], strides: Sequence[int], name: str) -> list[int]:
    """Return the levels of the given strides, shallow to deep.

    Args:
        available: stride in pixels to level.
        strides: in ascending order.
        name: name of the network, for messages.

    Raises:
        InputError: no stride, an unknown stride, or strides that do not ascend.
    """
    known = f"{name} has feature maps of strides {sorted(available)}"
    if not strides or list(strides) != sorted(set(strides)):
        raise InputError(f"strides={list(strides)}: expected one or more, in ascending order; {known}")
    if unknown := [stride for stride in strides if stride not in available]:
        raise InputError(f"strides={list(strides)}: there is no stride {unknown[0]}; {known}")
    return [available[stride] for stride in strides]


def check_consecutive(all_strides: Sequence[int], strides: Sequence[int], name: str) -> None:
    """Raise InputError unless ``strides`` are the last of ``all_strides``: a mask head refines them step by step."""
    if list(all_strides[-len(strides) :]) != list(strides):
        raise InputError(
            f"strides={list(strides)} with masks: {name} has feature maps of strides {list(all_strides)} up "
            "to there, and a mask head needs all of them from the first chosen one on"
        )


def freeze_stages(network: Network, count: int) -> None:
    """Freeze all parameters registered up to the end of stage number ``count``, counted from 1.

    Raises:
        InputError: there are fewer stages than ``count``, or it is negative.
    """
    if not 0 <= count <= len(network.stages):
        raise InputError(f"frozen_stages={count}: this network has {len(network.stages)} stages; give 0 to that")
    stage_of = parameter_stages(network.body, network.stages)
    for parameter in network.body.parameters():
        parameter.requires_grad_(parameter.requires_grad and stage_of[id(parameter)] >= count)


def parameter_stages(body: nn.Module, stages: Sequence[str]) -> dict[int, int]:
    """Return the stage of each parameter by its ``id()``, from 0; after the end of the last stage it is their number.

    Args:
        stages: submodules of ``body`` that end a stage, in their order.
    """
    names = [name for name, _ in body.named_modules()]
    assert set(stages) <= set(names), f"no submodules {sorted(set(stages) - set(names))}"
    ends = [
        max(index for index, name in enumerate(names) if name == stage or name.startswith(f"{stage}."))
        for stage in stages
    ]
    found: dict[int, int] = {}
    for index, module in enumerate(body.modules()):
        stage = sum(end < index for end in ends)
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), stage)
    return found


class Backbone(nn.Module):
    """Normalisation on the device, a network, and a padding mask for each of its feature maps.

    ``channels`` and ``strides`` (pixels per cell) describe the feature maps, in ascending order of stride; ``stages``
    are the submodules of ``body`` that end a stage. ``batch_former``, None at first, works between the ``blocks`` of a
    plain vision transformer, whose tokens have ``block_dim`` channels.

    Args:
        reference: what the network sees of a reference image: ``none`` of it; ``stack``, the image and the reference as
            six channels, for which the first convolution gets weights of zero; or ``difference``, the image minus the
            reference instead of the image.
        channels: C of the images; for other numbers than 3 see :func:`set_channels`.
        mean: of each channel, in fractions of full brightness; None: those of the network, with other channels than 3
            their average.
        std: standard deviations, likewise.

    Raises:
        InputError: other channels than 3, or ``stack``, with a network whose first convolution does not have three
            channels or is frozen; ``mean`` or ``std`` have another length.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: Network,
        reference: str = "none",
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.body = network.body
        self.reads_padding = network.reads_padding
        self.reference = reference
        if channels != 3:
            set_channels(self.body, channels)
        if reference == "stack":
            add_reference_channels(self.body)
        self.channels = network.channels
        self.strides = network.strides
        self.stages = network.stages
        self.blocks, self.block_dim = network.blocks, network.block_dim
        self.batch_former: BatchFormerV2 | None = None
        # Not persistent: the settings determine them, and published checkpoints do not contain them.
        for name, given, own in (("mean", mean, network.mean), ("std", std, network.std)):
            if given is not None and len(given) != channels:
                raise InputError(f"{name}={list(given)}: expected {channels} values, one for each channel")
            values = torch.tensor(own if given is None else given)
            if len(values) != channels:  # the network's own, of RGB
                values = values.mean().expand(channels)
            self.register_buffer(name, 255.0 * values.view(channels, 1, 1), persistent=False)

    def forward(self, images: Tensor, padding_mask: Tensor, references: Tensor | None = None) -> tuple[FeatureMap, ...]:
        """Return the feature maps of (B, C, H, W) images, uint8 or float in 0 to 255, with a (B, H, W) bool mask.

        They have R rows, more than B if ``batch_former`` forks the batch.
        ``references`` are images of the same sizes, needed if ``reference`` is not ``none``.
        """
        pixels = normalize(images, padding_mask, self.mean, self.std)
        if self.reference != "none":
            assert references is not None, "a detector gives the references"
            others = normalize(references, padding_mask, self.mean, self.std)
            pixels = torch.cat([pixels, others], dim=1) if self.reference == "stack" else pixels - others
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        levels = self.maps(pixels, padding_mask)
        if not self.reads_padding:
            return tuple(FeatureMap(level, resize_mask(padding_mask, level.shape[-2:])) for level in levels)
        streams = 1 if self.batch_former is None else self.batch_former.num_streams
        if streams > 1:
            padding_mask = padding_mask.repeat(streams, 1, 1)
        masks = [padding_mask[:, ::stride, ::stride] for stride in self.strides]
        return tuple(
            FeatureMap(level[:, :, : mask.shape[1], : mask.shape[2]], mask, streams)
            for level, mask in zip(levels, masks, strict=True)
        )

    def maps(self, pixels: Tensor, padding_mask: Tensor | None = None) -> Sequence[Tensor]:
        """Normalised images (B, 3, H, W) and their mask (B, H, W) -> feature maps (R, C, h, w), from fine to coarse."""
        reads = self.reads_padding  # vision transformers, the bodies that batch attention can be in
        levels: Sequence[Tensor] = self.body(pixels, padding_mask, self.batch_former) if reads else self.body(pixels)
        return levels


def set_channels(body: nn.Module, channels: int) -> None:
    """Give the first convolution of a network another number of input channels (in-place), see :func:`widened`.

    Raises:
        InputError: it does not have three channels, or is frozen.
    """
    first = first_convolution(body)
    if first is None or first.in_channels != 3 or first.groups != 1:
        raise InputError(f"channels={channels} needs a network that begins with a convolution of three channels")
    if not first.weight.requires_grad and channels != 1:
        raise InputError(f"channels={channels}: the first convolution must learn the channels: set frozen_stages=0")
    first.weight = nn.Parameter(widened(first.weight.detach(), channels), first.weight.requires_grad)
    first.in_channels = channels


def widened(weight: Tensor, channels: int) -> Tensor:
    """Return the weights (D, 3, h, w) of a convolution of RGB for another number of channels, (D, C, h, w).

    With more than three channels the first three keep the weights of red, green and blue; all others, and one or two
    channels, get the mean of the three. The weights are then multiplied by 3 / C: their sum over the channels stays, so
    that an image whose normalised channels are all equal has the same response as a grey one had before. (timm's
    ``adapt_input_conv`` has the same factor, but repeats red, green and blue.)
    """
    kept = weight[:, : 3 if channels > 3 else 0]
    others = weight.mean(1, keepdim=True).expand(-1, channels - kept.shape[1], -1, -1)
    return torch.cat([kept, others], dim=1) * (3 / channels)


def add_reference_channels(body: nn.Module) -> None:
    """Give the first convolution of a network twice the input channels, the new ones with weights of zero (in-place).

    Raises:
        InputError: it is missing, or is frozen.
    """
    first = first_convolution(body)
    if first is None or first.groups != 1:
        raise InputError("reference=stack needs a network that begins with a convolution of all channels")
    if not first.weight.requires_grad:
        raise InputError("reference=stack: the first convolution must learn to see the reference: set frozen_stages=0")
    with torch.no_grad():
        first.weight = nn.Parameter(torch.cat([first.weight, torch.zeros_like(first.weight)], dim=1))
    first.in_channels *= 2


def first_convolution(body: nn.Module) -> nn.Conv2d | None:
    """Return the first convolution of a network; None without any."""
    return next((module for module in body.modules() if isinstance(module, nn.Conv2d)), None)


class ResNetBody(nn.Module):
    """A ResNet up to its deepest used stage; submodules keep torchvision's names.

    Args:
        resnet: network whose submodules are used.
        levels: stages whose output is returned, 1 to 4, ascending.
    """

    def __init__(self, resnet: nn.Module, levels: Sequence[int]) -> None:
        super().__init__()
        for name in (*STEM, *(f"layer{level}" for level in range(1, levels[-1] + 1))):
            self.add_module(name, resnet.get_submodule(name))
        self.outputs = frozenset(f"layer{level}" for level in levels)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) normalised images to one (B, C, h, w) map per level, shallow to deep."""
        maps = []
        for name, module in self.named_children():
            images = module(images)
            if name in self.outputs:
                maps.append(images)
        return maps


def build_resnet(name: str, *, weights: str, strides: Sequence[int], dilation: bool, finer: bool = False) -> Network:
    """Build a ResNet of ``RESNETS`` up to the stage of its largest stride.

    Args:
        name: key of ``RESNETS``.
        weights: ``none``, ``imagenet`` or a file with a classifier's state dict.
        strides: of the feature maps, among 4, 8, 16, 32; with ``dilation`` 4, 8, 16.
        dilation: DC5, the last stage keeps stride 16.
        finer: also return the maps of all stages before those.

    Raises:
        InputError: an unknown stride, dilation of a network without bottlenecks, or the weights are not available.
    """
    constructor, published = RESNETS[name]
    if dilation and name in ("resnet18", "resnet34"):
        raise InputError(f"dilation: {name} cannot be dilated; use resnet50 or resnet101, or set it to false")
    # Dilated, stages 3 and 4 both have stride 16; the deeper one is used.
    available = {4: 1, 8: 2, 16: 4} if dilation else {4: 1, 8: 2, 16: 3, 32: 4}
    title = f"{name} with dilation" if dilation else name
    levels = select_levels(available, strides, title)
    stage_strides = (4, 8, 16, 16 if dilation else 32)
    if finer:
        check_consecutive(stage_strides[: levels[-1]], strides, title)
        levels = list(range(1, levels[-1] + 1))
    resnet = constructor(replace_stride_with_dilation=[False, False, dilation])
    if weights == "imagenet":
        resnet.load_state_dict(download(published))
    elif weights != "none":
        load_network_weights(resnet, read_network_file(weights), classifier=("fc",), source=weights)
    widest = resnet.fc.in_features  # channels of stage 4; each stage before it has half as many
    return Network(
        body=ResNetBody(resnet, levels),
        channels=tuple(widest >> (4 - level) for level in levels),
        strides=tuple(stage_strides[level - 1] for level in levels),
        stages=("maxpool", *(f"layer{level}" for level in range(1, levels[-1] + 1))),
        mean=MEAN,
        std=STD,
    )


def download(published: WeightsEnum) -> dict[str, Tensor]:
    """Load the state dict of published weights from torch's cache or the network.

    Raises:
        InputError: neither has them.
    """
    try:
        return dict(published.get_state_dict(progress=True, check_hash=True, weights_only=True))
    except (OSError, RuntimeError) as error:  # no network (URLError is an OSError), disk full; hash mismatch
        raise download_failed(published.url, error) from error
