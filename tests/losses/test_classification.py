"""Cross-entropy with a down-weighted no-object class, focal and matchability-aware loss against formulas in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from detr_bf.common.errors import InputError
from detr_bf.losses import CrossEntropy, Focal, MatchabilityAware, Varifocal
from tests.references.set_criterion import focal_cost, weighted_cross_entropy

LAYERS, ROWS, QUERIES, CLASSES = 2, 3, 4, 5


def example(num_logits: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LAYERS, ROWS, QUERIES, num_logits, generator=generator, dtype=torch.float64)
    return logits, torch.randint(-1, CLASSES, (LAYERS, ROWS, QUERIES), generator=generator)


@pytest.mark.parametrize("no_object_weight", [0.1, 1.0, 3.0])
def test_cross_entropy_as_the_plain_loop(no_object_weight: float) -> None:
    logits, classes = example(CLASSES + 1)
    assert (classes < 0).any()
    losses = CrossEntropy(no_object_weight).loss(logits, classes, torch.tensor(7.0))
    for layer in range(LAYERS):
        wanted = [CLASSES if label < 0 else label for label in classes[layer].flatten().tolist()]
        expected = weighted_cross_entropy(logits[layer].flatten(0, 1), wanted, no_object_weight)
        torch.testing.assert_close(losses[layer], expected)


def test_uniform_logits_cost_the_entropy_whatever_the_weight() -> None:
    logits, classes = torch.zeros(1, ROWS, QUERIES, CLASSES + 1), example(CLASSES + 1)[1][:1]
    for weight in (0.1, 0.5, 2.0):
        loss = CrossEntropy(weight).loss(logits, classes, torch.tensor(1.0))
        assert loss.item() == pytest.approx(math.log(CLASSES + 1), rel=1e-5)


def test_weight_is_the_pull_of_background_relative_to_objects() -> None:
    logits = torch.zeros(1, 1, 2, CLASSES + 1, requires_grad=True)
    CrossEntropy(0.1).loss(logits, torch.tensor([[[2, -1]]]), torch.tensor(1.0)).sum().backward()
    pull_of_object, pull_of_background = logits.grad[0, 0, 0, 2], logits.grad[0, 0, 1, CLASSES]
    assert pull_of_object < 0
    assert (pull_of_background / pull_of_object).item() == pytest.approx(0.1)


def test_cross_entropy_scores_leave_no_object_out() -> None:
    logits, _ = example(CLASSES + 1)
    scores = CrossEntropy().scores(logits)
    assert scores.shape == (LAYERS, ROWS, QUERIES, CLASSES)
    exponential = logits.exp()
    torch.testing.assert_close(scores, (exponential / exponential.sum(-1, keepdim=True))[..., :CLASSES])


def test_object_is_claimed_unless_no_object_is_likeliest() -> None:
    assert CrossEntropy().is_object(torch.tensor([[3.0, 1.0, 2.0], [0.0, 1.0, 2.0]])).tolist() == [True, False]
    assert CrossEntropy().num_logits(CLASSES) == CLASSES + 1


def test_candidates_are_the_best_class_of_each_query() -> None:
    scores = torch.tensor([[0.1, 0.3], [0.8, 0.7], [0.2, 0.5]])
    best, query, label = CrossEntropy().candidates(scores, 2)
    torch.testing.assert_close(best, torch.tensor([0.8, 0.5]))
    assert (query.tolist(), label.tolist()) == ([1, 2], [0, 1])


def formula(logit: float, positive: bool, alpha: float, gamma: float) -> float:
    """Focal loss -alpha_t (1 - p_t)^gamma log p_t, equations 4 and 5 of Lin et al. 2017."""
    p = 1 / (1 + math.exp(-logit))
    p_t, alpha_t = (p, alpha) if positive else (1 - p, 1 - alpha)
    return -alpha_t * (1 - p_t) ** gamma * math.log(p_t)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.6, 0.5)])
def test_focal_loss_as_the_formula(alpha: float, gamma: float) -> None:
    logits, classes = example(CLASSES)
    num_boxes = 3
    losses = Focal(alpha, gamma).loss(logits, classes, torch.tensor(float(num_boxes)))
    for layer in range(LAYERS):
        queries, labels = logits[layer].flatten(0, 1).tolist(), classes[layer].flatten().tolist()
        total = sum(
            formula(logit, label == k, alpha, gamma)
            for query, label in zip(queries, labels, strict=True)
            for k, logit in enumerate(query)
        )
        assert losses[layer].item() == pytest.approx(total / num_boxes, rel=1e-9)


def test_focal_loss_without_focus_it_is_half_the_binary_cross_entropy() -> None:
    logits, classes = example(CLASSES)
    one_hot = torch.stack([classes == k for k in range(CLASSES)], dim=-1).double()
    expected = 0.5 * F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none").sum((1, 2, 3))
    torch.testing.assert_close(Focal(0.5, 0.0).loss(logits, classes, torch.tensor(1.0)), expected)


def test_focal_matching_cost() -> None:
    logits, _ = example(CLASSES)
    labels = torch.tensor([[0, 4], [2, 2], [3, 0]])
    cost = Focal().match_cost(logits, labels)
    assert cost.shape == (LAYERS, ROWS, QUERIES, 2)
    for layer in range(LAYERS):
        for row in range(ROWS):
            expected = focal_cost(logits[layer, row], labels[row])
            torch.testing.assert_close(cost[layer, row], expected, rtol=1e-5, atol=1e-6)


def test_focal_losses_of_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([-200.0, 200.0]).expand(1, 1, 3, 2).clone().requires_grad_()
    loss = Focal().loss(logits, torch.tensor([[[0, 1, -1]]]), torch.tensor(1.0))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad.isfinite().all()
    assert Focal().match_cost(logits, torch.tensor([[0, 1]])).isfinite().all()


def test_focal_scores_and_claims() -> None:
    logits = torch.tensor([[-1.0, 0.5], [-2.0, -0.1]])
    torch.testing.assert_close(Focal().scores(logits), 1 / (1 + (-logits).exp()))
    assert Focal().is_object(logits).tolist() == [True, False]
    assert Focal().num_logits(CLASSES) == CLASSES


def test_candidates_are_the_best_pairs_of_query_and_class() -> None:
    scores = torch.tensor([[0.1, 0.3], [0.8, 0.7], [0.2, 0.5]])
    best, query, label = Focal().candidates(scores, 3)
    torch.testing.assert_close(best, torch.tensor([0.8, 0.7, 0.5]))
    assert (query.tolist(), label.tolist()) == ([1, 1, 2], [0, 1, 1])


@pytest.mark.parametrize("gamma", [1.5, 0.7])
def test_matchability_aware_loss_as_the_formula(gamma: float) -> None:
    logits, classes = example(CLASSES)
    classes[0, 0, 0] = -2
    quality = torch.rand(classes.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss = MatchabilityAware(quality_gamma=gamma).loss(
        logits, classes, torch.tensor(7.0), quality=quality * (classes >= 0)
    )
    for layer in range(LAYERS):
        total = 0.0
        for row, query, label in itertools.product(range(ROWS), range(QUERIES), range(CLASSES)):
            p = 1 / (1 + math.exp(-float(logits[layer, row, query, label])))
            q = float(quality[layer, row, query]) ** gamma
            if classes[layer, row, query] == label:
                total -= q * math.log(p) + (1 - q) * math.log(1 - p)
            elif classes[layer, row, query] != -2:
                total -= p**gamma * math.log(1 - p)
        assert float(loss[layer]) == pytest.approx(total / 7, rel=1e-9)


def test_matchability_aware_loss_pulls_the_score_to_the_quality() -> None:
    for quality in (0.05, 0.5, 0.9):
        wanted = quality**1.5
        logit = torch.tensor(math.log(wanted / (1 - wanted)), requires_grad=True)
        found = MatchabilityAware().loss(
            logit.reshape(1, 1, 1, 1),
            torch.zeros(1, 1, 1, dtype=torch.int64),
            torch.tensor(1.0),
            quality=torch.tensor(quality).reshape(1, 1, 1),
        )
        found.sum().backward()
        assert logit.grad is not None
        assert abs(float(logit.grad)) < 1e-6


def test_matchability_aware_weights_have_no_gradient() -> None:
    logit = torch.tensor(0.3, requires_grad=True)
    one = torch.full((1, 1, 1), -1), torch.tensor(1.0)
    MatchabilityAware().loss(logit.reshape(1, 1, 1, 1), *one, quality=torch.zeros(1, 1, 1)).sum().backward()
    probability = torch.tensor(0.3).sigmoid()
    assert logit.grad is not None
    assert float(logit.grad) == pytest.approx(float(probability**1.5 * probability), rel=1e-5)


def test_matchability_aware_losses_of_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[[[200.0, -200.0], [-200.0, 200.0]]]], requires_grad=True)
    loss = MatchabilityAware().loss(
        logits, torch.tensor([[[1, -1]]]), torch.tensor(1.0), quality=torch.tensor([[[0.5, 0.0]]])
    )
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_varifocal_against_a_loop() -> None:
    """The score of the class of a matched query is to be its IoU; queries without supervision count for nothing."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 1, 4, 3, generator=generator, dtype=torch.float64)
    classes = torch.tensor([[[0, -1, 2, -2]], [[-1, 1, -1, -1]]])
    quality = torch.rand(2, 1, 4, generator=generator).double() * (classes >= 0)
    found = Varifocal(gamma=1.5, background=0.6).loss(logits, classes, torch.tensor(3.0), quality=quality)
    for layer in range(2):
        total = 0.0
        for query in range(4):
            for label in range(3):
                score = logits[layer, 0, query, label].sigmoid().item()
                wanted = quality[layer, 0, query].item() if classes[layer, 0, query] == label else 0.0
                weight = wanted if classes[layer, 0, query] == label else 0.6 * score**1.5
                entropy = -(wanted * math.log(score) + (1 - wanted) * math.log(1 - score))
                total += 0.0 if classes[layer, 0, query] == -2 else weight * entropy
        assert found[layer].item() == pytest.approx(total / 3)


def test_varifocal_is_least_where_the_score_is_the_iou() -> None:
    quality = torch.tensor([[[0.7]]])
    logits = torch.tensor([0.6, 0.7, 0.8]).logit()[:, None, None, None]
    classes = torch.zeros(3, 1, 1, dtype=torch.int64)
    losses = Varifocal().loss(logits, classes, torch.ones(()), quality=quality.expand(3, 1, 1))
    assert losses[1] < min(losses[0], losses[2])
    with pytest.raises(InputError, match="background=-1"):
        Varifocal(background=-1)
