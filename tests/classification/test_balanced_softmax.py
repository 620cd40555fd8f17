"""Balanced Softmax."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from detr_bf.classification.balanced_softmax import BalancedSoftmax
from detr_bf.errors import InputError

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
    """It sums the means of each stream and of both: 3 times the mean over both."""
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
