"""Dropout fused with the neighbouring operation of a transformer layer: one pass over memory, no stored mask.

On a CPU the probability is rounded to a multiple of 1 / 65,536, and kept elements are scaled by the inverse of the
rounded keep probability. The dropped elements depend only on the seed and their indices: they are the same for any
number of threads, and in the backward pass, which recomputes them. On a GPU this is torch's own dropout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.ops import library
from detr_bf.ops.reference import dropout_reference


def random_seed(device: torch.device) -> Tensor:
    """Draw a seed for dropout from torch's generator (set by ``torch.manual_seed``): 0-d int64 on the device."""
    return torch.randint(torch.iinfo(torch.int64).max, (), device=device)


def residual_dropout(residual: Tensor, update: Tensor, p: float, *, seed: Tensor | None = None) -> Tensor:
    """``residual + dropout(update)``.

    Args:
        residual: any shape; float64, float32, float16 or bfloat16.
        update: of the same shape.
        p: probability of dropping an element of the update.
        seed: 0-d int64 on the device of the update, chooses the elements as on a CPU; None draws one.

    Raises:
        ValueError: shapes or devices differ, p is not in [0, 1].
    """
    check_probability(p)
    if residual.shape != update.shape or residual.device != update.device:
        raise ValueError(
            f"expected two tensors of one shape and device, got residual {tuple(residual.shape)} on {residual.device} "
            f"and update {tuple(update.shape)} on {update.device}"
        )
    if p == 0:
        return residual + update
    if seed is None and update.device.type == "cuda":
        return residual + F.dropout(update, p)
    seed = random_seed(update.device) if seed is None else seed
    if update.device.type == "cuda" or not library.compiled(update.device):
        return residual + dropout_reference(update, p, seed)
    dtype = torch.promote_types(residual.dtype, update.dtype)
    return torch.ops.detr_bf.dropout_add(update.to(dtype), residual.to(dtype), p, seed)


def relu_dropout(x: Tensor, p: float, *, seed: Tensor | None = None) -> Tensor:
    """``dropout(relu(x))``; the backward pass only needs the result. See :func:`residual_dropout`."""
    check_probability(p)
    if p == 0:
        return torch.relu(x)
    if seed is None and x.device.type == "cuda":
        return F.dropout(torch.relu(x), p)
    seed = random_seed(x.device) if seed is None else seed
    if x.device.type == "cuda" or not library.compiled(x.device):
        return dropout_reference(torch.relu(x), p, seed)
    return torch.ops.detr_bf.relu_dropout(x, p, seed)


def check_probability(p: float) -> None:
    """Raise ValueError unless ``p`` is in [0, 1]."""
    if not 0 <= p <= 1:
        raise ValueError(f"a dropout probability must be in [0, 1], got {p}")


# ---- fake implementations and derivatives of the compiled operators ----


def _as_input(tensor: Tensor, *rest: Any) -> Tensor:
    library.check_one_device(tensor, *rest)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _remember_of_add(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, residual, ctx.p, seed = inputs
    ctx.adds = residual is not None
    ctx.save_for_backward(seed)


def _gradients_of_add(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    (seed,) = ctx.saved_tensors
    of_input = torch.ops.detr_bf.dropout_add(grad_output, None, ctx.p, seed)
    return of_input, grad_output if ctx.adds else None, None, None


def _remember_of_relu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.p = inputs[1]
    ctx.save_for_backward(output)


def _gradient_of_kept(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
    """Return the gradient of ``relu_dropout``, and of its own gradient, which is linear in its first argument."""
    (of_forward,) = ctx.saved_tensors  # output of the forward pass: says which elements are kept
    return torch.ops.detr_bf.relu_dropout_backward(grad_output, of_forward, ctx.p), None, None


def _remember_of_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, of_forward, ctx.p = inputs
    ctx.save_for_backward(of_forward)


if library.DECLARED:
    for _name in ("dropout_add", "relu_dropout", "relu_dropout_backward"):
        torch.library.register_fake(f"detr_bf::{_name}", _as_input)
    torch.library.register_autograd("detr_bf::dropout_add", _gradients_of_add, setup_context=_remember_of_add)
    torch.library.register_autograd("detr_bf::relu_dropout", _gradient_of_kept, setup_context=_remember_of_relu)
    torch.library.register_autograd(
        "detr_bf::relu_dropout_backward", _gradient_of_kept, setup_context=_remember_of_gradient
    )
