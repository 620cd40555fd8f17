"""Linear layers through oneDNN against torch's own, in turn in one process, on a processor where ours differ.

python benchmarks/linear.py --keep-memory --output benchmarks/results/linear_cpu.json

A case is a layer from I to O channels, ``--batch-sizes`` its rows. All sizes go through oneDNN here, also those that
our linear layers leave to torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from command import run_benchmark
from detr_bf.acceleration import onednn
from detr_bf.common.errors import InputError
from operators import Comparison, Contestant, both_directions, check_equal, measure, operator_parser, prepare

CASES = ("256 to 256", "256 to 1024", "1024 to 256", "256 to 2048", "2048 to 256")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    options = operator_parser(__doc__, cases=CASES, batch_sizes=(300, 1000, 4000, 13_000)).parse_args(arguments)
    return run_benchmark(run, options)


def run(options: argparse.Namespace) -> int:
    """Check, measure, print and write."""
    if not onednn.FASTER or options.device != "cpu" or options.dtype != "float32":
        raise InputError(
            f"on {options.device} in {options.dtype} our linear layers are torch's own: give --device cpu and "
            "--dtype float32, on a processor of AMD with AVX-512"
        )
    device = prepare(options)
    onednn.SMALLEST_PRODUCT = 0
    return measure(comparisons(options), options, device)


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    """Yield each case, number of rows and direction."""
    for case in options.cases:
        width, wider = map(int, case.split(" to "))
        for rows in options.batch_sizes:
            generator = torch.Generator().manual_seed(0)
            x, weight, bias = (
                torch.randn(*shape, generator=generator) for shape in ((rows, width), (wider, width), (wider,))
            )
            leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
            gradient = torch.randn(rows, wider, generator=generator)
            ours, theirs = (Contestant(partial(call, *leaves), leaves, gradient) for call in (onednn.linear, F.linear))
            for found, expected in zip(ours.forward_and_backward(), theirs.forward_and_backward(), strict=True):
                check_equal(found, expected, f"{case}: ours differs from torch's")
            yield from both_directions(case, rows, ours, theirs)


if __name__ == "__main__":
    sys.exit(main())
