"""Stand-in for a GPU that records each place where the host would wait for it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PACKAGE = Path(__file__).resolve().parents[1] / "detr_bf"
HOST = {"cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
HOST |= {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "is_nonzero"}


class GpuTensor(Tensor):
    """CPU tensor that stands for one on a GPU; so do all results of operations on it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.__name__
        if name in HOST or (name in ("__getitem__", "__setitem__") and reads_a_mask(arguments[1])):
            WAITS.append(f"{name} {place()}")
        result = super().__torch_function__(function, types, arguments, keywords or {})
        return result.as_subclass(Tensor) if name in ("cpu", "numpy") and isinstance(result, Tensor) else result


WAITS: list[str] = []


def reads_a_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


@cache
def resolved(file: str) -> Path:
    """Return the file that a link of an uninstalled checkout points to."""
    return Path(file).resolve()


def place() -> str:
    """Return the innermost line of the package."""
    for frame in reversed(traceback.extract_stack()):
        path = resolved(frame.filename)
        if path.is_relative_to(PACKAGE) or path.is_relative_to(PACKAGE.parent / "ops"):
            return f"{path.relative_to(PACKAGE.parent)}:{frame.lineno}"
    return "elsewhere"


class Constants(TorchFunctionMode):
    """Record constants made on a device, and copies to it; those of ``devices.py`` do not wait."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        made = function.__name__ in ("tensor", "as_tensor") and keywords.get("device") not in (None, "cpu")
        made |= function.__name__ == "new_tensor"
        made |= function.__name__ == "to" and moves(arguments[1:], keywords) and not isinstance(arguments[0], GpuTensor)
        where = place() if made else "elsewhere"
        if where.startswith("detr_bf/common/devices.py"):
            return function(*arguments, **keywords).as_subclass(GpuTensor)
        if where != "elsewhere":
            WAITS.append(f"{function.__name__} {where}")
        return function(*arguments, **keywords)


def moves(arguments: Any, keywords: dict[str, Any]) -> bool:
    named = [*arguments, *keywords.values()]
    return any(isinstance(each, torch.device) for each in named) and not keywords.get("non_blocking")


@contextmanager
def waits() -> Iterator[list[str]]:
    """Record the waits in the block: the operation, and the file and line of the package."""
    WAITS.clear()
    with Constants():
        yield WAITS
