"""Measure training steps with BatchFormerV2 off, on and duplicate, inference with and without it, and matching.

    python benchmarks/run.py --rounds 48 --output runs/bench.json

Exit code 1 if results that must be identical are not, 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from cases import (
    MATCHING_SIZES,
    PRESETS,
    Measurement,
    Setting,
    measure_inference,
    measure_matching,
    measure_training,
)
from command import make_parser, run_benchmark, write_record
from detr_bf.common.devices import device_of
from detr_bf.common.timing import Spread, paired_ratios
from detr_bf.config import config_to_dict

CPU_NOTE = "times on a CPU may be disturbed by other work; compare the ratios, which are taken within rounds"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=48)
    parser.add_argument(
        "--preset", choices=PRESETS, default="small", help="small: minutes on a CPU; paper: DETR-R50, 800 x 1066"
    )
    return run_benchmark(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Measure, print and write; return 1 if a check fails."""
    preset = PRESETS[options.preset]
    setting = Setting(preset, device_of(preset.config(f"device={options.device}").device), options.rounds)
    print(
        f"preset {options.preset}, {options.rounds} rounds, device {setting.device}, "
        f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}"
    )
    if setting.device.type == "cpu":
        print(CPU_NOTE)
    measurements = []
    for measurement in measure(setting):
        print(f"\n{table(measurement)}", flush=True)
        measurements.append(measurement)
    if options.output is not None:
        write_record(
            options,
            device=str(setting.device),
            image_size=[preset.height, preset.width],
            batch_size=preset.batch_size,
            config=config_to_dict(preset.config()),
            measurements=list(map(record, measurements)),
        )
        print(f"\nwritten to {options.output}")
    failed = [check for measurement in measurements for check, holds in measurement.checks.items() if not holds]
    for check in failed:
        print(f"failed: {check}", file=sys.stderr)
    return 1 if failed else 0


def measure(setting: Setting) -> Iterator[Measurement]:
    """Yield all measurements."""
    yield measure_training(setting)
    yield measure_inference(setting)
    for images, queries in MATCHING_SIZES:
        yield measure_matching(setting, images, queries)


def table(measurement: Measurement) -> str:
    """Format times of the variants, ratios of the comparisons, and checks."""
    lines = [measurement.title, _row("", "median ms", "10th - 90th percentile", *measurement.facts)]
    for name, seconds in measurement.seconds.items():
        facts = (f"{values[name]:,}" for values in measurement.facts.values())
        lines.append(_row(name, *_cells(Spread.of([1000 * value for value in seconds]), 1), *facts))
    lines.append(_row("", "median ratio", "10th - 90th percentile"))
    for (name, baseline), ratio in _ratios(measurement).items():
        lines.append(_row(f"{name} / {baseline}", *_cells(ratio, 3)))
    lines += [f"  {check}: {'yes' if holds else 'NO'}" for check, holds in measurement.checks.items()]
    return "\n".join(lines)


def record(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement for JSON."""
    ratios = {" / ".join(pair): asdict(ratio) for pair, ratio in _ratios(measurement).items()}
    parts = {name: getattr(measurement, name) for name in ("title", "seconds", "facts", "checks")}
    return {**parts, "ratios": ratios}


def _ratios(measurement: Measurement) -> dict[tuple[str, str], Spread]:
    return {pair: Spread.of(paired_ratios(measurement.seconds, *pair)) for pair in measurement.comparisons}


def _cells(spread: Spread, digits: int) -> tuple[str, str]:
    return f"{spread.median:.{digits}f}", f"{spread.low:.{digits}f} - {spread.high:.{digits}f}"


def _row(name: str, *cells: str) -> str:
    return f"  {name:<26}{cells[0]:>12}{cells[1]:>26}" + "".join(f"{cell:>15}" for cell in cells[2:])


if __name__ == "__main__":
    sys.exit(main())
