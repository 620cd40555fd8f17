"""Shared by the benchmarks of single operators: options, timing and tables."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from command import cells, make_parser, print_header, write_record
from detr_bf.common.errors import InputError
from detr_bf.common.timing import Seconds, Spread, alternate, paired_ratios
from detr_bf.ops import library

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt, in glibc's malloc.h
TOLERANCE = 1e-4  # relative to the largest value, for the check before timing

Functions = dict[str, Callable[[], object]]  # name -> timed function


@dataclass(frozen=True)
class Comparison:
    """Functions timed in turn, ours first."""

    case: str
    batch_size: int
    direction: str  # forward, or forward and backward
    functions: Functions

    def __str__(self) -> str:
        return f"{self.case}, B = {self.batch_size}, {self.direction}"


@dataclass(frozen=True)
class Contestant:
    """A function, the leaves of its gradients, and the gradient of its output."""

    call: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    gradient: Tensor

    def forward(self) -> list[Tensor]:
        """Run the forward pass as in training: tensors for the backward pass are saved."""
        return [self.call()]

    def forward_and_backward(self) -> list[Tensor]:
        """Run the forward and the backward pass."""
        output = self.call()
        return [output.detach(), *torch.autograd.grad(output, self.leaves, self.gradient)]


def both_directions(case: str, batch_size: int, ours: Contestant, theirs: Contestant) -> Iterator[Comparison]:
    """Yield the comparison of the forward pass and that of forward and backward pass with torch."""
    forward: Functions = {"detr_bf": ours.forward, "torch": theirs.forward}
    both: Functions = {"detr_bf": ours.forward_and_backward, "torch": theirs.forward_and_backward}
    yield Comparison(case, batch_size, "forward", forward)
    yield Comparison(case, batch_size, "forward + backward", both)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    batch_size: int
    direction: str
    contestant: str
    baseline: str
    speedup: Spread  # time of the baseline / time of the contestant, per round

    def __str__(self) -> str:
        names = f"{self.contestant} / {self.baseline}"
        return f"| {self.case} | {self.batch_size} | {self.direction} | {names} | {cells(self.speedup)}"


def operator_parser(
    description: str | None, *, cases: Sequence[str], batch_sizes: Sequence[int]
) -> argparse.ArgumentParser:
    """Return a parser with the options of all operator benchmarks."""
    parser = make_parser(description, rounds=7, devices=("cpu", "cuda"), cases=cases)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default %(default)s")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="on a CPU, default %(default)s")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=batch_sizes, metavar="B", help="default %(default)s"
    )
    parser.add_argument(
        "--keep-memory", action="store_true", help="let malloc keep freed memory, so that no new pages are needed"
    )
    return parser


def prepare(options: argparse.Namespace) -> torch.device:
    """Apply the options; return the device, which must have compiled kernels."""
    device = torch.device(options.device)
    if not library.compiled(device):
        raise InputError(f"the compiled kernels do not run on {device}: {library.PROBLEMS[device.type]}")
    torch.set_num_threads(options.threads)
    if options.keep_memory:
        keep_memory()
    return device


def keep_memory() -> None:
    """Make malloc keep freed memory and stop using mmap for large blocks.

    Raises:
        InputError: the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(M_TRIM_THRESHOLD, -1) and mallopt(M_MMAP_MAX, 0)):
        raise InputError("--keep-memory needs glibc (mallopt); omit it on this system")


def measure(comparisons: Iterator[Comparison], options: argparse.Namespace, device: torch.device) -> int:
    """Time the comparisons; print a row per pair and write the JSON after each comparison; return exit code 0.

    The first function of a comparison is compared with each of the others.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    print_header("case", "B", "direction", "", "speed-up", "10th to 90th")
    rows: list[dict[str, Any]] = []
    times: dict[str, Seconds] = {}
    for comparison in comparisons:
        title = str(comparison)
        times[title] = alternate(comparison.functions, options.rounds, warmup=1, synchronize=wait, description=title)
        contestant, *baselines = comparison.functions
        for baseline in baselines:
            speedup = Spread.of(paired_ratios(times[title], baseline, contestant))
            case = (comparison.case, comparison.batch_size, comparison.direction)
            row = Row(*case, contestant, baseline, speedup)
            print(row, flush=True)
            rows.append(asdict(row))
        write_record(options, rows=rows, seconds=times)
    if device.type == "cuda":  # milliseconds are meaningful on a GPU without other work
        for title, seconds in times.items():
            medians = (f"{name} {Spread.of(values).median * 1e3:.3f} ms" for name, values in seconds.items())
            print(f"{title}: {', '.join(medians)}")
    return 0


def check_equal(ours: Tensor, theirs: Tensor, text: str) -> None:
    """Compare two results before their functions are timed.

    Raises:
        InputError: they differ, so that times mean nothing; the message begins with ``text``.
    """
    error = ((ours.double() - theirs).abs().max() / theirs.abs().max()).item()
    if not error < TOLERANCE:
        raise InputError(f"{text} by {error:.1e} of the largest value")
