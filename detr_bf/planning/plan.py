"""What a training run needs: memory, time, disk, and what its batch means."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from detr_bf.config import DetectionConfig
from detr_bf.planning.machine import SECONDS_OF_A_DAY, Machine, largest_size, published_share, usual_size
from detr_bf.planning.trace import Trace, trace

CONTEXT = 0.6 * 2**30  # bytes that CUDA and its libraries take for themselves
ALLOWANCE = 0.10  # of the rest: workspaces, gradients of activations, fragmentation, NCCL
FILES = 3  # checkpoints of a run: last, previous, best


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU."""

    weights: float
    gradients: float
    moments: float  # two of AdamW for each trained parameter
    averaged: float  # the second copy of the weights, of train.ema
    activations: float  # of the largest images, with losses
    exchange: float  # what batch_former.gather holds for a moment
    allowance: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Schedule:
    """Images, steps, epochs."""

    images_per_step: int  # of all processes and accumulated batches
    steps_per_epoch: int
    steps: int
    epochs: float


@dataclass(frozen=True)
class Time:
    """Of training alone, without evaluation."""

    flops_per_step: float  # of one GPU
    seconds_per_step: float
    days: float
    source: str  # of the seconds


@dataclass(frozen=True)
class Sequence:
    """How many images batch attention spans."""

    alone: int  # those of a process
    gathered: int  # with batch_former.gather
    used: int


@dataclass(frozen=True)
class Rates:
    """Learning rates for this batch by the linear rule; nothing is changed."""

    published_batch: int
    source: str  # of the published batch
    factor: float
    lr: float
    backbone_lr: float


@dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU sends in a step."""

    gradients: float  # ring all-reduce
    exchange: float  # of batch attention's tokens and their gradients


@dataclass(frozen=True)
class Disk:
    """Bytes of checkpoints."""

    file: float
    files: int

    @property
    def total(self) -> float:
        return self.file * self.files


@dataclass(frozen=True)
class Help:
    """A change of settings, on top of those before it, and what is needed then."""

    settings: str
    needed: float  # bytes
    fits: bool
    sequence: Sequence | None


@dataclass(frozen=True)
class Plan:
    """Everything, in bytes and seconds."""

    fits: bool
    available: float  # bytes of a GPU
    memory: Memory
    mixed: float  # bytes needed when lying and upright images meet in a batch
    sequence: Sequence | None  # None without batch attention
    schedule: Schedule
    time: Time
    rates: Rates | None
    traffic: Traffic
    disk: Disk
    helps: tuple[Help, ...]  # where it does not fit

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the totals."""
        totals = {"memory": {**asdict(self.memory), "total": self.memory.total}}
        return {**asdict(self), **totals, "disk": {**asdict(self.disk), "total": self.disk.total}}


def make_plan(config: DetectionConfig, machine: Machine, recipe: DetectionConfig | None = None) -> Plan:
    """The plan of a run of ``config``; ``recipe`` is the published one it comes from, if any.

    Raises:
        InputError: the settings make no detector, or its GPU cannot do the precision.
    """
    machine.check(config)
    found = trace_of(config, machine)
    memory = memory_of(config, machine, found)
    schedule = schedule_of(config, machine)
    height, width = largest_size(config.data.transforms)
    mixed = memory.total + (1 + ALLOWANCE) * memory.activations * (width / height - 1)
    fits = memory.total <= machine.bytes
    return Plan(
        fits=fits,
        available=machine.bytes,
        memory=memory,
        mixed=mixed,
        sequence=sequence_of(config, machine),
        schedule=schedule,
        time=time_of(config, machine, schedule),
        rates=rates_of(config, machine, schedule, recipe),
        traffic=traffic_of(config, machine, found),
        disk=disk_of(config, found),
        helps=() if fits else tuple(helps(config, machine, memory.total)),
    )


def trace_of(config: DetectionConfig, machine: Machine) -> Trace:
    """At the largest image size."""
    return trace(config, machine.classes(config), largest_size(config.data.transforms), processes=machine.gpus)


def memory_of(config: DetectionConfig, machine: Machine, found: Trace) -> Memory:
    """Of a GPU at the largest image size."""
    exchange = 2 * max(found.batch_attention, default=0) if _gathers(config, machine) else 0
    parts = {
        "weights": found.sizes.weights,
        "gradients": found.sizes.trainable,
        "moments": 2 * found.sizes.trainable,
        "averaged": found.sizes.weights if config.train.ema.enabled else 0,
        "activations": found.needed,
        "exchange": exchange,
    }
    return Memory(**parts, allowance=CONTEXT + ALLOWANCE * sum(parts.values()))


def schedule_of(config: DetectionConfig, machine: Machine) -> Schedule:
    """As the trainer counts: an incomplete last batch is left out, an incomplete last step is not."""
    train = config.train
    together = machine.gpus * train.batch_size
    steps_per_epoch = math.ceil((machine.images // together or 1) / train.accumulate)
    steps = train.epochs * steps_per_epoch
    steps = min(steps, train.max_steps or steps)
    return Schedule(together * train.accumulate, steps_per_epoch, steps, steps / steps_per_epoch)


def time_of(config: DetectionConfig, machine: Machine, schedule: Schedule) -> Time:
    """Measured, or estimated at the usual image size."""
    size = usual_size(config.data.transforms)
    usual = trace(config, machine.classes(config), size, processes=machine.gpus)
    flops = usual.flops * config.train.accumulate
    if machine.seconds_per_step is not None:
        seconds, source = machine.seconds_per_step, machine.seconds_source
    elif machine.tflops is not None:
        seconds, source = flops / (machine.tflops * 1e12), "--tflops"
    else:
        least = machine.gpu.least_seconds(usual.work) * config.train.accumulate
        seconds, source = least / published_share(), "estimated"
    return Time(flops, seconds, schedule.steps * seconds / SECONDS_OF_A_DAY, source)


def sequence_of(config: DetectionConfig, machine: Machine) -> Sequence | None:
    """None where no images attend to each other."""
    if not config.batch_former.enabled or config.batch_former.mode == "duplicate":
        return None
    alone = config.train.batch_size
    gathered = alone * machine.gpus
    return Sequence(alone, gathered, gathered if config.batch_former.gather else alone)


def rates_of(
    config: DetectionConfig, machine: Machine, schedule: Schedule, recipe: DetectionConfig | None
) -> Rates | None:
    """None where no published batch is known."""
    if machine.published_batch is not None:
        published, source = machine.published_batch, "--published-batch"
    elif recipe is not None:
        published, source = recipe.train.batch_size * recipe.train.accumulate, "the config file, without overrides"
    else:
        return None
    factor = schedule.images_per_step / published
    optimizer = config.optimizer
    return Rates(published, source, factor, factor * optimizer.lr, factor * optimizer.backbone_lr)


def traffic_of(config: DetectionConfig, machine: Machine, found: Trace) -> Traffic:
    """Of the largest images. A third of query, key and value comes back, and gradients take both ways again."""
    others = (machine.gpus - 1) / machine.gpus
    exchange = 0.0
    if _gathers(config, machine):
        exchange = 2 * sum(found.batch_attention) * (1 + 1 / 3) * others * config.train.accumulate
    return Traffic(2 * others * found.sizes.trainable if machine.gpus > 1 else 0.0, exchange)


def disk_of(config: DetectionConfig, found: Trace) -> Disk:
    """Weights, the optimiser's moments and averaged weights; every file of a run holds them."""
    every = config.checkpoint.keep_every
    copies = 2 if config.train.ema.enabled else 1
    return Disk(
        copies * found.sizes.stored + 2 * found.sizes.trainable, FILES + (config.train.epochs // every if every else 0)
    )


def helps(config: DetectionConfig, machine: Machine, needed: float) -> Iterator[Help]:
    """What needs less, each on top of those before that did, until it fits."""
    applied: dict[str, Any] = {}
    for change in _changes(config, machine):
        changed = copy.deepcopy(config)
        for name, value in {**applied, **change}.items():
            setattr(changed.train, name, value)
        total = memory_of(changed, machine, trace_of(changed, machine)).total
        if total >= needed:
            continue
        needed, applied = total, {**applied, **change}
        settings = " ".join(f"train.{name}={str(value).lower()}" for name, value in applied.items())
        yield Help(settings, total, total <= machine.bytes, sequence_of(changed, machine))
        if total <= machine.bytes:
            return


def _changes(config: DetectionConfig, machine: Machine) -> Iterator[dict[str, Any]]:
    """Settings of ``train``: what costs least first."""
    train = config.train
    if train.precision == "float32":
        yield {"precision": "bf16" if machine.gpu.bf16 else "fp16"}
    if not train.recompute_encoder:
        yield {"recompute_encoder": True}
    for parts in range(2, train.batch_size + 1):
        if train.batch_size % parts == 0:
            yield {"batch_size": train.batch_size // parts, "accumulate": train.accumulate * parts}


def _gathers(config: DetectionConfig, machine: Machine) -> bool:
    return config.batch_former.gather and machine.gpus > 1
