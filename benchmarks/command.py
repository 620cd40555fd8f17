"""Shared by the benchmark commands: options, table cells and the header of a record."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from detr_bf.common.errors import InputError
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


def check_rounds(rounds: int) -> None:
    """Raise InputError if there are too few rounds for percentiles."""
    if rounds < 2:
        raise InputError(f"--rounds must be 2 or more, for percentiles; got {rounds}")


def cells(spread: Spread) -> str:
    """Format a spread as the last two cells of a table row."""
    return f"{spread.median:.2f} | {spread.low:.2f} to {spread.high:.2f} |"


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Return machine, number of threads and options for JSON."""
    given = {key: value for key, value in vars(options).items() if key != "output"}
    return {"machine": machine_info(), "threads": torch.get_num_threads(), **given}
