"""What the benchmarks of single operators share: options, and what becomes of their measurements."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from command import cells, check_rounds, circumstances, make_parser
from detr_bf.errors import InputError
from detr_bf.files import write_json
from detr_bf.ops import library
from timing import Seconds, Spread, alternate, paired_ratios

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt, in glibc's malloc.h
TOLERANCE = 1e-4  # in a check before anything is timed, of the largest value

Functions = dict[str, Callable[[], object]]  # name -> what is timed


@dataclass(frozen=True)
class Comparison:
    """What is timed in turn. Ours stands first."""

    case: str
    batch_size: int
    direction: str  # forward, or forward and backward
    functions: Functions

    def __str__(self) -> str:
        return f"{self.case}, B = {self.batch_size}, {self.direction}"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    batch_size: int
    direction: str
    contestant: str
    baseline: str
    speedup: Spread  # the baseline's time by the contestant's, round by round

    def __str__(self) -> str:
        names = f"{self.contestant} / {self.baseline}"
        return f"| {self.case} | {self.batch_size} | {self.direction} | {names} | {cells(self.speedup)}"


def operator_parser(
    description: str | None, *, cases: Sequence[str], batch_sizes: Sequence[int]
) -> argparse.ArgumentParser:
    """A parser with the options of every operator's benchmark."""
    parser = make_parser(description, rounds=7, devices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default %(default)s")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="on a CPU, default %(default)s")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=batch_sizes, metavar="B", help="default %(default)s"
    )
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases, help="default all")
    parser.add_argument(
        "--keep-memory", action="store_true", help="let malloc keep what is freed, so that no pages are fetched anew"
    )
    return parser


def prepare(options: argparse.Namespace) -> torch.device:
    """The device asked for, with compiled kernels, and as many threads as asked for."""
    check_rounds(options.rounds)
    device = torch.device(options.device)
    if not library.compiled(device):
        raise InputError(f"the compiled kernels do not run on {device}: {library.PROBLEMS[device.type]}")
    torch.set_num_threads(options.threads)
    if options.keep_memory:
        keep_memory()
    return device


def keep_memory() -> None:
    """Let malloc neither give memory back to the system nor map blocks apart, from now on.

    Raises:
        InputError: the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(M_TRIM_THRESHOLD, -1) and mallopt(M_MMAP_MAX, 0)):
        raise InputError("--keep-memory needs glibc, whose malloc can be told to; leave it out here")


def measure(comparisons: Iterator[Comparison], options: argparse.Namespace, device: torch.device) -> None:
    """Time them, print a row for each pair, write what has been measured so far.

    The first of a comparison's functions stands against each of the others.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    print("| case | B | direction | | speed-up | 10th to 90th |\n|---|---|---|---|---|---|")
    rows, times = [], {}
    for comparison in comparisons:
        seconds = alternate(
            comparison.functions, options.rounds, warmup=1, synchronize=wait, description=str(comparison)
        )
        times[str(comparison)] = seconds
        for row in compare(comparison, seconds):
            print(row, flush=True)
            rows.append(asdict(row))
        if options.output is not None:
            write_json(options.output, {**circumstances(options), "rows": rows, "seconds": times})
    if device.type == "cuda":
        print_milliseconds(times)


def compare(comparison: Comparison, seconds: Seconds) -> Iterator[Row]:
    """The first against each of the others."""
    contestant, *baselines = seconds
    for baseline in baselines:
        speedup = Spread.of(paired_ratios(seconds, baseline, contestant))
        yield Row(comparison.case, comparison.batch_size, comparison.direction, contestant, baseline, speedup)


def print_milliseconds(times: dict[str, Seconds]) -> None:
    """Medians: from a GPU nobody else uses, absolute times count."""
    for title, seconds in times.items():
        medians = ", ".join(f"{name} {Spread.of(values).median * 1e3:.3f} ms" for name, values in seconds.items())
        print(f"{title}: {medians}")
