"""Causes of wrong and missed segments by hand and against loops over pixels, and numbers that add up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detr_bf.evaluation import PanopticEvaluator
from detr_bf.evaluation.panoptic_errors import (
    MATCHES,
    PANOPTIC_CAUSES,
    SegmentMatches,
    panoptic_document,
    segment_confusion,
    worst_maps,
)
from tests.evaluation.test_panoptic import CAT, CLASSES, DOG, SEA, SKY, prediction, save
from tests.references.panoptic_quality import Scene, mostly_uncounted, pixels_by_id, random_split, scene

Pixels = set[tuple[int, int]]
Found = dict[int, str]  # segment id -> cause


def evaluated(folder: Path, *scenes: Scene) -> PanopticEvaluator:
    evaluator = PanopticEvaluator(*save(folder, scenes), CLASSES)
    evaluator.update([prediction(one) for one in scenes])
    return evaluator


def causes(folder: Path, one: Scene) -> tuple[Found, Found]:
    """Return the causes of wrong and of missed segments by id."""
    (image,) = evaluated(folder, one).counts.values()
    return {e.segment: e.cause for e in image.wrong}, {e.segment: e.cause for e in image.missed}


HAND: dict[str, tuple[Scene, Found, Found]] = {
    "class": (scene(["1111"], {1: CAT}, ["2222"], {2: DOG}), {2: "class"}, {1: "class"}),
    "thing or stuff": (
        scene(["1111"], {1: CAT}, ["222."], {2: SKY}),
        {2: "thing or stuff"},
        {1: "thing or stuff"},
    ),
    "an IoU of one half is both": (scene(["1111"], {1: CAT}, ["22.."], {2: DOG}), {2: "both"}, {1: "both"}),
    "merged": (
        scene(["1122"], {1: CAT, 2: CAT}, ["3333"], {3: CAT}),
        {3: "merged"},
        {1: "merged", 2: "merged"},
    ),
    "merged, but one is matched": (scene(["1112"], {1: CAT, 2: CAT}, ["3333"], {3: CAT}), {}, {2: "merged"}),
    "split": (scene(["1111"], {1: CAT}, ["2233"], {2: CAT, 3: CAT}), {2: "split", 3: "split"}, {1: "split"}),
    "split, but one is matched": (scene(["1111"], {1: CAT}, ["2223"], {2: CAT, 3: CAT}), {3: "split"}, {}),
    "outline": (scene(["1111...."], {1: CAT}, ["22......"], {2: CAT}), {2: "outline"}, {1: "outline"}),
    "background": (
        scene(["11114444", "44444444"], {1: CAT, 4: SKY}, ["....4422", "44444444"], {2: DOG, 4: SKY}),
        {2: "both"},
        {1: "background"},
    ),
    "a trace of the class": (
        scene(["1" * 20, "4" * 20], {1: CAT, 4: SKY}, ["2" + "." * 19, "4" * 20], {2: CAT, 4: SKY}),
        {2: "background"},
        {1: "background"},
    ),
    "on void": (scene(["...1"], {1: CAT}, ["2222"], {2: DOG}), {}, {1: "background"}),
    "on the crowd of another class": (
        scene(["1111"], {1: CAT}, ["2222"], {2: DOG}, crowds={1}),
        {2: "background"},
        {},
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_causes_by_hand(tmp_path: Path, name: str) -> None:
    one, wrong, missed = HAND[name]
    assert causes(tmp_path, one) == (wrong, missed)


def test_areas_of_the_file_cannot_confuse_a_segment_twice(tmp_path: Path) -> None:
    """Areas that are too small let two predictions have an IoU above 0.5 with one segment."""
    one = scene(["1111"], {1: CAT}, ["2233"], {2: DOG, 3: DOG})
    one = replace(one, truth_segments=[{**one.truth_segments[0], "area": 1}])
    evaluator = evaluated(tmp_path, one)
    (image,) = evaluator.counts.values()
    assert [error.cause for error in image.wrong] == ["class", "both"]
    assert [error.cause for error in image.missed] == ["class"]
    assert segment_confusion([image], 4).sum() == 2


def iou_of(truth: Any, found: Any, truth_pixels: dict[int, Pixels], found_pixels: dict[int, Pixels]) -> float:
    common = truth_pixels.get(truth["id"], set()) & found_pixels[found["id"]]
    counted = found_pixels[found["id"]] - truth_pixels.get(0, set())
    return len(common) / (truth["area"] + len(counted) - len(common)) if common else 0.0


def verdicts(one: Scene) -> tuple[Found, Found, set[tuple[int, int]]]:
    """Return the causes of wrong and of missed segments by id, and the pairs of confused classes, by loops."""
    truth_pixels, found_pixels = pixels_by_id(one.truth), pixels_by_id(one.found)
    truths = [entry for entry in one.truth_segments if not entry["iscrowd"]]
    ious = {(t["id"], f["id"]): iou_of(t, f, truth_pixels, found_pixels) for t in truths for f in one.found_segments}
    category = {("t", t["id"]): t["category_id"] for t in truths}
    category |= {("f", f["id"]): f["category_id"] for f in one.found_segments}
    right = {(t, f) for (t, f), iou in ious.items() if iou > 0.5 and category["t", t] == category["f", f]}
    matched_found = {f for _, f in right}
    kept = [
        f["id"]
        for f in one.found_segments
        if f["id"] in matched_found or not mostly_uncounted(one, f, truth_pixels, found_pixels)
    ]
    merging, pieces = Counter[int](), Counter[int]()
    covers, lies_on = set(), set()
    for t in truths:
        for f in kept:
            if t["category_id"] != category["f", f]:
                continue
            inside, guessed = truth_pixels.get(t["id"], set()), found_pixels[f] - truth_pixels.get(0, set())
            if inside and 2 * len(inside & guessed) > len(inside):
                merging[f] += 1
                covers.add((t["id"], f))
            if guessed and 2 * len(inside & guessed) > len(guessed):
                pieces[t["id"]] += 1
                lies_on.add((t["id"], f))
    things = {CAT, DOG}
    confused = {pair for pair, iou in ious.items() if iou > 0.5 and pair not in right and pair[1] in kept}

    def cause(pairs: Sequence[tuple[int, int]]) -> str:
        for t, f in pairs:
            if (t, f) in confused:
                return "class" if (category["t", t] in things) == (category["f", f] in things) else "thing or stuff"
        if any(pair in covers and merging[pair[1]] > 1 for pair in pairs):
            return "merged"
        if any(pair in lies_on and pieces[pair[0]] > 1 for pair in pairs):
            return "split"
        same = [pair for pair in pairs if category["t", pair[0]] == category["f", pair[1]]]
        if any(ious[pair] >= 0.1 for pair in same):
            return "outline"
        return "both" if any(ious[pair] >= 0.1 for pair in pairs) else "background"

    truth_ids = [t["id"] for t in truths]
    matched_truths = {t for t, _ in right}
    wrong = {f: cause([(t, f) for t in truth_ids]) for f in kept if f not in matched_found}
    missed = {t: cause([(t, f) for f in kept]) for t in truth_ids if t not in matched_truths}
    return wrong, missed, {(category["t", t], category["f", f]) for t, f in confused}


@pytest.mark.parametrize("seed", range(40))
def test_causes_equal_loops(tmp_path: Path, seed: int) -> None:
    scenes = random_split(seed, CLASSES.category_ids)
    counts = evaluated(tmp_path, *scenes).counts
    for one in scenes:
        image = counts[one.image_id]
        wrong, missed, confused = verdicts(one)
        assert {error.segment: error.cause for error in image.wrong} == wrong
        assert {error.segment: error.cause for error in image.missed} == missed
        pairs = {
            (CLASSES.category_ids[e.label], CLASSES.category_ids[e.other]) for e in image.missed if e.other is not None
        }
        assert pairs == confused
        listed = {entry["id"] for entry in one.found_segments}
        assert len(image.ignored) + len(image.wrong) + len(image.matches) == len(listed)
        assert set(image.ignored) | wrong.keys() <= listed


def test_random_maps_have_every_cause(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    ignored = 0
    for seed in range(40):
        for image in evaluated(tmp_path, *random_split(seed, CLASSES.category_ids)).counts.values():
            found.update(f"wrong {error.cause}" for error in image.wrong)
            found.update(f"missed {error.cause}" for error in image.missed)
            ignored += len(image.ignored)
    assert set(found) == {f"{kind} {cause}" for kind in ("wrong", "missed") for cause in PANOPTIC_CAUSES}
    assert ignored > 10


@pytest.mark.parametrize("seed", range(20))
def test_the_numbers_add_up(tmp_path: Path, seed: int) -> None:
    scenes = random_split(seed, CLASSES.category_ids)
    evaluator = evaluated(tmp_path, *scenes)
    summary, counts = evaluator.summarize(), evaluator.counts
    content = panoptic_document(counts, summary, 3)
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    matrix = np.array(content["confusion"])
    for label, (name, result) in enumerate(summary.per_class.items()):
        entry = content["per_class"][name]
        assert sum(cause["wrong"] for cause in entry["causes"].values()) == result.fp
        assert sum(cause["missed"] for cause in entry["causes"].values()) == result.fn
        assert matrix[label, label] == result.tp
        assert matrix[label].sum() == result.tp + result.fn
        assert matrix[:, label].sum() == result.tp + result.fp
        if result.PQ is not None:
            assert 1 - sum(cause["lost"] for cause in entry["causes"].values()) == pytest.approx(result.PQ, abs=1e-12)
            half = result.tp + (result.fp + result.fn) / 2
            assert entry["causes"][MATCHES]["lost"] == pytest.approx(result.tp * (1 - result.SQ) / half, abs=1e-12)
    assert matrix[-1, -1] == 0
    assert 1 - sum(cause["lost"] for cause in content["causes"].values()) == pytest.approx(summary.PQ, abs=1e-12)
    fp, fn = (sum(getattr(result, kind) for result in summary.per_class.values()) for kind in ("fp", "fn"))
    assert sum(cause["wrong"] for cause in content["causes"].values()) == fp
    assert sum(cause["missed"] for cause in content["causes"].values()) == fn


@pytest.mark.parametrize("seed", range(10))
def test_the_worst_maps_lose_most(tmp_path: Path, seed: int) -> None:
    evaluator = evaluated(tmp_path, *random_split(seed, CLASSES.category_ids))
    lost = {
        image_id: sum(1 - iou for _, iou in image.matches) + (len(image.wrong) + len(image.missed)) / 2
        for image_id, image in evaluator.counts.items()
    }
    expected = sorted((image_id for image_id, value in lost.items() if value), key=lambda i: (-lost[i], i))
    assert worst_maps(evaluator.counts, 100) == expected
    assert worst_maps(evaluator.counts, 2) == expected[:2]
    entries = panoptic_document(evaluator.counts, evaluator.summarize(), 2)["worst"]
    assert [entry["image_id"] for entry in entries] == expected[:2]
    for entry in entries:
        image = evaluator.counts[entry["image_id"]]
        assert entry["lost"] == pytest.approx(lost[entry["image_id"]])
        assert sum(entry["wrong"].values()) == len(image.wrong)
        assert sum(entry["missed"].values()) == len(image.missed)


def test_perfect_maps_and_maps_without_segments(tmp_path: Path) -> None:
    one = evaluated(tmp_path, scene(["1122"], {1: CAT, 2: SEA}, ["1122"], {1: CAT, 2: SEA}))
    content = panoptic_document(one.counts, one.summarize(), 5)
    assert content["worst"] == []
    assert {cause["lost"] for cause in content["causes"].values()} == {0.0}
    empty = evaluated(tmp_path, scene(["...."], {}, ["...."], {}))
    content = panoptic_document(empty.counts, empty.summarize(), 5)
    assert content["pq"] is None
    assert content["worst"] == []
    assert worst_maps({3: SegmentMatches((), (), (), ())}, 5) == []
