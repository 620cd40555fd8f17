"""What the commands of this folder share: their options, how a spread is printed, what a record holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from detr_bf.errors import InputError
from detr_bf.report import machine_info
from timing import Spread

CONFIGS = Path(__file__).parent.parent / "configs"


def make_parser(
    description: str | None, *, rounds: int, devices: Sequence[str] = ("auto", "cpu", "cuda")
) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has. ``rounds`` and the first of ``devices`` are the defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=devices, default=devices[0], help="default %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help="of each comparison, default %(default)s"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all numbers here, as JSON")
    return parser


def add_image_options(parser: argparse.ArgumentParser) -> None:
    """The batch that whole detectors are measured on."""
    parser.add_argument("--batch-size", type=int, default=2, metavar="B", help="default %(default)s")
    parser.add_argument("--height", type=int, default=800, help="pixels, default %(default)s")
    parser.add_argument("--width", type=int, default=1066, help="pixels, default %(default)s")


def check_rounds(rounds: int) -> None:
    """Raise InputError unless there are enough for a spread."""
    if rounds < 2:
        raise InputError(f"--rounds must be 2 or more, for a spread; got {rounds}")


def cells(spread: Spread) -> str:
    """A spread as the two last cells of a table's row."""
    return f"{spread.median:.2f} | {spread.low:.2f} to {spread.high:.2f} |"


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """The machine and what was asked for, ready for JSON."""
    given = {key: value for key, value in vars(options).items() if key != "output"}
    return {"machine": machine_info(), "threads": torch.get_num_threads(), **given}
