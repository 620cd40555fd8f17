"""Batch attention and its random numbers computed with loops, from their definitions."""

from __future__ import annotations

import torch
from torch import Tensor


def batch_attention_loops(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None, kept: Tensor | None = None
) -> Tensor:
    """Compute batch attention (B, N, H, D); ``kept`` (key, N, H, query) multiplies the attention weights."""
    images, positions, heads, width = query.shape
    rows = []
    for image in range(images):
        for n in range(positions):
            keys = [j for j in range(images) if key_mask is None or not key_mask[j, n]]
            for h in range(heads):
                total = torch.zeros(width, dtype=query.dtype)
                products = [query[image, n, h] @ key[j, n, h] / width**0.5 for j in keys]
                most = max(products, default=torch.tensor(0.0))
                parts = [torch.exp(product - most) for product in products]
                for j, part in zip(keys, parts, strict=True):
                    factor = 1 if kept is None else kept[j, n, h, image]
                    total = total + part / sum(parts) * factor * value[j, n, h]
                rows.append(total)
    return torch.stack(rows).view(query.shape)


def philox_numbers(seed: int, count: int) -> list[int]:
    """Return 16 bits for each element, from a call of Philox4x32-10 with the seed as key.

    The counter is 16 x (element // 128) + element % 16; of the call's eight numbers it is that at element % 128 // 16.
    """
    numbers = []
    for element in range(count):
        words = _philox([16 * (element // 128) + element % 16, 0, 0, 0], [seed % 2**32, seed >> 32])
        slot = element % 128 // 16
        numbers.append(words[slot // 2] >> 16 * (slot % 2) & 0xFFFF)
    return numbers


def _philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second % 2**32,
            (first >> 32) ^ counter[3] ^ key[1],
            first % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter
