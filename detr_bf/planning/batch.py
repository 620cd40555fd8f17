"""Choice of the batch size by a trial on the device.

Shape legend: B images, H x W pixels of the padded batch, T objects of an image.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from detr_bf.assembly import build_criterion
from detr_bf.assembly.data import build_pixel_format
from detr_bf.assembly.training import PRECISIONS, precision_of
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Target
from detr_bf.common.text import counted
from detr_bf.config import DetectionConfig
from detr_bf.data.coco import CocoDetection
from detr_bf.data.images import RGB, PixelFormat, pixel_values
from detr_bf.data.transforms import resized_size
from detr_bf.detectors import Detector
from detr_bf.engine import TrainingStep
from detr_bf.planning.machine import GB, Machine, largest_size
from detr_bf.planning.plan import CONTEXT, memory_of, trace_of

logger = logging.getLogger(__name__)


def fit_batch(config: DetectionConfig, model: Detector, data: CocoDetection, device: torch.device) -> None:
    """Set ``train.batch_size`` and ``train.accumulate`` to the largest batch that a GPU's memory holds (in-place).

    Their product stays. On a CPU both stay as they are. Every rank calls this and gets the same values.

    Raises:
        InputError: not even the smallest batch fits.
    """
    train = config.train
    if device.type != "cuda":
        logger.info("train.auto_batch: on a CPU batch_size=%d stays as it is", train.batch_size)
        return
    images = train.batch_size * train.accumulate
    sizes = [size for size in divisors(images) if size > 1 or images == 1 or not config.data.mixup.prob]
    own = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) + CONTEXT
    free = min(distributed.all_gather_object(own))
    height, width = worst_size(config, data)
    objects = int(data.class_counts_of_images.sum(1).max()) if len(data) else 0

    def attempt(size: int) -> None:
        batch = worst_batch(
            size,
            (height, width),
            objects,
            config.model.masks,
            config.reads_references("train"),
            build_pixel_format(config.data),
        )
        trial_step(config, model, batch, device)

    planned = copy.deepcopy(config)
    names = {dtype: name for name, dtype in PRECISIONS.items()}
    planned.train.precision = names[precision_of(config, device)]
    first = estimated_size(planned, data.class_map.num_classes, sizes, free)
    found = largest_fitting(sizes, first, attempt)
    if found is None:
        raise InputError(
            f"train.auto_batch=true: {counted(sizes[-1], 'image')} of {width} x {height} "
            f"pixels with {objects} objects need more than the free memory of {device}, {free / GB:.1f} GB: choose "
            "train.precision=bf16, train.recompute_encoder=true, smaller images (data.transforms) or a smaller model"
        )
    train.batch_size, train.accumulate = found, images // found
    logger.info(
        "train.auto_batch: batch_size=%d accumulate=%d, %d images a step as before (estimated %d; %.1f GB free, images "
        "of at most %d x %d)",
        *(found, images // found, images * distributed.world_size(), first, free / GB, width, height),
    )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [each for each in range(number, 0, -1) if number % each == 0]


def largest_fitting(sizes: list[int], first: int, attempt: Callable[[int], None]) -> int | None:
    """Return a size that fits the memory of all ranks: ``first``, or the largest of at most half of a failed one.

    ``sizes`` descend; ``attempt`` raises ``torch.OutOfMemoryError`` for one that does not fit. None if no size fits.
    """
    size: int | None = first
    while size is not None:
        failed = False
        try:
            attempt(size)
        except torch.OutOfMemoryError:  # its traceback holds the tensors, so the memory is freed after the block
            failed = True
        if not any(distributed.all_gather_object(failed)):
            return size
        logger.info("train.auto_batch: %d images do not fit", size)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size = next((each for each in sizes if 2 * each <= size), None)
    return None


def estimated_size(config: DetectionConfig, num_classes: int, sizes: list[int], free: float) -> int:
    """Return the largest of the ``sizes`` whose planned memory is at most ``free`` bytes, or the last."""
    machine = Machine(gpus=distributed.world_size(), memory=free / GB, num_classes=num_classes)
    trial = copy.deepcopy(config)
    for size in sizes:
        trial.train.batch_size = size
        if memory_of(trial, machine, trace_of(trial, machine)).total <= free:
            return size
    return sizes[-1]


def worst_size(config: DetectionConfig, data: CocoDetection) -> tuple[int, int]:
    """Return height and width that no padded batch exceeds; crops and mosaics may give any shape.

    Without them they are the largest height and the largest width of the resized images.
    """
    transforms, augment = config.data.transforms, config.data.augment
    height, width = largest_size(config.data, config.size_divisor)
    reshaped = transforms.random_crop or augment.iou_crop or augment.mosaic
    if transforms.square is None and (reshaped or None in data.sizes):
        return max(height, width), max(height, width)
    if transforms.square is not None:
        return height, width
    side = max([*transforms.short_sides, *config.data.batch_sides])
    resized = [resized_size(*size, side, transforms.max_size, config.size_divisor) for size in data.sizes if size]
    return max(size[0] for size in resized), max(size[1] for size in resized)


def worst_batch(
    count: int, size: tuple[int, int], objects: int, masks: bool, references: bool, pixel_format: PixelFormat = RGB
) -> Batch:
    """Return B random images of ``size`` without padding, each with T objects that cover most of it.

    ``references`` adds a reference to each.
    """
    targets = tuple(
        Target(
            index,
            torch.tensor([0.5, 0.5, 0.9, 0.9]).repeat(objects, 1),
            torch.zeros(objects, dtype=torch.int64),
            size,
            size,
            masks=torch.ones(objects, *size, dtype=torch.bool) if masks else None,
        )
        for index in range(count)
    )
    images = pixel_values(pixel_format.random_pixels(count, *size))
    padding_mask = torch.zeros(count, *size, dtype=torch.bool)
    return Batch(images, padding_mask, targets, images.flip(0) if references else None)


def trial_step(config: DetectionConfig, model: Detector, batch: Batch, device: torch.device) -> None:
    """Run two forward and backward passes with memory for moments and averages; the model stays as it was.

    Raises:
        torch.OutOfMemoryError: the memory is too small.
    """
    criterion = build_criterion(config, local=True)  # ranks may fail alone
    step = TrainingStep(model, criterion, device, precision_of(config, device)).to(device)
    with _unchanged(model, device):
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kept = [torch.zeros_like(parameter) for parameter in trained for _ in range(2)]
        kept += [tensor.clone() for tensor in model.state_dict().values()] if config.train.ema.enabled else []
        for _ in range(2):  # gradients exist in the second pass, as with accumulation
            step(batch).total.backward()
        del kept


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers, random numbers and the training mode at the end of the block, and remove all gradients."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    training = model.training
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            model.zero_grad(set_to_none=True)
            model.train(training)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
