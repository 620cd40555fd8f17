"""Simulated experiments with a known true difference: the intervals must cover it as often as they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from detr_bf.comparison.resampling import DifferenceEstimates, resample, resample_differences
from detr_bf.comparison.tables import BoxTable, ImageTable

IMAGES = 72
THRESHOLDS = np.arange(0.5, 0.96, 0.05)
Cells = list[tuple[int, int | None]]
FIVE_SEEDS: Cells = [(seed, None) for seed in range(5)]
FIVE_FOLDS: Cells = [(0, fold) for fold in range(5)]


@dataclass(frozen=True)
class Effects:
    """Standard deviations of the random effects on the quality of a detector, for each arm of its own."""

    seed: float
    image: float
    both: float


@dataclass(frozen=True, eq=False)
class MeanTable:
    """ImageTable with one number per image, whose mean is the metric."""

    image_ids: tuple[int, ...]
    values: np.ndarray

    kind = "mean"

    def metrics(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        return {"AP": weights @ self.values / len(self.values)}

    def to_dict(self) -> dict[str, Any]:
        return {}


def mean_table(rng: np.random.Generator, image_ids: tuple[int, ...], quality: np.ndarray) -> ImageTable:
    return MeanTable(image_ids, quality)


def box_table(rng: np.random.Generator, image_ids: tuple[int, ...], quality: np.ndarray) -> ImageTable:
    """Draw the matched detections of two classes: about 5 objects per image, near misses and noise.

    The quality moves the IoU of the detections; an IoU below a threshold is a false positive there.
    """
    objects = np.zeros((len(image_ids), 2, 4), dtype=np.int64)
    counts = np.random.default_rng(image_ids).poisson((4, 1.5), (len(image_ids), 2))  # the same for all detectors
    objects[:, :, 0] = counts
    images, overlaps, starts = [], [], [0]
    for k in range(2):
        true = np.repeat(np.arange(len(image_ids)), counts[:, k])
        noise = rng.integers(0, len(image_ids), 2 * len(image_ids))
        overlap = 1 / (1 + np.exp(-1.2 - quality[true] - 0.9 * rng.normal(size=len(true))))
        score = np.concatenate([4 * overlap + rng.normal(size=len(true)), rng.normal(1, 1, len(noise))])
        order = np.argsort(-score)
        images.append(np.concatenate([true, noise])[order])
        overlaps.append(np.concatenate([overlap, np.zeros(len(noise))])[order])
        starts.append(starts[-1] + len(order))
    hits = np.zeros((4, 10, starts[-1]), dtype=bool)
    hits[0] = np.concatenate(overlaps) >= THRESHOLDS[:, None]
    return BoxTable(image_ids, ("a", "b"), objects, np.array(starts), np.concatenate(images), hits, np.zeros_like(hits))


def simulated(
    rng: np.random.Generator,
    cells: Cells,
    effects: Effects,
    difference: float,
    make_table: Callable[[np.random.Generator, tuple[int, ...], np.ndarray], ImageTable],
) -> dict[str, ImageTable]:
    """Draw one experiment: the tables by arm and cell. Cells of one fold share their images."""
    tables: dict[Any, ImageTable] = {}
    folds = sorted({fold or 0 for _, fold in cells})
    ids = {fold: tuple(sorted(rng.choice(2**30, IMAGES, replace=False).tolist())) for fold in folds}
    easy = {fold: rng.normal(0, 0.5, IMAGES) for fold in folds}  # the same for both arms
    for arm, shift in (("arm", difference), ("off", 0.0)):
        images = {fold: rng.normal(0, effects.image, IMAGES) for fold in folds}
        for seed, fold in cells:
            place = fold or 0
            own = rng.normal(0, effects.seed) + rng.normal(0, effects.both, IMAGES)
            tables[arm, seed, fold] = make_table(rng, ids[place], easy[place] + shift + images[place] + own)
    return tables


def estimates(tables: Mapping[Any, ImageTable], cells: Cells, resamples: int, seed: int) -> DifferenceEstimates:
    found = resample(tables, resamples, seed)
    pairs = {cell: (found["arm", cell[0], cell[1]], found["off", cell[0], cell[1]]) for cell in cells}
    share = 0.25 if len({fold for _, fold in cells}) > 1 else 0.0
    return resample_differences(pairs, share)["AP"]


def percentile_interval(tables: Mapping[Any, ImageTable], cells: Cells, seed: int) -> tuple[float, float]:
    """Return the interval of the usual bootstrap, with replacement over the cells and their images."""
    rng, found = np.random.default_rng(seed), resample(tables, 200, seed)
    draws = np.stack(
        [found["arm", cell[0], cell[1]].draws["AP"] - found["off", cell[0], cell[1]].draws["AP"] for cell in cells]
    )
    chosen = rng.integers(0, len(cells), draws.shape)
    low, high = np.quantile(np.take_along_axis(draws, chosen, 0).mean(0), (0.025, 0.975))
    return float(low), float(high)


def coverage(cells: Cells, effects: Effects, repetitions: int, difference: float, percentile: bool = False) -> float:
    """Return the share of experiments, with means for AP, whose interval covers the true difference."""
    covered = 0
    for repetition in range(repetitions):
        tables = simulated(np.random.default_rng(repetition), cells, effects, difference, mean_table)
        if percentile:
            interval: Any = percentile_interval(tables, cells, repetition)
        else:
            both = estimates(tables, cells, 150, repetition).both
            assert both is not None
            interval = both.interval()
        covered += interval[0] <= difference <= interval[1]
    return covered / repetitions


MIXTURES = {
    "seeds": Effects(0.1, 0.05, 0.05),
    "images": Effects(0.005, 0.5, 0.1),
    "seeds and images": Effects(0.06, 0.5, 0.3),
    "interaction": Effects(0.005, 0.1, 0.8),
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_interval_covers_the_true_mean_difference(mixture: str) -> None:
    """600 experiments of 5 seeds: 0.92 to 0.98 is 3.4 binomial standard deviations around 0.95."""
    assert 0.92 <= coverage(FIVE_SEEDS, MIXTURES[mixture], 600, difference=0.3) <= 0.98


@pytest.mark.full
@pytest.mark.parametrize("mixture", ["images", "seeds and images"])
def test_the_interval_covers_with_folds(mixture: str) -> None:
    assert 0.92 <= coverage(FIVE_FOLDS, MIXTURES[mixture], 600, difference=0.3) <= 0.99


def test_the_same_limits_refuse_the_percentile_bootstrap() -> None:
    """With five seeds it covers about 85 %."""
    assert coverage(FIVE_SEEDS, MIXTURES["seeds"], 600, difference=0.3, percentile=True) < 0.9


def test_the_images_interval_covers_if_only_images_vary() -> None:
    covered = 0
    for repetition in range(600):
        tables = simulated(np.random.default_rng(repetition), FIVE_SEEDS, Effects(0, 0.5, 0), 0.3, mean_table)
        images = estimates(tables, FIVE_SEEDS, 150, repetition).images
        low, high = (images and images.interval()) or (0, 0)
        covered += low <= 0.3 <= high
    assert 0.92 <= covered / 600 <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "cells"), [("5 seeds", FIVE_SEEDS), ("5 folds", FIVE_FOLDS)])
def test_the_interval_covers_the_true_difference_of_ap(layout: str, cells: Cells) -> None:
    """500 experiments with AP, 72 images; the truth is the mean of 4,000 other pairs of detectors.

    OMP_NUM_THREADS=1 python -m pytest -m slow -s tests/comparison/test_coverage.py
    """
    effects = Effects(0.06, 0.4, 0.3)
    print()
    for difference in (0.0, 0.15):
        true = true_difference(effects, difference) if difference else 0.0
        intervals: dict[str, list[Any]] = {"both": [], "seeds": [], "images": []}
        spread = []
        for repetition in range(500):
            tables = simulated(np.random.default_rng([1, repetition]), cells, effects, difference, box_table)
            found = estimates(tables, cells, 300, repetition)
            spread.append(found.seeds.mean)
            for name, own in intervals.items():
                estimate = getattr(found, name)
                own.append(estimate.interval())
        covered = {name: np.mean([low <= true <= high for low, high in own]) for name, own in intervals.items()}
        width = {name: np.mean([high - low for low, high in own]) for name, own in intervals.items()}
        told = np.mean([not low <= 0 <= high for low, high in intervals["both"]])
        print(
            f"{layout}, true difference {true:.4f} (mean of the estimates {np.mean(spread):.4f}, their standard "
            f"deviation {np.std(spread):.4f}): "
            + ", ".join(f"{name} covers {covered[name]:.3f} (width {width[name]:.4f})" for name in covered)
            + f"; called different {told:.3f}"
        )
        assert 0.93 <= covered["both"] <= 0.97
        assert difference or told <= 0.06


def true_difference(effects: Effects, difference: float, pairs: int = 4000) -> float:
    one: Cells = [(0, None)]
    ones = np.ones((1, IMAGES), dtype=np.int64)
    found = []
    for pair in range(pairs):
        tables: Any = simulated(np.random.default_rng([2, pair]), one, effects, difference, box_table)
        arm, off = (tables[name, 0, None].metrics(ones)["AP"][0] for name in ("arm", "off"))
        found.append(arm - off)
    return float(np.mean(found))
