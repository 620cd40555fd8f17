"""Time of a training step with several ways in which OpenMP's threads wait, alone and beside busy processes.

python benchmarks/waiting.py --busy 0 1 2 4 --rounds 20 --output benchmarks/results/waiting_cpu.json

Each way is a process of its own with the model of `make demo`; they run a step in turn. A busy process computes without
end on one core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from cases import Preset, Setting
from command import CONFIGS, cells, make_parser, print_header, run_benchmark, write_record
from detr_bf.common.errors import InputError
from detr_bf.common.timing import Spread, alternate, paired_ratios
from step import Step

DEFAULT = "default"
WAYS = {  # name -> variables of the environment
    DEFAULT: {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "no spinning": {"GOMP_SPINCOUNT": "0"},
    "1,000 spins": {"GOMP_SPINCOUNT": "1000"},
    "10,000 spins": {"GOMP_SPINCOUNT": "10000"},
    "100,000 spins": {"GOMP_SPINCOUNT": "100000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
_NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
PRESET = Preset(128, 128, 8, recipe=CONFIGS / "demo.yaml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=20, devices=("cpu",))
    parser.add_argument("--busy", type=int, nargs="+", default=(0, 1, 2, 4), metavar="N", help="busy processes beside")
    return run_benchmark(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Measure; print and write row by row.

    Raises:
        InputError: a negative number of busy processes.
    """
    if min(options.busy) < 0:
        raise InputError(f"--busy must be 0 or more; got {min(options.busy)}")
    rows = []
    print_header("busy processes", "way", "step, ms", "step / default", "10th to 90th")
    with ExitStack() as stack:
        steps = {name: partial(_ask, stack.enter_context(_stepping(variables))) for name, variables in WAYS.items()}
        for busy in options.busy:
            with ExitStack() as others:
                for _ in range(busy):
                    others.enter_context(_process([sys.executable, "-c", "while True: pass"]))
                seconds = alternate(steps, options.rounds, description=f"{busy} busy processes")
            for name in WAYS:
                step, ratio = Spread.of(seconds[name]), Spread.of(paired_ratios(seconds, name, DEFAULT))
                print(f"| {busy} | {name} | {1000 * step.median:.0f} | {cells(ratio)}", flush=True)
            rows.append({"busy": busy, "seconds": seconds})
            write_record(options, rows=rows)
    return 0


@contextmanager
def _process(command: Sequence[str], variables: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    environment = {key: value for key, value in os.environ.items() if key not in _NAMES} | (variables or {})
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _stepping(variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process that runs a step for each line of its input."""
    with _process([sys.executable, str(Path(__file__).resolve()), "--steps"], variables) as process:
        _ask(process)
        yield process


def _ask(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    process.stdin.write("step\n")
    if not process.stdout.readline():
        raise RuntimeError(f"a process that runs steps has ended with {process.wait()}")


def _run_steps() -> None:
    step = Step(Setting(PRESET, torch.device("cpu"), rounds=1), "float32")
    for _ in sys.stdin:
        step()
        print(time.perf_counter(), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--steps"]:
        _run_steps()
    else:
        sys.exit(main())
