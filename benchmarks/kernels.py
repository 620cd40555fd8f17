"""Compiled operators against plain PyTorch, end to end: a training step and inference.

python benchmarks/kernels.py --output benchmarks/results/kernels_cpu.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch

from cases import NUM_CLASSES, SEED, Preset, Setting, make_batch, make_optimizer, training_step
from command import CONFIGS, add_image_options, cells, check_rounds, circumstances, make_parser
from detr_bf.assembly import build_criterion, build_model
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.files import write_json
from detr_bf.common.terminal import run_tool
from detr_bf.common.timing import Spread, paired_ratios
from detr_bf.ops import library

RECIPES = ("deformable_detr/deformable_detr_r50", "deformable_detr/deformable_detr_r50_bfv2", "detr/detr_r50_bfv2")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=3)
    add_image_options(parser)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE", help="default three")
    options = parser.parse_args(arguments)
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Measure; print and write row by row."""
    check_rounds(options.rounds)
    print("| | | reference / compiled | 10th to 90th |\n|---|---|---|---|")
    rows = []
    for recipe in options.recipes:
        for what, speedup in measure(recipe, options).items():
            print(f"| {recipe} | {what} | {cells(speedup)}", flush=True)
            rows.append({"recipe": recipe, "what": what, "speedup": asdict(speedup)})
        if options.output is not None:
            write_json(options.output, {**circumstances(options), "rows": rows})
    return 0


def measure(recipe: str, options: argparse.Namespace) -> dict[str, Spread]:
    """Return time with the references / time with the kernels, measured in turn with the same model."""
    preset = Preset(options.height, options.width, options.batch_size, (), CONFIGS / f"{recipe}.yaml")
    setting = Setting(preset, device_of(preset.config(f"device={options.device}").device), options.rounds)
    if not library.compiled(setting.device):
        raise InputError(f"no compiled kernels on {setting.device}: {library.PROBLEMS[setting.device.type]}")
    torch.manual_seed(SEED)
    config, batch = preset.config(), make_batch(setting)
    model = build_model(config, NUM_CLASSES).to(setting.device)
    step = partial(training_step, model, make_optimizer(config, model), build_criterion(config), batch, 0.1)

    def infer() -> None:
        with torch.no_grad():
            model(batch)

    speedups = {}
    for what, function in (("training step", step), ("inference", infer)):
        model.train(function is step)
        contestants: dict[str, Callable[[], object]] = {
            "compiled": function,
            "reference": partial(with_references, setting.device.type, function),
        }
        seconds = setting.time(contestants, f"{recipe}, {what}", warmup=1)
        speedups[what] = Spread.of(paired_ratios(seconds, "reference", "compiled"))
    return speedups


def with_references(kind: str, function: Callable[[], object]) -> None:
    """Call the function with operators in plain PyTorch."""
    usual = library.PROBLEMS[kind]
    library.PROBLEMS[kind] = "the benchmark measures the reference"
    try:
        function()
    finally:
        library.PROBLEMS[kind] = usual


if __name__ == "__main__":
    sys.exit(main())
