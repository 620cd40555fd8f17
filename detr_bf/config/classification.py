"""Every setting of a classifier's run and of masked pre-training, typed, with its default. No torch in here.

Defaults are DeiT's published ImageNet recipe (Touvron et al. 2021, arXiv 2012.12877, table 9), except for the batch
size and drop path, and those of the plug-ins' papers; of masked pre-training they are MAE's (He et al. 2022, arXiv
2111.06377, appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from detr_bf.config.fields import (
    LAYERS,
    RATE,
    STEPS,
    WIDTH,
    arguments,
    below_one,
    choice,
    fraction,
    indices,
    not_negative,
    numbers,
    path,
    positive,
)
from detr_bf.config.plugins import ContextBroadcastingConfig, LocalizationConfig
from detr_bf.config.run import LoadingConfig, OptimizerConfig, RunConfig
from detr_bf.errors import InputError


@dataclass
class ClassifierModelConfig:
    name: str = "deit_small_patch16_224"  # any model of timm, or cifar_resnet20|32|44|56 (He et al. 2016, section 4.2)
    pretrained: bool = False  # timm's weights, from the network or its cache
    options: dict[str, Any] = arguments()  # arguments of timm.create_model: img_size, depth, ...
    dropout: float = below_one(0.0)
    drop_path: float = below_one(0.0)  # stochastic depth; 0.1 in DeiT
    linear_probe: bool = False  # batch norm and a linear layer on a frozen network: nothing else learns


@dataclass
class StreamPluginConfig:
    """What both kinds of batch attention have."""

    enabled: bool = False
    num_layers: int = positive(1, LAYERS)  # layers stacked at one insertion
    dropout: float = below_one(0.5)
    gather: bool = False  # attend over the images of all processes


@dataclass
class InsertedPluginConfig(StreamPluginConfig):
    """BatchFormerV2 among the blocks of a network."""

    layers: Any = "all"  # blocks from 0 in a list, or `all`
    position: str = choice("before", "after")
    shared: bool = True
    heads: int | None = positive(None, 1024)  # null: as many as the blocks have
    lr_factor: float = not_negative(1.0)
    weight_decay: float | None = not_negative(None)  # null: that of the optimizer


@dataclass
class BatchFormerV2PluginConfig(InsertedPluginConfig):
    layers: Any = field(default_factory=lambda: [7])
    mode: str = choice("two_stream", "single_stream", "duplicate")


@dataclass
class BatchFormerPluginConfig(StreamPluginConfig):
    heads: int = positive(4, 1024)
    shared_classifier: bool = True
    lr_factor: float = not_negative(0.1)
    weight_decay: float | None = not_negative(None)


@dataclass
class DiversePatchConfig:
    enabled: bool = False
    cosine: float = not_negative(1.0)
    contrastive: float = not_negative(1.0)
    mixing: float = not_negative(1.0)  # mixes patches of two images in place of mixup and CutMix; 0: those go on


@dataclass
class RelativeLocalizationConfig(LocalizationConfig):
    ramp_epochs: int = not_negative(0)  # 20 in the authors' code: the weight rises, then falls linearly


@dataclass
class PluginsConfig:
    batchformer_v2: BatchFormerV2PluginConfig = field(default_factory=BatchFormerV2PluginConfig)
    batchformer: BatchFormerPluginConfig = field(default_factory=BatchFormerPluginConfig)
    context_broadcasting: ContextBroadcastingConfig = field(default_factory=ContextBroadcastingConfig)
    diverse_patch: DiversePatchConfig = field(default_factory=DiversePatchConfig)
    relative_localization: RelativeLocalizationConfig = field(default_factory=RelativeLocalizationConfig)

    @property
    def batch_former(self) -> BatchFormerV2PluginConfig | BatchFormerPluginConfig:
        """The one kind of batch attention that is on; both cannot be."""
        return self.batchformer_v2 if self.batchformer_v2.enabled else self.batchformer


@dataclass
class ClassifierLossConfig:
    name: str = choice("cross_entropy", "balanced_softmax")
    label_smoothing: float = below_one(0.1)  # cross_entropy
    loss_scale: float = positive(1.0)  # balanced_softmax; 3 as BatchFormer's authors sum their streams


@dataclass
class LongTailConfig:
    """A training split thinned out: n of a class fall by one ratio from class to class (Cui et al. 2019)."""

    imbalance: float = positive(1.0, STEPS)  # images of the first class / images of the last; 1 leaves all
    order: list[int] = indices()  # classes from the most to the fewest images; empty: as they are


@dataclass
class ImageTransformConfig:
    """Sizes in pixels. Augmentation is timm's."""

    size: int = positive(224, WIDTH)
    crop: str = choice("resized", "padded", "none")  # random area and ratio; shifted by up to `padding`; resize alone
    area: list[float] = numbers(0.08, 1.0)  # crop: resized
    padding: int = not_negative(4, WIDTH)  # crop: padded
    horizontal_flip: float = fraction(0.5)
    color_jitter: float = not_negative(0.3, 100)  # only without auto_augment
    auto_augment: str = "rand-m9-mstd0.5-inc1"  # timm's name of a policy; empty: none
    erase: float = fraction(0.25)  # probability of random erasing
    interpolation: str = choice("bicubic", "bilinear")
    eval_crop: float | None = fraction(None)  # share of the resized image seen; null: 0.875 of crop=resized, else 1
    mean: list[float] = numbers(0.485, 0.456, 0.406)
    std: list[float] = numbers(0.229, 0.224, 0.225)

    def check_values(self, prefix: str) -> None:
        if len(self.area) != 2 or not 0 < self.area[0] <= self.area[1] <= 1:
            raise InputError(f"{prefix}area must be two shares of an image, 0 < least <= most <= 1, got {self.area}")
        if not len(self.mean) == len(self.std) == 3 or min(self.std) <= 0:
            raise InputError(
                f"{prefix}mean and std must be three numbers each, for red, green and blue, std greater than 0; got "
                f"{self.mean} and {self.std}"
            )


@dataclass
class MixConfig:
    mixup: float = not_negative(0.8, 1000)  # alpha; 0: off
    cutmix: float = not_negative(1.0, 1000)  # alpha; 0: off
    probability: float = fraction(1.0)  # of mixing a batch at all
    switch: float = fraction(0.5)  # of CutMix where both are on


@dataclass
class ImageDataConfig(LoadingConfig):
    """What classifiers and masked autoencoders both see."""

    name: str = choice(
        "image_folder", "list", "cifar10", "cifar100", "fashion_mnist", "garment_pairs", "digits", "mnist"
    )
    root: str = path("")  # folder of the images; of downloaded data sets the cache, DETR_BF_DATA or .cache if empty
    train: str = path("train")  # image_folder: the folder within root; list: a file of `path label` lines
    val: str = path("val")
    per_class: int | None = positive(None, STEPS)  # training images kept of each class
    long_tail: LongTailConfig = field(default_factory=LongTailConfig)
    transforms: ImageTransformConfig = field(default_factory=ImageTransformConfig)
    repeats: int = positive(1, 1000)  # copies of an image in a batch, each augmented anew; 3 in DeiT


@dataclass
class ClassifierDataConfig(ImageDataConfig):
    mix: MixConfig = field(default_factory=MixConfig)


@dataclass
class ImageOptimizerConfig(OptimizerConfig):
    name: str = choice("adamw", "sgd")
    lr: float = not_negative(5e-4, RATE)  # DeiT: 5e-4 x total batch / 512
    weight_decay: float = not_negative(0.05)  # of matrices; vectors (biases, norms, scales) and tokens have none
    decay_vectors: bool = False  # vectors, too: the recipes of residual networks
    schedule: str = choice("cosine", "step")
    momentum: float = below_one(0.9)  # sgd
    nesterov: bool = False  # sgd
    betas: list[float] = numbers(0.9, 0.999)  # adamw
    warmup_epochs: float = not_negative(5.0)
    min_lr: float = not_negative(1e-5, RATE)  # where the cosine ends; at most lr
    clip_norm: float = not_negative(0.0)

    def check_values(self, prefix: str) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"{prefix}betas must be two numbers from 0 to less than 1, got {self.betas}")
        if self.warmup_epochs and self.warmup_steps:
            raise InputError(f"{prefix}warmup_epochs and {prefix}warmup_steps exclude each other: set one to 0")
        if self.schedule == "cosine" and self.min_lr > self.lr:
            raise InputError(
                f"{prefix}min_lr={self.min_lr:g}, where the cosine ends, must not exceed {prefix}lr={self.lr:g}: "
                "lower it, or give 0"
            )


@dataclass
class ClassifierEvalConfig:
    batch_size: int = positive(128)
    many: int = not_negative(100, STEPS)  # a class of more training images is one of `many`
    few: int = not_negative(20, STEPS)  # a class of fewer is one of `few`, and between them `medium`
    pictures: int = not_negative(24, 1000)  # images on the validation sheet

    def check_values(self, prefix: str) -> None:
        if self.few > self.many:
            raise InputError(f"{prefix}few={self.few} must not exceed {prefix}many={self.many}")


@dataclass
class ClassifierConfig(RunConfig):
    task: str = choice("classification")
    model: ClassifierModelConfig = field(default_factory=ClassifierModelConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    loss: ClassifierLossConfig = field(default_factory=ClassifierLossConfig)
    data: ClassifierDataConfig = field(default_factory=ClassifierDataConfig)
    optimizer: ImageOptimizerConfig = field(default_factory=ImageOptimizerConfig)
    eval: ClassifierEvalConfig = field(default_factory=ClassifierEvalConfig)


@dataclass
class MaskedModelConfig:
    """A masked autoencoder (He et al. 2022, arXiv 2111.06377)."""

    name: str = "vit_base_patch16_224"  # timm's VisionTransformer that is pre-trained
    options: dict[str, Any] = arguments()  # arguments of timm.create_model
    decoder_dim: int = positive(512, WIDTH)
    decoder_depth: int = positive(8, LAYERS)
    decoder_heads: int = positive(16, 1024)
    mask_ratio: float = fraction(0.75)
    normalize_pixels: bool = True  # targets with mean 0 and variance 1 in every patch


@dataclass
class MaskedTransformConfig(ImageTransformConfig):
    """Crops and flips alone."""

    area: list[float] = numbers(0.2, 1.0)
    color_jitter: float = not_negative(0.0, 100)
    auto_augment: str = ""
    erase: float = fraction(0.0)


@dataclass
class MaskedDataConfig(ImageDataConfig):
    transforms: MaskedTransformConfig = field(default_factory=MaskedTransformConfig)


@dataclass
class MaskedOptimizerConfig(ImageOptimizerConfig):
    lr: float = not_negative(1.5e-4, RATE)  # MAE: 1.5e-4 x total batch / 256
    betas: list[float] = numbers(0.9, 0.95)
    warmup_epochs: float = not_negative(40.0)
    min_lr: float = not_negative(0.0, RATE)


@dataclass
class MaskedEvalConfig:
    batch_size: int = positive(128)
    pictures: int = not_negative(8, 1000)


@dataclass
class MaskedConfig(RunConfig):
    task: str = choice("masked_autoencoding")
    model: MaskedModelConfig = field(default_factory=MaskedModelConfig)
    batch_former: InsertedPluginConfig = field(default_factory=InsertedPluginConfig)  # among the decoder's blocks
    data: MaskedDataConfig = field(default_factory=MaskedDataConfig)
    optimizer: MaskedOptimizerConfig = field(default_factory=MaskedOptimizerConfig)
    eval: MaskedEvalConfig = field(default_factory=MaskedEvalConfig)
