"""The training and the evaluation of a classifier."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch
from torch import nn

from detr_bf import distributed
from detr_bf.assembly.acceleration import accelerate
from detr_bf.assembly.classifier import build_classifier, build_classifier_criterion
from detr_bf.assembly.classifier_data import ImageSplits, build_image_splits, val_loop
from detr_bf.assembly.image_training import image_trainer
from detr_bf.assembly.model import device_of
from detr_bf.assembly.network import check_batch_norm, read_network_weights, with_resized_positions
from detr_bf.assembly.training import PRECISIONS, check_same_classes
from detr_bf.classification.metrics import ClassificationEvaluator
from detr_bf.config import ClassifierConfig
from detr_bf.engine import Checkpoint, Measurement, RunFolder, Trainer, TrainingStep, load_fitting
from detr_bf.errors import InputError

logger = logging.getLogger(__name__)


def build_classifier_trainer(
    config: ClassifierConfig, folder: RunFolder, resume_from: Checkpoint | None = None
) -> Trainer:
    """Everything a training run needs, from where ``resume_from`` stands if given."""
    torch.manual_seed(config.seed)  # the same weights in all processes
    device, splits = device_of(config), build_image_splits(config)
    check_same_classes(splits.class_map, resume_from, folder)
    network = build_classifier(
        config, splits.class_map.num_classes, pretrained=resume_from is None and not config.init_from
    )
    if resume_from is None:
        _initialise(network, config)
    rows = min(config.train.batch_size, len(splits.train) // distributed.world_size())
    check_batch_norm(network, image_size=config.data.transforms.size, rows=rows)
    accelerate(network, config)
    network.to(device)
    criterion = build_classifier_criterion(config, network, splits.class_counts).to(device)
    step = TrainingStep(network, criterion, device, PRECISIONS[config.train.precision])
    evaluate = build_classifier_evaluation(config, splits, device)
    return image_trainer(config, splits, step, evaluate, config.plugins.batch_former, folder, resume_from)


def _initialise(network: nn.Module, config: ClassifierConfig) -> None:
    """Load ``init_from``; of a linear probe all but the classifier."""
    if config.init_from:
        weights = with_resized_positions(network, read_network_weights(Path(config.init_from)), config.init_from)
        logger.info(load_fitting(network, weights, config.init_from, "head" if config.model.linear_probe else None))
    elif config.model.linear_probe and not config.model.pretrained:
        raise InputError(
            "model.linear_probe=true needs a trained network: give init_from=RUN_OR_FILE, or model.pretrained=true"
        )


def build_classifier_evaluation(
    config: ClassifierConfig, splits: ImageSplits, device: torch.device
) -> Measurement[ClassificationEvaluator]:
    """Evaluation on the validation split."""
    return Measurement(
        val_loop(config, splits, device),
        partial(
            ClassificationEvaluator, splits.class_map, splits.class_counts, many=config.eval.many, few=config.eval.few
        ),
    )
