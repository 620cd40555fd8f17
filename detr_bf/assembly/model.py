"""Building of the detector, its losses and its postprocessing."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from numbers import Integral
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from detr_bf.acceleration.model import accelerate
from detr_bf.assembly.plugins import add_detector_plugins, encoder_of, named
from detr_bf.backbones import Backbone, VitOptions, build_backbone
from detr_bf.backbones.backbone import first_convolution, widened
from detr_bf.batchformer import BATCH_MIXERS, BatchFormerV2, QueryBatchFormer
from detr_bf.common.errors import InputError
from detr_bf.common.extensions import extended
from detr_bf.common.low_rank import add_low_rank
from detr_bf.common.settings import chosen_options, settings_of
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import printable
from detr_bf.config import DetectionConfig
from detr_bf.config.detection import LossConfig, ModelConfig
from detr_bf.data.batches import derive_seed
from detr_bf.detectors import DETECTORS, Detector, MaskHead, Options, detector_named
from detr_bf.detectors.groups import query_groups
from detr_bf.engine.step import Criterion
from detr_bf.losses import CLASSIFICATIONS, Classification, CrossEntropy, HungarianMatcher, SetCriterion
from detr_bf.losses.postprocess import PanopticPostprocess, Postprocess
from detr_bf.plugins import PluginCriterion

logger = logging.getLogger(__name__)

OF_DISTRIBUTIONS = ("fgl_weight", "ddf_weight", "union")  # settings of the loss that D-FINE alone reads
OF_POINTS = ("mask_cells_per_point", "matcher.mask_cost", "matcher.dice_cost")  # that RF-DETR's mask head alone reads

# Parts of a detector that low-rank fine-tuning trains in full: all but the backbone and the layers of encoder and
# decoder, and batch attention and plug-ins anywhere
TRAINED_WITH_LOW_RANK = (
    r"(mask_head|tokens)\.|encoder\.(?!(encoder\.)?layers\.)|decoder\.(?!layers\.)|(.*\.)?(batch_former|plugins)\."
)

MOST_CLASSES = 1_000_000
FOCAL_PRIOR = 0.01  # initial score of every class (Lin et al. 2017, arXiv 1708.02002, section 4.1)


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
            drop_path=backbone.drop_path,
            finer=config.model.mask_head == "detr",
            reference=backbone.reference,
            vit=VitOptions(**vars(backbone.vit)),
            channels=config.data.channels,
            mean=config.data.mean or None,
            std=config.data.std or None,
        )
    return build_detector(config, num_classes, body)


def build_detector(config: DetectionConfig, num_classes: int, body: Backbone) -> Detector:
    """Build the detector over a backbone with maps of ``model.backbone.strides``, and all finer ones for a mask head.

    Raises:
        InputError: a wrong number of classes, or settings that contradict each other or the backbone's maps.
    """
    _check_num_classes(num_classes)
    model, detector = config.model, detector_named(config.model.name)
    if not detector.no_object and config.loss.classification == "cross_entropy":
        raise InputError(
            f"model.name={model.name} needs class scores without no-object, which loss.classification=cross_entropy "
            "adds: set loss.classification=focal (or varifocal, mal, ia_bce)"
        )
    classification, former = build_classification(config), build_batch_former(config, body)
    in_backbone = config.batch_former.at == "backbone"
    body.batch_former = former if isinstance(former, BatchFormerV2) and in_backbone else None
    levels = len(model.backbone.vit.maps) or len(model.backbone.strides)
    shared = vars(model).keys() & {option.name for option in fields(Options)} - {"groups"}
    options = Options(
        **{name: getattr(model, name) for name in shared},
        num_logits=classification.num_logits(num_classes),
        strides=tuple(body.strides[-levels:]),
        groups=query_groups(
            model.num_queries,
            one_to_many=model.groups.one_to_many.queries,
            repeats=model.groups.one_to_many.repeats,
            weight=model.groups.one_to_many.weight,
            group_detr=model.groups.group_detr,
        ),
        class_prior=None if config.loss.classification == "cross_entropy" else FOCAL_PRIOR,
        batch_former=former if isinstance(former, BatchFormerV2) and not in_backbone else None,
        query_batch_former=former if isinstance(former, QueryBatchFormer) else None,
        mask_head=build_mask_head(config, body.channels),
        activation_checkpointing=config.train.recompute_encoder,
    )
    channels = body.channels[-levels:]
    _warn_of_unused_settings(config)
    if config.train.recompute_encoder and not model.encoder_layers:
        logger.warning("train.recompute_encoder=true does nothing: there are no encoder layers")
    own = {key.rpartition(".")[2]: key for key in detector.settings if "." in key}  # several detectors have `points`
    with named("model", model, **own, dim="hidden_dim"):
        built = detector(body, channels, options, **(chosen_options(detector.own, model) if detector.own else {}))
    add_detector_plugins(built, config.plugins)
    if config.freeze.detector:
        built.freeze_all_but_masks(keep_dropout=config.freeze.keep_dropout)
    return accelerate(built, body.body)


def train_low_rank(model: Detector, rank: int) -> None:
    """Freeze a detector except for :data:`TRAINED_WITH_LOW_RANK` and low-rank changes of its linear layers (in-place).

    These are the layers of attention and feed-forward networks in encoder, decoder and backbone. Their norms and the
    convolutions of the backbone are frozen, and what was frozen before gets no changes.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    whole = {id(parameter) for name, parameter in named if re.match(TRAINED_WITH_LOW_RANK, name)}
    frozen = {id(parameter): parameter for _, parameter in named if id(parameter) not in whole}
    changed = [
        name
        for name, layer in model.named_modules(remove_duplicate=False)
        if type(layer) is nn.Linear and id(layer.weight) in frozen and layer.weight.requires_grad
    ]
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    add_low_rank(model, changed, rank)
    counts = [(each.numel(), each.requires_grad) for each in model.parameters()]
    logger.info(
        "freeze.lora=%d: low-rank changes of %d linear layers; %s of %s parameters are trained",
        *(rank, len(changed), f"{sum(n for n, trained in counts if trained):,}", f"{sum(n for n, _ in counts):,}"),
    )


def _check_num_classes(num_classes: object) -> None:
    if not isinstance(num_classes, Integral) or not 1 <= int(num_classes) <= MOST_CLASSES:
        shown = printable(repr(num_classes))
        raise InputError(f"num_classes must be a whole number from 1 to {MOST_CLASSES}, got {shown}")


def fit_channels(model: nn.Module, weights: dict[str, Tensor], channels: int, source: str) -> dict[str, Tensor]:
    """Return the weights of ``init_from``, with those of its first convolution widened from RGB, and log it."""
    first = first_convolution(model)
    name = next((name for name, each in model.named_parameters() if first and each is first.weight), "")
    if channels == 3 or name not in weights or weights[name].ndim != 4 or weights[name].shape[1] != 3:
        return weights
    logger.info("init_from %s: %s is converted from RGB to data.channels=%d", source, name, channels)
    return {**weights, name: widened(weights[name], channels)}


def build_mask_head(config: DetectionConfig, channels: Sequence[int]) -> MaskHead | None:
    """Build DETR's mask head over feature maps of these ``channels``, or None if it is disabled or another is chosen.

    Raises:
        InputError: the detector is frozen and nothing would be trained.
    """
    if not config.model.masks:
        if config.freeze.detector:
            raise InputError("freeze.detector=true trains only the mask head: it needs model.masks=true")
        return None
    if config.model.mask_head != "detr":
        return None
    *finer, _ = channels
    model, see_boxes = config.model, detector_named(config.model.name).masks_see_boxes
    return MaskHead(model.hidden_dim, heads=model.heads, finer_channels=finer[::-1], see_boxes=see_boxes)


def _warn_of_unused_settings(config: DetectionConfig) -> None:
    """Log a warning for settings of other detectors, of other losses and of no queries that were changed."""
    model, loss = config.model, config.loss
    default = ModelConfig()
    keys = dict.fromkeys(key for detector in DETECTORS.values() for key in detector.settings)  # in order, once each
    _warn_of_unused("model", "name", model, keys, detector_named(model.name).settings)
    further, usual = model.groups.one_to_many, default.groups.one_to_many
    if not further.queries and (further.repeats, further.weight) != (usual.repeats, usual.weight):
        logger.warning("model.groups.one_to_many.queries=0 does not use repeats and weight beside it")
    keys = dict.fromkeys(key for kind in CLASSIFICATIONS.values() for key in settings_of(kind))
    _warn_of_unused("loss", "classification", loss, keys, settings_of(CLASSIFICATIONS[loss.classification]))
    for names, used, chosen in (
        (OF_DISTRIBUTIONS, model.name == "dfine", f"model.name={model.name}"),
        (OF_POINTS, model.mask_head == "rfdetr", "a detector without RF-DETR's mask head"),
    ):
        changed = [key for key in names if attrgetter(key)(loss) != attrgetter(key)(LossConfig())]
        if changed and not used:
            logger.warning("%s does not use %s", chosen, ", ".join(f"loss.{key}" for key in changed))


def _warn_of_unused(group: str, chosen: str, config: Any, keys: Iterable[str], used: Sequence[str]) -> None:
    """Log a warning for the settings of a group that were changed and that its ``chosen`` part does not read."""
    default = type(config)()
    unused = [key for key in keys if key not in used and attrgetter(key)(config) != attrgetter(key)(default)]
    if unused:
        names = ", ".join(f"{group}.{key}" for key in unused)
        logger.warning("%s.%s=%s does not use %s", group, chosen, getattr(config, chosen), names)


def num_detections(model: ModelConfig) -> int:
    """Return the number of queries in evaluation, each of which can find one object."""
    has_patterns = "dab.patterns" in detector_named(model.name).settings
    return model.num_queries * (max(model.dab.patterns, 1) if has_patterns else 1)


def build_batch_former(config: DetectionConfig, body: Backbone) -> BatchFormerV2 | QueryBatchFormer | None:
    """Build batch attention between tokens or between queries, or None if it is disabled.

    Raises:
        InputError: it is to be in a backbone that is no plain vision transformer, or its settings are unsuitable.
    """
    settings = config.batch_former
    if not settings.enabled:
        return None
    names = ("layers", "shared", "mode", "mixer", "num_layers", "heads", "dropout", "until_epoch", "keep_streams")
    shared: dict[str, Any] = {name: getattr(settings, name) for name in (*names, "group_size")}
    own = [] if settings.mixer in BATCH_MIXERS else config.plugins.files
    with extended(own), named("batch_former", settings), separate_random_numbers():
        if settings.at == "queries":
            return QueryBatchFormer(config.model.hidden_dim, num_decoder_layers=config.model.decoder_layers, **shared)
        in_backbone = settings.at == "backbone"
        if in_backbone and not body.blocks:
            raise InputError(
                "at=backbone works between the blocks of a plain vision transformer, such as model.backbone.name="
                f"timm:vit_small_patch16_224, and this backbone ({type(body.body).__name__}) is none: choose another, "
                "or batch_former.at=tokens"
            )
        dim, places = (
            (body.block_dim, body.blocks) if in_backbone else _batch_former_places(config.model, settings.layers)
        )
        return BatchFormerV2(
            dim,
            num_encoder_layers=places,
            place="backbone" if in_backbone else "encoder",
            position=settings.position,
            mask_padding=settings.mask_padding,
            gather=settings.gather,
            neighbours=settings.neighbours,
            references=settings.references,
            log_attention=settings.log_attention,
            **shared,
        )


def _batch_former_places(model: ModelConfig, layers: Sequence[int]) -> tuple[int, int]:
    """Return the width of the tokens at the insertions and the number of possible places.

    A detector with ``encoder_width`` has one place more than encoder layers: after the encoder.

    Raises:
        InputError: the tokens have different widths at the insertions.
    """
    encoder_width = detector_named(model.name).encoder_width
    if encoder_width is None:
        return model.hidden_dim, model.encoder_layers
    inner = attrgetter(encoder_width)(model) or model.hidden_dim
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
    kind = CLASSIFICATIONS[config.loss.classification]
    own = chosen_options(kind, config.loss)
    return CrossEntropy(**own, local=local) if kind is CrossEntropy else kind(**own)


def build_criterion(config: DetectionConfig, *, local: bool = False) -> SetCriterion:
    """Build matcher and losses, with the metrics of the user's files; a local criterion does not communicate."""
    classification, loss = build_classification(config, local=local), config.loss
    costs = loss.matcher
    with extended(config.plugins.files):
        return SetCriterion(
            classification,
            HungarianMatcher(
                classification,
                costs.class_cost,
                costs.bbox_cost,
                costs.giou_cost,
                loss.giou_eps,
                costs.extra,
                mask_cost=costs.mask_cost,
                dice_cost=costs.dice_cost,
                cells_per_point=loss.mask_cells_per_point,
                fixed_points=local,
            ),
            class_weight=loss.class_weight,
            bbox_weight=loss.bbox_weight,
            giou_weight=loss.giou_weight,
            mask_weight=loss.mask_weight,
            dice_weight=loss.dice_weight,
            fgl_weight=loss.fgl_weight,
            ddf_weight=loss.ddf_weight,
            union=loss.union,
            box_weighting=loss.box_weighting,
            mean_of_groups=loss.mean_of_groups,
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
    settings = config.eval
    return Postprocess(
        build_classification(config),
        settings.max_detections,
        settings.mask_threshold,
        settings.nms,
        settings.nms_across_classes,
        clamp=not detector_named(config.model.name).bounded,
    )


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
