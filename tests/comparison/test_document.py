"""The result document: numbers, verdicts and sentences."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from detr_bf.common.errors import InputError
from detr_bf.comparison.document import analyze
from detr_bf.comparison.statistics import holm, student_estimate
from detr_bf.comparison.tables import ClassifierTable

ARMS = {"off": [], "good": ["a.b=2"], "same": ["a.b=3", "c=true"]}
Record = dict[str, Any]


def a_cell(arm: str, seed: int, fold: int | None = None, accuracy: float = 0.6, images: int = 200) -> Record:
    """Return a record of a classifier that is right on about this share of the images."""
    rng = np.random.default_rng([seed, 9 if fold is None else fold, len(arm)])
    common = np.random.default_rng(0 if fold is None else fold).random(images)  # images are easy or hard for all
    labels = np.arange(images) % 4
    right = 0.6 * common + 0.4 * rng.random(images) < accuracy
    first = 0 if fold is None else 1000 * fold
    table = ClassifierTable(
        tuple(range(first, first + images)), labels, np.where(right, labels, (labels + 1) % 4), ("many",) * 3 + ("few",)
    )
    top1 = float(right.mean())
    return {
        "format": "detr_bf cell 1",
        "arm": arm,
        "seed": seed,
        "fold": fold,
        "settings": {"a.b": {"off": 1, "good": 2}.get(arm, 3), "c": arm == "same", "lr": 0.1, "seed": seed},
        "metrics": {"top1": top1},
        "curve": [
            {"epoch": epoch, "step": 10 * epoch, "metrics": {"top1": top1 * epoch / 3 if epoch > 1 else None}}
            for epoch in (1, 2, 3)
        ],
        "cost": {
            "train_seconds": 10.0,
            "steps": 30,
            "step_seconds": {"off": 0.2, "good": 0.4}.get(arm, 0.3) * (1 + 0.01 * seed),
            "peak_memory_mib": {"off": 100}.get(arm, 150),
            "device_memory_mib": None,
            "rows": 8 if arm == "off" else 16,
        },
        "machine": {"command": f"train {arm} {seed}", "CPU": "one", "torch": "2.9", "numpy": "2.0"},
        "data": {"train": {"sha256": "ab", "images": 4 * images}, "val": {"sha256": f"cd{fold}", "images": images}},
        "table": table.to_dict(),
    }


SHARES = {"off": 0.55, "good": 0.65, "same": 0.55}


def some_cells(seeds: int = 5, folds: int = 0) -> list[Record]:
    return [
        a_cell(arm, seed, fold, SHARES[arm])
        for arm in ARMS
        for seed in range(seeds)
        for fold in (range(folds) if folds else (None,))
    ]


def document_of(cells: list[Record], **options: Any) -> dict[str, Any]:
    given = {"title": "a title", "baseline": "off", "arms": ARMS, "resamples": 300} | options
    found = analyze(cells, **given)
    assert json.loads(json.dumps(found, allow_nan=False)) == found, "plain JSON values"
    return found


def primary_of(document: dict[str, Any], arm: str) -> dict[str, Any]:
    [found] = [each for each in document["differences"] if each["arm"] == arm]
    return found["metrics"][document["primary"]]


def test_numbers_and_verdicts() -> None:
    cells = some_cells()
    document = document_of(cells)
    assert (document["format"], document["title"]) == ("detr_bf comparison 1", "a title")
    assert (document["baseline"], document["primary"], document["confidence"]) == ("off", "top1", 0.95)
    values = {arm: [c["metrics"]["top1"] for c in cells if c["arm"] == arm] for arm in ARMS}
    for arm, own in zip(document["arms"], ARMS, strict=True):
        assert (arm["name"], arm["overrides"]) == (own, ARMS[own])
        assert arm["cells"] == [[seed, None] for seed in range(5)]
        top1 = arm["metrics"]["top1"]
        assert top1["values"] == pytest.approx(values[own])
        low, high = student_estimate(values[own]).interval() or (0, 0)
        assert (top1["mean"], top1["low"], top1["high"]) == pytest.approx((np.mean(values[own]), low, high))
    good, same = primary_of(document, "good"), primary_of(document, "same")
    assert (good["verdict"], same["verdict"]) == ("better", "undecided")
    assert good["values"] == pytest.approx(np.subtract(values["good"], values["off"]))
    assert good["both"]["low"] > 0
    assert same["both"]["low"] < 0 < same["both"]["high"]
    assert [good["p_holm"], same["p_holm"]] == pytest.approx(holm([good["p"], same["p"]]))
    assert good["p_sign_flip"] == 0.0625
    assert 0 < good["detectable"] < 0.2
    widths = [good[kind]["high"] - good[kind]["low"] for kind in ("seeds", "images", "both")]
    assert widths[2] >= widths[0] * 0.8
    assert document["differences"][0]["metrics"]["balanced"]["p_holm"] is None


def test_the_document_depends_on_its_arguments_alone() -> None:
    cells = some_cells(3)
    first = document_of(cells)
    assert document_of(cells[::-1]) == first
    assert document_of(cells, seed=1) != first


def test_worse_and_the_correction_for_several_arms() -> None:
    turned = document_of(some_cells(), baseline="good")
    assert primary_of(turned, "off")["verdict"] == "worse"
    assert primary_of(turned, "off")["mean"] == pytest.approx(-primary_of(document_of(some_cells()), "good")["mean"])
    # one arm just below 5 %: with a second arm it is not called different
    for share in np.arange(0.56, 0.65, 0.001):
        cells = [a_cell(arm, seed, None, {"good": share}.get(arm, 0.55)) for arm in ARMS for seed in range(5)]
        alone = primary_of(document_of([c for c in cells if c["arm"] != "same"]), "good")
        if 0.025 < alone["p"] < 0.05:
            break
    else:
        pytest.fail("no share with such a p")
    assert (alone["verdict"], alone["p_holm"]) == ("better", alone["p"])
    found = document_of(cells)
    both = primary_of(found, "good")
    assert both["p_holm"] >= 0.05
    assert both["verdict"] == "undecided"
    assert any("after correction for the number of comparisons" in sentence for sentence in found["sentences"])


def test_sentences() -> None:
    document = document_of(some_cells())
    good, first = primary_of(document, "good"), document["sentences"][0]
    assert first == (
        f"good minus off: top1 {good['mean']:+.3f}, 95 % interval {good['both']['low']:+.3f} to "
        f"{good['both']['high']:+.3f} for new seeds and new images (5 seeds, 200 images): better. Runs and images with "
        f"this spread tell a difference of {good['detectable']:.3f} or more with 80 % power."
    )
    text = " ".join(document["sentences"])
    assert "cannot be below 0.0625" in text
    assert "adjusted for 2 comparisons (Holm)" in text
    assert "Exploratory: of 6 comparisons in other metrics" in text
    assert "Exploratory: good is better than off in balanced" in text


def test_common_pairs_are_compared() -> None:
    cells = [c for c in some_cells() if (c["arm"], c["seed"]) not in (("good", 1), ("off", 4))]
    document = document_of(cells)
    [good, same] = document["differences"]
    assert (good["pairs"], same["pairs"]) == ([[s, None] for s in (0, 2, 3)], [[s, None] for s in (0, 1, 2, 3)])
    text = " ".join(document["sentences"])
    assert "seed 1, seed 4 are not in both good and off: the difference is that of the 3 common pairs." in text
    assert "seed 4 is not in both same and off" in text
    alone = document_of([a_cell("off", 0), a_cell("good", 1)])
    assert alone["differences"] == []
    assert "good is not compared" in alone["sentences"][0]
    assert "left out: same." in alone["sentences"][1]


def test_one_pair_is_never_decided() -> None:
    document = document_of([a_cell("off", 0, None, 0.3), a_cell("good", 0, None, 0.9)])
    good = primary_of(document, "good")
    assert good["images"]["low"] > 0.2
    assert good["both"] == good["seeds"] == {"low": None, "high": None}
    assert (good["verdict"], good["p"], good["p_holm"], good["detectable"]) == ("undecided", None, None, None)
    assert "One pair does not tell" in document["sentences"][0]
    assert document["arms"][0]["metrics"]["top1"]["low"] is None


def test_folds() -> None:
    document = document_of(some_cells(seeds=2, folds=5))
    assert document["arms"][0]["cells"][:3] == [[0, 0], [0, 1], [0, 2]]
    good = primary_of(document, "good")
    assert len(good["values"]) == 10
    means = np.array(good["values"]).reshape(2, 5).mean(0)
    width = 2 * 2.776445105 * means.std(ddof=1) * np.sqrt(1 / 5 + 1 / 4)
    assert good["seeds"]["high"] - good["seeds"]["low"] == pytest.approx(width)
    assert "(5 folds and 2 seeds, 10 pairs, 1,000 images)" in document["sentences"][0]
    assert "val, fold 3" in document["circumstances"]["data"]
    one = document_of(some_cells(seeds=1, folds=5))
    assert "(5 folds with one seed each, 1,000 images)" in one["sentences"][0]


def test_curves_costs_settings_and_circumstances() -> None:
    cells = some_cells()
    cells[0]["machine"]["chosen for its steps"] = "train.ema.decay=0.98"  # by the settings, not by the machine
    document = document_of(cells)
    off, good, _ = document["arms"]
    assert [(point["epoch"], point["count"]) for point in off["curve"]] == [(2, 5), (3, 5)]
    assert off["curve"][1]["mean"] == off["metrics"]["top1"]["mean"]
    assert off["cost"]["step_seconds_ratio"] == pytest.approx({"mean": 1, "low": 1, "high": 1})
    assert good["cost"]["step_seconds_ratio"]["mean"] == pytest.approx(2)
    assert good["cost"]["memory_ratio"]["mean"] == pytest.approx(1.5)
    assert good["cost"]["rows_ratio"] == 2
    assert document["settings"] == [
        {"key": "a.b", "values": {"off": 1, "good": 2, "same": 3}},
        {"key": "c", "values": {"off": False, "good": False, "same": True}},
    ]
    circumstances = document["circumstances"]
    assert circumstances["machines"] == [{"CPU": "one"}]
    assert circumstances["versions"] == {"torch": "2.9", "numpy": "2.0"}
    assert circumstances["commands"] == [f"train {arm} {seed}" for arm in ARMS for seed in range(5)]
    assert circumstances["data"] == {"train": cells[0]["data"]["train"], "val": cells[0]["data"]["val"]}
    for cell in cells:
        cell["data"]["train"]["sha256"] = f"drawn by {cell['seed']}"
    drawn = document_of(cells)["circumstances"]["data"]
    assert list(drawn) == [*(f"train, seed {seed}" for seed in range(5)), "val"]
    assert drawn["train, seed 3"]["sha256"] == "drawn by 3"
    cells[0]["settings"]["lr"], cells[0]["machine"]["CPU"] = 0.2, "another"
    for cell in cells:
        cell["cost"] |= {"step_seconds": None, "peak_memory_mib": None, "rows": None}
    changed = document_of(cells)
    text = " ".join(changed["sentences"])
    assert "The cells of off have different values of lr: 0.2, 0.1." in text
    assert "ran on different machines" in text
    assert changed["arms"][1]["cost"]["memory_ratio"] == {"mean": None, "low": None, "high": None}


def test_bad_cells_are_refused() -> None:
    cells = some_cells(2)
    with pytest.raises(InputError, match="given twice"):
        document_of([*cells, cells[0]])
    with pytest.raises(InputError, match="baseline 'other' has no finished cell; arms with finished cells: off, good"):
        document_of(cells, baseline="other")
    with pytest.raises(InputError, match="no finished cell; arms with finished cells: none"):
        document_of([])
    with pytest.raises(InputError, match="metric 'AP' was not measured; measured are top1"):
        document_of(cells, primary="AP")
    other_images = [*cells[:-1], a_cell("same", 1, images=100)]
    with pytest.raises(InputError, match="arm same, seed 1: it was evaluated on other images than the cell of arm off"):
        document_of(other_images)
    damaged = [{**cells[0], "table": {**cells[0]["table"], "labels": None}}, *cells[1:]]
    with pytest.raises(InputError, match="the cell of arm off, seed 0: the table of per-image results is damaged"):
        document_of(damaged)
    boxes = {"kind": "panoptic", "image_ids": [1], "is_thing": [1]}
    boxes |= {"iou": {"dtype": "<f8", "shape": [1, 1], "data": ""}, "counts": {}}
    with pytest.raises(InputError, match="damaged"):
        document_of([*cells[:-1], {**cells[-1], "table": boxes}])


def test_contrasts_equal_the_difference_from_another_baseline() -> None:
    cells = some_cells()
    found = document_of(cells, contrasts=[("good", "same")])
    [contrast] = found["contrasts"]
    turned = document_of(cells, baseline="same")
    [expected] = [own for own in turned["differences"] if own["arm"] == "good"]
    assert (contrast["arm"], contrast["against"], contrast["pairs"]) == ("good", "same", expected["pairs"])
    for metric, own in contrast["metrics"].items():
        alone = expected["metrics"][metric]
        assert {k: own[k] for k in ("mean", "values", "both", "p")} == {
            k: alone[k] for k in ("mean", "values", "both", "p")
        }
    compared = [*found["differences"], contrast]
    assert len(compared) == 3
    adjusted = holm([own["metrics"]["top1"]["p"] for own in compared])
    assert [own["metrics"]["top1"]["p_holm"] for own in compared] == adjusted
    assert any(sentence.startswith("good minus same: top1 +") for sentence in found["sentences"])
    assert not document_of(cells, contrasts=[("good", "off")])["contrasts"], (
        "differences from the baseline exist anyway"
    )
    assert not document_of(cells, contrasts=[("good", "absent")])["contrasts"]


def test_contrasts_alone_are_one_family() -> None:
    found = document_of(some_cells(), contrasts=[("good", "same"), ("same", "off")], contrasts_only=True)
    [from_baseline], [contrast] = found["differences"], found["contrasts"]
    assert [(own["arm"], own["against"]) for own in (from_baseline, contrast)] == [("same", "off"), ("good", "same")]
    both = [own["metrics"]["top1"] for own in (contrast, from_baseline)]
    assert [own["p_holm"] for own in both] == holm([own["p"] for own in both])
    assert not any("is not compared" in sentence for sentence in found["sentences"])
    assert all(arm["cost"]["rows_ratio"] for arm in found["arms"]), "costs are relative to the baseline"
