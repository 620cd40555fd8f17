"""Data of classifiers, masked autoencoders and contrastive pre-training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from detr_bf.assembly.training import choose_grey_bits, epoch_batches, precision_of
from detr_bf.classification.augmentation import (
    BatchMix,
    EvalTransform,
    ImageTransform,
    Mix,
    TrainTransform,
    ViewPairTransform,
    collate_mixed,
)
from detr_bf.classification.batch import LabelledImages, ViewPairs
from detr_bf.classification.checks import examine_images
from detr_bf.classification.config import ClassifierConfig, ImageTransformConfig
from detr_bf.classification.contrastive_config import ContrastiveConfig, ViewTransformConfig
from detr_bf.classification.data import (
    FileImages,
    LabelledImageSet,
    LabelledSplits,
    kept_indices,
    require_no_flips,
    require_two_classes,
)
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.classification.network import build_network
from detr_bf.classification.sources import read_splits
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.data.batches import SameSizeBatches
from detr_bf.data.checks.annotations import Report
from detr_bf.data.loader import BatchLoader, make_loader
from detr_bf.engine import EvaluationLoop
from detr_bf.plugins import mixing_patch_size, patch_cutmix

MakeImageBatches = Callable[..., Iterator[LabelledImages]]  # (epoch, first batch, phase) -> batches from there on
ImageConfig = ClassifierConfig | MaskedConfig | ContrastiveConfig

_NAMED = 10  # most classes that a message names


@dataclass(frozen=True)
class ImageSplits:
    """Training and validation data of a run."""

    train: LabelledImageSet  # reduced by data.per_class and data.long_tail
    val: LabelledImageSet
    class_map: ClassMap

    @property
    def class_counts(self) -> tuple[int, ...]:
        """Number of training images of each class."""
        return self.train.class_counts


def build_image_splits(config: ImageConfig) -> ImageSplits:
    """Build both splits with their transforms; the training split is reduced by per_class and long_tail.

    Raises:
        InputError: the data cannot be read or fetched, or a class has no training images.
    """
    splits, data = read_image_splits(config), config.data
    classes = splits.class_map
    if isinstance(config, ClassifierConfig):
        require_two_classes(splits)
        require_no_flips(splits, data.name, data.transforms.horizontal_flip)
    transform, val_transform = build_image_transforms(config)
    train = LabelledImageSet(
        splits.train, classes, transform, seed=config.seed, replace_unreadable=data.max_unreadable > 0
    )
    if empty := [name for name, count in zip(classes.names, train.class_counts, strict=True) if not count]:
        raise InputError(
            f"{splits.train.origin}: {len(empty)} of {classes.num_classes} classes have no training images, "
            f"such as {', '.join(empty[:_NAMED])}: add images of them, or remove the classes from both splits"
        )
    return ImageSplits(train, LabelledImageSet(splits.val, classes, val_transform), classes)


def build_image_transforms(config: ImageConfig) -> tuple[ImageTransform, ImageTransform]:
    """Build the transforms of training and of validation; of pairs of views they are the same."""
    if isinstance(config, ContrastiveConfig):
        views = build_view_transform(config.data.transforms)
        return views, views
    transforms = config.data.transforms
    return build_image_train_transform(transforms), build_image_eval_transform(transforms)


def build_view_transform(transforms: ViewTransformConfig) -> ViewPairTransform:
    """Build the augmentation of two views."""
    return ViewPairTransform(
        (transforms.size, transforms.size),
        area=transforms.area,
        color_jitter=transforms.color_jitter,
        jitter_prob=transforms.jitter_prob,
        grey=transforms.grey,
        blur=transforms.blur,
        solarize=transforms.solarize,
        horizontal_flip=transforms.horizontal_flip,
        interpolation=transforms.interpolation,
        mean=transforms.mean,
        std=transforms.std,
    )


def read_image_splits(config: ImageConfig) -> LabelledSplits:
    """Return the splits of the data set, the training split reduced by per_class and long_tail.

    ``data.grey_bits`` become those of the training images if they are not given (in-place).

    Raises:
        InputError: the data cannot be read or fetched.
    """
    data, splits = config.data, _read(config)
    train, val = splits.train.images, splits.val.images
    if isinstance(train, FileImages):
        choose_grey_bits(data, (train.folder, train.names))
        assert isinstance(val, FileImages), "both splits are of one kind"
        train, val = (replace(images, grey_bits=data.grey_bits) for images in (train, val))
        splits = replace(splits, train=replace(splits.train, images=train), val=replace(splits.val, images=val))
    kept = kept_indices(
        splits.train.labels,
        splits.class_map.num_classes,
        per_class=data.per_class,
        imbalance=data.long_tail.imbalance,
        order=data.long_tail.order,
        seed=config.seed if data.subset_seed is None else data.subset_seed,
    )
    return replace(splits, train=splits.train.subset(kept)) if len(kept) < len(splits.train) else splits


def _read(config: ImageConfig) -> LabelledSplits:
    data = config.data
    options: dict[str, Any] = {"labelled": False}
    if isinstance(config, ClassifierConfig):
        options = {"val_subset": config.data.val_subset, "val_labels": config.data.val_labels}
    return read_splits(data.name, data.root, data.train, data.val, data.max_pixels, **options)


def build_image_train_transform(transforms: ImageTransformConfig) -> TrainTransform:
    """Build the training transform."""
    return TrainTransform(
        (transforms.size, transforms.size),
        crop=transforms.crop,
        area=transforms.area,
        padding=transforms.padding,
        horizontal_flip=transforms.horizontal_flip,
        color_jitter=transforms.color_jitter,
        auto_augment=transforms.auto_augment,
        cutout=transforms.cutout,
        erase_prob=transforms.erase,
        interpolation=transforms.interpolation,
        mean=transforms.mean,
        std=transforms.std,
    )


def build_image_eval_transform(transforms: ImageTransformConfig) -> EvalTransform:
    """Build resize and centre crop; the aspect ratio is kept if training uses random resized crops.

    Random resized crops enlarge images, so evaluation then crops 7/8 of each side by default.
    """
    share = transforms.eval_crop
    if share is None:
        share = 0.875 if transforms.crop == "resized" else 1.0
    return EvalTransform(
        (transforms.size, transforms.size),
        share=share,
        keep_ratio=transforms.crop == "resized",
        interpolation=transforms.interpolation,
        mean=transforms.mean,
        std=transforms.std,
    )


def train_batches(config: ImageConfig, splits: ImageSplits, device: torch.device) -> tuple[MakeImageBatches, int]:
    """Return (epoch, first batch, phase) -> training batches of this rank from there on, and the batches per epoch."""
    batches = epoch_batches(config, len(splits.train), repeated_augment=config.data.repeats)
    mix = build_mix(config, splits.class_map.num_classes)
    collate = _batch_type(config).collate if mix is None else partial(collate_mixed, mix)
    load = _loader(config, splits.train, collate, device)
    return lambda epoch, start, phase=None: iter(load(batches(epoch=epoch, start_batch=start))), len(batches(epoch=0))


def _batch_type(config: ImageConfig) -> type[LabelledImages]:
    return ViewPairs if isinstance(config, ContrastiveConfig) else LabelledImages


def _loader(
    config: ImageConfig, data: LabelledImageSet, collate: Callable[..., LabelledImages], device: torch.device
) -> Callable[..., BatchLoader[LabelledImages]]:
    workers, pin_memory = config.data.workers, device.type == "cuda"
    return partial(make_loader, data, collate=collate, workers=workers, pin_memory=pin_memory)


def val_loop(config: ImageConfig, splits: ImageSplits, device: torch.device) -> EvaluationLoop:
    """Build the evaluation loop over the validation split, divided among ranks."""
    batches = partial(
        SameSizeBatches,
        [(0, 0)] * len(splits.val),  # all images have one size after the transform
        config.eval.batch_size,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    load = _loader(config, splits.val, _batch_type(config).collate, device)
    return EvaluationLoop(
        make_batches=lambda start: iter(load(batches(start_batch=start))),
        num_batches=len(batches()),
        device=device,
        precision=precision_of(config, device),
    )


@dataclass(frozen=True)
class PatchMixing:
    """DiversePatch's CutMix with whole patches."""

    patch_size: tuple[int, int]
    num_classes: int
    smoothing: float

    def __call__(self, batch: LabelledImages, seed: int) -> LabelledImages:
        mixed = patch_cutmix(
            batch.images,
            batch.targets.labels,
            patch_size=self.patch_size,
            num_classes=self.num_classes,
            smoothing=self.smoothing,
            generator=torch.Generator().manual_seed(seed),
        )
        targets = replace(batch.targets, soft_labels=mixed.soft_labels, patch_labels=mixed.patch_labels)
        return replace(batch, images=mixed.images, targets=targets)


def build_mix(config: ImageConfig, num_classes: int) -> Mix | None:
    """Build the mixing of training batches: DiversePatch's CutMix, or mixup and CutMix; None if all are off.

    The soft labels are smoothed by ``loss.label_smoothing`` for cross-entropy, as the loss does without mixing; for
    Balanced Softmax they are not.
    """
    if not isinstance(config, ClassifierConfig):
        return None
    settings = config.data.mix
    smoothing = config.loss.label_smoothing if config.loss.name == "cross_entropy" else 0.0
    if config.plugins.diverse_patch.enabled and config.plugins.diverse_patch.patch_cutmix:
        return PatchMixing(patch_size(config), num_classes, smoothing)
    if not settings.probability or not (settings.mixup or settings.cutmix):
        return None
    return BatchMix(
        num_classes,
        mixup=settings.mixup,
        cutmix=settings.cutmix,
        probability=settings.probability,
        switch=settings.switch,
        smoothing=smoothing,
    )


def patch_size(config: ClassifierConfig) -> tuple[int, int]:
    """Return height and width in pixels of the patches that DiversePatch mixes.

    Raises:
        InputError: the network does not fit DiversePatch.
    """
    model = config.model
    with torch.device("meta"):  # no memory for the weights
        network = build_network(
            model.name, num_classes=0, image_size=config.data.transforms.size, options=model.options
        )
    return mixing_patch_size(network)


def check_image_data(config: ImageConfig) -> Report:
    """Check the complete data of a config, before it is reduced."""
    classify = isinstance(config, ClassifierConfig)
    return examine_images(_read(config), classify=classify, workers=max(1, config.data.workers))
