"""Intervals, tests and power, against loops, tables and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from detr_bf.comparison.statistics import (
    Estimate,
    bootstrap_df,
    detectable_difference,
    holm,
    images_estimate,
    power_of_t_test,
    seeds_and_images_estimate,
    sign_flip_p,
    student_estimate,
)

T_2, T_4 = 4.302652730, 2.776445105  # 97.5 % quantiles of Student's t with 2 and 4 degrees of freedom, from a table


def half_width(estimate: Estimate) -> float:
    interval = estimate.interval()
    assert interval is not None
    assert math.isclose(sum(interval) / 2, estimate.mean, abs_tol=1e-12)
    return (interval[1] - interval[0]) / 2


def test_mean_and_interval_by_hand() -> None:
    """Scores 70, 72, 74: mean 72, standard deviation 2."""
    found = student_estimate([70.0, 72.0, 74.0])
    assert found.mean == 72
    assert half_width(found) == pytest.approx(T_2 * 2 / math.sqrt(3), rel=1e-8)
    five = student_estimate([1.0, 2.0, 3.0, 2.0, 2.0])
    assert half_width(five) == pytest.approx(T_4 * math.sqrt(0.5 / 5), rel=1e-8)
    assert student_estimate([1.0, 2.0], ["a", "a"]) == student_estimate([1.0, 2.0])


def test_one_value_has_no_interval() -> None:
    found = student_estimate([0.5])
    assert (found.mean, found.interval(), found.p_value, found.detectable()) == (0.5, None, None, None)


def test_folds_are_the_unit_and_the_variance_is_corrected() -> None:
    """Two seeds in each of three folds with means 1, 2, 3: variance 1, times 1/3 + 1/2."""
    found = student_estimate([0.5, 1.5, 2.0, 2.0, 2.0, 4.0], [0, 0, 1, 1, 2, 2], test_share=0.5)
    assert found.mean == 2
    assert half_width(found) == pytest.approx(T_2 * math.sqrt(1 / 3 + 1 / 2), rel=1e-8)


def test_p_is_below_5_percent_exactly_if_the_interval_excludes_0() -> None:
    rng = np.random.default_rng(0)
    told = 0
    for _ in range(300):
        found = student_estimate(rng.normal(1, 1, 4).tolist())
        low, high = found.interval() or (0, 0)
        assert found.p_value is not None
        assert (found.p_value < 0.05) == (not low <= 0 <= high)
        told += found.p_value < 0.05
    assert 30 < told < 270
    assert Estimate(0.0, 0.0, 4).p_value == 1
    assert Estimate(0.1, 0.0, 4).p_value == 0


def test_sign_flip_p_equals_a_loop_over_all_signs() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 9):
        values = rng.normal(0.5, 1, count).tolist()
        sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in
                itertools.product((-1, 1), repeat=count)]  # fmt: skip
        expected = sum(total >= abs(sum(values)) - 1e-9 for total in sums) / 2**count
        assert sign_flip_p(values) == pytest.approx(expected, abs=1e-12)
    assert sign_flip_p([0.1, 0.2, 0.3, 0.4, 0.5]) == 0.0625, "the smallest p of five pairs"
    assert sign_flip_p([0.1, 0.1, 0.1, -0.3]) == 1, "sums of 0.1 are rounded"
    assert sign_flip_p([0.0, 0.0]) == 1


def test_sign_flip_p_of_many_pairs_is_sampled() -> None:
    values = np.random.default_rng(3).normal(0.25, 1, 40)
    z = values.sum() / math.sqrt((values**2).sum())
    normal = math.erfc(abs(z) / math.sqrt(2))
    assert 0.01 < normal < 0.9
    assert sign_flip_p(values.tolist()) == pytest.approx(normal, abs=0.02)
    assert sign_flip_p(values.tolist()) == sign_flip_p(values.tolist())
    assert 0 < sign_flip_p([1.0] * 40) < 1e-4


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9, 0.001]) == pytest.approx([1.0, 1.0, 0.003])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_holm_keeps_the_error_of_the_family() -> None:
    """With four true null hypotheses, at least one is refused in at most 5 % of families."""
    p = np.random.default_rng(0).random((4000, 4))
    assert 0.03 < np.mean([min(holm(own)) < 0.05 for own in p.tolist()]) < 0.06


def test_power_equals_simulation() -> None:
    rng = np.random.default_rng(0)
    for pairs, difference in ((5, 1.0), (5, 1.7), (10, 0.6)):
        draws = rng.normal(difference, 1, (40_000, pairs))
        t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(pairs))
        bound = {5: T_4, 10: 2.262157163}[pairs]
        power = power_of_t_test(difference * math.sqrt(pairs), pairs - 1)
        assert power == pytest.approx(np.mean(abs(t) > bound), abs=0.01)
    assert power_of_t_test(0.0, 4) == pytest.approx(0.05)


@pytest.mark.parametrize("df", [1, 2, 4, 7.5, 40, 1000])
def test_the_detectable_difference_has_the_power_it_names(df: float) -> None:
    difference = detectable_difference(0.01, df)
    assert power_of_t_test(difference / 0.01, df) == pytest.approx(0.8, abs=1e-6)
    assert difference > 0.028  # 0.01 (1.96 + 0.84) for a known deviation
    assert detectable_difference(0.02, df) == pytest.approx(2 * difference)


def test_degrees_of_freedom_of_the_bootstrap() -> None:
    """Half of m - 1, less the noise of the resamples."""
    assert bootstrap_df(73, 1, 10**9) == pytest.approx(36)
    assert bootstrap_df(365, 5, 181) == pytest.approx(90)


def test_components_by_hand() -> None:
    """Two seeds on the same images: covariance 0.03, joint effect (0.06 - 0.03) / 2, s^2 / 2 = 0.01 or 0.02."""
    folds, covariance = [None, None], {None: np.array([[0.05, 0.03], [0.03, 0.07]])}
    images = images_estimate([0.0, 0.2], folds, covariance, 35)
    assert images.standard_error == pytest.approx(math.sqrt(0.03 + 0.015))
    assert images.df == 35
    less = seeds_and_images_estimate([0.0, 0.2], folds, covariance, 35)
    assert less.standard_error == pytest.approx(math.sqrt(0.045)), "never less than the images alone"
    assert less.df == pytest.approx(0.045**2 / (0.03**2 / 35 + 0.015**2 / 35))
    both = seeds_and_images_estimate([0.0, 0.2 * math.sqrt(2)], folds, covariance, 35)
    assert both.standard_error == pytest.approx(math.sqrt(0.03 + 0.02))
    assert both.df == pytest.approx(0.05**2 / (0.03**2 / 35 + 0.015**2 / 35 + 0.02**2 / 1))
    one = seeds_and_images_estimate([0.2], [None], {None: np.array([[0.05]])}, 35)
    assert (one.mean, one.interval()) == (0.2, None)
    same = seeds_and_images_estimate([0.0, 0.0], folds, {None: np.zeros((2, 2))}, 35)
    assert (same.interval(), same.p_value) == ((0, 0), 1)


def test_components_with_folds_by_hand() -> None:
    """Fold means 0.1 and 0.4: B = 0.045; image variances 0.01 and 0.03; test images are a quarter of the others."""
    values, folds = [0.0, 0.2, 0.4], [0, 0, 1]
    covariances = {0: np.array([[0.01, 0.01], [0.01, 0.01]]), 1: np.array([[0.03]])}
    both = seeds_and_images_estimate(values, folds, covariances, 100, test_share=0.25)
    assert both.mean == pytest.approx(0.25)
    assert both.standard_error == pytest.approx(math.sqrt(0.02 / 2 + (0.045 - 0.02) * (1 / 2 + 0.25)))
    assert images_estimate(values, folds, covariances, 100).standard_error == pytest.approx(math.sqrt(0.04 / 4))


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("correlation", [-0.12, -0.2, -0.24])
def test_a_negative_covariance_of_the_pairs_costs_no_degrees_of_freedom(count: int, correlation: float) -> None:
    """Estimated covariances may be negative, although those of the model are not."""
    covariance = 0.01 * ((1 - correlation) * np.eye(count) + correlation * np.ones((count, count)))
    values = [0.1 * (-1) ** index for index in range(count)]
    found = seeds_and_images_estimate(values, [None] * count, {None: covariance}, 100)
    assert found.df >= 0.9 * (count - 1)
    assert found.standard_error is not None
    assert found.standard_error**2 >= np.var(values, ddof=1) / count - 1e-12
    assert math.isfinite(found.detectable() or math.nan)


def test_the_detectable_difference_exists_for_any_degrees_of_freedom() -> None:
    assert detectable_difference(1.0, 0.3) == detectable_difference(1.0, 1.0)
