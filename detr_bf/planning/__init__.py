"""What a training run will need, before it is started: memory, time, disk, and what its batch means."""

from detr_bf.planning.gpus import GPUS, Gpu, gpu_named
from detr_bf.planning.machine import COCO_IMAGES, Machine
from detr_bf.planning.measured import Measured, read_measured
from detr_bf.planning.plan import Plan, make_plan
from detr_bf.planning.text import describe
from detr_bf.planning.trace import Trace, trace

__all__ = [
    "COCO_IMAGES",
    "GPUS",
    "Gpu",
    "Machine",
    "Measured",
    "Plan",
    "Trace",
    "describe",
    "gpu_named",
    "make_plan",
    "read_measured",
    "trace",
]
