"""Settings of a run of semantic segmentation, with types and defaults. Imports no torch.

The defaults are UPerNet's recipe on ADE20K as Swin Transformer (Liu et al. 2021, arXiv 2103.14030) and XCiT use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from detr_bf.common.errors import InputError
from detr_bf.config.common import (
    LAYERS,
    RATE,
    STEPS,
    WIDTH,
    ContextBroadcastingConfig,
    LoadingConfig,
    OptimizerConfig,
    RunConfig,
    below_one,
    check_betas,
    choice,
    fraction,
    not_negative,
    numbers,
    path,
    positive,
    sizes,
)
from detr_bf.config.detection import BackboneConfig


@dataclass
class SegmentationBackboneConfig(BackboneConfig):
    """Network that computes the feature maps; see model.backbone of detectors."""

    strides: list[int] = sizes(4, 8, 16, 32)  # strides of the feature maps, in pixels
    frozen_stages: int = not_negative(0, LAYERS)  # stages without gradients; 0: none
    frozen_norm: bool = False  # batch norm with fixed statistics and affine parameters


@dataclass
class SegmentationModelConfig:
    """Network: a backbone with UPerNet's head (Xiao et al. 2018, arXiv 1807.10221)."""

    backbone: SegmentationBackboneConfig = field(default_factory=SegmentationBackboneConfig)
    channels: int = positive(512, WIDTH)  # of the head
    bins: list[int] = sizes(1, 2, 3, 6)  # cells per side of each pooled map of the coarsest feature map
    dropout: float = below_one(0.1)  # of whole channels before the classifier
    auxiliary_weight: float = not_negative(0.4)  # of the loss of a second head on a middle map in training; 0: none
    auxiliary_channels: int = positive(256, WIDTH)  # of that head


@dataclass
class SegmentationPluginsConfig:
    """Plug-ins of the backbone."""

    context_broadcasting: ContextBroadcastingConfig = field(default_factory=ContextBroadcastingConfig)


@dataclass
class LabelledSplitConfig:
    """Images of a split and the PNG map of each."""

    images: str = path("")  # folder of the images
    labels: str = path("")  # folder of the maps, with the folders and names of the images: grey or palette PNGs
    annotations: str = path("")  # COCO panoptic JSON, for PNGs of segment ids; empty: the PNGs hold classes
    image_suffix: str = ""  # end of the names of the images, such as _leftImg8bit.png; empty: any image file
    label_suffix: str = ".png"  # end of the names of the maps, instead of that of the image


@dataclass
class SegmentationTransformConfig:
    """Resizing and augmentation; sizes in pixels."""

    short_side: int = positive(512, WIDTH)  # shorter side of the resized image
    max_size: int = positive(2048, WIDTH)  # longest side of the resized image, before the random scale
    scales: list[float] = numbers(0.5, 2.0)  # smallest and largest random factor of the size in training
    crop: int = positive(512, WIDTH)  # side of the random square crop in training
    max_share: float = fraction(0.75)  # largest share of one class in a crop, in up to ten attempts; 1: any crop
    horizontal_flip: float = fraction(0.5)  # probability of a flip
    photometric_distort: bool = True  # random brightness, contrast, saturation and hue

    def check_values(self, prefix: str) -> None:
        if len(self.scales) != 2 or not 0.01 <= self.scales[0] <= self.scales[1] <= 100:
            raise InputError(f"{prefix}scales must be two factors, 0.01 <= first <= second <= 100, got {self.scales}")


@dataclass
class SegmentationDataConfig(LoadingConfig):
    """Images with a class for every pixel."""

    train: LabelledSplitConfig = field(default_factory=LabelledSplitConfig)
    val: LabelledSplitConfig = field(default_factory=LabelledSplitConfig)
    classes: str = path("")  # text file with the name of one class a line; not with annotations
    first_class: int = not_negative(0, 254)  # value of the first class in the maps; lower ones have no class
    ignore: int = not_negative(255, 255)  # value of pixels without a class
    transforms: SegmentationTransformConfig = field(default_factory=SegmentationTransformConfig)


@dataclass
class SegmentationOptimizerConfig(OptimizerConfig):
    """AdamW."""

    lr: float = not_negative(6e-5, RATE)  # learning rate
    backbone_lr: float | None = not_negative(None, RATE)  # of the backbone; null: lr
    weight_decay: float = not_negative(0.01)  # of matrices; biases, norms, positions and tokens have none
    betas: list[float] = numbers(0.9, 0.999)  # of AdamW
    schedule: str = choice("linear", "cosine", "step")  # of the learning rate; linear: down to 0
    warmup_steps: int = not_negative(1500, STEPS)  # of rising lr
    clip_norm: float = not_negative(0.0)  # maximum gradient norm; 0: no clipping

    def check_values(self, prefix: str) -> None:
        check_betas(prefix, self.betas)


@dataclass
class SegmentationLossConfig:
    """Cross-entropy of the pixels."""

    class_weights: list[float] = numbers()  # of the pixels of each class, in the order of the classes; empty: all 1

    def check_values(self, prefix: str) -> None:
        if self.class_weights and (min(self.class_weights) < 0 or not any(self.class_weights)):
            raise InputError(f"{prefix}class_weights must be 0 or more, and one above 0; got {self.class_weights}")


@dataclass
class SegmentationEvalConfig:
    """Evaluation of semantic maps, at the size of the map of each image."""

    batch_size: int = positive(1)  # images of one size per batch of one process
    scales: list[float] = numbers(1.0)  # factors of the size of the images; the probabilities are averaged
    flip: bool = False  # average those of the mirrored images too
    pictures: int = not_negative(12, 100)  # images on the validation sheet

    def check_values(self, prefix: str) -> None:
        if not self.scales or not all(0.01 <= scale <= 100 for scale in self.scales):
            raise InputError(f"{prefix}scales must be one or more factors from 0.01 to 100, got {self.scales}")


@dataclass
class SegmentationConfig(RunConfig):
    """Settings of task=segmentation."""

    task: str = choice("segmentation")  # what is trained
    model: SegmentationModelConfig = field(default_factory=SegmentationModelConfig)
    plugins: SegmentationPluginsConfig = field(default_factory=SegmentationPluginsConfig)
    data: SegmentationDataConfig = field(default_factory=SegmentationDataConfig)
    loss: SegmentationLossConfig = field(default_factory=SegmentationLossConfig)
    optimizer: SegmentationOptimizerConfig = field(default_factory=SegmentationOptimizerConfig)
    eval: SegmentationEvalConfig = field(default_factory=SegmentationEvalConfig)

    def check_values(self, prefix: str) -> None:
        super().check_values(prefix)
        if self.model.backbone.reference != "none":
            raise InputError(f"{prefix}model.backbone.reference is for detectors: leave it at none")
