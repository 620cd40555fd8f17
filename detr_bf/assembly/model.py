"""The detector, its losses and what is made of its outputs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from numbers import Integral
from typing import Any

import torch
from torch import nn

from detr_bf import distributed
from detr_bf.assembly.plugins import add_encoder_plugins, encoder_of
from detr_bf.backbones import Backbone, build_backbone
from detr_bf.batchformer import BatchFormerV2
from detr_bf.config import DetectionConfig, RunConfig
from detr_bf.config.detection import ModelConfig
from detr_bf.detectors import Detector, MaskHead, Options, detector_named, own_settings
from detr_bf.engine.step import Criterion
from detr_bf.errors import InputError
from detr_bf.losses import CrossEntropy, Focal, HungarianMatcher, SetCriterion
from detr_bf.losses.classification import Classification
from detr_bf.plugins import PluginCriterion
from detr_bf.postprocess import PanopticPostprocess, Postprocess
from detr_bf.structures import ClassMap
from detr_bf.text import printable

logger = logging.getLogger(__name__)

MOST_CLASSES = 1_000_000
FOCAL_PRIOR = 0.01  # score every class starts with (Lin et al. 2017, arXiv 1708.02002, section 4.1)


def device_of(config: RunConfig) -> torch.device:
    """The device asked for; ``auto`` is the GPU when there is one. Of several processes each takes its own GPU."""
    if config.device == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return _own_gpu() if kind == "cuda" and distributed.launched() else torch.device(kind)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", config.device):
        raise InputError(f"device must be auto, cpu, cuda or cuda:N; got '{config.device}'")
    device = torch.device(config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device={config.device}, but torch sees {torch.cuda.device_count()} CUDA GPUs: "
            "use device=cpu, device=auto or a smaller number"
        )
    if device.type == "cuda" and distributed.launched():
        if device.index is not None:
            raise InputError(f"device={config.device} names one GPU for several processes: use device=cuda or auto")
        return _own_gpu()
    return device


def _own_gpu() -> torch.device:
    """The GPU of this machine's process of that number."""
    number = distributed.local_rank()
    if number >= torch.cuda.device_count():
        raise InputError(
            f"the launcher started {number + 1} processes or more on a machine with {torch.cuda.device_count()} CUDA "
            "GPUs: lower --nproc-per-node, or use device=cpu"
        )
    return torch.device("cuda", number)


def build_model(config: DetectionConfig, num_classes: int, *, pretrained: bool = True) -> Detector:
    """The detector; without ``pretrained`` the backbone's weights are left to a checkpoint.

    Raises:
        InputError: as :func:`build_detector`, or the backbone's weights cannot be had.
    """
    detector_named(config.model.name)  # before weights are fetched
    _check_num_classes(num_classes)
    backbone = config.model.backbone
    body = build_backbone(
        backbone.name,
        weights=backbone.weights if pretrained else "none",
        strides=backbone.strides,
        dilation=backbone.dilation,
        frozen_stages=backbone.frozen_stages,
        frozen_norm=backbone.frozen_norm,
        finer=config.model.masks,
    )
    return build_detector(config, num_classes, body)


def build_detector(config: DetectionConfig, num_classes: int, body: Backbone) -> Detector:
    """The detector over a backbone that gives the maps of ``model.backbone.strides``, with a mask head finer ones too.

    Raises:
        InputError: no number of classes, or settings that contradict each other, or the backbone's maps.
    """
    _check_num_classes(num_classes)
    model = config.model
    detector = detector_named(model.name)
    classification = build_classification(config)
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
        mask_head=build_mask_head(config, body.channels),
        recompute_encoder=config.train.recompute_encoder,
    )
    channels = body.channels[-len(model.backbone.strides) :]
    built = detector(body, channels, options, **_own_settings(detector, model))
    add_encoder_plugins(built, config.plugins)
    if config.freeze.detector:
        built.freeze_all_but_masks(keep_dropout=config.freeze.keep_dropout)
    return built


def _check_num_classes(num_classes: object) -> None:
    if not isinstance(num_classes, Integral) or not 1 <= int(num_classes) <= MOST_CLASSES:
        shown = printable(repr(num_classes))
        raise InputError(f"num_classes must be a whole number from 1 to {MOST_CLASSES}, got {shown}")


def build_mask_head(config: DetectionConfig, channels: Sequence[int]) -> MaskHead | None:
    """The mask head over feature maps of these ``channels``, or None where it is off.

    Raises:
        InputError: the detector is to be frozen and nothing would be trained.
    """
    if not config.model.masks:
        if config.freeze.detector:
            raise InputError("freeze.detector=true trains the mask head alone: it needs model.masks=true")
        return None
    *finer, _ = channels
    model = config.model
    return MaskHead(model.hidden_dim, heads=model.heads, finer_channels=finer[::-1], see_boxes=model.name != "detr")


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


def build_batch_former(config: DetectionConfig) -> BatchFormerV2 | None:
    """Batch attention, or None where it is off."""
    settings = config.batch_former
    if not settings.enabled:
        return None
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
        gather=settings.gather,
    )


def build_classification(config: DetectionConfig) -> Classification:
    """Cross-entropy with no-object, or focal."""
    loss = config.loss
    if loss.classification == "focal":
        return Focal(loss.focal_alpha, loss.focal_gamma)
    return CrossEntropy(loss.no_object_weight)


def build_criterion(config: DetectionConfig) -> SetCriterion:
    """Matcher and losses of the outputs."""
    classification, loss = build_classification(config), config.loss
    matcher = HungarianMatcher(classification, loss.matcher.class_cost, loss.matcher.bbox_cost, loss.matcher.giou_cost)
    return SetCriterion(
        classification,
        matcher,
        class_weight=loss.class_weight,
        bbox_weight=loss.bbox_weight,
        giou_weight=loss.giou_weight,
        mask_weight=loss.mask_weight,
        dice_weight=loss.dice_weight,
    )


def build_detector_criterion(config: DetectionConfig, detector: nn.Module) -> Criterion:
    """The set criterion, and what the plug-ins of the detector's encoder add to it."""
    criterion = build_criterion(config)
    if not config.plugins.relative_localization.enabled:
        return criterion
    return PluginCriterion(criterion, encoder_of(detector))


def build_postprocess(config: DetectionConfig) -> Postprocess:
    """Outputs to detections."""
    return Postprocess(build_classification(config), config.eval.max_detections, config.eval.mask_threshold)


def build_panoptic_postprocess(config: DetectionConfig, class_map: ClassMap) -> PanopticPostprocess:
    """Outputs to panoptic maps."""
    settings = config.eval.panoptic
    return PanopticPostprocess(
        build_classification(config),
        class_map.is_thing,
        threshold=settings.threshold,
        min_area=settings.min_area,
        merge_stuff=settings.merge_stuff,
    )
