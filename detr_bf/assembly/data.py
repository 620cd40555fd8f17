"""The data of both splits."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import Sampler

from detr_bf.config import DetectionConfig
from detr_bf.config.detection import SplitConfig, TransformConfig
from detr_bf.data.batches import SampleKey
from detr_bf.data.coco import CocoDetection, Source
from detr_bf.data.loader import BatchLoader, make_loader
from detr_bf.data.transforms import SampleTransform, eval_transform, train_transform
from detr_bf.errors import InputError
from detr_bf.structures import Batch, ClassMap


def build_train_data(config: DetectionConfig) -> CocoDetection:
    """The training split, whose categories become the classes; with masks where the model has a mask head."""
    source = data_source(config, "train")
    return CocoDetection(
        source.images,
        source.annotations,
        _train_transform(config.data.transforms),
        seed=config.seed,
        masks=config.model.masks,
        panoptic=source.panoptic,
        replace_unreadable=config.data.max_unreadable > 0,
        max_pixels=config.data.max_pixels,
    )


def build_val_data(
    config: DetectionConfig, class_map: ClassMap, transform: SampleTransform | None = None, masks: bool = False
) -> CocoDetection:
    """The validation split with the model's classes; resized for evaluation unless ``transform`` is given."""
    source = data_source(config, "val")
    return CocoDetection(
        source.images,
        source.annotations,
        transform or build_eval_transform(config),
        class_map,
        masks=masks,
        panoptic=source.panoptic,
        max_pixels=config.data.max_pixels,
    )


def data_source(config: DetectionConfig, split: str) -> Source:
    """Folder, annotation file and, where it is set, panoptic folder of ``train`` or ``val``.

    A relative path that does not exist is looked for below $DETECTRON2_DATASETS, if that is set, as it is and without
    a leading ``data/``.

    Raises:
        InputError: one of the first two is not set, or what was looked for there is not there either.
    """
    paths: SplitConfig = getattr(config.data, split)
    missing = [f"data.{split}.{key}" for key in ("images", "annotations") if not getattr(paths, key)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        given = " ".join(f"{key}=PATH" for key in missing)
        reason = "; every run needs validation data, which its best checkpoint is chosen by" if split == "val" else ""
        raise InputError(f"{' and '.join(missing)} {verb} not set: give {given}, or set it in the config{reason}")
    images, annotations = (_located(f"data.{split}.{key}", getattr(paths, key)) for key in ("images", "annotations"))
    panoptic = _located(f"data.{split}.panoptic", paths.panoptic) if paths.panoptic else None
    return Source(images, annotations, panoptic)


def _located(setting: str, given: str) -> Path:
    """The path that a setting gives, by the rule of :func:`data_source`."""
    path, root = Path(given), os.environ.get("DETECTRON2_DATASETS")
    if not root or path.is_absolute() or path.exists():
        return path
    names = [path, *([path.relative_to("data")] if path.is_relative_to("data") else [])]
    places = [Path(root).expanduser() / name for name in names]
    for place in places:
        if place.exists():
            return place
    looked = ", ".join(map(str, [path.absolute(), *places]))
    raise InputError(f"{setting} is {given}, which does not exist; looked for {looked} ($DETECTRON2_DATASETS)")


def build_eval_transform(config: DetectionConfig) -> SampleTransform:
    """Resize only."""
    transforms = config.data.transforms
    return eval_transform(short_side=transforms.eval_short_side, max_size=transforms.max_size)


def _train_transform(transforms: TransformConfig) -> SampleTransform:
    return train_transform(
        short_sides=transforms.short_sides,
        max_size=transforms.max_size,
        horizontal_flip=transforms.horizontal_flip,
        random_crop=transforms.random_crop,
        crop_short_sides=transforms.crop_short_sides,
        crop_min=transforms.crop_min,
        crop_max=transforms.crop_max,
    )


def build_loader(
    config: DetectionConfig, device: torch.device
) -> Callable[[CocoDetection, Sampler[list[SampleKey]]], BatchLoader[Batch]]:
    """(data, batches) -> loader, with the workers of the config."""
    return partial(make_loader, collate=Batch.collate, workers=config.data.workers, pin_memory=device.type == "cuda")
