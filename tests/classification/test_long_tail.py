from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from detr_bf.classification.long_tail import kept_places, long_tail_counts
from detr_bf.errors import InputError


@pytest.mark.parametrize(
    ("n", "classes", "imbalance", "total"),
    [
        (500, 100, 10, 19573),
        (500, 100, 50, 12608),
        (500, 100, 100, 10847),
        (500, 100, 200, 9502),
        (5000, 10, 100, 12406),
        (5000, 10, 10, 20431),
    ],
)
def test_the_published_long_tails_of_cifar(n: int, classes: int, imbalance: float, total: int) -> None:
    """The sizes that papers name for CIFAR-10-LT and CIFAR-100-LT."""
    counts = long_tail_counts(n, classes, imbalance)
    assert sum(counts) == total
    assert counts[0] == n
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == int(n / imbalance)


@pytest.mark.parametrize("classes", [2, 3, 4, 7, 10, 11, 21, 100])
def test_counts_are_those_of_exact_arithmetic(classes: int) -> None:
    """Class c keeps the largest m with m ** (K - 1) * imbalance ** c <= n ** (K - 1)."""
    steps = classes - 1
    for n in [*range(1, 60), 98, 103, 107, 161, 500, 1280, 5000, 6000]:
        for imbalance in {
            value for value in (1, 1.1, 1.5, 2, 3, 4, 8, 10, 12.5, 27, 49, 50, 100, 200, 256, n) if value <= n
        }:
            exact, whole = Fraction(str(imbalance)), n**steps
            for place, kept in enumerate(long_tail_counts(n, classes, imbalance)):
                assert kept**steps * exact**place <= whole, (n, imbalance, place)
                assert (kept + 1) ** steps * exact**place > whole, (n, imbalance, place)


@pytest.mark.parametrize("n", [49, 98, 103, 107, 161])
def test_as_many_times_fewer_as_there_are_images_leaves_one(n: int) -> None:
    assert long_tail_counts(n, 10, n)[-1] == 1


def test_no_imbalance_and_a_single_class_keep_all() -> None:
    assert long_tail_counts(7, 3, 1) == [7, 7, 7]
    assert long_tail_counts(7, 1, 100) == [7]


@pytest.mark.parametrize("imbalance", [0.5, 0, -1, float("nan"), float("inf")])
def test_an_imbalance_below_one_is_refused(imbalance: float) -> None:
    with pytest.raises(InputError, match=r"imbalance must be 1 or more and finite, got"):
        long_tail_counts(7, 3, imbalance)


def test_a_tail_without_images_is_refused() -> None:
    with pytest.raises(InputError, match="imbalance=100 leaves no image of the last class, of 50 in the first"):
        long_tail_counts(50, 10, 100)


LABELS = torch.tensor([i * 7 % 5 for i in range(200)])  # 40 of each of 5 classes


def counts_of(places: torch.Tensor) -> list[int]:
    return torch.bincount(LABELS[places], minlength=5).tolist()


def test_the_order_says_which_classes_are_the_head() -> None:
    places = kept_places(LABELS, 5, imbalance=10, order=[3, 1, 4, 0, 2])
    counts = long_tail_counts(40, 5, 10)
    assert counts == [40, 22, 12, 7, 4]
    assert [counts_of(places)[label] for label in (3, 1, 4, 0, 2)] == counts
    assert counts_of(kept_places(LABELS, 5, imbalance=10)) == counts


def test_what_is_kept_stays_in_order_and_is_always_the_same() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    first = kept_places(LABELS, 5, imbalance=10)
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(first, kept_places(LABELS, 5, imbalance=10))
    assert torch.equal(first, first.unique())
    assert first.tolist()[:6] == [0, 5, 8, 10, 12, 15], "the same in every version"


def test_a_larger_imbalance_keeps_some_of_what_a_smaller_one_keeps() -> None:
    small, large = (set(kept_places(LABELS, 5, imbalance=value).tolist()) for value in (2, 20))
    assert large < small


def test_those_kept_are_spread_over_the_class() -> None:
    """Neighbours in a data set are often alike."""
    labels = torch.zeros(1000, dtype=torch.int64)
    places = kept_places(labels, 1, per_class=100).float()
    assert 350 < float(places.mean()) < 650


def test_a_limit_for_each_class_takes_all_of_a_smaller_one() -> None:
    labels = torch.tensor([0] * 10 + [1] * 3 + [2] * 10)
    assert torch.bincount(labels[kept_places(labels, 3, per_class=5)]).tolist() == [5, 3, 5]
    assert len(kept_places(labels, 3)) == 23


def test_the_limit_comes_before_the_tail_and_small_classes_stay_whole() -> None:
    labels = torch.tensor([0] * 100 + [1] * 3 + [2] * 100)
    kept = kept_places(labels, 3, per_class=40, imbalance=4)
    assert torch.bincount(labels[kept]).tolist() == [40, 3, 10]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 1, 2, 3, 3], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(InputError, match="order must name each of the 5 classes, 0 to 4, once; got"):
        kept_places(LABELS, 5, order=order)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="per_class must be 1 or more, got 0"):
        kept_places(LABELS, 5, per_class=0)
