"""Training and evaluation."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from detr_bf import distributed, interop
from detr_bf.build.acceleration import accelerate
from detr_bf.build.data import build_loader, build_train_data, build_val_data, data_source
from detr_bf.build.model import (
    build_criterion,
    build_model,
    build_panoptic_postprocess,
    build_postprocess,
    device_of,
)
from detr_bf.config import Config, config_to_dict
from detr_bf.data.batches import EpochBatches, SameSizeBatches, aspect_buckets
from detr_bf.data.coco import CocoDetection, mixed_seed
from detr_bf.detectors import Detector
from detr_bf.engine import (
    Checkpoint,
    Evaluation,
    LearningRate,
    MetricsLog,
    PanopticEvaluation,
    RunFolder,
    Trainer,
    TrainSettings,
    build_optimizer,
    checkpoint_of,
    load_fitting,
    parameter_groups,
)
from detr_bf.errors import InputError
from detr_bf.evaluation import CocoEvaluator, PanopticEvaluator, encode, write_encoded
from detr_bf.structures import ClassMap

logger = logging.getLogger(__name__)

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_trainer(config: Config, folder: RunFolder, resume_from: Checkpoint | None = None) -> Trainer:
    """Everything a training run needs, from where ``resume_from`` stands if given."""
    torch.manual_seed(config.seed)  # the same weights in all processes
    device = device_of(config)
    data = build_train_data(config)
    _check_same_classes(data.class_map, resume_from, folder)
    model = build_model(config, data.class_map.num_classes, pretrained=resume_from is None and not config.init_from)
    if resume_from is None:
        _initialise(model, config)
    accelerate(model, config)
    model.to(device)
    if distributed.world_size() > 1:
        torch.manual_seed(mixed_seed(config.seed, distributed.rank()))  # dropout differs
        _tell_total_batch(config)
    epoch_batches = partial(
        EpochBatches,
        len(data),
        config.train.batch_size,
        seed=config.seed,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        buckets=aspect_buckets(data.sizes, config.data.aspect_buckets),
    )
    batches_per_epoch = len(epoch_batches(epoch=0))
    loader = build_loader(config, device)
    return Trainer(
        model=model,
        criterion=build_criterion(config),
        optimizer=build_optimizer(build_groups(config, model)),
        learning_rate=_learning_rate(config, batches_per_epoch),
        make_batches=lambda epoch, start: iter(loader(data, epoch_batches(epoch=epoch, start_batch=start))),
        batches_per_epoch=batches_per_epoch,
        evaluate=build_evaluation(config, data.class_map, device, folder),
        settings=_train_settings(config, len(data)),
        folder=folder,
        metrics=_metrics_log(config, folder, resume_from) if distributed.is_main() else None,
        class_map=data.class_map,
        config=config_to_dict(config),
        device=device,
        resume_from=resume_from,
    )


def _tell_total_batch(config: Config) -> None:
    factors = distributed.world_size(), config.train.batch_size, config.train.accumulate
    logger.info("%d processes x %d images x %d batches = %d images a step", *factors, math.prod(factors))


def _initialise(model: Detector, config: Config) -> None:
    """Load ``init_from``, all of it but the mask head where the detector is frozen."""
    if config.init_from:
        weights = read_initial_weights(Path(config.init_from))
        logger.info(load_fitting(model, weights, config.init_from, "mask_head" if config.freeze.detector else None))
    elif config.freeze.detector:
        raise InputError(
            "freeze.detector=true needs init_from=RUN_OR_FILE: a detector trained on boxes of these classes"
        )


def read_initial_weights(path: Path) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint of ours, of a foreign format, or by themselves under our names."""
    return interop.read_weights(checkpoint_of(path))


def _check_same_classes(class_map: ClassMap, resume_from: Checkpoint | None, folder: RunFolder) -> None:
    if resume_from is not None and resume_from.classes != class_map:
        raise InputError(
            f"{folder.last} was trained with categories {resume_from.classes.to_dict()}, the annotations now have "
            f"{class_map.to_dict()}: resume with the same data, or start anew with init_from={folder.last}"
        )


def build_evaluation(config: Config, class_map: ClassMap, device: torch.device, folder: RunFolder) -> Evaluation:
    """Evaluation on the validation split; panoptic maps are left in ``folder``."""
    data = build_val_data(config, class_map)
    loader = build_loader(config, device)
    # where the images of a batch see each other, the batch must not depend on their sizes
    sizes = [(0, 0)] * len(data) if config.batch_former.mode == "mini_batch_inference" else data.sizes
    batches = partial(
        SameSizeBatches, sizes, config.eval.batch_size, rank=distributed.rank(), world_size=distributed.world_size()
    )
    return Evaluation(
        make_batches=lambda start: iter(loader(data, batches(start_batch=start))),
        num_batches=len(batches()),
        make_evaluator=lambda: CocoEvaluator(
            config.data.val.annotations,
            class_map,
            config.eval.engine,
            config.eval.max_detections,
            masks=config.model.masks,
            panoptic=data_source(config, "val").panoptic,
        ),
        postprocess=build_postprocess(config),
        class_map=class_map,
        device=device,
        precision=PRECISIONS[config.train.precision],
        masks=config.model.masks,
        panoptic=_panoptic_evaluation(config, data, folder),
    )


def _panoptic_evaluation(config: Config, data: CocoDetection, folder: RunFolder) -> PanopticEvaluation | None:
    """Where there are masks and panoptic annotations."""
    if not (config.model.masks and config.data.val.panoptic):
        return None
    return PanopticEvaluation(
        postprocess=build_panoptic_postprocess(config, data.class_map),
        make_evaluator=partial(
            PanopticEvaluator, config.data.val.annotations, config.data.val.panoptic, data.class_map
        ),
        encode=partial(
            encode, class_map=data.class_map, file_names=dict(zip(data.image_ids, data.file_names, strict=True))
        ),
        write=partial(write_encoded, folder.panoptic_results, folder.panoptic, class_map=data.class_map),
    )


def build_groups(config: Config, model: Detector) -> list[dict[str, Any]]:
    """The parameters with their learning rates and weight decay."""
    return parameter_groups(
        model,
        lr=config.optimizer.lr,
        backbone_lr=config.optimizer.backbone_lr,
        weight_decay=config.optimizer.weight_decay,
        point_lr_factor=config.optimizer.point_lr_factor,
        batch_former_lr_factor=config.batch_former.lr_factor,
        batch_former_weight_decay=config.batch_former.weight_decay,
    )


def _learning_rate(config: Config, batches_per_epoch: int) -> LearningRate:
    steps_per_epoch = math.ceil(batches_per_epoch / config.train.accumulate)
    total = config.train.epochs * steps_per_epoch
    return LearningRate(
        schedule=config.optimizer.schedule,
        total_steps=min(total, config.train.max_steps or total),
        warmup_steps=config.optimizer.warmup_steps,
        drop_steps=tuple(epoch * steps_per_epoch for epoch in config.optimizer.drop_epochs),
        drop_factor=config.optimizer.drop_factor,
    )


def _train_settings(config: Config, num_images: int) -> TrainSettings:
    train = config.train
    return TrainSettings(
        epochs=train.epochs,
        max_steps=train.max_steps,
        accumulate=train.accumulate,
        precision=PRECISIONS[train.precision],
        clip_norm=config.optimizer.clip_norm,
        log_every=train.log_every,
        checkpoint_every=config.checkpoint.every_steps,
        checkpoint_minutes=config.checkpoint.every_minutes,
        keep_every=config.checkpoint.keep_every,
        eval_every=train.eval_every,
        ema_decay=train.ema.decay if train.ema.enabled else None,
        seed=config.seed,
        max_skipped=train.max_skipped,
        max_replaced=config.data.max_unreadable * num_images,
        unused_parameters=not config.model.aux_loss,
    )


def _metrics_log(config: Config, folder: RunFolder, resume_from: Checkpoint | None) -> MetricsLog:
    progress = resume_from.training["progress"] if resume_from is not None and resume_from.training else None
    return MetricsLog(
        folder.metrics,
        resume_from={"train": progress["step"], "val": progress["evaluated_step"]} if progress else None,
        tensorboard=folder.tensorboard if config.train.tensorboard else None,
    )
