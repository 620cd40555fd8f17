"""Names of checkpoints that are trained inside detectron2: our own adapter's, and official DETR's wrapper.

Detectron2's ResNets are torchvision's under other names where their bottlenecks have the stride in the 3 x 3
convolution (``MODEL.RESNETS.STRIDE_IN_1X1: False``). This module needs no detectron2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from detr_bf.interop import official
from detr_bf.interop.layout import Layout
from detr_bf.interop.rules import Rule, rename, within

BODY = "backbone.body"
ADAPTER = "detector"  # the module of the adapter that holds ours


def adapter(_: Layout) -> Iterator[Rule]:
    """detr_bf.interop.detectron2, with a backbone of ours, or one of theirs that ours has no names for."""
    for module in (BODY, "tokens", "encoder", "decoder", "mask_head"):
        yield rename(f"{ADAPTER}.{module}", module)


def adapter_resnet(layout: Layout) -> Iterator[Rule]:
    """detr_bf.interop.detectron2 with a ResNet of detectron2."""
    yield from _with_resnet(adapter(layout), f"{ADAPTER}.{BODY}", layout)


def detr(layout: Layout) -> Iterator[Rule]:
    """facebookresearch/detr in d2/."""
    yield from within("detr", _with_resnet(official.detr(layout), "backbone.0.backbone", layout))


def detr_panoptic(layout: Layout) -> Iterator[Rule]:
    """facebookresearch/detr in d2/, with a mask head around the detector."""
    yield from within("detr", _with_resnet(official.detr_panoptic(layout), "detr.backbone.0.backbone", layout))


def _with_resnet(rules: Iterable[Rule], place: str, layout: Layout) -> Iterator[Rule]:
    """``rules`` with a ResNet of detectron2 at ``place`` as backbone."""
    yield from (rule for rule in rules if rule.ours != (BODY,))
    yield from _convolution(f"{place}.stem.conv1", "conv1", "bn1")
    for stage in range(1, 5):
        for block in range(layout.backbone_blocks):
            theirs, ours = f"{place}.res{stage + 1}.{block}", f"layer{stage}.{block}"
            yield from _convolution(f"{theirs}.shortcut", f"{ours}.downsample.0", f"{ours}.downsample.1")
            for number in range(1, 4):
                yield from _convolution(f"{theirs}.conv{number}", f"{ours}.conv{number}", f"{ours}.bn{number}")


def _convolution(theirs: str, convolution: str, norm: str) -> Iterator[Rule]:
    """A convolution that holds its own norm."""
    yield rename(theirs, f"{BODY}.{convolution}")
    yield rename(f"{theirs}.norm", f"{BODY}.{norm}")
