"""Batch attention: the images of a batch attend to each other, one position and head at a time.

Shape legend: B images, N positions, H heads, D channels of a head. The sequences have
length B (typically 2 to 64); there are N x H of them (tens of thousands).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from detr_bf.ops import library
from detr_bf.ops.dropout import check_probability, random_seed
from detr_bf.ops.reference import batch_attention_reference


def batch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    seed: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention over the first dimension.

    Sums are float32, or float64 for float64 inputs. Only the arguments are saved for the backward pass.

    Args:
        query: (B, N, H, D); float64, float32, float16 or bfloat16. Not copied if the channels are contiguous.
        key: like query.
        value: like query.
        key_mask: (B, N) bool, True = ignored as a key. If every key is ignored, result and gradients are zero.
        dropout_p: probability of dropping an attention weight; rounded and scaled as in
            :mod:`detr_bf.ops.dropout`.
        seed: seed of dropout, 0-d int64 on the device of query; None draws one from torch's generator.

    Returns:
        (B, N, H, D), contiguous.

    Raises:
        ValueError: inconsistent shapes, devices or dtypes, or dropout_p not in [0, 1].
    """
    _check(query, key, value, key_mask)
    seed = _seed(query, dropout_p, seed)
    if not library.compiled(query.device):
        return batch_attention_reference(query, key, value, key_mask, dropout_p, seed)
    return torch.ops.detr_bf.batch_attention(query, key, value, key_mask, dropout_p, seed)


def batch_attention_packed(
    packed: Tensor, key_mask: Tensor | None = None, dropout_p: float = 0.0, *, seed: Tensor | None = None
) -> Tensor:
    """:func:`batch_attention` with query, key and value in one tensor (B, N, 3, H, D), the output of one projection.

    The gradient is one such tensor too, without concatenating the gradients of three views.
    """
    query, key, value = _unpacked(packed)
    _check(query, key, value, key_mask)
    seed = _seed(packed, dropout_p, seed)
    if not library.compiled(packed.device):
        return batch_attention_reference(query, key, value, key_mask, dropout_p, seed)
    return torch.ops.detr_bf.batch_attention_packed(packed, key_mask, dropout_p, seed)


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if packed.dim() != 5 or packed.shape[2] != 3:
        raise ValueError(f"expected packed query, key and value (B, N, 3, H, D), got {tuple(packed.shape)}")
    query, key, value = packed.unbind(2)
    return query, key, value


def _seed(query: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor | None:
    check_probability(dropout_p)
    if dropout_p == 0:
        return None
    return random_seed(query.device) if seed is None else seed


def _check(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> None:
    tensors = {"query": query, "key": key, "value": value}
    if query.dim() != 4 or not query.shape == key.shape == value.shape:
        raise ValueError(
            f"expected query, key and value (B, N, H, D) of one shape, got {library.describe(tensors, 'shape')}"
        )
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(f"expected one floating-point dtype, got {library.describe(tensors, 'dtype')}")
    if key_mask is not None:
        tensors["key_mask"] = key_mask
        if key_mask.shape != query.shape[:2] or key_mask.dtype != torch.bool:
            raise ValueError(
                f"expected key_mask {tuple(query.shape[:2])} (B, N) bool, got {tuple(key_mask.shape)} {key_mask.dtype}"
            )
    if any(tensor.device != query.device for tensor in tensors.values()):
        raise ValueError(f"expected tensors on one device, got {library.describe(tensors, 'device')}")


# ---- fake implementations and derivatives of the compiled operators ----


def _shape_of_result(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, *rest: Any) -> Tensor:
    library.check_one_device(query, *rest)
    _check(query, key, value, key_mask)
    return query.new_empty(query.shape)


def _shape_of_packed_result(packed: Tensor, key_mask: Tensor | None, *rest: Any) -> Tensor:
    library.check_one_device(packed, *rest)
    _check(*_unpacked(packed), key_mask)
    return packed.new_empty(packed.shape[0], packed.shape[1], packed.shape[3], packed.shape[4])


def _shape_of_gradient(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, *rest: Any
) -> Tensor:
    library.check_one_device(grad_output, query, *rest)
    _check(query, key, value, key_mask)
    if grad_output.shape != query.shape:
        raise ValueError(f"expected grad_output {tuple(query.shape)}, got {tuple(grad_output.shape)}")
    return query.new_empty(query.shape[0], query.shape[1], 3, query.shape[2], query.shape[3])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.dropout_p, seed = inputs
    ctx.save_for_backward(*tensors, seed)


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, key_mask, seed = ctx.saved_tensors
    packed = torch.ops.detr_bf.batch_attention_backward(grad_output, query, key, value, key_mask, ctx.dropout_p, seed)
    return (*packed.unbind(2), None, None, None)


def _packed_gradient(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    packed, key_mask, seed = ctx.saved_tensors
    gradient = torch.ops.detr_bf.batch_attention_backward(grad_output, *packed.unbind(2), key_mask, ctx.dropout_p, seed)
    return gradient, None, None, None


if library.DECLARED:
    torch.library.register_fake("detr_bf::batch_attention", _shape_of_result)
    torch.library.register_fake("detr_bf::batch_attention_packed", _shape_of_packed_result)
    torch.library.register_fake("detr_bf::batch_attention_backward", _shape_of_gradient)
    torch.library.register_autograd("detr_bf::batch_attention", _gradients, setup_context=_remember)
    torch.library.register_autograd("detr_bf::batch_attention_packed", _packed_gradient, setup_context=_remember)
