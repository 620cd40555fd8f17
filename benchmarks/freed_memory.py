"""Training steps and inference with glibc's malloc keeping freed memory or not.

python benchmarks/freed_memory.py --rounds 3 --output benchmarks/results/freed_memory_cpu.json

``default`` is glibc's own choice, ``to 32 MiB`` what training starts with, ``all`` what inference has, and training
where the memory holds twice its peak (``detr_bf.acceleration.allocator``). Each measurement is a process of its own,
the ways in turn, because blocks that one way has kept would serve the next. Time and page faults are those of the third
call, ``peak`` is the resident memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from cases import NUM_CLASSES, make_batch, setting_of
from command import cells, make_parser, measured_in_process, print_header, run_benchmark, write_record
from detr_bf.acceleration.allocator import keep_freed_memory
from detr_bf.assembly import build_model
from detr_bf.common.timing import Spread, paired_ratios
from step import Step

DEFAULT, SOME, ALL = "default", "to 32 MiB", "all"
WAYS = (DEFAULT, SOME, ALL)
DETR, DEFORMABLE = "detr/detr_r50", "deformable_detr/deformable_detr_r50"
CASES = {  # title -> recipe, height, width, images, training
    "DETR, training, B = 4": (DETR, 480, 640, 4, True),
    "Deformable DETR + BatchFormerV2, training, B = 3": (f"{DEFORMABLE}_bfv2", 480, 640, 3, True),
    "DETR, inference": (DETR, 800, 1333, 1, False),
    "Deformable DETR, inference": (DEFORMABLE, 800, 1333, 1, False),
}
MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    options = make_parser(__doc__, rounds=3, devices=("cpu",), cases=CASES).parse_args(arguments)
    return run_benchmark(run, options)


def run(options: argparse.Namespace) -> int:
    """Measure; print and write case by case."""
    rows = []
    print_header("case", "freed memory kept", "s", "/ default", "10th to 90th", "pages", "peak, MiB")
    for case in options.cases:
        measured: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                measured[way].append(measured_in_process(__file__, "--measure", case, way))
        seconds = {way: [call["seconds"] for call in calls] for way, calls in measured.items()}
        for way, calls in measured.items():
            pages, peak = (Spread.of([call[key] for call in calls]).median for key in ("pages", "peak"))
            ratio = cells(Spread.of(paired_ratios(seconds, way, DEFAULT)))
            middle = Spread.of(seconds[way]).median
            print(f"| {case} | {way} | {middle:.2f} | {ratio} {pages:,.0f} | {peak / MIB:.0f} |", flush=True)
        rows.append({"case": case, "measured": measured})
        write_record(options, rows=rows)
    return 0


def measure(case: str, way: str) -> None:
    """Print seconds, page faults and the peak of the resident memory in bytes as JSON."""
    if way != DEFAULT:
        keep_freed_memory(large=way == ALL)
    call = call_of(case)
    for _ in range(3):
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    print(json.dumps({"seconds": seconds, "pages": pages, "peak": peak}))


def call_of(case: str) -> Callable[[], object]:
    """Return a training step, or a forward pass in evaluation."""
    recipe, height, width, images, training = CASES[case]
    setting = setting_of(recipe, "cpu", 2, height=height, width=width, batch_size=images)
    if training:
        return Step(setting, "float32")
    model = build_model(setting.preset.config(), NUM_CLASSES).eval()
    return partial(torch.no_grad()(model), make_batch(setting))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        sys.exit(main())
