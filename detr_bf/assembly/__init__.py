"""Construction of objects from configs; no other package reads a config to build something."""

from detr_bf.assembly.data import (
    build_eval_transform,
    build_pixel_format,
    build_train_data,
    build_val_data,
    data_source,
)
from detr_bf.assembly.model import (
    build_classification,
    build_criterion,
    build_detector,
    build_detector_criterion,
    build_model,
    build_panoptic_postprocess,
    build_postprocess,
)
from detr_bf.assembly.training import build_groups, read_initial_weights

__all__ = [
    "build_classification",
    "build_criterion",
    "build_detector",
    "build_detector_criterion",
    "build_eval_transform",
    "build_groups",
    "build_model",
    "build_panoptic_postprocess",
    "build_pixel_format",
    "build_postprocess",
    "build_train_data",
    "build_val_data",
    "data_source",
    "read_initial_weights",
]
