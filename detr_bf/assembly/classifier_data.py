"""The data of classifiers and of masked pre-training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils.data import Sampler

from detr_bf import distributed
from detr_bf.assembly.network import build_network
from detr_bf.assembly.training import PRECISIONS, epoch_batches
from detr_bf.classification.augmentation import EvalTransform, TrainTransform
from detr_bf.classification.checks import examine_images
from detr_bf.classification.labelled_images import LabelledImageSet
from detr_bf.classification.long_tail import kept_places
from detr_bf.classification.mixing import BatchMix, Mix, MixedBatch, WithKeys
from detr_bf.classification.sources import LabelledSplits, read_splits, require_no_flips, require_two_classes
from detr_bf.config import ClassifierConfig, MaskedConfig
from detr_bf.config.classification import ImageTransformConfig
from detr_bf.data.batches import SameSizeBatches, SampleKey
from detr_bf.data.checks.annotations import Report
from detr_bf.data.loader import BatchLoader, make_loader
from detr_bf.engine import EvaluationLoop
from detr_bf.errors import InputError
from detr_bf.labelled import LabelledImages
from detr_bf.plugins import mixing_patch_size, patch_cutmix
from detr_bf.structures import ClassMap

MakeBatches = Callable[[int, int], Iterator[LabelledImages]]  # epoch, first batch -> the batches from there on
ImageConfig = ClassifierConfig | MaskedConfig

_NAMED = 10  # classes that a message names


@dataclass(frozen=True)
class ImageSplits:
    """The data of a run."""

    train: LabelledImageSet  # thinned out where the config says so
    val: LabelledImageSet
    class_map: ClassMap

    @property
    def class_counts(self) -> tuple[int, ...]:
        """Training images of each class."""
        return self.train.class_counts


def build_image_splits(config: ImageConfig) -> ImageSplits:
    """Both splits, transformed; the training split has a long tail where the config says so.

    Raises:
        InputError: the data cannot be had, or a class is left without training images.
    """
    data = config.data
    found = read_splits(data.name, data.root, data.train, data.val, data.max_pixels)
    if isinstance(config, ClassifierConfig):
        require_two_classes(found)
        require_no_flips(found, data.name, data.transforms.horizontal_flip)
    kept = kept_places(
        found.train.labels,
        found.class_map.num_classes,
        per_class=data.per_class,
        imbalance=data.long_tail.imbalance,
        order=data.long_tail.order,
    )
    train = LabelledImageSet(
        found.train.subset(kept) if len(kept) < len(found.train) else found.train,
        found.class_map,
        build_image_train_transform(data.transforms),
        seed=config.seed,
        replace_unreadable=data.max_unreadable > 0,
    )
    _check_counts(found, train.class_counts)
    val = LabelledImageSet(found.val, found.class_map, build_image_eval_transform(data.transforms))
    return ImageSplits(train, val, found.class_map)


def _check_counts(found: LabelledSplits, counts: tuple[int, ...]) -> None:
    empty = [name for name, count in zip(found.class_map.names, counts, strict=True) if not count]
    if empty:
        few = ", ".join(empty[:_NAMED])
        raise InputError(
            f"{found.train.origin}: {len(empty)} of {len(counts)} classes have no training images, such as {few}: "
            "give images of them, or leave the classes out of both splits"
        )


def build_image_train_transform(transforms: ImageTransformConfig) -> TrainTransform:
    """Augmentation as the config says."""
    return TrainTransform(
        (transforms.size, transforms.size),
        crop=transforms.crop,
        area=transforms.area,
        padding=transforms.padding,
        horizontal_flip=transforms.horizontal_flip,
        color_jitter=transforms.color_jitter,
        auto_augment=transforms.auto_augment,
        erase=transforms.erase,
        interpolation=transforms.interpolation,
        mean=transforms.mean,
        std=transforms.std,
    )


def build_image_eval_transform(transforms: ImageTransformConfig) -> EvalTransform:
    """Resize and centre crop; images keep their ratio of sides if training takes random crops of them."""
    return EvalTransform(
        (transforms.size, transforms.size),
        share=_eval_share(transforms),
        keep_ratio=transforms.crop == "resized",
        interpolation=transforms.interpolation,
        mean=transforms.mean,
        std=transforms.std,
    )


def _eval_share(transforms: ImageTransformConfig) -> float:
    """Random crops show images enlarged, so evaluation cuts their edges off."""
    if transforms.eval_crop is not None:
        return transforms.eval_crop
    return 0.875 if transforms.crop == "resized" else 1.0


def train_batches(config: ImageConfig, splits: ImageSplits, device: torch.device) -> tuple[MakeBatches, int]:
    """(epoch, first batch) -> this process's training batches from there on, and how many an epoch has."""
    batches = epoch_batches(config, len(splits.train), repeats=config.data.repeats)
    load = _train_loader(config, splits, device)
    return (
        lambda epoch, start: iter(load(batches(epoch=epoch, start_batch=start))),
        len(batches(epoch=0)),
    )


def _train_loader(
    config: ImageConfig, splits: ImageSplits, device: torch.device
) -> Callable[[Sampler[list[SampleKey]]], BatchLoader[LabelledImages]]:
    workers, pin_memory = config.data.workers, device.type == "cuda"
    mix = build_mix(config, splits.class_map.num_classes)
    if mix is None:
        return partial(
            make_loader, splits.train, collate=LabelledImages.collate, workers=workers, pin_memory=pin_memory
        )
    collate = MixedBatch(mix, config.seed)
    return partial(make_loader, WithKeys(splits.train), collate=collate, workers=workers, pin_memory=pin_memory)


def val_loop(config: ImageConfig, splits: ImageSplits, device: torch.device) -> EvaluationLoop:
    """A model over the validation split, whose images the processes share."""
    batches = partial(
        SameSizeBatches,
        [(0, 0)] * len(splits.val),  # the transform makes all alike
        config.eval.batch_size,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    load = partial(
        make_loader,
        splits.val,
        collate=LabelledImages.collate,
        workers=config.data.workers,
        pin_memory=device.type == "cuda",
    )
    return EvaluationLoop(
        make_batches=lambda start: iter(load(batches(start_batch=start))),
        num_batches=len(batches()),
        device=device,
        precision=PRECISIONS[config.train.precision],
    )


@dataclass(frozen=True)
class PatchMixing:
    """DiversePatch's CutMix along the edges of patches."""

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
        targets = replace(batch.targets, soft_labels=mixed.targets, patch_labels=mixed.patch_labels)
        return replace(batch, images=mixed.images, targets=targets)


def build_mix(config: ImageConfig, num_classes: int) -> Mix | None:
    """What mixes a training batch: DiversePatch's mixing if it is on, else mixup and CutMix; None if nothing does.

    The shares of a mixed batch are smoothed by ``loss.label_smoothing`` for cross-entropy, which without mixing does
    so itself; Balanced Softmax never does.
    """
    if isinstance(config, MaskedConfig):
        return None
    settings = config.data.mix
    smoothing = config.loss.label_smoothing if config.loss.name == "cross_entropy" else 0.0
    if config.plugins.diverse_patch.enabled and config.plugins.diverse_patch.mixing:
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
    """Height and width in pixels of what DiversePatch mixes in the config's network; :class:`InputError` without."""
    model = config.model
    with torch.device("meta"):  # without memory for its weights
        network = build_network(
            model.name, num_classes=0, image_size=config.data.transforms.size, options=model.options
        )
    return mixing_patch_size(network)


def check_image_data(config: ImageConfig) -> Report:
    """What is wrong with the data of a config, as it is before it is thinned out."""
    data, classify = config.data, isinstance(config, ClassifierConfig)
    splits = read_splits(data.name, data.root, data.train, data.val, data.max_pixels)
    return examine_images(splits, classify=classify, workers=max(1, data.workers))
