"""Batch attention between an image and its reference, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from detr_bf.batchformer import BatchFormerV2
from detr_bf.batchformer.inspection import recorded, statistics, stream_distance
from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch
from detr_bf.transformer import Encoder, EncoderLayer, TokenAttention

IMAGES, TOKENS, DIM, LAYERS = 3, 5, 16, 3
EVALUATED = ("mini_batch_inference", "single_stream_inference")


pytestmark = pytest.mark.usefixtures("float64")


def pairs(has_reference: Tensor | None = None, padding_mask: Tensor | None = None) -> TokenBatch:
    tokens = torch.randn(2 * IMAGES, TOKENS, DIM)
    mask = torch.zeros(tokens.shape[:2], dtype=torch.bool) if padding_mask is None else padding_mask.repeat(2, 1)
    per_sample = {"padding_mask": mask, "position": torch.randn(1, TOKENS, DIM).expand(2 * IMAGES, -1, -1)}
    return TokenBatch(tokens, per_sample).with_references(has_reference)


def batch_former(**changes: object) -> BatchFormerV2:
    settings = {"layers": [0], "num_encoder_layers": LAYERS, "dropout": 0.0, "references": True} | changes
    return BatchFormerV2(DIM, **settings).train()  # type: ignore[arg-type]


def encoder(**changes: object) -> Encoder:
    layers = [EncoderLayer(TokenAttention(DIM, heads=2), dim=DIM, feedforward_dim=32) for _ in range(LAYERS)]
    return Encoder(layers, batch_former=batch_former(**changes)).train()


@pytest.mark.parametrize("mode", ["two_stream", "single_stream", *EVALUATED])
def test_each_image_is_mixed_with_its_reference_alone(mode: str) -> None:
    former, batch = batch_former(mode=mode), pairs()
    output = former(batch, layer=0, position="before")
    expected = []
    for image in range(IMAGES):
        pair = batch.tokens[[image, IMAGES + image]]  # the whole batch of a module without references
        expected.append(former.mixers["shared"](pair, None, None)[0])
    torch.testing.assert_close(output.tokens[-IMAGES:], torch.stack(expected))
    assert output.references == 0
    assert output.num_streams == former.num_streams
    assert len(output.tokens) == IMAGES * former.num_streams
    assert {len(value) for value in output.per_sample.values()} == {len(output.tokens)}
    if former.num_streams == 2:
        assert torch.equal(output.tokens[:IMAGES], batch.tokens[:IMAGES])


def test_an_image_without_a_reference_attends_to_itself() -> None:
    former, batch = batch_former(mode="single_stream"), pairs(torch.tensor([True, False, True]))
    output = former(batch, layer=0, position="before")
    alone = former.mixers["shared"](batch.tokens[1:2], None, None)[0]
    torch.testing.assert_close(output.tokens[1], alone)
    paired = former.mixers["shared"](batch.tokens[[2, 5]], None, None)[0]
    torch.testing.assert_close(output.tokens[2], paired)
    assert "missing" not in output.per_sample


def test_padded_positions_are_not_attended_to_and_stay() -> None:
    mask = torch.zeros(IMAGES, TOKENS, dtype=torch.bool)
    mask[1, 3:] = True
    former, batch = batch_former(mode="single_stream", mask_padding=True), pairs(padding_mask=mask)
    output = former(batch, layer=0, position="before")
    assert torch.equal(output.tokens[1, 3:], batch.tokens[1, 3:])
    paired = former.mixers["shared"](batch.tokens[[1, 4]], None, None)[0]
    torch.testing.assert_close(output.tokens[1, :3], paired[:3])


def test_references_go_on_to_the_last_insertion_and_then_leave() -> None:
    former, batch = batch_former(layers=[0, 2], shared=False), pairs()
    first = former(batch, layer=0, position="before")
    assert (first.references, first.num_streams, len(first.tokens)) == (IMAGES, 2, 3 * IMAGES)
    mixed = [former.mixers["0"](batch.tokens[[image, IMAGES + image]], None, None) for image in range(IMAGES)]
    torch.testing.assert_close(first.tokens[IMAGES : 2 * IMAGES], torch.stack([pair[0] for pair in mixed]))
    torch.testing.assert_close(first.tokens[2 * IMAGES :], torch.stack([pair[1] for pair in mixed]))
    second = former(first, layer=2, position="before")
    again = torch.stack([former.mixers["2"](pair, None, None)[0] for pair in mixed])
    torch.testing.assert_close(second.tokens[IMAGES:], again)
    assert torch.equal(second.tokens[:IMAGES], batch.tokens[:IMAGES])
    assert second.references == 0


def test_the_encoder_returns_rows_of_images_only_and_gradients_reach_the_references() -> None:
    module, batch = encoder(layers=[0, 1]), pairs()
    batch = batch.with_tokens(batch.tokens.requires_grad_())
    output = module(batch)
    assert len(output.tokens) == 2 * IMAGES
    (clean,) = torch.autograd.grad(output.tokens[0].sum(), batch.tokens, retain_graph=True)
    (mixed,) = torch.autograd.grad(output.tokens[IMAGES].square().sum(), batch.tokens)
    norms = [gradient.flatten(1).norm(dim=1) > 0 for gradient in (clean, mixed)]
    assert norms[0].nonzero().flatten().tolist() == [0]
    assert norms[1].nonzero().flatten().tolist() == [0, IMAGES]


@pytest.mark.parametrize("mode", ["two_stream", "single_stream"])
def test_references_are_not_read_in_evaluation(mode: str) -> None:
    former = batch_former(mode=mode)
    assert former.reads_references
    assert not former.eval().reads_references


@pytest.mark.parametrize("mode", EVALUATED)
def test_references_are_read_in_evaluation_and_the_images_of_a_batch_are_independent(mode: str) -> None:
    module, batch = encoder(mode=mode).eval(), pairs()
    former = module.batch_former
    assert former is not None
    assert former.reads_references
    assert not former.mixes_evaluated_images
    together = module(batch).tokens
    rows = [0, IMAGES]
    alone = TokenBatch(batch.tokens[rows], {name: value[rows] for name, value in batch.per_sample.items()})
    torch.testing.assert_close(module(alone.with_references(None)).tokens, together[:1])
    other = batch.with_tokens(torch.cat([batch.tokens[:IMAGES], torch.randn(IMAGES, TOKENS, DIM)]))
    assert not torch.allclose(module(other).tokens, together)


@pytest.mark.parametrize("mode", ["duplicate", "self_only"])
def test_the_controls_read_no_references(mode: str) -> None:
    assert not batch_former(mode=mode).reads_references


def test_without_references_each_image_is_alone() -> None:
    former = batch_former(mode="single_stream_inference")
    tokens = torch.randn(IMAGES, TOKENS, DIM)
    mask = torch.zeros(IMAGES, TOKENS, dtype=torch.bool)
    output = former(TokenBatch(tokens, {"padding_mask": mask}), layer=0, position="before").tokens
    for image in range(IMAGES):
        torch.testing.assert_close(output[image], former.mixers["shared"](tokens[image : image + 1], None, None)[0])


def test_after_until_epoch_references_are_not_read() -> None:
    former = batch_former(until_epoch=2, keep_streams=True)
    former.begin_epoch(1)
    assert former.reads_references
    former.begin_epoch(2)
    assert not former.reads_references
    plain = pairs().without_references()
    assert torch.equal(former(plain, layer=0, position="before").tokens, plain.tokens.repeat(2, 1, 1))


def test_single_stream_inference_is_the_same_function_in_both_modes() -> None:
    module = encoder(mode="single_stream_inference", references=False)
    tokens = torch.randn(IMAGES, TOKENS, DIM)
    batch = TokenBatch(
        tokens,
        {
            "padding_mask": torch.zeros(IMAGES, TOKENS, dtype=torch.bool),
            "position": torch.randn(1, TOKENS, DIM).expand(IMAGES, -1, -1),
        },
    )
    trained = module(batch)
    assert trained.num_streams == 1
    torch.testing.assert_close(module.eval()(batch).tokens, trained.tokens)
    assert module.batch_former is not None
    assert module.batch_former.mixes_evaluated_images


@pytest.mark.parametrize("images", [1, 2, 3])
def test_stream_distances_are_those_of_the_images(images: int) -> None:
    torch.set_default_dtype(torch.float32)
    module, batch = encoder(layers=[0, 1]), pairs()
    rows = [*range(images), *range(IMAGES, IMAGES + images)]
    few = TokenBatch(batch.tokens[rows], {name: value[rows] for name, value in batch.per_sample.items()})
    assert module.batch_former is not None
    with recorded(module.batch_former) as recording:
        module(few.with_references(None))
    first = recording.insertions[0].after.tokens
    expected = stream_distance(first[:images], first[images : 2 * images]).mean()
    torch.testing.assert_close(statistics(recording)["stream_distance/0"], expected, check_dtype=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "single_stream_inference", "until_epoch": 1}, "until_epoch would train without"),
        ({"gather": True}, "references chooses among the images of one process"),
        ({"group_size": 2}, "group_size and references both choose"),
        ({"neighbours": 2}, "neighbours and references both choose"),
    ],
)
def test_settings_that_exclude_each_other(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        batch_former(**changes)
