"""Batch attention and its layer against those of torch, in training, in turn in one process.

python benchmarks/batch_attention.py --output benchmarks/results/batch_attention_cpu.json

The core is the attention alone: ours on one packed projection, torch's scaled_dot_product_attention on tensors in the
layout of nn.TransformerEncoderLayer, without the copies that this layer makes before and after. The layer is the one of
BatchFormerV2 against nn.TransformerEncoderLayer with the same parameters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from command import run_benchmark
from detr_bf.acceleration.model import accelerate
from detr_bf.batchformer import BatchFormerLayer
from detr_bf.ops import batch_attention_packed
from operators import DTYPES, Comparison, Contestant, both_directions, check_equal, measure, operator_parser, prepare

CASES = ("core", "layer")
DIM, HEADS = 256, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = operator_parser(__doc__, cases=CASES, batch_sizes=(2, 3, 4, 8))
    parser.add_argument("--positions", type=int, default=13_000, metavar="N", help="default %(default)s")
    parser.add_argument("--dropout", type=float, default=0.5, metavar="P", help="default %(default)s")
    return run_benchmark(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Check, measure, print and write."""
    device = prepare(options)
    check(device)
    return measure(comparisons(options, device), options, device)


def core(batch_size: int, positions: int, dropout: float, dtype: torch.dtype, device: torch.device) -> list[Contestant]:
    """Return our attention and torch's on the same numbers."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(batch_size, positions, 3, HEADS, DIM // HEADS, generator=generator)
    ours = packed.to(device, dtype).requires_grad_()
    # (B, N, H, D) in memory, seen as (N, H, B, D).
    theirs = query, key, value = [
        part.contiguous().permute(1, 2, 0, 3).requires_grad_() for part in ours.detach().unbind(2)
    ]

    def torchs() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout).permute(2, 0, 1, 3)

    gradient = torch.randn(batch_size, positions, HEADS, DIM // HEADS, generator=generator).to(device, dtype)
    return [
        Contestant(partial(batch_attention_packed, ours, None, dropout), [ours], gradient),
        Contestant(torchs, theirs, gradient),
    ]


def layer(
    batch_size: int, positions: int, dropout: float, dtype: torch.dtype, device: torch.device
) -> list[Contestant]:
    """Return our layer and torch's with the same parameters and tokens."""
    torch.manual_seed(0)
    ours = accelerate(BatchFormerLayer(DIM, heads=HEADS, dropout=dropout))
    theirs = nn.TransformerEncoderLayer(DIM, HEADS, dim_feedforward=DIM, dropout=dropout)
    theirs.load_state_dict(ours.layers[0].state_dict())
    tokens = torch.randn(batch_size, positions, DIM).to(device, dtype).requires_grad_()
    gradient = torch.randn(batch_size, positions, DIM).to(device, dtype)
    return [
        Contestant(partial(module, tokens), [tokens, *module.parameters()], gradient)
        for module in (ours.to(device, dtype).train(), theirs.to(device, dtype).train())
    ]


MAKE = {"core": core, "layer": layer}


def check(device: torch.device) -> None:
    """Compare our output and gradients with torch's in float64, without dropout.

    Raises:
        InputError: they differ, so the times are meaningless.
    """
    for case, make in MAKE.items():
        ours = make(3, 50, 0.0, torch.float32, device)[0].forward_and_backward()
        theirs = make(3, 50, 0.0, torch.float64, device)[1].forward_and_backward()
        if case == "core":
            theirs[1:] = [torch.stack([gradient.permute(2, 0, 1, 3) for gradient in theirs[1:]], 2)]
        for one, other in zip(ours, theirs, strict=True):
            check_equal(one, other, f"{case}: ours differs from torch's in float64")


def comparisons(options: argparse.Namespace, device: torch.device) -> Iterator[Comparison]:
    """Yield each case, batch size and direction."""
    for case in options.cases:
        for batch_size in options.batch_sizes:
            ours, theirs = MAKE[case](batch_size, options.positions, options.dropout, DTYPES[options.dtype], device)
            yield from both_directions(case, batch_size, ours, theirs)


if __name__ == "__main__":
    sys.exit(main())
