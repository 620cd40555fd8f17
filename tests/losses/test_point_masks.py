"""Losses and matching costs of masks at points, compared with loops over queries, objects and pixels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.common.masks import ObjectMasks, bilinear
from detr_bf.common.structures import Batch, Outputs, PaddedTargets, Target
from detr_bf.losses import Focal, HungarianMatcher, SetCriterion, point_masks
from detr_bf.losses.point_masks import losses_at_points, mask_costs, pair_costs, random_points, uncertain_points
from tests.detectors.tiny import batch_former, images, model, shaken

SIZES = [(12, 20), (16, 9)]

pytestmark = pytest.mark.usefixtures("float64")


def object_masks() -> tuple[ObjectMasks, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(count, *size, generator=generator) < 0.5 for count, size in zip((2, 3), SIZES, strict=True)]
    return ObjectMasks.of(masks), masks


def test_pixels_at_points() -> None:
    """Points are fractions of the largest height and width; outside a smaller image they read False."""
    objects, masks = object_masks()
    points = random_points(5, 7, device=torch.device("cpu"), fixed=True)
    points[0, 0] = 1.0
    image, target = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 0, 1, 2])
    found = objects.at(image, target, points)
    for pair in range(5):
        mask = masks[int(image[pair])][int(target[pair])]
        for index, (x, y) in enumerate(points[pair].tolist()):
            column, row = min(int(x * 20), 19), min(int(y * 16), 15)
            inside = row < mask.shape[0] and column < mask.shape[1]
            assert found[pair, index] == (inside and bool(mask[row, column]))


def one_pair(logits: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return cross-entropy and 1 - Dice of logits and mask (P,)."""
    entropy, overlap, areas = 0.0, 0.0, 0.0
    for logit, inside in zip(logits, wanted, strict=True):
        probability = 1 / (1 + (-logit).exp())
        entropy -= float(torch.log(probability if inside else 1 - probability)) / len(logits)
        overlap, areas = overlap + float(probability * inside), areas + float(probability + inside)
    return entropy, 1 - (2 * overlap + 1) / (areas + 1)


def test_costs_and_losses_point_by_point() -> None:
    torch.manual_seed(0)
    logits, wanted = 3 * torch.randn(2, 4, 9), torch.rand(2, 3, 9).round()
    costs = torch.stack(pair_costs(logits, wanted))
    for row, query, target in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(3)).tolist():
        expected = torch.tensor(one_pair(logits[row, query], wanted[row, target]))
        torch.testing.assert_close(costs[:, row, query, target], expected)
    losses = torch.stack(losses_at_points(logits[0, :3], wanted[0]))
    torch.testing.assert_close(losses, costs[:, 0].diagonal(dim1=1, dim2=2)[:, :3])


def test_most_points_are_where_the_mask_is_uncertain() -> None:
    logits = torch.linspace(-8, 8, 64).expand(3, 64, 64)  # uncertain in the middle columns
    points = uncertain_points(logits, 40, fixed=True)
    assert points.shape == (3, 40, 2)
    certainty = bilinear(logits[:, None], points)[:, 0].abs()
    assert certainty[:, :30].amax(1).max() < 3, "the lowest quarter of 120, but for chance"
    assert certainty[:, 30:].mean() > 3, "uniform: 4 on average"


def test_fixed_points_change_no_random_state() -> None:
    before = torch.get_rng_state()
    first, second = (random_points(3, 4, device=torch.device("cpu"), fixed=True) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    drawn = random_points(3, 4, device=torch.device("cpu"), fixed=False)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3, 4, 2))


def batch_with_masks() -> Batch:
    batch, generator = images(), torch.Generator().manual_seed(4)
    targets = tuple(
        replace(each, masks=torch.rand(len(each.labels), *each.size, generator=generator) < 0.4)
        for each in batch.targets
    )
    return replace(batch, targets=targets)


def outputs_of(**changes: object) -> tuple[Outputs, tuple[Target, ...]]:
    batch = batch_with_masks()
    return shaken(model("rfdetr", masks=True, dropout=0.0, **changes)).train()(batch), batch.targets


def criterion(**settings: object) -> SetCriterion:
    return SetCriterion(Focal(), HungarianMatcher(Focal(), 2, **settings), mask_weight=5.0, dice_weight=5.0)


def test_the_matching_sees_the_masks() -> None:
    """A pair of query and object whose mask is right is matched, though other queries have better boxes."""
    outputs, targets = outputs_of()
    padded = replace(PaddedTargets.of(targets), masks=ObjectMasks.of([each.masks for each in targets]))
    with torch.no_grad():
        entropy, dice = mask_costs(outputs, padded, 16, fixed=True)
    assert entropy.shape == dice.shape == (2, 2, 5, 2)
    plain, both = HungarianMatcher(Focal(), mask_cost=0.0, dice_cost=0.0), HungarianMatcher(Focal(), fixed_points=True)
    added = both._stacked_cost(outputs, padded) - plain._stacked_cost(outputs, padded)
    torch.testing.assert_close(added, 5 * entropy + 5 * dice)
    strong = HungarianMatcher(Focal(), 0, 0, 1e-9, mask_cost=1.0, dice_cost=0.0, fixed_points=True)(outputs, padded)
    for layer, row in ((0, 0), (1, 1)):
        own = (strong.layer == layer) & (strong.row == row)
        total = entropy[layer, row, strong.query[own], strong.target[own]].sum()
        others = torch.cartesian_prod(*[torch.arange(5)] * padded.counts[row]).reshape(-1, padded.counts[row])
        distinct = [each for each in others.tolist() if len(set(each)) == len(each)]
        best = min(sum(float(entropy[layer, row, q, t]) for t, q in enumerate(each)) for each in distinct)
        assert float(total) == pytest.approx(best)


def test_every_layer_group_and_the_proposals_have_mask_losses() -> None:
    outputs, targets = outputs_of()
    report = criterion(fixed_points=True)(outputs, targets)
    ends = ("", "_0", "_enc", "_group", "_group_0", "_group_enc")
    for term in ("loss_mask", "loss_dice"):
        assert {name for name in report.losses if name.startswith(term)} == {term + end for end in ends}
        assert all(report.weights[term + end] == 5.0 for end in ends)


def test_losses_of_two_equal_streams_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(*counts: int, **_: object) -> Tensor:
        generator = torch.Generator().manual_seed(counts[-1])
        return torch.rand(counts[-1], 2, generator=generator).expand(*counts[:-1], -1, -1)

    monkeypatch.setattr(point_masks, "random_points", points)
    found = []
    for former in (None, batch_former(mode="duplicate")):
        detector, batch = shaken(model("rfdetr", masks=True, dropout=0.0)), batch_with_masks()
        detector.encoder.batch_former = former
        outputs = detector.train()(batch)
        assert outputs.num_streams == (1 if former is None else 2)
        found.append(criterion()(outputs, batch.targets).losses)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, msg=name)


def test_images_without_objects() -> None:
    outputs, targets = outputs_of()
    empty = tuple(replace(each, boxes=each.boxes[:0], labels=each.labels[:0], masks=each.masks[:0]) for each in targets)
    report = criterion()(outputs, empty)
    assert report.losses["loss_mask"] == report.losses["loss_dice_group"] == 0
    report.total.backward()
    one = (targets[0], empty[1])
    assert criterion()(outputs_of()[0], one).losses["loss_mask"] > 0


def test_points_are_fractions_of_the_padded_batch() -> None:
    """The batch is larger than its largest image, as detectron2 pads it."""
    batch = batch_with_masks()
    height, width = (side + 16 for side in batch.images.shape[-2:])
    larger = replace(
        batch,
        images=F.pad(batch.images, (0, 16, 0, 16)),
        padding_mask=F.pad(batch.padding_mask, (0, 16, 0, 16), value=True),
    )
    outputs = shaken(model("rfdetr", masks=True, dropout=0.0)).train()(larger)
    padded = [
        replace(each, masks=F.pad(each.masks, (0, width - each.size[1], 0, height - each.size[0])))
        for each in batch.targets
    ]
    found, expected = (criterion(fixed_points=True)(outputs, targets).losses for targets in (batch.targets, padded))
    assert outputs.layer_masks[0].size == (height, width)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
