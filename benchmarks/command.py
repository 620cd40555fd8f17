"""Shared by the benchmark commands: options, tables and records."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from detr_bf.common.errors import InputError
from detr_bf.common.files import write_json
from detr_bf.common.terminal import run_tool
from detr_bf.common.timing import Spread
from detr_bf.report import machine_info

CONFIGS = Path(__file__).parent.parent / "configs"


def make_parser(
    description: str | None,
    *,
    rounds: int,
    devices: Sequence[str] = ("auto", "cpu", "cuda"),
    cases: Iterable[str] = (),
) -> argparse.ArgumentParser:
    """Return a parser with the common options; ``rounds``, the first of ``devices`` and all ``cases`` are defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=devices, default=devices[0], help="default %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help="rounds of each comparison, default %(default)s"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all numbers here, as JSON")
    if cases := list(cases):
        parser.add_argument("--cases", nargs="+", choices=cases, default=cases, metavar="CASE", help="default all")
    return parser


def add_image_options(parser: argparse.ArgumentParser) -> None:
    """Add the batch and image size for benchmarks of whole detectors."""
    parser.add_argument("--batch-size", type=int, default=2, metavar="B", help="default %(default)s")
    parser.add_argument("--height", type=int, default=800, help="pixels, default %(default)s")
    parser.add_argument("--width", type=int, default=1066, help="pixels, default %(default)s")


def run_benchmark(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Check the number of rounds, run, and return the exit code."""

    def checked() -> int:
        if options.rounds < 2:
            raise InputError(f"--rounds must be 2 or more, for percentiles; got {options.rounds}")
        return run(options)

    return run_tool(checked)


def cells(spread: Spread) -> str:
    """Format a spread as the last two cells of a table row."""
    return f"{spread.median:.2f} | {spread.low:.2f} to {spread.high:.2f} |"


_machine_info = cache(machine_info)  # once a run: a commit made meanwhile was not measured


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Return machine, number of threads and options for JSON."""
    given = {key: value for key, value in vars(options).items() if key != "output"}
    return {"machine": _machine_info(), "threads": torch.get_num_threads(), **given}


def moment(device: torch.device) -> Any:
    """Return the time on a CPU, or an event on the stream of a GPU, which does not wait for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two moments; a GPU must have reached the second one."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000


def print_header(*titles: str) -> None:
    """Print the first two lines of a Markdown table."""
    print(f"| {' | '.join(titles)} |\n" + "|---" * len(titles) + "|")


def print_and_write(rows: Iterable[Any], options: argparse.Namespace, **more: Any) -> int:
    """Print and write each row, a dataclass, as soon as it is measured; return exit code 0."""
    written = []
    for row in rows:
        print(row, flush=True)
        written.append(asdict(row))
        write_record(options, **more, rows=written)
    return 0


def write_record(options: argparse.Namespace, **measured: Any) -> None:
    """Write what was measured so far to the file of ``--output``, if it is given."""
    if options.output is not None:
        write_json(options.output, {**circumstances(options), **measured})


def measured_in_process(file: str, *arguments: str, **variables: str) -> Any:
    """Run a script of this folder in a process of its own; return the JSON in the last line of its output."""
    command = [sys.executable, str(Path(file).resolve()), *arguments]
    done = subprocess.run(command, env=os.environ | variables, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])
