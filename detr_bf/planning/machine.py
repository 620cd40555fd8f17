"""Machines to plan for: GPU data sheets, published and measured step times, usual image sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.files import read_json
from detr_bf.common.text import listed, printable
from detr_bf.config import DetectionConfig
from detr_bf.config.data import DataConfig
from detr_bf.data.transforms import rounded_side
from detr_bf.planning.trace import Work, trace

TERA, GIGA = 1e12, 1e9
GB = 2**30
COCO_IMAGES = 118_287  # of train2017
COCO_CLASSES, COCO_PANOPTIC_CLASSES = 80, 133
ASPECT = 4 / 3  # usual width / height of landscape pictures

# "Training the baseline model for 300 epochs on 16 V100 GPUs takes 3 days, with 4 images per GPU" (Carion et al. 2020,
# arXiv 2005.12872, section 4)
PUBLISHED_EPOCHS, PUBLISHED_GPUS, PUBLISHED_DAYS, PUBLISHED_BATCH = 300, 16, 3, 4
SECONDS_PER_DAY = 86_400
MAX_SECONDS = 2**20  # for a step


@dataclass(frozen=True)
class Gpu:
    """Data sheet of a GPU: peak rates of dense arithmetic in TFLOP/s, memory in GB of 2**30 bytes."""

    title: str
    float32: float
    tf32: float  # for convolutions in float32, as by default in torch; the float32 rate on GPUs without tf32
    half: float  # fp16 and bf16 on tensor cores with float32 sums
    memory: float
    bandwidth: float  # GB/s of 10**9 bytes
    bf16: bool = True

    def least_seconds(self, work: Iterable[Work]) -> float:
        """Return the time of all operators in sequence, each limited by peak arithmetic or peak bandwidth."""
        peak = {"float32": TERA * self.float32, "convolution": TERA * self.tf32, "half": TERA * self.half}  # FLOP/s
        return sum(
            item.times * max(item.flops / peak[item.kind], item.moved / (GIGA * self.bandwidth)) for item in work
        )


# From NVIDIA's data sheets; SXM versions of data-centre GPUs.
GPUS = {
    "h200": Gpu("NVIDIA H200", 67, 494.7, 989.4, 141, 4800),
    "h100": Gpu("NVIDIA H100 80GB", 67, 494.7, 989.4, 80, 3350),
    "a100": Gpu("NVIDIA A100 80GB", 19.5, 156, 312, 80, 2039),
    "v100": Gpu("NVIDIA V100 16GB", 15.7, 15.7, 125, 16, 900, bf16=False),
    "l4": Gpu("NVIDIA L4", 30.3, 60, 121, 24, 300),
    "t4": Gpu("NVIDIA T4", 8.1, 8.1, 65, 16, 320, bf16=False),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, 24, 1008),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", 35.6, 35.6, 71, 24, 936),
}


@dataclass(frozen=True)
class Machine:
    """GPUs to plan for, and facts that are not in the config.

    Raises:
        InputError: a number is not finite, not positive or too large.
    """

    gpus: int
    gpu: Gpu = GPUS["h100"]
    memory: float | None = None  # GB of a GPU; None: from its data sheet
    images: int = COCO_IMAGES  # in the training split
    num_classes: int | None = None  # None: those of COCO
    published_batch: int | None = None  # images in an optimiser step of the published training
    seconds_per_step: float | None = None  # measured
    seconds_source: str = "--seconds-per-step"
    tflops: float | None = None  # sustained by a GPU in training

    def __post_init__(self) -> None:
        for option, value, largest in (
            ("gpus", self.gpus, 2**20),
            ("gpu-memory", self.memory, 2**20),
            ("images", self.images, 2**40),
            ("classes", self.num_classes, 2**20),
            ("published-batch", self.published_batch, 2**30),
            ("seconds-per-step", self.seconds_per_step, MAX_SECONDS),
            ("tflops", self.tflops, 2**30),
        ):
            if value is None:
                continue
            if not 0 < value < math.inf:
                raise InputError(f"--{option} must be greater than 0 and finite, got {value}")
            if value > largest:
                raise InputError(f"--{option} must be at most {largest}, got {printable(value)}")

    @property
    def bytes(self) -> float:
        """Memory of a GPU in bytes."""
        return GB * (self.gpu.memory if self.memory is None else self.memory)

    def classes(self, config: DetectionConfig) -> int:
        """Return the number of classes in the data."""
        return self.num_classes or (COCO_PANOPTIC_CLASSES if config.data.train.panoptic else COCO_CLASSES)


def largest_size(data: DataConfig, divisor: int = 1) -> tuple[int, int]:
    """Return height and width of the largest landscape image in training; sides are multiples of ``divisor``."""
    transforms = data.transforms
    if transforms.square is not None:
        return (max([transforms.square, *data.batch_sides]),) * 2
    short, long = max([*transforms.short_sides, *data.batch_sides]), transforms.max_size
    return rounded_side(min(short, long), divisor, long), rounded_side(long, divisor, long)


def usual_size(data: DataConfig) -> tuple[int, int]:
    """Return height and width of a landscape image with the mean short side, without crops."""
    transforms, sides = data.transforms, data.batch_sides
    if transforms.square is not None:
        return (round(sum(sides) / len(sides)) if sides else transforms.square,) * 2
    sides = sides or transforms.short_sides
    short = sum(sides) / len(sides)
    short = min(short, transforms.max_size / ASPECT)
    return round(short), round(short * ASPECT)


def published_seconds_per_step() -> float:
    """Return the step time of DETR's published training on V100 GPUs."""
    steps = PUBLISHED_EPOCHS * COCO_IMAGES / (PUBLISHED_GPUS * PUBLISHED_BATCH)
    return PUBLISHED_DAYS * SECONDS_PER_DAY / steps


@cache
def published_share() -> float:
    """Return the share of a V100's peak performance that DETR's published training reached."""
    config = DetectionConfig()  # its defaults are the published recipe
    config.batch_former.enabled = False
    config.train.batch_size = PUBLISHED_BATCH
    work = trace(config, COCO_CLASSES, usual_size(config.data)).work
    return GPUS["v100"].least_seconds(work) / published_seconds_per_step()


def gpu_named(name: str) -> Gpu:
    """Return a GPU of ``GPUS`` by name; InputError if the name is unknown."""
    if name.lower() not in GPUS:
        raise InputError(
            f"--gpu {name} is not known; known are {', '.join(GPUS)}. For another GPU give the most similar one with "
            "--gpu-memory, and --tflops or --seconds-per-step"
        )
    return GPUS[name.lower()]


def read_measured(path: Path, config: DetectionConfig) -> tuple[float, str]:
    """Read the step time for the config's precision and batch size from a record of benchmarks/step.py.

    The time is scaled in proportion to pixels from the measured to the usual image size.

    Returns:
        Seconds for an optimiser step, and a description of the measurement.

    Raises:
        InputError: the file is missing, is not a record of benchmarks/step.py, or has no such row.
    """
    shown = printable(path)
    try:
        content = read_json(path, limit=2**27)
        known = {(row["precision"], row["batch_size"]): row["step"] for row in content["rows"]}
        pixels = _positive(content["height"]) * _positive(content["width"])
        title = f"{content['recipe']} {content['height']} x {content['width']}"
        medians = {key: _positive(step["median"]) for key, step in known.items() if step is not None}  # out of memory
    except FileNotFoundError:
        raise InputError(f"--measured: file not found: {shown}") from None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputError(
            f"--measured: {shown} is not what benchmarks/step.py --output writes without --compare "
            f"({type(error).__name__}: {printable(error)})"
        ) from error
    train = config.train
    if (train.precision, train.batch_size) not in medians:
        found = [f"{precision} {size}" for precision, size in medians]
        raise InputError(
            f"--measured: {shown} has no step of train.precision={train.precision} "
            f"train.batch_size={train.batch_size}; it has {listed(found) or 'nothing'}: measure it, or plan one of "
            "these"
        )
    height, width = usual_size(config.data)
    seconds = medians[train.precision, train.batch_size] * train.accumulate * height * width / pixels
    return seconds, f"measured: {printable(title)} in {shown}, in proportion to pixels"


def _positive(value: Any) -> float:
    """Return seconds or pixels read from JSON; ValueError if they are not above 0 and at most ``MAX_SECONDS``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
        raise ValueError(f"{printable(value)} is no number above 0 and at most {MAX_SECONDS}")
    return float(value)
