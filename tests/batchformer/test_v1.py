"""Properties of BatchFormer, in float64."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormer, StreamLoss, contrast_streams, repeat_targets
from detr_bf.common.errors import InputError

IMAGES, DIM, CLASSES = 3, 16, 5


pytestmark = pytest.mark.usefixtures("float64")


def features(images: int = IMAGES) -> Tensor:
    return torch.randn(images, DIM)


def batch_former(**changes: object) -> BatchFormer:
    return BatchFormer(DIM, **{"dropout": 0.0} | changes).train()  # type: ignore[arg-type]


def test_training_gives_the_features_and_torchs_encoder_layer_of_them() -> None:
    module, f = batch_former(), features()
    stock = nn.TransformerEncoderLayer(DIM, 4, dim_feedforward=DIM, dropout=0.0)
    stock.load_state_dict(module.mixer.layers[0].state_dict())
    clean, mixed = module(f).chunk(2)
    assert torch.equal(clean, f)
    torch.testing.assert_close(mixed, stock(f[:, None])[:, 0])


def test_defaults_are_the_published_ones() -> None:
    [layer] = BatchFormer(DIM).mixer.layers
    assert (layer.self_attn.num_heads, layer.linear1.out_features) == (4, DIM)
    assert {layer.dropout.p, layer.dropout1.p, layer.dropout2.p, layer.self_attn.dropout} == {0.5}
    assert len(BatchFormer(DIM, num_layers=2).mixer.layers) == 2


@pytest.mark.parametrize("shared_classifier", [True, False])
def test_evaluation_is_the_identity_and_reads_no_parameter(shared_classifier: bool) -> None:
    module, f = batch_former(shared_classifier=shared_classifier).eval(), features()
    for parameter in module.parameters():
        nn.init.constant_(parameter, float("nan"))
    assert module(f) is f
    assert module.num_streams == 1


def test_without_shared_classifier_features_are_replaced() -> None:
    module, f = batch_former(shared_classifier=False), features()
    torch.testing.assert_close(module(f), module.mixer(f[:, None])[:, 0])
    assert module.num_streams == 1
    assert batch_former().num_streams == 2


def test_equivariant_to_permuting_the_batch() -> None:
    module, f, order = batch_former(), features(), torch.tensor([2, 0, 1])
    torch.testing.assert_close(module(f[order])[IMAGES:], module(f)[IMAGES:][order])


def test_equal_images_give_what_one_gives() -> None:
    module, f = batch_former(), features(1)
    torch.testing.assert_close(module(f.expand(4, -1))[4:], module(f)[1:].expand(4, -1))


@pytest.mark.parametrize("stream", [0, 1])
def test_an_images_loss_reaches_the_others_in_the_second_stream_only(stream: int) -> None:
    f, classifier = features().requires_grad_(), nn.Linear(DIM, CLASSES)
    logits = classifier(batch_former()(f)).unflatten(0, (2, IMAGES))
    F.cross_entropy(logits[stream, :1], torch.tensor([1])).backward()
    assert f.grad[0].any()
    if stream == 0:
        assert not f.grad[1:].any(), "exactly zero"
    else:
        assert f.grad[1:].any(1).all()


def test_gradients_are_those_of_finite_differences() -> None:
    module, labels = batch_former(), torch.tensor([1, 4, 0])
    loss = StreamLoss(F.cross_entropy)
    weight = torch.randn(CLASSES, DIM, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda f, weight: loss(F.linear(module(f), weight), labels, 2), (features().requires_grad_(), weight)
    )


def test_features_with_places_are_refused() -> None:
    with pytest.raises(InputError, match="expected \\(images, channels\\)"):
        batch_former()(torch.randn(IMAGES, 7, DIM))
    with pytest.raises(InputError, match="must divide"):
        batch_former(heads=3)


@pytest.mark.parametrize(("images", "warning"), [(1, "no effect"), (2, "only 2 images"), (3, None)])
def test_small_batches_are_warned_of_once(images: int, warning: str | None, caplog: pytest.LogCaptureFixture) -> None:
    module = batch_former()
    with caplog.at_level(logging.WARNING, logger="detr_bf"):
        module(features(images)), module(features(images))
    assert len(caplog.records) == (warning is not None)
    assert warning is None or warning in caplog.text


def test_targets_are_repeated_stream_by_stream() -> None:
    labels, soft = torch.tensor([1, 4, 0]), torch.rand(IMAGES, CLASSES)
    assert repeat_targets(labels, 2).tolist() == [1, 4, 0, 1, 4, 0]
    assert torch.equal(repeat_targets(soft, 2), torch.cat([soft, soft]))
    assert repeat_targets(labels, 1) is labels


@pytest.mark.parametrize("soft", [False, True])
def test_loss_of_streams_is_their_mean(soft: bool) -> None:
    logits, labels = torch.randn(2 * IMAGES, CLASSES), torch.tensor([1, 4, 0])
    targets = torch.rand(IMAGES, CLASSES).softmax(-1) if soft else labels
    loss = StreamLoss(F.cross_entropy)
    clean, second = loss.of_each_stream(logits, targets, 2)
    torch.testing.assert_close(clean, F.cross_entropy(logits[:IMAGES], targets))
    torch.testing.assert_close(second, F.cross_entropy(logits[IMAGES:], targets))
    torch.testing.assert_close(loss(logits, targets, 2), (clean + second) / 2)
    torch.testing.assert_close(loss(logits[:IMAGES], targets), clean)


@pytest.mark.parametrize("rows", [IMAGES, 3 * IMAGES])
def test_another_number_of_streams_is_refused(rows: int) -> None:
    loss = StreamLoss(F.cross_entropy)
    for call in (loss, loss.of_each_stream):
        with pytest.raises(InputError, match=f"{rows} rows of logits for 3 targets and num_streams=2"):
            call(torch.zeros(rows, CLASSES), torch.zeros(IMAGES, dtype=torch.long), 2)


def test_contrast_takes_all_four_pairs_of_streams() -> None:
    queries, keys = torch.randn(2 * IMAGES, DIM), torch.randn(2 * IMAGES, DIM)

    def contrast(query: Tensor, key: Tensor) -> Tensor:
        return F.cross_entropy(query @ key.T, torch.arange(IMAGES))

    total = torch.zeros(())
    for q in (queries[:IMAGES], queries[IMAGES:]):
        for k in (keys[:IMAGES], keys[IMAGES:]):
            total = total + contrast(q, k)
    torch.testing.assert_close(contrast_streams(contrast, queries, keys), total / 4)
    torch.testing.assert_close(contrast_streams(contrast, queries, keys, loss_scale=4.0), total)
