"""The only place where a config becomes objects."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from detr_bf import interop
from detr_bf.backbones import build_backbone
from detr_bf.batchformer import BatchFormerV2
from detr_bf.config import Config, config_to_dict
from detr_bf.config.schema import ModelConfig, SplitConfig, TransformConfig
from detr_bf.data.coco import CocoDetection, SampleKey, Source
from detr_bf.data.loader import BatchLoader, EpochBatches, SameSizeBatches, make_loader
from detr_bf.data.transforms import SampleTransform, eval_transform, train_transform
from detr_bf.detectors import Detector, Options, detector_named, own_settings
from detr_bf.engine import (
    Checkpoint,
    Evaluation,
    LearningRate,
    MetricsLog,
    RunFolder,
    Trainer,
    TrainSettings,
    build_optimizer,
    checkpoint_of,
    load_fitting,
    parameter_groups,
)
from detr_bf.errors import InputError
from detr_bf.evaluation import CocoEvaluator
from detr_bf.losses import CrossEntropy, Focal, HungarianMatcher, SetCriterion
from detr_bf.losses.classification import Classification
from detr_bf.postprocess import Postprocess
from detr_bf.structures import ClassMap

logger = logging.getLogger(__name__)

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FOCAL_PRIOR = 0.01  # score every class starts with (Lin et al. 2017, arXiv 1708.02002, section 4.1)


def device_of(config: Config) -> torch.device:
    """The device asked for; ``auto`` is the GPU when there is one."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", config.device):
        raise InputError(f"device must be auto, cpu, cuda or cuda:N; got '{config.device}'")
    device = torch.device(config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device={config.device}, but torch sees {torch.cuda.device_count()} CUDA GPUs: "
            "use device=cpu, device=auto or a smaller number"
        )
    return device


def build_model(config: Config, num_classes: int, *, pretrained: bool = True) -> Detector:
    """The detector; without ``pretrained`` the backbone's weights are left to a checkpoint."""
    model, backbone = config.model, config.model.backbone
    detector = detector_named(model.name)
    classification = build_classification(config)
    body = build_backbone(
        backbone.name,
        weights=backbone.weights if pretrained else "none",
        strides=backbone.strides,
        dilation=backbone.dilation,
        frozen_stages=backbone.frozen_stages,
        frozen_norm=backbone.frozen_norm,
    )
    options = Options(
        num_logits=classification.num_logits(num_classes),
        hidden_dim=model.hidden_dim,
        heads=model.heads,
        encoder_layers=model.encoder_layers,
        decoder_layers=model.decoder_layers,
        feedforward_dim=model.feedforward_dim,
        dropout=model.dropout,
        pre_norm=model.pre_norm,
        num_queries=model.num_queries,
        position_encoding=model.position_encoding,
        position_temperature=model.position_temperature,
        input_norm=model.input_norm,
        aux_loss=model.aux_loss,
        class_prior=FOCAL_PRIOR if config.loss.classification == "focal" else None,
        batch_former=build_batch_former(config),
    )
    return detector(body, body.channels, options, **_own_settings(detector, model))


def _own_settings(detector: Callable[..., Detector], model: ModelConfig) -> dict[str, Any]:
    """The settings a detector takes beside the common ones, by their names in ``model`` and its groups.

    A setting that was changed although this detector does not take it is told.
    """
    names = own_settings(detector)
    found: dict[str, Any] = {"strides": model.backbone.strides, "extra_levels": model.extra_levels}
    ignored = [] if "extra_levels" in names or not model.extra_levels else ["model.extra_levels"]
    defaults_of = asdict(ModelConfig())
    for name, values in asdict(model).items():
        if isinstance(values, dict) and name != "backbone":
            defaults = defaults_of[name]
            ignored += [f"model.{name}.{key}" for key in values if values[key] != defaults[key] and key not in names]
            found |= values
    if ignored:
        logger.warning("model.name=%s does not use %s", model.name, ", ".join(ignored))
    return {name: found[name] for name in names}


def build_batch_former(config: Config) -> BatchFormerV2 | None:
    """Batch attention, or None where it is off."""
    settings = config.batch_former
    if not settings.enabled:
        return None
    if settings.gather:
        raise InputError("batch_former.gather=true needs several processes, which this version does not run yet")
    return BatchFormerV2(
        config.model.hidden_dim,
        layers=settings.layers,
        num_encoder_layers=config.model.encoder_layers,
        position=settings.position,
        shared=settings.shared,
        mode=settings.mode,
        num_layers=settings.num_layers,
        heads=settings.heads,
        dropout=settings.dropout,
        mask_padding=settings.mask_padding,
    )


def build_classification(config: Config) -> Classification:
    """Cross-entropy with no-object, or focal."""
    loss = config.loss
    if loss.classification == "focal":
        return Focal(loss.focal_alpha, loss.focal_gamma)
    return CrossEntropy(loss.no_object_weight)


def build_criterion(config: Config) -> SetCriterion:
    """Matcher and losses."""
    classification, loss = build_classification(config), config.loss
    matcher = HungarianMatcher(classification, loss.matcher.class_cost, loss.matcher.bbox_cost, loss.matcher.giou_cost)
    return SetCriterion(classification, matcher, loss.class_weight, loss.bbox_weight, loss.giou_weight)


def build_postprocess(config: Config) -> Postprocess:
    """Outputs to detections."""
    return Postprocess(build_classification(config), config.eval.max_detections)


def build_eval_transform(config: Config) -> SampleTransform:
    """Resize only."""
    transforms = config.data.transforms
    return eval_transform(short_side=transforms.eval_short_side, max_size=transforms.max_size)


def build_train_data(config: Config) -> CocoDetection:
    """The training split, whose categories become the classes."""
    return CocoDetection(
        *data_source(config, "train"), transform=_train_transform(config.data.transforms), seed=config.seed
    )


def build_val_data(config: Config, class_map: ClassMap, transform: SampleTransform | None = None) -> CocoDetection:
    """The validation split with the model's classes; resized for evaluation unless ``transform`` is given."""
    return CocoDetection(
        *data_source(config, "val"), transform=transform or build_eval_transform(config), class_map=class_map
    )


def data_source(config: Config, split: str) -> Source:
    """Folder and annotation file of ``train`` or ``val``.

    Raises:
        InputError: one of them is not set.
    """
    paths: SplitConfig = getattr(config.data, split)
    for key in ("images", "annotations"):
        if not getattr(paths, key):
            raise InputError(f"data.{split}.{key} is not set: give it in the config or as data.{split}.{key}=PATH")
    return Source(Path(paths.images), Path(paths.annotations))


def _train_transform(transforms: TransformConfig) -> SampleTransform:
    return train_transform(
        short_sides=transforms.short_sides,
        max_size=transforms.max_size,
        horizontal_flip=transforms.horizontal_flip,
        random_crop=transforms.random_crop,
        crop_short_sides=transforms.crop_short_sides,
        crop_min=transforms.crop_min,
        crop_max=transforms.crop_max,
    )


def build_evaluation(config: Config, class_map: ClassMap, device: torch.device) -> Evaluation:
    """Evaluation on the validation split."""
    data = build_val_data(config, class_map)
    loader = _loader(config, device)
    # where the images of a batch see each other, the batch must not depend on their sizes
    sizes = [(0, 0)] * len(data) if config.batch_former.mode == "mini_batch_inference" else data.sizes
    return Evaluation(
        make_batches=lambda: loader(data, SameSizeBatches(sizes, config.eval.batch_size)),
        make_evaluator=lambda: CocoEvaluator(
            config.data.val.annotations, class_map, config.eval.engine, config.eval.max_detections
        ),
        postprocess=build_postprocess(config),
        class_map=class_map,
        device=device,
        precision=PRECISIONS[config.train.precision],
    )


def build_trainer(config: Config, folder: RunFolder, resume_from: Checkpoint | None = None) -> Trainer:
    """Everything a training run needs, from where ``resume_from`` stands if given."""
    torch.manual_seed(config.seed)
    device = device_of(config)
    data = build_train_data(config)
    _check_same_classes(data.class_map, resume_from, folder)
    model = build_model(config, data.class_map.num_classes, pretrained=resume_from is None and not config.init_from)
    if resume_from is None and config.init_from:
        logger.info(load_fitting(model, read_initial_weights(Path(config.init_from)), config.init_from))
    model.to(device)
    epoch_batches = partial(EpochBatches, len(data), config.train.batch_size, seed=config.seed)
    batches_per_epoch = len(epoch_batches(epoch=0))
    loader = _loader(config, device)
    return Trainer(
        model=model,
        criterion=build_criterion(config),
        optimizer=build_optimizer(build_groups(config, model)),
        learning_rate=_learning_rate(config, batches_per_epoch),
        make_batches=lambda epoch, start: iter(loader(data, epoch_batches(epoch=epoch, start_batch=start))),
        batches_per_epoch=batches_per_epoch,
        evaluate=build_evaluation(config, data.class_map, device),
        settings=_train_settings(config),
        folder=folder,
        metrics=_metrics_log(config, folder, resume_from),
        class_map=data.class_map,
        config=config_to_dict(config),
        device=device,
        resume_from=resume_from,
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


def _train_settings(config: Config) -> TrainSettings:
    train = config.train
    return TrainSettings(
        epochs=train.epochs,
        max_steps=train.max_steps,
        accumulate=train.accumulate,
        precision=PRECISIONS[train.precision],
        clip_norm=config.optimizer.clip_norm,
        log_every=train.log_every,
        checkpoint_every=train.checkpoint_every,
        keep_every=train.keep_every,
        eval_every=train.eval_every,
        ema_decay=train.ema.decay if train.ema.enabled else None,
    )


def _metrics_log(config: Config, folder: RunFolder, resume_from: Checkpoint | None) -> MetricsLog:
    progress = resume_from.training["progress"] if resume_from is not None and resume_from.training else None
    return MetricsLog(
        folder.metrics,
        resume_from={"train": progress["step"], "val": progress["evaluated_step"]} if progress else None,
        tensorboard=folder.tensorboard if config.train.tensorboard else None,
    )


def _loader(config: Config, device: torch.device) -> Callable[[CocoDetection, Sampler[list[SampleKey]]], BatchLoader]:
    """(data, batches) -> loader, with the workers of the config."""
    return partial(make_loader, workers=config.data.workers, pin_memory=device.type == "cuda")
