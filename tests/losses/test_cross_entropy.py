"""Cross-entropy with a down-weighted no-object class."""

from __future__ import annotations

import math

import pytest
import torch

from detr_bf.losses import CrossEntropy
from tests.references.set_criterion import weighted_cross_entropy

LAYERS, ROWS, QUERIES, CLASSES = 2, 3, 4, 5


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LAYERS, ROWS, QUERIES, CLASSES + 1, generator=generator, dtype=torch.float64)
    return logits, torch.randint(-1, CLASSES, (LAYERS, ROWS, QUERIES), generator=generator)


@pytest.mark.parametrize("no_object_weight", [0.1, 1.0, 3.0])
def test_as_the_plain_loop(no_object_weight: float) -> None:
    logits, classes = example()
    assert (classes < 0).any()
    losses = CrossEntropy(no_object_weight).loss(logits, classes, torch.tensor(7.0))
    for layer in range(LAYERS):
        wanted = [CLASSES if label < 0 else label for label in classes[layer].flatten().tolist()]
        expected = weighted_cross_entropy(logits[layer].flatten(0, 1), wanted, no_object_weight)
        torch.testing.assert_close(losses[layer], expected)


def test_uniform_logits_cost_the_entropy_whatever_the_weight() -> None:
    logits, classes = torch.zeros(1, ROWS, QUERIES, CLASSES + 1), example()[1][:1]
    for weight in (0.1, 0.5, 2.0):
        loss = CrossEntropy(weight).loss(logits, classes, torch.tensor(1.0))
        assert loss.item() == pytest.approx(math.log(CLASSES + 1), rel=1e-5)


def test_weight_is_the_pull_of_background_relative_to_objects() -> None:
    logits = torch.zeros(1, 1, 2, CLASSES + 1, requires_grad=True)
    CrossEntropy(0.1).loss(logits, torch.tensor([[[2, -1]]]), torch.tensor(1.0)).sum().backward()
    pull_of_object, pull_of_background = logits.grad[0, 0, 0, 2], logits.grad[0, 0, 1, CLASSES]
    assert pull_of_object < 0
    assert (pull_of_background / pull_of_object).item() == pytest.approx(0.1)


def test_scores_leave_no_object_out() -> None:
    logits, _ = example()
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
