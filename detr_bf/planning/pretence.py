"""What must be pretended for operators to run, without numbers, as they would on a GPU that is not there."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from detr_bf.ops import library

ALIGNMENT = 8  # elements to which the rows of a fused attention's bias are padded


def kernels_assumed(device: str) -> bool:
    """Whether the compiled operators are taken to run there; else it is their plain PyTorch form."""
    return library.DECLARED and (device == "cuda" or library.PROBLEMS[device] is None)


@contextmanager
def without_numbers(device: str) -> Iterator[None]:
    """Tensors made within are fake and lie on the device. Nothing is logged: models tell what the plan tells too."""
    found, logged = library.PROBLEMS[device], logging.root.manager.disable
    if kernels_assumed(device):
        library.PROBLEMS[device] = None
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), FakeTensorMode(), torch.device(device):
            warnings.filterwarnings("ignore", "CUDA is not available")  # torch.autocast of a part of the model
            yield
    finally:
        logging.disable(logged)
        library.PROBLEMS[device] = found


@contextmanager
def autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """As torch.autocast, which refuses a GPU that is not there; None: off."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()  # or the next inner block would forget the weights that are cast already
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


class FusedAttention(TorchFunctionMode):
    """Scaled dot product attention as on a GPU, where its weights are never held: torch would ask the GPU for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Query (R, H, Q, D), key and value (R, H, S, D), mask bool or a bias that spreads to (R, H, Q, S)."""
    bias = attn_mask
    if bias is not None:
        keys = key.shape[2]
        if bias.dtype == torch.bool:
            bias = query.new_zeros(()).masked_fill(~bias, -math.inf)
        if keys % ALIGNMENT:
            bias = F.pad(bias, (0, -keys % ALIGNMENT))[..., :keys]
        bias = bias.expand(*query.shape[:3], keys)
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    result: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, trained, dropout_p, False
    )[0]
    return result
