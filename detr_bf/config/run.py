"""Settings shared by the configs of all tasks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from detr_bf.config.fields import RATE, STEPS, below_one, choice, fraction, indices, not_negative, path, positive, seed


@dataclass
class OptimizerConfig:
    """Learning rate, its schedule, weight decay and gradient clipping."""

    lr: float = not_negative(1e-4, RATE)  # learning rate
    weight_decay: float = not_negative(1e-4)
    schedule: str = choice("step", "cosine")  # of the learning rate
    drop_epochs: list[int] = indices(200)  # epochs after which lr is multiplied by drop_factor; only schedule=step
    drop_factor: float = positive(0.1, 1)  # factor at each of drop_epochs
    warmup_steps: int = not_negative(0, STEPS)  # steps of linear warm-up; at most the run: else a tenth of it
    clip_norm: float = not_negative(0.1)  # maximum gradient norm; 0: no clipping


@dataclass
class EmaConfig:
    """Exponential moving average of the weights; evaluation uses it if it is on."""

    enabled: bool = False
    decay: float = below_one(0.9997)  # share of the old average kept at each optimizer step


@dataclass
class TrainConfig:
    """Length, batch size and precision of training."""

    epochs: int = positive(300)  # passes over the training data
    max_steps: int | None = positive(None, STEPS)  # stop after this many optimizer steps; null: train all epochs
    batch_size: int = positive(2)  # images per batch of one process
    accumulate: int = positive(1)  # batches per optimizer step of one process
    precision: str = choice("float32", "bf16", "fp16")
    compile: bool = False  # torch.compile; of a detector: its backbone and each encoder and decoder layer
    channels_last: bool = False  # memory format of convolutions
    max_skipped: int = not_negative(0, STEPS)  # steps with a non-finite loss or gradient to skip before stopping
    timeout_minutes: float = positive(30.0)  # maximum time that a process waits for the others
    log_every: int = positive(20, STEPS)  # steps between two lines of the log
    eval_every: int = positive(1)  # epochs between two evaluations
    tensorboard: bool = False  # write TensorBoard files to output_dir
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclass
class CheckpointConfig:
    """Additional checkpoints; the end of each epoch always writes one."""

    every_steps: int = positive(1000, STEPS)  # optimizer steps between two checkpoints
    every_minutes: float | None = positive(30.0)  # minutes between two checkpoints; null: no limit
    keep_every: int = not_negative(0)  # keep the checkpoint of every n-th epoch; 0: only last, previous and best


@dataclass
class LoadingConfig:
    """Data loading and data checks of all tasks."""

    workers: int = not_negative(2, 512)  # loader processes of each training process; 0: load in the training process
    check: bool = True  # check the data before the first step
    max_pixels: int = positive(178_956_970, STEPS)  # pixels of an image file; larger files are refused undecoded
    max_unreadable: float = fraction(0.01)  # share of an epoch's images that may be unreadable and replaced by others


@dataclass
class RunConfig:
    """Settings of a run of any task."""

    output_dir: str = path("runs/default")  # default: runs/NAME, with NAME of the last config file without its suffix
    init_from: str | None = path(None)  # checkpoint whose matching weights are loaded before training; null: none
    seed: int = seed(42)  # of weights, data order, augmentation and dropout
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    data: LoadingConfig = field(default_factory=LoadingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class ContextBroadcastingConfig:
    """Context Broadcasting (Hyeon-Woo et al. 2023, arXiv 2210.08457): add the mean token to all tokens of a block."""

    enabled: bool = False
    layers: Any = "upper"  # upper (second half), all, or a list of blocks (encoder layers of a detector) counted from 0
    scaled: bool = False  # multiply the mean by learned scales (CB_S in the paper)


@dataclass
class LocalizationConfig:
    """Dense relative localization (Liu et al. 2021, arXiv 2106.03746): predict the distance of pairs of tokens."""

    enabled: bool = False
    weight: float | None = not_negative(None)  # of this loss; null: the published 0.01 for a ViT and 0.5 for Swin
    variant: str = choice("abs", "signed", "ce", "reg", "all")  # see docs/recipes.md; all: abs at every block
    num_pairs: int = positive(64, 10**6)  # pairs of tokens per image
    normalize: bool = True  # distances as a share of the grid; false: in cells, as in the authors' code
