"""Data sets and loaders of a detection config."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
from torch.utils.data import Sampler

from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.common.extensions import extended
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.common.text import printable
from detr_bf.config import DetectionConfig
from detr_bf.config.common import AUTO, resolved_number
from detr_bf.config.data import DataConfig, SplitConfig
from detr_bf.data.augment import Augmentation
from detr_bf.data.batches import SampleKey
from detr_bf.data.checks.learning import Training
from detr_bf.data.coco import CocoAnnotations, CocoDetection, Source, read_annotations
from detr_bf.data.columns import values_of
from detr_bf.data.images import PixelFormat, check_folder
from detr_bf.data.inputs import real_path
from detr_bf.data.loader import BatchLoader, make_loader
from detr_bf.data.references import References, groups_of, own_references, warn_of_missing
from detr_bf.data.transforms import TRANSFORMS, SampleTransform, eval_transform, resized_size, train_transform
from detr_bf.detectors import detector_named

logger = logging.getLogger(__name__)


def build_train_data(config: DetectionConfig) -> CocoDetection:
    """Return the training split, whose categories become the classes; with masks if the model has a mask head."""
    source = data_source(config, "train")
    transform, sized = build_train_transforms(config)
    check_folder(source.images)  # the first to be told of two faults
    content = read_annotations(source.annotations)
    return CocoDetection(
        source.images,
        content,
        transform,
        seed=config.seed,
        masks=config.model.masks,
        panoptic=source.panoptic,
        replace_unreadable=config.data.max_unreadable > 0,
        max_pixels=config.data.max_pixels,
        pixel_format=build_pixel_format(config.data),
        augment=build_augmentation(config),
        sized=sized,
        references=build_references(config, "train", source.images, content),
        groups=groups_read(config, "train", content) if config.data.sampler == "group" else None,
    )


def build_pixel_format(data: DataConfig) -> PixelFormat:
    """Return the format in which images are read."""
    return PixelFormat(data.channels, data.depth, data.grey_bits)


def build_references(config: DetectionConfig, split: str, folder: Path, content: CocoAnnotations) -> References | None:
    """Return the references of the images of ``train`` or ``val``, None if they are not read.

    Raises:
        InputError: as :func:`~detr_bf.data.references.own_files` and :func:`~detr_bf.data.references.groups_of`.
    """
    data = config.data
    if not config.reads_references(split):
        return None
    if data.reference == "own":
        own = references_folder(config, split)
        return own_references(content.images, folder, own, f"data.{split}", data.reference_shift)
    groups = groups_read(config, split, content) if data.reference == "same_group" else None
    names = values_of(content.images, "file_name")
    found = References(data.reference, [folder / name for name in names], groups or (), data.reference_shift)
    warn_of_missing(found, f"data.{split}")
    return found


def groups_read(config: DetectionConfig, split: str, annotations: Path | CocoAnnotations) -> list[int] | None:
    """Return the groups of the images of ``train`` or ``val`` that references or batches read, None if neither does.

    Raises:
        InputError: as :func:`~detr_bf.data.references.groups_of`.
    """
    training, data = split == "train", config.data
    of_references = data.reference == "same_group" and config.reads_references(split)
    of_batches = training and data.sampler == "group"
    if not (of_references or of_batches):
        return None
    return groups_of(read_annotations(annotations).images, 2 if training else 1)


def references_folder(config: DetectionConfig, split: str) -> Path | None:
    """Return the folder of the references of ``train`` or ``val``, None if none is set."""
    given = "train" if config.data.folds or config.data.val_fraction else split
    paths: SplitConfig = getattr(config.data, given)
    return _located(f"data.{given}.references", paths.references) if paths.references else None


def references_of_run(config: DetectionConfig, files: Sequence[Path]) -> list[Path]:
    """Return the own reference of each file that is a training or validation image of the config.

    Raises:
        InputError: the data of the config cannot be read, or do not say the reference of each file.
    """
    wanted = {real_path(file): file for file in files}
    names, known = {file.name for file in files}, dict[Path, Path]()  # links have other names than their files
    try:
        if config.data.reference != "own":
            raise InputError(f"data.reference={config.data.reference} chooses the reference of an image at random")
        for split in ("val", "train") if config.data.has_val else ("train",):
            if known.keys() >= wanted.keys():
                break
            source = data_source(config, split)
            content = read_annotations(source.annotations)
            given = build_references(config, split, source.images, content)
            for name, file in zip(values_of(content.images, "file_name"), given.files if given else (), strict=True):
                if file is not None and Path(name).name in names:
                    known[real_path(source.images / name)] = file
        if missing := [file for path, file in wanted.items() if path not in known]:
            raise InputError(
                f"the data of the run name no reference of {len(missing)} of {len(files)} images, such as "
                f"{printable(missing[0])}"
            )
    except InputError as error:
        raise InputError(
            f"the detector reads a reference of each image, and {error}. Give the folder of the references: they have "
            "the names of the images"
        ) from error
    return [known[real_path(file)] for file in files]


def reference_folders(config: DetectionConfig) -> dict[str, Path | None]:
    """Return the folder of the own references of the splits whose images are read with them.

    None: they are below the folder of the images.
    """
    read = [split for split in ("train", "val") if config.data.reference == "own" and config.reads_references(split)]
    return {split: references_folder(config, split) for split in read}


def build_train_transforms(config: DetectionConfig) -> tuple[SampleTransform, dict[int, SampleTransform]]:
    """Return the transform of the training images, and those of ``data.batch_sides`` by side."""
    settings = asdict(config.data.transforms)
    del settings["eval_short_side"]
    settings["size_divisor"] = config.size_divisor
    resized = "short_sides" if settings["square"] is None else "square"
    sides = {side: [side] if resized == "short_sides" else side for side in config.data.batch_sides}
    own = [] if set(settings["extra"]) <= set(TRANSFORMS) else config.plugins.files
    with extended(own):
        sized = {side: train_transform(**{**settings, resized: value}) for side, value in sides.items()}
        return train_transform(**settings), sized


def build_augmentation(config: DetectionConfig) -> Augmentation | None:
    """Return the augmentation of the training images; None if all are off."""
    if not config.data.augment.given:
        return None
    settings = asdict(config.data.augment)
    del settings["until_epoch"]
    epochs, dense_epochs = augmented_epochs(config)
    return Augmentation(**settings, epochs=epochs, dense_epochs=dense_epochs)


def augmented_epochs(config: DetectionConfig) -> tuple[range, range]:
    """Return the epochs with augmentation, and those of them with mosaic, copy-paste and mixup."""
    data = config.data
    first, end = data.plain_first_epochs, config.train.epochs - data.plain_last_epochs
    until = end if data.augment.until_epoch is None else min(end, data.augment.until_epoch)
    return range(first, end), range(first, until)


def build_val_data(
    config: DetectionConfig,
    class_map: ClassMap,
    transform: SampleTransform | None = None,
    masks: bool = False,
    *,
    references: bool = True,
) -> CocoDetection:
    """Return the validation split with the model's classes; resized for evaluation unless ``transform`` is given.

    ``references``: with the references that evaluation reads.
    """
    source = data_source(config, "val")
    check_folder(source.images)  # the first to be told of two faults
    content = read_annotations(source.annotations)
    return CocoDetection(
        source.images,
        content,
        transform or build_eval_transform(config),
        class_map,
        seed=config.seed,
        masks=masks,
        panoptic=source.panoptic,
        max_pixels=config.data.max_pixels,
        pixel_format=build_pixel_format(config.data),
        references=build_references(config, "val", source.images, content) if references else None,
    )


def data_source(config: DetectionConfig, split: str) -> Source:
    """Return the image folder, the annotations and the panoptic folder (None if not set) of ``train`` or ``val``.

    The annotations are a file, or their content if ``data.root`` or a division of the training images is set.

    A relative path that does not exist is searched below $DETECTRON2_DATASETS, if that is set, both as given and
    without a leading ``data/``. With ``data.skip_unreadable`` images that cannot be decoded are left out.

    Raises:
        InputError: the image folder or the annotation file is not set, or a path is not below $DETECTRON2_DATASETS;
            the images cannot be divided; see also :func:`~detr_bf.data.formats.read_folder`.
    """
    data = config.data
    if not (data.folds or data.val_fraction):
        return _readable_source(data, split)
    from detr_bf.data.formats import divided, images_of  # not needed for COCO files

    source = _readable_source(data, "train")
    shares = (1 / data.folds,) * data.folds if data.folds else (1 - data.val_fraction, data.val_fraction)
    content, parts = divided(
        source, shares, data.split_seed, max(1, data.workers), data.max_pixels, build_pixel_format(data)
    )
    held_out = parts[data.fold if data.folds else 1]
    chosen = held_out if split == "val" else set().union(*parts) - held_out
    skipped = source.skipped if split == "train" else ()
    return source._replace(annotations=images_of(content, chosen, content.path), skipped=skipped)


def data_sources(config: DetectionConfig) -> dict[str, Source]:
    """Return the sources of ``train`` and, if it is given, ``val``, see :func:`data_source`."""
    return {split: data_source(config, split) for split in (("train", "val") if config.data.has_val else ("train",))}


def _readable_source(data: DataConfig, split: str) -> Source:
    source = _given_source(data, split)
    if not data.skip_unreadable or source.panoptic:
        return source
    from detr_bf.data.formats import readable  # not needed without this setting

    return readable(source, data.skip_unreadable, max(1, data.workers), data.max_pixels, build_pixel_format(data))


def _given_source(data: DataConfig, split: str) -> Source:
    paths: SplitConfig = getattr(data, split)
    if data.root:
        from detr_bf.data.formats import read_folder, read_split  # not needed for COCO files

        root = data_root(data)
        if split == "val" and not paths.split:
            raise InputError(
                f"data.val.split is not set: give one of {read_folder(root, data.format).known_splits}, or take the "
                "validation images from the training images with data.val_fraction or data.folds"
            )
        content = read_split(root, data.format, paths.split or "")
        return Source(root, read_folder(root, data.format).as_given(content) if paths.references else content)
    missing = [f"data.{split}.{key}" for key in ("images", "annotations") if not getattr(paths, key)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        given = " ".join(f"{key}=PATH" for key in missing)
        reason = "; every run needs validation data, to choose its best checkpoint" if split == "val" else ""
        folder = ", or data.root=DIR of a folder with images and labels" if split == "train" else ""
        raise InputError(
            f"{' and '.join(missing)} {verb} not set: give {given}, or set it in the config{folder}{reason}"
        )
    images, annotations = (_located(f"data.{split}.{key}", getattr(paths, key)) for key in ("images", "annotations"))
    panoptic = _located(f"data.{split}.panoptic", paths.panoptic) if paths.panoptic else None
    return Source(images, annotations, panoptic)


def data_root(data: DataConfig) -> Path:
    """Return the folder ``data.root``, searched as in :func:`data_source`."""
    return _located("data.root", data.root)


def _located(setting: str, given: str) -> Path:
    """Return the path of a setting, searched as in :func:`data_source`."""
    path, root = Path(given), os.environ.get("DETECTRON2_DATASETS")
    if not root or path.is_absolute() or path.exists():
        return path
    names = [path, *([path.relative_to("data")] if path.is_relative_to("data") else [])]
    candidates = [Path(root).expanduser() / name for name in names]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    looked = ", ".join(map(str, [path.absolute(), *candidates]))
    raise InputError(f"{setting} is {given}, which does not exist; looked for {looked} ($DETECTRON2_DATASETS)")


def build_eval_transform(config: DetectionConfig) -> SampleTransform:
    """Return the transform of evaluation images: resize only, to a square if training has squares."""
    transforms = config.data.transforms
    return eval_transform(
        short_side=transforms.eval_short_side,
        max_size=transforms.max_size,
        square=transforms.square,
        size_divisor=config.size_divisor,
    )


def build_loader(
    config: DetectionConfig, device: torch.device
) -> Callable[[CocoDetection, Sampler[list[SampleKey]]], BatchLoader[Batch]]:
    """Return a function (data, batches) -> loader, with the config's number of workers."""
    return partial(make_loader, collate=Batch.collate, workers=config.data.workers, pin_memory=device.type == "cuda")


def training_amount(config: DetectionConfig) -> Training:
    """Return the settings that decide how much the detector learns."""
    transforms, train = config.data.transforms, config.train
    sides = config.data.batch_sides or ([transforms.square] if transforms.square else transforms.short_sides)
    return Training(
        epochs=train.epochs,
        images_together=train.batch_size * distributed.world_size(),
        accumulate=train.accumulate,
        max_steps=train.max_steps,
        fine_tuned=bool(config.init_from),
        stride=min(config.model.backbone.strides),
        short_side=sorted(sides)[len(sides) // 2],
        max_size=transforms.max_size,
        square=transforms.square is not None,
        divisor=config.size_divisor,
        drops=config.optimizer.schedule == "step" and config.optimizer.drop_epochs is not None,
        minutes=train.minutes,
        decay=resolved_number(train.ema.decay) if train.ema.enabled and train.ema.decay != AUTO else None,
        average_warmup=train.ema.warmup_steps,
    )


def check_enough_tokens(config: DetectionConfig, data: CocoDetection, split: str) -> None:
    """Refuse images with fewer tokens than the queries that a two-stage detector or RT-DETR takes from them.

    The sizes are those of the annotations, after the transforms; images without a size are not checked. The padding of
    a batch may add tokens, but need not.

    Raises:
        InputError: an image may have too few tokens.
    """
    model, transforms, kind = config.model, config.data.transforms, detector_named(config.model.name)
    two_stage = kind.two_stage is not None and attrgetter(kind.two_stage)(model)
    if not two_stage and not kind.from_tokens:
        return
    further = model.groups.one_to_many.queries if split == "train" else 0
    wanted, square = model.num_queries + further, transforms.square
    sizes = _transformed_sizes(config, data, split)
    found, (height, width) = min(((_num_tokens(config, size), size) for size in sizes), default=(wanted, (0, 0)))
    if found < wanted:
        setting = "square" if square else "short_sides" if split == "train" else "eval_short_side"
        raise InputError(
            f"{f'model.{kind.two_stage}=true' if two_stage else f'model.name={model.name}'} takes "
            f"model.num_queries={model.num_queries} queries{f' and {further} of model.groups' if further else ''} from "
            f"the tokens of an image: {sizes[height, width]} of data.{split}, resized to {width} x {height}, has only "
            f"{found}: lower model.num_queries, or raise data.transforms.{setting}"
        )


def _transformed_sizes(config: DetectionConfig, data: CocoDetection, split: str) -> dict[tuple[int, int], str]:
    """Return the sizes (height, width) with the fewest tokens after the transforms, each with its origin."""
    transforms, augment = config.data.transforms, config.data.augment
    training = split == "train"
    sides = transforms.short_sides if training else [transforms.eval_short_side]
    if transforms.square is not None:
        sides = [transforms.square]
    side = min([*sides, *(config.data.batch_sides if training else ())])
    if transforms.square is not None:
        return {(side, side): "an image"}
    named = {size: f"an image of {size[1]} x {size[0]}" for size in data.sizes if size is not None and min(size) > 0}
    if training and augment.iou_crop:  # their sides have shares of which one is up to twice the other
        named |= {(2 * height, width): f"a crop of {text}" for (height, width), text in list(named.items())}
        named |= {(height, 2 * width): f"a crop of {text}" for (height, width), text in list(named.items())}
    sizes = {resized_size(*size, side, transforms.max_size, config.size_divisor): text for size, text in named.items()}
    if training and transforms.random_crop and max(transforms.crop_short_sides) >= transforms.crop_min:
        sizes.setdefault(resized_size(side, side, side, divisor=config.size_divisor), "a square crop")
    elif training and (augment.iou_crop or augment.mosaic):
        sizes.setdefault(resized_size(side, side, side, divisor=config.size_divisor), "a square crop or mosaic")
    return sizes


def _num_tokens(config: DetectionConfig, size: tuple[int, int]) -> int:
    """Return the number of tokens of an image of that height and width, on all levels."""
    return sum(math.prod(-(-side // stride) for side in size) for stride in config.model.all_strides)
