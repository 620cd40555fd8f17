"""The decoder layer against torch's attention and norms, and the loop over learned queries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.structures import TokenBatch
from detr_bf.transformer import Decoder, DecoderLayer
from tests.references.attention import packed_attention

ROWS, TOKENS, QUERIES, DIM, LAYERS = 2, 5, 4, 8, 3


def layer(**changes: object) -> DecoderLayer:
    module = DecoderLayer(DIM, heads=2, feedforward_dim=12, **changes).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def decoder() -> Decoder:
    torch.manual_seed(1)
    return Decoder([layer() for _ in range(LAYERS)], dim=DIM, num_queries=QUERIES).double()


def memory() -> TokenBatch:
    torch.manual_seed(0)
    tokens, position = torch.randn(2, ROWS, TOKENS, DIM, dtype=torch.float64)
    mask = torch.arange(TOKENS) >= torch.tensor([TOKENS, 3])[:, None]
    return TokenBatch(tokens, {"padding_mask": mask, "position": position})


def norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, (DIM,), module.weight, module.bias)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_layer_as_torch_attention_and_norms(pre_norm: bool) -> None:
    seen, module = memory(), layer(pre_norm=pre_norm)
    content, position = torch.randn(2, ROWS, QUERIES, DIM, dtype=torch.float64)
    among, across = packed_attention(module.self_attention), packed_attention(module.cross_attention)
    located = seen.tokens + seen.per_sample["position"]

    def look(query: Tensor) -> Tensor:
        return across(query + position, located, seen.tokens, key_padding_mask=seen.per_sample["padding_mask"])[0]

    steps = [
        (module.self_residual.norm, lambda x: among(x + position, x + position, x)[0]),
        (module.cross_residual.norm, look),
        (module.feed_forward_residual.norm, module.feed_forward),
    ]
    x = content
    for its_norm, function in steps:
        x = x + function(norm(its_norm, x)) if pre_norm else norm(its_norm, x + function(x))
    torch.testing.assert_close(module(content, position, seen), x)


def test_layers_in_turn_from_zero_content_each_behind_the_norm() -> None:
    module, seen = decoder(), memory()
    position = module.query_position.weight.repeat(ROWS, 1, 1)
    content, expected = torch.zeros(ROWS, QUERIES, DIM, dtype=torch.float64), []
    for each in module.layers:
        content = each(content, position, seen)
        expected.append(norm(module.norm, content))
    torch.testing.assert_close(module(seen), torch.stack(expected))


def test_permuting_the_queries_permutes_the_states() -> None:
    module, seen, order = decoder(), memory(), torch.tensor([2, 0, 3, 1])
    before = module(seen)
    with torch.no_grad():
        module.query_position.weight.copy_(module.query_position.weight[order].clone())
    torch.testing.assert_close(module(seen), before[:, :, order])
    assert not torch.allclose(before, before[:, :, order]), "the queries differ"


def test_padded_memory_is_not_seen() -> None:
    module, seen = decoder(), memory()
    edited = seen.tokens.masked_fill(seen.per_sample["padding_mask"][..., None], 7.0)
    assert torch.equal(module(seen.with_tokens(edited)), module(seen))


def test_rows_do_not_see_each_other() -> None:
    module, seen = decoder(), memory()
    edited = seen.tokens.clone()
    edited[0] += torch.randn(TOKENS, DIM)
    changed = module(seen.with_tokens(edited)) != module(seen)
    assert changed[:, 0].any()
    assert not changed[:, 1].any()
