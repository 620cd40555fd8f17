"""Training steps and inference with glibc's malloc keeping freed memory or not, in turn in one process.

python benchmarks/freed_memory.py --rounds 3 --output benchmarks/results/freed_memory_cpu.json

``default`` are the thresholds that glibc reaches by itself, ``to 32 MiB`` what training starts with, ``all`` what
inference has, and training where the memory holds twice its peak (``detr_bf.malloc``). Each time is of the second of
two calls after a change of the settings. ``pages`` are page faults of that call, ``peak`` is resident memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from cases import NUM_CLASSES, Preset, Setting, make_batch
from command import CONFIGS, cells, check_rounds, circumstances, make_parser
from detr_bf.assembly import build_model
from detr_bf.cli import run_tool
from detr_bf.files import write_json
from detr_bf.timing import Spread, paired_ratios
from step import Step

DEFAULT = "default"
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt, in glibc's malloc.h
WAYS: Mapping[str, Mapping[int, int]] = {
    DEFAULT: {_MMAP_THRESHOLD: 2**25, _MMAP_MAX: 65536, _TRIM_THRESHOLD: 2**26},
    "to 32 MiB": {_MMAP_THRESHOLD: 2**25, _MMAP_MAX: 65536, _TRIM_THRESHOLD: -1},
    "all": {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1},
}
DETR, DEFORMABLE = "detr/detr_r50", "deformable_detr/deformable_detr_r50"
CASES = {  # title -> recipe, height, width, images, training
    "DETR, training, B = 4": (DETR, 480, 640, 4, True),
    "Deformable DETR, training, B = 4": (DEFORMABLE, 480, 640, 4, True),
    "DETR, inference": (DETR, 800, 1333, 1, False),
    "Deformable DETR, inference": (DEFORMABLE, 800, 1333, 1, False),
}
MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=3, devices=("cpu",))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="default all")
    options = parser.parse_args(arguments)
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Measure; print and write case by case."""
    check_rounds(options.rounds)
    libc, rows = ctypes.CDLL(None), []
    print(
        "| case | freed memory kept | s | / default | 10th to 90th | pages | peak, MiB |\n|---|---|---|---|---|---|---|"
    )
    for case in options.cases:
        call = call_of(case)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        pages, peaks = ({way: list[int]() for way in WAYS} for _ in range(2))
        for _ in range(options.rounds):
            for way, values in WAYS.items():
                for parameter, value in values.items():
                    assert libc.mallopt(parameter, value)
                libc.malloc_trim(0)
                call()
                Path("/proc/self/clear_refs").write_text("5")  # resets the peak
                before, start = _page_faults(), time.perf_counter()
                call()
                seconds[way].append(time.perf_counter() - start)
                pages[way].append(_page_faults() - before)
                peaks[way].append(_peak())
        for way in WAYS:
            time_, ratio = Spread.of(seconds[way]), Spread.of(paired_ratios(seconds, way, DEFAULT))
            counts = f"{max(pages[way]):,} | {max(peaks[way]) / MIB:.0f}"
            print(f"| {case} | {way} | {time_.median:.2f} | {cells(ratio)} {counts} |", flush=True)
        rows.append({"case": case, "seconds": seconds, "pages": pages, "peak_bytes": peaks})
        if options.output is not None:
            write_json(options.output, {**circumstances(options), "rows": rows})
        del call
        gc.collect()
    return 0


def call_of(case: str) -> Callable[[], object]:
    """Return a training step, or a forward pass in evaluation."""
    recipe, height, width, images, training = CASES[case]
    preset = Preset(height, width, images, ("device=cpu", "batch_former.enabled=false"), CONFIGS / f"{recipe}.yaml")
    setting = Setting(preset, torch.device("cpu"), 2)
    if training:
        return Step(setting, "float32")
    model = build_model(preset.config(), NUM_CLASSES).eval()
    return partial(torch.no_grad()(model), make_batch(setting))


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


if __name__ == "__main__":
    sys.exit(main())
