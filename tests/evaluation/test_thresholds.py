"""Precision, recall and best thresholds against loops over random detections with ties, crowds and empty images."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest

from detr_bf.evaluation.coco import match_and_accumulate, scored_hits
from detr_bf.evaluation.results import ScoredHits, all_classes
from detr_bf.structures import ClassMap

CLASSES = ClassMap((9, 4), ("b", "a"))


def random_split(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a data set of five images and detections with tied scores, one image without objects."""
    rng = np.random.default_rng(seed)
    annotations, results = [], []
    for image_id in range(1, 6):
        for _ in range(0 if image_id == 3 else int(rng.integers(1, 6))):
            x, y, w, h = (float(v) for v in (*rng.integers(0, 60, 2), *rng.integers(10, 40, 2)))
            category = int(rng.choice([4, 9]))
            annotations.append({"image_id": image_id, "category_id": category, "bbox": [x, y, w, h], "area": w * h})
            annotations[-1] |= {"id": len(annotations), "iscrowd": int(rng.random() < 0.15)}
            for _ in range(int(rng.integers(0, 3))):
                shift = rng.integers(-4, 5, 4)
                box = [x + shift[0], y + shift[1], max(1, w + shift[2]), max(1, h + shift[3])]
                label = category if rng.random() < 0.8 else 13 - category
                results.append({"image_id": image_id, "category_id": label, "bbox": [float(v) for v in box]})
        results.append({"image_id": image_id, "category_id": 4, "bbox": [70.0, 70.0, 8.0, 8.0]})
    for result in results:
        result["score"] = float(rng.integers(1, 11)) / 10
    categories = [{"id": 4, "name": "a"}, {"id": 9, "name": "b"}]
    return {"images": [{"id": i} for i in range(1, 6)], "annotations": annotations, "categories": categories}, results


def iou(one: list[float], other: list[float], crowd: bool) -> float:
    width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    common = max(0.0, width) * max(0.0, height)
    return common / (one[2] * one[3] + (0 if crowd else other[2] * other[3] - common))


def matched(
    truth: dict[str, Any], results: list[dict[str, Any]], category: int, limit: int
) -> list[tuple[float, bool]]:
    """Return score and hit of every detection that counts, matched greedily, image by image."""
    found = []
    for image in truth["images"]:
        own = [a for a in truth["annotations"] if (a["image_id"], a["category_id"]) == (image["id"], category)]
        taken: set[int] = set()
        mine = [r for r in results if (r["image_id"], r["category_id"]) == (image["id"], category)]
        for result in sorted(mine, key=lambda r: -r["score"])[:limit]:
            best, chosen = 0.5, None
            for each in (a for a in own if not a["iscrowd"] and a["id"] not in taken):
                if iou(result["bbox"], each["bbox"], False) >= best:
                    best, chosen = iou(result["bbox"], each["bbox"], False), each["id"]
            if chosen is not None:
                taken.add(chosen)
            crowd = any(a["iscrowd"] and iou(result["bbox"], a["bbox"], True) >= 0.5 for a in own)
            if chosen is not None or not crowd:
                found.append((result["score"], chosen is not None))
    return found


def scored(engine: str, truth: dict[str, Any], results: list[dict[str, Any]], limit: int) -> dict[int, ScoredHits]:
    if engine == "hotcoco":
        pytest.importorskip("hotcoco")
    _, hits = match_and_accumulate(engine, *copy.deepcopy((truth, results)), (1, 2, limit), "bbox")
    return scored_hits(
        results, hits, Counter(a["category_id"] for a in truth["annotations"] if not a["iscrowd"]), CLASSES
    )


@pytest.mark.parametrize("engine", ["pycocotools", "hotcoco"])
@pytest.mark.parametrize("limit", [100, 2])
@pytest.mark.parametrize("seed", range(20))
def test_curves_and_best_thresholds_equal_loops(seed: int, limit: int, engine: str) -> None:
    truth, results = random_split(seed)
    found = scored(engine, truth, results, limit)
    everything: list[tuple[float, bool]] = []
    for category in (4, 9):
        expected = matched(truth, results, category, limit)
        everything += expected
        objects = sum(a["category_id"] == category and not a["iscrowd"] for a in truth["annotations"])
        check(found[category], expected, objects)
    check(all_classes(found.values()), everything, sum(not a["iscrowd"] for a in truth["annotations"]))


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


@pytest.mark.parametrize("engine", ["pycocotools", "hotcoco"])
def test_without_hits_there_is_no_threshold(engine: str) -> None:
    assert ScoredHits.of(np.array([0.3]), np.array([False]), 2).best() is None
    assert ScoredHits.of(np.array([0.3]), np.array([False]), 0).best() is None
    assert all_classes([]).best() is None
    truth, _ = random_split(0)
    found = scored(engine, truth, [], 100)
    assert all(own.best() is None and own.objects for own in found.values())
    nothing = all_classes(found.values()).at(0.5)
    assert (nothing.precision, nothing.recall) == (1.0, 0.0)
