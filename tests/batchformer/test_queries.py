"""Properties of batch attention between queries, in float64."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from detr_bf.batchformer import QueryBatchFormer
from detr_bf.batchformer.inspection import attention_between_images, batch_former_of
from detr_bf.batchformer.modes import EVALUATED_MODES, MODES
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Outputs, Queries, QueryGroup, TokenBatch

IMAGES, MAIN, NOISED, DIM, TOKENS, LAYERS = 3, 4, 2, 16, 5, 3


pytestmark = pytest.mark.usefixtures("float64")


def former(**changes: object) -> QueryBatchFormer:
    settings = {"layers": [1], "num_decoder_layers": LAYERS, "dropout": 0.0, "num_layers": 2} | changes
    return QueryBatchFormer(DIM, **settings).train()  # type: ignore[arg-type]


def queries() -> Queries:
    """Main queries of all images, and behind them those of a group."""
    content, position = torch.randn(2, IMAGES, MAIN + NOISED, DIM).unbind(0)
    return Queries(content, position, torch.rand(IMAGES, MAIN + NOISED, 4))


def memory() -> TokenBatch:
    return TokenBatch(torch.randn(IMAGES, TOKENS, DIM), {"padding_mask": torch.rand(IMAGES, TOKENS) < 0.3})


def second_stream(module: QueryBatchFormer, given: Queries) -> Tensor:
    return module(given, memory(), layer=1, main=MAIN)[0].content[-IMAGES:]


def test_the_main_queries_of_all_images_are_one_sequence() -> None:
    module, given = former(), queries()
    forked, tokens = module(given, source := memory(), layer=1, main=MAIN)
    assert tokens.num_streams == module.num_streams == 2
    clean, second = forked.content.chunk(2)
    assert torch.equal(clean, given.content)
    sequence = given.content[:, :MAIN].reshape(-1, 1, DIM)  # the standard layers, whose first dimension is the sequence
    for layer in module.mixers["shared"].layers:
        sequence = torch.nn.TransformerEncoderLayer.forward(layer.eval(), sequence)
    torch.testing.assert_close(second[:, :MAIN], sequence.view(IMAGES, MAIN, DIM))
    assert torch.equal(second[:, MAIN:], given.content[:, MAIN:])
    for one, both in ((given.position, forked.position), (given.reference, forked.reference)):
        assert torch.equal(both, torch.cat([one, one]))
    assert torch.equal(tokens.tokens, source.tokens.repeat(2, 1, 1))
    assert torch.equal(tokens.per_sample["padding_mask"], source.per_sample["padding_mask"].repeat(2, 1))


def test_self_only_is_the_same_module_on_each_image_alone() -> None:
    together, given = former(mode="self_only"), queries()
    alone = former()
    alone.load_state_dict(together.state_dict())
    found = second_stream(together, given)
    for image in range(IMAGES):
        one = Queries(given.content[image, None], given.position[image, None])
        tokens = TokenBatch(torch.randn(1, TOKENS, DIM))
        expected = alone(one, tokens, layer=1, main=MAIN)[0].content[1]
        torch.testing.assert_close(found[image], expected)
    assert not torch.allclose(found, second_stream(alone, given))


def test_groups_equal_a_loop() -> None:
    module, given, tokens = former(group_size=2), queries(), memory()
    torch.manual_seed(4)
    found = module(given, tokens, layer=1, main=MAIN)[0].content[IMAGES:]
    torch.manual_seed(4)
    for group in torch.randperm(IMAGES).split([2, 1]):
        expected = module.mixers["shared"](given.content[group, :MAIN].reshape(-1, 1, DIM))
        torch.testing.assert_close(found[group, :MAIN].reshape(-1, 1, DIM), expected)


@pytest.mark.parametrize("mode", MODES)
def test_streams_and_replacement_of_every_mode(mode: str) -> None:
    module, given, tokens = former(mode=mode), queries(), memory()
    trained, rows = module(given, tokens, layer=1, main=MAIN)
    assert rows.num_streams == module.num_streams == (1 if mode.startswith("single_stream") else 2)
    assert len(trained.content) == len(rows.tokens) == rows.num_streams * IMAGES
    assert torch.equal(trained.content[-IMAGES:], given.content) == (mode == "duplicate")
    assert len(module.mixers) == (mode != "duplicate")
    evaluated, rows = module.eval()(given, tokens, layer=1, main=MAIN)
    assert rows is tokens
    assert module.mixes_evaluated_images == (mode in EVALUATED_MODES) == (evaluated is not given)
    if mode in EVALUATED_MODES:
        torch.testing.assert_close(evaluated.content, trained.content[-IMAGES:])


def test_later_insertions_mix_the_second_stream_alone_with_their_own_module() -> None:
    module, given = former(layers=[1, 2], shared=False), queries()
    forked, tokens = module(given, memory(), layer=1, main=MAIN)
    again, rows = module(forked, tokens, layer=2, main=MAIN)
    assert rows is tokens
    assert again.content.shape == forked.content.shape
    assert torch.equal(again.content[:IMAGES], given.content)
    expected = module.mixers["2"](forked.content[IMAGES:, :MAIN].reshape(-1, 1, DIM)).view(IMAGES, MAIN, DIM)
    torch.testing.assert_close(again.content[IMAGES:, :MAIN], expected)
    assert module(given, tokens, layer=0, main=MAIN) == (given, tokens), "no insertion"


@pytest.mark.parametrize("keep", [False, True])
def test_until_epoch_ends_it_with_one_stream_or_two_equal_ones(keep: bool) -> None:
    module, given = former(until_epoch=1, keep_streams=keep), queries()
    for epoch, ended in ((0, False), (1, True), (0, False)):
        module.begin_epoch(epoch)
        found, rows = module(given, memory(), layer=1, main=MAIN)
        assert rows.num_streams == module.num_streams == (1 if ended and not keep else 2)
        assert torch.equal(found.content[-IMAGES:], given.content) == ended


def test_a_fork_repeats_groups_and_proposals() -> None:
    assigned = torch.tensor([[0, -1], [1, 0], [-1, -1]])
    proposals = Outputs(torch.randn(1, IMAGES, 5, 2), torch.rand(1, IMAGES, 5, 4), one_class=True)
    groups = (QueryGroup("dn", 2, assigned), QueryGroup("more", 0))
    forked = replace(queries(), proposals=proposals, groups=groups).fork(torch.randn(IMAGES, MAIN + NOISED, DIM))
    assert torch.equal(forked.groups[0].assigned, assigned.repeat(2, 1))
    assert (forked.groups[1], forked.modulation) == (groups[1], None)
    assert torch.equal(forked.proposals.boxes, proposals.boxes.repeat(1, 2, 1, 1))
    assert (forked.proposals.num_streams, forked.proposals.one_class) == (2, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [3]}, r"layers=\[3\]: the decoder has 3 layers"),
        ({"layers": []}, r"layers=\[\]"),
        ({"layers": [1, 1]}, "must ascend"),
        ({"mode": "none"}, "mode must be one of"),
        ({"mixer": "none"}, "mixer must be one of"),
        ({"heads": 3}, "heads=3 must divide"),
        ({"group_size": 2, "mode": "self_only"}, "has no effect with mode=self_only"),
        ({"keep_streams": True}, "give until_epoch"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        former(**changes)


def test_says_once_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    module = former()
    for _ in range(2):
        module(queries(), memory(), layer=1, main=MAIN)
    assert len(caplog.messages) == 1
    assert "before decoder layer 1 " in caplog.text
    assert "3 x 4 queries" in caplog.text


def test_pictures_of_positions_are_refused() -> None:
    module = former()
    assert attention_between_images(module) is module
    with pytest.raises(InputError, match=r"batch_former\.at=queries"):
        batch_former_of(module)
    with pytest.raises(InputError, match="no image attends to another"):
        attention_between_images(copy.deepcopy(former(mode="self_only")))
