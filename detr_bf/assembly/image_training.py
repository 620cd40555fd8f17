"""What the training of classifiers and of masked autoencoders has in common."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from detr_bf.assembly.classifier_data import ImageSplits, train_batches
from detr_bf.assembly.training import learning_rate, metrics_log, seed_per_rank, train_settings
from detr_bf.config import ClassifierConfig, MaskedConfig, config_to_dict
from detr_bf.engine import (
    Checkpoint,
    Evaluation,
    LearningRate,
    RunFolder,
    Trainer,
    TrainingStep,
    build_optimizer,
    image_parameter_groups,
)


class BatchFormerSettings(Protocol):
    """How batch attention learns."""

    lr_factor: float
    weight_decay: float | None


def image_trainer(
    config: ClassifierConfig | MaskedConfig,
    splits: ImageSplits,
    step: TrainingStep,
    evaluate: Evaluation[Any],
    batch_former: BatchFormerSettings,
    folder: RunFolder,
    resume_from: Checkpoint | None,
) -> Trainer:
    """The trainer of a step whose model is on its device, initialised, and the same in all processes."""
    seed_per_rank(config)
    make_batches, batches_per_epoch = train_batches(config, splits, step.device)
    return Trainer(
        step=step,
        optimizer=image_optimizer(config, step.model, batch_former),
        learning_rate=image_learning_rate(config, batches_per_epoch),
        make_batches=make_batches,
        batches_per_epoch=batches_per_epoch,
        evaluate=evaluate,
        settings=train_settings(config, len(splits.train)),
        folder=folder,
        metrics=metrics_log(config, folder, resume_from),
        class_map=splits.class_map,
        config=config_to_dict(config),
        resume_from=resume_from,
    )


def image_learning_rate(config: ClassifierConfig | MaskedConfig, batches_per_epoch: int) -> LearningRate:
    """The schedule of image models: warm-up in epochs, and an end above 0."""
    optimizer = config.optimizer
    return learning_rate(
        config,
        batches_per_epoch,
        warmup_epochs=optimizer.warmup_epochs,
        min_factor=optimizer.min_lr / optimizer.lr if optimizer.lr else 0.0,
    )


def image_optimizer(
    config: ClassifierConfig | MaskedConfig, network: nn.Module, batch_former: BatchFormerSettings
) -> torch.optim.Optimizer:
    """Of image models; batch attention has its own learning rate and weight decay."""
    optimizer = config.optimizer
    groups = image_parameter_groups(
        network,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        decay_vectors=optimizer.decay_vectors,
        batch_former_lr_factor=batch_former.lr_factor,
        batch_former_weight_decay=batch_former.weight_decay,
    )
    return build_optimizer(
        groups, optimizer.name, momentum=optimizer.momentum, nesterov=optimizer.nesterov, betas=tuple(optimizer.betas)
    )
