"""Plan of a training run: memory, time, disk, batch attention, learning rates, and settings that save memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from detr_bf.assembly.training import resolved
from detr_bf.common.errors import InputError
from detr_bf.config import DetectionConfig
from detr_bf.config.common import resolved_number
from detr_bf.planning.machine import SECONDS_PER_DAY, Machine, largest_size, published_share, usual_size
from detr_bf.planning.trace import Trace, trace

CONTEXT = 0.6 * 2**30  # bytes used by CUDA and its libraries
ALLOWANCE = 0.10  # share of the rest: workspaces, gradients of activations, fragmentation, NCCL
FILES = 3  # checkpoints of a run: last, previous, best


@dataclass(frozen=True)
class Memory:
    """Bytes needed on one GPU."""

    weights: float
    gradients: float  # beside the activations
    moments: float  # two of AdamW for each trainable parameter
    averaged: float  # averaged weights of train.ema
    activations: float  # at the largest image size, with losses
    exchange: float  # temporary memory of batch_former.gather
    allowance: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Schedule:
    """Number of images, steps and epochs."""

    images_per_step: int  # of all processes and accumulated batches
    steps_per_epoch: int
    steps: int
    epochs: float


@dataclass(frozen=True)
class Time:
    """Time of training without evaluation."""

    flops_per_step: float  # on one GPU
    seconds_per_step: float
    days: float
    source: str  # origin of seconds_per_step


@dataclass(frozen=True)
class AttentionSpan:
    """Number of images that batch attention spans."""

    alone: int  # images of one process
    gathered: int  # with batch_former.gather
    used: int  # with the config's setting


@dataclass(frozen=True)
class Rates:
    """Learning rates for this batch by the linear rule; nothing is changed."""

    published_batch: int
    source: str  # origin of the published batch
    factor: float
    lr: float
    backbone_lr: float


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends in a step."""

    gradients: float  # ring all-reduce
    exchange: float  # tokens of batch attention and their gradients


@dataclass(frozen=True)
class Disk:
    """Bytes of checkpoints."""

    file: float
    files: int

    @property
    def total(self) -> float:
        return self.file * self.files


@dataclass(frozen=True)
class Suggestion:
    """Cumulative changes of settings, and the memory needed with them."""

    settings: str
    needed: float  # bytes
    fits: bool
    sequence: AttentionSpan | None


@dataclass(frozen=True)
class Plan:
    """The whole plan, in bytes and seconds."""

    fits: bool
    available: float  # bytes of a GPU
    memory: Memory
    mixed: float  # peak bytes if a batch mixes landscape and portrait
    sequence: AttentionSpan | None  # None: without batch attention
    schedule: Schedule
    time: Time
    rates: Rates | None
    traffic: Traffic
    disk: Disk
    helps: tuple[Suggestion, ...]  # if it does not fit

    def to_dict(self) -> dict[str, Any]:
        """Return all values with totals, for JSON."""
        totals = {"memory": {**asdict(self.memory), "total": self.memory.total}}
        return {**asdict(self), **totals, "disk": {**asdict(self.disk), "total": self.disk.total}}


def make_plan(config: DetectionConfig, machine: Machine, recipe: DetectionConfig | None = None) -> Plan:
    """Plan a run; ``recipe`` are the published settings that ``config`` is based on, if any.

    Raises:
        InputError: no detector can be built from the settings, or the GPU does not support the precision.
    """
    if config.train.precision == "bf16" and not machine.gpu.bf16:
        raise InputError(f"train.precision=bf16, which {machine.gpu.title} cannot do: use train.precision=fp16")
    found = trace_of(config, machine)
    memory = memory_of(config, machine, found)
    time = time_of(config, machine)
    schedule = schedule_of(config, machine, time.seconds_per_step)
    config = resolved(config, schedule.steps)
    height, width = largest_size(config.data, config.size_divisor)
    mixed = memory.total + (1 + ALLOWANCE) * memory.activations * (width / height - 1)
    fits = memory.total <= machine.bytes
    return Plan(
        fits=fits,
        available=machine.bytes,
        memory=memory,
        mixed=mixed,
        sequence=sequence_of(config, machine),
        schedule=schedule,
        time=replace(time, days=schedule.steps * time.seconds_per_step / SECONDS_PER_DAY),
        rates=rates_of(config, machine, schedule, recipe),
        traffic=traffic_of(config, machine, found),
        disk=disk_of(config, found),
        helps=() if fits else tuple(suggestions(config, machine, memory.total)),
    )


def trace_of(config: DetectionConfig, machine: Machine) -> Trace:
    """Trace a step at the largest image size."""
    return trace(
        config, machine.classes(config), largest_size(config.data, config.size_divisor), processes=machine.gpus
    )


def memory_of(config: DetectionConfig, machine: Machine, found: Trace) -> Memory:
    """Return the memory of one GPU at the largest image size.

    In one process without accumulation, gradients take the memory of the activations that the backward pass frees: only
    gradients larger than these activations are added. With several processes or accumulation, all gradients are added.
    """
    remain = machine.gpus > 1 or config.train.accumulate > 1
    exchange = 2 * max(found.batch_attention, default=0) if _gathers(config, machine) else 0
    parts = {
        "weights": found.sizes.weights,
        "gradients": found.sizes.trainable if remain else max(found.sizes.trainable - found.needed, 0),
        "moments": 2 * found.sizes.trainable,
        "averaged": found.sizes.weights if config.train.ema.enabled else 0,
        "activations": found.needed,
        "exchange": exchange,
    }
    return Memory(**parts, allowance=CONTEXT + ALLOWANCE * sum(parts.values()))


def schedule_of(config: DetectionConfig, machine: Machine, seconds_per_step: float) -> Schedule:
    """Count steps as the trainer does: an incomplete last batch is dropped, an incomplete last step is not.

    ``seconds_per_step`` tells the steps of a run of ``train.minutes``.
    """
    train = config.train
    together = machine.gpus * train.batch_size
    steps_per_epoch = math.ceil((machine.images // together or 1) / train.accumulate)
    steps = train.epochs * steps_per_epoch
    if train.minutes is not None:
        steps = max(1, round(60 * train.minutes / seconds_per_step))
    steps = min(steps, train.max_steps or steps)
    return Schedule(together * train.accumulate, steps_per_epoch, steps, steps / steps_per_epoch)


def time_of(config: DetectionConfig, machine: Machine) -> Time:
    """Return the measured step time, or an estimate at the usual image size, without the days of the run."""
    size = usual_size(config.data)
    usual = trace(config, machine.classes(config), size, processes=machine.gpus)
    flops = usual.flops * config.train.accumulate
    if machine.seconds_per_step is not None:
        seconds, source = machine.seconds_per_step, machine.seconds_source
    elif machine.tflops is not None:
        seconds, source = flops / (machine.tflops * 1e12), "--tflops"
    else:
        least = machine.gpu.least_seconds(usual.work) * config.train.accumulate
        seconds, source = least / published_share(), "estimated"
    return Time(flops, seconds, 0.0, source)


def sequence_of(config: DetectionConfig, machine: Machine) -> AttentionSpan | None:
    """Return the span of batch attention, None if it is off or mixes no images of the batch."""
    former = config.batch_former
    if not former.enabled or former.references or former.mode in ("duplicate", "self_only"):
        return None
    alone = config.train.batch_size
    gathered = alone * machine.gpus
    return AttentionSpan(alone, gathered, gathered if former.gather else alone)


def rates_of(
    config: DetectionConfig, machine: Machine, schedule: Schedule, recipe: DetectionConfig | None
) -> Rates | None:
    """Return learning rates by the linear rule, None without a published batch."""
    if machine.published_batch is not None:
        published, source = machine.published_batch, "--published-batch"
    elif recipe is not None:
        published, source = recipe.train.batch_size * recipe.train.accumulate, "the config file, without overrides"
    else:
        return None
    factor = schedule.images_per_step / published
    optimizer = config.optimizer
    return Rates(
        published,
        source,
        factor,
        factor * resolved_number(optimizer.lr),
        factor * resolved_number(optimizer.backbone_lr),
    )


def traffic_of(config: DetectionConfig, machine: Machine, found: Trace) -> Traffic:
    """Return the traffic at the largest image size.

    Batch attention sends query, key and value and receives the result, a third of that; gradients double the sum.
    """
    others = (machine.gpus - 1) / machine.gpus
    exchange = 0.0
    if _gathers(config, machine):
        exchange = 2 * sum(found.batch_attention) * (1 + 1 / 3) * others * config.train.accumulate
    return Traffic(2 * others * found.sizes.trainable if machine.gpus > 1 else 0.0, exchange)


def disk_of(config: DetectionConfig, found: Trace) -> Disk:
    """Return the checkpoints' size: weights, averaged weights and moments in each file."""
    every = config.checkpoint.keep_every
    copies = 2 if config.train.ema.enabled else 1
    return Disk(
        copies * found.sizes.stored + 2 * found.sizes.trainable, FILES + (config.train.epochs // every if every else 0)
    )


def suggestions(config: DetectionConfig, machine: Machine, needed: float) -> Iterator[Suggestion]:
    """Yield cumulative changes that need less memory, until the run fits."""
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
        yield Suggestion(settings, total, total <= machine.bytes, sequence_of(changed, machine))
        if total <= machine.bytes:
            return


def _changes(config: DetectionConfig, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield changes of ``train`` settings, the least costly first."""
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
