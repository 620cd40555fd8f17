"""Reliability, coverage, confused classes and likely label errors of a classifier, against loops."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from detr_bf.classification.error_summary import classification_errors, coverage_accuracy, likely_label_errors
from detr_bf.classification.metrics import ClassificationEvaluator, Predictions
from detr_bf.classification.page import CLASSIFICATION_PAGE
from detr_bf.common.errors import InputError
from detr_bf.common.files import SUSPECTS_FILE, write_json
from detr_bf.report import save_picture, write_report
from tests.classification.test_metrics import batch, class_map
from tests.report.page import Page

CLASSES = 5
NAMES = [f"class {number}" for number in range(CLASSES)]
CASES = [(seed, ties, broken) for seed in range(6) for ties in (False, True) for broken in (False, True)]


def random_case(seed: int, ties: bool, broken: bool) -> tuple[list[int], Tensor, Predictions]:
    """Return labels, logits and predictions of 80 images; class 4 labels no image but is predicted."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES - 1, (80,), generator=generator)
    logits = torch.randn(80, CLASSES, generator=generator)
    logits[torch.arange(80), labels] += 1.0
    if ties:
        logits = logits.round()
    if broken:
        logits[::9, 2] = math.nan
    evaluator = ClassificationEvaluator(class_map(CLASSES), [30] * CLASSES)
    evaluator.update(batch(labels.tolist(), 100), logits)
    return labels.tolist(), logits, evaluator.predictions()


def shares_of(row: Tensor) -> list[float]:
    total = sum(math.exp(value) for value in row.tolist())
    return [math.exp(value) / total for value in row.tolist()]


def test_a_score_equal_to_the_mean_of_its_class_is_enough() -> None:
    """Needed for classes with a single labelled image; a smaller score is not enough."""
    labels, predicted = torch.tensor([1, 0, 0]), torch.tensor([1, 1, 1])
    scores, true_scores = torch.tensor([0.75, 0.75, 0.7]), torch.tensor([0.75, 0.25, 0.3])
    assert likely_label_errors(Predictions(torch.arange(3), labels, predicted, scores, true_scores), 2) == [1]


@pytest.mark.parametrize(("seed", "ties", "broken"), CASES)
def test_likely_label_errors_equal_loops(seed: int, ties: bool, broken: bool) -> None:
    labels, logits, predictions = random_case(seed, ties, broken)
    known = [n for n in range(80) if bool(logits[n].isfinite().all())]
    shares = {n: shares_of(logits[n]) for n in known}
    means = {}
    for label in set(labels):
        own = [shares[n][label] for n in known if labels[n] == label]
        means[label] = sum(own) / len(own)
    expected = {}
    for n in known:
        guess = max(range(CLASSES), key=lambda c: (shares[n][c], -c))
        if guess != labels[n] and guess in means and shares[n][guess] >= means[guess]:
            expected[n] = shares[n][guess] - shares[n][labels[n]]
    found = likely_label_errors(predictions, CLASSES)
    assert sorted(found) == sorted(expected)
    assert len(found) > 0
    margins = [expected[n] for n in found]
    assert margins == pytest.approx(sorted(margins, reverse=True), abs=1e-6)


@pytest.mark.parametrize(("seed", "ties", "broken"), CASES)
def test_coverage_equals_the_mean_over_all_orders_of_ties(seed: int, ties: bool, broken: bool) -> None:
    _, _, predictions = random_case(seed, ties, broken)
    scores, right = predictions.scores.numpy(), (predictions.predicted == predictions.labels).numpy()
    confidence = [-1.0 if math.isnan(score) else float(score) for score in scores]
    found = coverage_accuracy(scores, right)
    for percent in (5, 35, 50, 100):  # whole numbers of the 80 images
        wanted, hits, taken = 80 * percent // 100, 0.0, 0
        for value in sorted(set(confidence), reverse=True):
            own = [bool(right[n]) for n in range(80) if confidence[n] == value]
            part = min(len(own), wanted - taken)
            hits += part * sum(own) / len(own)
            taken += part
        assert found[percent - 1] == pytest.approx(hits / wanted)
    assert found[-1] == pytest.approx(right.mean())
    shuffled = np.random.default_rng(seed).permutation(80)
    np.testing.assert_allclose(coverage_accuracy(scores[shuffled], right[shuffled]), found)


def test_coverage_by_hand() -> None:
    found = coverage_accuracy(np.array([0.9, 0.5, 0.5, math.nan]), np.array([True, True, False, False]))
    assert found[[0, 24]].tolist() == [1.0, 1.0]
    assert found[[49, 74, 99]].tolist() == pytest.approx([0.75, 2 / 3, 0.5])
    assert coverage_accuracy(np.array([0.3]), np.array([True])).tolist() == [1.0] * 100


@pytest.mark.parametrize(("seed", "ties", "broken"), CASES)
def test_the_document_equals_loops(seed: int, ties: bool, broken: bool) -> None:
    labels, logits, predictions = random_case(seed, ties, broken)
    content = classification_errors(predictions, NAMES, 7)
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(15)]
    mistakes, pairs, finite = [], Counter[tuple[int, int]](), 0
    for n, label in enumerate(labels):
        if not bool(logits[n].isfinite().all()):
            continue
        finite += 1
        shares = shares_of(logits[n])
        guess = max(range(CLASSES), key=lambda c: (shares[c], -c))
        bins[math.ceil(15 * shares[guess]) - 1].append((shares[guess], guess == label))
        if guess != label:
            pairs[label, guess] += 1
            mistakes.append((shares[guess], 100 + n))
    drawn = content["reliability"]
    assert drawn["counts"] == [len(own) for own in bins]
    for at, own in enumerate(bins):
        expected = [sum(column) / len(own) for column in zip(*own, strict=True)] if own else [None, None]
        assert [drawn["scores"][at], drawn["precision"][at]] == pytest.approx(expected, abs=1e-6)
    gaps = [abs(sum(score - right for score, right in own)) for own in bins]
    assert drawn["error"] == pytest.approx(sum(gaps) / finite, abs=1e-6)
    assert content["not_finite"] == 80 - finite
    assert content["wrong"] == len(mistakes) + 80 - finite
    listed = {(pair["label"], pair["predicted"]): pair for pair in content["pairs"]}
    assert {key: pair["images"] for key, pair in listed.items()} == pairs
    assert [pair["images"] for pair in content["pairs"]] == sorted(pairs.values(), reverse=True)
    for (label, guess), pair in listed.items():
        assert pair["share"] == pytest.approx(pair["images"] / labels.count(label))
        assert pair["reverse"] == pairs[guess, label]
    best = sorted((score for score, _ in mistakes), reverse=True)[:7]
    assert [entry["score"] for entry in content["mistakes"]] == pytest.approx(best)
    for entry in (*content["mistakes"], *content["suspects"]):
        shares = shares_of(logits[entry["index"] - 100])
        assert labels[entry["index"] - 100] == entry["label"]
        assert entry["score"] == pytest.approx(shares[entry["predicted"]], abs=1e-6)
        assert entry["true_score"] == pytest.approx(shares[entry["label"]], abs=1e-6)
    suspects = likely_label_errors(predictions, CLASSES)
    assert content["likely_label_errors"] == len(suspects)
    assert [entry["index"] - 100 for entry in content["suspects"]] == suspects[:7]


def test_one_wrong_label_among_confident_images_is_found() -> None:
    labels = [0, 0, 0, 1, 1, 1]
    logits = torch.tensor([[4.0, 0], [4, 0], [0, 5], [0, 4], [0, 4], [1, 0]])  # the third is a 1, the last is doubtful
    evaluator = ClassificationEvaluator(class_map(2), [3, 3])
    evaluator.update(batch(labels), logits)
    assert likely_label_errors(evaluator.predictions(), 2) == [2, 5], (
        "0.73 is more than the mean probability of class 0"
    )
    evaluator = ClassificationEvaluator(class_map(2), [3, 3])
    evaluator.update(batch([*labels, 0, 0, 0, 0]), torch.cat([logits, torch.tensor([[4.0, 0]] * 4)]))
    assert likely_label_errors(evaluator.predictions(), 2) == [2]


def test_no_mistakes_and_no_finite_logits() -> None:
    evaluator = ClassificationEvaluator(class_map(2), [3, 3])
    evaluator.update(batch([0, 1]), torch.tensor([[4.0, 0], [0, 4]]))
    perfect = evaluator.predictions()
    content = classification_errors(perfect, NAMES[:2], 5)
    assert (content["pairs"], content["mistakes"], content["suspects"], content["wrong"]) == ([], [], [], 0)
    nothing = replace(
        perfect,
        predicted=torch.tensor([-1, -1]),
        scores=torch.full((2,), math.nan),
        true_scores=torch.full((2,), math.nan),
    )
    content = classification_errors(nothing, NAMES[:2], 5)
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["reliability"]["error"] is None
    assert content["coverage"] == [0.0] * 100
    assert content["not_finite"] == content["wrong"] == 2


def report(folder: Path, content: Any) -> list[str]:
    write_json(folder / "errors.json", content)
    return Page(write_report(folder, CLASSIFICATION_PAGE).read_text()).texts


def test_the_page_shows_the_errors(tmp_path: Path) -> None:
    content = classification_errors(random_case(0, False, False)[2], ["<b>cat</b>", *NAMES[1:]], 3)
    for entry in (*content["mistakes"], *content["suspects"]):
        entry["file"] = None if entry is content["mistakes"][0] else "dog/<i>7</i>.png"
    save_picture(tmp_path / SUSPECTS_FILE, torch.zeros(3, 4, 4, dtype=torch.uint8))
    texts = report(tmp_path, content)
    first, pair = content["mistakes"][0], content["pairs"][0]
    names = content["classes"]
    at = [at for at, text in enumerate(texts) if text == "Most confident mistakes"][-1] + 6
    expected = [f"image {first['index']}", names[first["label"]], names[first["predicted"]]]
    assert texts[at : at + 5] == [*expected, f"{100 * first['score']:.1f}", f"{100 * first['true_score']:.1f}"]
    assert "dog/<i>7</i>.png" in texts
    at = texts.index(f"{names[pair['label']]} taken for {names[pair['predicted']]}")
    assert texts[at + 1 : at + 4] == [f"{pair['images']}", f"{100 * pair['share']:.1f}", f"{pair['reverse']}"]
    assert {"Labels to check", "Reliability"} <= set(texts)
    assert any(text.startswith(f"{content['likely_label_errors']} images of 80") for text in texts)
    assert {"Accuracy by probability, with the number of images", "Accuracy of the most confident images"} <= set(texts)


def test_sections_without_content_are_left_out(tmp_path: Path) -> None:
    assert any(
        "errors.json is missing" in text for text in Page(write_report(tmp_path, CLASSIFICATION_PAGE).read_text()).texts
    )
    evaluator = ClassificationEvaluator(class_map(2), [3, 3])
    evaluator.update(batch([0, 1]), torch.tensor([[4.0, 0], [0, 4]]))
    texts = report(tmp_path, classification_errors(evaluator.predictions(), NAMES[:2], 5))
    assert "Reliability" in texts
    assert not {"Most confident mistakes", "Most frequently confused classes", "Labels to check"} & set(texts)


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"classes": 3}'])
def test_a_damaged_file_is_told(tmp_path: Path, damage: str) -> None:
    (tmp_path / "errors.json").write_text(damage)
    with pytest.raises(InputError, match=r"errors\.json is damaged"):
        write_report(tmp_path, CLASSIFICATION_PAGE)
