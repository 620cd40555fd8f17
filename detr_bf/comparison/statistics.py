"""Intervals of means and of paired differences, an exact test, correction for several arms, and power.

Shape legend: n pairs (two runs with the same seed and fold), F folds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

CONFIDENCE = 0.95
SIGNIFICANCE = 0.05
POWER = 0.8
EXACT_SIGNS = 16  # pairs up to which all sign patterns are enumerated
_SAMPLED_SIGNS = 100_000


@dataclass(frozen=True)
class Estimate:
    """Mean with the standard error and the degrees of freedom of its Student's t distribution.

    The standard error is None if it cannot be estimated, for example from a single value.
    """

    mean: float
    standard_error: float | None = None
    df: float = 0.0

    def interval(self) -> tuple[float, float] | None:
        """Return both ends of the 95 % interval, None without a standard error."""
        if self.standard_error is None:
            return None
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, self.df)) * self.standard_error
        return self.mean - half, self.mean + half

    @property
    def p_value(self) -> float | None:
        """Two-sided p of the t-test that the mean is 0: below 0.05 exactly if the 95 % interval excludes 0."""
        if self.standard_error is None:
            return None
        if self.standard_error == 0:
            return float(self.mean == 0)
        return float(2 * stats.t.sf(abs(self.mean) / self.standard_error, self.df))

    def detectable(self) -> float | None:
        """Return :func:`detectable_difference` for this standard error, None without one."""
        return None if self.standard_error is None else detectable_difference(self.standard_error, self.df)


def student_estimate(
    values: Sequence[float], folds: Sequence[Hashable] | None = None, test_share: float = 0.0
) -> Estimate:
    """Return the mean of runs, or of paired differences between runs, for a Student's t interval.

    Runs of one fold, or without folds, differ by their seed: the variance of the mean is s^2 / n. With several folds
    the unit is the mean of a fold. Two folds share training images, so that their results are correlated, and s^2 / F
    would be too small: it becomes s^2 (1 / F + test images / training images), the corrected resampled variance of
    Nadeau and Bengio 2003, "Inference for the Generalization Error", Machine Learning 52, section 3. No estimator is
    unbiased there (Bengio and Grandvalet 2004), and this one is too large for results that do not depend on the
    training images.

    Args:
        values: (n,) finite numbers.
        folds: (n,) fold of each value; None if all are of one.
        test_share: test images / training images of a fold; read only with several folds.
    """
    means = _fold_means(values, folds)
    count = len(means)
    mean = float(np.mean(means))
    if count < 2:
        return Estimate(mean)
    factor = 1 / count + (test_share if _has_folds(folds) else 0)
    return Estimate(mean, math.sqrt(factor * float(np.var(means, ddof=1))), count - 1)


def bootstrap_df(images: int, folds: int, resamples: int) -> float:
    """Return the degrees of freedom of a variance that is estimated by resampling images.

    The variance of m values with kurtosis k has about 2 m / (k - 1) degrees of freedom. The influence of an image on AP
    has heavier tails than a normal distribution (k = 3): k = 5 is taken, which halves them. The resamples add their own
    noise.

    Args:
        images: number of images of all folds.
        folds: number of folds, 1 without cross-validation.
        resamples: number of resamples.
    """
    return 1 / (2 / max(1, images - folds) + 1 / max(1, resamples - 1))


def images_estimate(
    values: Sequence[float], folds: Sequence[Hashable], covariances: Mapping[Hashable, np.ndarray], df: float
) -> Estimate:
    """Return the mean of paired differences with the variance that comes from the choice of test images alone.

    The trained networks are given. Each fold has its own images, so the variances of the means of the folds add.

    Args:
        values: (n,) differences.
        folds: (n,) fold of each.
        covariances: fold -> covariance (n_f, n_f) of its differences over resamples of its images.
        df: of the covariances, see :func:`bootstrap_df`.
    """
    variance = sum(float(c.mean()) for c in covariances.values()) / len(covariances) ** 2
    return Estimate(float(np.mean(_fold_means(values, folds))), math.sqrt(variance), df)


def seeds_and_images_estimate(
    values: Sequence[float],
    folds: Sequence[Hashable],
    covariances: Mapping[Hashable, np.ndarray],
    df: float,
    test_share: float = 0.0,
) -> Estimate:
    """Return the mean of paired differences with the variance from new seeds and new test images together.

    *Without folds* all pairs share their test images. A difference is the sum of the true one and effects of its seed,
    of the images, and of both together (the seed decides which images go wrong). Over resamples of the images, the mean
    covariance C of two pairs is the variance of the effect of the images, and the excess of the variances over C is
    that of the joint effect, W n for the n pairs. The variance v = C + W of the mean over resamples contains both. The
    variance s^2 of the differences contains the effects of the seed and the joint one. The variance of the mean is
    v + max(0, s^2 / n - W): adding all of s^2 / n would count the joint effect twice.

    A percentile bootstrap over few seeds is too narrow, because the variance of n values drawn with replacement is
    (n - 1) / n of s^2, and because it ignores the degrees of freedom: with 5 seeds it covers 85 % instead of 95 %.

    *With folds* every fold has its own images and training images. The unit is the mean of a fold: the variance v_f of
    its mean over resamples is the effect of the images, and the excess of the variance B between folds over the mean v
    of the v_f is that of seeds and training images. The first has no images in common between folds. The second has,
    and gets the factor of :func:`student_estimate`: v / F + max(0, B - v) (1 / F + test images / training images).
    Pairs of one fold are averaged first, because their training images are the same.

    The degrees of freedom are those of Welch and Satterthwaite for the parts. The result is an interval for the
    difference expected with new seeds and new images of the same kind; without folds for this training set, with folds
    for training sets of this size, as far as the correction holds.

    The arguments are those of :func:`images_estimate`, and ``test_share`` of :func:`student_estimate`.
    """
    means = _fold_means(values, folds)
    count, mean = len(means), float(np.mean(means))
    if _has_folds(folds):
        own = float(np.mean([c.mean() for c in covariances.values()]))
        excess = max(0.0, float(np.var(means, ddof=1)) - own) * (1 / count + test_share)
        variance, parts = own / count + excess, (own / count) ** 2 / df + excess**2 / (count - 1)
    else:
        if count < 2:
            return Estimate(mean)
        [covariance] = covariances.values()
        of_mean = float(covariance.mean())
        # the covariance of two pairs is at least 0, so that the joint effect is at most the variance of the mean
        joint = min(of_mean, max(0.0, float(np.trace(covariance)) / count - of_mean) / (count - 1))
        runs = float(np.var(means, ddof=1)) / count
        variance = of_mean + max(0.0, runs - joint)
        parts = max(0.0, of_mean - joint) ** 2 / df + joint**2 / (df * (count - 1))
        parts += runs**2 / (count - 1) if runs > joint else 0.0
    return Estimate(mean, math.sqrt(variance), variance**2 / parts if parts > 0 else count - 1)


def _has_folds(folds: Sequence[Hashable] | None) -> bool:
    return folds is not None and len(set(folds)) > 1


def _fold_means(values: Sequence[float], folds: Sequence[Hashable] | None) -> list[float]:
    """Return the mean of each fold in order of appearance, or the values themselves if there is one fold."""
    if folds is None or not _has_folds(folds):
        return list(values)
    members: dict[Hashable, list[float]] = {}
    for value, fold in zip(values, folds, strict=True):
        members.setdefault(fold, []).append(value)
    return [float(np.mean(own)) for own in members.values()]


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the mean under all sign patterns of the differences (Fisher's randomization test).

    It assumes only that a difference and its negative are equally likely if the arms are equal. Up to 16 pairs all 2^n
    patterns are enumerated, and p is exact; the smallest possible value is 2 / 2^n (0.0625 for 5 pairs). Beyond, p is
    estimated from 100,000 random patterns of a fixed seed and the observed one. The differences must be finite.

    Args:
        differences: (n,) finite numbers.
    """
    values = np.asarray(differences, dtype=np.float64)
    count = len(values)
    if count <= EXACT_SIGNS:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums - value, sums + value])
    else:
        signs = np.random.default_rng(0).integers(0, 2, (_SAMPLED_SIGNS, count), dtype=np.int8)
        sums = np.append((2 * signs - 1) @ values, values.sum())
    # sums that differ only by the rounding of another order of addition count as equal
    bound = abs(values.sum()) - 1e-12 * np.abs(values).sum()
    return float(np.mean(np.abs(sums) >= bound))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for testing all of them together (Holm 1979), in the given order."""
    count = len(p_values)
    adjusted, largest = [0.0] * count, 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable").tolist()):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def power_of_t_test(noncentrality: float, df: float) -> float:
    """Return the probability that a two-sided t-test rejects; the noncentrality is difference / standard error."""
    bound = float(stats.t.ppf(1 - SIGNIFICANCE / 2, df))
    below = float(stats.nct.cdf(-bound, df, noncentrality))  # SciPy returns NaN for values under about 1e-15
    return float(stats.nct.sf(bound, df, noncentrality)) + (0.0 if math.isnan(below) else below)


def detectable_difference(standard_error: float, df: float) -> float:
    """Return the smallest true difference that a two-sided t-test tells with 80 % power, for one comparison.

    Args:
        standard_error: of the mean difference; deviation / sqrt(n) for n pairs.
        df: degrees of freedom; n - 1 for n pairs. Less than 1 counts as 1, the least with a computable power.
    """
    df = max(df, 1.0)
    upper = 2 * float(stats.t.ppf(1 - SIGNIFICANCE / 2, df))  # half of all experiments reject at about half of this
    while power_of_t_test(upper, df) < POWER:
        upper *= 1.5
    return standard_error * float(optimize.brentq(lambda x: power_of_t_test(x, df) - POWER, 0, upper))
