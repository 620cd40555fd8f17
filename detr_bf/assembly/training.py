"""Pieces shared by the trainers of all tasks."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch

from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.common.files import cache_folder, check_weights, is_file
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import counted, listed, printable
from detr_bf.config import DetectionConfig, RunConfig, config_from_dict, config_to_dict, flatten_settings
from detr_bf.config.common import AUTO, LoadingConfig, resolved_number
from detr_bf.config.data import DataConfig
from detr_bf.data.batches import EpochBatches, derive_seed
from detr_bf.data.checks.files import ImageRecord, channel_statistics, check_files, grey_bits_of
from detr_bf.data.checks.learning import fitting_decay, slow_average
from detr_bf.data.image_headers import spaced
from detr_bf.data.images import PixelFormat
from detr_bf.detectors import Detector
from detr_bf.engine import (
    Checkpoint,
    LearningRate,
    MetricsLog,
    RunFolder,
    TrainSettings,
    checkpoint_of,
    is_checkpoint,
    load_checkpoint,
    make_loggers,
    parameter_groups,
)
from detr_bf.engine.checkpoint import stored_classes
from detr_bf.export.sharing import WEIGHTS as SHARED_WEIGHTS
from detr_bf.export.sharing import is_shared, load_shared
from detr_bf.interop.published import find_weights, is_transformers_folder, published, published_source

logger = logging.getLogger(__name__)

RUN_STEPS = 3000  # of a run whose length is not given
WARMUP_STEPS = 100  # of a run of at least ten times as many
# Learning rate of RT-DETR and D-FINE without a trained detector to start from, in a run of RUN_STEPS steps. It is
# multiplied by sqrt(RUN_STEPS / steps), within the limits, of which the lower one is the rate of RT-DETR's recipes.
SCRATCH_RATE = 4e-4
LEAST_RATE, MOST_RATE = 1e-4, 2e-3
LOW_RANK_RATE = 1e-3  # with freeze.lora and a detector to start from
AUTO_RATE = ("rtdetr", "rtdetrv2", "dfine")  # detectors that optimizer.lr=auto is for

C = TypeVar("C", bound=RunConfig)

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of(config: RunConfig, device: torch.device) -> torch.dtype:
    """Return the precision of autocast on the device.

    With ``train.precision=auto`` it is bfloat16 on a GPU that computes in it, else float16 on a GPU, and float32 on a
    CPU.
    """
    if config.train.precision != "auto":
        if config.train.precision == "fp16" and device.type == "cpu":
            _warn_of_slow_fp16()
        return PRECISIONS[config.train.precision]
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


@cache
def _warn_of_slow_fp16() -> None:
    """Log one warning in a process, unless the processor has instructions for float16."""
    has = torch.cpu.get_capabilities()
    if not (has.get("avx512_fp16") or has.get("amx_fp16") or has.get("architecture") == "aarch64"):
        logger.warning(
            "train.precision=fp16 is about twenty times slower than bf16 on this processor, which has no instructions "
            "for it: set train.precision=bf16, or auto (float32 on a CPU)"
        )


def check_same_classes(class_map: ClassMap, resume_from: Checkpoint | None, folder: RunFolder) -> None:
    """Refuse to go on with a checkpoint of other classes than the data have.

    Raises:
        InputError: it has others; the first few that differ are named.
    """
    if resume_from is not None and resume_from.classes != class_map:
        raise InputError(
            f"{folder.last} was trained on other classes than the data now have: "
            f"{_differences(resume_from.classes, class_map)}. Resume with the same data, or start anew with "
            f"init_from={folder.last}"
        )


def changed_splits(
    config: RunConfig, data: Mapping[str, Mapping[str, Any]], resume_from: Checkpoint | None, folder: RunFolder
) -> set[str]:
    """Return the splits that are not those of the checkpoint, each with a warning.

    Args:
        data: fingerprints of the splits.

    Raises:
        InputError: the images of a divided data set are divided in another way, so that images of training may have
            become validation images.
    """
    if resume_from is None:
        return set()
    before: Mapping[str, Any] = resume_from.state_to_resume(str(folder.last))["data"]
    changed = {split: before[split] for split in data if split in before and data[split] != before[split]}
    described = [
        f"data.{split} had {_counted(was)}, has {_counted(data[split])}"
        + (" (others, or other objects)" if _counted(was) == _counted(data[split]) else "")
        for split, was in changed.items()
    ]
    divided = isinstance(config, DetectionConfig) and (config.data.val_fraction or config.data.folds)
    if divided and "val" in changed and changed["val"].get("files") != data["val"]["files"]:
        raise InputError(
            f"{folder.last} was trained on other images than data.val_fraction or data.folds now leave for training "
            f"({'; '.join(described)}): validation would use images that were trained on. Resume with the same data "
            "and settings of the division, or start a new run in another output_dir"
        )
    for text in described:
        logger.warning("resuming with other data than the run was started with: %s", text)
    if "val" in changed:
        logger.warning("scores on other validation data are not compared: the next evaluation replaces %s", folder.best)
    return set(changed)


def _counted(fingerprint: Mapping[str, Any]) -> str:
    return f"{counted(fingerprint['images'], 'image')} with {counted(fingerprint['objects'], 'object')}"


def warn_of_other_division(val: Mapping[str, Any], checkpoint: Checkpoint, source: Path) -> None:
    """Log a warning if the validation images of divided data are not those of the training of the checkpoint.

    Args:
        val: fingerprint of the validation data.
    """
    before = checkpoint.training["data"].get("val", val) if checkpoint.training else val
    if before["files"] != val["files"]:
        logger.warning(
            "data.val_fraction or data.folds leave other images for validation (%s) than when %s was trained (%s): it "
            "may have been trained on some of them",
            _counted(val),
            source,
            _counted(before),
        )


def _differences(trained: ClassMap, found: ClassMap) -> str:
    """Return the first few differences: ``class 1 was b, is c; ...``."""
    rows = list(zip_longest(_described(trained), _described(found), fillvalue="absent"))
    differing = [f"class {index} was {was}, is {now}" for index, (was, now) in enumerate(rows) if was != now]
    return listed(differing, 3, separator="; ")


def _described(classes: ClassMap) -> Iterator[str]:
    """Yield the name of each class, with its id if that differs from its index."""
    rows = zip(classes.category_ids, classes.names, classes.is_thing, strict=True)
    for index, (category, name, is_thing) in enumerate(rows):
        yield f"'{name}'" + (f" (id {category})" if category != index else "") + ("" if is_thing else " (stuff)")


def seed_per_rank(config: RunConfig) -> None:
    """Reseed per rank after identical weight initialisation, so that dropout differs."""
    if distributed.world_size() == 1:
        return
    torch.manual_seed(derive_seed(config.seed, distributed.rank()))
    factors = distributed.world_size(), config.train.batch_size, config.train.accumulate
    logger.info("%d processes x %d images x %d batches = %d images a step", *factors, math.prod(factors))


def epoch_batches(config: RunConfig, num_samples: int, **settings: Any) -> partial[EpochBatches]:
    """Return the function (epoch, start_batch) -> training batches of this rank."""
    return partial(
        EpochBatches,
        num_samples,
        config.train.batch_size,
        seed=config.seed,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        **settings,
    )


def resolved(config: C, steps: int) -> C:
    """Return a copy of the config in which numbers for a run of that many optimizer steps replace ``auto``.

    It is the one place that chooses them (docs/fine_tuning.md).

    Raises:
        InputError: ``optimizer.lr=auto`` of another model than RT-DETR and D-FINE.
    """
    optimizer, average, epochs = config.optimizer, config.train.ema, config.train.epochs
    chosen: dict[str, Any] = {}
    if optimizer.lr == AUTO:
        if not isinstance(config, DetectionConfig) or config.model.name not in AUTO_RATE:
            raise InputError(
                "optimizer.lr=auto is known for RT-DETR and D-FINE only: give a number, such as that of a recipe"
            )
        of_start = LOW_RANK_RATE if config.freeze.lora else LEAST_RATE
        rate = of_start if config.init_from else SCRATCH_RATE * math.sqrt(RUN_STEPS / max(1, steps))
        chosen["lr"] = float(f"{min(MOST_RATE, max(LEAST_RATE, rate)):.2g}")
    if getattr(optimizer, "backbone_lr", 0.0) == AUTO:
        chosen["backbone_lr"] = float(f"{resolved_number(chosen.get('lr', optimizer.lr)) / 10:.2g}")
    if optimizer.warmup_steps == AUTO:
        chosen["warmup_steps"] = min(WARMUP_STEPS, steps // 10)
    if optimizer.drop_epochs is None:
        chosen["drop_epochs"] = [max(1, round(0.8 * epochs))] if epochs > 1 else []
    decay = fitting_decay(steps) if average.decay == AUTO else average.decay
    train = replace(config.train, ema=replace(average, decay=decay))
    return replace(config, optimizer=replace(optimizer, **chosen), train=train)


def resolved_text(config: RunConfig, steps: int) -> str:
    """Return the settings that :func:`resolved` chooses, as on the command line; empty if there are none."""
    before, after = (flatten_settings(config_to_dict(each)) for each in (config, resolved(config, steps)))
    unused = [] if config.train.ema.enabled else ["train.ema.decay"]
    unused += [] if config.optimizer.schedule == "step" else ["optimizer.drop_epochs"]
    return " ".join(
        f"{name}={json.dumps(value, separators=(',', ':'))}"
        for name, value in after.items()
        if value != before[name] and name not in unused
    )


def learning_rate(
    config: RunConfig, batches_per_epoch: int, steps: int | None = None, *, warns: bool = True
) -> LearningRate:
    """Return the schedule over the steps of the run, of a :func:`resolved` config.

    Image models add a warm-up in epochs and a final rate above 0.

    A warm-up longer than the run, such as that of a recipe in a short fine-tuning, becomes a tenth of all steps, with a
    warning. A run that ``train.max_steps`` ends early has the schedule of the whole run, to go on without a jump.

    Args:
        steps: of a run of ``train.minutes``, in which an epoch of the schedule is that share of ``train.epochs``.
        warns: False for the first steps of such a run: their schedule is replaced.
    """
    optimizer, level = config.optimizer, logging.WARNING if warns else logging.DEBUG
    total = config.train.epochs * math.ceil(batches_per_epoch / config.train.accumulate) if steps is None else steps
    steps_per_epoch = total / config.train.epochs
    warmup_epochs = getattr(optimizer, "warmup_epochs", 0.0)  # this and min_lr are settings of image models only
    lr, drop_epochs = resolved_number(optimizer.lr), optimizer.drop_epochs or []
    min_factor = getattr(optimizer, "min_lr", 0.0) / lr if lr else 0.0
    flat = optimizer.schedule == "flat_cosine"
    if flat:
        min_factor = optimizer.final_factor
    warmup_steps = round(resolved_number(optimizer.warmup_steps) + warmup_epochs * steps_per_epoch)
    warmup_steps = _fitting_warmup(config, total, warmup_steps, warmup_epochs, level)
    if (config.train.max_steps or total) >= total:
        drops = [epoch for epoch in drop_epochs if 0 < epoch < config.train.epochs]
        if optimizer.schedule == "step" and not drops:
            logger.log(
                level,
                "optimizer.schedule=step, optimizer.drop_epochs=%s: the learning rate never falls in train.epochs=%d",
                drop_epochs,
                config.train.epochs,
            )
    return LearningRate(
        schedule=optimizer.schedule,
        total_steps=total,
        warmup_steps=warmup_steps,
        warmup_power=optimizer.warmup_power,
        drop_steps=tuple(epoch * steps_per_epoch for epoch in drop_epochs),
        drop_factor=optimizer.drop_factor,
        min_factor=min_factor,
        flat_steps=optimizer.flat_epochs * steps_per_epoch if flat else 0,
        final_steps=optimizer.final_epochs * steps_per_epoch if flat else 0,
    )


def _fitting_warmup(config: RunConfig, total: int, warmup_steps: int, warmup_epochs: float, level: int) -> int:
    """Return the warm-up steps, or, with a message of that level, a tenth of all steps of a run that is not longer."""
    if warmup_steps < total or not warmup_steps:
        return warmup_steps
    minutes = getattr(config.train, "minutes", None)  # a setting of detectors only
    setting = f"warmup_epochs={warmup_epochs:g}" if warmup_epochs else f"warmup_steps={config.optimizer.warmup_steps}"
    logger.log(
        level,
        "optimizer.%s: the warm-up of %d steps would not be over when train.%s are, after %d steps: it is shortened to "
        "a tenth of the run, %d steps",
        setting,
        warmup_steps,
        f"epochs={config.train.epochs}" if minutes is None else f"minutes={minutes:g}",
        total,
        total // 10,
    )
    return total // 10


def warn_of_slow_average(config: RunConfig, steps: int) -> None:
    """Log a warning if the averaged weights of a run of that many steps would still hold much of its first weights.

    A trial run that ``train.max_steps`` ends is not warned about. The data check of detectors says it as well.
    """
    average = config.train.ema
    if not average.enabled or steps > (config.train.max_steps or steps):
        return
    if text := slow_average(resolved_number(average.decay), average.warmup_steps, steps):
        logger.warning("ema-too-slow: %s; %s", *text)


def train_settings(config: RunConfig, num_images: int, *, unused_parameters: bool = False) -> TrainSettings:
    """Return the settings of the trainer."""
    train = config.train
    return TrainSettings(
        epochs=train.epochs,
        max_steps=train.max_steps,
        minutes=getattr(train, "minutes", None),
        batch_images=min(num_images, train.batch_size * distributed.world_size()),
        accumulate=train.accumulate,
        clip_norm=config.optimizer.clip_norm,
        log_every=train.log_every,
        checkpoint_every=config.checkpoint.every_steps,
        checkpoint_minutes=config.checkpoint.every_minutes,
        keep_every=config.checkpoint.keep_every,
        eval_every=train.eval_every,
        patience=train.patience,
        ema_decay=resolved_number(train.ema.decay) if train.ema.enabled else None,
        ema_warmup_steps=train.ema.warmup_steps,
        seed=config.seed,
        max_skipped=train.max_skipped,
        max_replaced=config.data.max_unreadable * num_images,
        unused_parameters=unused_parameters,
    )


def metrics_log(
    config: RunConfig, folder: RunFolder, resume_from: Checkpoint | None, *, new_val: bool = False
) -> MetricsLog | None:
    """Return the log of rank 0; None on the other ranks.

    Args:
        new_val: the records that are kept are of other validation data.
    """
    if not distributed.is_main():
        return None
    kept = None
    if resume_from is not None:  # what cannot be resumed must not cost any lines of the file
        progress = resume_from.state_to_resume(str(folder.last))["progress"]
        check_weights(resume_from.model, str(folder.last))
        kept = {"train": progress["step"], "val": progress["evaluated_step"]}
    settings = flatten_settings(config_to_dict(config))
    return MetricsLog(folder.metrics, kept, make_loggers(config.train.loggers, folder, settings, kept), new_val)


def build_groups(config: DetectionConfig, model: Detector) -> list[dict[str, Any]]:
    """Return the parameter groups of a detector with their learning rates and weight decay.

    With ``optimizer.layer_decay`` or ``backbone_layer_decay`` they are many, and a table of them is logged.
    """
    groups = parameter_groups(
        model,
        lr=resolved_number(config.optimizer.lr),
        backbone_lr=resolved_number(config.optimizer.backbone_lr),
        weight_decay=config.optimizer.weight_decay,
        point_lr_factor=config.optimizer.point_lr_factor,
        decay_vectors=config.optimizer.decay_vectors,
        batch_former_lr_factor=config.batch_former.lr_factor,
        batch_former_weight_decay=config.batch_former.weight_decay,
        layer_decay=config.optimizer.layer_decay,
        backbone_layer_decay=config.optimizer.backbone_layer_decay,
    )
    if config.optimizer.layer_decay != 1 or config.optimizer.backbone_layer_decay != 1:
        rows = (
            f"{group['name']:<28} {group['lr']:<10.3g} {group['weight_decay']:<12g} "
            f"{sum(parameter.numel() for parameter in group['params']):,}"
            for group in groups
        )
        head = f"{'parameters':<28} {'lr':<10} {'weight decay':<12} numbers"
        factors = config.optimizer.layer_decay, config.optimizer.backbone_layer_decay
        logger.info("optimizer.layer_decay=%g, backbone_layer_decay=%g\n%s", *factors, "\n".join((head, *rows)))
    return groups


def read_initial_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint of ours, of a foreign format, or of a file of weights under our names.

    ``path`` may be the name of published weights (:func:`detr_bf.interop.published.find_weights`).
    """
    from detr_bf.interop.weights import read_weights  # needed only with init_from

    try:
        return read_weights(checkpoint_of(find_weights(path)))
    except InputError as error:
        if (known := published(str(path))) and is_file(known.path):
            raise InputError(f"{error}. It is the copy of published weights: delete it to download it again") from error
        raise


def initial_classes(path: str) -> ClassMap | None:
    """Return the classes of a checkpoint or folder, see :func:`read_initial_weights`; None for other weights."""
    from detr_bf.interop.transformers_folder import transformers_classes  # needed only with init_from

    found = find_weights(path)
    if found.name == SHARED_WEIGHTS and is_transformers_folder(found.parent):
        return transformers_classes(found.parent)
    if found.name == SHARED_WEIGHTS and is_shared(found.parent):
        return load_shared(found.parent).classes
    return stored_classes(checkpoint_of(found))


def _normalized_data(path: str) -> DataConfig | None:
    """Return the data settings of a detector of ours if they have ``mean`` and ``std``; None for other weights."""
    found = find_weights(path)
    if found.name == SHARED_WEIGHTS and is_shared(found.parent):
        checkpoint = load_shared(found.parent)
    elif is_checkpoint(found := checkpoint_of(found)):
        checkpoint = load_checkpoint(found)
    else:
        return None
    data = checkpoint.config.get("data")
    if not (isinstance(data, Mapping) and data.get("mean")):
        return None
    config = config_from_dict(checkpoint.config, source=f"the config in {found}")
    return config.data if isinstance(config, DetectionConfig) else None


def adopt_pixels(data: DataConfig, stored: DataConfig) -> None:
    """Take ``grey_bits``, ``mean`` and ``std`` from the data settings of a run if they are not given (in-place).

    ``mean`` and ``std`` are those of its channels and depth, and not taken for others.
    """
    if data.grey_bits is None:
        data.grey_bits = stored.grey_bits
    if not data.mean and (data.channels, data.depth) == (stored.channels, stored.depth):
        data.mean, data.std = list(stored.mean), list(stored.std)


def choose_normalization(data: DataConfig, folder: Path, names: Sequence[str], init_from: str | None) -> None:
    """Set ``mean`` and ``std`` if they are not given (in-place); the main rank decides for all.

    They become those of a detector of the same channels and depth in ``init_from``, else those of up to 500 training
    images, evenly spaced. RGB images of 8 bits keep those of the backbone if ``init_from`` has none.
    """
    if not data.mean and (init_from or not data.is_rgb):
        found = distributed.run_on_main(lambda: _normalization(data, folder, names, init_from))
        data.mean, data.std = map(list, found)


def _normalization(
    data: DataConfig, folder: Path, names: Sequence[str], init_from: str | None
) -> tuple[list[float], list[float]]:
    """Return ``mean`` and ``std``, see :func:`choose_normalization`."""
    before = _normalized_data(init_from) if init_from and not published_source(init_from) else None
    if before and (data.channels, data.depth) == (before.channels, before.depth):
        text = "channels are normalised by data.mean=%s and data.std=%s of init_from=%s"
        logger.info(text, before.mean, before.std, init_from)
        return list(before.mean), list(before.std)
    if data.is_rgb:
        return [], []
    pixel_format = PixelFormat(data.channels, data.depth, data.grey_bits)
    reading = cache_folder("doctor"), max(1, data.workers), data.max_pixels, pixel_format
    mean, std = channel_statistics(check_files(ImageRecord, folder, spaced(names), *reading).values())
    if not mean:
        raise InputError(
            f"no image of {printable(folder)} has data.channels={data.channels} of data.depth={data.depth} bits, whose "
            "mean and standard deviation the detector needs: detr-bf check names the images and what they have"
        )
    logger.info("channels are normalised by data.mean=%s and data.std=%s of the images", mean, std)
    return mean, std


def choose_grey_bits(data: LoadingConfig, *folders: tuple[Path, Sequence[str]]) -> None:
    """Set ``grey_bits`` to the bits of the training images if it is not given (in-place), with a warning.

    ``folders`` are those of the images and of their references, each with the names of its files.
    """
    if data.grey_bits is None:
        limits = cache_folder("doctor"), max(1, data.workers), data.max_pixels
        bits = [
            grey_bits_of(folder, names, partial(check_files, ImageRecord, folder, names, *limits))
            for folder, names in folders
        ]
        data.grey_bits = max((each for each in bits if each is not None), default=None)
        if data.grey_bits is not None:
            logger.warning(
                "16-bit grey images are scaled to 8 bits from the %d bits that the training images use, in validation "
                "and prediction too (data.grey_bits)",
                data.grey_bits,
            )
