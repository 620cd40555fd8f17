"""The compiled libraries: where they lie, whether they load, what runs instead where they do not."""

from __future__ import annotations

import json
import logging
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from detr_bf.ops.build import FOLDER, RECORD, digest_of_sources

logger = logging.getLogger(__name__)

BUILD_COMMAND = "python -m detr_bf.ops build"
REFERENCE_WISHED = os.environ.get("DETR_BF_OPS") == "reference"


def _load(name: str) -> str | None:
    """Load one library; what kept it from loading, or None."""
    path = FOLDER / f"{name}.so"
    if REFERENCE_WISHED:
        return "DETR_BF_OPS=reference"
    if not path.is_file() or not (FOLDER / RECORD).is_file():
        return "they are not built"
    if json.loads((FOLDER / RECORD).read_text()).get("sources") != digest_of_sources():
        return f"{path} was built from other sources than those beside it"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load ({error})"
    return None


def _load_all() -> dict[str, str | None]:
    """For each kind of device, what keeps its kernels from use, or None."""
    problems = {"cpu": _load("cpu")}
    if torch.version.cuda is None:
        problems["cuda"] = "this torch is built without CUDA"
    else:  # the library for CUDA implements what that for the CPU declares
        problems["cuda"] = problems["cpu"] or _load("cuda")
    return problems


PROBLEMS = _load_all()
DECLARED = PROBLEMS["cpu"] is None  # the operators exist


def compiled(device: torch.device) -> bool:
    """Whether the compiled kernels run on this device; said once for each kind, a warning where they do not."""
    if not torch.compiler.is_compiling():
        _announce(device.type)
    return PROBLEMS.get(device.type, "") is None


def check_one_device(*arguments: Any) -> None:
    """Refuse tensors of several devices among the arguments of an operator.

    For the implementations on the meta device: torch calls them as soon as one argument is a meta tensor, and their
    result would be memory that nothing was written to.

    Raises:
        ValueError: the tensors are on several devices.
    """
    devices = {str(argument.device) for argument in arguments if isinstance(argument, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"expected tensors on one device, got {', '.join(sorted(devices))}")


@cache
def _announce(kind: str) -> None:
    problem = PROBLEMS.get(kind, f"there are none for {kind}")
    if problem is None:
        logger.info("operators on %s: compiled kernels", kind)
    elif REFERENCE_WISHED:
        logger.info("operators on %s: plain PyTorch, as DETR_BF_OPS=reference asks", kind)
    else:
        logger.warning(
            "operators on %s: plain PyTorch, many times slower than the compiled kernels: %s. To build them: %s",
            kind,
            problem,
            BUILD_COMMAND,
        )
