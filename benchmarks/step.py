"""A training step: time, images a second, memory, and the share of each part of the detector, forward and backward.

python benchmarks/step.py --device cuda --batch-sizes 2 4 8 16 --precisions float32 bf16 fp16 --output step.json
python benchmarks/step.py --device cuda train.compile=true train.channels_last=true
python benchmarks/step.py --device cpu --recipe small --height 192 --width 256 --compare train.recompute_encoder=true
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from cases import NUM_CLASSES, PRESETS, SEED, Preset, Setting, make_batch, make_optimizer
from command import CONFIGS, cells, check_rounds, circumstances, make_parser
from detr_bf.assembly import build_criterion, build_model, device_of
from detr_bf.assembly.model import accelerate
from detr_bf.cli import run_tool
from detr_bf.config import DetectionConfig
from detr_bf.detectors import Detector
from detr_bf.errors import InputError
from detr_bf.files import write_json
from detr_bf.losses import HungarianMatcher, SetCriterion
from detr_bf.transformer import Encoder
from stopwatch import Stopwatch, Timed
from timing import Spread, paired_ratios

SMALL = "small"
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PARTS = ("backbone", "tokens", "encoder", "BatchFormer", "decoder", "matching", "loss", "optimizer")
GIB = 2**30
PLAIN = "plain"
OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")

R = TypeVar("R")


@dataclass(frozen=True)
class Row:
    """What was measured at one precision and batch size."""

    precision: str
    batch_size: int
    step: Spread | None = None  # seconds; None: out of memory
    images_per_second: float = 0.0
    peak: int | None = None  # bytes; on CUDA alone
    kept: int = 0  # bytes that the forward pass keeps for the backward pass
    shares: Mapping[str, float] | None = None  # of the step's time, by part

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
    """Some settings against none, at one precision and batch size."""

    settings: str
    precision: str
    batch_size: int
    time: Spread | None = None  # of a step, by the plain step's in the same round; None: out of memory
    kept: float = 0.0  # for the backward pass, by what the plain step keeps

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
        "--compare", nargs="+", metavar="KEY=VALUE", help="settings to compare with none, several joined by commas"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of all that is measured")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Measure, print and write row by row: what is measured stays when the rest is interrupted."""
    check_rounds(options.rounds)
    if options.compare:
        print("| | precision | B | step / plain | 10th to 90th | kept / plain |\n" + "|---" * 6 + "|")
    else:
        names = ("precision", "B", "step, ms", "10th to 90th", "images / s", "peak, GiB", "kept, GiB")
        print(f"| {' | '.join((*names, *(f'{part}, %' for part in PARTS)))} |\n" + "|---" * (len(names + PARTS)) + "|")
    rows = []
    for precision, batch_size in product(options.precisions, options.batch_sizes):
        setting = make_setting(options, batch_size)
        for row in measured_rows(options.compare, precision, setting):
            print(row, flush=True)
            rows.append(asdict(row))
        if options.output is not None:
            write_json(options.output, {**circumstances(options), "rows": rows})
    return 0


def measured_rows(
    variants: Sequence[str] | None, precision: str, setting: Setting
) -> Sequence[Row] | Sequence[Comparison]:
    """Those of one precision and batch size; one that says so where memory does not suffice."""
    if variants:
        return within_memory(lambda: compare(variants, precision, setting), setting.device) or [
            Comparison("all", precision, setting.preset.batch_size)
        ]
    return within_memory(lambda: [measure(precision, setting)], setting.device) or [
        Row(precision, setting.preset.batch_size)
    ]


def make_setting(options: argparse.Namespace, batch_size: int) -> Setting:
    """The images and the model that the options ask for.

    Raises:
        InputError: a model with a mask head: the images of this benchmark have no masks.
    """
    small = options.recipe == SMALL
    settings = (*(PRESETS[SMALL].overrides if small else ()), *options.overrides)
    recipe = None if small else CONFIGS / f"{options.recipe}.yaml"
    preset = Preset(options.height, options.width, batch_size, (*settings, f"device={options.device}"), recipe)
    config = preset.config()
    if config.model.masks:
        raise InputError(f"--recipe {options.recipe} has model.masks=true, and these images have no masks: use another")
    return Setting(preset, device_of(config), options.rounds)


def within_memory(measured: Callable[[], list[R]], device: torch.device) -> list[R] | None:
    """What ``measured`` gives, or None where memory does not suffice."""
    release(device)
    try:
        return measured()
    except RuntimeError as error:  # of which OutOfMemoryError is one
        if not isinstance(error, torch.OutOfMemoryError) and not any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise
    release(device)  # here, where the exception and with it the frames that hold the tensors are gone
    return None


def measure(precision: str, setting: Setting) -> Row:
    """One row."""
    step = Step(setting, precision)
    parts: list[dict[str, float]] = []
    seconds = setting.time({"step": lambda: parts.append(step())}, f"{precision}, B = {setting.preset.batch_size}")
    parts = parts[-setting.rounds :]  # without those that warmed up
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
    """Each of the variants against the plain settings, all in turn in one process, with the same weights."""
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
    """What former measurements held is free again, and their peak forgotten."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


class Step:
    """A training step as the trainer does it, its parts timed."""

    def __init__(self, setting: Setting, precision: str) -> None:
        config = setting.preset.config()
        torch.manual_seed(SEED)
        model = build_model(config, NUM_CLASSES)
        accelerate(model, config)
        self.model: Detector = model.to(setting.device).train()
        self.optimizer = make_optimizer(config, self.model)
        self.clip_norm = config.optimizer.clip_norm
        self.precision = PRECISIONS[precision]
        self.scaler = torch.amp.GradScaler(setting.device.type, enabled=self.precision == torch.float16)
        self.batch = make_batch(setting)
        self.watch = Stopwatch(setting.device)
        self.criterion = self._timed_parts(config)

    def __call__(self) -> dict[str, float]:
        """One step; seconds of every part."""
        self.watch.start("optimizer")
        total = self._loss()
        with self.watch.inside("loss"):  # until the backward pass comes to the border of the next part
            self.scaler.scale(total).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm or torch.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return self.watch.stop()

    def kept(self) -> int:
        """Bytes that a forward pass keeps for the backward pass, beside parameters and buffers."""
        known = {tensor.untyped_storage().data_ptr() for tensor in self.model.state_dict(keep_vars=True).values()}
        found: dict[int, int] = {}
        stored: list[Tensor] = []  # so that no storage takes the place of another

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
                stored.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self._loss()
        self.watch.stop()
        return sum(found.values())

    def _loss(self) -> Tensor:
        with torch.autocast(self.watch.device.type, self.precision, enabled=self.precision != torch.float32):
            outputs = self.model(self.batch)
        with self.watch.inside("loss"):
            return self.criterion(outputs, self.batch.targets).total

    def _timed_parts(self, config: DetectionConfig) -> SetCriterion:
        """Put the watch around the parts of the model; the criterion with the watch around its matcher."""
        model, watch = self.model, self.watch
        for name in ("backbone", "tokens", "encoder", "decoder"):
            for module in getattr(model, name).modules():
                if isinstance(module, Encoder) and module.batch_former is not None:
                    module.batch_former = cast(Any, Timed(module.batch_former, watch, "BatchFormer"))
            setattr(model, name, Timed(getattr(model, name), watch, name))
        criterion = build_criterion(config)

        def match(*arguments: Any) -> Any:
            with watch.inside("matching"):
                return criterion.matcher(*arguments)

        return replace(criterion, matcher=cast(HungarianMatcher, match))


if __name__ == "__main__":
    sys.exit(main())
