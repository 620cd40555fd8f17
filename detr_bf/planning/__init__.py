"""Estimates for a training run: memory, time, disk, batch attention and learning rates."""

from detr_bf.planning.machine import COCO_IMAGES, GPUS, Gpu, Machine, gpu_named, read_measured
from detr_bf.planning.plan import Plan, make_plan
from detr_bf.planning.text import describe_plan
from detr_bf.planning.trace import Trace, trace

__all__ = [
    "COCO_IMAGES",
    "GPUS",
    "Gpu",
    "Machine",
    "Plan",
    "Trace",
    "describe_plan",
    "gpu_named",
    "make_plan",
    "read_measured",
    "trace",
]
