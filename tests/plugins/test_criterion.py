"""The criterion of classifiers: the mean over streams, and the plug-ins' losses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.classification.balanced_softmax import BalancedSoftmax
from detr_bf.classification.criterion import ClassifierCriterion, cross_entropy
from detr_bf.errors import InputError
from detr_bf.labelled import ClassTargets
from detr_bf.plugins import (
    add_batchformer,
    add_batchformer_v2,
    add_context_broadcasting,
    add_diverse_patch,
    add_relative_localization,
    patch_cutmix,
)
from tests.plugins import tiny

LABELS = torch.tensor([0, 2, 1])


def logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, tiny.CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_without_plugins_it_is_cross_entropy_and_the_accuracy_of_the_labels() -> None:
    given = logits(3)
    report = ClassifierCriterion(tiny.vit().train(), cross_entropy())(given, ClassTargets(LABELS))
    expected = [-math.log(row.exp()[label] / row.exp().sum()) for row, label in zip(given, LABELS, strict=True)]
    assert set(report.losses) == {"loss_ce"}
    assert report.total.item() == pytest.approx(sum(expected) / 3, rel=1e-12)
    assert report.logged["accuracy"].item() == pytest.approx((given.argmax(1) == LABELS).sum().item() / 3)


def test_smoothing_is_of_labels_alone() -> None:
    given, soft_labels = logits(3), F.one_hot(LABELS, tiny.CLASSES).double()
    loss = cross_entropy(0.1)
    smooth = 0.9 * soft_labels + 0.1 / tiny.CLASSES
    assert loss(given, LABELS).item() == pytest.approx(cross_entropy()(given, smooth).item(), rel=1e-12)
    assert loss(given, soft_labels).item() == pytest.approx(cross_entropy()(given, LABELS).item(), rel=1e-12)


@pytest.mark.parametrize("add", [add_batchformer, lambda model: add_batchformer_v2(model, [1])])
@pytest.mark.parametrize("mixed", [False, True])
def test_two_streams_are_averaged_and_logged_apart(add: object, mixed: bool) -> None:
    model = tiny.vit().train()
    add(model)  # type: ignore[operator]
    soft_labels = logits(3, seed=5).softmax(1) if mixed else None
    given = logits(6)
    report = ClassifierCriterion(model, cross_entropy())(given, ClassTargets(LABELS, soft_labels))
    wanted = LABELS if soft_labels is None else soft_labels
    clean, mixing = (F.cross_entropy(rows, wanted).item() for rows in given.chunk(2))
    assert report.total.item() == pytest.approx((clean + mixing) / 2, rel=1e-12)
    assert report.logged["stream/clean"].item() == pytest.approx(clean, rel=1e-12)
    assert report.logged["stream/batchformer"].item() == pytest.approx(mixing, rel=1e-12)
    assert not report.logged["stream/clean"].requires_grad


def test_balanced_softmax_takes_the_place_of_cross_entropy() -> None:
    counts = list(range(1, tiny.CLASSES + 1))
    report = ClassifierCriterion(tiny.vit().train(), BalancedSoftmax(counts))(logits(3), ClassTargets(LABELS))
    expected = F.cross_entropy(logits(3) + torch.tensor(counts, dtype=torch.float64).log(), LABELS)
    assert report.total.item() == pytest.approx(expected.item(), rel=1e-12)


def test_every_plugin_adds_its_loss_and_every_parameter_learns() -> None:
    torch.manual_seed(0)
    model = tiny.vit().train()
    add_context_broadcasting(model, "all", scaled=True)
    add_batchformer_v2(model, [1])
    add_diverse_patch(model, tiny.CLASSES)
    add_relative_localization(model, weight=0.5, pool=False)
    mix = patch_cutmix(tiny.images(3), LABELS, patch_size=model.patch_embed.patch_size, num_classes=tiny.CLASSES)
    report = ClassifierCriterion(model, cross_entropy())(
        model(mix.images), ClassTargets(LABELS, mix.targets, mix.patch_labels)
    )
    assert set(report.losses) == {"loss_ce", "loss_cosine", "loss_contrastive", "loss_mixing", "loss_localization"}
    streams = report.logged["stream/clean"] + report.logged["stream/batchformer"]
    torch.testing.assert_close(streams / 2, report.total.detach())
    report.total.backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []


def test_patches_have_one_stream_where_pooled_features_have_two() -> None:
    model = tiny.vit().train()
    add_batchformer(model)
    add_diverse_patch(model, tiny.CLASSES, mixing=0)
    given = model(tiny.images(3))
    assert len(given) == 6
    report = ClassifierCriterion(model, cross_entropy())(given, ClassTargets(LABELS))
    assert set(report.losses) == {"loss_ce", "loss_cosine", "loss_contrastive"}


def test_the_weight_of_localization_follows_the_epoch_of_the_batch() -> None:
    torch.manual_seed(0)
    model = tiny.vit().train()
    plugin = add_relative_localization(model, weight=1.0, pool=False)
    criterion = ClassifierCriterion(model, cross_entropy(), lambda epoch: 10.0**epoch)
    found = []
    for epoch in (0, 2):
        given = model(tiny.images(3))
        torch.manual_seed(1)  # the same pairs
        report = criterion(given, ClassTargets(LABELS, epoch=epoch))
        assert report.weights == {"loss_ce": 1, "loss_localization": 10.0**epoch}
        expected = report.losses["loss_ce"] + 10.0**epoch * report.losses["loss_localization"]
        torch.testing.assert_close(report.total, expected)
        found.append(report.losses["loss_localization"].item())
    assert plugin.weight == 100
    assert found[1] == pytest.approx(found[0], rel=1e-5), "the term itself is logged without its weight"


def test_terms_of_diverse_patch_are_given_without_their_weights() -> None:
    weights = {"cosine": 0.5, "contrastive": 0.25, "mixing": 0.0}
    model = tiny.vit().train()
    plugin = add_diverse_patch(model, tiny.CLASSES, **weights)
    report = ClassifierCriterion(model, cross_entropy())(model(tiny.images(3)), ClassTargets(LABELS))
    assert report.weights == {"loss_ce": 1, "loss_cosine": 0.5, "loss_contrastive": 0.25}
    model(tiny.images(3))
    for name, loss in plugin().items():
        torch.testing.assert_close(loss, weights[name] * report.losses[f"loss_{name}"])


def test_it_moves_and_saves_as_the_loss_alone() -> None:
    criterion = ClassifierCriterion(tiny.vit(), BalancedSoftmax([1] * tiny.CLASSES))
    assert not list(criterion.parameters())
    assert not criterion.state_dict()


def test_what_cannot_be_trained_on_is_refused() -> None:
    criterion = ClassifierCriterion(tiny.vit().train(), cross_entropy())
    with pytest.raises(InputError, match="from 0 to"):
        criterion(logits(3), ClassTargets(torch.tensor([0, 1, tiny.CLASSES])))
    with pytest.raises(InputError, match="expected logits"):
        criterion((logits(3), logits(3)), ClassTargets(LABELS))
    with pytest.raises(InputError, match="rows of logits"):
        criterion(logits(4), ClassTargets(LABELS))
