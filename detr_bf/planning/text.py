"""Description of a plan in English."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from detr_bf.common.text import counted
from detr_bf.config import DetectionConfig
from detr_bf.config.common import resolved_number
from detr_bf.planning.machine import (
    ASPECT,
    GB,
    PUBLISHED_BATCH,
    PUBLISHED_DAYS,
    PUBLISHED_EPOCHS,
    PUBLISHED_GPUS,
    Machine,
    largest_size,
    published_seconds_per_step,
    published_share,
    usual_size,
)
from detr_bf.planning.plan import ALLOWANCE, CONTEXT, Plan, Rates, Time
from detr_bf.planning.trace import OBJECTS, kernels_assumed

CLOSE = 0.9  # share of a GPU's memory above which a plan barely fits


def describe_plan(plan: Plan, config: DetectionConfig, machine: Machine) -> str:
    """Return all numbers, advice and assumptions of a plan."""
    train = config.train
    together = f"{counted(train.batch_size, 'image')} each, {counted(train.accumulate, 'batch', 'batches')} a step"
    return "\n".join(
        [
            f"{machine.gpus} x {machine.gpu.title}, {_gb(machine.bytes)} each; {together}, {train.precision}",
            *_memory(plan),
            *_time(plan, machine),
            *_sequence(plan, config),
            *_rates(plan.rates, plan, config),
            *_traffic(plan),
            "",
            f"Checkpoints: {_gb(plan.disk.file)} a file, {_gb(plan.disk.total)} for the run's {plan.disk.files} files",
            "",
            "Assumptions:",
            *(f"  - {line}" for line in assumptions(plan, config, machine)),
        ]
    )


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield ""
    yield f"Memory of a GPU: {_gb(memory.total)}"
    for name, size in (
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("moments of AdamW", memory.moments),
        ("averaged weights (train.ema)", memory.averaged),
        ("activations and losses", memory.activations),
        ("exchange of batch_former.gather, temporary", memory.exchange),
        ("allowance", memory.allowance),
    ):
        if size:
            yield f"  {_gb(size):>9}  {name}"
    if not plan.fits:
        yield f"  does not fit: needs {_gb(memory.total)} of {_gb(plan.available)}"
        yield from _helps(plan)
    elif memory.total > CLOSE * plan.available:
        yield f"  fits, barely: {_gb(memory.total)} of {_gb(plan.available)}"
    else:
        yield f"  fits: {_gb(memory.total)} of {_gb(plan.available)}"
    if plan.fits and plan.mixed > plan.available:
        yield (
            f"  but a batch of landscape and portrait images is padded to a square: up to {_gb(plan.mixed)}, which "
            "does not fit. Use data.aspect_buckets=2 or more to separate them"
        )


def _helps(plan: Plan) -> Iterator[str]:
    if not plan.helps:
        yield "  no setting of train helps: use smaller images (data.transforms) or a smaller model"
        return
    yield "  changes that help, each on top of those above:"
    for step in plan.helps:
        verdict = "fits" if step.fits else "does not fit"
        if step.sequence and plan.sequence and step.sequence != plan.sequence:
            verdict += (
                f"; batch attention then spans {step.sequence.used} images instead of {plan.sequence.used}, each "
                "accumulated batch separately"
            )
        yield f"    {step.settings}: {_gb(step.needed)}, {verdict}"
    if not plan.helps[-1].fits:
        yield "    beyond that: smaller images (data.transforms) or a smaller model"


def _time(plan: Plan, machine: Machine) -> Iterator[str]:
    schedule, time = plan.schedule, plan.time
    rate = time.flops_per_step / time.seconds_per_step / 1e12
    yield ""
    yield (
        f"Steps: {schedule.images_per_step} image{'s' * (schedule.images_per_step != 1)} each, "
        f"{schedule.steps_per_epoch} an epoch of {machine.images} image{'s' * (machine.images != 1)}, "
        f"{schedule.steps} in {schedule.epochs:.4g} epoch{'s' * (schedule.epochs != 1)}"
    )
    yield f"Time: {time.seconds_per_step:.3f} s a step ({time.source}), {_duration(time.days)} for the run, " + (
        f"without evaluation; {time.flops_per_step / 1e12:.3g} TFLOP a step and GPU, {rate:.3g} TFLOP/s"
    )


def _sequence(plan: Plan, config: DetectionConfig) -> Iterator[str]:
    yield ""
    if plan.sequence is None:
        former = config.batch_former
        if former.enabled and former.references and former.mode not in ("duplicate", "self_only"):
            yield "Batch attention is between each image and its reference, which the backbone reads too"
            return
        off = "is off" if not former.enabled else f"mixes no images in mode {former.mode}"
        yield f"Batch attention {off}"
        return
    span = plan.sequence
    of_tokens = config.batch_former.at != "queries"
    gather = f" (with batch_former.gather {span.gathered}, without {span.alone})" if of_tokens else ""
    yield f"Batch attention spans {span.used} images{gather}; accumulation does not increase this"
    if plan.sequence.used < 2:
        more = ", or set batch_former.gather=true on more GPUs" if of_tokens else ""
        yield f"  an image attends only to itself: raise train.batch_size{more}"


def _rates(rates: Rates | None, plan: Plan, config: DetectionConfig) -> Iterator[str]:
    yield ""
    optimizer = config.optimizer
    if rates is None:
        yield "Learning rate: no published batch to compare with; give --published-batch"
        return
    images = plan.schedule.images_per_step
    head = f"Learning rate: published for {rates.published_batch} images a step ({rates.source}), here {images}"
    if rates.factor == 1:
        yield f"{head}: leave optimizer.lr={resolved_number(optimizer.lr):g}"
        return
    yield f"{head}, x {rates.factor:.4g}"
    yield (
        f"  linear rule: optimizer.lr={rates.lr:.4g} optimizer.backbone_lr={rates.backbone_lr:.4g} instead of "
        f"{resolved_number(optimizer.lr):g} and {resolved_number(optimizer.backbone_lr):g}; the plan changes no setting"
    )
    if rates.factor > 1:
        yield "  use warm-up, for example optimizer.warmup_steps=1000"


def _traffic(plan: Plan) -> Iterator[str]:
    traffic = plan.traffic
    if traffic.gradients:
        yield ""
        yield f"Each GPU sends {_gb(traffic.gradients)} of gradients a step"
    if traffic.exchange:
        yield (
            f"  and {_gb(traffic.exchange)} for batch_former.gather at the largest images; it needs "
            f"{_gb(plan.memory.exchange)} temporarily, and no more for the backward pass"
        )


def assumptions(plan: Plan, config: DetectionConfig, machine: Machine) -> Iterator[str]:
    """Yield all assumptions with their numbers and sources."""
    height, width = largest_size(config.data, config.size_divisor)
    yield "GB are 2**30 bytes, as in GPU data sheets"
    yield (
        f"memory: the training forward pass of {config.train.batch_size} images of {height} x {width}, the largest of "
        f"data.transforms, with {machine.classes(config)} classes (--classes), operator by operator on fake tensors; "
        "weights and moments are float32; gradients are views of DDP's buckets, or, in "
        "one process without accumulation, replace the activations that the backward pass frees"
    )
    yield (
        f"allowance: {_gb(CONTEXT)} for CUDA and its libraries and {ALLOWANCE:.0%} of the rest for workspaces, NCCL, "
        "gradients of activations and fragmentation: rules of thumb"
    )
    plain = "plain PyTorch, because the compiled ones are not built here"
    yield (
        "scaled dot product attention does not store its weights (fused kernel); our operators are "
        f"{'the compiled ones' if kernels_assumed('cuda') else plain}; train.compile may need less"
    )
    if config.model.masks:
        half = config.train.precision != "float32" and not torch.cuda.is_available()
        yield f"masks: {OBJECTS} objects in an image (COCO: 7.3)" + (", computed in float32" if half else "")
    yield from _assumptions_of_time(plan.time, config, machine)
    yield (
        "steps: an incomplete last batch is dropped; learning rates: the linear rule, made for SGD (Goyal et al. "
        "2017, arXiv 1706.02677), only a starting point for AdamW"
    )
    averaged = ", their average" if config.train.ema.enabled else ""
    yield f"checkpoints: last, previous and best, each with weights{averaged} and both moments"


def _assumptions_of_time(time: Time, config: DetectionConfig, machine: Machine) -> Iterator[str]:
    height, width = usual_size(config.data)
    yield (
        f"work: images of {height} x {width}, mean short side, aspect ratio {ASPECT:.2f}, without crops and padding; a "
        "backward pass costs two forward ones, and that of frozen first stages of the backbone nothing"
    )
    if time.source != "estimated":
        return
    gpu = machine.gpu
    yield (
        f"{gpu.title}, data sheet: {gpu.float32:g} TFLOP/s in float32, {gpu.tf32:g} for its convolutions, {gpu.half:g} "
        f"in half precision, {gpu.bandwidth:g} GB/s; every operator takes the longer of arithmetic and memory traffic"
    )
    yield (
        f"{published_share():.0%} of this speed is assumed, as in DETR's published training on V100: "
        f"{PUBLISHED_EPOCHS} epochs in {PUBLISHED_DAYS} days on {PUBLISHED_GPUS} GPUs with {PUBLISHED_BATCH} images "
        f"each (arXiv 2005.12872), {published_seconds_per_step():.3f} s a step. Evaluation and waiting for data or "
        "other GPUs are not included; the error may reach a factor of 2: give --seconds-per-step if you have measured "
        "the time"
    )


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB" if size >= 0.1 * GB else f"{size / GB:.2g} GB"


def _duration(days: float) -> str:
    if days >= 1:
        return f"{days:.1f} days"
    return f"{24 * days:.1f} hours" if days >= 1 / 24 else f"{1440 * days:.1f} minutes"
