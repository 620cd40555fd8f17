"""Multi-scale deformable attention against its peers: forward, and forward with backward, in turn in one process.

python benchmarks/ms_deform_attn.py --output benchmarks/results/ms_deform_attn_cpu.json

Peers: the plain PyTorch reference (grid_sample), transformers' function where transformers is installed, and what the
extra `peers` installs. Every peer must first agree with the reference in float64.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detr_bf.cli import run_tool
from detr_bf.errors import InputError
from detr_bf.files import write_json
from detr_bf.ops import library, ms_deform_attn
from detr_bf.ops.reference import ms_deform_attn_reference
from detr_bf.report import machine_info
from timing import Seconds, Spread, alternate, paired_ratios

SHAPES = ((100, 134), (50, 67), (25, 34), (13, 17))  # of an image of 800 x 1066 pixels
CELLS = sum(height * width for height, width in SHAPES)
STARTS = tuple(accumulate((height * width for height, width in SHAPES[:-1]), initial=0))
HEADS, CHANNELS, POINTS = 8, 32, 4
CASES = ("encoder_local", "encoder_uniform", "decoder")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REACH = 4.0  # cells: local samples lie about as far from their query as those of a fresh Deformable DETR
TOLERANCE = 1e-4

Op = Callable[[Tensor, Tensor, Tensor], Tensor]  # value, locations, weights -> output
Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """One comparison."""

    case: str
    batch_size: int
    direction: str  # forward, or forward and backward
    contestant: str
    baseline: str
    speedup: Spread  # the baseline's time by the contestant's, round by round


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of value and weights, default %(default)s")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of each comparison, default %(default)s")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="on a CPU, default %(default)s")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(1, 2, 4), metavar="B", help="default 1 2 4")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="default all")
    parser.add_argument("--scaling", action="store_true", help="compare 1 and 2 threads of ours instead")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all numbers here, as JSON")
    options = parser.parse_args(arguments)
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Check, measure, print and write."""
    if options.rounds < 2:
        raise InputError(f"--rounds must be 2 or more, for a spread; got {options.rounds}")
    device = torch.device(options.device)
    if not library.compiled(device):
        raise InputError(f"the compiled kernels do not run on {device}: {library.PROBLEMS[device.type]}")
    torch.set_num_threads(options.threads)
    contestants = peers(device)
    check(contestants, device)
    print("| case | B | direction | | speed-up | 10th to 90th |\n|---|---|---|---|---|---|")
    rows, times = [], {}
    for name, batch_size, direction, seconds in measurements(contestants, options, device):
        times[f"{name}, B = {batch_size}, {direction}"] = seconds
        for row in compare(name, batch_size, direction, seconds):
            rows.append(row)
            spread = f"{row.speedup.median:.2f} | {row.speedup.low:.2f} to {row.speedup.high:.2f}"
            print(f"| {name} | {batch_size} | {direction} | {row.contestant} / {row.baseline} | {spread} |", flush=True)
    if device.type == "cuda":
        print_milliseconds(times)
    if options.output is not None:
        given = {key: value for key, value in vars(options).items() if key != "output"}
        write_json(
            options.output, {"machine": machine_info(), **given, "rows": [asdict(r) for r in rows], "seconds": times}
        )
    return 0


def peers(device: torch.device) -> dict[str, Op]:
    """Whoever is installed and runs on this device, ours first."""
    found: dict[str, Op] = {
        "detr_bf": lambda v, x, w: ms_deform_attn(v, SHAPES, STARTS, x, w),
        "grid_sample": lambda v, x, w: ms_deform_attn_reference(v, SHAPES, STARTS, x, w),
    }
    for name, make in PEERS.items():
        try:
            found[name] = make(device)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def _transformers(device: torch.device) -> Op:
    module = importlib.import_module("transformers.models.deformable_detr.modeling_deformable_detr")
    op, shapes = module.MultiScaleDeformableAttention(), torch.tensor(SHAPES, device=device)
    starts = torch.tensor(STARTS, device=device)
    return lambda v, x, w: op(v, shapes, list(SHAPES), starts, x, w, 64)


def _torch_ms_deform_attn(device: torch.device) -> Op:
    function: Any = importlib.import_module("torch_ms_deform_attn").ms_deform_attn
    shapes, starts = torch.tensor(SHAPES, device=device), torch.tensor(STARTS, device=device)
    return lambda v, x, w: function(v, shapes, starts, x, w)


def _deformops(device: torch.device) -> Op:
    function: Any = importlib.import_module("deformops").multi_scale_deformable_attention
    shapes, starts = torch.tensor(SHAPES, device=device), torch.tensor(STARTS, device=device)
    return lambda v, x, w: function(v, shapes, starts, x, w)


PEERS = {"transformers": _transformers, "torch-ms-deform-attn": _torch_ms_deform_attn, "deformops": _deformops}


def make_inputs(case: str, batch_size: int, dtype: torch.dtype, device: torch.device, queries: int = 300) -> Inputs:
    """Value, locations and weights from a fixed seed: samples near the query's own cell, or anywhere."""
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
    """Output and gradients of everyone against the reference in float64, on a decoder's worth of queries.

    Raises:
        InputError: somebody computes something else: then times mean nothing.
    """
    inputs = make_inputs("decoder", 1, torch.float32, device, queries=50)
    expected = _output_and_gradients(contestants["grid_sample"], [tensor.double() for tensor in inputs])
    for name, op in contestants.items():
        for ours, theirs in zip(_output_and_gradients(op, inputs), expected, strict=True):
            error = ((ours.double() - theirs).abs().max() / theirs.abs().max()).item()
            if not error < TOLERANCE:
                raise InputError(f"{name} differs from the reference in float64 by {error:.1e} of the largest value")


def _output_and_gradients(op: Op, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = op(leaves[0], leaves[1], leaves[2])
    return [output, *torch.autograd.grad(output, leaves, output.detach())]


def measurements(
    contestants: dict[str, Op], options: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, int, str, Seconds]]:
    """Seconds of everyone, for each case, batch size and direction."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for case in options.cases:
        for batch_size in options.batch_sizes:
            inputs = make_inputs(case, batch_size, DTYPES[options.dtype], device)
            for direction, once in (("forward", forward), ("forward + backward", forward_and_backward)):
                functions: dict[str, Callable[[], object]] = {
                    name: partial(once, op, inputs) for name, op in contestants.items()
                }
                ours = functions["detr_bf"]
                if options.scaling:
                    functions = {f"{number} threads": partial(_with_threads, number, ours) for number in (1, 2)}
                elif device.type == "cuda" and once is forward_and_backward:
                    functions["detr_bf, deterministic"] = partial(_deterministically, ours)
                title = f"{case}, B = {batch_size}, {direction}"
                seconds = alternate(functions, options.rounds, warmup=1, synchronize=wait, description=title)
                yield case, batch_size, direction, seconds


@torch.no_grad()
def forward(op: Op, inputs: Inputs) -> Tensor:
    """Once forward."""
    return op(*inputs)


def forward_and_backward(op: Op, inputs: Inputs) -> list[Tensor]:
    """Once forward and backward, to all three inputs."""
    return _output_and_gradients(op, inputs)


def _with_threads(number: int, function: Callable[[], object]) -> None:
    torch.set_num_threads(number)
    function()


def _deterministically(function: Callable[[], object]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        function()
    finally:
        torch.use_deterministic_algorithms(False)


def compare(case: str, batch_size: int, direction: str, seconds: Seconds) -> Iterator[Row]:
    """The first contestant against each of the others; of two thread counts, the second against the first."""
    names = list(seconds)
    pairs = [(names[1], names[0])] if "1 threads" in seconds else [(names[0], other) for other in names[1:]]
    for contestant, baseline in pairs:
        speedup = Spread.of(paired_ratios(seconds, baseline, contestant))
        yield Row(case, batch_size, direction, contestant, baseline, speedup)


def print_milliseconds(times: dict[str, Seconds]) -> None:
    """Medians: from a GPU nobody else uses, absolute times count."""
    for title, seconds in times.items():
        medians = ", ".join(f"{name} {Spread.of(values).median * 1e3:.3f} ms" for name, values in seconds.items())
        print(f"{title}: {medians}")


if __name__ == "__main__":
    sys.exit(main())
