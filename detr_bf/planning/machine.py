"""What a run is planned for, and how fast the published one was."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from detr_bf.config import DetectionConfig
from detr_bf.config.detection import TransformConfig
from detr_bf.errors import InputError
from detr_bf.planning.gpus import GPUS, Gpu
from detr_bf.planning.trace import trace
from detr_bf.text import printable

GB = 2**30
COCO_IMAGES = 118_287  # of train2017
COCO_CLASSES, COCO_PANOPTIC_CLASSES = 80, 133
ASPECT = 4 / 3  # of most pictures

# "Training the baseline model for 300 epochs on 16 V100 GPUs takes 3 days, with 4 images per GPU" (Carion et al. 2020,
# arXiv 2005.12872, section 4)
PUBLISHED_EPOCHS, PUBLISHED_GPUS, PUBLISHED_DAYS, PUBLISHED_BATCH = 300, 16, 3, 4
SECONDS_OF_A_DAY = 86_400
MAX_SECONDS = 2**20  # of a step


@dataclass(frozen=True)
class Machine:
    """The GPUs, and what is known beside the config.

    Raises:
        InputError: a number that cannot be.
    """

    gpus: int
    gpu: Gpu = GPUS["h100"]
    memory: float | None = None  # GB of a GPU; None: as its data sheet says
    images: int = COCO_IMAGES  # of the training split
    num_classes: int | None = None  # None: COCO's
    published_batch: int | None = None  # images of an optimiser step that the learning rate belongs to
    seconds_per_step: float | None = None  # measured
    seconds_source: str = "--seconds-per-step"
    tflops: float | None = None  # sustained in training

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
        """Memory of a GPU."""
        return GB * (self.gpu.memory if self.memory is None else self.memory)

    def classes(self, config: DetectionConfig) -> int:
        """Of the data."""
        return self.num_classes or (COCO_PANOPTIC_CLASSES if config.data.train.panoptic else COCO_CLASSES)

    def check(self, config: DetectionConfig) -> None:
        """Raise InputError for a precision that the GPU does not have."""
        if config.train.precision == "bf16" and not self.gpu.bf16:
            raise InputError(f"train.precision=bf16, which {self.gpu.title} cannot do: use train.precision=fp16")


def largest_size(transforms: TransformConfig) -> tuple[int, int]:
    """Height and width of the largest lying image in training."""
    return min(max(transforms.short_sides), transforms.max_size), transforms.max_size


def usual_size(transforms: TransformConfig) -> tuple[int, int]:
    """Height and width of a lying picture whose shorter side is the mean of those that occur, without crops."""
    short = sum(transforms.short_sides) / len(transforms.short_sides)
    short = min(short, transforms.max_size / ASPECT)
    return round(short), round(short * ASPECT)


def published_seconds_per_step() -> float:
    """Of DETR's published training."""
    steps = PUBLISHED_EPOCHS * COCO_IMAGES / (PUBLISHED_GPUS * PUBLISHED_BATCH)
    return PUBLISHED_DAYS * SECONDS_OF_A_DAY / steps


@cache
def published_share() -> float:
    """The share of what a V100 can do at best that DETR's published training reached."""
    config = DetectionConfig()  # the defaults are that recipe
    config.batch_former.enabled = False
    config.train.batch_size = PUBLISHED_BATCH
    work = trace(config, COCO_CLASSES, usual_size(config.data.transforms)).work
    return GPUS["v100"].least_seconds(work) / published_seconds_per_step()
