"""Copies between the host and a GPU that do not wait for the GPU's queued work, and precision of float32 products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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
