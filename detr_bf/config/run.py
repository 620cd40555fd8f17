"""Settings that every run has, whatever is trained: how long, how exact, how often. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass, field

from detr_bf.config.fields import RATE, STEPS, below_one, choice, fraction, indices, not_negative, path, positive, seed


@dataclass
class OptimizerConfig:
    lr: float = not_negative(1e-4, RATE)
    weight_decay: float = not_negative(1e-4)
    schedule: str = choice("step", "cosine")
    drop_epochs: list[int] = indices(200)  # schedule: step
    drop_factor: float = positive(0.1, 1)
    warmup_steps: int = not_negative(0, STEPS)  # a tenth of all steps in a run that is no longer
    clip_norm: float = not_negative(0.1)  # largest gradient norm; 0 does not clip


@dataclass
class EmaConfig:
    enabled: bool = False
    decay: float = below_one(0.9997)


@dataclass
class TrainConfig:
    epochs: int = positive(300)
    max_steps: int | None = positive(None, STEPS)  # stop earlier than `epochs`, in optimiser steps
    batch_size: int = positive(2)  # images of a process
    accumulate: int = positive(1)  # batches of a process per optimiser step
    precision: str = choice("float32", "bf16", "fp16")
    compile: bool = False  # torch.compile: of a detector, the backbone and every encoder and decoder layer
    channels_last: bool = False  # memory format of convolutions
    max_skipped: int = not_negative(0, STEPS)  # steps whose loss or gradient is not finite, left out before it stops
    timeout_minutes: float = positive(30.0)  # that a process waits for the others
    log_every: int = positive(20, STEPS)  # steps
    eval_every: int = positive(1)  # epochs
    tensorboard: bool = False
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclass
class CheckpointConfig:
    """The end of an epoch always saves."""

    every_steps: int = positive(1000, STEPS)
    every_minutes: float | None = positive(30.0)  # null: whatever the clock says
    keep_every: int = not_negative(0)  # epochs; 0 keeps only last, previous and best


@dataclass
class LoadingConfig:
    """What the data of every task have."""

    workers: int = not_negative(2, 512)  # loader processes; 0 loads in the training process
    check: bool = True  # examine the data before the first step
    max_pixels: int = positive(178_956_970, STEPS)  # of an image file; larger ones are refused before they are decoded
    max_unreadable: float = fraction(0.01)  # share of an epoch's images that others may replace when unreadable


@dataclass
class RunConfig:
    task: str = ""  # each schema has its own
    output_dir: str = path("runs/default")
    init_from: str | None = path(None)  # checkpoint whose weights are loaded where they fit
    seed: int = seed(42)
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    data: LoadingConfig = field(default_factory=LoadingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
