"""The only place where a config becomes objects."""

from detr_bf.build.data import build_eval_transform, build_train_data, build_val_data, data_source
from detr_bf.build.model import (
    build_classification,
    build_criterion,
    build_model,
    build_panoptic_postprocess,
    build_postprocess,
    device_of,
)
from detr_bf.build.run import build_evaluation, build_groups, build_trainer, read_initial_weights

__all__ = [
    "build_classification",
    "build_criterion",
    "build_eval_transform",
    "build_evaluation",
    "build_groups",
    "build_model",
    "build_panoptic_postprocess",
    "build_postprocess",
    "build_train_data",
    "build_trainer",
    "build_val_data",
    "data_source",
    "device_of",
    "read_initial_weights",
]
