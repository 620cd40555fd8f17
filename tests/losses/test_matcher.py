"""Matching compared with scipy image by image and with every possible assignment; invariances."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Outputs, PaddedTargets, Target
from detr_bf.losses import CrossEntropy, Focal, HungarianMatcher, Matches, SetCriterion, matcher
from tests.references.examples import random_outputs, random_targets
from tests.references.set_criterion import Pairs, focal_cost, image_cost, least_total, match, softmax_cost

CLASSES, QUERIES, LAYERS = 4, 5, 2
COUNTS = [(2, 3), (0, 4, 1), (3,), (7, 2), (0, 0)]  # objects per image: none in some, more than queries in one


def outputs_for(counts: tuple[int, ...], **changes: int) -> Outputs:
    return random_outputs(LAYERS, len(counts), QUERIES, **({"logits": CLASSES + 1} | changes))


def matches_of(outputs: Outputs, targets: list[Target], **weights: float) -> Matches:
    return HungarianMatcher(CrossEntropy(), **weights)(outputs, PaddedTargets.of(targets, outputs.num_streams))


def pairs_of(matches: Matches, layer: int, row: int) -> Pairs:
    here = (matches.layer == layer) & (matches.row == row)
    return list(zip(matches.query[here].tolist(), matches.target[here].tolist(), strict=True))


def columns(matches: Matches) -> list[list[int]]:
    return [x.tolist() for x in (matches.layer, matches.row, matches.query, matches.target)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("weights", [(1.0, 5.0, 2.0), (2.0, 0.5, 0.0)])
def test_as_scipy_image_by_image(counts: tuple[int, ...], weights: tuple[float, float, float]) -> None:
    outputs, targets = outputs_for(counts), random_targets(counts, classes=CLASSES)
    matches = matches_of(outputs, targets, **dict(zip(("class_cost", "bbox_cost", "giou_cost"), weights, strict=True)))
    for layer in range(LAYERS):
        for row, target in enumerate(targets):
            cost = image_cost(outputs.logits[layer, row], outputs.boxes[layer, row], target, weights=weights)
            assert pairs_of(matches, layer, row) == match(cost)


@pytest.mark.parametrize("counts", COUNTS)
def test_no_assignment_is_cheaper(counts: tuple[int, ...]) -> None:
    outputs, targets = outputs_for(counts), random_targets(counts, classes=CLASSES)
    matches = matches_of(outputs, targets)
    for layer in range(LAYERS):
        for row, target in enumerate(targets):
            cost = image_cost(outputs.logits[layer, row], outputs.boxes[layer, row], target)
            total = sum(cost[pair].item() for pair in pairs_of(matches, layer, row))
            assert total == pytest.approx(least_total(cost), abs=1e-9)


@pytest.mark.parametrize("counts", COUNTS)
def test_one_to_one_as_far_as_queries_reach(counts: tuple[int, ...]) -> None:
    matches = matches_of(outputs_for(counts), random_targets(counts, classes=CLASSES))
    for layer in range(LAYERS):
        for row, count in enumerate(counts):
            pairs = pairs_of(matches, layer, row)
            assert len(pairs) == min(count, QUERIES)
            assert len({query for query, _ in pairs}) == len({target for _, target in pairs}) == len(pairs)
            assert all(target < count for _, target in pairs), "padded objects are not matched"
    assert all(index.dtype == torch.int64 for index in (matches.layer, matches.row, matches.query, matches.target))


@pytest.mark.parametrize(
    ("classification", "class_cost", "logits"),
    [(CrossEntropy(), softmax_cost, CLASSES + 1), (Focal(), focal_cost, CLASSES)],
)
def test_cost(classification: CrossEntropy | Focal, class_cost: object, logits: int) -> None:
    counts = (3, 1)
    outputs, targets = outputs_for(counts, logits=logits), random_targets(counts, classes=CLASSES)
    cost = HungarianMatcher(classification).cost(outputs.logits, outputs.boxes, PaddedTargets.of(targets))
    assert cost.shape == (LAYERS, len(counts), QUERIES, max(counts))
    for layer in range(LAYERS):
        for row, target in enumerate(targets):
            expected = image_cost(outputs.logits[layer, row], outputs.boxes[layer, row], target, class_cost=class_cost)
            torch.testing.assert_close(cost[layer, row, :, : counts[row]].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", COUNTS)
def test_stacked_and_looped_costs_match_alike(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, targets = outputs_for(counts), random_targets(counts, classes=CLASSES)
    dimensions = []
    original = HungarianMatcher.cost

    def counted(self: HungarianMatcher, logits: Tensor, boxes: Tensor, padded: PaddedTargets) -> Tensor:
        dimensions.append(logits.dim())
        return original(self, logits, boxes, padded)

    monkeypatch.setattr(HungarianMatcher, "cost", counted)
    stacked = matches_of(outputs, targets, class_cost=50.0)  # so that classes matter too
    assert dimensions == [4]
    monkeypatch.setattr(matcher, "STACK_LIMIT", -1)
    assert columns(matches_of(outputs, targets, class_cost=50.0)) == columns(stacked)
    assert dimensions == [4] + [3] * LAYERS


@pytest.mark.parametrize("stack_limit", [matcher.STACK_LIMIT, -1])
def test_one_copy_to_the_host(stack_limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    for name in ("cpu", "item", "tolist", "nonzero"):

        def counted(self: Tensor, name: str = name, original: object = getattr(Tensor, name)) -> object:
            copies.append(name)
            return original(self)

        monkeypatch.setattr(Tensor, name, counted)
    monkeypatch.setattr(matcher, "STACK_LIMIT", stack_limit)
    matches_of(outputs_for((2, 0, 3), streams=2), random_targets((2, 0, 3), classes=CLASSES))
    assert copies == ["cpu"]


def test_editing_a_row_changes_no_other_match() -> None:
    counts = (3, 2, 4)
    outputs, targets = outputs_for(counts, streams=2), random_targets(counts, classes=CLASSES)
    before = matches_of(outputs, targets)
    row = 4  # image 1 of the second stream
    edited = replace(outputs, boxes=outputs.boxes.detach().clone(), logits=outputs.logits.detach().clone())
    edited.boxes[:, row] = edited.boxes[:, row].flip(1)
    edited.logits[:, row] = edited.logits[:, row].flip(1)
    after = matches_of(edited, targets)
    for layer in range(LAYERS):
        flipped = sorted((QUERIES - 1 - query, target) for query, target in pairs_of(before, layer, row))
        assert pairs_of(after, layer, row) == flipped
        for other in set(range(6)) - {row}:
            assert pairs_of(after, layer, other) == pairs_of(before, layer, other)


def test_every_stream_is_matched_as_if_alone() -> None:
    counts = (3, 2)
    outputs, targets = outputs_for(counts, streams=2), random_targets(counts, classes=CLASSES)
    both = matches_of(outputs, targets)
    for stream in range(2):
        rows = slice(2 * stream, 2 * stream + 2)
        alone = matches_of(Outputs(outputs.logits[:, rows], outputs.boxes[:, rows]), targets)
        for layer in range(LAYERS):
            for image in range(2):
                assert pairs_of(both, layer, 2 * stream + image) == pairs_of(alone, layer, image)


def test_follows_permuted_queries() -> None:
    counts, order = (3, 2), torch.tensor([3, 1, 4, 0, 2])
    outputs, targets = outputs_for(counts), random_targets(counts, classes=CLASSES)
    before = matches_of(outputs, targets)
    after = matches_of(Outputs(outputs.logits[:, :, order], outputs.boxes[:, :, order]), targets)
    for layer in range(LAYERS):
        for row in range(2):
            moved = sorted((order[query].item(), target) for query, target in pairs_of(after, layer, row))
            assert moved == pairs_of(before, layer, row)


@pytest.mark.parametrize("name", ["class_cost", "bbox_cost", "giou_cost"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_costs_that_mean_nothing_are_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"HungarianMatcher: {name}={value} must be 0 or more"):
        HungarianMatcher(CrossEntropy(), **{name: value})


def test_a_matcher_without_any_cost_is_refused() -> None:
    with pytest.raises(InputError, match="class_cost, bbox_cost, giou_cost are all 0"):
        HungarianMatcher(CrossEntropy(), 0.0, 0.0, 0.0)
    HungarianMatcher(CrossEntropy(), 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    "settings", [{"alpha": 7.0}, {"alpha": -1.0}, {"alpha": math.nan}, {"gamma": -1.0}, {"gamma": math.nan}]
)
def test_focal_losses_that_mean_nothing_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match="Focal: alpha="):
        Focal(**settings)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_weights_that_mean_nothing_are_refused(value: float) -> None:
    with pytest.raises(InputError, match="CrossEntropy: no_object_weight="):
        CrossEntropy(value)
    with pytest.raises(InputError, match="SetCriterion: dice_weight="):
        SetCriterion(CrossEntropy(), HungarianMatcher(CrossEntropy()), dice_weight=value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_predictions_that_are_not_finite_are_matched_last(value: float) -> None:
    outputs, targets = outputs_for((3,)), random_targets((3,), classes=CLASSES)
    broken = outputs.boxes.detach().clone()
    broken[0, 0, 1] = value
    matches = matches_of(replace(outputs, boxes=broken), targets)
    assert 1 not in [query for query, _ in pairs_of(matches, 0, 0)]
    assert len(pairs_of(matches, 0, 0)) == 3
    everything = matches_of(replace(outputs, boxes=torch.full_like(broken, value)), targets)
    assert len(everything.query) == 3 * LAYERS
