"""Settings of masked pre-training, with types and defaults. Imports no torch.

The defaults are those of MAE (He et al. 2022, arXiv 2111.06377, appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from detr_bf.classification.config import (
    ImageDataConfig,
    ImageOptimizerConfig,
    ImageTransformConfig,
    InsertedPluginConfig,
)
from detr_bf.config.common import (
    LAYERS,
    RATE,
    WIDTH,
    RunConfig,
    arguments,
    choice,
    fraction,
    not_negative,
    numbers,
    positive,
)


@dataclass
class MaskedModelConfig:
    """Encoder, decoder and masking."""

    name: str = "vit_base_patch16_224"  # VisionTransformer of timm to pre-train
    options: dict[str, Any] = arguments()  # further arguments of timm.create_model
    decoder_dim: int = positive(512, WIDTH)  # channels of a token in the decoder
    decoder_depth: int = positive(8, LAYERS)  # blocks of the decoder
    decoder_heads: int = positive(16, 1024)  # attention heads of the decoder
    mask_ratio: float = fraction(0.75)  # share of masked patches
    normalize_pixels: bool = True  # normalise the target pixels of each patch to mean 0 and variance 1


@dataclass
class MaskedTransformConfig(ImageTransformConfig):
    """Resizing and augmentation: by default only crops and flips."""

    area: list[float] = numbers(0.2, 1.0)  # minimum and maximum share of the image; only crop=resized
    color_jitter: float = not_negative(0.0, 100)  # strength; only without auto_augment
    auto_augment: str = ""  # timm's name of a policy; empty: none
    erase: float = fraction(0.0)  # probability of random erasing


@dataclass
class MaskedDataConfig(ImageDataConfig):
    """Data sets of masked autoencoders."""

    transforms: MaskedTransformConfig = field(default_factory=MaskedTransformConfig)


@dataclass
class MaskedOptimizerConfig(ImageOptimizerConfig):
    """Optimizer of masked autoencoders."""

    lr: float = not_negative(1.5e-4, RATE)  # learning rate; 1.5e-4 * total batch / 256 in MAE
    betas: list[float] = numbers(0.9, 0.95)  # only name=adamw
    warmup_epochs: float = not_negative(40.0)  # epochs of linear warm-up; excludes warmup_steps
    min_lr: float = not_negative(0.0, RATE)  # learning rate at the end of schedule=cosine, at most lr


@dataclass
class MaskedEvalConfig:
    """Evaluation of a masked autoencoder."""

    batch_size: int = positive(128)  # images per batch of one process
    pictures: int = not_negative(8, 1000)  # images on the validation sheet


@dataclass
class MaskedConfig(RunConfig):
    """Settings of task=masked_autoencoding."""

    task: str = choice("masked_autoencoding")  # what is trained
    model: MaskedModelConfig = field(default_factory=MaskedModelConfig)
    batch_former: InsertedPluginConfig = field(default_factory=InsertedPluginConfig)  # in the decoder
    data: MaskedDataConfig = field(default_factory=MaskedDataConfig)
    optimizer: MaskedOptimizerConfig = field(default_factory=MaskedOptimizerConfig)
    eval: MaskedEvalConfig = field(default_factory=MaskedEvalConfig)
