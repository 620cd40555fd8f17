"""Compiled operators against plain PyTorch, end to end: a training step and inference.

python benchmarks/kernels.py --output benchmarks/results/kernels_cpu.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cases import make_step, setting_of
from command import add_image_options, cells, make_parser, print_and_write, print_header, run_benchmark
from detr_bf.common.errors import InputError
from detr_bf.common.timing import Spread, paired_ratios
from detr_bf.ops import library

RECIPES = ("deformable_detr/deformable_detr_r50", "deformable_detr/deformable_detr_r50_bfv2", "detr/detr_r50_bfv2")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=3)
    add_image_options(parser)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE", help="default three")
    return run_benchmark(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Measure, print and write."""
    print_header("", "", "reference / compiled", "10th to 90th")
    return print_and_write((row for recipe in options.recipes for row in measure(recipe, options)), options)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    recipe: str
    what: str
    speedup: Spread  # time with the references / time with the kernels

    def __str__(self) -> str:
        return f"| {self.recipe} | {self.what} | {cells(self.speedup)}"


def measure(recipe: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure with the references and with the kernels, in turn with the same model."""
    setting = setting_of(
        recipe,
        options.device,
        options.rounds,
        height=options.height,
        width=options.width,
        batch_size=options.batch_size,
    )
    if not library.compiled(setting.device):
        raise InputError(f"no compiled kernels on {setting.device}: {library.PROBLEMS[setting.device.type]}")
    step = make_step(setting)
    model, batch = step.model, step.batch
    for what, function in (("training step", step), ("inference", torch.no_grad()(partial(model, batch)))):
        model.train(function is step)
        contestants: dict[str, Callable[[], object]] = {
            "compiled": function,
            "reference": partial(with_references, setting.device.type, function),
        }
        seconds = setting.time(contestants, f"{recipe}, {what}", warmup=1)
        yield Row(recipe, what, Spread.of(paired_ratios(seconds, "reference", "compiled")))


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
