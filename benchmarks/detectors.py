"""Detectors against DETR, with and without BatchFormerV2: parameters, FLOPs, time and memory of a training step.

python benchmarks/detectors.py --rounds 3 --output benchmarks/results/detectors_cpu.json
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cases import Setting, bytes_kept, make_batch, make_step, setting_of
from command import add_image_options, cells, make_parser, print_and_write, print_header, run_benchmark
from detr_bf.acceleration import onednn
from detr_bf.common.structures import Batch
from detr_bf.common.timing import Spread, paired_ratios
from detr_bf.detectors import Detector
from detr_bf.losses import SetCriterion

BASELINE = "detr/detr_r50"
RECIPES = (
    BASELINE,
    "conditional_detr/conditional_detr_r50",
    "smca/smca_r50",
    "smca/smca_multi_scale_r50",
    "deformable_detr/deformable_detr_r50_single_scale",
    "deformable_detr/deformable_detr_r50",
    "deformable_detr/deformable_detr_r50_refine",
    "deformable_detr/deformable_detr_r50_two_stage",
    "h_deformable_detr/h_deformable_detr_r50",
    "dab_detr/dab_detr_r50",
    "dab_detr/dab_deformable_detr_r50",
    "dn_detr/dn_detr_r50",
    "dino/dino_r50_4scale",
    "rtdetr/rtdetr_r18",
    "rtdetr/rtdetr_r50",
    "rtdetr/rtdetrv2_r50",
    "dfine/dfine_n",
    "dfine/dfine_s",
    "dfine/dfine_m",
    "dfine/dfine_l",
    "dfine/dfine_x",
)
WITH, WITHOUT = "batch_former.enabled=true", "batch_former.enabled=false"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    recipe: str
    batch_former: bool
    parameters: int
    gflops: float  # per image of a forward pass in training; a multiply-add counts 2
    ratio: Spread  # time of a training step / time of the baseline without BatchFormerV2, per round
    kept: int  # bytes that a step saves for the backward pass
    kept_ratio: float  # the same / that of the baseline

    def __str__(self) -> str:
        name = self.recipe.rpartition("/")[2] + (" + BatchFormerV2" if self.batch_former else "")
        return (
            f"| {name} | {self.parameters / 1e6:.2f} | {self.gflops:.1f} | {cells(self.ratio)} {self.kept_ratio:.2f} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=3)
    add_image_options(parser)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="RECIPE", help="default all")
    return run_benchmark(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Measure, print and write."""
    print_header("", "parameters, M", "GFLOPs an image", "step / DETR's", "10th to 90th", "memory / DETR's")
    return print_and_write((row for recipe in options.recipes for row in measure(recipe, options)), options)


def measure(recipe: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure the recipe without and with BatchFormerV2, in turn with the baseline."""
    size = {"height": options.height, "width": options.width, "batch_size": options.batch_size}
    steps, kept = {}, {}
    for name, path, override in (("baseline", BASELINE, WITHOUT), ("without", recipe, WITHOUT), ("with", recipe, WITH)):
        setting = setting_of(path, options.device, options.rounds, override, **size)
        steps[name] = make_step(setting)
        step = steps[name]
        kept[name] = bytes_kept(step.model, partial(_loss, step.model, step.criterion, step.batch))
    seconds = setting.time(steps, recipe, warmup=1)
    for name in ("without", "with"):
        model = steps[name].model
        yield Row(
            recipe,
            name == "with",
            sum(p.numel() for p in model.parameters()),
            flops(model, setting) / 1e9,
            Spread.of(paired_ratios(seconds, name, "baseline")),
            kept[name],
            kept[name] / kept["baseline"],
        )
    del model, steps
    gc.collect()


def _loss(model: Detector, criterion: SetCriterion, batch: Batch) -> Tensor:
    return criterion(model(batch), batch.targets).total


def _flops_of_linear(rows: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    return 2 * rows[0] * rows[1] * weight[0]


def flops(model: Detector, setting: Setting) -> int:
    """Return the FLOPs per image of a forward pass in training, without sampling and element-wise operations."""
    model.requires_grad_(False)  # nothing is kept for a backward pass: attention as plain products takes much memory
    linear = {torch.ops.mkldnn._linear_pointwise: _flops_of_linear} if onednn.FASTER else {}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=linear) as counter:
        model.train()(make_batch(setting))
    return int(counter.get_total_flops()) // setting.preset.batch_size


if __name__ == "__main__":
    sys.exit(main())
