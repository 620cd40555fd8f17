"""Estimate what a training run needs: GPU memory, time and disk; report its batch attention and learning rates.

detr-bf plan --config configs/deformable_detr/deformable_detr_r50_bfv2.yaml --gpus 8 train.batch_size=3
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from detr_bf.cli import run_tool
from detr_bf.commands import add_config_arguments, configs_and_overrides
from detr_bf.config import load_config
from detr_bf.files import check_output_file, write_json
from detr_bf.planning import COCO_IMAGES, GPUS, Machine, describe_plan, gpu_named, make_plan, read_measured
from detr_bf.text import safe_message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="one process each; default %(default)s")
    parser.add_argument("--gpu", default="h100", metavar="NAME", help=f"{', '.join(GPUS)}; default %(default)s")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="memory of a GPU; default from its data sheet")
    parser.add_argument(
        "--images", type=int, default=COCO_IMAGES, metavar="N", help="in the training data; default COCO's"
    )
    parser.add_argument("--classes", type=int, metavar="N", help="in the training data; default COCO's")
    parser.add_argument(
        "--published-batch",
        type=int,
        metavar="N",
        help="total batch of the published rates; default the file's",
    )
    time = parser.add_mutually_exclusive_group()
    time.add_argument("--seconds-per-step", type=float, metavar="X", help="measured step time, instead of an estimate")
    time.add_argument("--measured", type=Path, metavar="FILE", help="record of benchmarks/step.py, instead of that")
    time.add_argument("--tflops", type=float, metavar="X", help="rate that a GPU sustains, instead of peak rates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the numbers, in bytes and seconds")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    """Make a plan, print it and write its numbers."""
    if options.json is not None:
        check_output_file(options.json, "--json")
    files, overrides = configs_and_overrides(options)
    config = load_config(files, overrides, task="detection")
    machine = Machine(
        gpus=options.gpus,
        gpu=gpu_named(options.gpu),
        memory=options.gpu_memory,
        images=options.images,
        num_classes=options.classes,
        published_batch=options.published_batch,
        seconds_per_step=options.seconds_per_step,
        tflops=options.tflops,
    )
    if config.train.precision == "auto":
        config.train.precision = "bf16" if machine.gpu.bf16 else "fp16"
    if options.measured is not None:
        seconds, source = read_measured(options.measured, config)
        machine = replace(machine, seconds_per_step=seconds, seconds_source=source)
    plan = make_plan(config, machine, load_config(files, task="detection") if files else None)
    print(safe_message(describe_plan(plan, config, machine)))
    if options.json is not None:
        write_json(options.json, plan.to_dict())
    return 0
