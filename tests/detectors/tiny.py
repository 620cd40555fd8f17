"""Every detector with tiny parts, on tiny images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from detr_bf.backbones import Backbone
from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.structures import Batch, FeatureMap, Outputs, QueryGroup, Target
from detr_bf.detectors import Detector, Options
from detr_bf.detectors.conditional_detr import conditional_detr
from detr_bf.detectors.dab_deformable_detr import dab_deformable_detr
from detr_bf.detectors.dab_detr import dab_detr
from detr_bf.detectors.deformable_detr import deformable_detr
from detr_bf.detectors.detr import detr
from detr_bf.detectors.dfine import dfine
from detr_bf.detectors.dino import dino
from detr_bf.detectors.dn_detr import dn_detr
from detr_bf.detectors.groups import query_groups
from detr_bf.detectors.rfdetr import rfdetr
from detr_bf.detectors.rtdetr import rtdetr, rtdetrv2
from detr_bf.detectors.smca import smca
from detr_bf.detectors.smca_multi_scale import smca_multi_scale

IMAGES, CHANNELS, DIM, QUERIES, LOGITS, LAYERS = 2, 3, 32, 5, 4, 2
PATTERNS = 3


class Kind(NamedTuple):
    """Detector under test."""

    maps: int  # number of feature maps
    make: Callable[..., Detector]
    settings: tuple[str, ...] = ()  # config overrides besides the strides; model.name if it differs from the key
    groups: tuple[QueryGroup, ...] = ()  # further queries in training


FOCAL = ("loss.classification=focal",)
REFINE = ("model.name=deformable_detr", "model.deformable.box_refine=true")
DETECTORS = {
    "detr": Kind(1, detr),
    "conditional_detr": Kind(1, conditional_detr),
    "dab_deformable_detr": Kind(2, dab_deformable_detr, ("model.extra_levels=1", "model.deformable.box_refine=true")),
    "dab_detr": Kind(1, dab_detr, ("model.activation=prelu",)),
    "dab_detr_patterns": Kind(
        1, partial(dab_detr, patterns=PATTERNS), ("model.name=dab_detr", f"model.dab.patterns={PATTERNS}")
    ),
    "dino": Kind(2, dino, (*FOCAL, "model.extra_levels=1")),
    "dino_shared_heads": Kind(
        2,
        partial(dino, mixed_selection=False, token_class_head=False, token_box_head=False),
        (
            *FOCAL,
            "model.name=dino",
            "model.extra_levels=1",
            "model.dino.mixed_selection=false",
            "model.dino.token_class_head=false",
            "model.dino.token_box_head=false",
        ),
    ),
    "dn_detr": Kind(1, partial(dn_detr, groups=2), (*FOCAL, "model.denoising.groups=2")),
    "group_detr": Kind(
        1,
        conditional_detr,
        ("model.name=conditional_detr", "model.groups.group_detr=3"),
        query_groups(QUERIES, group_detr=3),
    ),
    "h_deformable_detr": Kind(
        2,
        partial(deformable_detr, box_refine=True, two_stage=True, mixed_selection=True, look_forward_twice=True),
        (
            *REFINE,
            "model.deformable.two_stage=true",
            "model.deformable.mixed_selection=true",
            "model.deformable.look_forward_twice=true",
            f"model.groups.one_to_many={{{{queries: {QUERIES - 1}, repeats: 2}}}}",
        ),
        query_groups(QUERIES, one_to_many=QUERIES - 1, repeats=2),
    ),
    "smca": Kind(1, partial(smca, stride=4), ("model.smca.stride={stride}",)),
    "smca_multi_scale": Kind(3, smca_multi_scale),
    "deformable_detr": Kind(2, deformable_detr, ("model.extra_levels=1",)),
    "deformable_detr_refine": Kind(2, partial(deformable_detr, box_refine=True), REFINE),
    "deformable_detr_two_stage": Kind(
        2, partial(deformable_detr, box_refine=True, two_stage=True), (*REFINE, "model.deformable.two_stage=true")
    ),
    "dfine": Kind(3, partial(dfine, points=[3, 2, 1]), (*FOCAL, "model.dfine.points=[3,2,1]")),
    "rfdetr": Kind(
        1,
        partial(rfdetr, cross_heads=8),
        (*FOCAL, "model.encoder_layers=0", "model.rfdetr.cross_heads=8", "model.groups.group_detr=2"),
        query_groups(QUERIES, group_detr=2),
    ),
    "rtdetr": Kind(3, rtdetr, FOCAL),
    "rtdetrv2": Kind(3, partial(rtdetrv2, points=[3, 2, 1]), (*FOCAL, "model.rtdetr.points=[3,2,1]")),
}


def settings_of(name: str, stride: int = 32) -> tuple[str, ...]:
    """Return settings that build the detector on a map of ``stride``, or on several maps from stride 8 on."""
    kind = DETECTORS[name]
    strides = [stride] if kind.maps == 1 else [8 * 2**level for level in range(kind.maps)]
    own = (setting.format(stride=stride) for setting in kind.settings)
    return (f"model.name={name}", f"model.backbone.strides={strides}", *own)


WITH_ENCODER = [name for name in DETECTORS if name != "rfdetr"]  # detectors with encoder layers
# Detectors with predictions of the encoder.
TWO_STAGE = (
    *("deformable_detr_two_stage", "dino", "dino_shared_heads", "h_deformable_detr"),
    *("rfdetr", "rtdetr", "rtdetrv2", "dfine"),
)
# Detectors whose output does not depend on padded cells: group norm and convolutions read padding.
BLIND_TO_PADDING = ("detr", "conditional_detr", "dab_detr", "dab_detr_patterns", "dn_detr", "group_detr", "smca")


class Averages(nn.Module):
    """Backbone without weights: means over cells of 4 x 4 pixels, 8 x 8, and so on."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, images: Tensor, padding_mask: Tensor) -> Sequence[FeatureMap]:
        pixels = images.to(torch.get_default_dtype()) / 255 * ~padding_mask[:, None]
        strides = [4 * 2**level for level in range(self.levels)]
        return [
            FeatureMap(nn.functional.avg_pool2d(pixels, stride, ceil_mode=True), padding_mask[:, ::stride, ::stride])
            for stride in strides
        ]


def model(name: str = "detr", backbone: Backbone | None = None, **changes: object) -> Detector:
    """Build a detector; without a ``backbone`` its maps have strides from 4 on."""
    torch.manual_seed(0)
    settings = {
        "num_logits": LOGITS,
        "hidden_dim": DIM,
        "heads": 2,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "feedforward_dim": 12,
        "num_queries": QUERIES,
        "groups": DETECTORS[name].groups,
    }
    settings |= changes
    if name not in WITH_ENCODER:
        settings["encoder_layers"] = 0
    levels = DETECTORS[name].maps
    if backbone is not None:
        return DETECTORS[name].make(backbone, backbone.channels[-levels:], Options(**settings))
    return DETECTORS[name].make(Averages(levels), [CHANNELS] * levels, Options(**settings))


def shaken(module: Detector, std: float = 0.3) -> Detector:
    """Make every parameter random, because parameters that start at zero would hide errors."""
    torch.manual_seed(2)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def batch_former(**changes: object) -> BatchFormerV2:
    return BatchFormerV2(DIM, **({"layers": [0], "num_encoder_layers": LAYERS} | changes))


def with_fixed_norms(module: Detector) -> Detector:
    """Make the batch norms use their running statistics, in training as well."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    return module


def images() -> Batch:
    """Return two images of 32 x 48 pixels with two objects and one; the second has 16 x 24 unpadded pixels."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (IMAGES, CHANNELS, 32, 48), generator=generator, dtype=torch.uint8)
    mask = torch.zeros(IMAGES, 32, 48, dtype=torch.bool)
    mask[1, 16:] = mask[1, :, 24:] = True
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.6], [0.2, 0.3, 0.1, 0.2], [0.6, 0.4, 0.5, 0.3]])
    labels = torch.tensor([0, LOGITS - 2, 1])
    targets = tuple(
        Target(i, boxes[own], labels[own], size, size)
        for i, (own, size) in enumerate(((slice(2), (32, 48)), (slice(2, 3), (16, 24))))
    )
    return Batch(pixels, mask, targets)


def outputs_of(module: Detector, batch: Batch | None = None) -> Outputs:
    torch.manual_seed(3)  # the noise of denoising
    return module(batch or images())


def influence(module: Detector, stream: int) -> Tensor:
    """Return the gradient of a function of the last layer's outputs of image 0 for the pixels of both: (B,) sums."""
    batch = images()
    pixels = batch.images.double().requires_grad_()
    outputs = outputs_of(module, replace(batch, images=pixels))
    row = stream * IMAGES
    (outputs.logits[-1, row].square().sum() + outputs.boxes[-1, row].square().sum()).backward()
    return pixels.grad.abs().flatten(1).sum(1)
