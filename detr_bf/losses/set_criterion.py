"""Set criterion of DETR: matching, then losses of classes, boxes and masks for every decoder layer and stream.

Shape legend: L decoder layers, R rows (streams x images), Q queries, K logits, M matched pairs, T objects of an image,
h x w cells of a predicted mask, H x W pixels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_convert, sigmoid_focal_loss

from detr_bf.common import distributed
from detr_bf.common.boxes import generalized_iou, iou
from detr_bf.common.devices import tensor_on
from detr_bf.common.extensions import Registry
from detr_bf.common.structures import Masks, Outputs, PaddedTargets, QueryGroup, Target
from detr_bf.losses.classification import (
    NO_OBJECT,
    NOT_SUPERVISED,
    Classification,
    at_least_float32,
    check_factors,
)
from detr_bf.losses.matcher import HungarianMatcher, Matches

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
    number of groups by the objects of its own images. A ``local`` criterion, which needs a local classification, does
    not communicate: in evaluation the ranks have different numbers of batches.
    """

    classification: Classification
    matcher: HungarianMatcher
    class_weight: float = 1.0
    bbox_weight: float = 5.0
    giou_weight: float = 2.0
    mask_weight: float = 1.0
    dice_weight: float = 1.0
    local: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=lambda: dict(LOGGED_METRICS))

    def __post_init__(self) -> None:
        names = ("class_weight", "bbox_weight", "giou_weight", "mask_weight", "dice_weight")
        check_factors("SetCriterion", {name: getattr(self, name) for name in names})

    def __call__(self, outputs: Outputs, targets: Sequence[Target]) -> LossReport:
        """Compute the loss of R = num_streams x B rows for B targets.

        Terms of the proposals end in ``_enc``, those of a group of queries in its name. The losses of a group are
        divided by the number of objects times its parts and repeats.
        """
        padded = PaddedTargets.of(targets, outputs.num_streams)
        objects = _num_objects(outputs, padded, self.local)
        num_boxes = _divisor(objects, self.local)
        groups = [] if outputs.proposals is None else [(QueryGroup("enc", 0), outputs.proposals)]
        divided = [(group, *_divided(group, predicted, padded)) for group, predicted in (*groups, *outputs.groups)]
        matches, *of_groups = self.matcher.match_all(
            [(outputs, padded, 1)]
            + [(predicted, wanted, group.repeats) for group, predicted, wanted in divided if group.assigned is None]
        )
        streams = self._stream_losses(outputs, padded, matches, num_boxes)
        if outputs.masks is not None:
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
            for name, per_stream in self._group_losses(group, predicted, wanted, matched, objects).items():
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

    def _group_losses(
        self, group: QueryGroup, outputs: Outputs, targets: PaddedTargets, matches: Matches | None, objects: Tensor
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
        divisor = _divisor(objects * group.parts * group.repeats, self.local)
        return self._stream_losses(outputs, targets, matches, divisor, not_supervised)

    def _stream_losses(
        self,
        outputs: Outputs,
        targets: PaddedTargets,
        matches: Matches,
        num_boxes: Tensor,
        not_supervised: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the losses by name, each (L, streams); ``not_supervised`` (R, Q) marks queries without a loss."""
        num_streams = outputs.num_streams
        classes = _target_classes(outputs, targets, matches)
        if not_supervised is not None:
            classes = classes.masked_fill(not_supervised, NOT_SUPERVISED)
        quality = _quality(outputs, targets, matches) if self.classification.needs_quality else None
        per_stream = [
            self.classification.loss(at_least_float32(logits), stream_classes, num_boxes, quality=stream_quality)
            for logits, stream_classes, stream_quality in zip(
                outputs.logits.chunk(num_streams, 1),
                classes.chunk(num_streams, 1),
                [None] * num_streams if quality is None else quality.chunk(num_streams, 1),
                strict=True,
            )
        ]
        distance, disparity = _box_losses(outputs, targets, matches, self.matcher.giou_eps)
        return {
            "loss_ce": torch.stack(per_stream, 1),
            "loss_bbox": _per_stream(outputs, distance) / num_boxes,
            "loss_giou": _per_stream(outputs, disparity) / num_boxes,
        }


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
    """Return L1 and 1 - GIoU of the matched pairs, summed by layer and row: twice (L, R)."""
    predicted = at_least_float32(outputs.boxes[matches.layer, matches.row, matches.query])
    wanted = targets.boxes[matches.row, matches.target]
    distance = (predicted - wanted).abs().sum(-1)
    a, b = (box_convert(boxes, "cxcywh", "xyxy") for boxes in (predicted, wanted))
    overlap = generalized_iou(a, b, giou_eps)
    index = (matches.layer, matches.row)
    empty = predicted.new_zeros(outputs.boxes.shape[:2])
    return empty.index_put(index, distance, accumulate=True), empty.index_put(index, 1 - overlap, accumulate=True)


@torch.no_grad()
def _quality(outputs: Outputs, targets: PaddedTargets, matches: Matches) -> Tensor:
    """Return the IoU (L, R, Q) of the matched pairs, 0 for other queries."""
    index = (matches.layer, matches.row, matches.query)
    predicted = box_convert(at_least_float32(outputs.boxes[index]), "cxcywh", "xyxy")
    wanted = box_convert(targets.boxes[matches.row, matches.target], "cxcywh", "xyxy")
    return predicted.new_zeros(outputs.logits.shape[:3]).index_put(index, iou(predicted, wanted))


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


def _mask_losses(outputs: Outputs, masks: Masks, targets: Sequence[Target], matches: Matches) -> dict[str, Tensor]:
    """Return the mask losses of the last layer, summed by row: (1, R) by name."""
    last = len(matches.row) // len(outputs.logits)  # pairs of a layer
    row, query, target = (x[len(x) - last :] for x in (matches.row, matches.query, matches.target))
    known = [image.masks for image in targets if image.masks is not None]
    assert len(known) == len(targets), "a detector with a mask head is trained on masks"
    wanted = padded_masks(known, row % len(targets), target)
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


def padded_masks(masks: Sequence[Tensor], image: Tensor, target: Tensor) -> Tensor:
    """Select mask ``target`` (M,) of ``image`` (M,) from the masks (T, h, w) of each image, padded: (M, H, W) bool."""
    height, width = (max(x.shape[dim] for x in masks) for dim in (1, 2))
    padded = torch.cat([F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in masks])
    first = tensor_on(image.device, list(accumulate((len(x) for x in masks[:-1]), initial=0)))
    return padded[first[image] + target]
