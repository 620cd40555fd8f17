"""CUDA kernels of ms_deform_attn, compiled for the host and called with CPU tensors."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "ops" / "csrc"
TYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
TORCH = Path(torch.__file__).parent / "include"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
INCLUDES = (f"-I{SOURCES}", f"-I{HERE}", f"-isystem{TORCH}")
SMALL_GRID = "-DDETR_BF_MAX_GRID=3"  # so that small problems take several launches
# Undefined behaviour of C++ ends the process with a message.
SANITIZER = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-static-libubsan")

Shapes = Sequence[tuple[int, int]]


class EmulationError(RuntimeError):
    """Error detected by the emulated GPU."""


class Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("writable", ctypes.c_int32),
    )


_SIZES = ("images", "cells", "queries", "heads", "channels", "levels", "points")
_STRIDES = ("image_stride", "cell_stride", "head_stride")


class _Call(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in (*_SIZES, *_STRIDES)),
        ("spatial_shapes", ctypes.POINTER(ctypes.c_int64)),
        ("level_start_index", ctypes.POINTER(ctypes.c_int64)),
        ("variants", ctypes.c_char_p),
        ("buffers", ctypes.POINTER(Buffer)),
        ("number_of_buffers", ctypes.c_int32),
    )


def compiler() -> str | None:
    return shutil.which("g++")


def build(folder: Path) -> ctypes.CDLL:
    library = folder / "emulated.so"
    gxx = compiler()
    assert gxx is not None
    command = [
        gxx,
        *FLAGS,
        SMALL_GRID,
        *SANITIZER,
        *INCLUDES,
        str(HERE / "driver.cpp"),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    for name in ("emulate_forward", "emulate_backward", "emulate_gather"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def starts_of(shapes: Shapes) -> list[int]:
    return list(accumulate((height * width for height, width in shapes[:-1]), initial=0))


def bytes_spanned(tensor: Tensor) -> int:
    """Return the bytes from the first element to the end of the last, for any strides."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()


class Emulated:
    """One set of inputs for forward and backward passes, and the names of the alternative kernels to use."""

    def __init__(
        self,
        library: ctypes.CDLL,
        value: Tensor,
        shapes: Shapes,
        locations: Tensor,
        weights: Tensor,
        variants: str | None = None,
    ) -> None:
        self.library, self.value, self.shapes = library, value, shapes
        self.locations, self.weights, self.variants = locations, weights, variants
        self.starts = starts_of(shapes)

    def forward(self, output: Tensor | None = None) -> Tensor:
        images, queries, heads = self.weights.shape[:3]
        if output is None:
            output = self.value.new_full((images, queries, heads * self.value.shape[3]), torch.inf)
        self._run("emulate_forward", {"output": output})
        return output

    def backward(self, grad_output: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of value, locations and weights; value's as the kernels sum it, or in order."""
        grad_locations = torch.full_like(self.locations, torch.inf)
        grad_weights = torch.full_like(self.weights, torch.inf)
        written = {"grad_locations": grad_locations, "grad_weights": grad_weights}
        if deterministic:
            self._run("emulate_backward", written, {"grad_output": grad_output})
            return self.gather(grad_output), grad_locations, grad_weights
        narrow = self.library.emulate_adds_narrow(ctypes.byref(self._call({}, {"grad_output": grad_output})))
        grad_value = torch.zeros(self.value.shape, dtype=self.value.dtype if narrow else self.locations.dtype)
        self._run("emulate_backward", {**written, "grad_value": grad_value}, {"grad_output": grad_output})
        return grad_value, grad_locations, grad_weights

    def gather(self, grad_output: Tensor, most_entries: int = 1 << 24) -> Tensor:
        """Return the gradient of value with sums in fixed order, sorted in chunks of about this many samples."""
        grad_value = torch.full(self.value.shape, torch.inf, dtype=self.value.dtype)
        entries = ctypes.c_int64(most_entries)
        self._run("emulate_gather", {"grad_value": grad_value}, {"grad_output": grad_output}, entries)
        return grad_value

    def _run(
        self, name: str, written: dict[str, Tensor], read: dict[str, Tensor] | None = None, *more: ctypes.c_int64
    ) -> None:
        problem = getattr(self.library, name)(ctypes.byref(self._call(written, read or {})), *more)
        if problem is not None:
            raise EmulationError(problem.decode())

    def _call(self, written: dict[str, Tensor], read: dict[str, Tensor]) -> _Call:
        read = {"value": self.value, "locations": self.locations, "weights": self.weights, **read}
        buffers = [
            Buffer(name.encode(), tensor.data_ptr(), bytes_spanned(tensor), tensors is written)
            for tensors in (read, written)
            for name, tensor in tensors.items()
        ]
        images, cells, heads, channels = self.value.shape
        queries, levels, points = self.weights.shape[1], self.weights.shape[3], self.weights.shape[4]
        flat = [size for shape in self.shapes for size in shape]
        return _Call(
            TYPES[self.value.dtype],
            *(images, cells, queries, heads, channels, levels, points),
            *(stride * self.value.element_size() for stride in self.value.stride()[:3]),
            (ctypes.c_int64 * len(flat))(*flat),
            (ctypes.c_int64 * len(self.starts))(*self.starts),
            None if self.variants is None else self.variants.encode(),
            (Buffer * len(buffers))(*buffers),
            len(buffers),
        )
