"""ResNet-vd, the backbone of RT-DETR (Zhao et al. 2023, arXiv 2304.08069), as timm's ``resnetNd`` with two differences.

The residual networks of He et al. 2018 (arXiv 1812.01187, "ResNet-D"): three 3 x 3 convolutions as the stem, average
pooling in the shortcuts. RT-DETR gives its networks the colours from 0 to 1 without a normalisation, and its 18 and 34
layer forms have a convolution in the first shortcut, where timm's have the identity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import timm
from torch import Tensor, nn

from detr_bf.backbones.backbone import Network
from detr_bf.backbones.timm_backbone import build_timm
from detr_bf.backbones.weights import load_network_weights, read_network_file

BASIC = ("resnet18vd", "resnet34vd")  # two convolutions a block, not three
FIRST_SHORTCUT = "layer1.0.downsample"
STEM_CONVOLUTIONS = (("conv1.0", "conv1.1"), ("conv1.3", "conv1.4"), ("conv1.6", "bn1"))  # each with its norm


def build_resnet_vd(name: str, *, weights: str, strides: Sequence[int], finer: bool = False) -> Network:
    """Build a ResNet-vd up to the stage of its largest stride.

    Args:
        name: ``resnet18vd``, ``resnet34vd``, ``resnet50vd`` or ``resnet101vd``.
        weights: ``none``; ``imagenet`` (timm's of ``resnetNd``; an added first shortcut starts as the identity); or a
            file with the state dict of timm's classifier or of the RT-DETR authors' backbone.
        strides: of the feature maps, among 2, 4, 8, 16, 32.
        finer: also return the maps of every finer stride, from 4 on.

    Raises:
        InputError: an unknown stride, or the weights are not available or of another network.
    """
    for_timm = weights if weights == "imagenet" else "none"
    network = build_timm(name.replace("vd", "d"), weights=for_timm, strides=strides, finer=finer)
    if name in BASIC and hasattr(network.body, "layer1"):
        network.body.get_submodule("layer1.0").downsample = _shortcut(network.body)
    if weights not in ("imagenet", "none"):
        _load_file(network.body, name, weights)
    return replace(network, mean=(0.0,) * 3, std=(1.0,) * 3)


def _shortcut(body: nn.Module) -> nn.Sequential:
    """Build a shortcut that starts as the identity, with the submodules of timm's other shortcuts."""
    channels = len(body.get_parameter("layer1.0.conv2.weight"))
    convolution = nn.Conv2d(channels, channels, 1, bias=False)
    nn.init.dirac_(convolution.weight)
    return nn.Sequential(nn.Identity(), convolution, nn.BatchNorm2d(channels))


def _load_file(body: nn.Module, name: str, weights: str) -> None:
    """Load a file of weights, by timm's names or by the authors'.

    Raises:
        InputError: it belongs to another network.
    """
    state: Mapping[str, Tensor] = read_network_file(weights)
    state = {timm_vd_name(key): value for key, value in state.items()}
    complete = timm.create_model(name.replace("vd", "d"))
    if name in BASIC:
        complete.get_submodule("layer1.0").downsample = _shortcut(complete)
    if name in BASIC and f"{FIRST_SHORTCUT}.1.weight" not in state:  # timm's classifier: keep the identity
        kept = complete.get_submodule(FIRST_SHORTCUT).state_dict()
        state = {**state, **{f"{FIRST_SHORTCUT}.{key}": value for key, value in kept.items()}}
    load_network_weights(complete, state, classifier=("fc",), source=weights)
    loaded = complete.state_dict()
    body.load_state_dict({key: loaded[key] for key in body.state_dict()})


def timm_vd_name(name: str) -> str:
    """Return timm's name of a tensor from its name in the RT-DETR authors' backbone; other names stay."""
    stem = re.match(r"conv1\.conv1_([123])\.(conv|norm)\.", name)
    if stem:
        return f"{STEM_CONVOLUTIONS[int(stem[1]) - 1][stem[2] == 'norm']}.{name[stem.end() :]}"
    block = re.match(
        r"res_layers\.(\d)\.blocks\.(\d+)\.(branch2[abc]|short(?:\.conv(?=\.\w+\.))?)\.(conv|norm)\.", name
    )
    if not block:
        return name
    stage, index, branch, kind = int(block[1]) + 1, block[2], block[3], block[4]
    if branch.startswith("short"):
        part = f"downsample.{1 if kind == 'conv' else 2}"
    else:
        part = f"{'conv' if kind == 'conv' else 'bn'}{'abc'.index(branch[-1]) + 1}"
    return f"layer{stage}.{index}.{part}.{name[block.end() :]}"
