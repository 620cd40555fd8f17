"""Accuracy of classifiers compared with slow loops and numbers worked out by hand; the loss of masked autoencoders."""

from __future__ import annotations

import csv
import json
import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from detr_bf.classification.batch import ClassTargets, LabelledImages
from detr_bf.classification.metrics import (
    ClassificationEvaluator,
    ClassificationResult,
    ReconstructionEvaluator,
    ReconstructionResult,
    reliability,
    write_predictions,
)
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap


def class_map(count: int) -> ClassMap:
    return ClassMap(tuple(range(count)), tuple(f"class {c}" for c in range(count)))


def batch(labels: list[int], first: int = 0) -> LabelledImages:
    indices = torch.arange(first, first + len(labels))
    return LabelledImages(torch.zeros(len(labels), 3, 1, 1), ClassTargets(torch.tensor(labels)), indices)


def evaluator(count: int, train_images: int = 50) -> ClassificationEvaluator:
    return ClassificationEvaluator(class_map(count), [train_images] * count)


def one_hot(classes: list[int], count: int) -> Tensor:
    return 4.0 * torch.nn.functional.one_hot(torch.tensor(classes), count).float()


def many_images(seed: int = 0, count: int = 300, classes: int = 8) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    logits = torch.randn(count, classes, generator=generator) + 1.5 * one_hot(labels.tolist(), classes) / 4
    return labels.tolist(), logits


def test_groups_are_means_of_their_classes_by_hand() -> None:
    """Classes of 101, 100, 20 and 19 training images; 1 of 1, 1 of 2, 0 of 1 and 3 of 4 images are right."""
    measured = ClassificationEvaluator(class_map(4), [101, 100, 20, 19])
    measured.update(batch([0, 1, 1, 2, 3, 3, 3, 3]), one_hot([0, 1, 0, 3, 3, 3, 3, 1], 4))
    result = measured.summarize()
    assert (result.many, result.medium, result.few) == (1.0, 0.25, 0.75)
    assert result.top1 == result.score == 5 / 8
    assert result.balanced == (1 + 0.5 + 0 + 0.75) / 4
    assert result.top5 is None, "with four classes, top-5 would always be right"
    assert [c.group for c in result.per_class.values()] == ["many", "medium", "medium", "few"]
    assert result.confusion == ((1, 0, 0, 0), (1, 1, 0, 0), (0, 0, 0, 1), (0, 1, 0, 3))
    assert str(result) == "top-1 0.625  many 1.000  medium 0.250  few 0.750"


def test_every_number_equals_that_of_a_slow_loop() -> None:
    labels, logits = many_images()
    measured = evaluator(8)
    for start in range(0, 300, 70):
        measured.update(batch(labels[start : start + 70], start), logits[start : start + 70])
    result = measured.summarize()
    top1 = top5 = loss = 0.0
    right_of: dict[int, list[bool]] = {c: [] for c in range(8)}
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(15)]
    for label, row in zip(labels, logits.double().tolist(), strict=True):
        order = sorted(range(8), key=lambda c: -row[c])
        shares = [math.exp(value) / sum(math.exp(other) for other in row) for value in row]
        top1 += order[0] == label
        top5 += label in order[:5]
        loss -= math.log(shares[label])
        right_of[label].append(order[0] == label)
        bins[math.ceil(15 * max(shares)) - 1].append((max(shares), order[0] == label))
    surplus = (abs(sum(right - share for share, right in members)) for members in bins)
    assert result.top1 == pytest.approx(top1 / 300, abs=1e-12)
    assert result.top5 == pytest.approx(top5 / 300, abs=1e-12)
    assert result.balanced == pytest.approx(np.mean([np.mean(r) for r in right_of.values()]), abs=1e-12)
    assert result.loss == pytest.approx(loss / 300, rel=1e-5)
    assert result.ece == pytest.approx(sum(surplus) / 300, rel=1e-5)
    assert [c.images for c in result.per_class.values()] == [len(right_of[c]) for c in range(8)]
    assert result.many is None
    assert result.medium == result.balanced
    assert 0.2 < result.top1 < result.top5 < 1


def test_several_labels_of_an_image_as_a_slow_loop() -> None:
    """ReaL: right if the highest logit is that of one of the labels; images in any order."""
    first, logits = many_images(2)
    generator = torch.Generator().manual_seed(3)
    sets = [sorted({label, *torch.randint(0, 8, (2,), generator=generator).tolist()}) for label in first]
    measured = ClassificationEvaluator(class_map(8), [50] * 8, label_sets=sets)
    for start in (150, 0):
        measured.update(batch(first[start : start + 150], start), logits[start : start + 150])
    result, predictions = measured.summarize(), measured.predictions()
    top1 = top5 = loss = 0.0
    for number, row in enumerate(logits.double().tolist()):
        order = sorted(range(8), key=lambda c: -row[c])
        total = sum(math.exp(value) for value in row)
        top1 += order[0] in sets[number]
        top5 += any(label in order[:5] for label in sets[number])
        loss -= math.log(max(math.exp(row[label]) for label in sets[number]) / total)
        assert int(predictions.labels[number]) == max(sets[number], key=lambda c: row[c])
    assert result.top1 == pytest.approx(top1 / 300, abs=1e-12)
    assert result.top5 == pytest.approx(top5 / 300, abs=1e-12)
    assert result.loss == pytest.approx(loss / 300, rel=1e-5)
    alone = evaluator(8)
    alone.update(batch(first), logits)
    assert alone.summarize().top1 < result.top1


def test_a_subset_of_the_classes_as_a_slow_loop() -> None:
    """ImageNet-A: the highest logit among the classes of the images, whatever the others say."""
    labels, logits = many_images(4)
    scored = (1, 2, 5, 6, 7, 0)
    chosen = [number for number, label in enumerate(labels) if label in scored]
    measured = ClassificationEvaluator(class_map(8), [50] * 8, scored_classes=scored)
    measured.update(batch([labels[number] for number in chosen]), logits[chosen])
    result = measured.summarize()
    top1 = top5 = loss = 0.0
    for number in chosen:
        row = logits[number].double().tolist()
        order = sorted(scored, key=lambda c: -row[c])
        top1 += order[0] == labels[number]
        top5 += labels[number] in order[:5]
        loss -= math.log(math.exp(row[labels[number]]) / sum(math.exp(row[c]) for c in scored))
    assert result.top1 == pytest.approx(top1 / len(chosen), abs=1e-12)
    assert result.top5 == pytest.approx(top5 / len(chosen), abs=1e-12)
    assert result.loss == pytest.approx(loss / len(chosen), rel=1e-5)
    assert result.per_class["class 3"].accuracy is None
    with pytest.raises(InputError, match="cannot be merged"):
        measured.merge(evaluator(8))
    few = ClassificationEvaluator(class_map(8), [50] * 8, scored_classes=(0, 1, 2, 3, 4))
    few.update(batch([0]), one_hot([7], 8))
    assert (few.summarize().top1, few.summarize().top5) == (1.0, None)


def test_logits_that_are_not_finite_count_as_wrong_with_several_labels() -> None:
    measured = ClassificationEvaluator(class_map(6), [1] * 6, label_sets=[[0, 2], [1, 3]], scored_classes=[0, 1, 2, 3])
    logits = one_hot([0, 3], 6)
    logits[0, 5] = math.nan
    measured.update(batch([2, 1]), logits)
    assert (measured.summarize().top1, measured.summarize().num_not_finite) == (0.5, 1)
    assert measured.predictions().labels.tolist() == [2, 3]


def test_calibration_by_hand() -> None:
    """Bins of width 0.2: three images of confidence 0.9, one of them right; two of confidence 0.45, both right."""
    scores = torch.tensor([0.9, 0.9, 0.9, 0.45, 0.45], dtype=torch.float64)
    right = torch.tensor([True, False, False, True, True])
    assert reliability(scores, right, bins=5).error == pytest.approx((3 * (0.9 - 1 / 3) + 2 * (1 - 0.45)) / 5)
    shared = reliability(torch.tensor([0.5, 0.3]), torch.tensor([True, False]), bins=4).error
    assert shared == pytest.approx((0.5 - 0.3) / 2), "an upper edge belongs to its bin, so that its errors cancel"


def test_of_equal_logits_the_first_class_counts_as_the_higher() -> None:
    measured = evaluator(8)
    measured.update(batch([0, 4, 5]), torch.zeros(3, 8))
    result = measured.summarize()
    assert result.top1 == pytest.approx(1 / 3)
    assert result.top5 == pytest.approx(2 / 3)


def test_however_a_split_is_divided_the_result_is_the_same_bit_for_bit() -> None:
    labels, logits = many_images(1)
    whole = evaluator(8)
    whole.update(batch(labels), logits)
    shards = []
    for first in (200, 90, 0):  # two ranks evaluate images 90 to 99
        shard = evaluator(8)
        last = min(first + 110, 300)
        shard.update(batch(labels[first:last], first), logits[first:last])
        shards.append(pickle.loads(pickle.dumps(shard)))
    for other in shards[1:]:
        shards[0].merge(other)
    assert shards[0].summarize() == whole.summarize()
    assert whole.summarize().num_images == 300


def test_an_image_seen_again_stays_as_it_is() -> None:
    first, second = evaluator(6), evaluator(6)
    first.update(batch([1]), one_hot([1], 6))
    first.update(batch([1]), one_hot([2], 6))
    second.update(batch([1]), one_hot([3], 6))
    first.merge(second)
    assert first.summarize().top1 == 1.0
    assert first.summarize().num_images == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_count_as_wrong_and_are_told(value: float) -> None:
    measured = evaluator(6)
    logits = one_hot([0, 1], 6)
    logits[0, 0] = value  # argmax would count NaN and infinity as the right class
    measured.update(batch([0, 1]), logits)
    result = measured.summarize()
    assert (result.top1, result.top5, result.balanced) == (0.5, 0.5, 0.5)
    assert result.num_not_finite == 1
    assert result.loss is None
    assert result.ece is None
    assert result.per_class["class 0"].images == 1
    assert result.confusion is not None
    assert sum(map(sum, result.confusion)) == 1
    assert "1 of 2 images without finite logits" in str(result)
    json.dumps(result.to_dict(), allow_nan=False)


def test_results_survive_json() -> None:
    labels, logits = many_images()
    measured = ClassificationEvaluator(class_map(8), [500, 200, 90, 50, 30, 19, 3, 0])
    measured.update(batch(labels), logits)
    result = measured.summarize()
    assert ClassificationResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert set(result.metrics) == {"top1", "top5", "many", "medium", "few", "balanced", "ece", "loss"}


def test_a_class_without_images_enters_no_mean_and_over_100_classes_have_no_confusion_matrix() -> None:
    measured = evaluator(101)
    measured.update(batch([3, 7]), one_hot([3, 8], 101))
    result = measured.summarize()
    assert result.balanced == 0.5
    assert result.per_class["class 0"].accuracy is None
    assert result.confusion is None
    assert ClassificationResult.from_dict(result.to_dict()) == result
    assert str(result) == "top-1 0.500  medium 0.500", "groups without classes are not shown"


def test_half_precision_logits_are_read_as_float32() -> None:
    labels, logits = many_images()
    half, full = evaluator(8), evaluator(8)
    half.update(batch(labels), logits.bfloat16())
    full.update(batch(labels), logits.bfloat16().float())
    assert half.summarize() == full.summarize()


def test_predictions_are_found_by_confidence_and_written(tmp_path: Path) -> None:
    measured = ClassificationEvaluator(ClassMap((0, 1, 2), ("cat", "a, b", "cat")), [1, 1, 1])
    logits = torch.tensor([[3.0, 0, 0], [0, 2.0, 0], [1.0, 0, 0], [0, 0, 5.0], [math.nan, 0, 0]])
    measured.update(batch([0, 1, 1, 1, 2], first=10), logits)
    predictions = measured.predictions()
    assert predictions.most_confident(right=True, count=5) == [0, 1]
    assert predictions.most_confident(right=False, count=5) == [3, 2]
    assert predictions.most_confident(right=False, count=1) == [3]
    write_predictions(tmp_path / "predictions.csv", predictions, measured.class_map)
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open(newline="")))
    assert [row["index"] for row in rows] == ["10", "11", "12", "13", "14"]
    assert [row["class"] for row in rows] == ["cat (0)", "a, b", "a, b", "a, b", "cat (2)"]
    assert [row["predicted"] for row in rows] == ["cat (0)", "a, b", "cat (0)", "cat (2)", ""]
    assert float(rows[0]["score"]) == pytest.approx(math.exp(3) / (math.exp(3) + 2), abs=1e-6)
    assert rows[4]["score"] == ""


def test_names_in_the_table_are_no_formulas(tmp_path: Path) -> None:
    names = ("=1+1", "@cmd", "-2", "a\x1b[2J\udcff")
    measured = ClassificationEvaluator(ClassMap((0, 1, 2, 3), names), [1] * 4)
    measured.update(batch([0, 1, 2, 3]), one_hot([1, 0, 3, 2], 4))
    write_predictions(tmp_path / "predictions.csv", measured.predictions(), measured.class_map)
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open(newline="", encoding="utf-8")))
    assert [row["class"] for row in rows] == ["'=1+1", "'@cmd", "'-2", r"a\x1b[2J\udcff"]
    assert [row["predicted"] for row in rows] == ["'@cmd", "'=1+1", r"a\x1b[2J\udcff", "'-2"]


def test_bad_input_is_told() -> None:
    with pytest.raises(InputError, match="must be 3 numbers of training images"):
        ClassificationEvaluator(class_map(3), [1, 2])
    with pytest.raises(InputError, match="0 or more"):
        ClassificationEvaluator(class_map(2), [1, -2])
    with pytest.raises(InputError, match="few <= many, got 30 and 20"):
        ClassificationEvaluator(class_map(2), [1, 2], many=20, few=30)
    measured = evaluator(3)
    with pytest.raises(InputError, match=r"\(2, 3\), images x classes, got \(4, 3\)"):
        measured.update(batch([0, 1]), torch.zeros(4, 3))  # two streams
    with pytest.raises(InputError, match=r"got \(2, 5\)"):
        measured.update(batch([0, 1]), torch.zeros(2, 5))
    for label in (3, -1):
        with pytest.raises(InputError, match=f"image 8 has the label {label}.*from 0 to 2"):
            measured.update(batch([0, label], first=7), torch.zeros(2, 3))
    with pytest.raises(InputError, match="no image was evaluated"):
        measured.summarize()
    with pytest.raises(InputError, match="cannot be merged"):
        measured.merge(evaluator(3, train_images=7))


@dataclass
class Outputs:
    loss_per_image: Tensor


def test_reconstruction_is_the_mean_over_images_seen_once() -> None:
    first, second = ReconstructionEvaluator(), ReconstructionEvaluator()
    first.update(batch([0, 0], first=2), Outputs(torch.tensor([1.0, 2.0])))
    second.update(batch([0, 0], first=3), Outputs(torch.tensor([9.0, 4.5])))
    first.merge(pickle.loads(pickle.dumps(second)))
    result = first.summarize()
    assert result == ReconstructionResult(loss=2.5, num_images=3)
    assert (result.score, result.metrics, str(result)) == (-2.5, {"loss": 2.5}, "loss 2.5000")
    assert ReconstructionResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_reconstruction_tells_losses_that_are_not_finite_and_wrong_shapes() -> None:
    measured = ReconstructionEvaluator()
    with pytest.raises(InputError, match="no image was evaluated"):
        measured.summarize()
    with pytest.raises(InputError, match=r"2 images needs one loss per image.*\(4,\)"):
        measured.update(batch([0, 0]), Outputs(torch.zeros(4)))
    measured.update(batch([0, 0]), Outputs(torch.tensor([1.0, math.nan])))
    result = measured.summarize()
    assert (result.loss, result.score, result.num_not_finite) == (None, -math.inf, 1)
    assert "1 of 2 images without a finite loss" in str(result)
