"""The device of a process, copies to and from a GPU that do not wait for it, and precision of float32 products."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from detr_bf.common import distributed
from detr_bf.common.errors import InputError


def device_of(name: str) -> torch.device:
    """Return the device of the setting ``device``; ``auto`` is the GPU if there is one. Each rank uses its own GPU.

    Raises:
        InputError: there is no such device, or it is one GPU for several processes.
    """
    if name == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return _own_gpu() if kind == "cuda" and distributed.launched() else torch.device(kind)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InputError(f"device must be auto, cpu, cuda or cuda:N; got '{name}'")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device={name}, but torch sees {torch.cuda.device_count()} CUDA GPUs: "
            "use device=cpu, device=auto or a smaller number"
        )
    if device.type == "cuda" and distributed.launched():
        if device.index is not None:
            raise InputError(f"device={name} is one GPU for several processes: use device=cuda or auto")
        return _own_gpu()
    return device


def _own_gpu() -> torch.device:
    """Return the GPU with the local rank as its index."""
    number = distributed.local_rank()
    if number >= torch.cuda.device_count():
        raise InputError(
            f"the launcher started {number + 1} processes or more on a machine with {torch.cuda.device_count()} CUDA "
            "GPUs: lower --nproc-per-node, or use device=cpu"
        )
    return torch.device("cuda", number)


def tensor_on(device: torch.device, values: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    """Return ``torch.tensor(values, dtype=dtype, device=device)``, which itself waits for a GPU."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    return send(torch.tensor(values, dtype=dtype, device="cpu"), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, to a GPU from pinned memory."""
    if device.type != "cuda" or type(tensor) is not Tensor:  # such as the fake tensors of the planner
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Copy of a tensor on the host. :meth:`get` waits until the GPU has done the work queued before the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> Tensor:
        """Return the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


@contextmanager
def float32_products(device: torch.device, precision: str) -> Iterator[None]:
    """Choose the precision of float32 matrix products and convolutions on a GPU; a CPU keeps that of torch.

    Args:
        precision: ``high`` reads factors as TF32, with 10 bits of mantissa, and adds in float32; ``highest``: float32.
    """
    if device.type != "cuda":
        yield
        return
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions
