"""``python -m detr_bf.ops``: what is built, what is used, a self-check. ``python -m detr_bf.ops build`` builds."""

from __future__ import annotations

import argparse
import json
import platform
import sys

import torch

from detr_bf.ops import library, ms_deform_attn
from detr_bf.ops.build import FOLDER, RECORD, BuildError, build
from detr_bf.ops.reference import ms_deform_attn_reference


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m detr_bf.ops", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("show", "build"), default="show", help="default %(default)s")
    parser.add_argument("--strict", action="store_true", help="build: warnings are errors, and so is a missing library")
    options = parser.parse_args()
    return build_libraries(strict=options.strict) if options.command == "build" else show()


def build_libraries(*, strict: bool) -> int:
    """Build into the installed package."""
    results = build(strict=strict)
    for name, result in results.items():
        print(f"{name}: {'not built: ' if isinstance(result, BuildError) else ''}{result}")
    wanted = list(results) if strict else ["cpu"]
    return int(any(isinstance(results[name], BuildError) for name in wanted))


def show() -> int:
    """Print versions, libraries and the result of the self-check."""
    cuda = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {cuda}")
    record = FOLDER / RECORD
    if record.is_file():
        made_with = json.loads(record.read_text())
        print("built with " + ", ".join(f"{key} {made_with[key]}" for key in ("torch", "compiler") if key in made_with))
    for kind, problem in library.PROBLEMS.items():
        print(f"{kind}: {kernels_of(kind) if problem is None else f'plain PyTorch, because {problem}'}")
    if library.PROBLEMS["cpu"] is not None and not library.REFERENCE_WISHED:
        print(f"to build: {library.BUILD_COMMAND}")
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return max(self_check(torch.device(device)) for device in devices)


def kernels_of(kind: str) -> str:
    """In words; on a CPU with the instruction set that was chosen for this processor."""
    return f"compiled kernels ({torch.ops.detr_bf.cpu_instruction_set()})" if kind == "cpu" else "compiled kernels"


def self_check(device: torch.device) -> int:
    """Compare the operator with the reference in float64 on small random inputs."""
    shapes = [(7, 9), (4, 5)]
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 83, 4, 32), (2, 11, 4, 2, 3, 2), (2, 11, 4, 2, 3)]
    exact = [torch.rand(size, generator=generator, dtype=torch.float64, device="cpu").to(device) for size in sizes]
    tensors = [tensor.float().requires_grad_() for tensor in exact]
    value, locations, weights = exact
    expected = ms_deform_attn_reference(
        value.requires_grad_(), shapes, [0, 63], locations.requires_grad_(), weights.requires_grad_()
    )
    found = ms_deform_attn(tensors[0], shapes, None, tensors[1], tensors[2])
    found.square().sum().backward()
    expected.square().sum().backward()
    pairs = [(found.detach(), expected.detach()), *((a.grad, b.grad) for a, b in zip(tensors, exact, strict=True))]
    error = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
    print(f"self-check on {device.type}: largest relative error {error:.1e} {'(fine)' if error < 1e-5 else '(WRONG)'}")
    return 0 if error < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
