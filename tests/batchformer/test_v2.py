"""Properties of BatchFormerV2 (spec of BatchFormerV2), in float64."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import Tensor

from detr_bf.batchformer import BatchFormerLayer, BatchFormerV2
from detr_bf.batchformer.modes import MODES
from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch
from detr_bf.transformer import Encoder, EncoderLayer, TokenAttention

IMAGES, TOKENS, DIM, LAYERS = 3, 5, 16, 3


pytestmark = pytest.mark.usefixtures("float64")


def tokens(images: int = IMAGES) -> Tensor:
    return torch.randn(images, TOKENS, DIM)


def batch_of(x: Tensor, padding_mask: Tensor | None = None) -> TokenBatch:
    mask = torch.zeros(x.shape[:2], dtype=torch.bool) if padding_mask is None else padding_mask
    return TokenBatch(x, {"padding_mask": mask, "position": torch.randn(1, TOKENS, DIM).expand(len(x), -1, -1)})


def batch_former(**changes: object) -> BatchFormerV2:
    settings = {"layers": [0], "num_encoder_layers": LAYERS, "dropout": 0.0} | changes
    return BatchFormerV2(DIM, **settings)  # type: ignore[arg-type]


def encoder(**changes: object) -> Encoder:
    layers = [EncoderLayer(TokenAttention(DIM, heads=2), dim=DIM, feedforward_dim=32) for _ in range(LAYERS)]
    return Encoder(layers, batch_former=batch_former(**changes)).train()


def test_layer_is_the_standard_one_with_the_batch_as_sequence() -> None:
    layer = BatchFormerLayer(DIM, dropout=0.0)
    x = tokens()
    mixed = layer(x)
    for position in range(TOKENS):
        alone = layer.layers[0](x[:, position : position + 1])
        torch.testing.assert_close(mixed[:, position : position + 1], alone)
    assert sum(p.numel() for p in layer.parameters()) == 6 * DIM**2 + 10 * DIM


def test_published_parameter_count() -> None:
    assert sum(p.numel() for p in BatchFormerLayer(256).parameters()) == 395_776


def test_equivariant_to_permuting_images_and_positions() -> None:
    layer, x = BatchFormerLayer(DIM, dropout=0.0), tokens()
    images, positions = torch.tensor([2, 0, 1]), torch.tensor([4, 2, 0, 1, 3])
    torch.testing.assert_close(layer(x[images]), layer(x)[images])
    torch.testing.assert_close(layer(x[:, positions]), layer(x)[:, positions])


def test_editing_a_position_changes_only_that_position() -> None:
    layer, x = BatchFormerLayer(DIM, dropout=0.0), tokens()
    edited = x.clone()
    edited[1, 2] += 1.0
    changed = (layer(edited) != layer(x)).any(-1).any(0)
    assert changed.tolist() == [False, False, True, False, False]
    assert (layer(edited) != layer(x)).any(-1)[:, 2].all(), "every image sees the edited one"


def test_identical_samples_give_what_one_gives() -> None:
    layer, x = BatchFormerLayer(DIM, dropout=0.0), tokens(1)
    torch.testing.assert_close(layer(x.expand(4, -1, -1)), layer(x).expand(4, -1, -1))


def test_clean_half_of_training_equals_evaluation() -> None:
    network, batch = encoder(layers=[0, 2]), batch_of(tokens())
    trained = network(batch)
    evaluated = network.eval()(batch)
    assert trained.num_streams == 2
    torch.testing.assert_close(trained.tokens[:IMAGES], evaluated.tokens, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(trained.tokens[IMAGES:], evaluated.tokens)


def test_evaluation_is_bit_identical_without_batch_former_and_reads_no_parameter() -> None:
    network, batch = encoder().eval(), batch_of(tokens())
    for parameter in network.batch_former.parameters():
        parameter.data.fill_(float("nan"))
    stripped = copy.deepcopy(network)
    stripped.batch_former = None
    assert torch.equal(network(batch).tokens, stripped(batch).tokens)
    assert network(batch).num_streams == 1


@pytest.mark.parametrize("stream", [0, 1])
def test_gradients_cross_images_in_the_second_stream_only(stream: int) -> None:
    x = tokens().requires_grad_()
    out = encoder()(batch_of(x)).tokens.view(2, IMAGES, TOKENS, DIM)
    (out[stream, 0] * torch.randn(TOKENS, DIM)).sum().backward()
    assert x.grad[0].abs().sum() > 0
    if stream == 0:
        assert (x.grad[1:] == 0).all(), "exactly zero"
    else:
        assert (x.grad[1:].abs().sum((1, 2)) > 0).all()


@pytest.mark.parametrize("layers", [[0], [0, 2], [0, 1, 2]])
def test_any_number_of_insertions_keeps_two_streams(layers: list[int]) -> None:
    out = encoder(layers=layers)(batch_of(tokens()))
    assert len(out.tokens) == 2 * IMAGES
    assert all(len(value) == 2 * IMAGES for value in out.per_sample.values())
    torch.testing.assert_close(out.per_sample["position"][:IMAGES], out.per_sample["position"][IMAGES:])


@pytest.mark.parametrize("mode", MODES)
def test_number_of_streams_is_what_leaves(mode: str) -> None:
    network, batch = encoder(layers=[0, 2], mode=mode), batch_of(tokens())
    for training in (True, False):
        out = network.train(training)(batch)
        assert network.batch_former.num_streams == out.num_streams == len(out.tokens) // IMAGES


def test_later_insertions_leave_the_clean_stream_alone() -> None:
    module, x = batch_former(layers=[0, 1]).train(), tokens()
    forked = module(batch_of(x), layer=0, position="before")
    again = module(forked, layer=1, position="before")
    assert torch.equal(again.tokens[:IMAGES], x)
    torch.testing.assert_close(again.tokens[IMAGES:], module.mixers["shared"](module.mixers["shared"](x)))


def test_sharing() -> None:
    def count(module: BatchFormerV2) -> int:
        return sum(p.numel() for p in module.parameters())

    assert count(batch_former(layers=[0, 1, 2])) == count(batch_former(layers=[0]))
    assert count(batch_former(layers=[0, 1, 2], shared=False)) == 3 * count(batch_former(layers=[0]))
    assert count(batch_former(num_layers=2)) == 2 * count(batch_former())


def test_unshared_insertions_use_their_own_module() -> None:
    module, x = batch_former(layers=[0, 2], shared=False).train(), tokens()
    forked = module(batch_of(x), layer=0, position="before")
    again = module(forked, layer=2, position="before")
    torch.testing.assert_close(again.tokens[IMAGES:], module.mixers["2"](module.mixers["0"](x)))


def test_position_after_differs_from_before_by_one_encoder_layer() -> None:
    network, batch = encoder(layers=[0], position="after"), batch_of(tokens())
    first = network.layers[0](batch)
    mixed = batch.with_tokens(first).fork(network.batch_former.mixers["shared"](first))
    for layer in network.layers[1:]:
        mixed = mixed.with_tokens(layer(mixed))
    torch.testing.assert_close(network(batch).tokens, mixed.tokens)


def test_single_stream_replaces_in_training_and_is_dropped_in_evaluation() -> None:
    module, x = batch_former(mode="single_stream"), tokens()
    trained = module.train()(batch_of(x), layer=0, position="before")
    assert trained.num_streams == 1
    torch.testing.assert_close(trained.tokens, module.mixers["shared"](x))
    assert torch.equal(module.eval()(batch_of(x), layer=0, position="before").tokens, x)


def test_mini_batch_inference_replaces_in_evaluation_with_the_second_stream() -> None:
    network, batch = encoder(layers=[0, 2], mode="mini_batch_inference"), batch_of(tokens())
    second = network(batch).tokens[IMAGES:]
    evaluated = network.eval()(batch)
    assert evaluated.num_streams == 1
    torch.testing.assert_close(evaluated.tokens, second, rtol=1e-12, atol=1e-12)


def test_duplicate_is_two_clean_streams_without_parameters() -> None:
    network, batch = encoder(mode="duplicate", layers=[0, 1]), batch_of(tokens())
    clean, second = network(batch).tokens.chunk(2)
    torch.testing.assert_close(clean, second, rtol=1e-12, atol=1e-12)
    assert not list(network.batch_former.parameters())


@pytest.mark.parametrize("mask_padding", [False, True])
def test_self_only_is_two_streams_with_every_image_in_a_batch_of_its_own(mask_padding: bool) -> None:
    x, mask = tokens(), torch.zeros(IMAGES, TOKENS, dtype=torch.bool)
    mask[0, 3:] = True
    alone = batch_former(mode="self_only", layers=[0, 1], mask_padding=mask_padding).train()
    paper = batch_former(mode="two_stream", layers=[0, 1], mask_padding=mask_padding).train()
    paper.load_state_dict(alone.state_dict())  # the same parameters

    def second_stream(module: BatchFormerV2, rows: slice) -> Tensor:
        batch = batch_of(x[rows], mask[rows])
        for layer in (0, 1):
            batch = module(batch, layer=layer, position="before")
        assert torch.equal(batch.tokens.chunk(2)[0], x[rows])
        return batch.tokens.chunk(2)[1]

    together = second_stream(alone, slice(None))
    one_by_one = torch.cat([second_stream(paper, slice(row, row + 1)) for row in range(IMAGES)])
    torch.testing.assert_close(together, one_by_one, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(together, second_stream(paper, slice(None)))


def test_self_only_drops_attention_as_two_stream_does() -> None:
    module = batch_former(mode="self_only", dropout=0.5).train()
    batch = batch_of(tokens())
    first, second = (module(batch, layer=0, position="before").tokens for _ in range(2))
    assert torch.equal(first[:IMAGES], second[:IMAGES])
    assert not torch.allclose(first[IMAGES:], second[IMAGES:])


def test_gradients_of_self_only_stay_in_the_image() -> None:
    x = tokens().requires_grad_()
    out = encoder(mode="self_only")(batch_of(x)).tokens.view(2, IMAGES, TOKENS, DIM)
    (out[1, 0] * torch.randn(TOKENS, DIM)).sum().backward()
    assert x.grad[0].abs().sum() > 0
    assert (x.grad[1:] == 0).all()


@pytest.mark.parametrize("mode", ["two_stream", "single_stream", "duplicate", "self_only"])
def test_until_epoch_ends_batch_attention(mode: str) -> None:
    network, batch = encoder(mode=mode, until_epoch=2), batch_of(tokens())
    plain = network.eval()(batch).tokens
    network.train()
    for epoch in (0, 1, 2, 3, 1):
        network.batch_former.begin_epoch(epoch)
        out = network(batch)
        assert network.batch_former.num_streams == out.num_streams
        torch.testing.assert_close(network.eval()(batch).tokens, plain, rtol=0, atol=0)
        network.train()
        ended = out.tokens.shape == plain.shape and torch.allclose(out.tokens, plain, rtol=1e-12, atol=1e-12)
        assert ended == (epoch >= 2)


def test_mini_batch_inference_goes_on_after_until_epoch() -> None:
    network, batch = encoder(mode="mini_batch_inference", until_epoch=1), batch_of(tokens())
    before = network.eval()(batch).tokens
    network.batch_former.begin_epoch(5)
    assert torch.equal(network(batch).tokens, before)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("images", "size", "sizes"), [(7, 3, [3, 2, 2]), (4, 2, [2, 2]), (3, 5, [3]), (4, 1, [1] * 4)])
def test_groups_equal_a_loop(images: int, size: int, sizes: list[int], masked: bool) -> None:
    module, x = batch_former(group_size=size, mask_padding=masked).train(), tokens(images)
    mask = torch.rand(images, TOKENS) < 0.3
    batch = batch_of(x, mask)
    torch.manual_seed(4)
    out = module(batch, layer=0, position="before").tokens[images:]
    torch.manual_seed(4)
    groups = torch.randperm(images).split(sizes)
    for group in groups:
        expected = module.mixers["shared"](x[group], mask[group] if masked else None)
        torch.testing.assert_close(out[group], expected)
    others = [module(batch, layer=0, position="before").tokens[images:] for _ in range(9)]
    regrouped = any(not torch.allclose(out, other) for other in others)
    assert regrouped == (len(sizes) > 1 and size > 1), "other groups at every step"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("neighbours", [1, 2, 9])
def test_neighbours_equal_a_loop(neighbours: int, masked: bool) -> None:
    module = batch_former(neighbours=neighbours, mask_padding=masked, num_layers=2).train()
    x, mask = tokens(5), torch.rand(5, TOKENS) < 0.3
    mask[:, 0] = False
    out = module(batch_of(x, mask), layer=0, position="before").tokens[5:]
    means = [x[i][~mask[i]].mean(0) for i in range(5)]
    for i in range(5):
        cosine = {j: torch.cosine_similarity(means[i], means[j], dim=0).item() for j in range(5) if j != i}
        nearest = sorted(cosine, key=lambda j: -cosine[j])[:neighbours]
        sequence = [i, *nearest]
        expected = module.mixers["shared"](x[sequence], mask[sequence] if masked else None)[0]
        torch.testing.assert_close(out[i], expected)


def test_kept_streams_are_equal_after_until_epoch() -> None:
    network, batch = encoder(until_epoch=1, keep_streams=True), batch_of(tokens())
    plain = network.eval()(batch).tokens
    network.train()
    for epoch, equal in ((0, False), (1, True)):
        network.batch_former.begin_epoch(epoch)
        out = network(batch)
        assert network.batch_former.num_streams == out.num_streams == 2
        clean, second = out.tokens.chunk(2)
        torch.testing.assert_close(clean, plain)
        assert torch.allclose(clean, second) == equal


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_size": 0}, "group_size must be 1 or more"),
        ({"neighbours": 0}, "neighbours must be 1 or more"),
        ({"group_size": 2, "gather": True}, "set gather=false"),
        ({"neighbours": 2, "mode": "self_only"}, "has no effect with mode=self_only"),
        ({"group_size": 2, "mode": "duplicate"}, "has no effect with mode=duplicate"),
        ({"group_size": 2, "neighbours": 2}, "give one of them"),
        ({"keep_streams": True}, "give until_epoch"),
        ({"keep_streams": True, "until_epoch": 2, "mode": "single_stream"}, "give until_epoch, and a mode with two"),
    ],
)
def test_settings_of_the_sequence_that_exclude_each_other(settings: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        batch_former(**settings)


def test_padding_mask_hides_padded_entries_and_passes_them_through() -> None:
    module, x = batch_former(mask_padding=True).train(), tokens()
    mask = torch.zeros(IMAGES, TOKENS, dtype=torch.bool)
    mask[0, 3:] = mask[1, 4] = mask[2, 4] = True  # position 3: images 1 and 2; position 4: no image
    out = module(batch_of(x, mask), layer=0, position="before").tokens[IMAGES:]
    assert torch.equal(out[mask], x[mask])
    torch.testing.assert_close(out[1:, 3], module.mixers["shared"](x[1:, 3:4])[:, 0])
    hidden = x.clone()
    hidden[mask] += 10.0
    seen = module(batch_of(hidden, mask), layer=0, position="before").tokens[IMAGES:]
    torch.testing.assert_close(seen[~mask], out[~mask])


def test_image_alone_at_its_position_attends_to_itself() -> None:
    module, x = batch_former(mask_padding=True).train(), tokens()
    mask = torch.ones(IMAGES, TOKENS, dtype=torch.bool)
    mask[1] = False
    out = module(batch_of(x, mask), layer=0, position="before").tokens[IMAGES:]
    torch.testing.assert_close(out[1], module.mixers["shared"](x[1:2])[0])


def test_without_mask_padding_padded_entries_take_part() -> None:
    module, x = batch_former().train(), tokens()
    mask = torch.zeros(IMAGES, TOKENS, dtype=torch.bool)
    mask[0, 3] = True
    edited = x.clone()
    edited[0, 3] += 1.0
    before, after = (module(batch_of(value, mask), layer=0, position="before").tokens[IMAGES:] for value in (x, edited))
    assert (before[1, 3] != after[1, 3]).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": []}, r"layers=\[\]: .* give one or more indices from 0 to 2"),
        ({"layers": [1, 0]}, "ascend"),
        ({"layers": [0, 0]}, "ascend"),
        ({"layers": [LAYERS]}, "from 0 to 2"),
        ({"layers": [-1]}, "from 0 to 2"),
        ({"mode": "three_stream"}, "two_stream"),
        ({"position": "inside"}, "before, after"),
        ({"heads": 5}, "divide"),
        ({"heads": 0}, "divide"),
        ({"dropout": math.nan}, "dropout=nan must be"),
        ({"dropout": 1.0}, "dropout=1.0 must be"),
        ({"num_layers": 0}, "num_layers=0 must be"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        batch_former(**changes)


@pytest.mark.parametrize(("images", "warning"), [(1, "no effect"), (2, "only 2 images"), (3, None)])
def test_says_once_what_it_does(images: int, warning: str | None, caplog: pytest.LogCaptureFixture) -> None:
    module = batch_former(layers=[0, 2]).train()
    with caplog.at_level(logging.INFO, logger="detr_bf"):
        for _ in range(2):
            batch = module(batch_of(tokens(images)), layer=0, position="before")
            module(batch, layer=2, position="before")
    said = [record for record in caplog.records if record.levelno == logging.INFO]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert all(part in said[0].getMessage() for part in ("0, 2", "two_stream", f"B = {images}"))
    assert len(warned) == (warning is not None)
    assert warning is None or warning in warned[0]
