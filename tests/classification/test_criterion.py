"""Losses of classifiers: Balanced Softmax, the mean over streams, and the losses of plug-ins."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.classification.batch import ClassTargets
from detr_bf.classification.criterion import BalancedSoftmax, ClassifierCriterion, RideLoss, cross_entropy
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.plugins import (
    add_batchformer,
    add_batchformer_v2,
    add_context_broadcasting,
    add_diverse_patch,
    add_relative_localization,
    patch_cutmix,
)
from tests.plugins import tiny
from tests.processes import run_together

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
        model(mix.images), ClassTargets(LABELS, mix.soft_labels, mix.patch_labels)
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
        torch.manual_seed(1)  # the same random pairs
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


ROWS, COUNTS = 4, (100, 10, 1)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, len(COUNTS), generator=generator, dtype=torch.float64)
    return logits, torch.randint(len(COUNTS), (ROWS,), generator=generator)


def test_as_the_plain_loop() -> None:
    logits, labels = example()
    values = []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        weighted = [count * math.exp(logit) for count, logit in zip(COUNTS, row, strict=True)]
        values.append(-math.log(weighted[label] / sum(weighted)))
    assert BalancedSoftmax(COUNTS)(logits, labels).item() == pytest.approx(sum(values) / ROWS, rel=1e-12)


@pytest.mark.parametrize(("label", "expected"), [(0, 0.1044), (1, 2.4069), (2, 4.7095)])
def test_logits_of_0_cost_the_logarithm_of_the_share(label: int, expected: float) -> None:
    loss = BalancedSoftmax(COUNTS)(torch.zeros(1, 3), torch.tensor([label])).item()
    assert loss == pytest.approx(-math.log(COUNTS[label] / sum(COUNTS)), rel=1e-6)
    assert loss == pytest.approx(expected, abs=5e-5)


def test_only_the_proportions_of_counts_matter() -> None:
    logits, labels = example()
    times_seven = BalancedSoftmax([7 * count for count in COUNTS])
    torch.testing.assert_close(times_seven(logits, labels), BalancedSoftmax(COUNTS)(logits, labels))


def test_equal_counts_are_cross_entropy() -> None:
    logits, labels = example()
    torch.testing.assert_close(BalancedSoftmax([6, 6, 6])(logits, labels), F.cross_entropy(logits, labels))


def test_shares_after_mixup_are_the_mean_of_their_labels() -> None:
    logits, labels = example()
    loss, partner = BalancedSoftmax(COUNTS), labels.flip(0)
    one_hot = [F.one_hot(classes, len(COUNTS)).double() for classes in (labels, partner)]
    mixed = loss(logits, 0.3 * one_hot[0] + 0.7 * one_hot[1])
    torch.testing.assert_close(mixed, 0.3 * loss(logits, labels) + 0.7 * loss(logits, partner))


def test_scale_of_the_released_code_is_a_factor() -> None:
    """The released code sums the means of each stream and of both: 3 times the mean over both."""
    logits, labels = example()
    clean, second = logits, logits.flip(1)
    mean = BalancedSoftmax(COUNTS)
    both = torch.cat([clean, second]), torch.cat([labels, labels])
    released = mean(*both) + mean(clean, labels) + mean(second, labels)
    torch.testing.assert_close(BalancedSoftmax(COUNTS, loss_scale=3.0)(*both), released)


def test_gradients_are_those_of_finite_differences() -> None:
    logits, labels = example()
    loss = BalancedSoftmax(COUNTS)
    assert torch.autograd.gradcheck(lambda logits: loss(logits, labels), (logits.requires_grad_(),))


def test_half_precision_is_computed_in_float32_and_nothing_is_saved() -> None:
    logits, labels = example()
    loss = BalancedSoftmax(COUNTS)
    assert loss(logits.half(), labels).dtype == torch.float32
    torch.testing.assert_close(loss(logits.half(), labels).double(), loss(logits, labels), rtol=0, atol=2e-3)
    assert not loss.state_dict()


@pytest.mark.parametrize("counts", [(3, 0, 2, 0), (3, -1, 2, 0)])
def test_classes_without_images_are_refused_by_name(counts: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"classes \[1, 3\] of 4"):
        BalancedSoftmax(counts)


def test_no_classes_are_refused() -> None:
    with pytest.raises(InputError, match="of 0"):
        BalancedSoftmax([])


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_outside_the_classes_are_refused(label: int) -> None:
    logits, labels = example()
    labels[1] = label
    with pytest.raises(InputError, match=rf"from 0 to 2 for 3 classes; got \[{label}\]"):
        BalancedSoftmax(COUNTS)(logits, labels)


def test_logits_of_other_classes_are_refused() -> None:
    with pytest.raises(InputError, match="logits of 5 classes and class_counts of 3"):
        BalancedSoftmax(COUNTS)(torch.zeros(ROWS, 5), torch.zeros(ROWS, dtype=torch.long))


EXPERTS, SHARE, DIVERSITY = 3, 0.4, 0.3


def expert_logits() -> torch.Tensor:
    return 3 * torch.randn(ROWS, EXPERTS, len(COUNTS), generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


@pytest.mark.parametrize("epoch", [0, 4, 5, 9])
def test_ride_as_the_plain_loop(epoch: int) -> None:
    """Margins, weights and temperatures by class frequency, and the divergence of each expert from the mean."""
    logits, labels = expert_logits(), example()[1].tolist()
    late, classes = epoch >= 5, range(len(COUNTS))
    margins = [30 * 0.5 * (min(COUNTS) / n) ** 0.25 for n in COUNTS]
    weights = [(1 - 0.9999) / (1 - 0.9999**n) if late else 1.0 for n in COUNTS]
    temperatures = [SHARE * len(COUNTS) * n / sum(COUNTS) + 1 - SHARE for n in COUNTS]
    temperatures = [t / max(temperatures) if late else 1.0 for t in temperatures]
    total = 0.0
    for expert in range(EXPERTS):
        costs, divergences = [], []
        for row, label in zip(logits.tolist(), labels, strict=True):
            own = row[expert]
            shares = softmax([own[k] - margins[k] * (k == label) for k in classes])
            costs.append((weights[label], -math.log(shares[label])))
            mean = [sum(each[k] for each in row) / EXPERTS for k in classes]
            of_mean, of_own = (softmax([x[k] / temperatures[k] for k in classes]) for x in (mean, own))
            divergences.append(sum(p * math.log(p / q) for p, q in zip(of_mean, of_own, strict=True)))
        total += sum(weight * cost for weight, cost in costs) / sum(weight for weight, _ in costs)
        total -= DIVERSITY * (sum(temperatures) / len(COUNTS)) ** 2 * sum(divergences) / ROWS
    loss = RideLoss(COUNTS, diversity=DIVERSITY, reweight_factor=SHARE, reweight_epoch=5)
    report = ClassifierCriterion(tiny.vit().train(), loss)(logits, ClassTargets(torch.tensor(labels), epoch=epoch))
    assert report.total.item() == pytest.approx(total, rel=1e-10)


def test_diversity_pushes_experts_apart_and_lets_their_mean_alone() -> None:
    """The gradient of the divergence at equal experts is 0, and that of the mean is not followed."""
    logits, labels = expert_logits().requires_grad_(), example()[1]
    (with_it,) = torch.autograd.grad(RideLoss(COUNTS, diversity=1.0)(logits, labels), logits)
    (without,) = torch.autograd.grad(RideLoss(COUNTS, diversity=0.0)(logits, labels), logits)
    expected = (logits.mean(1, keepdim=True).softmax(-1) - logits.softmax(-1)) / ROWS
    torch.testing.assert_close(with_it - without, expected.detach())
    equal = logits.detach().mean(1, keepdim=True).expand(-1, EXPERTS, -1)
    assert RideLoss(COUNTS, diversity=1.0)(equal, labels).item() == pytest.approx(
        RideLoss(COUNTS, diversity=0.0)(equal, labels).item()
    )


def test_logits_of_one_expert_cost_what_its_margins_do() -> None:
    logits, labels = expert_logits()[:, 0], example()[1]
    margins = torch.tensor([15 * n**-0.25 for n in COUNTS], dtype=torch.float64)
    expected = F.cross_entropy(logits - F.one_hot(labels, len(COUNTS)) * margins, labels)
    torch.testing.assert_close(RideLoss(COUNTS)(logits, labels), expected)
    torch.testing.assert_close(RideLoss(COUNTS)(logits[:, None], labels), expected)


def test_the_loss_of_one_row_of_one_expert_does_not_depend_on_the_epoch() -> None:
    """Gradient influence takes the loss of single images, without an epoch."""
    found = []
    for epoch in (0, 9):
        loss, row = RideLoss(COUNTS, reweight_epoch=5), expert_logits()[:1, 0].requires_grad_()
        loss.epoch = epoch
        value = loss(row, torch.tensor([2]))
        found.append((value, *torch.autograd.grad(value, row)))
    torch.testing.assert_close(found[0], found[1])


def test_scale_is_that_of_the_margins() -> None:
    logits, labels = expert_logits(), example()[1]
    margins = F.one_hot(labels, len(COUNTS)) * torch.tensor([0.5 * n**-0.25 for n in COUNTS], dtype=torch.float64)
    plain = RideLoss(COUNTS, scale=7.0, margin=0.0, diversity=0.0)(logits - 7 * margins[:, None], labels)
    torch.testing.assert_close(RideLoss(COUNTS, scale=7.0, diversity=0.0)(logits, labels), plain)


def ride_gradient(rows: slice) -> tuple[Tensor, Tensor]:
    """Return the loss of some rows in a late epoch and its gradient."""
    logits, labels = expert_logits()[rows].requires_grad_(), example()[1][rows]
    loss = RideLoss(COUNTS, reweight_epoch=0)(logits, labels)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def ride_of_this_rank() -> tuple[Tensor, Tensor]:
    half = ROWS // 2
    return ride_gradient(slice(distributed.rank() * half, (distributed.rank() + 1) * half))


def test_two_ranks_have_the_weighted_loss_of_one_process_with_all_rows() -> None:
    """DDP takes the mean of the ranks' gradients; the classes of the ranks, and so their weights, differ."""
    assert len(set(example()[1].tolist())) > 1
    ranks, (loss, gradient) = run_together(2, ride_of_this_rank), ride_gradient(slice(None))
    torch.testing.assert_close((ranks[0][0] + ranks[1][0]) / 2, loss)
    torch.testing.assert_close(torch.cat([own for _, own in ranks]) / 2, gradient)
    alone = [ride_gradient(rows)[0] for rows in (slice(0, 2), slice(2, 4))]
    assert not torch.allclose((alone[0] + alone[1]) / 2, loss), "dividing by the weights of each rank is different"


def test_ride_refuses_what_it_cannot_train_on() -> None:
    with pytest.raises(InputError, match=r"classes \[1\] of 2 have no training images, and RIDE needs"):
        RideLoss([3, 0])
    labels = example()[1]
    with pytest.raises(InputError, match="one label for each image"):
        RideLoss(COUNTS)(expert_logits(), F.one_hot(labels, len(COUNTS)).double())
    criterion = ClassifierCriterion(tiny.vit().train(), RideLoss(COUNTS))
    with pytest.raises(InputError, match=r"expected logits \(images, experts, classes\)"):
        criterion(expert_logits().mean(1), ClassTargets(labels))
