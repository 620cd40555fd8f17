"""Network, optimizer and data of semantic segmentation from a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from detr_bf.acceleration.model import accelerate
from detr_bf.assembly.plugins import add_context, named
from detr_bf.assembly.training import choose_grey_bits, epoch_batches, precision_of
from detr_bf.backbones import VitOptions, build_backbone
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.config.common import resolved_number
from detr_bf.data.batches import SameSizeBatches
from detr_bf.data.loader import BatchLoader, make_loader
from detr_bf.engine import EvaluationLoop, build_optimizer, parameter_groups
from detr_bf.segmentation.augmentation import EvalResize, TrainCrop
from detr_bf.segmentation.batch import SegmentationBatch
from detr_bf.segmentation.config import SegmentationConfig, SegmentationTransformConfig
from detr_bf.segmentation.data import LabelledPixelSet, PixelSplits, read_pixel_splits
from detr_bf.segmentation.network import Segmenter


@dataclass(frozen=True)
class SegmentationData:
    """Training and validation data of a run."""

    train: LabelledPixelSet
    val: LabelledPixelSet
    class_map: ClassMap


def build_segmenter(config: SegmentationConfig, num_classes: int, *, pretrained: bool = True) -> Segmenter:
    """Return the network with its plug-ins; without ``pretrained`` its weights are to come from a checkpoint.

    Raises:
        InputError: an unknown backbone or stride, missing weights, or a plug-in does not fit the backbone.
    """
    model, context = config.model, config.plugins.context_broadcasting
    with named("model.backbone", model.backbone):
        backbone = build_backbone(
            model.backbone.name,
            weights=model.backbone.weights if pretrained else "none",
            strides=model.backbone.strides,
            dilation=model.backbone.dilation,
            frozen_stages=model.backbone.frozen_stages,
            frozen_norm=model.backbone.frozen_norm,
            drop_path=model.backbone.drop_path,
            vit=VitOptions(**vars(model.backbone.vit)),
        )
    if context.enabled:
        vit = next((module for module in backbone.modules() if isinstance(module, VisionTransformer)), None)
        if vit is None:
            raise InputError(
                "plugins.context_broadcasting needs a plain vision transformer, such as "
                "model.backbone.name=timm:vit_small_patch16_224"
            )
        add_context(vit, context)
    return accelerate(
        Segmenter(
            backbone,
            num_classes,
            channels=model.channels,
            bins=model.bins,
            dropout=model.dropout,
            auxiliary_channels=model.auxiliary_channels if model.auxiliary_weight else 0,
            scales=config.eval.scales,
            flip=config.eval.flip,
        )
    )


def segmentation_optimizer(config: SegmentationConfig, network: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, with groups for the head and for the backbone."""
    optimizer = config.optimizer
    lr = resolved_number(optimizer.lr)
    groups = parameter_groups(
        network,
        lr=lr,
        backbone_lr=lr if optimizer.backbone_lr is None else optimizer.backbone_lr,
        weight_decay=optimizer.weight_decay,
        decay_vectors=False,
    )
    named_groups = [{**group, "name": group["name"].replace("transformer", "head")} for group in groups]
    return build_optimizer(named_groups, betas=tuple(optimizer.betas))


def read_segmentation_splits(config: SegmentationConfig) -> PixelSplits:
    """Find the files of both splits; ``data.grey_bits`` become those of the training images if not given (in-place)."""
    splits = read_pixel_splits(config.data)
    choose_grey_bits(config.data, (splits.train.images, splits.train.names))
    train, val = (replace(files, grey_bits=config.data.grey_bits) for files in (splits.train, splits.val))
    return PixelSplits(train, val, splits.class_map)


def build_segmentation_data(config: SegmentationConfig) -> SegmentationData:
    """Build both splits with their transforms.

    Raises:
        InputError: as :func:`detr_bf.segmentation.data.read_pixel_splits`.
    """
    splits, transforms = read_segmentation_splits(config), config.data.transforms
    train = TrainCrop(
        short_side=transforms.short_side,
        max_size=transforms.max_size,
        scales=(transforms.scales[0], transforms.scales[1]),
        crop=transforms.crop,
        max_share=transforms.max_share,
        horizontal_flip=transforms.horizontal_flip,
        photometric=transforms.photometric_distort,
    )
    replaces = config.data.max_unreadable > 0
    return SegmentationData(
        LabelledPixelSet(splits.train, train, seed=config.seed, replace_unreadable=replaces),
        LabelledPixelSet(splits.val, build_eval_resize(transforms)),
        splits.class_map,
    )


def build_eval_resize(transforms: SegmentationTransformConfig) -> EvalResize:
    """Build the transform of evaluation and prediction."""
    return EvalResize(transforms.short_side, transforms.max_size)


def segmentation_batches(
    config: SegmentationConfig, data: SegmentationData, device: torch.device
) -> tuple[Callable[..., Iterator[SegmentationBatch]], int]:
    """Return (epoch, first batch, phase) -> training batches of this rank from there on, and the batches per epoch."""
    batches = epoch_batches(config, len(data.train))
    load = _loader(config, data.train, device)
    return lambda epoch, start, phase=None: iter(load(batches(epoch=epoch, start_batch=start))), len(batches(epoch=0))


def segmentation_loop(config: SegmentationConfig, data: LabelledPixelSet, device: torch.device) -> EvaluationLoop:
    """Build the evaluation loop over images, divided among ranks; the images of a batch have one size."""
    batches = partial(
        SameSizeBatches,
        data.sizes,
        config.eval.batch_size,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    load = _loader(config, data, device)
    return EvaluationLoop(
        make_batches=lambda start: iter(load(batches(start_batch=start))),
        num_batches=len(batches()),
        device=device,
        precision=precision_of(config, device),
    )


def _loader(
    config: SegmentationConfig, data: LabelledPixelSet, device: torch.device
) -> Callable[..., BatchLoader[SegmentationBatch]]:
    return partial(
        make_loader,
        data,
        collate=SegmentationBatch.collate,
        workers=config.data.workers,
        pin_memory=device.type == "cuda",
    )
