"""What the architecture is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from detectron2.data import MetadataCatalog
from torch import nn

from detr_bf.assembly import (
    build_detector,
    build_detector_criterion,
    build_model,
    build_panoptic_postprocess,
    build_postprocess,
)
from detr_bf.config import DetectionConfig
from detr_bf.errors import InputError
from detr_bf.interop.detectron2.backbone import Detectron2Backbone
from detr_bf.postprocess import PanopticPostprocess
from detr_bf.structures import ClassMap


def parts(
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
    """The arguments of :class:`DetrBf`; see :func:`build_detr_bf`."""
    if input_format not in ("RGB", "BGR"):
        raise InputError(f"the order of the channels must be RGB or BGR, got {input_format}")
    if backbone is None:
        detector = build_model(config, num_classes, pretrained=pretrained)
    else:
        body = Detectron2Backbone(
            backbone,
            strides=config.model.backbone.strides,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
            finer=config.model.masks,
        )
        detector = build_detector(config, num_classes, body)
    return {
        "detector": detector,
        "criterion": build_detector_criterion(config, detector),
        "postprocess": build_postprocess(config),
        "num_classes": num_classes,
        "panoptic": None if panoptic_dataset is None else _panoptic(config, num_classes, panoptic_dataset),
        "input_format": input_format,
        "batches_meet": config.batch_former.enabled and config.batch_former.mode == "mini_batch_inference",
    }


def check_classes(datasets: Iterable[str], num_classes: int) -> None:
    """Raise InputError where the metadata of a data set, as far as there are some, have another number of classes.

    Labels would lie outside the model's classes, or its detections outside those of the evaluator.
    """
    for name in datasets:
        metadata = MetadataCatalog.get(name)
        things, stuff = (metadata.get(f"{kind}_dataset_id_to_contiguous_id", {}) for kind in ("thing", "stuff"))
        known = len({*things.values(), *stuff.values()}) or len(metadata.get("thing_classes", ()))
        if known not in (0, num_classes):
            raise InputError(
                f"the data set {name} has {known} classes, the model knows {num_classes}: set "
                f"MODEL.DETR_BF.NUM_CLASSES {known} (model.num_classes={known}), or name the data sets of the model in "
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
            f"the metadata of {dataset} number {len(things)} things and {len(stuff)} stuff classes, and together these "
            f"are not 0 to {num_classes - 1}, the classes of the model: register the data set with "
            "register_coco_panoptic, which numbers both together, and set MODEL.DETR_BF.NUM_CLASSES"
        )
    kinds = tuple(index in things for index in range(num_classes))
    indices = tuple(range(num_classes))
    return build_panoptic_postprocess(config, ClassMap(indices, tuple(map(str, indices)), kinds))
