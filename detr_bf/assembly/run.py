"""Training and evaluation."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from detr_bf import distributed, interop
from detr_bf.assembly.acceleration import accelerate
from detr_bf.assembly.data import build_loader, build_train_data, build_val_data, data_source
from detr_bf.assembly.model import (
    build_detector_criterion,
    build_model,
    build_panoptic_postprocess,
    build_postprocess,
    device_of,
)
from detr_bf.assembly.training import (
    PRECISIONS,
    check_same_classes,
    epoch_batches,
    learning_rate,
    metrics_log,
    seed_per_rank,
    train_settings,
)
from detr_bf.config import DetectionConfig, config_to_dict
from detr_bf.data.batches import SameSizeBatches, aspect_buckets
from detr_bf.data.coco import CocoDetection
from detr_bf.data.transforms import resized_size
from detr_bf.detectors import Detector
from detr_bf.engine import (
    Checkpoint,
    DetectionEvaluator,
    Evaluation,
    EvaluationLoop,
    PanopticEvaluation,
    RunFolder,
    Trainer,
    TrainingStep,
    build_optimizer,
    checkpoint_of,
    load_fitting,
    parameter_groups,
)
from detr_bf.errors import InputError
from detr_bf.evaluation import CocoEvaluator, PanopticEvaluator, encode, write_encoded
from detr_bf.structures import ClassMap

logger = logging.getLogger(__name__)


def build_trainer(config: DetectionConfig, folder: RunFolder, resume_from: Checkpoint | None = None) -> Trainer:
    """Everything a training run needs, from where ``resume_from`` stands if given."""
    torch.manual_seed(config.seed)  # the same weights in all processes
    device = device_of(config)
    data = build_train_data(config)
    check_same_classes(data.class_map, resume_from, folder)
    check_enough_tokens(config, data, "train")
    model = build_model(config, data.class_map.num_classes, pretrained=resume_from is None and not config.init_from)
    if resume_from is None:
        _initialise(model, config)
    accelerate(model, config)
    model.to(device)
    seed_per_rank(config)
    batches = epoch_batches(config, len(data), buckets=aspect_buckets(data.sizes, config.data.aspect_buckets))
    batches_per_epoch = len(batches(epoch=0))
    loader = build_loader(config, device)
    return Trainer(
        step=TrainingStep(model, build_detector_criterion(config, model), device, PRECISIONS[config.train.precision]),
        optimizer=build_optimizer(build_groups(config, model)),
        learning_rate=learning_rate(config, batches_per_epoch),
        make_batches=lambda epoch, start: iter(loader(data, batches(epoch=epoch, start_batch=start))),
        batches_per_epoch=batches_per_epoch,
        evaluate=build_evaluation(config, data.class_map, device, folder),
        settings=train_settings(config, len(data), unused_parameters=not config.model.aux_loss),
        folder=folder,
        metrics=metrics_log(config, folder, resume_from),
        class_map=data.class_map,
        config=config_to_dict(config),
        resume_from=resume_from,
    )


def _initialise(model: Detector, config: DetectionConfig) -> None:
    """Load ``init_from``, all of it but the mask head where the detector is frozen."""
    if config.init_from:
        weights = read_initial_weights(Path(config.init_from))
        logger.info(load_fitting(model, weights, config.init_from, "mask_head" if config.freeze.detector else None))
    elif config.freeze.detector:
        raise InputError(
            "freeze.detector=true needs init_from=RUN_OR_FILE: a detector trained on boxes of these classes"
        )


def check_enough_tokens(config: DetectionConfig, data: CocoDetection, split: str) -> None:
    """Refuse images whose tokens are fewer than the queries that a two-stage detector takes from them.

    Sizes are those that the annotations name, after the transforms; where they name none, nothing is known before the
    batch. A batch may pad a small image to the size of a larger one, but it need not.

    Raises:
        InputError: an image may have too few.
    """
    if config.model.name != "deformable_detr" or not config.model.deformable.two_stage:
        return
    transforms, wanted = config.data.transforms, config.model.num_queries
    side = min(transforms.short_sides) if split == "train" else transforms.eval_short_side
    named = [size for size in data.sizes if size is not None and min(size) > 0]
    sizes = {resized_size(*size, side, transforms.max_size): f"an image of {size[1]} x {size[0]}" for size in named}
    if split == "train" and transforms.random_crop and max(transforms.crop_short_sides) >= transforms.crop_min:
        sizes.setdefault((side, side), "a square crop")
    found, (height, width) = min(((_num_tokens(config, size), size) for size in sizes), default=(wanted, (0, 0)))
    if found < wanted:
        setting = "short_sides" if split == "train" else "eval_short_side"
        raise InputError(
            f"model.deformable.two_stage=true takes model.num_queries={wanted} queries from the tokens of an image: "
            f"{sizes[height, width]} of data.{split}, resized to {width} x {height}, has only {found}: lower "
            f"model.num_queries, or raise data.transforms.{setting}"
        )


def _num_tokens(config: DetectionConfig, size: tuple[int, int]) -> int:
    """Tokens of an image of that height and width, on all levels."""
    strides = list(config.model.backbone.strides)
    strides += [strides[-1] * 2 ** (level + 1) for level in range(config.model.extra_levels)]
    return sum(math.prod(-(-side // stride) for side in size) for stride in strides)


def read_initial_weights(path: Path) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint of ours, of a foreign format, or by themselves under our names."""
    return interop.read_weights(checkpoint_of(path))


def build_evaluation(
    config: DetectionConfig, class_map: ClassMap, device: torch.device, folder: RunFolder
) -> Evaluation[DetectionEvaluator]:
    """Evaluation on the validation split; panoptic maps are left in ``folder``."""
    data, source = build_val_data(config, class_map), data_source(config, "val")
    check_enough_tokens(config, data, "val")
    loader = build_loader(config, device)
    # where the images of a batch see each other, the batch must not depend on their sizes
    sizes = [(0, 0)] * len(data) if config.batch_former.mode == "mini_batch_inference" else data.sizes
    batches = partial(
        SameSizeBatches, sizes, config.eval.batch_size, rank=distributed.rank(), world_size=distributed.world_size()
    )
    postprocess, panoptic = build_postprocess(config), _panoptic_evaluation(config, data, folder)
    return Evaluation(
        loop=EvaluationLoop(
            make_batches=lambda start: iter(loader(data, batches(start_batch=start))),
            num_batches=len(batches()),
            device=device,
            precision=PRECISIONS[config.train.precision],
        ),
        make_evaluator=lambda: DetectionEvaluator(
            CocoEvaluator(
                source.annotations,
                class_map,
                config.eval.engine,
                config.eval.max_detections,
                masks=config.model.masks,
                panoptic=source.panoptic,
                max_pixels=config.data.max_pixels,
            ),
            postprocess,
            class_map,
            masks=config.model.masks,
            panoptic=panoptic,
        ),
    )


def _panoptic_evaluation(config: DetectionConfig, data: CocoDetection, folder: RunFolder) -> PanopticEvaluation | None:
    """Where there are masks and panoptic annotations."""
    source = data_source(config, "val")
    if not (config.model.masks and source.panoptic):
        return None
    return PanopticEvaluation(
        postprocess=build_panoptic_postprocess(config, data.class_map),
        make_evaluator=partial(
            PanopticEvaluator, source.annotations, source.panoptic, data.class_map, config.data.max_pixels
        ),
        encode=partial(
            encode, class_map=data.class_map, file_names=dict(zip(data.image_ids, data.file_names, strict=True))
        ),
        write=partial(write_encoded, folder.panoptic_results, folder.panoptic, class_map=data.class_map),
    )


def build_groups(config: DetectionConfig, model: Detector) -> list[dict[str, Any]]:
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
