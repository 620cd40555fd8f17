"""Multi-scale deformable attention against other implementations, forward and backward, in turn in one process.

python benchmarks/ms_deform_attn.py --output benchmarks/results/ms_deform_attn_cpu.json

Peers: the plain PyTorch reference (grid_sample), transformers if installed, and the packages of the extra `peers`. Each
peer must first agree with the reference in float64.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from command import run_benchmark
from detr_bf.ops import ms_deform_attn
from detr_bf.ops.reference import ms_deform_attn_reference
from operators import DTYPES, Comparison, Functions, check_equal, measure, operator_parser, prepare

SHAPES = ((100, 134), (50, 67), (25, 34), (13, 17))  # for an image of 800 x 1066 pixels
CELLS = sum(height * width for height, width in SHAPES)
STARTS = tuple(accumulate((height * width for height, width in SHAPES[:-1]), initial=0))
HEADS, CHANNELS, POINTS = 8, 32, 4
CASES = ("encoder_local", "encoder_uniform", "decoder")
REACH = 4.0  # cells between local samples and their query, as in a new Deformable DETR

PEERS = {  # name -> module and attribute
    "transformers": ("transformers.models.deformable_detr.modeling_deformable_detr", "MultiScaleDeformableAttention"),
    "torch-ms-deform-attn": ("torch_ms_deform_attn", "ms_deform_attn"),
    "deformops": ("deformops.registry", "msda"),
}

Op = Callable[[Tensor, Tensor, Tensor], Tensor]  # value, locations, weights -> output
Inputs = tuple[Tensor, Tensor, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = operator_parser(__doc__, cases=CASES, batch_sizes=(1, 2, 4))
    parser.add_argument("--scaling", action="store_true", help="compare 2 threads of ours with 1 instead")
    return run_benchmark(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Check, measure, print and write."""
    device = prepare(options)
    contestants = peers(device)
    check(contestants, device)
    return measure(comparisons(contestants, options, device), options, device)


def peers(device: torch.device) -> dict[str, Op]:
    """Return the installed implementations for this device, ours first."""
    found: dict[str, Op] = {
        "detr_bf": lambda v, x, w: ms_deform_attn(v, SHAPES, STARTS, x, w),
        "grid_sample": lambda v, x, w: ms_deform_attn_reference(v, SHAPES, STARTS, x, w),
    }
    shapes, starts = torch.tensor(SHAPES, device=device), torch.tensor(STARTS, device=device)
    for name, (module, attribute) in PEERS.items():
        try:
            function: Any = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a peer that does not load here
            print(f"{name} is skipped: {error}", file=sys.stderr)
            continue
        if name == "transformers":
            found[name] = partial(_in_float32, partial(_transformers, function(), shapes, starts))
        elif name == "torch-ms-deform-attn":
            found[name] = partial(_in_float32, partial(_with_levels, function, shapes, starts))
        else:
            found[name] = partial(_with_levels, function, shapes, starts)
    return found


def _with_levels(op: Any, shapes: Tensor, starts: Tensor, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    result: Tensor = op(value, shapes, starts, locations, weights)
    return result


def _transformers(op: Any, shapes: Tensor, starts: Tensor, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    result: Tensor = op(value, shapes, list(SHAPES), starts, locations, weights, 64)
    return result


def _in_float32(op: Op, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """Run an implementation without half precision in float32, as its users do."""
    return op(value.float(), locations, weights.float()).to(value.dtype)


def make_inputs(case: str, batch_size: int, dtype: torch.dtype, device: torch.device, queries: int = 300) -> Inputs:
    """Return value, locations and weights from a fixed seed; samples near the cell of the query, or anywhere."""
    generator = torch.Generator().manual_seed(0)
    queries = queries if case == "decoder" else CELLS
    samples = (batch_size, queries, HEADS, len(SHAPES), POINTS)
    if case == "encoder_local":
        sizes = torch.tensor([(width, height) for height, width in SHAPES])
        offsets = torch.randn(*samples, 2, generator=generator) * REACH / 2
        locations = _cell_centres()[:, None, None, None] + offsets / sizes[:, None]
    else:
        locations = torch.rand(*samples, 2, generator=generator)
    value = torch.randn(batch_size, CELLS, HEADS, CHANNELS, generator=generator)
    weights = torch.randn(samples, generator=generator).flatten(3).softmax(-1).view(samples)
    return value.to(device, dtype), locations.to(device), weights.to(device, dtype)


def _cell_centres() -> Tensor:
    centres = []
    for height, width in SHAPES:
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres.append(torch.stack([(x + 0.5) / width, (y + 0.5) / height], dim=-1).flatten(0, 1))
    return torch.cat(centres)


def check(contestants: dict[str, Op], device: torch.device) -> None:
    """Compare output and gradients with the reference in float64, for 50 decoder queries.

    Raises:
        InputError: an implementation computes something else, so its times are meaningless.
    """
    inputs = make_inputs("decoder", 1, torch.float32, device, queries=50)
    expected = _output_and_gradients(contestants["grid_sample"], [tensor.double() for tensor in inputs])
    for name, op in contestants.items():
        for ours, theirs in zip(_output_and_gradients(op, inputs), expected, strict=True):
            check_equal(ours, theirs, f"{name} differs from the reference in float64")


def _output_and_gradients(op: Op, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = op(leaves[0], leaves[1], leaves[2])
    return [output, *torch.autograd.grad(output, leaves, output.detach())]


def comparisons(contestants: dict[str, Op], options: argparse.Namespace, device: torch.device) -> Iterator[Comparison]:
    """Yield each case, batch size and direction."""
    for case in options.cases:
        for batch_size in options.batch_sizes:
            inputs = make_inputs(case, batch_size, DTYPES[options.dtype], device)
            for direction, once in (("forward", forward), ("forward + backward", _output_and_gradients)):
                functions: Functions = {name: partial(once, op, inputs) for name, op in contestants.items()}
                ours = functions["detr_bf"]
                if options.scaling:
                    functions = {f"{number} threads": partial(_with_threads, number, ours) for number in (2, 1)}
                elif device.type == "cuda" and once is not forward:
                    functions["detr_bf, deterministic"] = deterministic(ours)
                yield Comparison(case, batch_size, direction, functions)


@torch.no_grad()
def forward(op: Op, inputs: Inputs) -> Tensor:
    """Run the forward pass."""
    return op(*inputs)


def _with_threads(number: int, function: Callable[[], object]) -> None:
    torch.set_num_threads(number)
    function()


def deterministic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in torch's deterministic mode."""

    def run(*arguments: Any) -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return function(*arguments)
        finally:
            torch.use_deterministic_algorithms(False)

    return run


if __name__ == "__main__":
    sys.exit(main())
