"""Set criterion compared with loops over streams, layers, images and pairs; invariances; masks; reports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_convert, box_iou, generalized_box_iou

from detr_bf.common.masks import Masks, ObjectMasks
from detr_bf.common.structures import Outputs, PaddedTargets, QueryGroup, Target
from detr_bf.losses import (
    LOGGED_METRICS,
    CrossEntropy,
    Focal,
    HungarianMatcher,
    LossReport,
    SetCriterion,
)
from detr_bf.losses.set_criterion import mask_losses
from tests.references.examples import random_outputs, random_targets
from tests.references.set_criterion import image_cost, match, set_losses

CLASSES, QUERIES, NO_OBJECT_WEIGHT = 4, 5, 0.3
COUNTS = [(2, 3), (0, 4, 1), (7, 2), (0, 0)]
SIZES = [(12, 20), (16, 9), (7, 7)]  # of mask targets
WEIGHTS = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}


def criterion(classification: CrossEntropy | Focal | None = None, **weights: float) -> SetCriterion:
    classification = classification or CrossEntropy(NO_OBJECT_WEIGHT)
    return SetCriterion(classification, HungarianMatcher(classification), **weights)


def example(counts: tuple[int, ...], layers: int = 1, streams: int = 1) -> tuple[Outputs, list[Target]]:
    outputs = random_outputs(layers, len(counts), QUERIES, logits=CLASSES + 1, streams=streams)
    return outputs, random_targets(counts, classes=CLASSES)


def perfect(targets: list[Target]) -> Outputs:
    """Outputs in which one query predicts each object exactly and with certainty; all others predict no object."""
    logits = torch.full((1, len(targets), QUERIES, CLASSES + 1), -20.0)
    logits[..., -1] = 20.0
    boxes = torch.rand(1, len(targets), QUERIES, 4) / 4 + 0.25
    for row, target in enumerate(targets):
        for query, (box, label) in enumerate(zip(target.boxes, target.labels, strict=True)):
            boxes[0, row, query] = box
            logits[0, row, query, label], logits[0, row, query, -1] = 20.0, -20.0
    return Outputs(logits.requires_grad_(), boxes.requires_grad_())


def stream_mean(report: LossReport) -> Tensor:
    return (report.logged["stream/clean"] + report.logged["stream/batchformer"]) / 2


def names(layers: int) -> list[str]:
    suffixes = [f"_{layer}" for layer in range(layers - 1)] + [""]
    return [name + suffix for name in WEIGHTS for suffix in suffixes]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("streams", [1, 2])
def test_as_the_plain_loops(counts: tuple[int, ...], layers: int, streams: int) -> None:
    outputs, targets = example(counts, layers, streams)
    report = criterion()(outputs, targets)
    expected = set_losses(outputs, targets, NO_OBJECT_WEIGHT)
    assert sorted(report.losses) == sorted(names(layers))
    total = torch.zeros((), dtype=torch.float64)
    for name, weight in WEIGHTS.items():
        for layer in range(layers):
            mean = sum(stream[layer][name] for stream in expected) / streams
            loss = report.losses[name if layer == layers - 1 else f"{name}_{layer}"]
            torch.testing.assert_close(loss.double(), mean, rtol=1e-5, atol=1e-6)
            total = total + weight * mean
    torch.testing.assert_close(report.total.double(), total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("streams", [1, 2])
def test_gradients_as_those_of_the_plain_loops(streams: int) -> None:
    outputs, targets = example((2, 3), layers=2, streams=streams)
    inputs = (outputs.logits, outputs.boxes)
    actual = torch.autograd.grad(criterion()(outputs, targets).total, inputs)
    expected = torch.autograd.grad(
        sum(
            WEIGHTS[name] * loss / streams
            for stream in set_losses(outputs, targets, NO_OBJECT_WEIGHT)
            for layer in stream
            for name, loss in layer.items()
        ),
        inputs,
    )
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_total_is_the_mean_of_the_streams_alone() -> None:
    outputs, targets = example((2, 0, 3), layers=2, streams=2)
    report = criterion()(outputs, targets)
    clean, second = (
        criterion()(Outputs(logits, boxes), targets)
        for logits, boxes in zip(outputs.logits.chunk(2, 1), outputs.boxes.chunk(2, 1), strict=True)
    )
    torch.testing.assert_close(report.total, (clean.total + second.total) / 2)
    torch.testing.assert_close(report.logged["stream/clean"], clean.total.detach())
    torch.testing.assert_close(report.logged["stream/batchformer"], second.total.detach())
    for name in WEIGHTS:
        torch.testing.assert_close(report.logged[f"stream/clean/{name}"], clean.losses[name].detach())
        torch.testing.assert_close(report.logged[f"stream/batchformer/{name}"], second.losses[name].detach())
    assert not any(name.startswith("stream/") for name in clean.logged)


def test_weighted_losses_sum_to_the_total() -> None:
    outputs, targets = example((2, 3), layers=3)
    report = criterion(class_weight=0.5, bbox_weight=3.0, giou_weight=7.0)(outputs, targets)
    for name, loss in report.weighted().items():
        weight = {"loss_ce": 0.5, "loss_bbox": 3.0, "loss_giou": 7.0}[name.rstrip("_0123456789")]
        torch.testing.assert_close(loss, weight * report.losses[name])
    torch.testing.assert_close(report.total, sum(report.weighted().values()))


@pytest.mark.parametrize("streams", [1, 2])
def test_what_is_logged_is_not_trained_on(streams: int) -> None:
    outputs, targets = example((2, 3), layers=2, streams=streams)
    report = criterion()(outputs, targets)
    assert {"class_error", "cardinality_error"} <= report.logged.keys()
    assert not any(value.requires_grad for value in report.logged.values())
    assert all(value.dim() == 0 for value in (*report.logged.values(), *report.losses.values()))
    assert report.losses.keys() == report.weights.keys()
    assert not report.losses.keys() & report.logged.keys()


def test_class_and_cardinality_error() -> None:
    counts = (3, 1)
    outputs, targets = example(counts, layers=2)
    report = criterion()(outputs, targets)
    wrong = matched = off = 0
    for logits, boxes, target in zip(outputs.logits[-1], outputs.boxes[-1], targets, strict=True):
        claimed = sum(row.argmax().item() != CLASSES for row in logits)
        off += abs(claimed - len(target.labels))
        for query, index in match(image_cost(logits, boxes, target)):
            matched += 1
            wrong += logits[query].argmax().item() != target.labels[index].item()
    assert 0 < wrong < matched, "the example must hold both"
    assert report.logged["class_error"].item() == pytest.approx(100 * wrong / matched)
    assert report.logged["cardinality_error"].item() == pytest.approx(off / len(counts))


@pytest.mark.parametrize(("classification", "error"), [(CrossEntropy(), 100.0), (Focal(), 0.0)])
def test_no_object_is_an_answer_and_a_wrong_one(classification: CrossEntropy | Focal, error: float) -> None:
    """Every query ranks the classes correctly, but with cross-entropy prefers no object."""
    targets = random_targets((3, 0, 5), classes=CLASSES)
    found = perfect(targets)
    logits = found.logits.detach()[..., : classification.num_logits(CLASSES)].clone()
    if isinstance(classification, CrossEntropy):
        logits[..., -1] = 21.0
    report = criterion(classification)(replace(found, logits=logits), targets)
    assert report.logged["class_error"] == error


def test_perfect_predictions_cost_nothing() -> None:
    targets = random_targets((3, 0, 5), classes=CLASSES)
    report = criterion()(perfect(targets), targets)
    assert report.total.item() == pytest.approx(0, abs=1e-5)
    assert report.logged["class_error"] == 0
    assert report.logged["cardinality_error"] == 0


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("classification", [CrossEntropy(NO_OBJECT_WEIGHT), Focal()])
def test_without_objects(classification: CrossEntropy | Focal, streams: int) -> None:
    outputs = random_outputs(2, 3, QUERIES, logits=classification.num_logits(CLASSES), streams=streams)
    report = criterion(classification)(outputs, random_targets((0, 0, 0), classes=CLASSES))
    report.total.backward()
    assert report.losses["loss_bbox"] == report.losses["loss_giou"] == 0
    assert outputs.logits.grad.isfinite().all()
    assert (outputs.logits.grad != 0).all(), "background is trained"
    assert torch.equal(outputs.boxes.grad, torch.zeros_like(outputs.boxes)), "zeros, not None"


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("classification", [CrossEntropy(NO_OBJECT_WEIGHT), Focal()])
def test_matched_groups_as_detectors_of_their_own(classification: CrossEntropy | Focal, streams: int) -> None:
    """Each part equals a detector with the part's queries; repeats equal targets that hold each object so often."""
    counts, parts, repeats, weight = (2, 0, 1), 3, 2, 0.5
    targets = random_targets(counts, classes=CLASSES)
    logits = classification.num_logits(CLASSES)
    outputs = random_outputs(2, 3, QUERIES, logits=logits, streams=streams)
    others = random_outputs(2, 3, parts * QUERIES, logits=logits, streams=streams, seed=5)
    group = QueryGroup("many", parts * QUERIES, parts=parts, repeats=repeats, weight=weight)
    report = criterion(classification)(replace(outputs, groups=((group, others),)), targets)
    alone = criterion(classification)(outputs, targets)
    many = [replace(each, boxes=each.boxes.repeat(2, 1), labels=each.labels.repeat(2)) for each in targets]
    split = [
        replace(others, logits=x, boxes=y)
        for x, y in zip(others.logits.split(QUERIES, 2), others.boxes.split(QUERIES, 2), strict=True)
    ]
    of_parts = [criterion(classification)(each, many) for each in split]
    assert {name: loss for name, loss in report.losses.items() if "many" not in name} == alone.losses
    for name in WEIGHTS:
        for mine, theirs in ((f"{name}_many", name), (f"{name}_many_0", f"{name}_0")):
            values = [each.losses[theirs] for each in of_parts]
            if name == "loss_ce" and isinstance(classification, CrossEntropy):  # a mean with weights, not a sum
                assert min(values) < report.losses[mine] < max(values)
            else:
                torch.testing.assert_close(report.losses[mine], torch.stack(values).mean())
            assert report.weights[mine] == weight * WEIGHTS[name]
    if streams > 1:
        torch.testing.assert_close(stream_mean(report), report.total.detach())


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("classification", [CrossEntropy(NO_OBJECT_WEIGHT), Focal()])
def test_assigned_queries_are_not_matched(classification: CrossEntropy | Focal, streams: int) -> None:
    counts = (2, 1)
    targets = random_targets(counts, classes=CLASSES)
    outputs = random_outputs(2, 2, QUERIES, logits=classification.num_logits(CLASSES), streams=streams)
    assigned = torch.tensor([[1, 0, -1, 1, 0], [0, -2, -1, 0, -2]])  # each object twice
    group = QueryGroup("dn", QUERIES, assigned.repeat(streams, 1), parts=2)
    empty = replace(outputs, logits=outputs.logits[:, :, :0], boxes=outputs.boxes[:, :, :0])
    report = criterion(classification)(replace(empty, groups=((group, outputs),)), targets)
    for layer, end in ((0, "_0"), (1, "")):
        per_stream = []
        for stream in range(streams):
            total, classes, logits = torch.zeros(2), [], []
            for image, row in enumerate(assigned.tolist()):
                for query, index in enumerate(row):
                    at = layer, stream * len(counts) + image, query
                    if index >= 0:
                        box, wanted = outputs.boxes[at], targets[image].boxes[index]
                        corners = [box_convert(x[None], "cxcywh", "xyxy") for x in (box, wanted)]
                        total[0] += (box - wanted).abs().sum() / 6  # 3 objects, 2 parts
                        total[1] += (1 - generalized_box_iou(*corners)[0, 0]) / 6
                    if index != -2:
                        logits.append(outputs.logits[at])
                        classes.append(targets[image].labels[index].item() if index >= 0 else -1)
            known = torch.tensor(classes)[None, None]
            num_boxes = torch.tensor(6.0)
            entropy = classification.loss(torch.stack(logits)[None, None], known, num_boxes)[0]
            per_stream.append(torch.stack([entropy, *total]))
        for name, expected in zip(WEIGHTS, torch.stack(per_stream).mean(0), strict=True):
            torch.testing.assert_close(report.losses[f"{name}_dn{end}"], expected)


def test_quality_is_the_overlap_of_matched_pairs() -> None:
    seen = []

    class Spy(Focal):
        needs_quality = True

        def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor, *, quality: Tensor | None = None) -> Tensor:
            seen.append((classes, quality))
            return super().loss(logits, classes, num_boxes)

    targets = random_targets((2, 1), classes=CLASSES)
    outputs = random_outputs(1, 2, QUERIES, logits=CLASSES)
    assigned = torch.tensor([[-1, 1, 0, 1, -2], [-1, 0, -1, -1, -1]])
    criterion(Spy())(replace(outputs, groups=((QueryGroup("dn", QUERIES, assigned), outputs),)), targets)
    _, (classes, quality) = seen
    assert quality is not None
    assert not quality.requires_grad
    for row, query in ((x, y) for x in range(2) for y in range(QUERIES)):
        index, expected = assigned[row, query], torch.tensor(0.0)
        if index >= 0:
            boxes = [outputs.boxes[0, row, query].detach(), targets[row].boxes[index]]
            expected = box_iou(*(box_convert(x[None], "cxcywh", "xyxy") for x in boxes))[0, 0]
        torch.testing.assert_close(quality[0, row, query], expected)
        assert classes[0, row, query] == (targets[row].labels[index] if index >= 0 else index)


def test_number_of_boxes_counts_each_object_once_and_is_at_least_one() -> None:
    seen = []

    class Spy(Focal):
        def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor, **more: Any) -> Tensor:
            seen.append(num_boxes.item())
            return super().loss(logits, classes, num_boxes, **more)

    for counts, streams in (((2, 3), 1), ((2, 3), 2), ((0, 0), 1), ((0, 0), 2)):
        outputs = random_outputs(1, 2, QUERIES, logits=CLASSES, streams=streams)
        criterion(Spy())(outputs, random_targets(counts, classes=CLASSES))
    assert seen == [5, 5, 5, 1, 1, 1]


def test_gradient_reaches_every_logit_and_only_matched_boxes() -> None:
    counts = (2, 3)
    outputs, targets = example(counts, layers=2, streams=2)
    criterion()(outputs, targets).total.backward()
    assert (outputs.logits.grad != 0).all()
    trained = (outputs.boxes.grad != 0).any(-1).sum(-1)
    assert trained.tolist() == [[2, 3, 2, 3]] * 2
    assert outputs.boxes.grad.isfinite().all()


def test_order_of_objects_does_not_matter() -> None:
    outputs, targets = example((4, 3), layers=2)
    turned = [replace(target, boxes=target.boxes.flip(0), labels=target.labels.flip(0)) for target in targets]
    torch.testing.assert_close(criterion()(outputs, turned).total, criterion()(outputs, targets).total)


def test_predictions_that_are_not_finite_give_a_total_that_is_not() -> None:
    outputs, targets = example((2, 3), layers=2)
    logits = outputs.logits.detach().clone()
    logits[0, 1, 2] = float("nan")
    assert not criterion()(replace(outputs, logits=logits), targets).total.isfinite()
    boxes = torch.full_like(outputs.boxes, float("nan"))
    assert not criterion()(replace(outputs, boxes=boxes), targets).total.isfinite()


def test_half_precision_predictions_are_compared_in_float32() -> None:
    outputs, targets = example((2, 3))
    rounded = Outputs(outputs.logits.bfloat16(), outputs.boxes.bfloat16())
    exact = Outputs(rounded.logits.float(), rounded.boxes.float())
    report = criterion()(rounded, targets)
    assert report.total.dtype == torch.float32
    torch.testing.assert_close(report.total, criterion()(exact, targets).total, rtol=0, atol=0)


@pytest.mark.parametrize("streams", [1, 2])
def test_proposals_are_compared_with_objects_of_one_class(streams: int) -> None:
    """Equal to a detector whose outputs are the proposals, with every object in class 0."""
    outputs, targets = example((2, 0, 3), streams=streams)
    proposals, _ = example((4, 1, 2), streams=streams)
    with_proposals = criterion(Focal())(replace(outputs, proposals=replace(proposals, one_class=True)), targets)
    objects = [replace(target, labels=torch.zeros_like(target.labels)) for target in targets]
    alone, of_proposals = criterion(Focal())(outputs, targets), criterion(Focal())(proposals, objects)
    assert set(with_proposals.losses) == {*WEIGHTS, *(f"{name}_enc" for name in WEIGHTS)}
    if streams == 2:
        torch.testing.assert_close(stream_mean(with_proposals), with_proposals.total.detach())
        assert "stream/clean/loss_giou_enc" in with_proposals.logged
    for name in WEIGHTS:
        torch.testing.assert_close(with_proposals.losses[name], alone.losses[name])
        torch.testing.assert_close(with_proposals.losses[f"{name}_enc"], of_proposals.losses[name])
        assert with_proposals.weights[f"{name}_enc"] == WEIGHTS[name]
    torch.testing.assert_close(with_proposals.total, alone.total + of_proposals.total)


def test_a_registered_metric_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a metric: one function (outputs, targets, matches, classification) -> scalar, and one line."""

    def matched_queries(*arguments: object) -> Tensor:
        assert not torch.is_grad_enabled()
        return torch.tensor(float(len(arguments[2].query)))

    monkeypatch.setitem(LOGGED_METRICS, "matched_queries", matched_queries)
    outputs, targets = example((2, 3), layers=2)
    report = criterion()(outputs, targets)
    assert report.logged["matched_queries"] == 2 * 5
    assert {"class_error", "cardinality_error"} < set(report.logged)
    assert "matched_queries" not in report.losses


# ---- masks ----


def focal_and_dice(logits: list[float], wanted: list[bool]) -> tuple[float, float]:
    """Compute both losses pixel by pixel, from the definitions."""
    focal, overlap, total = 0.0, 0.0, 0.0
    for logit, inside in zip(logits, wanted, strict=True):
        probability = 1 / (1 + math.exp(-logit))
        right = probability if inside else 1 - probability
        focal -= (0.25 if inside else 0.75) * (1 - right) ** 2 * math.log(right)
        overlap += probability * inside
        total += probability + inside
    return focal / len(wanted), 1 - (2 * overlap + 1) / (total + 1)


def test_mask_losses_as_pixel_by_pixel() -> None:
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
    found = ObjectMasks.of(masks).select(torch.tensor([2, 0, 2]), torch.tensor([1, 0, 2]))
    assert found.shape == (3, 16, 20)
    for padded, mask in zip(found, (masks[2][1], masks[0][0], masks[2][2]), strict=True):
        height, width = mask.shape
        assert torch.equal(padded[:height, :width], mask)
        assert padded.sum() == mask.sum()


def mask_example(
    counts: tuple[int, ...], streams: int = 1, layers: int = 2
) -> tuple[Outputs, list[Target], torch.Tensor]:
    """Return outputs with masks, targets, and the mask logits (R, Q, h, w)."""
    outputs = random_outputs(layers, len(counts), QUERIES, logits=CLASSES + 1, streams=streams)
    generator = torch.Generator().manual_seed(3)
    masks = torch.randn(streams * len(counts), QUERIES, 5, 6, generator=generator).requires_grad_()
    targets = [
        replace(target, size=size, masks=torch.rand(len(target.labels), *size, generator=generator) < 0.4)
        for target, size in zip(random_targets(counts, classes=CLASSES), SIZES, strict=False)
    ]
    return replace(outputs, masks=Masks.known(masks)), targets, masks


@pytest.mark.parametrize("counts", [(2, 3, 1), (0, 4), (7, 2), (0, 0)])
@pytest.mark.parametrize("streams", [1, 2])
def test_mask_losses_take_the_pairs_of_the_last_layer(counts: tuple[int, ...], streams: int) -> None:
    outputs, targets, masks = mask_example(counts, streams)
    report = criterion(CrossEntropy())(outputs, targets)
    padded_size = [max(target.size[side] for target in targets) for side in (0, 1)]
    sums = torch.zeros(2)
    for stream in range(streams):
        rows = slice(stream * len(counts), (stream + 1) * len(counts))
        alone = Outputs(outputs.logits[-1:, rows], outputs.boxes[-1:, rows])
        pairs = match_one_by_one(alone, targets)
        for image, query, index in pairs:
            wanted = torch.zeros(padded_size, dtype=torch.bool)
            height, width = targets[image].size
            wanted[:height, :width] = targets[image].masks[index]
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
    outputs, targets, _ = mask_example((2, 3))
    report = criterion(CrossEntropy(), mask_weight=3.0, dice_weight=0.5)(outputs, targets)
    masks = {name: weight for name, weight in report.weights.items() if "mask" in name or "dice" in name}
    assert masks == {"loss_mask": 3.0, "loss_dice": 0.5}
    boxes_only = criterion(CrossEntropy())(replace(outputs, masks=None), targets)
    assert report.losses.keys() - boxes_only.losses.keys() == masks.keys()
    for name, loss in boxes_only.losses.items():
        assert torch.equal(loss, report.losses[name])


def test_mask_losses_of_each_stream_are_logged() -> None:
    outputs, targets, _ = mask_example((2, 3), streams=2)
    logged = criterion(CrossEntropy())(outputs, targets).logged
    halves = [logged[f"stream/{stream}/loss_dice"] for stream in ("clean", "batchformer")]
    assert halves[0] != halves[1]
    report = criterion(CrossEntropy())(outputs, targets)
    assert sum(halves) / 2 == pytest.approx(report.losses["loss_dice"].item())
    totals = [logged[f"stream/{stream}"] for stream in ("clean", "batchformer")]
    assert sum(totals) / 2 == pytest.approx(report.total.item())


# ---- reports ----


def example_report(*, streams: bool) -> LossReport:
    losses = {name: torch.tensor(value) for name, value in (("loss_ce_0", 4.0), ("loss_ce", 1.0), ("loss_ce_enc", 2.0))}
    logged = {"stream/clean": torch.tensor(16.0), "stream/batchformer": torch.tensor(12.0)} if streams else {}
    return LossReport(losses, dict.fromkeys(losses, 2.0), logged)


def test_weights_of_auxiliary_layers_and_proposals_are_left_out() -> None:
    added = example_report(streams=False).extended({"loss_localization": torch.tensor(3.0)}, {"loss_localization": 0.1})
    assert added.term_weights == {"loss_ce": 2.0, "loss_localization": 0.1}


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_added_terms_are_weighted_in_the_total_and_in_every_stream(weight: float) -> None:
    before, term = example_report(streams=True), torch.tensor(8.0, requires_grad=True)
    after = before.extended({"loss_localization": term}, {"loss_localization": weight})
    assert after.losses["loss_localization"] == 8
    assert after.total == 14 + 8 * weight
    assert (after.logged["stream/clean"], after.logged["stream/batchformer"]) == (16 + 8 * weight, 12 + 8 * weight)
    assert not after.logged["stream/clean"].requires_grad
    assert before.logged["stream/clean"] == 16, "the first report is unchanged"


def test_without_streams_none_are_logged() -> None:
    after = example_report(streams=False).extended({"loss_localization": torch.tensor(8.0)}, {"loss_localization": 1.0})
    assert not after.logged
    assert example_report(streams=True).extended({}, {}).logged.keys() == example_report(streams=True).logged.keys()
