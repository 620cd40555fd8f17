"""Multi-head attention against torch's, and deformable attention against loops, with the same weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.ops import ms_deform_attn
from detr_bf.transformer.attention import (
    DeformableAttention,
    MultiHeadAttention,
    gather_cells,
    initial_offsets,
    multi_head_attention,
    nearest_cells,
)
from tests.references.attention import packed_attention
from tests.references.deformable_attention import loops

ROWS, QUERIES, KEYS, DIM, HEADS = 3, 4, 6, 8, 2
POINTS, SHAPES, TOKENS = 3, [(4, 6), (2, 3)], 30  # of deformable attention


def attention(dropout: float = 0.0) -> MultiHeadAttention:
    torch.manual_seed(0)
    module = MultiHeadAttention(DIM, HEADS, dropout).double()
    for parameter in module.parameters():  # zero biases would hide errors
        nn.init.normal_(parameter)
    return module


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS, n, DIM, generator=generator, dtype=torch.float64) for n in (QUERIES, KEYS, KEYS))


def padding() -> Tensor:
    return torch.arange(KEYS) >= torch.tensor([KEYS, 4, 1])[:, None]


@pytest.mark.parametrize("masked", [False, True])
def test_as_torch(masked: bool) -> None:
    module, mask = attention(), padding() if masked else None
    expected, _ = packed_attention(module)(*inputs(), key_padding_mask=mask)
    torch.testing.assert_close(module(*inputs(), mask), expected)


def test_masked_keys_are_as_if_absent() -> None:
    module, (query, key, value), mask = attention(), inputs(), padding()
    out = module(query, key, value, mask)
    hidden = mask[..., None]
    assert torch.equal(module(query, key.masked_fill(hidden, 9.0), value.masked_fill(hidden, -9.0), mask), out)
    for row, visible in enumerate((~mask).sum(1).tolist()):
        alone = module(query[row, None], key[row, None, :visible], value[row, None, :visible])
        torch.testing.assert_close(out[row, None], alone)


def test_order_of_keys_does_not_matter() -> None:
    module, (query, key, value), mask = attention(), inputs(), padding()
    order = torch.randperm(KEYS, generator=torch.Generator().manual_seed(2))
    turned = module(query, key[:, order], value[:, order], mask[:, order])
    torch.testing.assert_close(turned, module(query, key, value, mask))


def test_dropout_drops_weights_in_training_only() -> None:
    module = attention(dropout=0.5)
    still = attention().eval()(*inputs())
    assert torch.equal(module.eval()(*inputs()), still)
    assert not torch.allclose(module.train()(*inputs()), still)
    query, key, value = inputs()
    dropped = multi_head_attention(query, key, torch.ones_like(value), heads=HEADS, dropout=0.5)
    assert ((dropped - 1).abs() > 1e-6).any(), "dropped weights no longer sum to one"


def test_starts_as_xavier_over_the_three_projections_as_one_matrix() -> None:
    torch.manual_seed(0)
    dim = 128
    module = MultiHeadAttention(dim, 4)
    for projection in (module.query, module.key, module.value):
        bound = (6 / (dim + 3 * dim)) ** 0.5
        assert projection.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert projection.weight.std().item() == pytest.approx((2 / (dim + 3 * dim)) ** 0.5, rel=0.02)
        assert not projection.bias.any()
    assert module.out.weight.std().item() == pytest.approx((2 / (dim + dim)) ** 0.5, rel=0.02)
    assert not module.out.bias.any()


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(InputError, match="heads=3 must divide the width 8"):
        MultiHeadAttention(8, 3)


def test_bias_is_added_to_the_logits_and_padding_still_hidden() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 6)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    bias = torch.randn(2, 2, 3, 5)
    out = multi_head_attention(query, key, value, heads=2, padding_mask=mask, bias=bias)
    for row in range(2):
        for head in range(2):
            q, k = query[row, :, 2 * head : 2 * head + 2], key[row, :, 2 * head : 2 * head + 2]
            logits = q @ k.T / 2**0.5 + bias[row, head]
            logits[:, mask[row]] = -torch.inf
            expected = logits.softmax(-1) @ value[row, :, 3 * head : 3 * head + 3]
            torch.testing.assert_close(out[row, :, 3 * head : 3 * head + 3], expected)


# ---- deformable attention ----


def deformable_attention() -> DeformableAttention:
    torch.manual_seed(0)
    attention = DeformableAttention(DIM, heads=HEADS, levels=len(SHAPES), points=POINTS).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attention


def deformable_inputs(coordinates: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query, references, tokens and padding mask."""
    torch.manual_seed(1)
    query = torch.randn(ROWS, QUERIES, DIM, dtype=torch.float64)
    reference = torch.rand(ROWS, QUERIES, len(SHAPES), coordinates, dtype=torch.float64)
    tokens = torch.randn(ROWS, TOKENS, DIM, dtype=torch.float64)
    return query, reference, tokens, torch.rand(ROWS, TOKENS) < 0.3


@pytest.mark.parametrize("coordinates", [2, 4])
def test_deformable_attention_against_loops(coordinates: int) -> None:
    attention, (query, reference, tokens, mask) = deformable_attention(), deformable_inputs(coordinates)
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


def test_deformable_attention_padded_tokens_count_for_nothing() -> None:
    attention, (query, reference, tokens, mask) = deformable_attention(), deformable_inputs(2)
    edited = tokens.masked_fill(mask[..., None], 9.0)
    assert torch.equal(
        attention(query, reference, edited, SHAPES, mask), attention(query, reference, tokens, SHAPES, mask)
    )


def test_deformable_attention_heads_start_in_all_directions() -> None:
    offsets = initial_offsets(4, 1, 3)[:, 0]
    expected = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    for point in range(3):
        torch.testing.assert_close(offsets[:, point], expected * (point + 1), atol=1e-6, rtol=0)


def test_new_deformable_attention_looks_at_fixed_places_with_equal_weights() -> None:
    attention = DeformableAttention(DIM, heads=HEADS, levels=2, points=POINTS)
    assert not attention.sampling_offsets.weight.any()
    assert not attention.attention_weights.weight.any()
    torch.testing.assert_close(attention.sampling_offsets.bias, initial_offsets(HEADS, 2, POINTS).flatten())


def test_deformable_attention_heads_must_divide_the_width() -> None:
    with pytest.raises(InputError, match="heads=3 must divide"):
        DeformableAttention(8, heads=3, levels=1, points=1)


def discrete_loops(
    value: Tensor, shapes: list[tuple[int, int]], points: Tensor, weights: Tensor, widths: list[int]
) -> Tensor:
    """Sum the values (R, S, H, D) of the cells at x * width + 0.5 and y * height + 0.5, one by one."""
    rows, queries, heads, levels, count, _ = points.shape
    found = torch.zeros(rows, queries, heads, value.shape[-1], dtype=value.dtype)
    for r, q, h, level, p in itertools.product(*map(range, (rows, queries, heads, levels, count))):
        height, width = shapes[level]
        column = min(max(int(points[r, q, h, level, p, 0] * width + 0.5), 0), widths[level] - 1)
        row = min(max(int(points[r, q, h, level, p, 1] * height + 0.5), 0), height - 1)
        start = sum(a * b for a, b in shapes[:level])
        found[r, q, h] += weights[r, q, h, level, p] * value[r, start + row * width + column, h]
    return found.flatten(2)


@pytest.mark.parametrize("released", [False, True])
def test_discrete_sampling_against_loops(released: bool) -> None:
    """Compare on maps wider and higher than a square; the released code limits columns by the height."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(4, 6), (3, 2)]
    value = torch.randn(2, 30, HEADS, 3, generator=generator, dtype=torch.float64)
    points = torch.rand(2, QUERIES, HEADS, 2, POINTS, 2, generator=generator) * 1.6 - 0.3
    weights = torch.rand(2, QUERIES, HEADS, 2, POINTS, generator=generator, dtype=torch.float64)
    found = gather_cells(value, nearest_cells(points, shapes, released=released), weights)
    widths = [min(width, height) for height, width in shapes] if released else [width for _, width in shapes]
    torch.testing.assert_close(found, discrete_loops(value, shapes, points, weights, widths))


@pytest.mark.parametrize("discrete", [False, True])
def test_levels_with_different_numbers_of_points(discrete: bool) -> None:
    """Compare with one attention per level: the softmax runs over the points of all levels together."""
    generator = torch.Generator().manual_seed(3)
    counts = [3, 1]
    module = DeformableAttention(DIM, heads=HEADS, levels=2, points=counts, discrete=discrete).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert torch.equal(module.scale, torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0], dtype=torch.float32).double())
    query = torch.randn(2, QUERIES, DIM, generator=generator, dtype=torch.float64)
    boxes = torch.rand(2, QUERIES, 1, 4, generator=generator, dtype=torch.float64).expand(-1, -1, 2, -1)
    tokens = torch.randn(2, TOKENS, DIM, generator=generator, dtype=torch.float64)
    value = module.value(tokens).unflatten(-1, (HEADS, -1))
    weights = module.attention_weights(query).unflatten(-1, (HEADS, 4)).softmax(-1)
    offsets = module.sampling_offsets(query).unflatten(-1, (HEADS, 4, 2))
    expected, first, start = torch.zeros(2, QUERIES, DIM, dtype=torch.float64), 0, 0
    for level, (count, (height, width)) in enumerate(zip(counts, SHAPES, strict=True)):
        own = slice(first, first + count)
        box = boxes[:, :, None, level, None]
        points = (box[..., :2] + offsets[:, :, :, own] / count * box[..., 2:] * 0.5)[:, :, :, None]
        part, shares = value[:, start : start + height * width], weights[:, :, :, None, own]
        if discrete:
            expected += discrete_loops(part, [(height, width)], points, shares, [width])
        else:
            expected += ms_deform_attn(part, [(height, width)], None, points, shares)
        first, start = first + count, start + height * width
    torch.testing.assert_close(module(query, boxes, tokens, SHAPES), module.out(expected))
    assert module.sampling_offsets.weight.requires_grad != discrete


@pytest.mark.parametrize("points", [[4], [4, 0], 0])
def test_points_must_fit_the_levels(points: int | list[int]) -> None:
    with pytest.raises(InputError, match="give one number of 1 or more, or one for each of the 2 levels"):
        DeformableAttention(DIM, heads=HEADS, levels=2, points=points)
