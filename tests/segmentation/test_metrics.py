"""mIoU and accuracies against counts made with numpy loops, also for panoptic maps and across processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap, PanopticMap, Segment, Target
from detr_bf.evaluation import PanopticEvaluator, PanopticSummary
from detr_bf.evaluation.semantic import SemanticResult, confusion_counts, summarize_counts
from detr_bf.segmentation.batch import IGNORE, SegmentationBatch
from detr_bf.segmentation.criterion import SegmentationEvaluator
from detr_bf.segmentation.network import SegmentationOutputs

CLASSES = ClassMap((0, 1, 2, 3), ("sky", "road", "car", "never"))


def oracle(pairs: list[tuple[np.ndarray, np.ndarray]], classes: int) -> dict[str, object]:
    """Return the metrics by sets of pixels, class by class; a true value outside the classes is left out."""
    ious: dict[int, float] = {}
    accuracies: dict[int, float] = {}
    right = total = 0
    for label in range(classes):
        intersection = union = true = 0
        for truth, found in pairs:
            known = truth < classes
            a, b = (truth == label) & known, (found == label) & known
            intersection += np.logical_and(a, b).sum()
            union += np.logical_or(a, b).sum()
            true += a.sum()
        if union:
            ious[label] = intersection / union
        if true:
            accuracies[label] = intersection / true
        right, total = right + intersection, total + true
    return {
        "mIoU": np.mean(list(ious.values())),
        "mean_accuracy": np.mean(list(accuracies.values())),
        "pixel_accuracy": right / total,
        "ious": ious,
    }


def random_pairs(seed: int, count: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return true and predicted maps; class 3 is never true, and some pixels have no class."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        size = tuple(rng.integers(5, 12, 2))
        truth = rng.choice([0, 1, 2, IGNORE], size, p=[0.5, 0.3, 0.1, 0.1]).astype(np.uint8)
        guess = np.where(rng.random(size) < 0.6, truth, rng.integers(0, 4, size)).astype(np.uint8)
        found.append((truth, np.where(guess == IGNORE, 0, guess).astype(np.uint8)))
    return found


def summary_of(pairs: list[tuple[np.ndarray, np.ndarray]]) -> SemanticResult:
    counts = sum(confusion_counts(torch.from_numpy(a), torch.from_numpy(b), 4).numpy() for a, b in pairs)
    return summarize_counts(np.asarray(counts), CLASSES.distinct_names, len(pairs))


@pytest.mark.parametrize("seed", range(5))
def test_metrics_are_those_of_the_oracle(seed: int) -> None:
    pairs = random_pairs(seed)
    found, wanted = summary_of(pairs), oracle(pairs, 4)
    for name, value in found.metrics.items():
        assert value == pytest.approx(wanted[name], abs=1e-12), name
    for label, iou in wanted["ious"].items():  # type: ignore[attr-defined]
        assert found.per_class[CLASSES.names[label]].iou == pytest.approx(iou, abs=1e-12)


def test_a_class_that_is_neither_true_nor_predicted_enters_no_mean() -> None:
    truth = torch.tensor([[0, 0, 1, 1]])
    found = summarize_counts(confusion_counts(truth, truth, 4).numpy(), CLASSES.names, 1)
    assert found.metrics == {"mIoU": 1.0, "mean_accuracy": 1.0, "pixel_accuracy": 1.0}
    assert found.per_class["never"].iou is None
    assert SemanticResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert "mIoU 1.000" in str(found)


def test_a_predicted_class_without_true_pixels_counts_as_zero() -> None:
    found = summarize_counts(confusion_counts(torch.tensor([0, 0]), torch.tensor([0, 3]), 4).numpy(), CLASSES.names, 1)
    assert found.per_class["never"].iou == 0
    assert found.mIoU == pytest.approx(0.25)
    assert found.mean_accuracy == pytest.approx(0.5)


def test_pixels_without_a_prediction_are_missed_and_claimed_by_no_class() -> None:
    counts = confusion_counts(torch.tensor([0, 0, 1]), torch.tensor([0, IGNORE, -1]), 2).numpy()
    assert counts.tolist() == [[1, 0, 1], [0, 0, 1]]


def test_without_any_class_there_is_no_score() -> None:
    nothing = summarize_counts(np.zeros((2, 3), np.int64), ("a", "b"), 1)
    assert nothing.mIoU is None
    assert nothing.score == -np.inf
    assert str(nothing) == "mIoU n/a  mean accuracy n/a  pixel accuracy n/a"


def batches(
    pairs: list[tuple[np.ndarray, np.ndarray]], first: int = 0
) -> list[tuple[SegmentationBatch, SegmentationOutputs]]:
    """Return batches of one image, whose logits say the predicted map."""
    found = []
    for index, (truth, guess) in enumerate(pairs, first):
        size = truth.shape[0], truth.shape[1]
        logits = torch.nn.functional.one_hot(torch.from_numpy(guess).long(), 4).permute(2, 0, 1)[None].float()
        target = Target(index, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), size, size)
        inputs = Batch(torch.zeros(1, 3, *size, dtype=torch.uint8), torch.zeros(1, *size, dtype=torch.bool), (target,))
        found.append((SegmentationBatch(inputs, (torch.from_numpy(truth),)), SegmentationOutputs(logits, size)))
    return found


def test_evaluators_of_two_ranks_give_the_result_of_one() -> None:
    pairs = random_pairs(7, count=6)
    whole, first, second = (SegmentationEvaluator(CLASSES) for _ in range(3))
    for number, each in enumerate(batches(pairs)):
        whole.update(*each)
        (first, second)[number % 2].update(*each)
    first.merge(second)
    assert first.summarize() == whole.summarize() == summary_of(pairs)
    with pytest.raises(InputError, match="image 1 was evaluated twice"):
        first.merge(second)
    with pytest.raises(InputError, match="image 0 was evaluated twice"):
        whole.update(*batches(pairs)[0])


def panoptic(image_id: int, labels: np.ndarray, classes: int) -> tuple[PanopticMap, np.ndarray]:
    """Return a panoptic map with one segment for each class, whose ids are not in the order of the classes."""
    ids = np.where(labels < classes, 100 - labels.astype(np.int32), 0)
    segments = tuple(Segment(100 - c, c, int((labels == c).sum())) for c in range(classes) if (labels == c).any())
    return PanopticMap(image_id, torch.from_numpy(ids.astype(np.int32)), segments), ids


def test_panoptic_evaluation_has_the_miou_of_the_merged_maps(tmp_path: Path) -> None:
    pairs = random_pairs(3)
    holes = np.random.default_rng(0)
    pairs = [
        (truth, np.where(holes.random(truth.shape) < 0.1, IGNORE, guess).astype(np.uint8)) for truth, guess in pairs
    ]
    annotations = []
    for image_id, (truth, _) in enumerate(pairs):
        found, ids = panoptic(image_id, truth, 4)
        png = np.stack([ids % 256, ids // 256, ids * 0], axis=-1).astype(np.uint8)
        Image.fromarray(png).save(tmp_path / f"{image_id}.png")
        segments = [{"id": s.id, "category_id": s.label, "area": s.area, "iscrowd": 0} for s in found.segments]
        annotations.append({"image_id": image_id, "file_name": f"{image_id}.png", "segments_info": segments})
    categories = [{"id": i, "name": name, "isthing": 0} for i, name in enumerate(CLASSES.names)]
    path = tmp_path / "panoptic.json"
    path.write_text(json.dumps({"annotations": annotations, "categories": categories}))
    classes = ClassMap((0, 1, 2, 3), CLASSES.names, (False,) * 4)
    first, second = (PanopticEvaluator(path, tmp_path, classes) for _ in range(2))
    for image_id, (_, guess) in enumerate(pairs):
        (first, second)[image_id % 2].update([panoptic(image_id, guess, 4)[0]])
    first.merge(second)
    result = first.summarize()
    assert result.mIoU == pytest.approx(oracle(pairs, 4)["mIoU"], abs=1e-12)
    assert PanopticSummary.from_dict(json.loads(json.dumps(result.to_dict()))) == result
