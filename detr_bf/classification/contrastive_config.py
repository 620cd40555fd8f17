"""Settings of contrastive pre-training, with types and defaults. Imports no torch.

The defaults are those of MoCo v3 for a ResNet-50 and 100 epochs (Chen et al. 2021, arXiv 2104.02057, and its code).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from detr_bf.classification.config import ImageOptimizerConfig, ImageSetConfig, PixelsConfig, StreamPluginConfig
from detr_bf.common.errors import InputError
from detr_bf.config.common import (
    RATE,
    WIDTH,
    RunConfig,
    arguments,
    below_one,
    choice,
    fraction,
    not_negative,
    numbers,
    positive,
)


@dataclass
class ContrastiveModelConfig:
    """Encoder, projector, predictor and momentum encoder."""

    name: str = "resnet50"  # network of timm to pre-train: a ViT, a ResNet, or another one with pooled features
    options: dict[str, Any] = arguments()  # further arguments of timm.create_model
    hidden: int = positive(4096, WIDTH)  # channels of the hidden layers of projector and predictor
    dim: int = positive(256, WIDTH)  # channels of an embedding
    momentum: float = fraction(0.99)  # share of the momentum encoder that a step keeps
    momentum_cosine: bool = True  # raise momentum to 1 over the run
    freeze_patches: bool = True  # do not train the patch projection of a ViT


@dataclass
class ContrastiveBatchFormerConfig(StreamPluginConfig):
    """One BatchFormer before both projectors (Hou et al. 2022, arXiv 2203.01522, section 4.4)."""

    heads: int = positive(4, 1024)  # attention heads
    frozen: bool = False  # keep the initial weights, as the released code does
    init: str = choice("pytorch", "xavier")  # initial weights: those of nn.TransformerEncoderLayer, or DETR's
    lr_factor: float = not_negative(1.0)  # learning rate as a multiple of optimizer.lr
    weight_decay: float | None = not_negative(None)  # null: optimizer.weight_decay


@dataclass
class ContrastiveLossConfig:
    """InfoNCE of queries among the keys of all processes."""

    temperature: float = positive(1.0)  # of the similarities; 0.2 for a ViT
    stream_scale: float = positive(4.0)  # factor of the mean over the four pairs of streams; 4: their sum, as released


@dataclass
class ViewTransformConfig(PixelsConfig):
    """Augmentation of the two views."""

    area: list[float] = numbers(0.2, 1.0)  # minimum and maximum share of the image; 0.08 for a ViT
    color_jitter: float = not_negative(0.4, 1)  # strength for brightness and contrast; saturation 1/2, hue 1/4 of it
    jitter_prob: float = fraction(0.8)  # probability of color_jitter
    grey: float = fraction(0.2)  # probability of a grey image
    blur: list[float] = numbers(1.0, 0.1)  # probability of a Gaussian blur, of the first and of the second view
    solarize: float = fraction(0.2)  # probability, of the second view alone

    def check_values(self, prefix: str) -> None:
        super().check_values(prefix)
        if len(self.blur) != 2 or not all(0 <= each <= 1 for each in self.blur):
            raise InputError(f"{prefix}blur must be two probabilities from 0 to 1, one for each view; got {self.blur}")


@dataclass
class ContrastiveDataConfig(ImageSetConfig):
    """Data sets of contrastive pre-training; labels are not used."""

    transforms: ViewTransformConfig = field(default_factory=ViewTransformConfig)


@dataclass
class ContrastiveOptimizerConfig(ImageOptimizerConfig):
    """Optimizer of contrastive pre-training."""

    name: str = choice("lars", "adamw", "sgd")  # kind of optimizer; adamw for a ViT
    lr: float = not_negative(0.6, RATE)  # learning rate; 0.6 * total batch / 256 for 100 epochs, 1.5e-4 * for a ViT
    weight_decay: float = not_negative(1e-6)  # of matrices; 0.1 for a ViT
    momentum: float = below_one(0.9)  # only name=lars and sgd
    warmup_epochs: float = not_negative(10.0)  # epochs of linear warm-up; excludes warmup_steps
    min_lr: float = not_negative(0.0, RATE)  # learning rate at the end of schedule=cosine, at most lr


@dataclass
class ContrastiveEvalConfig:
    """Evaluation of contrastive pre-training."""

    batch_size: int = positive(128)  # images per batch of one process


@dataclass
class ContrastiveConfig(RunConfig):
    """Settings of task=contrastive_learning."""

    task: str = choice("contrastive_learning")  # what is trained
    model: ContrastiveModelConfig = field(default_factory=ContrastiveModelConfig)
    batch_former: ContrastiveBatchFormerConfig = field(default_factory=ContrastiveBatchFormerConfig)
    loss: ContrastiveLossConfig = field(default_factory=ContrastiveLossConfig)
    data: ContrastiveDataConfig = field(default_factory=ContrastiveDataConfig)
    optimizer: ContrastiveOptimizerConfig = field(default_factory=ContrastiveOptimizerConfig)
    eval: ContrastiveEvalConfig = field(default_factory=ContrastiveEvalConfig)

    def check_values(self, prefix: str) -> None:
        super().check_values(prefix)
        if self.data.repeats > 1:
            raise InputError(
                f"{prefix}data.repeats={self.data.repeats}: copies of an image in the batches of different processes "
                "would be each other's negatives; leave it at 1"
            )
