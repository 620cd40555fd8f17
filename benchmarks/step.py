"""Time, images/s and memory of a training step, and the share of each part of the detector, forward and backward.

python benchmarks/step.py --device cuda --batch-sizes 2 4 8 16 --precisions float32 bf16 fp16 --output step.json
python benchmarks/step.py --device cuda train.compile=true train.channels_last=true
python benchmarks/step.py --device cpu --recipe small --height 192 --width 256 --compare train.recompute_encoder=true
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

from cases import NUM_CLASSES, PRESETS, SEED, Preset, Setting, bytes_kept, make_batch, make_optimizer, update
from command import CONFIGS, cells, make_parser, moment, print_and_write, print_header, run_benchmark, seconds_between
from detr_bf.assembly import build_criterion, build_model
from detr_bf.assembly.compilation import compile_model
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.timing import Spread, paired_ratios
from detr_bf.config import DetectionConfig
from detr_bf.detectors import Detector
from detr_bf.losses import HungarianMatcher, SetCriterion
from detr_bf.transformer import Encoder

SMALL = "small"
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PARTS = ("backbone", "tokens", "encoder", "BatchFormer", "decoder", "matching", "loss", "optimizer")
GIB = 2**30
PLAIN = "plain"
OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Row:
    """Measurements at one precision and batch size."""

    precision: str
    batch_size: int
    step: Spread | None = None  # seconds; None: out of memory
    images_per_second: float = 0.0
    peak: int | None = None  # bytes; CUDA only
    kept: int = 0  # bytes saved for the backward pass
    shares: Mapping[str, float] | None = None  # of the time of the step, by part

    def __str__(self) -> str:
        start = f"| {self.precision} | {self.batch_size} |"
        if self.step is None or self.shares is None:
            return f"{start} out of memory |" + " |" * (len(PARTS) + 4)
        milliseconds = Spread(*(1000 * value for value in asdict(self.step).values()))
        peak = "n/a" if self.peak is None else f"{self.peak / GIB:.2f}"
        shares = " | ".join(f"{100 * self.shares[part]:.1f}" for part in PARTS)
        return (
            f"{start} {cells(milliseconds)} {self.images_per_second:.2f} | {peak} | {self.kept / GIB:.2f} | {shares} |"
        )


@dataclass(frozen=True)
class Comparison:
    """Settings compared with the plain ones at one precision and batch size."""

    settings: str
    precision: str
    batch_size: int
    time: Spread | None = None  # time of a step / plain step in the same round; None: out of memory
    kept: float = 0.0  # saved bytes / those of the plain step

    def __str__(self) -> str:
        start = f"| {self.settings} | {self.precision} | {self.batch_size} |"
        return f"{start} out of memory | | |" if self.time is None else f"{start} {cells(self.time)} {self.kept:.2f} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=10)
    parser.add_argument(
        "--recipe", default="detr/detr_r50_bfv2", help="a file of configs/, or small as in run.py; default %(default)s"
    )
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=(2, 4, 8, 16), metavar="B", help="default 2 to 16"
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=("float32",), help="default float32")
    parser.add_argument("--height", type=int, default=800, help="pixels, default %(default)s")
    parser.add_argument("--width", type=int, default=1333, help="pixels, default %(default)s")
    parser.add_argument(
        "--compare", nargs="+", metavar="KEY=VALUE", help="settings to compare with the plain ones, joined by commas"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of all steps")
    return run_benchmark(run, parser.parse_intermixed_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Measure, print and write."""
    if options.compare:
        print_header("", "precision", "B", "step / plain", "10th to 90th", "kept / plain")
    else:
        names = ("precision", "B", "step, ms", "10th to 90th", "images / s", "peak, GiB", "kept, GiB")
        print_header(*names, *(f"{part}, %" for part in PARTS))
    return print_and_write(measured_rows(options), options)


def measured_rows(options: argparse.Namespace) -> Iterator[Row | Comparison]:
    """Yield the rows of every precision and batch size; a single row if memory does not suffice."""
    for precision, batch_size in product(options.precisions, options.batch_sizes):
        setting = make_setting(options, batch_size)
        release(setting.device)
        rows: Sequence[Row | Comparison] = ()
        try:
            rows = compare(options.compare, precision, setting) if options.compare else [measure(precision, setting)]
        except RuntimeError as error:  # includes OutOfMemoryError
            if not isinstance(error, torch.OutOfMemoryError) and not any(sign in str(error) for sign in OUT_OF_MEMORY):
                raise
        if not rows:
            release(setting.device)  # after the exception, whose frames hold tensors
            rows = [Comparison("all", precision, batch_size) if options.compare else Row(precision, batch_size)]
        yield from rows


def make_setting(options: argparse.Namespace, batch_size: int) -> Setting:
    """Return images and model for the options.

    Raises:
        InputError: the model has a mask head; the images of this benchmark have no masks.
    """
    small = options.recipe == SMALL
    settings = (*(PRESETS[SMALL].overrides if small else ()), *options.overrides)
    recipe = None if small else CONFIGS / f"{options.recipe}.yaml"
    preset = Preset(options.height, options.width, batch_size, (*settings, f"device={options.device}"), recipe)
    config = preset.config()
    if config.model.masks:
        raise InputError(
            f"--recipe {options.recipe} has model.masks=true, but the images of this benchmark have no masks"
        )
    return Setting(preset, device_of(config.device), options.rounds)


def measure(precision: str, setting: Setting) -> Row:
    """Measure one row."""
    step = Step(setting, precision)
    parts: list[dict[str, float]] = []
    seconds = setting.time({"step": lambda: parts.append(step())}, f"{precision}, B = {setting.preset.batch_size}")
    parts = parts[-setting.rounds :]  # without the warm-up
    total = sum(sum(times.values()) for times in parts)
    spread = Spread.of(seconds["step"])
    return Row(
        precision,
        setting.preset.batch_size,
        spread,
        setting.preset.batch_size / spread.median,
        torch.cuda.max_memory_allocated(setting.device) if setting.device.type == "cuda" else None,
        step.kept(),
        {part: sum(times.get(part, 0.0) for times in parts) / total for part in PARTS},
    )


def compare(variants: Sequence[str], precision: str, setting: Setting) -> list[Comparison]:
    """Compare each variant with the plain settings, all in turn with the same weights."""
    preset = setting.preset
    added = {PLAIN: (), **{variant: tuple(variant.split(",")) for variant in variants}}
    steps = {
        name: Step(replace(setting, preset=replace(preset, overrides=(*preset.overrides, *settings))), precision)
        for name, settings in added.items()
    }
    seconds = setting.time(steps, f"{precision}, B = {preset.batch_size}")
    kept = {name: step.kept() for name, step in steps.items()}
    ratios = {name: Spread.of(paired_ratios(seconds, name, PLAIN)) for name in variants}
    return [Comparison(name, precision, preset.batch_size, ratios[name], kept[name] / kept[PLAIN]) for name in variants]


def release(device: torch.device) -> None:
    """Free the memory of former measurements and reset the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


class Step:
    """A training step as in the trainer, with its parts timed."""

    def __init__(self, setting: Setting, precision: str) -> None:
        config = setting.preset.config()
        torch.manual_seed(SEED)
        model = build_model(config, NUM_CLASSES)
        compile_model(model, config)
        self.model: Detector = model.to(setting.device).train()
        self.optimizer = make_optimizer(config, self.model)
        self.clip_norm = config.optimizer.clip_norm
        self.precision = PRECISIONS[precision]
        self.scaler = torch.amp.GradScaler(setting.device.type, enabled=self.precision == torch.float16)
        self.batch = make_batch(setting)
        self.watch = Stopwatch(setting.device)
        self.criterion = self._timed_parts(config)

    def __call__(self) -> dict[str, float]:
        """Run one step; return the seconds of every part."""
        self.watch.start("optimizer")
        total = self._loss()
        with self.watch.inside("loss"):  # until the backward pass reaches the border of the next part
            self.scaler.scale(total).backward()
        update(self.model, self.optimizer, self.clip_norm, self.scaler)
        return self.watch.stop()

    def kept(self) -> int:
        """Return the bytes saved for the backward pass, without parameters and buffers."""
        kept = bytes_kept(self.model, self._loss)
        self.watch.stop()
        return kept

    def _loss(self) -> Tensor:
        with torch.autocast(self.watch.device.type, self.precision, enabled=self.precision != torch.float32):
            outputs = self.model(self.batch)
        with self.watch.inside("loss"):
            return self.criterion(outputs, self.batch.targets).total

    def _timed_parts(self, config: DetectionConfig) -> SetCriterion:
        """Time the parts of the model; return a criterion with a timed matcher."""
        model, watch = self.model, self.watch
        for name in ("backbone", "tokens", "encoder", "decoder"):
            for module in getattr(model, name).modules():
                if isinstance(module, Encoder) and module.batch_former is not None:
                    module.batch_former = cast(Any, Timed(module.batch_former, watch, "BatchFormer"))
            setattr(model, name, Timed(getattr(model, name), watch, name))
        criterion = build_criterion(config)
        return replace(criterion, matcher=cast(HungarianMatcher, TimedMatcher(criterion.matcher, watch)))


# ---- stopwatch ----
#
# A step runs on one stream, and autograd processes a graph in reverse order. All time between two borders therefore
# belongs to one part. Time of a nested part counts for the inner part only.


class Stopwatch:
    """Assigns the time of the device to named parts.

    With CUDA the borders are events on the stream, without synchronisation; time in which the device waits for the
    host counts for the current part.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.part = ""
        self._borders: list[tuple[str, Any]] = []  # part and its start

    def start(self, part: str) -> None:
        """Assign the time from now on to ``part``."""
        self.part = part
        self._borders.append((part, moment(self.device)))

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Assign the time within the block to ``part``, then return to the previous part."""
        outer = self.part
        self.start(part)
        yield
        self.start(outer)

    def stop(self) -> dict[str, float]:
        """Return the seconds of each part since the last stop."""
        self.start("")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds: dict[str, float] = defaultdict(float)
        for (part, begin), (_, end) in zip(self._borders, self._borders[1:], strict=False):
            seconds[part] += seconds_between(begin, end)
        self._borders.clear()
        return dict(seconds)

    def border(self, value: Any, part: str) -> Any:
        """Return ``value``; when a gradient of its tensors arrives, the backward pass enters ``part``."""
        return _each_tensor(value, lambda tensor: _Border.apply(tensor, self, part) if tensor.requires_grad else tensor)


class TimedMatcher:
    """Matcher whose calls are timed."""

    def __init__(self, matcher: HungarianMatcher, watch: Stopwatch) -> None:
        self.matcher, self.watch, self.giou_eps = matcher, watch, matcher.giou_eps

    def match_all(self, problems: Any) -> Any:
        with self.watch.inside("matching"):
            return self.matcher.match_all(problems)

    def match_united(self, problems: Any) -> Any:
        with self.watch.inside("matching"):
            return self.matcher.match_united(problems)


class Timed(nn.Module):
    """A module timed as ``part``, forward and backward."""

    def __init__(self, module: nn.Module, watch: Stopwatch, part: str) -> None:
        super().__init__()
        self.module = module
        self.watch = watch
        self.part = part

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        inputs = self.watch.border(inputs, self.watch.part)
        with self.watch.inside(self.part):
            return self.watch.border(self.module(*inputs, **settings), self.part)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the timed module, such as the ``position`` of a layer of batch attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _Border(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, watch: Stopwatch, part: str) -> Tensor:
        ctx.watch, ctx.part = watch, part
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.watch.start(ctx.part)
        return gradient, None, None


def _each_tensor(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to all tensors in nested dataclasses, dictionaries and sequences."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each_tensor(item, function) for item in value)
    if isinstance(value, Mapping):
        return {key: _each_tensor(item, function) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _each_tensor(getattr(value, field.name), function) for field in fields(value)}
        return replace(value, **changed)
    return value


if __name__ == "__main__":
    sys.exit(main())
