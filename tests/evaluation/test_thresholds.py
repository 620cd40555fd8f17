"""Precision, recall and F1 by score, against loops."""

from __future__ import annotations

import numpy as np
import pytest

from detr_bf.evaluation.error_types import scored_hits
from detr_bf.evaluation.results import ScoredHits, all_classes
from tests.evaluation.test_error_types import CLASSES, examined, random_data, verdicts


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_curves_and_best_thresholds_equal_loops(seed: int, ties: bool) -> None:
    data = random_data(seed, crowds=0.2, ties=ties)
    counted = [(result, kind == "hit") for result, kind, _ in verdicts(data) if kind != "ignored"]
    objects = [each["category_id"] for each in data[0]["annotations"] if not each["iscrowd"]]
    found = scored_hits(examined(data), CLASSES.num_classes)
    for category, own in zip(CLASSES.category_ids, found, strict=True):
        expected = [(result["score"], hit) for result, hit in counted if result["category_id"] == category]
        check(own, expected, objects.count(category))
    check(all_classes(found), [(result["score"], hit) for result, hit in counted], len(objects))


def check(own: ScoredHits, expected: list[tuple[float, bool]], objects: int) -> None:
    assert own.objects == objects
    points = {}
    for threshold in sorted({score for score, _ in expected}, reverse=True):
        kept = [hit for score, hit in expected if score >= threshold]
        points[threshold] = (sum(kept) / len(kept), sum(kept) / max(1, objects))
        point = own.at(threshold)
        assert (point.precision, point.recall) == pytest.approx(points[threshold])
    thresholds, precision, recall = own.curve()
    assert thresholds.tolist() == list(points)
    np.testing.assert_allclose(np.stack([precision, recall], axis=1), np.array([*points.values()]).reshape(-1, 2))
    best = own.best()
    if not any(hit for _, hit in expected):
        assert best is None
        return
    assert best is not None
    scores = {t: 2 * p * r / (p + r) if p + r else 0.0 for t, (p, r) in points.items()}
    assert best.f1 == pytest.approx(max(scores.values()))
    again = own.at(best.threshold)
    assert (again.precision, again.recall) == (best.precision, best.recall), (
        "the threshold keeps what it was chosen for"
    )


def test_a_threshold_lies_between_two_scores() -> None:
    found = ScoredHits.of(np.array([0.2, 0.9, 0.7, 0.1]), np.array([False, True, True, False]), 2)
    best = found.best()
    assert best is not None
    assert (best.threshold, best.precision, best.recall, best.f1) == (pytest.approx(0.45), 1.0, 1.0, 1.0)
    lowest = ScoredHits.of(np.array([0.3]), np.array([True]), 1).best()
    assert lowest is not None
    assert lowest.threshold == 0.3, "there is no lower score"


def test_without_hits_there_is_no_threshold() -> None:
    assert ScoredHits.of(np.array([0.3]), np.array([False]), 2).best() is None
    assert ScoredHits.of(np.array([0.3]), np.array([False]), 0).best() is None
    assert all_classes([]).best() is None
    truth, _ = random_data(0, crowds=0.0, ties=False)
    found = scored_hits(examined((truth, [])), CLASSES.num_classes)
    assert all(own.best() is None and own.objects for own in found)
    nothing = all_classes(found).at(0.5)
    assert (nothing.precision, nothing.recall) == (1.0, 0.0)
