"""The only place where a config becomes objects."""

from detr_bf.assembly.classifier import (
    LoadedClassifier,
    as_evaluated,
    build_classifier,
    build_classifier_criterion,
    evaluated_weights,
    load_classifier,
)
from detr_bf.assembly.classifier_data import ImageSplits, build_image_splits, check_image_data
from detr_bf.assembly.classifier_run import build_classifier_evaluation, build_classifier_trainer
from detr_bf.assembly.data import build_eval_transform, build_train_data, build_val_data, data_source
from detr_bf.assembly.masked import build_masked_autoencoder, build_masked_evaluation, build_masked_trainer
from detr_bf.assembly.model import (
    build_classification,
    build_criterion,
    build_detector,
    build_detector_criterion,
    build_model,
    build_panoptic_postprocess,
    build_postprocess,
    device_of,
)
from detr_bf.assembly.network import build_network, read_network_weights
from detr_bf.assembly.run import build_evaluation, build_groups, build_trainer, read_initial_weights

__all__ = [
    "ImageSplits",
    "LoadedClassifier",
    "as_evaluated",
    "build_classification",
    "build_classifier",
    "build_classifier_criterion",
    "build_classifier_evaluation",
    "build_classifier_trainer",
    "build_criterion",
    "build_detector",
    "build_detector_criterion",
    "build_eval_transform",
    "build_evaluation",
    "build_groups",
    "build_image_splits",
    "build_masked_autoencoder",
    "build_masked_evaluation",
    "build_masked_trainer",
    "build_model",
    "build_network",
    "build_panoptic_postprocess",
    "build_postprocess",
    "build_train_data",
    "build_trainer",
    "build_val_data",
    "check_image_data",
    "data_source",
    "device_of",
    "evaluated_weights",
    "load_classifier",
    "read_initial_weights",
    "read_network_weights",
]
