"""What every training run is made of, whatever it trains."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from detr_bf import distributed
from detr_bf.config import RunConfig
from detr_bf.data.batches import EpochBatches, derive_seed
from detr_bf.engine import Checkpoint, LearningRate, MetricsLog, RunFolder, TrainSettings
from detr_bf.errors import InputError
from detr_bf.files import check_weights
from detr_bf.structures import ClassMap
from detr_bf.text import listed

logger = logging.getLogger(__name__)

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def _differences(trained: ClassMap, found: ClassMap) -> str:
    """``class 1 was b, is c; ...``: the first few, counted from 0."""
    rows = list(zip_longest(_described(trained), _described(found), fillvalue="absent"))
    differing = [f"class {index} was {was}, is {now}" for index, (was, now) in enumerate(rows) if was != now]
    return listed(differing, 3, separator="; ")


def _described(classes: ClassMap) -> Iterator[str]:
    """A name, and of the id what the index does not say."""
    rows = zip(classes.category_ids, classes.names, classes.is_thing, strict=True)
    for index, (category, name, is_thing) in enumerate(rows):
        yield f"'{name}'" + (f" (id {category})" if category != index else "") + ("" if is_thing else " (stuff)")


def seed_per_rank(config: RunConfig) -> None:
    """Called where all processes have made the same weights: from here on their dropout differs."""
    if distributed.world_size() == 1:
        return
    torch.manual_seed(derive_seed(config.seed, distributed.rank()))
    factors = distributed.world_size(), config.train.batch_size, config.train.accumulate
    logger.info("%d processes x %d images x %d batches = %d images a step", *factors, math.prod(factors))


def epoch_batches(config: RunConfig, num_samples: int, **settings: Any) -> partial[EpochBatches]:
    """(epoch, start_batch) -> the training batches of this process."""
    return partial(
        EpochBatches,
        num_samples,
        config.train.batch_size,
        seed=config.seed,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        **settings,
    )


def learning_rate(
    config: RunConfig, batches_per_epoch: int, *, warmup_epochs: float = 0.0, **settings: Any
) -> LearningRate:
    """The schedule over the steps of the run; ``warmup_epochs`` come on top of its warm-up steps.

    A warm-up that is not over when the run is, as that of a recipe in a short fine-tuning, becomes a tenth of all
    steps, with a warning. A run that ``train.max_steps`` ends for trying out keeps the warm-up of the whole run.
    """
    optimizer, steps_per_epoch = config.optimizer, math.ceil(batches_per_epoch / config.train.accumulate)
    total = config.train.epochs * steps_per_epoch
    steps = min(total, config.train.max_steps or total)
    warmup_steps = optimizer.warmup_steps + round(warmup_epochs * steps_per_epoch)
    if steps == total:
        warmup_steps = _fitting_warmup(config, total, warmup_steps, warmup_epochs)
        _tell_of_no_drop(config)
    return LearningRate(
        schedule=optimizer.schedule,
        total_steps=steps,
        warmup_steps=warmup_steps,
        drop_steps=tuple(epoch * steps_per_epoch for epoch in optimizer.drop_epochs),
        drop_factor=optimizer.drop_factor,
        **settings,
    )


def _fitting_warmup(config: RunConfig, total: int, warmup_steps: int, warmup_epochs: float) -> int:
    """Return the warm-up steps, or a tenth of all steps where the run is not longer than them."""
    if warmup_steps < total or not warmup_steps:
        return warmup_steps
    setting = f"warmup_epochs={warmup_epochs:g}" if warmup_epochs else f"warmup_steps={config.optimizer.warmup_steps}"
    logger.warning(
        "optimizer.%s: the warm-up of %d steps would not be over when train.epochs=%d are, after %d steps: it is "
        "shortened to a tenth of the run, %d steps",
        setting,
        warmup_steps,
        config.train.epochs,
        total,
        total // 10,
    )
    return total // 10


def _tell_of_no_drop(config: RunConfig) -> None:
    optimizer, epochs = config.optimizer, config.train.epochs
    if optimizer.schedule == "step" and not any(0 < epoch < epochs for epoch in optimizer.drop_epochs):
        logger.warning(
            "optimizer.schedule=step with optimizer.drop_epochs=%s: the learning rate never falls in train.epochs=%d",
            list(optimizer.drop_epochs),
            epochs,
        )


def train_settings(config: RunConfig, num_images: int, *, unused_parameters: bool = False) -> TrainSettings:
    """What the trainer is told of the config."""
    train = config.train
    return TrainSettings(
        epochs=train.epochs,
        max_steps=train.max_steps,
        accumulate=train.accumulate,
        clip_norm=config.optimizer.clip_norm,
        log_every=train.log_every,
        checkpoint_every=config.checkpoint.every_steps,
        checkpoint_minutes=config.checkpoint.every_minutes,
        keep_every=config.checkpoint.keep_every,
        eval_every=train.eval_every,
        ema_decay=train.ema.decay if train.ema.enabled else None,
        seed=config.seed,
        max_skipped=train.max_skipped,
        max_replaced=config.data.max_unreadable * num_images,
        unused_parameters=unused_parameters,
    )


def metrics_log(config: RunConfig, folder: RunFolder, resume_from: Checkpoint | None) -> MetricsLog | None:
    """Of the first process; None in all others."""
    if not distributed.is_main():
        return None
    progress = None
    if resume_from is not None:  # what cannot be resumed must not cost any lines of the file
        progress = resume_from.state_to_resume(str(folder.last))["progress"]
        check_weights(resume_from.model, str(folder.last))
    return MetricsLog(
        folder.metrics,
        resume_from={"train": progress["step"], "val": progress["evaluated_step"]} if progress else None,
        tensorboard=folder.tensorboard if config.train.tensorboard else None,
    )
