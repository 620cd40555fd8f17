"""Loading of the compiled libraries, and the fallback to the PyTorch reference."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from detr_bf.ops.build import FOLDER, RECORD, digest_of_sources

logger = logging.getLogger(__name__)

BUILD_COMMAND = "python -m detr_bf.ops build"
REFERENCE_REQUESTED = os.environ.get("DETR_BF_OPS") == "reference"


def _load(name: str) -> str | None:
    """Load one library; return the reason if it cannot be loaded, else None."""
    path = FOLDER / f"{name}.so"
    if REFERENCE_REQUESTED:
        return "DETR_BF_OPS=reference"
    if not path.is_file() or not (FOLDER / RECORD).is_file():
        return "they are not built"
    if json.loads((FOLDER / RECORD).read_text()).get("sources") != digest_of_sources():
        return f"{path} was built from other sources than those installed with it"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load ({error})"
    return None


# By device type: the reason why its kernels cannot be used, or None.
PROBLEMS = {"cpu": _load("cpu")}
if torch.version.cuda is None:
    PROBLEMS["cuda"] = "this torch is built without CUDA"
else:  # the CUDA library implements operators that the CPU library declares
    PROBLEMS["cuda"] = PROBLEMS["cpu"] or _load("cuda")
DECLARED = PROBLEMS["cpu"] is None  # torch knows the operators


_reference_only = False


@contextmanager
def reference_operators() -> Iterator[None]:
    """Use the PyTorch reference in the block: for graphs that programs without these operators run."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


def compiled(device: torch.device) -> bool:
    """Return True if the compiled kernels run on this device; logged once per device type."""
    if _reference_only:
        return False
    if not torch.compiler.is_compiling():
        _announce(device.type)
    return PROBLEMS.get(device.type, "") is None


def check_one_device(*arguments: Any) -> None:
    """Raise ValueError if the tensors among the arguments are on several devices.

    For fake implementations: torch calls them as soon as one argument is a meta tensor, and would return uninitialised
    memory.
    """
    devices = {str(argument.device) for argument in arguments if isinstance(argument, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"expected tensors on one device, got {', '.join(sorted(devices))}")


def describe(tensors: dict[str, Tensor], attribute: str) -> str:
    """Format one attribute of each tensor for an error message."""
    return ", ".join(f"{name} {getattr(tensor, attribute)}" for name, tensor in tensors.items())


@cache
def _announce(kind: str) -> None:
    problem = PROBLEMS.get(kind, f"there are none for {kind}")
    if problem is None:
        logger.info("operators on %s: compiled kernels", kind)
    elif REFERENCE_REQUESTED:
        logger.info("operators on %s: plain PyTorch, because DETR_BF_OPS=reference", kind)
    else:
        logger.warning(
            "operators on %s: plain PyTorch, many times slower than the compiled kernels: %s. To build them: %s",
            kind,
            problem,
            BUILD_COMMAND,
        )
