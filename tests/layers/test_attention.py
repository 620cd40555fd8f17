"""Multi-head attention against torch's own, with the same weights."""

from __future__ import annotations

import pytest
import torch

from detr_bf.errors import InputError
from detr_bf.layers import MultiHeadAttention, multi_head_attention
from tests.references.attention import packed_attention

ROWS, QUERIES, KEYS, DIM, HEADS = 3, 4, 6, 8, 2


def attention(dropout: float = 0.0) -> MultiHeadAttention:
    torch.manual_seed(0)
    module = MultiHeadAttention(DIM, HEADS, dropout).double()
    for parameter in module.parameters():  # biases start at zero and would not be seen
        torch.nn.init.normal_(parameter)
    return module


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS, n, DIM, generator=generator, dtype=torch.float64) for n in (QUERIES, KEYS, KEYS))


def padding() -> torch.Tensor:
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
    assert ((dropped - 1).abs() > 1e-6).any(), "the kept weights no longer sum to one"


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
