"""Settings of a classifier's run, with types and defaults. Imports no torch.

The defaults are DeiT's published ImageNet recipe (Touvron et al. 2021, arXiv 2012.12877, table 9), except for the batch
size and drop path, and for each plug-in those of its paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.config.common import (
    LAYERS,
    RATE,
    STEPS,
    WIDTH,
    ContextBroadcastingConfig,
    LoadingConfig,
    LocalizationConfig,
    OptimizerConfig,
    RunConfig,
    arguments,
    below_one,
    check_betas,
    choice,
    fraction,
    indices,
    not_negative,
    numbers,
    path,
    positive,
    seed,
)


@dataclass
class ClassifierModelConfig:
    """Network of a classifier."""

    name: str = "deit_small_patch16_224"  # any model of timm, or cifar_resnetN (He et al. 2016, section 4.2)
    pretrained: bool = False  # load timm's weights, from its cache or the internet
    options: dict[str, Any] = arguments()  # further arguments of timm.create_model, such as img_size and depth
    dropout: float = below_one(0.0)  # before the classifier
    drop_path: float = below_one(0.0)  # stochastic depth; 0.1 in DeiT
    experts: int = positive(1, LAYERS)  # experts of RIDE, for ResNets with loss.name=ride; 1: a plain network
    variant: str = choice(
        "plain", "talking_heads", "uniform_head", "squeeze_excitation", "extra_attention", "extra_mlp"
    )  # changed ViT or DeiT of a comparison, see docs/recipes.md
    linear_probe: bool = False  # train only batch norm and a linear classifier on the frozen network
    frozen: bool = False  # train only the classifier and the plug-ins, on the frozen network


@dataclass
class StreamPluginConfig:
    """Settings shared by BatchFormer and BatchFormerV2."""

    enabled: bool = False  # use batch attention
    num_layers: int = positive(1, LAYERS)  # stacked layers per insertion
    dropout: float = below_one(0.5)  # probability, in the layers of batch attention
    gather: bool = False  # attend over the images of all processes in training


@dataclass
class InsertedPluginConfig(StreamPluginConfig):
    """BatchFormerV2 between the blocks of a ViT."""

    layers: Any = "all"  # blocks with an insertion: all, or a list counted from 0
    position: str = choice("before", "after")  # of the block
    shared: bool = True  # one module for all insertions; false: one module each
    heads: int | None = positive(None, 1024)  # attention heads; null: as many as the blocks have
    lr_factor: float = not_negative(1.0)  # learning rate as a multiple of optimizer.lr
    weight_decay: float | None = not_negative(None)  # null: optimizer.weight_decay


@dataclass
class BatchFormerV2PluginConfig(InsertedPluginConfig):
    """BatchFormerV2 of a classifier (Hou et al. 2022, arXiv 2204.01254)."""

    layers: Any = field(default_factory=lambda: [7])  # blocks with an insertion: all, or a list counted from 0
    mode: str = choice("two_stream", "single_stream", "duplicate", "self_only")  # see docs/batch_attention.md
    init: str = choice("xavier", "pytorch")  # initial weights: DETR's, or those of nn.TransformerEncoderLayer
    log_attention: bool = False  # log how much images attend to each other, every train.log_every steps


@dataclass
class BatchFormerPluginConfig(StreamPluginConfig):
    """BatchFormer before the classifier (Hou et al. 2022, arXiv 2203.01522)."""

    heads: int = positive(4, 1024)  # attention heads
    shared_classifier: bool = True  # classify plain features as well; false: batch-attended features only
    init: str = choice("xavier", "pytorch")  # initial weights: DETR's, or those of nn.TransformerEncoderLayer
    lr_factor: float = not_negative(0.1)  # learning rate as a multiple of optimizer.lr
    weight_decay: float | None = not_negative(None)  # null: optimizer.weight_decay


@dataclass
class DiversePatchConfig:
    """DiversePatch (Gong et al. 2021, arXiv 2104.12753): weights of its three losses, and its CutMix."""

    enabled: bool = False  # use this plug-in
    cosine: float = not_negative(1.0)  # cosine similarity of the patches of an image
    contrastive: float = not_negative(1.0)  # patches of the last block against their embeddings
    mixing: float = not_negative(1.0)  # classes of mixed patches; needs patch_cutmix
    patch_cutmix: bool = True  # mix whole patches, instead of mixup and CutMix of data.mix; false: keep these

    def check_values(self, prefix: str) -> None:
        if self.enabled and self.mixing and not self.patch_cutmix:
            raise InputError(
                f"{prefix}mixing={self.mixing:g} classifies patches that are mixed whole, and {prefix}patch_cutmix is "
                f"false: set {prefix}mixing=0 or {prefix}patch_cutmix=true"
            )


@dataclass
class RelativeLocalizationConfig(LocalizationConfig):
    """Relative localization of a classifier."""

    pool: bool | None = None  # average the tokens to a grid of half the size first; null: for a ViT only
    ramp_epochs: int = not_negative(0)  # epochs in which the weight rises before it falls; 0: constant weight


@dataclass
class PluginsConfig:
    """Plug-ins of a classifier."""

    batchformer_v2: BatchFormerV2PluginConfig = field(default_factory=BatchFormerV2PluginConfig)
    batchformer: BatchFormerPluginConfig = field(default_factory=BatchFormerPluginConfig)
    context_broadcasting: ContextBroadcastingConfig = field(default_factory=ContextBroadcastingConfig)
    diverse_patch: DiversePatchConfig = field(default_factory=DiversePatchConfig)
    relative_localization: RelativeLocalizationConfig = field(default_factory=RelativeLocalizationConfig)

    @property
    def batch_former(self) -> BatchFormerV2PluginConfig | BatchFormerPluginConfig:
        """The enabled kind of batch attention; at most one can be enabled."""
        return self.batchformer_v2 if self.batchformer_v2.enabled else self.batchformer


@dataclass
class RideConfig:
    """Loss of RIDE's experts (Wang et al. 2021, arXiv 2010.01809); only name=ride."""

    diversity: float = not_negative(0.2)  # weight of the divergence of each expert from the mean, which is maximised
    margin: float = not_negative(0.5)  # LDAM's margin of the smallest class, as a cosine
    reweight_epoch: int = not_negative(80)  # first epoch with weights and temperatures of the classes
    reweight_factor: float = below_one(0.02)  # dependence of these temperatures on the size of the classes


@dataclass
class ClassifierLossConfig:
    """Classification loss."""

    name: str = choice("cross_entropy", "balanced_softmax", "ride")  # kind of loss
    ride: RideConfig = field(default_factory=RideConfig)
    label_smoothing: float = below_one(0.1)  # only name=cross_entropy
    loss_scale: float = positive(1.0)  # factor of name=balanced_softmax; 3 in BatchFormer's code, which sums streams


@dataclass
class LongTailConfig:
    """Training split with exponentially decreasing class sizes (Cui et al. 2019)."""

    imbalance: float = positive(1.0, STEPS)  # images of the largest class / images of the smallest; 1: keep all images
    order: list[int] = indices()  # classes from the most to the fewest images; empty: in the order of their labels


@dataclass
class PixelsConfig:
    """Size, cropping and normalisation of images; sizes in pixels."""

    size: int = positive(224, WIDTH)  # side of the square images of the network
    area: list[float] = numbers(0.08, 1.0)  # minimum and maximum share of the image in a crop
    horizontal_flip: float = fraction(0.5)  # probability of a flip
    interpolation: str = choice("bicubic", "bilinear")  # of resizing
    mean: list[float] = numbers(0.485, 0.456, 0.406)  # of red, green and blue, in [0, 1]
    std: list[float] = numbers(0.229, 0.224, 0.225)  # of red, green and blue, in [0, 1]

    def check_values(self, prefix: str) -> None:
        if len(self.area) != 2 or not 0 < self.area[0] <= self.area[1] <= 1:
            raise InputError(f"{prefix}area must be two shares of an image, 0 < first <= second <= 1, got {self.area}")
        if not len(self.mean) == len(self.std) == 3 or min(self.std) <= 0:
            raise InputError(
                f"{prefix}mean and std must be three numbers each, for red, green and blue, std greater than 0; got "
                f"{self.mean} and {self.std}"
            )


@dataclass
class ImageTransformConfig(PixelsConfig):
    """Resizing and timm's augmentation; sizes in pixels."""

    crop: str = choice("resized", "padded", "none")  # random area and ratio; random shift; only resize
    area: list[float] = numbers(0.08, 1.0)  # minimum and maximum share of the image; only crop=resized
    padding: int = not_negative(4, WIDTH)  # maximum shift; only crop=padded
    color_jitter: float = not_negative(0.3, 100)  # strength; only without auto_augment
    auto_augment: str = "rand-m9-mstd0.5-inc1"  # timm's name of a policy, or cifar10 (AutoAugment's); empty: none
    cutout: int = not_negative(0, WIDTH)  # side of a black square at a random place; 0: off
    erase: float = fraction(0.25)  # probability of random erasing
    eval_crop: float | None = fraction(None)  # share of the resized image; null: 0.875 if crop=resized, otherwise 1


@dataclass
class MixConfig:
    """Mixup and CutMix."""

    mixup: float = not_negative(0.8, 1000)  # alpha of mixup; 0: off
    cutmix: float = not_negative(1.0, 1000)  # alpha of CutMix; 0: off
    probability: float = fraction(1.0)  # probability that a batch is mixed
    switch: float = fraction(0.5)  # probability of CutMix if both are on


@dataclass
class ImageSetConfig(LoadingConfig):
    """Data sets of images without their transforms."""

    name: str = choice(
        "image_folder", "list", "cifar10", "cifar100", "fashion_mnist", "garment_pairs", "digits", "mnist"
    )  # source of the images
    root: str = path("")  # folder of the images; of downloaded data sets the cache, empty: DETR_BF_DATA or .cache
    train: str = path("train")  # name=image_folder: folder in root; name=list: file with lines `path label`
    val: str = path("val")  # as train
    per_class: int | None = positive(None, STEPS)  # maximum number of training images per class; null: all
    subset_seed: int | None = seed(0)  # chooses the images that per_class and long_tail keep; null: the seed of the run
    long_tail: LongTailConfig = field(default_factory=LongTailConfig)
    repeats: int = positive(1, 1000)  # copies of an image, two of them never in one batch of a process; DeiT: 3


@dataclass
class ImageDataConfig(ImageSetConfig):
    """Data sets of classifiers and masked autoencoders."""

    transforms: ImageTransformConfig = field(default_factory=ImageTransformConfig)


@dataclass
class ClassifierDataConfig(ImageDataConfig):
    """Data sets of classifiers."""

    val_subset: bool = False  # val has only some of the classes, and predictions are scored among these
    val_labels: str = path("")  # JSON list of the labels of each validation image, by file name; empty: one, the folder
    mix: MixConfig = field(default_factory=MixConfig)


@dataclass
class ImageOptimizerConfig(OptimizerConfig):
    """Optimizer of classifiers and masked autoencoders."""

    name: str = choice("adamw", "sgd")  # kind of optimizer
    lr: float = not_negative(5e-4, RATE)  # learning rate; 5e-4 * total batch / 512 in DeiT
    weight_decay: float = not_negative(0.05)  # of matrices; biases, norms, scales and tokens have none
    decay_vectors: bool = False  # apply weight_decay to all weights, as recipes of residual networks do
    schedule: str = choice("cosine", "step")  # of the learning rate
    momentum: float = below_one(0.9)  # only name=sgd
    nesterov: bool = False  # only name=sgd
    betas: list[float] = numbers(0.9, 0.999)  # only name=adamw
    warmup_epochs: float = not_negative(5.0)  # epochs of linear warm-up; excludes warmup_steps
    min_lr: float = not_negative(1e-5, RATE)  # learning rate at the end of schedule=cosine, at most lr
    clip_norm: float = not_negative(0.0)  # maximum gradient norm; 0: no clipping

    def check_values(self, prefix: str) -> None:
        check_betas(prefix, self.betas)
        if self.warmup_epochs and self.warmup_steps:
            raise InputError(f"{prefix}warmup_epochs and {prefix}warmup_steps exclude each other: set one to 0")
        if self.schedule == "cosine" and self.min_lr > self.lr:
            raise InputError(
                f"{prefix}min_lr={self.min_lr:g}, the end of the cosine, must not exceed {prefix}lr={self.lr:g}: "
                "lower it, or set it to 0"
            )


@dataclass
class ClassifierEvalConfig:
    """Evaluation of a classifier."""

    batch_size: int = positive(128)  # images per batch of one process
    many: int = not_negative(100, STEPS)  # classes with more training images than this are reported as many
    few: int = not_negative(20, STEPS)  # classes with fewer than this are reported as few, the others as medium
    pictures: int = not_negative(24, 1000)  # images on the validation sheet

    def check_values(self, prefix: str) -> None:
        if self.few > self.many:
            raise InputError(f"{prefix}few={self.few} must not exceed {prefix}many={self.many}")


@dataclass
class ClassifierConfig(RunConfig):
    """Settings of task=classification."""

    task: str = choice("classification")  # what is trained
    model: ClassifierModelConfig = field(default_factory=ClassifierModelConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    loss: ClassifierLossConfig = field(default_factory=ClassifierLossConfig)
    data: ClassifierDataConfig = field(default_factory=ClassifierDataConfig)
    optimizer: ImageOptimizerConfig = field(default_factory=ImageOptimizerConfig)
    eval: ClassifierEvalConfig = field(default_factory=ClassifierEvalConfig)

    def check_values(self, prefix: str) -> None:
        super().check_values(prefix)
        experts, loss = self.model.experts, self.loss.name
        if (experts > 1) != (loss == "ride"):
            raise InputError(
                f"{prefix}model.experts={experts} and {prefix}loss.name={loss}: the loss of RIDE needs two or more "
                "experts, and several experts need the loss of RIDE: set loss.name=ride and model.experts=3, or neither"
            )
        if loss == "ride" and self.data.mix.probability and (self.data.mix.mixup or self.data.mix.cutmix):
            raise InputError(
                f"{prefix}loss.name=ride needs one label for each image: set {prefix}data.mix.probability=0"
            )
