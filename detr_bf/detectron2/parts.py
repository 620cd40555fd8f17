"""Pieces of the detectron2 architecture: the wrapped backbone, detector, criterion and postprocessing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from detectron2.data import MetadataCatalog
from detectron2.modeling import Backbone as ForeignBackbone
from torch import Tensor, nn

from detr_bf.assembly import (
    build_detector,
    build_detector_criterion,
    build_model,
    build_panoptic_postprocess,
    build_pixel_format,
    build_postprocess,
)
from detr_bf.backbones import Backbone
from detr_bf.backbones.backbone import Network, check_consecutive, select_levels
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.config import DetectionConfig
from detr_bf.losses.postprocess import PanopticPostprocess

PROBE_SIZE = 64  # pixels, side of the image for finding the parameters that the used maps depend on


class Detectron2Backbone(Backbone):
    """A detectron2 backbone with its normalisation, giving a padding mask for each feature map.

    Args:
        body: returns feature maps by name.
        strides: pixels per cell of the maps that become tokens, ascending.
        pixel_mean, pixel_std: per channel, in the channel order of the images, in units of 0 to 255.
        finer: also return every finer map of the body, as a mask head needs them.

    Raises:
        InputError: the body has no map of a stride, or with ``finer`` one of the finer maps is missing.
    """

    def __init__(
        self,
        body: ForeignBackbone,
        *,
        strides: Sequence[int],
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
        finer: bool = False,
    ) -> None:
        shapes = body.output_shape()
        names = {shape.stride: name for name, shape in shapes.items()}
        title = type(body).__name__
        select_levels({stride: stride for stride in names}, strides, title)
        used = sorted(stride for stride in names if stride <= max(strides)) if finer else list(strides)
        if finer:
            check_consecutive(used, strides, title)
        super().__init__(
            Network(
                body,
                channels=tuple(shapes[names[stride]].channels for stride in used),
                strides=tuple(used),
                stages=(),
                mean=tuple(value / 255 for value in pixel_mean),
                std=tuple(value / 255 for value in pixel_std),
            )
        )
        self.names = [names[stride] for stride in used]
        if len(used) < len(names):
            self._freeze_unused()

    def maps(self, pixels: Tensor, padding_mask: Tensor | None = None) -> Sequence[Tensor]:
        found = self.body(pixels)
        return [found[name] for name in self.names]

    def _freeze_unused(self) -> None:
        """Freeze parameters that only unused maps depend on: DDP in detectron2 waits for every trainable parameter."""
        learning = [parameter for parameter in self.body.parameters() if parameter.requires_grad]
        training = self.body.training
        self.body.eval()
        with torch.enable_grad():
            total = sum(level.sum() for level in self.maps(torch.zeros(1, 3, PROBE_SIZE, PROBE_SIZE)))
        self.body.train(training)
        if isinstance(total, Tensor) and total.requires_grad:
            reached = torch.autograd.grad(total, learning, allow_unused=True)
            for parameter, gradient in zip(learning, reached, strict=True):
                parameter.requires_grad_(gradient is not None)


def build_parts(
    config: DetectionConfig,
    num_classes: int,
    *,
    backbone: nn.Module | None,
    pixel_mean: Sequence[float],
    pixel_std: Sequence[float],
    input_format: str,
    panoptic_dataset: str | None,
    pretrained: bool,
) -> dict[str, Any]:
    """Return the keyword arguments of ``DetrBf``; see ``build_detr_bf`` in ``meta_arch.py``."""
    if input_format not in ("RGB", "BGR"):
        raise InputError(f"the channel order (INPUT.FORMAT) must be RGB or BGR, got {input_format}")
    build_pixel_format(config.data).check_rgb("detectron2 reads")
    if config.batch_former.until_epoch is not None:
        raise InputError(
            f"batch_former.until_epoch={config.batch_former.until_epoch} counts the epochs of detr-bf train, and "
            "detectron2 trains without epochs: leave it empty"
        )
    if config.batch_former.log_attention:
        raise InputError("batch_former.log_attention is logged by detr-bf train, not in detectron2: set it to false")
    if config.freeze.lora:
        raise InputError(
            f"freeze.lora={config.freeze.lora} is trained by detr-bf finetune, not in detectron2: leave it empty"
        )
    if backbone is None:
        detector = build_model(config, num_classes, pretrained=pretrained)
    else:
        body = Detectron2Backbone(
            backbone,
            strides=config.model.backbone.strides,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
            finer=config.model.mask_head == "detr",
        )
        detector = build_detector(config, num_classes, body)
    return {
        "detector": detector,
        "criterion": build_detector_criterion(config, detector),
        "postprocess": build_postprocess(config),
        "num_classes": num_classes,
        "panoptic": None if panoptic_dataset is None else _panoptic(config, num_classes, panoptic_dataset),
        "input_format": input_format,
        "batches_meet": config.batch_former.mixes_evaluated_images,
    }


def check_classes(datasets: Iterable[str], num_classes: int) -> None:
    """Compare the number of classes with the metadata of the data sets; data sets without metadata pass.

    Raises:
        InputError: a data set has another number of classes.
    """
    for name in datasets:
        metadata = MetadataCatalog.get(name)
        things, stuff = (metadata.get(f"{kind}_dataset_id_to_contiguous_id", {}) for kind in ("thing", "stuff"))
        known = len({*things.values(), *stuff.values()}) or len(metadata.get("thing_classes", ()))
        if known not in (0, num_classes):
            raise InputError(
                f"the data set {name} has {known} classes, the model {num_classes}: set "
                f"MODEL.DETR_BF.NUM_CLASSES {known} (model.num_classes={known}), or name other data sets in "
                "DATASETS.TRAIN and DATASETS.TEST (dataloader.train.dataset.names, dataloader.test.dataset.names)"
            )


def _panoptic(config: DetectionConfig, num_classes: int, dataset: str) -> PanopticPostprocess:
    if not config.model.masks:
        raise InputError("panoptic maps need a mask head: set MODEL.MASK_ON True (model.masks=True)")
    metadata = MetadataCatalog.get(dataset)
    things = set(metadata.get("thing_dataset_id_to_contiguous_id", {}).values())
    stuff = set(metadata.get("stuff_dataset_id_to_contiguous_id", {}).values())
    if things | stuff != set(range(num_classes)):
        raise InputError(
            f"the metadata of {dataset} list {len(things)} thing and {len(stuff)} stuff classes; their indices must be "
            f"0 to {num_classes - 1}, the classes of the model: register the data set with "
            "register_coco_panoptic and set MODEL.DETR_BF.NUM_CLASSES"
        )
    kinds = tuple(index in things for index in range(num_classes))
    indices = tuple(range(num_classes))
    return build_panoptic_postprocess(config, ClassMap(indices, tuple(map(str, indices)), kinds))
