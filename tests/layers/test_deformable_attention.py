"""Sampling points of deformable attention: initial, for points and for boxes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from detr_bf.errors import InputError
from detr_bf.layers import DeformableAttention
from detr_bf.layers.attention import initial_offsets
from tests.references.deformable_attention import loops

DIM, HEADS, POINTS, ROWS, QUERIES = 8, 2, 3, 2, 4
SHAPES = [(4, 6), (2, 3)]
TOKENS = 30


def module() -> DeformableAttention:
    torch.manual_seed(0)
    attention = DeformableAttention(DIM, heads=HEADS, levels=len(SHAPES), points=POINTS).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attention


def inputs(coordinates: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, references, tokens, padding mask."""
    torch.manual_seed(1)
    query = torch.randn(ROWS, QUERIES, DIM, dtype=torch.float64)
    reference = torch.rand(ROWS, QUERIES, len(SHAPES), coordinates, dtype=torch.float64)
    tokens = torch.randn(ROWS, TOKENS, DIM, dtype=torch.float64)
    return query, reference, tokens, torch.rand(ROWS, TOKENS) < 0.3


@pytest.mark.parametrize("coordinates", [2, 4])
def test_against_loops(coordinates: int) -> None:
    attention, (query, reference, tokens, mask) = module(), inputs(coordinates)
    value = (tokens @ attention.value.weight.T + attention.value.bias).masked_fill(mask[..., None], 0)
    weights = (query @ attention.attention_weights.weight.T + attention.attention_weights.bias).view(
        ROWS, QUERIES, HEADS, -1
    )
    weights = weights.softmax(-1).view(ROWS, QUERIES, HEADS, len(SHAPES), POINTS)
    offsets = query @ attention.sampling_offsets.weight.T + attention.sampling_offsets.bias
    offsets = offsets.view(ROWS, QUERIES, HEADS, len(SHAPES), POINTS, 2)
    locations = torch.empty_like(offsets)
    for level, (height, width) in enumerate(SHAPES):
        for point in range(POINTS):
            step = torch.tensor([1 / width, 1 / height], dtype=torch.float64)
            if coordinates == 4:
                step = reference[:, :, level, 2:].unsqueeze(2) / 2 / POINTS
            moved = reference[:, :, level, :2].unsqueeze(2) + offsets[:, :, :, level, point] * step
            locations[:, :, :, level, point] = moved
    found = loops(value.view(ROWS, TOKENS, HEADS, -1), SHAPES, locations, weights)
    expected = found @ attention.out.weight.T + attention.out.bias
    torch.testing.assert_close(attention(query, reference, tokens, SHAPES, mask), expected)


def test_padded_tokens_count_for_nothing() -> None:
    attention, (query, reference, tokens, mask) = module(), inputs(2)
    edited = tokens.masked_fill(mask[..., None], 9.0)
    assert torch.equal(
        attention(query, reference, edited, SHAPES, mask), attention(query, reference, tokens, SHAPES, mask)
    )


def test_heads_start_in_all_directions() -> None:
    offsets = initial_offsets(4, 1, 3)[:, 0]
    expected = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    for point in range(3):
        torch.testing.assert_close(offsets[:, point], expected * (point + 1), atol=1e-6, rtol=0)


def test_a_new_module_looks_at_fixed_places_with_equal_weights() -> None:
    attention = DeformableAttention(DIM, heads=HEADS, levels=2, points=POINTS)
    assert not attention.sampling_offsets.weight.any()
    assert not attention.attention_weights.weight.any()
    torch.testing.assert_close(attention.sampling_offsets.bias, initial_offsets(HEADS, 2, POINTS).flatten())


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(InputError, match="heads=3 must divide"):
        DeformableAttention(8, heads=3, levels=1, points=1)
