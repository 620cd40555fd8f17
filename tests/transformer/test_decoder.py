"""Decoder layer compared with torch's attention and norms; loop with heads, references and refinement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.common.boxes import relative_boxes
from detr_bf.common.structures import Queries, QueryGroup, Target, TokenBatch
from detr_bf.transformer import (
    Decoder,
    DecoderLayer,
    Heads,
    LearnedQueries,
    MemoryAttention,
    QueryAttention,
    append_queries,
)
from tests.references.attention import packed_attention

ROWS, TOKENS, QUERIES, DIM, LAYERS, LOGITS = 2, 5, 4, 8, 3, 6


def layer(**changes: object) -> DecoderLayer:
    attention = (QueryAttention(DIM, heads=2), MemoryAttention(DIM, heads=2))
    module = DecoderLayer(*attention, dim=DIM, feedforward_dim=12, **changes).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def decoder(*, reference: bool = False, heads: int = 1, **changes: object) -> Decoder:
    torch.manual_seed(1)
    return Decoder(
        [layer() for _ in range(LAYERS)],
        queries=LearnedQueries(QUERIES, DIM, reference=nn.Linear(DIM, 2) if reference else None),
        heads=Heads([nn.Linear(DIM, LOGITS) for _ in range(heads)], [nn.Linear(DIM, 4) for _ in range(heads)]),
        norm=nn.LayerNorm(DIM),
        **changes,
    ).double()


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
    among, across = (
        packed_attention(module.self_attention.attention),
        packed_attention(module.cross_attention.attention),
    )
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
    torch.testing.assert_close(module(Queries(content, position), seen), x)


def contents(module: Decoder, seen: TokenBatch) -> list[Tensor]:
    """Return the input of the heads for every layer, starting from zero content."""
    position = module.queries.position.weight.repeat(ROWS, 1, 1)
    content, states = torch.zeros(ROWS, QUERIES, DIM, dtype=torch.float64), []
    for each in module.layers:
        content = each(Queries(content, position), seen)
        states.append(norm(module.norm, content))
    return states


def test_layers_in_turn_each_read_by_the_heads_behind_the_norm() -> None:
    module, seen = decoder(), memory()
    outputs, states = module(seen), torch.stack(contents(module, seen))
    classes, boxes = module.heads.classes[0], module.heads.boxes[0]
    torch.testing.assert_close(outputs.logits, states @ classes.weight.T + classes.bias)
    torch.testing.assert_close(outputs.boxes, 1 / (1 + (-states @ boxes.weight.T - boxes.bias).exp()))


def test_without_auxiliary_losses_the_last_layer_is_left() -> None:
    seen = memory()
    every, last = decoder()(seen), decoder(aux_loss=False)(seen)
    assert torch.equal(last.logits, every.logits[-1:])
    assert torch.equal(last.boxes, every.boxes[-1:])


def test_boxes_are_counted_from_the_reference_point() -> None:
    module, seen = decoder(reference=True), memory()
    position, head = module.queries.position.weight, module.heads.boxes[0]
    point = position @ module.queries.reference.weight.T + module.queries.reference.bias
    logits = torch.stack(contents(module, seen)) @ head.weight.T + head.bias
    logits[..., :2] += point
    torch.testing.assert_close(module(seen).boxes, logits.sigmoid())


def test_refinement_counts_from_the_boxes_of_the_layer_before() -> None:
    module, seen = decoder(reference=True, heads=LAYERS, refine=True), memory()
    boxes = module(seen).boxes
    for index, state in enumerate(contents(module, seen)[1:], start=1):
        head = module.heads.boxes[index]
        before = (boxes[index - 1] / (1 - boxes[index - 1])).log()
        torch.testing.assert_close(boxes[index], (state @ head.weight.T + head.bias + before).sigmoid())


def test_no_gradient_runs_from_a_refined_box_to_the_head_before() -> None:
    module, seen = decoder(reference=True, heads=LAYERS, refine=True), memory()
    module(seen).boxes[-1].sum().backward()
    assert module.heads.boxes[-1].weight.grad.any()
    assert not any(head.weight.grad.any() for head in module.heads.boxes[:-1])


def test_look_is_asked_before_every_layer() -> None:
    asked = []

    def look(index: int, queries: Queries, memory: TokenBatch) -> Queries:
        asked.append((index, queries.content.abs().sum().item() > 0))
        return queries

    decoder(update_queries=look)(memory())
    assert asked == [(0, False), (1, True), (2, True)]


def test_learned_content() -> None:
    queries = LearnedQueries(QUERIES, DIM, learned_content=True)
    made = queries(memory())
    assert torch.equal(made.content, queries.content.weight.expand(ROWS, -1, -1))
    assert made.reference is None


def test_permuting_the_queries_permutes_the_outputs() -> None:
    module, seen, order = decoder(), memory(), torch.tensor([2, 0, 3, 1])
    before = module(seen).logits
    with torch.no_grad():
        module.queries.position.weight.copy_(module.queries.position.weight[order].clone())
    torch.testing.assert_close(module(seen).logits, before[:, :, order])
    assert not torch.allclose(before, before[:, :, order]), "the queries differ"


def test_padded_memory_is_not_seen() -> None:
    module, seen = decoder(), memory()
    edited = seen.tokens.masked_fill(seen.per_sample["padding_mask"][..., None], 7.0)
    assert torch.equal(module(seen.with_tokens(edited)).logits, module(seen).logits)


def test_rows_do_not_see_each_other() -> None:
    module, seen = decoder(), memory()
    edited = seen.tokens.clone()
    edited[0] += torch.randn(TOKENS, DIM)
    changed = module(seen.with_tokens(edited)).logits != module(seen).logits
    assert changed[:, 0].any()
    assert not changed[:, 1].any()


def test_appended_queries_are_not_seen_and_see_what_they_may() -> None:
    torch.manual_seed(3)
    main = Queries(torch.randn(ROWS, 3, DIM), torch.randn(ROWS, 3, DIM))
    noised = append_queries(main, torch.randn(ROWS, 4, DIM), QueryGroup("dn", 4, parts=2), sees_main=True)
    both = append_queries(noised, torch.randn(ROWS, 2, DIM), QueryGroup("many", 2))
    sees = {
        **{query: {0, 1, 2} for query in (0, 1, 2)},
        **{query: {0, 1, 2, 3, 4} for query in (3, 4)},
        **{query: {0, 1, 2, 5, 6} for query in (5, 6)},
        **{query: {7, 8} for query in (7, 8)},
    }
    assert both.blocked is not None
    assert {row: set((~both.blocked[row]).nonzero().flatten().tolist()) for row in range(9)} == sees
    assert torch.equal(both.position[:, 3:], torch.zeros(ROWS, 6, DIM))
    module = QueryAttention(DIM, heads=2)
    attended = module(both.content, both)
    for row, keys in sees.items():  # as torch's attention of this query to the keys that it sees alone
        x, index = both.content + both.position, sorted(keys)
        alone, _ = packed_attention(module.attention)(x[:, row : row + 1], x[:, index], both.content[:, index])
        torch.testing.assert_close(attended[:, row : row + 1], alone)


def test_groups_without_queries_change_nothing_and_get_gradients() -> None:
    module, seen = decoder(reference=True), memory()
    plain = module(seen)
    source = nn.Embedding(1, DIM).double()

    class Extended(nn.Module):
        def forward(self, memory: TokenBatch, targets: Sequence[Target] = ()) -> Queries:
            empty = source(torch.zeros(ROWS, 0, dtype=torch.int64))
            return append_queries(
                learned(memory), empty, QueryGroup("dn", 0), reference=empty.new_zeros(ROWS, 0, 2), sees_main=True
            )

    learned, module.queries = module.queries, Extended()
    outputs = module(seen)
    ((group, predicted),) = outputs.groups
    assert (group.name, predicted.logits.shape) == ("dn", (LAYERS, ROWS, 0, LOGITS))
    assert torch.equal(outputs.logits, plain.logits)
    assert torch.equal(outputs.boxes, plain.boxes)
    (outputs.logits.sum() + predicted.logits.sum() + predicted.boxes.sum()).backward()
    assert source.weight.grad is not None
    assert not source.weight.grad.any()


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("before_norm", [False, True])
def test_refinement_step_by_step(twice: bool, before_norm: bool) -> None:
    module, seen = decoder(reference=True, heads=LAYERS, refine=True), memory()
    module.refine_before_norm, module.look_forward_twice, module.heads.eps = before_norm, twice, 1e-3
    outputs = module(seen)
    queries = module.queries(seen)
    base, losses = queries.reference, []
    for index, each in enumerate(module.layers):
        reference = queries.reference if index == 0 else queries.reference.detach()
        content = each(replace(queries, reference=reference), seen)
        state, head = module.norm(content), module.heads.boxes[index]
        boxes = relative_boxes(head(state), base if twice or index == 0 else base.detach(), 1e-3)
        torch.testing.assert_close(outputs.boxes[index], boxes)
        losses.append(boxes.square().sum())
        refined = relative_boxes(head(content if before_norm else state), reference, 1e-3)
        base, queries = refined, replace(queries, content=content, reference=refined)
    parameters = list(module.parameters())
    expected = torch.autograd.grad(torch.stack(losses).sum(), parameters, allow_unused=True)
    found = torch.autograd.grad(outputs.boxes.square().sum(), parameters, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)
