"""Building of the detector, its losses and its postprocessing, and of faster execution."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from numbers import Integral
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from detr_bf.acceleration.model import accelerate
from detr_bf.assembly.plugins import add_encoder_plugins, encoder_of, named
from detr_bf.backbones import Backbone, build_backbone
from detr_bf.batchformer import BATCH_MIXERS, BatchFormerV2
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.extensions import extended
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import printable
from detr_bf.config import DetectionConfig, RunConfig
from detr_bf.config.detection import LossConfig, ModelConfig, RtdetrConfig
from detr_bf.data.batches import derive_seed
from detr_bf.detectors import Detector, MaskHead, Options, detector_named
from detr_bf.detectors.dab_deformable_detr import dab_deformable_detr
from detr_bf.detectors.dab_detr import dab_detr
from detr_bf.detectors.deformable_detr import deformable_detr
from detr_bf.detectors.denoising import ContrastiveDenoising
from detr_bf.detectors.dino import dino
from detr_bf.detectors.dn_detr import dn_detr
from detr_bf.detectors.groups import query_groups
from detr_bf.detectors.smca import smca
from detr_bf.detectors.smca_multi_scale import smca_multi_scale
from detr_bf.engine.step import Criterion
from detr_bf.losses import (
    Classification,
    CrossEntropy,
    Focal,
    HungarianMatcher,
    MatchabilityAware,
    SetCriterion,
    Varifocal,
)
from detr_bf.losses.postprocess import PanopticPostprocess, Postprocess
from detr_bf.plugins import PluginCriterion
from detr_bf.transformer import Decoder, Encoder

logger = logging.getLogger(__name__)

MOST_CLASSES = 1_000_000
FOCAL_PRIOR = 0.01  # initial score of every class (Lin et al. 2017, arXiv 1708.02002, section 4.1)
# Compiled versions of one kind of layer: training and evaluation, kinds of queries, batches of one image.
RECOMPILE_LIMIT = 64

# Settings under ``model`` that only some detectors read.
_CONTRASTIVE = ("denoising.queries", "denoising.label_noise", "denoising.box_noise")
_RTDETR = (*_CONTRASTIVE, *(f"rtdetr.{each.name}" for each in fields(RtdetrConfig)))
_DAB = ("dab.patterns", "dab.random_points")
OWN_SETTINGS = {
    "dab_deformable_detr": (
        *_DAB,
        "extra_levels",
        "deformable.encoder_points",
        "deformable.decoder_points",
        "deformable.box_refine",
    ),
    "dab_detr": _DAB,
    "deformable_detr": (
        "extra_levels",
        "deformable.encoder_points",
        "deformable.decoder_points",
        "deformable.box_refine",
        "deformable.two_stage",
        "deformable.mixed_selection",
        "deformable.look_forward_twice",
    ),
    "dino": (
        "extra_levels",
        "deformable.encoder_points",
        "deformable.decoder_points",
        "dino.mixed_selection",
        "dino.layer_class_heads",
        "dino.layer_box_heads",
        "dino.token_class_head",
        "dino.token_box_head",
        *_CONTRASTIVE,
    ),
    "dn_detr": (*_DAB, "denoising.groups", "denoising.label_noise", "denoising.box_noise"),
    "rtdetr": _RTDETR,
    "rtdetrv2": _RTDETR,
    "smca": ("smca.dynamic_scale", "smca.smooth", "smca.stride"),
    "smca_multi_scale": ("smca.smooth",),
}
# Settings under ``loss`` with the values of ``loss.classification`` that read them.
_SIGMOIDS = ("focal", "varifocal", "mal")
LOSS_SETTINGS = {
    "no_object_weight": ("cross_entropy",),
    "focal_alpha": _SIGMOIDS,
    "focal_gamma": _SIGMOIDS,
    "varifocal_background": ("varifocal",),
    "mal_gamma": ("mal",),
}
# Detectors that choose tokens by the best class or draw classes as noise, of which none may mean no object.
WITHOUT_NO_OBJECT = ("dino", "dn_detr", "rtdetr", "rtdetrv2")


def build_model(config: DetectionConfig, num_classes: int, *, pretrained: bool = True) -> Detector:
    """Build the detector; without ``pretrained`` the backbone's weights are random, to be loaded from a checkpoint.

    Raises:
        InputError: as :func:`build_detector`, or the backbone's weights are not available.
    """
    detector_named(config.model.name)  # before weights are fetched
    _check_num_classes(num_classes)
    backbone = config.model.backbone
    with named("model.backbone", backbone):
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
    """Build the detector over a backbone with maps of ``model.backbone.strides``, and all finer ones for a mask head.

    Raises:
        InputError: a wrong number of classes, or settings that contradict each other or the backbone's maps.
    """
    _check_num_classes(num_classes)
    model = config.model
    if model.name in WITHOUT_NO_OBJECT and config.loss.classification == "cross_entropy":
        raise InputError(
            f"model.name={model.name} needs class scores without no-object, which loss.classification=cross_entropy "
            "adds: set loss.classification=focal (or varifocal, mal)"
        )
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
        activation=model.activation,
        num_queries=model.num_queries,
        position_encoding=model.position_encoding,
        position_temperature=model.position_temperature,
        input_norm=model.input_norm,
        aux_loss=model.aux_loss,
        groups=query_groups(
            model.num_queries,
            one_to_many=model.groups.one_to_many.queries,
            repeats=model.groups.one_to_many.repeats,
            weight=model.groups.one_to_many.weight,
            group_detr=model.groups.group_detr,
        ),
        class_prior=None if config.loss.classification == "cross_entropy" else FOCAL_PRIOR,
        batch_former=build_batch_former(config),
        mask_head=build_mask_head(config, body.channels),
        activation_checkpointing=config.train.recompute_encoder,
    )
    channels = body.channels[-len(model.backbone.strides) :]
    _warn_of_unused_settings(config)
    with named("model", model, dim="hidden_dim"):
        built = _with_own_settings(model)(body, channels, options)
    add_encoder_plugins(built, config.plugins)
    if config.freeze.detector:
        built.freeze_all_but_masks(keep_dropout=config.freeze.keep_dropout)
    return accelerate(built, body.body)


def _check_num_classes(num_classes: object) -> None:
    if not isinstance(num_classes, Integral) or not 1 <= int(num_classes) <= MOST_CLASSES:
        shown = printable(repr(num_classes))
        raise InputError(f"num_classes must be a whole number from 1 to {MOST_CLASSES}, got {shown}")


def build_mask_head(config: DetectionConfig, channels: Sequence[int]) -> MaskHead | None:
    """Build the mask head over feature maps of these ``channels``, or None if it is disabled.

    Raises:
        InputError: the detector is frozen and nothing would be trained.
    """
    if not config.model.masks:
        if config.freeze.detector:
            raise InputError("freeze.detector=true trains only the mask head: it needs model.masks=true")
        return None
    *finer, _ = channels
    model = config.model
    return MaskHead(model.hidden_dim, heads=model.heads, finer_channels=finer[::-1], see_boxes=model.name != "detr")


def _with_own_settings(model: ModelConfig) -> Callable[..., Detector]:
    """Return the detector's builder with the arguments that only this detector has."""
    noise = _noise_of(model)
    anchors: dict[str, Any] = vars(model.dab)
    points = model.deformable
    levels: dict[str, Any] = {"encoder_points": points.encoder_points, "decoder_points": points.decoder_points}
    levels["extra_levels"] = model.extra_levels
    match model.name:
        case "dab_deformable_detr":
            return partial(dab_deformable_detr, **anchors, **levels, box_refine=model.deformable.box_refine)
        case "dab_detr":
            return partial(dab_detr, **anchors)
        case "deformable_detr":
            return partial(
                deformable_detr,
                **levels,
                box_refine=model.deformable.box_refine,
                two_stage=model.deformable.two_stage,
                mixed_selection=model.deformable.mixed_selection,
                look_forward_twice=model.deformable.look_forward_twice,
            )
        case "dino":
            parts: dict[str, Any] = vars(model.dino)
            chosen = ContrastiveDenoising(model.denoising.queries, **noise)
            return partial(dino, **levels, **parts, denoising=chosen)
        case "dn_detr":
            return partial(dn_detr, **anchors, groups=model.denoising.groups, **noise)
        case "rtdetr" | "rtdetrv2":
            return _rtdetr(model)
        case "smca":
            if [model.smca.stride] != list(model.backbone.strides):
                logger.warning(
                    "model.smca.stride=%d, but a cell of the feature map has %s pixels: set it to that, unless the "
                    "weights were trained so (the authors' code keeps 32)",
                    model.smca.stride,
                    " and ".join(map(str, model.backbone.strides)),
                )
            own = model.smca
            return partial(smca, dynamic_scale=own.dynamic_scale, smooth=own.smooth, stride=own.stride)
        case "smca_multi_scale":
            return partial(smca_multi_scale, smooth=model.smca.smooth, strides=model.backbone.strides)
    return detector_named(model.name)


def _noise_of(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of the noise that are given; the others are the detector's own."""
    given = {"label_noise": model.denoising.label_noise, "box_noise": model.denoising.box_noise}
    return {name: value for name, value in given.items() if value is not None}


def _rtdetr(model: ModelConfig) -> Callable[..., Detector]:
    """Return the builder of either version of RT-DETR.

    Raises:
        InputError: a wrong number of points, or levels with different numbers, which only version 2 has.
    """
    own, levels = model.rtdetr, len(model.backbone.strides)
    points = own.points if len(own.points) > 1 else own.points[0]
    if len(own.points) not in (1, levels):
        raise InputError(f"rtdetr.points={own.points}: expected one number, or one for each of the {levels} levels")
    if model.name == "rtdetr" and own.points != own.points[:1] * len(own.points):
        raise InputError(f"rtdetr.points={own.points} differ between the levels: use model.name=rtdetrv2")
    return partial(
        detector_named(model.name),
        encoder_dim=own.encoder_dim,
        encoder_feedforward_dim=own.encoder_feedforward_dim,
        expansion=own.expansion,
        fusion_blocks=own.fusion_blocks,
        points=own.points[0] if model.name == "rtdetr" else points,
        discrete=own.sampling == "discrete",
        learned_content=own.learned_content,
        denoising=ContrastiveDenoising(model.denoising.queries, **_noise_of(model)),
        as_released=own.as_released,
        strides=tuple(model.backbone.strides),
    )


def _warn_of_unused_settings(config: DetectionConfig) -> None:
    """Log a warning for settings of other detectors, of other losses and of no queries that were changed."""
    model, loss = config.model, config.loss
    own, default = OWN_SETTINGS.get(model.name, ()), ModelConfig()
    changed = {
        f"model.{key}": None  # in order, once each
        for key in (key for keys in OWN_SETTINGS.values() for key in keys)
        if key not in own and attrgetter(key)(model) != attrgetter(key)(default)
    }
    if changed:
        logger.warning("model.name=%s does not use %s", model.name, ", ".join(changed))
    further, usual = model.groups.one_to_many, default.groups.one_to_many
    if not further.queries and (further.repeats, further.weight) != (usual.repeats, usual.weight):
        logger.warning("model.groups.one_to_many.queries=0 does not use repeats and weight beside it")
    unread = [
        f"loss.{key}"
        for key, readers in LOSS_SETTINGS.items()
        if loss.classification not in readers and getattr(loss, key) != getattr(LossConfig(), key)
    ]
    if unread:
        logger.warning("loss.classification=%s does not use %s", loss.classification, ", ".join(unread))


def build_batch_former(config: DetectionConfig) -> BatchFormerV2 | None:
    """Build batch attention, or None if it is disabled."""
    settings = config.batch_former
    if not settings.enabled:
        return None
    dim, places = _batch_former_places(config.model, settings.layers)
    own = [] if settings.mixer in BATCH_MIXERS else config.plugins.files
    with extended(own), named("batch_former", settings), separate_random_numbers():
        return BatchFormerV2(
            dim,
            layers=settings.layers,
            num_encoder_layers=places,
            position=settings.position,
            shared=settings.shared,
            mode=settings.mode,
            mixer=settings.mixer,
            num_layers=settings.num_layers,
            heads=settings.heads,
            dropout=settings.dropout,
            mask_padding=settings.mask_padding,
            gather=settings.gather,
            until_epoch=settings.until_epoch,
            keep_streams=settings.keep_streams,
            group_size=settings.group_size,
            neighbours=settings.neighbours,
            log_attention=settings.log_attention,
        )


def _batch_former_places(model: ModelConfig, layers: Sequence[int]) -> tuple[int, int]:
    """Return the width of the tokens at the insertions and the number of possible places.

    RT-DETR has one place more than encoder layers: the fused tokens of all levels.

    Raises:
        InputError: the tokens have different widths at the insertions.
    """
    if not model.name.startswith("rtdetr"):
        return model.hidden_dim, model.encoder_layers
    inner = model.rtdetr.encoder_dim or model.hidden_dim
    dims = {inner if layer < model.encoder_layers else model.hidden_dim for layer in layers}
    if len(dims) > 1:
        raise InputError(
            f"batch_former.layers={list(layers)} are in the hybrid encoder, {inner} channels wide, and after it, "
            f"{model.hidden_dim} wide: give layers on one side of {model.encoder_layers}"
        )
    return max(dims, default=inner), model.encoder_layers + 1


@contextmanager
def separate_random_numbers() -> Iterator[None]:
    """Initialise an added module within the block without a change of the random numbers after it.

    The initial weights of the other modules are then the same with and without the added module. Inside the block,
    torch's CPU generator has a seed that is a function of its state before.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(*torch.get_rng_state().tolist()))
        yield


def build_classification(config: DetectionConfig, *, local: bool = False) -> Classification:
    """Build the classification loss by name; a local one does not communicate."""
    loss = config.loss
    if loss.classification == "focal":
        return Focal(loss.focal_alpha, loss.focal_gamma)
    if loss.classification == "varifocal":
        return Varifocal(loss.focal_alpha, loss.focal_gamma, loss.varifocal_background)
    if loss.classification == "mal":
        return MatchabilityAware(loss.focal_alpha, loss.focal_gamma, loss.mal_gamma)
    return CrossEntropy(loss.no_object_weight, local)


def build_criterion(config: DetectionConfig, *, local: bool = False) -> SetCriterion:
    """Build matcher and losses, with the metrics of the user's files; a local criterion does not communicate."""
    classification, loss = build_classification(config, local=local), config.loss
    costs = loss.matcher
    with extended(config.plugins.files):
        return SetCriterion(
            classification,
            HungarianMatcher(
                classification, costs.class_cost, costs.bbox_cost, costs.giou_cost, loss.giou_eps, costs.extra
            ),
            class_weight=loss.class_weight,
            bbox_weight=loss.bbox_weight,
            giou_weight=loss.giou_weight,
            mask_weight=loss.mask_weight,
            dice_weight=loss.dice_weight,
            local=local,
        )


def build_detector_criterion(config: DetectionConfig, detector: nn.Module) -> Criterion:
    """Build the set criterion, with the losses of the encoder's plug-ins."""
    criterion = build_criterion(config)
    if not config.plugins.relative_localization.enabled:
        return criterion
    return PluginCriterion(criterion, encoder_of(detector))


def build_postprocess(config: DetectionConfig) -> Postprocess:
    """Build the conversion of outputs to detections."""
    return Postprocess(build_classification(config), config.eval.max_detections, config.eval.mask_threshold)


def build_panoptic_postprocess(config: DetectionConfig, class_map: ClassMap) -> PanopticPostprocess:
    """Build the conversion of outputs to panoptic maps."""
    settings = config.eval.panoptic
    return PanopticPostprocess(
        build_classification(config),
        class_map.is_thing,
        threshold=settings.threshold,
        min_area=settings.min_area,
        merge_stuff=settings.merge_stuff,
    )


def compile_model(model: nn.Module, config: RunConfig) -> None:
    """Apply ``train.channels_last`` and ``train.compile`` to a new model (in-place).

    Names, values and shapes of parameters stay the same, and so do checkpoints. Compilation takes place at the first
    call. Of a detector, the backbone and each encoder and decoder layer are compiled, for images of any size; batch
    attention and mask head are not. Other models are compiled as a whole. A copy of the model is not compiled. Compiled
    layers draw other random numbers for dropout than eager ones, from the same generator.

    Raises:
        InputError: a requirement of ``torch.compile`` on the device is missing.
    """
    detector = isinstance(model, Detector)
    if config.train.channels_last:
        (model.backbone if isinstance(model, Detector) else model).to(memory_format=torch.channels_last)
    if config.train.compile:
        _check_compiler(device_of(config.device))
        # At the default limit of 8 torch warns once and runs the layer without its compiler.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        for module in _compiled_parts(model):
            module.compile(dynamic=detector or None)


def _compiled_parts(model: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(model, Detector):
        yield model
        return
    yield model.backbone
    for module in model.modules():
        if isinstance(module, (Encoder, Decoder)):
            yield from module.layers


def _check_compiler(device: torch.device) -> None:
    """Raise a short InputError before the first step; torch's own error has a hundred lines."""
    advice = "or set train.compile=false"
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise InputError(f"train.compile=true needs the package triton on a GPU: pip install triton, {advice}")
        return
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch chooses
    if shutil.which(compiler.split()[0]) is None:
        raise InputError(
            f"train.compile=true needs a C++ compiler on a CPU, and {compiler} is not found: install it, set CXX to "
            f"another, {advice}"
        )
