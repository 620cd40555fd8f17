"""From outputs to scored boxes in pixels of the files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from detr_bf.losses import CrossEntropy, Focal
from detr_bf.postprocess import Postprocess
from detr_bf.structures import Outputs, Target
from tests.references.examples import random_outputs, random_targets

LAYERS, QUERIES, CLASSES = 2, 6, 4


def example(logits: int) -> tuple[Outputs, list[Target]]:
    sizes = [(64, 96), (30, 20), (480, 640)]
    targets = [
        replace(target, image_id=70 + target.image_id, original_size=size)
        for target, size in zip(random_targets((1, 0, 2), classes=CLASSES), sizes, strict=True)
    ]
    return random_outputs(LAYERS, len(targets), QUERIES, logits=logits), targets


def pixels(box: list[float], size: tuple[int, int]) -> list[float]:
    x, y, w, h = box
    height, width = size
    return [(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height]


@pytest.mark.parametrize("limit", [100, 4])
def test_softmax_gives_every_query_its_best_class(limit: int) -> None:
    outputs, targets = example(CLASSES + 1)
    detections = Postprocess(CrossEntropy(), limit)(outputs, targets)
    assert [each.image_id for each in detections] == [70, 71, 72]
    for image, (found, target) in enumerate(zip(detections, targets, strict=True)):
        expected = []
        for query in range(QUERIES):
            exponential = outputs.logits[-1, image, query].exp()
            *scores, _ = (exponential / exponential.sum()).tolist()
            expected.append((max(scores), scores.index(max(scores)), query))
        expected = sorted(expected, reverse=True)[:limit]
        assert found.scores.tolist() == pytest.approx([score for score, _, _ in expected])
        assert found.labels.tolist() == [label for _, label, _ in expected]
        for box, (_, _, query) in zip(found.boxes.tolist(), expected, strict=True):
            wanted = pixels(outputs.boxes[-1, image, query].tolist(), target.original_size)
            assert box == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("limit", [100, 4])
def test_focal_gives_the_best_pairs_of_query_and_class(limit: int) -> None:
    outputs, targets = example(CLASSES)
    for image, found in enumerate(Postprocess(Focal(), limit)(outputs, targets)):
        scores = (1 / (1 + (-outputs.logits[-1, image]).exp())).tolist()
        pairs = [(scores[query][label], label, query) for query in range(QUERIES) for label in range(CLASSES)]
        expected = sorted(pairs, reverse=True)[:limit]
        assert found.scores.tolist() == pytest.approx([score for score, _, _ in expected])
        assert found.labels.tolist() == [label for _, label, _ in expected]
        for box, (_, _, query) in zip(found.boxes.tolist(), expected, strict=True):
            wanted = pixels(outputs.boxes[-1, image, query].tolist(), targets[image].original_size)
            assert box == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("classification", [CrossEntropy(), Focal()])
def test_detections_are_few_scored_and_without_gradient(classification: CrossEntropy | Focal) -> None:
    outputs, targets = example(classification.num_logits(CLASSES))
    for found in Postprocess(classification, 3)(outputs, targets):
        assert found.boxes.shape == (3, 4)
        assert found.scores.shape == found.labels.shape == (3,)
        assert ((found.scores >= 0) & (found.scores <= 1)).all()
        assert (found.scores.diff() <= 0).all(), "best first"
        assert found.labels.dtype == torch.int64
        assert not found.boxes.requires_grad
        assert found.boxes.dtype == found.scores.dtype == torch.float32


def test_only_the_last_layer_counts() -> None:
    outputs, targets = example(CLASSES + 1)
    last_layer = replace(outputs, logits=outputs.logits[-1:], boxes=outputs.boxes[-1:])
    postprocess = Postprocess(CrossEntropy())
    for all_layers, last in zip(postprocess(outputs, targets), postprocess(last_layer, targets), strict=True):
        assert torch.equal(all_layers.boxes, last.boxes)
        assert torch.equal(all_layers.scores, last.scores)


def test_size_after_the_transforms_does_not_matter() -> None:
    outputs, targets = example(CLASSES + 1)
    resized = [replace(target, size=(7, 9)) for target in targets]
    postprocess = Postprocess(CrossEntropy())
    for one, other in zip(postprocess(outputs, targets), postprocess(outputs, resized), strict=True):
        assert torch.equal(one.boxes, other.boxes)
