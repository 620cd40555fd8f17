"""The focal loss against its formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from detr_bf.losses import Focal
from tests.references.set_criterion import focal_cost

LAYERS, ROWS, QUERIES, CLASSES = 2, 3, 4, 5


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LAYERS, ROWS, QUERIES, CLASSES, generator=generator, dtype=torch.float64)
    return logits, torch.randint(-1, CLASSES, (LAYERS, ROWS, QUERIES), generator=generator)


def formula(logit: float, positive: bool, alpha: float, gamma: float) -> float:
    """-alpha_t (1 - p_t)^gamma log p_t, equations 4 and 5 of Lin et al. 2017."""
    p = 1 / (1 + math.exp(-logit))
    p_t, alpha_t = (p, alpha) if positive else (1 - p, 1 - alpha)
    return -alpha_t * (1 - p_t) ** gamma * math.log(p_t)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.6, 0.5)])
def test_as_the_formula(alpha: float, gamma: float) -> None:
    logits, classes = example()
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


def test_without_focus_it_is_half_the_binary_cross_entropy() -> None:
    logits, classes = example()
    one_hot = torch.stack([classes == k for k in range(CLASSES)], dim=-1).double()
    expected = 0.5 * F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none").sum((1, 2, 3))
    torch.testing.assert_close(Focal(0.5, 0.0).loss(logits, classes, torch.tensor(1.0)), expected)


def test_matching_cost() -> None:
    logits, _ = example()
    labels = torch.tensor([[0, 4], [2, 2], [3, 0]])
    cost = Focal().match_cost(logits, labels)
    assert cost.shape == (LAYERS, ROWS, QUERIES, 2)
    for layer in range(LAYERS):
        for row in range(ROWS):
            expected = focal_cost(logits[layer, row], labels[row])
            torch.testing.assert_close(cost[layer, row], expected, rtol=1e-5, atol=1e-6)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([-200.0, 200.0]).expand(1, 1, 3, 2).clone().requires_grad_()
    loss = Focal().loss(logits, torch.tensor([[[0, 1, -1]]]), torch.tensor(1.0))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad.isfinite().all()
    assert Focal().match_cost(logits, torch.tensor([[0, 1]])).isfinite().all()


def test_scores_and_claims() -> None:
    logits = torch.tensor([[-1.0, 0.5], [-2.0, -0.1]])
    torch.testing.assert_close(Focal().scores(logits), 1 / (1 + (-logits).exp()))
    assert Focal().is_object(logits).tolist() == [True, False]
    assert Focal().num_logits(CLASSES) == CLASSES


def test_candidates_are_the_best_pairs_of_query_and_class() -> None:
    scores = torch.tensor([[0.1, 0.3], [0.8, 0.7], [0.2, 0.5]])
    best, query, label = Focal().candidates(scores, 3)
    torch.testing.assert_close(best, torch.tensor([0.8, 0.7, 0.5]))
    assert (query.tolist(), label.tolist()) == ([1, 1, 2], [0, 1, 1])
