"""Amount of data and number of steps that a detector learns from, and warnings where they are small.

The thresholds are rules of thumb, except that DETR detectors lose much AP on small data is published: Wang et al. 2022,
"Towards data-efficient detection transformers" (arXiv 2203.09507), on the 2,975 images of Cityscapes. On the data of
the demo, Deformable DETR had an AP of 0.54 after 1,200 steps from random weights behind a pretrained backbone
(docs/fine_tuning.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from detr_bf.common.text import counted, printable
from detr_bf.data.checks.report import Finding, Split
from detr_bf.data.columns import Entries
from detr_bf.data.transforms import resized_size

LEAST_STEPS = 2000  # from random weights
LEAST_STEPS_FINE_TUNING = 300  # from the weights of a trained detector
LEAST_TRAIN_IMAGES = 1000  # from random weights
LEAST_VAL_IMAGES = 50
LEAST_SMALL_SHARE = 0.1  # of the objects, smaller than a cell of the finest feature map
MOST_OF_THE_FIRST = 0.05  # share of the first weights in the averaged weights at the end of a run
MOST_DECAY = 0.9997  # of averaged weights, if the number of steps chooses it
_MOST_UPDATES = 10**6  # after which a warm-up of the average changes nothing more


class Training(NamedTuple):
    """Settings of a run that decide how much a detector learns."""

    epochs: int
    images_together: int  # of one batch on all processes
    accumulate: int  # batches of a step
    max_steps: int | None  # of a trial run
    fine_tuned: bool  # starts from the weights of a trained detector
    stride: int  # pixels of a cell of the finest feature map
    short_side: int  # pixels of the training images, the median
    max_size: int | None
    square: bool  # images become squares of short_side
    divisor: int = 1  # of the sides of resized images
    drops: bool = False  # the learning rate falls at optimizer.drop_epochs
    minutes: float | None = None  # instead of epochs
    decay: float | None = None  # of the averaged weights; None: without, or by the number of steps
    average_warmup: int = 0  # steps


class Learned(NamedTuple):
    """Numbers of the training split; sizes are roots of areas in pixels at the training size."""

    images: int
    counts: dict[str, int]  # boxes by class
    sizes: np.ndarray  # (boxes of images of known size,) float64


def learning_lines(learned: Learned, training: Training) -> Iterator[str]:
    """Yield the lines about the boxes, their sizes, and the steps."""
    boxes = sum(learned.counts.values())
    rarest = min(learned.counts, key=lambda name: (learned.counts[name], name))
    classes = counted(len(learned.counts), "class", "classes")
    classes += f", the rarest {printable(rarest)} ({learned.counts[rarest]:,})"
    yield f"to learn from: {counted(learned.images, 'image')}, {counted(boxes, 'box', 'boxes')} of {classes}"
    if len(learned.sizes):
        low, middle, high = np.quantile(learned.sizes, (0.05, 0.5, 0.95))
        form = f"{training.short_side} x {training.short_side}" if training.square else f"{training.short_side}"
        yield (
            f"  objects at the training size ({'images' if training.square else 'shorter side'} {form}): {middle:.0f} "
            f"pixels, 5 % below {low:.0f} and 5 % above {high:.0f}"
        )
    steps, per_epoch = _steps(learned.images, training)
    together = min(training.images_together, learned.images)  # a batch of more images than there are has all of them
    stopped = " (train.max_steps)" if steps < training.epochs * per_epoch else ""
    if training.minutes is not None:
        of = counted(together * training.accumulate, "image")
        yield f"  train.minutes={training.minutes:g}; an epoch: {counted(per_epoch, 'step')} of {of}"
        return
    yield (
        f"  {counted(training.epochs, 'epoch')} x {counted(per_epoch, 'step')} of "
        f"{counted(together * training.accumulate, 'image')}: {counted(steps, 'step')}{stopped}, "
        f"{counted(steps * together * training.accumulate, 'image')} in all"
    )


def learning_findings(learned: Learned, val: Split | None, training: Training) -> Iterator[Finding]:
    """Yield a warning for each number that is small, with what to change."""
    steps, per_epoch = _steps(learned.images, training)
    least = LEAST_STEPS_FINE_TUNING if training.fine_tuned else LEAST_STEPS
    # a trial run is ended by train.max_steps on purpose
    whole = training.minutes is None and steps == training.epochs * per_epoch
    if whole and steps < least:
        drops = " (and optimizer.drop_epochs with it)" if training.drops else ""
        start = "" if training.fine_tuned else ", or start from a trained detector with init_from=FILE"
        yield _warning(
            "train",
            "few-steps",
            f"fewer than {least:,} steps in all: too few for {'other classes' if training.fine_tuned else 'a decoder'}"
            f"{'' if training.fine_tuned else ' from random weights'}",
            f"{counted(steps, 'step')}: set train.epochs={math.ceil(least / per_epoch)}{drops}, or a smaller "
            f"train.batch_size{start}",
        )
    decay, warmup = training.decay, training.average_warmup
    if whole and decay is not None and (slow := slow_average(decay, warmup, steps)):
        yield _warning("train", "ema-too-slow", *slow)
    if learned.images < LEAST_TRAIN_IMAGES and not training.fine_tuned:
        yield _warning(
            "train",
            "few-images",
            f"fewer than {LEAST_TRAIN_IMAGES:,} images and no init_from: most of the detector starts from random "
            "weights",
            f"{counted(learned.images, 'image')}: give init_from=FILE of a trained detector (docs/fine_tuning.md), or "
            "expect a low AP",
        )
    small = int((learned.sizes < training.stride).sum())
    if small > LEAST_SMALL_SHARE * len(learned.sizes):
        yield _warning(
            "train",
            "small-objects",
            f"smaller at the training size than a cell of the finest feature map, {training.stride} pixels",
            f"{100 * small / len(learned.sizes):.0f} % of the objects: raise data.transforms."
            f"{'square' if training.square else 'short_sides and max_size'} (and of evaluation), choose a model with "
            "finer strides, or cut the images into parts",
            small,
        )
    if val is not None and len(val.content.images) < LEAST_VAL_IMAGES:
        yield _warning(
            "val",
            "few-val-images",
            f"fewer than {LEAST_VAL_IMAGES} images: their AP differs by several points by chance",
            f"{counted(len(val.content.images), 'image')}: use more, or data.folds=5, or compare several seeds",
        )


def fitting_decay(steps: int) -> float:
    """Return the decay of averaged weights that forget their start: a run has six averaging lengths of 1 / (1 - decay).

    That leaves 0.25 % of the first weights.
    """
    return round(min(MOST_DECAY, max(0.0, 1 - 6 / max(1, steps))), 4)


def slow_average(decay: float, warmup: int, steps: int) -> tuple[str, str] | None:
    """Return the reason and the advice if an average of weights keeps too much of the first ones; else None.

    Args:
        decay, warmup: as in :class:`detr_bf.engine.state.AveragedWeights`.
        steps: of the whole run.
    """
    if steps < 2:
        return None  # the first update copies the weights
    kept = decay ** (steps - 1)
    if warmup:
        kept *= float(np.prod(-np.expm1(-np.arange(2, min(steps, _MOST_UPDATES) + 1) / warmup)))
    if kept <= MOST_OF_THE_FIRST:
        return None
    return (
        f"averaged weights that hold more than {MOST_OF_THE_FIRST:.0%} of the weights after the first step at the end",
        f"train.ema.decay={decay:g} in {counted(steps, 'step')}: {kept:.0%}. Set train.ema.decay=auto, here "
        f"{fitting_decay(steps):g}, train more epochs, or set train.ema.enabled=false",
    )


def _warning(split: str, code: str, meaning: str, example: str, count: int = 1) -> Finding:
    return Finding("warning", split, code, meaning, count, example)


def _steps(images: int, training: Training) -> tuple[int, int]:
    """Return the optimizer steps of the run and of an epoch: an incomplete last batch is dropped, a step is not."""
    per_epoch = math.ceil((images // training.images_together or 1) / training.accumulate)
    steps = training.epochs * per_epoch
    return min(steps, training.max_steps or steps), per_epoch


def learned_from(train: Split, training: Training) -> Learned:
    """Return what is left of the boxes after clipping, which the training images have."""
    counts = dict.fromkeys(train.content.class_map.distinct_names, 0)
    names = dict(zip(train.content.class_map.category_ids, counts, strict=True))
    if isinstance(train.objects, Entries):
        ids, table = _learned_columns(train, train.objects)
        for category_id, count in zip(*(each.tolist() for each in np.unique(ids, return_counts=True)), strict=True):
            counts[names[category_id]] += count
        return Learned(len(train.content.images), counts, _training_sizes(table, training))
    sizes = []
    for annotation in train.objects:
        x, y, width, height = annotation["bbox"]
        size = train.size(train.images[annotation["image_id"]])
        if size is not None:
            left, top, right, bottom = max(x, 0), max(y, 0), min(x + width, size[1]), min(y + height, size[0])
            width, height = right - left, bottom - top
        if min(width, height) <= 0:
            continue
        counts[names[annotation["category_id"]]] += 1
        if size is not None:
            sizes.append((width, height, *size))
    table = np.array(sizes, dtype=np.float64).reshape(-1, 4)
    return Learned(len(train.content.images), counts, _training_sizes(table, training))


def _learned_columns(train: Split, objects: Entries) -> tuple[np.ndarray, np.ndarray]:
    """Return the category ids of the boxes, and sides of box and image (V, 4) of those whose image has a known size."""
    x, y, width, height = np.array(objects.boxes, dtype=np.float64).T
    sizes = train.sizes_of(objects)
    known = ~np.isnan(sizes[:, 0])
    right, bottom = np.minimum(x + width, sizes[:, 1]), np.minimum(y + height, sizes[:, 0])
    width = np.where(known, right - np.maximum(x, 0), width)
    height = np.where(known, bottom - np.maximum(y, 0), height)
    left = np.minimum(width, height) > 0
    table = np.stack([width, height, sizes[:, 0], sizes[:, 1]], axis=1)
    return objects.numbers("category_id")[left], table[left & known]


def _training_sizes(table: np.ndarray, training: Training) -> np.ndarray:
    """Return the roots of the areas at the training size of boxes; width, height, image height, width (V, 4)."""
    shapes, which = np.unique(table[:, 2:], axis=0, return_inverse=True)
    scaled = [
        (training.short_side, training.short_side)
        if training.square
        else resized_size(int(height), int(width), training.short_side, training.max_size, training.divisor)
        for height, width in shapes
    ]
    factors = (np.array(scaled, dtype=np.float64).reshape(-1, 2) / shapes).prod(1)
    return np.sqrt(table[:, 0] * table[:, 1] * factors[which.ravel()])
