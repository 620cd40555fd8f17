"""Postprocessing: from outputs to scored boxes in pixels of the image files."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pycocotools import mask as coco_mask
from torch.utils._python_dispatch import TorchDispatchMode

from detr_bf.common.masks import Masks
from detr_bf.common.structures import Outputs, PanopticMap, Target
from detr_bf.losses import CrossEntropy, Focal
from detr_bf.losses.postprocess import PanopticPostprocess, Postprocess
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


def with_masks(logits: torch.Tensor, targets: list[Target], classification: CrossEntropy | Focal) -> Outputs:
    """Make every query sure of the class of its index, except the last, which predicts no object."""
    images, queries = logits.shape[:2]
    claims = torch.full((1, images, queries, classification.num_logits(CLASSES)), -20.0)
    for query in range(queries - 1):
        claims[..., query, query % CLASSES] = 20.0
    if isinstance(classification, CrossEntropy):
        claims[..., -1, -1] = 20.0
    return Outputs(claims, torch.full((1, images, queries, 4), 0.5), masks=Masks.known(logits))


def masked_example(
    queries: int = QUERIES, classification: CrossEntropy | Focal | None = None
) -> tuple[Outputs, list[Target]]:
    """Draw two images of one batch, of different sizes, with smooth random masks."""
    sizes, originals = [(24, 40), (32, 20)], [(48, 80), (33, 21)]
    _, targets = example(CLASSES)
    targets = [
        replace(target, size=size, original_size=original)
        for target, size, original in zip(targets, sizes, originals, strict=False)
    ]
    masks = 4 * torch.randn(2, queries, 4, 5, generator=torch.Generator().manual_seed(0))
    return with_masks(masks, targets, classification or CrossEntropy()), targets


def test_detections_have_masks_of_the_original_image() -> None:
    outputs, targets = masked_example(queries=CLASSES + 1)
    assert outputs.masks is not None
    for image, (found, target) in enumerate(zip(Postprocess(CrossEntropy())(outputs, targets), targets, strict=True)):
        assert found.masks is not None
        enlarged = F.interpolate(outputs.masks.all()[image, None], size=(32, 40), mode="bilinear")[0]
        height, width = target.size
        inside = (enlarged[:, :height, :width] > 0)[:, None].byte()
        expected = F.interpolate(inside, target.original_size)[:, 0]
        assert all(mask["size"] == list(target.original_size) for mask in found.masks)
        assert all(isinstance(mask["counts"], str) for mask in found.masks), "serializable as JSON"
        masks = torch.tensor(np.stack([coco_mask.decode(mask) for mask in found.masks]))
        labels = found.labels[:CLASSES].tolist()
        assert sorted(labels) == list(range(CLASSES)), "query i has class i; the last query, without object, is last"
        assert torch.equal(masks, expected[[*labels, CLASSES]])


def test_duplicates_are_left_out_with_their_masks() -> None:
    """All boxes are equal, so that of each class only the best query is kept."""
    outputs, targets = masked_example(queries=2 * CLASSES, classification=Focal())
    outputs.logits[..., :CLASSES, :] -= 1
    few = Postprocess(Focal(), 2 * CLASSES, nms=0.5)(outputs, targets)
    for found, every in zip(few, Postprocess(Focal(), 100)(outputs, targets), strict=True):
        assert sorted(found.labels[:CLASSES].tolist()) == list(range(CLASSES))
        assert len(found.scores) == CLASSES
        best = [every.labels.tolist().index(label) for label in found.labels.tolist()]
        assert found.masks is not None
        assert every.masks is not None
        assert list(found.masks) == [every.masks[i] for i in best]


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest result of an operator."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.numel() * result.element_size())
        return result


def test_masks_have_the_original_size_one_at_a_time() -> None:
    """30 masks of a photograph of 3 megapixels are 90 MB."""
    queries, height, width = 30, 1500, 2000
    logits = 4 * torch.randn(1, queries, 12, 16, generator=torch.Generator().manual_seed(0))
    target = replace(example(CLASSES)[1][0], size=(96, 128), original_size=(height, width))
    outputs = with_masks(logits, [target], CrossEntropy())
    tracemalloc.start()
    with LargestTensor() as largest:
        (found,) = Postprocess(CrossEntropy())(outputs, [target])
    peak = tracemalloc.get_traced_memory()[1]  # of NumPy arrays
    tracemalloc.stop()
    assert largest.size <= height * width
    assert peak < 4 * height * width
    inside = (F.interpolate(logits[0][:, None], size=(96, 128), mode="bilinear").sigmoid() > 0.5).byte()
    whole = F.interpolate(inside, (height, width))[:, 0].permute(1, 2, 0).numpy()
    expected = {each["counts"].decode() for each in coco_mask.encode(np.asfortranarray(whole))}
    assert found.masks is not None
    assert len(expected) == queries
    assert {each["counts"] for each in found.masks} == expected


def panoptic(classification: CrossEntropy | Focal | None = None, **settings: object) -> PanopticPostprocess:
    """Classes 0 and 1 are things."""
    things = tuple(label < 2 for label in range(CLASSES))
    return PanopticPostprocess(classification or CrossEntropy(), things, **settings)


@pytest.mark.parametrize("classification", [CrossEntropy(), Focal()])
def test_every_pixel_belongs_to_the_strongest_mask(classification: CrossEntropy | Focal) -> None:
    outputs, targets = masked_example(queries=CLASSES + 1, classification=classification)
    assert outputs.masks is not None
    maps = panoptic(classification, min_area=0)(outputs, targets)
    for image, (found, target) in enumerate(zip(maps, targets, strict=True)):
        enlarged = F.interpolate(outputs.masks.all()[image, None, :-1], size=(32, 40), mode="bilinear")[0]
        height, width = target.size
        strongest = enlarged[:, :height, :width].argmax(0)
        rows = ((torch.arange(target.original_size[0]) + 0.5) * height / target.original_size[0]).long()
        columns = ((torch.arange(target.original_size[1]) + 0.5) * width / target.original_size[1]).long()
        expected = strongest[rows][:, columns]
        labels = torch.tensor([0, *(segment.label for segment in found.segments)])
        assert torch.equal(labels[found.ids], expected), "each query has a class of its own here"
        check_consistent(found, target)


def check_consistent(found: PanopticMap, target: Target) -> None:
    assert found.image_id == target.image_id
    assert (found.ids.dtype, tuple(found.ids.shape)) == (torch.int32, target.original_size)
    counted = {int(i): int((found.ids == i).sum()) for i in found.ids.unique() if i}
    assert {segment.id: segment.area for segment in found.segments} == counted
    assert [segment.id for segment in found.segments] == list(range(1, len(found.segments) + 1))


def test_stuff_of_one_class_is_one_segment_and_things_are_not() -> None:
    outputs, targets = masked_example(queries=2 * CLASSES + 1)
    for found in panoptic()(outputs, targets):
        stuff = [segment.label for segment in found.segments if segment.label >= 2]
        assert sorted(stuff) == sorted(set(stuff))
    merged, first_alone = (panoptic(merge_stuff=merge, min_area=0)(outputs, targets)[0] for merge in (True, False))
    apart = panoptic(merge_stuff=True, min_area=0)
    separate = replace(apart, is_thing=(True,) * CLASSES)(outputs, targets)[0]
    of_class = {label: sum(s.area for s in separate.segments if s.label == label) for label in range(CLASSES)}
    assert {s.label: s.area for s in merged.segments if s.label >= 2} == {2: of_class[2], 3: of_class[3]}
    assert {s.label: s.area for s in first_alone.segments if s.label >= 2} != {2: of_class[2], 3: of_class[3]}


def test_small_segments_leave_their_pixels_to_the_others() -> None:
    outputs, targets = masked_example(queries=CLASSES + 1)
    everything = panoptic(min_area=0)(outputs, targets)[0]
    smallest = min(everything.segments, key=lambda segment: segment.area)
    found = panoptic(min_area=smallest.area)(outputs, targets)[0]
    assert {segment.label for segment in found.segments} == {
        segment.label for segment in everything.segments if segment.area > smallest.area
    }
    check_consistent(found, targets[0])
    assert found.ids.all(), "all pixels are assigned"


def test_nobody_takes_part() -> None:
    outputs, targets = masked_example()
    for found in panoptic(threshold=1.0)(outputs, targets):
        assert found.segments == ()
        assert not found.ids.any()
    for found in panoptic(min_area=10**6)(outputs, targets):
        assert found.segments == ()


@pytest.mark.parametrize(
    ("iou", "across", "kept"),
    [
        (None, False, [0, 1, 2, 3]),
        (0.5, False, [0, 2, 3]),
        (0.95, False, [0, 1, 2, 3]),
        (0.5, True, [0, 3]),
        (0.95, True, [0, 1, 3]),
    ],
)
def test_detections_that_overlap_a_better_one_are_left_out(iou: float | None, across: bool, kept: list[int]) -> None:
    """Boxes 0 and 1 have an IoU of 9 / 11; boxes 1 and 2 are equal, but of two classes."""
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.52, 0.5, 0.2, 0.2], [0.52, 0.5, 0.2, 0.2], [0.1, 0.1, 0.1, 0.1]])
    logits = torch.tensor([[2.0, -9, -9], [1.0, -9, -9], [-9, 0.0, -9], [-1.0, -9, -9]])
    target = replace(random_targets((1,), classes=3)[0], original_size=(100, 200))
    postprocess = Postprocess(Focal(), 4, nms=iou, nms_across_classes=across)
    (found,) = postprocess(Outputs(logits[None, None], boxes[None, None], 1), [target])
    assert found.labels.tolist() == [[0, 0, 1, 0][i] for i in kept]
    assert found.scores.tolist() == pytest.approx(logits.sigmoid().amax(1)[kept].tolist())
    assert found.boxes.tolist() == [pytest.approx(pixels(boxes[i].tolist(), (100, 200)), abs=1e-3) for i in kept]
