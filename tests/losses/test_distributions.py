"""Losses of distributions against plain loops, and the union of matchings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Distributions, Outputs, PaddedTargets, QueryGroup, Target
from detr_bf.detectors.distributions import bin_distances, moved_sides
from detr_bf.losses import Focal, HungarianMatcher, IouAware, LossReport, MatchabilityAware, SetCriterion, Varifocal
from detr_bf.losses.distributions import bins_around, side_distances
from detr_bf.losses.matcher import united_pairs

IMAGES, LAYERS, QUERIES, CLASSES, REG_MAX = 2, 3, 6, 4, 8
BINS = bin_distances(REG_MAX, torch.tensor([0.5]), torch.tensor([4.0])).double()


pytestmark = pytest.mark.usefixtures("float64")


def predicted(streams: int = 1, layers: int = LAYERS) -> Outputs:
    """Return random outputs, with first boxes and proposals as D-FINE has."""
    rows = streams * IMAGES
    first = torch.rand(rows, QUERIES, 4) * 0.5 + 0.2
    logits = torch.randn(layers, rows, QUERIES, 4, REG_MAX + 1).requires_grad_()
    boxes = moved_sides(first, (logits.softmax(-1) * BINS).sum(-1))
    others = [Outputs(torch.randn(1, rows, QUERIES, CLASSES), first[None] + x, streams) for x in (0.0, 0.01)]
    return Outputs(
        torch.randn(layers, rows, QUERIES, CLASSES),
        boxes,
        streams,
        proposals=others[0],
        groups=((QueryGroup("pre", QUERIES), others[1]),),
        distributions=Distributions(logits, first, BINS),
    )


def targets(counts: tuple[int, ...] = (3, 1)) -> list[Target]:
    return [
        Target(image, torch.rand(count, 4) * 0.4 + 0.3, torch.randint(CLASSES, (count,)), (1, 1), (1, 1))
        for image, count in enumerate(counts)
    ]


def report(outputs: Outputs, wanted: list[Target], **changes: object) -> LossReport:
    return SetCriterion(Varifocal(), HungarianMatcher(Focal(), 2.0), **changes)(outputs, wanted)


def test_sides_and_distances_are_inverse() -> None:
    boxes, wanted = torch.rand(50, 4) + 0.1, torch.rand(50, 4) + 0.1
    torch.testing.assert_close(moved_sides(boxes, side_distances(boxes, wanted)), wanted)


def test_two_bins_have_the_mean_of_the_distance() -> None:
    assert (BINS.diff() > 0).all()
    torch.testing.assert_close(BINS, -BINS.flip(0))
    torch.testing.assert_close(BINS[[0, 1, -1]], torch.tensor([-1.0, -0.5, 1.0]))
    inside, outside = torch.linspace(-1, 1, 101), torch.tensor([-7.0, 9.0])
    left, weight = bins_around(inside, BINS)
    torch.testing.assert_close(BINS[left] * (1 - weight) + BINS[left + 1] * weight, inside)
    left, weight = bins_around(outside, BINS)
    assert (left + weight).tolist() == [0.0, REG_MAX]


def plain_losses(outputs: Outputs, wanted: list[Target], pairs: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """Return both losses of each layer for pairs of row, query and object, with loops."""
    assert outputs.distributions is not None
    logits, first = outputs.distributions.logits, outputs.distributions.boxes
    known = {(row, query): target for row, query, target in pairs}
    fgl, ddf = torch.zeros(LAYERS), torch.zeros(LAYERS)
    for layer in range(LAYERS):
        parts: dict[bool, list[Tensor]] = {True: [], False: []}
        for row in range(logits.shape[1]):
            for query in range(QUERIES):
                weight = outputs.logits[-1, row, query].sigmoid().max()
                if (row, query) in known:
                    box = wanted[row % IMAGES].boxes[known[row, query]]
                    weight = overlap(outputs.boxes[layer, row, query], box).detach()
                    for side, distance in enumerate(side_distances(first[row, query][None], box[None])[0]):
                        left, share = bins_around(distance[None], BINS)
                        entropy = -logits[layer, row, query, side].log_softmax(-1)
                        fgl[layer] += weight * ((1 - share) * entropy[left] + share * entropy[left + 1])[0]
                for side in range(4):
                    now, last = (logits[each, row, query, side] / 5 for each in (layer, -1))
                    p = last.softmax(-1)
                    parts[(row, query) in known].append(weight * 25 * (p * (p.log() - now.log_softmax(-1))).sum())
        roots = {kind: len(values) ** 0.5 for kind, values in parts.items()}
        means = {kind: torch.stack(values).mean() if values else 0.0 for kind, values in parts.items()}
        ddf[layer] = sum(roots[kind] * means[kind] for kind in parts) / sum(roots.values())
    return fgl / max(len(pairs), 1), ddf


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """IoU of two boxes cx, cy, w, h; a negative size counts as 0."""
    sides = [torch.stack([x[:2] - x[2:].clamp(min=0) / 2, x[:2] + x[2:].clamp(min=0) / 2]) for x in (a, b)]
    low, high = torch.maximum(sides[0][0], sides[1][0]), torch.minimum(sides[0][1], sides[1][1])
    both = (high - low).clamp(min=0).prod()
    return both / (a[2:].clamp(min=0).prod() + b[2:].clamp(min=0).prod() - both)


@pytest.mark.parametrize("counts", [(3, 1), (0, 2), (0, 0), (QUERIES + 2, 1)])
def test_losses_are_those_of_the_plain_loops(counts: tuple[int, ...]) -> None:
    outputs, wanted = predicted(), targets(counts)
    found = report(outputs, wanted).losses
    parts = [outputs, outputs.proposals, outputs.groups[0][1]]
    matcher = HungarianMatcher(Focal(), 2.0)
    votes: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        each = matcher(part, PaddedTargets.of(wanted))
        for row, query, target in zip(each.row.tolist(), each.query.tolist(), each.target.tolist(), strict=True):
            votes.setdefault((row, query), []).append(target)
    pairs = [(*place, max(sorted(set(voted)), key=voted.count)) for place, voted in sorted(votes.items())]
    fgl, ddf = plain_losses(outputs, wanted, pairs)
    for layer in range(LAYERS):
        end = "" if layer == LAYERS - 1 else f"_{layer}"
        torch.testing.assert_close(found[f"loss_fgl{end}"], fgl[layer])
        torch.testing.assert_close(found[f"loss_ddf{end}"], ddf[layer])


def test_the_last_layer_teaches_and_learns_nothing_from_the_distillation() -> None:
    outputs = predicted()
    assert outputs.distributions is not None
    losses = report(outputs, targets()).losses
    total = sum(loss for name, loss in losses.items() if name.startswith("loss_ddf"))
    (gradient,) = torch.autograd.grad(total, outputs.distributions.logits)
    assert losses["loss_ddf"] == 0
    assert gradient[:-1].abs().amax((1, 2, 3, 4)).min() > 0
    assert not gradient[-1].any()


def test_boxes_of_all_parts_learn_from_the_union() -> None:
    """A pair of any part trains the boxes of all parts, which each layer's own pairs do not."""
    outputs, wanted = predicted(), targets()
    together, apart = (report(outputs, wanted, union=union).losses for union in (True, False))
    assert together.keys() == apart.keys()
    for name in together:
        same = torch.allclose(together[name], apart[name])
        assert same == name.startswith("loss_ce") or name == "loss_ddf", name
    matcher = HungarianMatcher(Focal(), 2.0)
    parts = (outputs, outputs.proposals, outputs.groups[0][1])
    _, union = matcher.match_united([(part, PaddedTargets.of(wanted), 1) for part in parts])
    queries = [outputs.boxes[-1, row, query] for row, query in union[:2].T.tolist()]
    boxes = [wanted[row].boxes[target] for row, target in union[[0, 2]].T.tolist()]
    distance = (torch.stack(queries) - torch.stack(boxes)).abs().sum() / len(boxes)
    torch.testing.assert_close(together["loss_bbox"], distance)


def test_each_stream_has_its_own_union_and_divisor() -> None:
    """The losses of two streams are the mean of those of each alone."""
    both, wanted = predicted(streams=2), targets()

    def stream(part: Outputs, index: int) -> Outputs:
        logits, boxes = (x.chunk(2, 1)[index] for x in (part.logits, part.boxes))
        kept = part.distributions
        if kept is not None:
            kept = Distributions(kept.logits.chunk(2, 1)[index], kept.boxes.chunk(2)[index], kept.distances)
        proposals = None if part.proposals is None else stream(part.proposals, index)
        groups = tuple((group, stream(each, index)) for group, each in part.groups)
        return Outputs(logits, boxes, proposals=proposals, groups=groups, distributions=kept)

    alone = [report(stream(both, index), wanted).losses for index in (0, 1)]
    for name, loss in report(both, wanted).losses.items():
        torch.testing.assert_close(loss, (alone[0][name] + alone[1][name]) / 2, msg=name)
    assert not torch.allclose(alone[0]["loss_fgl"], alone[1]["loss_fgl"])


def test_a_query_keeps_its_most_frequent_object() -> None:
    pairs = torch.tensor([[0, 0, 0, 0, 1, 1], [4, 4, 4, 2, 4, 4], [0, 1, 1, 0, 3, 3]])
    assert united_pairs(pairs).tolist() == [[0, 0, 1], [2, 4, 4], [0, 1, 3]]
    assert united_pairs(pairs[:, :0]).shape == (3, 0)


@pytest.mark.parametrize("weighting", ["iou", "giou"])
def test_weighting_of_boxes(weighting: str) -> None:
    outputs, wanted = predicted(layers=1), targets((1, 0))
    plain, weighted = (report(outputs, wanted, box_weighting=each, union=False) for each in ("none", weighting))
    disparity = plain.losses["loss_giou"]
    query = HungarianMatcher(Focal(), 2.0)(outputs, PaddedTargets.of(wanted)).query
    value = 1 - disparity if weighting == "giou" else overlap(outputs.boxes[0, 0, query[0]], wanted[0].boxes[0])
    torch.testing.assert_close(weighted.losses["loss_giou"], disparity * value)
    torch.testing.assert_close(weighted.losses["loss_bbox"], plain.losses["loss_bbox"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"box_weighting": "ciou"}, "box_weighting=ciou must be none, iou or giou"),
        ({"box_weighting": "giou", "classification": MatchabilityAware()}, "giou may be negative"),
        ({"box_weighting": "giou", "classification": IouAware()}, "giou may be negative"),
        ({"fgl_weight": -1.0}, "fgl_weight=-1.0 must be 0 or more"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        SetCriterion(**{"classification": Focal(), "matcher": HungarianMatcher(Focal()), **changes})
