"""Mask losses against loops over pairs and pixels, and in the set criterion."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from detr_bf.losses import CrossEntropy, HungarianMatcher, PaddedTargets, SetCriterion
from detr_bf.losses.set_criterion import mask_losses, padded_masks
from detr_bf.structures import Masks, Outputs, Target
from tests.references.examples import random_outputs, random_targets

QUERIES, CLASSES = 5, 4
SIZES = [(12, 20), (16, 9), (7, 7)]


def focal_and_dice(logits: list[float], wanted: list[bool]) -> tuple[float, float]:
    """Pixel by pixel, from the definitions."""
    focal, overlap, total = 0.0, 0.0, 0.0
    for logit, inside in zip(logits, wanted, strict=True):
        probability = 1 / (1 + math.exp(-logit))
        right = probability if inside else 1 - probability
        focal -= (0.25 if inside else 0.75) * (1 - right) ** 2 * math.log(right)
        overlap += probability * inside
        total += probability + inside
    return focal / len(wanted), 1 - (2 * overlap + 1) / (total + 1)


def test_as_pixel_by_pixel() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 6, generator=generator) * 2
    wanted = torch.rand(3, 8, 15, generator=generator) < 0.3
    focal, dice = mask_losses(logits, wanted)
    enlarged = F.interpolate(logits[None], size=(8, 15), mode="bilinear")[0]
    for pair in range(3):
        expected = focal_and_dice(enlarged[pair].flatten().tolist(), wanted[pair].flatten().tolist())
        assert (focal[pair].item(), dice[pair].item()) == pytest.approx(expected, rel=1e-5)


def test_a_perfect_mask_costs_nothing() -> None:
    wanted = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    focal, dice = mask_losses(torch.where(wanted, 30.0, -30.0), wanted)
    assert focal.max() < 1e-6
    assert dice.max() < 1e-6


def test_masks_are_padded_to_the_largest_of_the_batch() -> None:
    masks = [torch.rand(count, *size) < 0.5 for count, size in zip((2, 0, 3), SIZES, strict=True)]
    found = padded_masks(masks, torch.tensor([2, 0, 2]), torch.tensor([1, 0, 2]))
    assert found.shape == (3, 16, 20)
    for padded, mask in zip(found, (masks[2][1], masks[0][0], masks[2][2]), strict=True):
        height, width = mask.shape
        assert torch.equal(padded[:height, :width], mask)
        assert padded.sum() == mask.sum()


def example(counts: tuple[int, ...], streams: int = 1, layers: int = 2) -> tuple[Outputs, list[Target], torch.Tensor]:
    """Outputs with masks, targets, and the mask logits (R, Q, h, w)."""
    outputs = random_outputs(layers, len(counts), QUERIES, logits=CLASSES + 1, streams=streams)
    generator = torch.Generator().manual_seed(3)
    masks = torch.randn(streams * len(counts), QUERIES, 5, 6, generator=generator).requires_grad_()
    targets = [
        replace(target, size=size, masks=torch.rand(len(target.labels), *size, generator=generator) < 0.4)
        for target, size in zip(random_targets(counts, classes=CLASSES), SIZES, strict=False)
    ]
    return replace(outputs, masks=Masks.known(masks)), targets, masks


def criterion(**weights: float) -> SetCriterion:
    return SetCriterion(CrossEntropy(), HungarianMatcher(CrossEntropy()), **weights)


@pytest.mark.parametrize("counts", [(2, 3, 1), (0, 4), (7, 2), (0, 0)])
@pytest.mark.parametrize("streams", [1, 2])
def test_the_criterion_takes_the_pairs_of_the_last_layer(counts: tuple[int, ...], streams: int) -> None:
    outputs, targets, masks = example(counts, streams)
    report = criterion()(outputs, targets)
    padded_size = [max(target.size[side] for target in targets) for side in (0, 1)]
    sums = torch.zeros(2)
    for stream in range(streams):
        rows = slice(stream * len(counts), (stream + 1) * len(counts))
        alone = Outputs(outputs.logits[-1:, rows], outputs.boxes[-1:, rows])
        pairs = match_one_by_one(alone, targets)
        for image, query, place in pairs:
            wanted = torch.zeros(padded_size, dtype=torch.bool)
            height, width = targets[image].size
            wanted[:height, :width] = targets[image].masks[place]
            both = mask_losses(masks[rows][image, query, None], wanted[None])
            sums += torch.tensor([loss.item() for loss in both]) / streams
    expected = sums / max(sum(counts), 1)
    found = torch.stack([report.losses["loss_mask"], report.losses["loss_dice"]])
    torch.testing.assert_close(found.detach(), expected)
    found.sum().backward()
    assert masks.grad is not None
    assert bool(masks.grad.any()) == any(counts)


def match_one_by_one(outputs: Outputs, targets: list[Target]) -> list[tuple[int, int, int]]:
    pairs = []
    for image, target in enumerate(targets):
        alone = Outputs(outputs.logits[:, image, None], outputs.boxes[:, image, None])
        matches = HungarianMatcher(CrossEntropy())(alone, PaddedTargets.of([target]))
        pairs += [(image, int(q), int(t)) for q, t in zip(matches.query, matches.target, strict=True)]
    return pairs


def test_mask_losses_have_weights_and_one_layer() -> None:
    outputs, targets, _ = example((2, 3))
    report = criterion(mask_weight=3.0, dice_weight=0.5)(outputs, targets)
    masks = {name: weight for name, weight in report.weights.items() if "mask" in name or "dice" in name}
    assert masks == {"loss_mask": 3.0, "loss_dice": 0.5}
    boxes_only = criterion()(replace(outputs, masks=None), targets)
    assert report.losses.keys() - boxes_only.losses.keys() == masks.keys()
    for name, loss in boxes_only.losses.items():
        assert torch.equal(loss, report.losses[name])


def test_each_stream_is_logged() -> None:
    outputs, targets, _ = example((2, 3), streams=2)
    logged = criterion()(outputs, targets).logged
    halves = [logged[f"stream/{stream}/loss_dice"] for stream in ("clean", "batchformer")]
    assert halves[0] != halves[1]
    report = criterion()(outputs, targets)
    assert sum(halves) / 2 == pytest.approx(report.losses["loss_dice"].item())
    totals = [logged[f"stream/{stream}"] for stream in ("clean", "batchformer")]
    assert sum(totals) / 2 == pytest.approx(report.total.item())
