"""Estimates of `detr-bf plan` against measured training steps on this CPU: time and memory.

OMP_NUM_THREADS=1 python benchmarks/planning.py --rounds 3 --output benchmarks/results/planning_cpu.json

The planner has data sheets of GPUs only; here the rates of arithmetic and memory are measured first. As on a GPU, one
share of them is assumed to be reached; it is that of DETR, which is timed in turn with each other recipe. The planned
memory is that of gradients, moments and activations, the allocated one what torch has at most, the resident one the
largest growth of a process in two steps (Linux only).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from cases import NUM_CLASSES, Preset, Setting, make_step
from command import CONFIGS, cells, make_parser, measured_in_process, print_and_write, print_header, run_benchmark
from detr_bf.acceleration.allocator import keep_freed_memory
from detr_bf.common.timing import Spread, paired_ratios
from detr_bf.planning import Gpu, trace

BASELINE = "detr/detr_r50"
OFF, ON = "batch_former.enabled=false", "batch_former.enabled=true"
DEFORMABLE, RTDETR = "deformable_detr/deformable_detr_r50", "rtdetr/rtdetr_r18"
CASES = {  # title -> recipe, height, width, images, settings
    "DETR": (BASELINE, 480, 640, 2, OFF),
    "DETR, 4 images": (BASELINE, 480, 640, 4, OFF),
    "DETR, 640 x 853": (BASELINE, 640, 853, 2, OFF),
    "DETR + BatchFormerV2": (BASELINE, 480, 640, 2, ON),
    "Conditional DETR": ("conditional_detr/conditional_detr_r50", 480, 640, 2, OFF),
    "SMCA": ("smca/smca_r50", 480, 640, 2, OFF),
    "DAB-DETR": ("dab_detr/dab_detr_r50", 480, 640, 2, OFF),
    "Deformable DETR": (DEFORMABLE, 480, 640, 2, OFF),
    "Deformable DETR + BatchFormerV2": (DEFORMABLE, 480, 640, 2, ON),
    "DINO": ("dino/dino_r50_4scale", 480, 640, 2, OFF),
    "RT-DETR, ResNet-18": (RTDETR, 480, 640, 2, OFF),
    "RT-DETR, ResNet-18, 4 images": (RTDETR, 480, 640, 4, OFF),
}
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """Planned and measured values of one case."""

    case: str
    planned_seconds: float
    measured_seconds: float  # median
    time: Spread  # planned / measured, per round, with the time of the baseline in the same round
    planned_bytes: int
    allocated_bytes: int  # by torch, at most
    resident_bytes: int  # growth of the process, with what malloc cannot use and caches of libraries

    def __str__(self) -> str:
        allocated, resident = (self.planned_bytes / each for each in (self.allocated_bytes, self.resident_bytes))
        return (
            f"| {self.case} | {self.planned_seconds:.2f} | {self.measured_seconds:.2f} | {cells(self.time)} "
            f"{self.planned_bytes / MIB:.0f} | {self.allocated_bytes / MIB:.0f} | {allocated:.2f} | "
            f"{self.resident_bytes / MIB:.0f} | {resident:.2f} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    options = make_parser(__doc__, rounds=3, devices=("cpu",), cases=CASES).parse_args(arguments)
    return run_benchmark(run, options)


def run(options: argparse.Namespace) -> int:
    """Measure, print and write."""
    keep_freed_memory()
    cpu = measured_rates()
    print(
        f"matrix products {1000 * cpu.float32:.0f} GFLOP/s, convolutions {1000 * cpu.tf32:.0f} GFLOP/s, "
        f"memory {cpu.bandwidth:.1f} GB/s"
    )
    print_header(
        "",
        "planned, s",
        "measured, s",
        "planned / measured",
        "10th to 90th",
        "planned, MiB",
        "allocated, MiB",
        "ratio",
        "resident, MiB",
        "ratio",
    )
    rows = (measure(case, cpu, options.rounds) for case in options.cases)
    return print_and_write(rows, options, rates=asdict(cpu))


def measured_rates() -> Gpu:
    """Return the rates of this CPU: matrix products, convolutions of 3 x 3 and copies."""
    side, channels, size = 1024, 256, 64
    one, other = torch.rand(side, side), torch.rand(side, side)
    images = torch.rand(1, channels, size, size).contiguous(memory_format=torch.channels_last)
    weight = torch.rand(channels, channels, 3, 3).contiguous(memory_format=torch.channels_last)
    large, copy = torch.rand(2**26), torch.empty(2**26)
    products = 2 * side**3 / shortest(lambda: one @ other)
    convolutions = 2 * 9 * channels**2 * size**2 / shortest(lambda: F.conv2d(images, weight, padding=1))
    moved = 2 * 4 * len(large) / shortest(lambda: copy.copy_(large))
    return Gpu("this CPU", products / 1e12, convolutions / 1e12, products / 1e12, 0, moved / 1e9, bf16=False)


def shortest(function: Callable[[], object], times: int = 7) -> float:
    """Return the shortest of some times of the function, in seconds."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def setting_of(case: str, rounds: int = 2) -> Setting:
    """Return the images and the recipe of a case."""
    recipe, height, width, images, batch_former = CASES[case]
    overrides = (batch_former, "device=cpu", "train.precision=float32", f"train.batch_size={images}")
    return Setting(Preset(height, width, images, overrides, CONFIGS / f"{recipe}.yaml"), torch.device("cpu"), rounds)


def measure(case: str, cpu: Gpu, rounds: int) -> Row:
    """Measure one case, in turn with the baseline."""
    setting, baseline = setting_of(case, rounds), setting_of(next(iter(CASES)), rounds)
    planned, least = [], []
    for it in (setting, baseline):
        traced = trace(it.preset.config(), NUM_CLASSES, (it.preset.height, it.preset.width), device="cpu")
        planned.append(2 * traced.sizes.trainable + max(traced.needed, traced.sizes.trainable))
        least.append(cpu.least_seconds(traced.work))
    seconds = setting.time({"case": make_step(setting), "baseline": make_step(baseline)}, case, warmup=1)
    gc.collect()
    factor = least[0] / least[1]
    ratios = [factor / ratio for ratio in paired_ratios(seconds, "case", "baseline")]
    return Row(
        case,
        factor * Spread.of(seconds["baseline"]).median,
        Spread.of(seconds["case"]).median,
        Spread.of(ratios),
        planned[0],
        *measured_in_process(__file__, "--memory", case),
    )


def print_memory(case: str) -> None:
    """Print the bytes that torch allocates at most, with the moments, and those by which two steps let it grow."""
    step = make_step(setting_of(case))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident("VmRSS")
    for _ in range(2):
        step()
    resident = _resident("VmHWM") - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns())
    state = step.optimizer.state.values()
    moments = sum(tensor.nbytes for values in state for tensor in values.values())
    print([moments + max(accumulate(change.nbytes() for change in changes)), resident])


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        print_memory(sys.argv[2])
    else:
        sys.exit(main())
