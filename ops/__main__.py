"""``python -m detr_bf.ops`` shows the built libraries and runs a self-check; ``python -m detr_bf.ops build`` builds."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from detr_bf.ops import batch_attention, library, ms_deform_attn
from detr_bf.ops.build import FOLDER, RECORD, BuildError, build
from detr_bf.ops.reference import batch_attention_reference, ms_deform_attn_reference

TOLERANCE = 1e-5  # float32
Op = Callable[..., Tensor]
OpSizes = list[tuple[int, ...]]


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m detr_bf.ops", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("show", "build"), default="show", help="default %(default)s")
    parser.add_argument("--strict", action="store_true", help="build: warnings are errors, and so is a missing library")
    parser.add_argument("--cuda", action="store_true", help="build: compile for CUDA without a GPU, too (FORCE_CUDA=1)")
    options = parser.parse_args()
    return build_libraries(strict=options.strict, cuda=options.cuda) if options.command == "build" else show()


def build_libraries(*, strict: bool, cuda: bool) -> int:
    """Build into the installed package, and print each step."""
    results = build(strict=strict, cuda=cuda, say=lambda text: print(text, flush=True))
    for name, result in results.items():
        print(f"{name}: {'not built: ' if isinstance(result, BuildError) else ''}{result}")
    wanted = list(results) if strict or cuda else ["cpu"]
    return int(any(isinstance(results[name], BuildError) for name in wanted))


def show() -> int:
    """Print versions, libraries and the result of the self-check."""
    cuda = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {cuda}")
    record = FOLDER / RECORD
    if record.is_file():
        made_with = json.loads(record.read_text())
        print(f"built with torch {made_with['torch']} and {made_with['compiler']}")
    for kind, problem in library.PROBLEMS.items():
        print(f"{kind}: {kernels_of(kind) if problem is None else f'plain PyTorch, because {problem}'}")
    if library.PROBLEMS["cpu"] is not None and not library.REFERENCE_REQUESTED:
        print(f"to build: {library.BUILD_COMMAND}")
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return max(self_check(torch.device(device)) for device in devices)


def kernels_of(kind: str) -> str:
    """Describe the loaded kernels; on a CPU with the selected instruction set."""
    chosen = f" ({torch.ops.detr_bf.cpu_instruction_set()})" if kind == "cpu" else ""
    return f"compiled kernels{chosen}, {FOLDER / kind}.so"


def self_check(device: torch.device) -> int:
    """Compare each operator and its gradients with its reference in float64, on small random inputs."""
    shapes = [(7, 9), (4, 5)]
    checks: dict[str, tuple[Op, Op, OpSizes]] = {
        "ms_deform_attn": (
            lambda v, x, w: ms_deform_attn(v, shapes, None, x, w),
            lambda v, x, w: ms_deform_attn_reference(v, shapes, [0, 63], x, w),
            [(2, 83, 4, 32), (2, 11, 4, 2, 3, 2), (2, 11, 4, 2, 3)],
        ),
        "batch_attention": (
            batch_attention,
            lambda q, k, v: batch_attention_reference(q, k, v, None, 0.0, None),
            [(3, 17, 4, 32)] * 3,
        ),
    }
    errors = {name: largest_error(*check, device) for name, check in checks.items()}
    for name, error in errors.items():
        verdict = "fine" if error < TOLERANCE else "WRONG"
        print(f"self-check of {name} on {device.type}: largest relative error {error:.1e} ({verdict})")
    return int(not all(error < TOLERANCE for error in errors.values()))


def largest_error(op: Op, reference: Op, sizes: OpSizes, device: torch.device) -> float:
    """Return the largest error of output and gradients, each relative to its largest value."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.rand(size, generator=generator, dtype=torch.float64).to(device) for size in sizes]
    found = _with_gradients(op, [tensor.float() for tensor in exact])
    expected = _with_gradients(reference, exact)
    pairs = zip(found, expected, strict=True)
    return max(float((ours.double() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def _with_gradients(op: Op, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.requires_grad_() for tensor in inputs]
    output = op(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]


if __name__ == "__main__":
    sys.exit(main())
