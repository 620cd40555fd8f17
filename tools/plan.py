"""What a training run needs: memory of a GPU, time, disk; what its batch means for batch attention and learning rate.

python tools/plan.py --config configs/deformable_detr/deformable_detr_r50_bfv2.yaml --gpus 8 train.batch_size=3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from detr_bf.cli import run_tool
from detr_bf.config import load_config
from detr_bf.files import check_output_file, write_json
from detr_bf.planning import COCO_IMAGES, GPUS, Machine, describe, gpu_named, make_plan, read_measured
from detr_bf.text import safe_message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", help="YAML file; without it the defaults are used")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="default %(default)s, a process on each")
    parser.add_argument("--gpu", default="h100", metavar="NAME", help=f"{', '.join(GPUS)}; default %(default)s")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="default as the GPU's data sheet")
    parser.add_argument("--images", type=int, default=COCO_IMAGES, metavar="N", help="to train on; default COCO's")
    parser.add_argument("--classes", type=int, metavar="N", help="default COCO's")
    parser.add_argument(
        "--published-batch", type=int, metavar="N", help="that the learning rate is for; default the file's"
    )
    time = parser.add_mutually_exclusive_group()
    time.add_argument("--seconds-per-step", type=float, metavar="X", help="measured, instead of an estimate")
    time.add_argument("--measured", type=Path, metavar="FILE", help="what benchmarks/step.py wrote, instead of that")
    time.add_argument("--tflops", type=float, metavar="X", help="that a GPU sustains, instead of an estimate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here, in bytes and seconds")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.precision=bf16")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Plan, print, write."""
    if options.json is not None:
        check_output_file(options.json, "--json")
    config = load_config(options.config, options.overrides, task="detection")
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
    if options.measured is not None:
        measured = read_measured(options.measured, config)
        machine = replace(machine, seconds_per_step=measured.seconds, seconds_source=measured.source)
    plan = make_plan(config, machine, load_config(options.config, task="detection") if options.config else None)
    print(safe_message(describe(plan, config, machine)))
    if options.json is not None:
        write_json(options.json, plan.to_dict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
