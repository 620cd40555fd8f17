"""Set criterion of DETR: matching, then losses of classes, boxes and masks for every decoder layer and stream.

Shape legend: L decoder layers, R rows (streams x images), Q queries, K logits, M matched pairs, T objects of an image,
h x w cells of a predicted mask, H x W pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from detr_bf.common import distributed
from detr_bf.common.boxes import corners_of, generalized_iou, iou
from detr_bf.common.devices import send, tensor_on
from detr_bf.common.errors import InputError
from detr_bf.common.extensions import Registry
from detr_bf.common.masks import Masks, ObjectMasks, ProductMasks
from detr_bf.common.structures import GROUP, Distributions, Outputs, PaddedTargets, QueryGroup, Target
from detr_bf.losses.classification import (
    NO_OBJECT,
    NOT_SUPERVISED,
    Classification,
    IouAware,
    MatchabilityAware,
    at_least_float32,
    check_factors,
)
from detr_bf.losses.distributions import distillation_loss, localization_loss
from detr_bf.losses.matcher import HungarianMatcher, Matches
from detr_bf.losses.point_masks import point_losses

STREAM_NAMES = ("clean", "batchformer")
_REPEATED = re.compile(r".*_(\d+|enc)")  # terms of auxiliary layers and of proposals


@dataclass(frozen=True)
class LossReport:
    """Result of a criterion: the terms of the loss with their weights, and values that are only logged.

    With two streams ``logged`` holds ``stream/clean`` and ``stream/batchformer``, whose mean is the total.
    """

    losses: dict[str, Tensor]  # scalars, not weighted; auxiliary layers end in _0, _1, ..., see SetCriterion
    weights: dict[str, float]
    logged: dict[str, Tensor] = field(default_factory=dict)  # scalars without gradient, never summed

    def weighted(self) -> dict[str, Tensor]:
        return {name: self.weights[name] * loss for name, loss in self.losses.items()}

    @property
    def term_weights(self) -> dict[str, float]:
        """Weights by term, without those of auxiliary layers and proposals, which equal those of the last layer."""
        return {name: weight for name, weight in self.weights.items() if not _REPEATED.fullmatch(name)}

    def extended(self, losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> LossReport:
        """Add terms computed over all rows, to the total and to the logged total of every stream."""
        report = LossReport(self.losses | dict(losses), self.weights | dict(weights), dict(self.logged))
        for name in (f"stream/{stream}" for stream in STREAM_NAMES):
            if name in report.logged and losses:
                added = torch.stack([weights[term] * loss.detach() for term, loss in losses.items()]).sum()
                report.logged[name] = report.logged[name] + added
        return report

    @cached_property
    def total(self) -> Tensor:
        return torch.stack(list(self.weighted().values())).sum()


@dataclass(frozen=True)
class SetCriterion:
    """Loss of DETR (Carion et al. 2020, arXiv 2005.12872, section 3.1), averaged over the streams.

    Each stream is matched separately; with two streams the result is the mean of their losses (BatchFormerV2, arXiv
    2204.01254, section 3.3). Divisors count the objects of all ranks, so that the mean over the ranks equals the loss
    of one process with the whole batch, except for the denoising queries of DINO and RT-DETR: each rank chooses their
    number of groups by the objects of its own images; and the distillation of D-FINE takes means over the queries of a
    rank. A ``local`` criterion, which needs a local classification, does not communicate: in evaluation the ranks have
    different numbers of batches.

    Args:
        fgl_weight, ddf_weight: weights of the losses of distributions (:mod:`detr_bf.losses.distributions`).
        union: of a detector with distributions, train all boxes but those of denoising on the union of the pairs of all
            layers, first boxes and proposals (:func:`~detr_bf.losses.matcher.united_pairs`), and divide their losses by
            its size.
        box_weighting: ``iou`` or ``giou`` multiplies the loss of the generalised IoU of each pair with that value,
            without gradient, which also becomes the quality in the classification; or ``none``.
        mask_weight, dice_weight: weights of the losses of masks. DETR's mask head: focal loss and Dice of all pixels,
            in the last layer. RF-DETR's: cross-entropy and Dice at points, in all layers, groups and for the
            proposals, see :mod:`detr_bf.losses.point_masks`.
        mean_of_groups: divide all losses by the number of groups of Group DETR, the main queries included, instead of
            adding those of the groups (LW-DETR, RF-DETR).

    Raises:
        InputError: a weight is negative or all are 0, or ``box_weighting`` is unknown, or gives the matchability-aware
            loss or the IoU-aware cross-entropy a quality below 0.
    """

    classification: Classification
    matcher: HungarianMatcher
    class_weight: float = 1.0
    bbox_weight: float = 5.0
    giou_weight: float = 2.0
    mask_weight: float = 1.0
    dice_weight: float = 1.0
    fgl_weight: float = 0.15
    ddf_weight: float = 1.5
    union: bool = True
    box_weighting: str = "none"
    mean_of_groups: bool = False
    local: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=lambda: dict(LOGGED_METRICS))

    def __post_init__(self) -> None:
        names = ("class", "bbox", "giou", "mask", "dice", "fgl", "ddf")
        check_factors("SetCriterion", {f"{name}_weight": getattr(self, f"{name}_weight") for name in names})
        if self.box_weighting not in ("none", "iou", "giou"):
            raise InputError(f"box_weighting={self.box_weighting} must be none, iou or giou")
        if self.box_weighting == "giou" and isinstance(self.classification, MatchabilityAware | IouAware):
            raise InputError(
                "box_weighting=giou may be negative, which classification=mal and ia_bce cannot use: set iou or none"
            )

    def __call__(self, outputs: Outputs, targets: Sequence[Target]) -> LossReport:
        """Compute the loss of R = num_streams x B rows for B targets.

        Terms of the proposals end in ``_enc``, those of a group of queries in its name. The losses of a group are
        divided by the number of objects times its parts and repeats.
        """
        padded = PaddedTargets.of(targets, outputs.num_streams)
        if outputs.layer_masks:
            padded = replace(padded, masks=_object_masks(targets, outputs.layer_masks[0].size))
        objects = _num_objects(outputs, padded, self.local)
        if self.mean_of_groups:
            objects = objects * (1 + sum(group.parts for group, _ in outputs.groups if group.name == GROUP))
        num_boxes = _divisor(objects, self.local)
        groups = [*_proposals(outputs), *outputs.groups]
        divided = [(group, *_divided(group, predicted, padded)) for group, predicted in groups]
        matches, *of_groups, united = self._matched(
            [(outputs, padded, 1)]
            + [(predicted, wanted, group.repeats) for group, predicted, wanted in divided if group.assigned is None]
        )
        streams = self._stream_losses(outputs, padded, matches, num_boxes, united)
        if outputs.masks is not None and not outputs.layer_masks:
            by_row = _mask_losses(outputs, outputs.masks, targets, matches)
            streams |= {name: _per_stream(outputs, loss) / num_boxes for name, loss in by_row.items()}
        losses = {  # the mean of the streams; all layers but the last have a number
            name + ("" if layer == len(per_stream) - 1 else f"_{layer}"): loss
            for name, per_stream in streams.items()
            for layer, loss in enumerate(per_stream.mean(1))
        }
        factors = dict.fromkeys(losses, 1.0)
        for group, predicted, wanted in divided:
            matched = of_groups.pop(0) if group.assigned is None else None
            for name, per_stream in self._group_losses(group, predicted, wanted, matched, objects, united).items():
                streams[f"{name}_{group.name}"] = per_stream
                for layer, loss in enumerate(per_stream.mean(1)):
                    term = f"{name}_{group.name}" + ("" if layer == len(per_stream) - 1 else f"_{layer}")
                    losses[term], factors[term] = loss, group.weight
        kinds = {
            "loss_ce": self.class_weight,
            "loss_bbox": self.bbox_weight,
            "loss_giou": self.giou_weight,
            "loss_mask": self.mask_weight,
            "loss_dice": self.dice_weight,
            "loss_fgl": self.fgl_weight,
            "loss_ddf": self.ddf_weight,
        }
        weights = {
            name: factors[name] * weight for name in losses for kind, weight in kinds.items() if name.startswith(kind)
        }
        logged = _stream_log(streams, weights) if outputs.num_streams > 1 else {}
        with torch.no_grad():
            logged |= {
                name: metric(outputs, padded, matches, self.classification) for name, metric in self.metrics.items()
            }
        return LossReport(losses, weights, logged)

    def _matched(self, problems: Sequence[tuple[Outputs, PaddedTargets, int]]) -> tuple[Any, ...]:
        """Return the matches of the main queries and of each group, then the union or None, see :class:`_Union`."""
        outputs, *_ = problems[0]
        if outputs.distributions is None:
            return *self.matcher.match_all(problems), None
        matches, pairs = self.matcher.match_united(problems)
        layers, device, streams = len(outputs.logits), outputs.logits.device, outputs.num_streams
        if not self.union:
            return *matches, _Union(
                None, None, _root_shares(outputs, [len(matches[0].row) // layers // streams] * streams)
            )
        images = outputs.logits.shape[1] // streams
        counts = torch.bincount(pairs[0] // images, minlength=streams)
        total = send(counts.double(), device)
        divisor = _divisor(total if self.local else distributed.all_reduce_sum(total), self.local)
        return *matches, _Union(send(pairs, device), divisor, _root_shares(outputs, counts.tolist()))

    def _group_losses(
        self,
        group: QueryGroup,
        outputs: Outputs,
        targets: PaddedTargets,
        matches: Matches | None,
        objects: Tensor,
        united: _Union | None,
    ) -> dict[str, Tensor]:
        """Return the losses of a group or of the proposals by name, each (L, streams).

        Args:
            outputs, targets: of :func:`_divided`.
            matches: None if the group has an assignment.
        """
        not_supervised = None
        if matches is None:
            assert group.assigned is not None
            matches, not_supervised = Matches.of(group.assigned, len(outputs.logits), outputs.logits.device)
            united = united and replace(united, pairs=None, divisor=None)
        if group.assigned is None:  # without objects, too, each part counts as the main queries do
            divisor = group.parts * _divisor(objects * group.repeats, self.local)
        else:
            divisor = _divisor(objects * group.parts, self.local)
        return self._stream_losses(outputs, targets, matches, divisor, united, not_supervised)

    def _stream_losses(
        self,
        outputs: Outputs,
        targets: PaddedTargets,
        matches: Matches,
        num_boxes: Tensor,
        united: _Union | None,
        not_supervised: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the losses by name, each (L, streams); ``not_supervised`` (R, Q) marks queries without a loss."""
        num_streams = outputs.num_streams
        classes = _target_classes(outputs, targets, matches)
        if not_supervised is not None:
            classes = classes.masked_fill(not_supervised, NOT_SUPERVISED)
        overlap = partial(generalized_iou, eps=self.matcher.giou_eps) if self.box_weighting == "giou" else iou
        quality = None
        if self.classification.needs_quality:
            quality = _by_query(outputs, matches, _overlaps(outputs, targets, matches, overlap))
        per_stream = [
            self.classification.loss(at_least_float32(logits), stream_classes, num_boxes, quality=stream_quality)
            for logits, stream_classes, stream_quality in zip(
                outputs.logits.chunk(num_streams, 1),
                classes.chunk(num_streams, 1),
                [None] * num_streams if quality is None else quality.chunk(num_streams, 1),
                strict=True,
            )
        ]
        if united is not None and united.pairs is not None and united.divisor is not None:
            matches, num_boxes = Matches.of_all_layers(united.pairs, len(outputs.logits)), united.divisor
        distance, disparity = _box_losses(outputs, targets, matches, self.matcher.giou_eps)
        if self.box_weighting != "none":
            disparity = disparity * _overlaps(outputs, targets, matches, overlap)
        of_pairs, further = {"loss_bbox": distance, "loss_giou": disparity}, {}
        if outputs.distributions is not None:
            assert united is not None
            of_pairs["loss_fgl"], further["loss_ddf"] = _distribution_losses(
                outputs, outputs.distributions, targets, matches, united.shares
            )
        if outputs.layer_masks:
            of_pairs["loss_mask"], of_pairs["loss_dice"] = point_losses(
                outputs,
                targets,
                (matches.row, matches.query, matches.target),
                cells_per_point=self.matcher.cells_per_point,
                fixed=self.matcher.fixed_points,
            )
        averaged = {
            name: _per_stream(outputs, _by_row(outputs, matches, losses)) / num_boxes.to(losses.dtype)
            for name, losses in of_pairs.items()
        }
        return {"loss_ce": torch.stack(per_stream, 1), **averaged, **further}


@dataclass(frozen=True)
class _Union:
    """Pairs on which the boxes of all layers of a detector with distributions are trained, first boxes included."""

    pairs: Tensor | None  # (3, M) row, query, object; None: each layer has pairs of its own
    divisor: Tensor | None  # (streams,) float64, of the losses of these pairs
    shares: list[tuple[float, float]]  # of each stream, of matched and other queries in the distillation


def _root_shares(outputs: Outputs, matched: Sequence[int]) -> list[tuple[float, float]]:
    """Return the shares of the roots of the numbers of ``matched`` and of other queries, for each stream."""
    _, rows, queries, _ = outputs.logits.shape
    roots = [(math.sqrt(number), math.sqrt(rows // outputs.num_streams * queries - number)) for number in matched]
    return [(one / (one + other), other / (one + other)) for one, other in roots]


def _distribution_losses(
    outputs: Outputs,
    distributions: Distributions,
    targets: PaddedTargets,
    matches: Matches,
    shares: Sequence[tuple[float, float]],
) -> tuple[Tensor, Tensor]:
    """Return the localisation loss of each pair (M,) and the distillation loss (L, streams)."""
    overlaps = _overlaps(outputs, targets, matches, iou)
    wanted = targets.boxes[matches.row, matches.target]
    quality = _by_query(outputs, matches, overlaps)
    matched = _by_query(outputs, matches, torch.ones_like(overlaps)) > 0
    scores = at_least_float32(outputs.logits[-1].detach()).sigmoid().amax(-1)
    parts = (x.chunk(outputs.num_streams, 1) for x in (distributions.logits, quality, matched))
    streams = zip(*parts, scores.chunk(outputs.num_streams), shares, strict=True)
    distillation = torch.stack([distillation_loss(*stream) for stream in streams], 1)
    return localization_loss(distributions, matches, wanted, overlaps), distillation


def _proposals(outputs: Outputs) -> list[tuple[QueryGroup, Outputs]]:
    """Return the proposals of the main queries, if there are any, and those of their groups."""
    proposals = outputs.proposals
    if proposals is None:
        return []
    of_groups = [(replace(group, name=f"{group.name}_enc"), predicted) for group, predicted in proposals.groups]
    return [(QueryGroup("enc", 0), proposals), *of_groups]


def _divided(group: QueryGroup, outputs: Outputs, targets: PaddedTargets) -> tuple[Outputs, PaddedTargets]:
    """Return outputs and targets of a group with each part that is matched as a row of its own."""
    if outputs.one_class:
        targets = targets.of_one_class()
    if group.assigned is not None or group.parts == 1:
        return outputs, targets
    logits, boxes = (x.unflatten(2, (group.parts, -1)).flatten(1, 2) for x in (outputs.logits, outputs.boxes))
    return replace(outputs, logits=logits, boxes=boxes), targets.repeated(group.parts)


def _target_classes(outputs: Outputs, targets: PaddedTargets, matches: Matches) -> Tensor:
    """Return (L, R, Q) int64: the label of the matched object, -1 for none."""
    classes = torch.full(outputs.logits.shape[:3], NO_OBJECT, dtype=torch.int64, device=outputs.logits.device)
    classes[matches.layer, matches.row, matches.query] = targets.labels[matches.row, matches.target]
    return classes


def class_error(outputs: Outputs, targets: PaddedTargets, matches: Matches, classification: Classification) -> Tensor:
    """Return the share of matched queries of the last layer with a wrong class, in percent.

    The prediction of a query is the largest of all its logits; with cross-entropy a matched query that predicts
    no-object is an error, as in the released code of DETR.
    """
    logits, wanted = outputs.logits[-1], _target_classes(outputs, targets, matches)[-1]
    matched = wanted >= 0
    right = matched & (logits.argmax(-1) == wanted)
    return 100 - 100 * right.sum() / matched.sum().clamp(min=1)


def cardinality_error(
    outputs: Outputs, targets: PaddedTargets, matches: Matches, classification: Classification
) -> Tensor:
    """Return the mean error of the number of objects that the last layer predicts in an image."""
    logits = outputs.logits[-1]
    counts = tensor_on(logits.device, targets.counts, torch.float)
    return (classification.is_object(logits).sum(1) - counts).abs().mean()


Metric = Callable[[Outputs, PaddedTargets, Matches, Classification], Tensor]  # -> scalar, without gradient
# Metrics logged in training, all of them
LOGGED_METRICS: Registry[Metric] = Registry(
    "metric", {"class_error": class_error, "cardinality_error": cardinality_error}
)


def _box_losses(outputs: Outputs, targets: PaddedTargets, matches: Matches, giou_eps: float) -> tuple[Tensor, Tensor]:
    """Return L1 and 1 - GIoU of the matched pairs: twice (M,)."""
    predicted = at_least_float32(outputs.boxes[matches.layer, matches.row, matches.query])
    wanted = targets.boxes[matches.row, matches.target]
    distance = (predicted - wanted).abs().sum(-1)
    return distance, 1 - generalized_iou(corners_of(predicted), corners_of(wanted), giou_eps)


@torch.no_grad()
def _overlaps(
    outputs: Outputs, targets: PaddedTargets, matches: Matches, overlap: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return ``overlap`` of the boxes of each matched pair (M,), without gradient."""
    predicted = at_least_float32(outputs.boxes[matches.layer, matches.row, matches.query])
    return overlap(corners_of(predicted), corners_of(targets.boxes[matches.row, matches.target]))


def _by_query(outputs: Outputs, matches: Matches, of_pairs: Tensor) -> Tensor:
    """Return the values (M,) of matched pairs at their queries (L, R, Q), 0 for other queries."""
    empty = of_pairs.new_zeros(outputs.logits.shape[:3])
    return empty.index_put((matches.layer, matches.row, matches.query), of_pairs)


def _by_row(outputs: Outputs, matches: Matches, of_pairs: Tensor) -> Tensor:
    """Sum the values (M,) of matched pairs by layer and row: (L, R)."""
    empty = of_pairs.new_zeros(outputs.boxes.shape[:2])
    return empty.index_put((matches.layer, matches.row), of_pairs, accumulate=True)


def _num_objects(outputs: Outputs, targets: PaddedTargets, local: bool) -> Tensor:
    """Return the number of objects of one stream, summed over the ranks unless ``local``."""
    count = sum(targets.counts) / outputs.num_streams
    here = torch.full((), count, dtype=torch.float64, device=outputs.logits.device)
    return here if local else distributed.all_reduce_sum(here)


def _divisor(objects: Tensor, local: bool) -> Tensor:
    """Return a number of objects, at least 1, as the mean over the ranks unless ``local``."""
    return objects.clamp(min=1) / (1 if local else distributed.world_size())


def _per_stream(outputs: Outputs, by_row: Tensor) -> Tensor:
    """Losses summed by layer and row (L, R) -> by layer and stream (L, streams)."""
    return by_row.unflatten(1, (outputs.num_streams, -1)).sum(2)


def _object_masks(targets: Sequence[Target], size: tuple[int, int] | None = None) -> ObjectMasks:
    """Return the masks of all objects, padded to ``size`` or to the largest image."""
    known = [image.masks for image in targets if image.masks is not None]
    assert len(known) == len(targets), "a detector with a mask head is trained on masks"
    return ObjectMasks.of(known, size)


def _mask_losses(
    outputs: Outputs, masks: Masks | ProductMasks, targets: Sequence[Target], matches: Matches
) -> dict[str, Tensor]:
    """Return the mask losses of the last layer, summed by row: (1, R) by name."""
    last = len(matches.row) // len(outputs.logits)  # pairs of a layer
    row, query, target = (x[len(x) - last :] for x in (matches.row, matches.query, matches.target))
    wanted = _object_masks(targets).select(row % len(targets), target)
    empty = torch.zeros(masks.rows, device=row.device)
    focal, dice = mask_losses(at_least_float32(masks.of(row, query)), wanted)
    return {
        "loss_mask": empty.index_put((row,), focal, accumulate=True)[None],
        "loss_dice": empty.index_put((row,), dice, accumulate=True)[None],
    }


def _stream_log(streams: dict[str, Tensor], weights: dict[str, float]) -> dict[str, Tensor]:
    """Return the weighted total of each stream, and its unweighted terms of the last layer and the proposals."""
    total = torch.stack([weights[name] * per_stream.sum(0) for name, per_stream in streams.items()]).sum(0).detach()
    logged = {}
    for index, stream in enumerate(STREAM_NAMES):
        logged[f"stream/{stream}"] = total[index]
        logged |= {f"stream/{stream}/{name}": value[-1, index].detach() for name, value in streams.items()}
    return logged


def mask_losses(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return focal loss (mean over the pixels) and 1 - DICE of each pair of query and object: twice (M,).

    Focal loss: Lin et al. 2017, arXiv 1708.02002; DICE: Milletari et al. 2016, arXiv 1606.04797 (DETR,
    section 4.4).

    Args:
        logits: (M, h, w), resized to the pixels of ``wanted``.
        wanted: (M, H, W) bool.
    """
    enlarged = F.interpolate(logits[:, None], size=wanted.shape[-2:], mode="bilinear")[:, 0].flatten(1)
    target = wanted.flatten(1).to(enlarged.dtype)
    focal = sigmoid_focal_loss(enlarged, target, alpha=0.25, gamma=2.0, reduction="none").mean(1)
    probability = enlarged.sigmoid()
    overlap = 2 * (probability * target).sum(1)
    dice = 1 - (overlap + 1) / (probability.sum(1) + target.sum(1) + 1)
    return focal, dice
