"""Reference implementations of the operators in plain PyTorch, for any device and precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = Sequence[tuple[int, int]]


def ms_deform_attn_reference(
    value: Tensor,
    spatial_shapes: Shapes,
    level_start_index: Sequence[int],
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Reference of :func:`detr_bf.ops.ms_deform_attn` without its checks and casts; one ``grid_sample`` per level.

    Computed in the precision of the locations, since half precision would shift them by whole cells.
    """
    rows, _, heads, channels = value.shape
    queries, levels, points = attention_weights.shape[1], attention_weights.shape[3], attention_weights.shape[4]
    maps = value.to(sampling_locations.dtype).transpose(1, 2).flatten(0, 1).mT  # (B H, D, S)
    grids = (2 * sampling_locations - 1).transpose(1, 2).flatten(0, 1)  # (B H, Q, L, P, 2) in [-1, 1]
    sampled = [
        F.grid_sample(
            maps[..., start : start + height * width].unflatten(-1, (height, width)),
            grids[:, :, level],
            align_corners=False,
        )
        for level, ((height, width), start) in enumerate(zip(spatial_shapes, level_start_index, strict=True))
    ]  # each (B H, D, Q, P)
    weights = attention_weights.transpose(1, 2).reshape(rows * heads, 1, queries, levels * points)
    summed = (torch.stack(sampled, dim=-2).flatten(-2) * weights).sum(-1)  # (B H, D, Q)
    return summed.view(rows, heads * channels, queries).transpose(1, 2).to(value.dtype)


def batch_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """Reference of :func:`detr_bf.ops.batch_attention` without its checks."""
    sums = torch.promote_types(query.dtype, torch.float32)
    products = torch.einsum("inhd,jnhd->jnhi", query.to(sums), key.to(sums)) / query.shape[3] ** 0.5
    if key_mask is not None:  # a softmax over -inf only would be NaN, hence `~ignored.all(0)`
        ignored = key_mask[:, :, None, None]
        products = products.masked_fill(ignored & ~ignored.all(0), -torch.inf)
    shares = products.softmax(0)
    if key_mask is not None:
        shares = shares.masked_fill(ignored, 0)
    if seed is not None:
        shares = dropout_reference(shares, dropout_p, seed)
    return torch.einsum("jnhi,jnhd->inhd", shares, value.to(sums)).to(query.dtype).contiguous()


def dropout_reference(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Dropout with the random numbers of the kernels, chosen by the row-major index of each element of ``x``."""
    dropped = int(p * 65536 + 0.5)
    kept = (random_numbers(x.numel(), seed) >= dropped).view(x.shape)
    return torch.where(kept, x * (65536 / (65536 - dropped) if dropped < 65536 else 0.0), 0.0)


def random_numbers(count: int, seed: Tensor) -> Tensor:
    """Return 16 bits per element: Philox4x32-10 (Salmon et al. 2011), ordered as in csrc/random.h."""
    blocks = (count + 127) // 128
    call = torch.arange(16 * blocks, device=seed.device)
    a, b, c, d = call & 0xFFFFFFFF, call >> 32, torch.zeros_like(call), torch.zeros_like(call)
    key, other_key = seed & 0xFFFFFFFF, _upper(seed)
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57  # 64-bit products; the highest bit is the sign
        a, b = _upper(second) ^ b ^ key, second & 0xFFFFFFFF
        c, d = _upper(first) ^ d ^ other_key, first & 0xFFFFFFFF
        key, other_key = (key + 0x9E3779B9) & 0xFFFFFFFF, (other_key + 0xBB67AE85) & 0xFFFFFFFF
    halves = torch.stack([half for word in (a, b, c, d) for half in (word & 0xFFFF, word >> 16)])  # (8, blocks x 16)
    return halves.view(8, blocks, 16).transpose(0, 1).reshape(-1)[:count]


def _upper(product: Tensor) -> Tensor:
    return (product >> 32) & 0xFFFFFFFF
