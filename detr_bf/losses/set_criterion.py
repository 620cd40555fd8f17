"""The set criterion: match, then classification, L1 and generalized-IoU losses for every decoder layer and stream.

Shape legend: L decoder layers, R rows (streams x images), Q queries, K logits, M matched pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import box_convert

from detr_bf import distributed
from detr_bf.boxes import generalized_iou
from detr_bf.losses.classification import Classification, at_least_float32, check_factors
from detr_bf.losses.masks import mask_losses, padded_masks
from detr_bf.losses.matcher import HungarianMatcher, Matches, PaddedTargets
from detr_bf.losses.report import STREAM_NAMES, LossReport
from detr_bf.structures import Masks, Outputs, Target


@dataclass(frozen=True)
class SetCriterion:
    """The loss of DETR (Carion et al. 2020, arXiv 2005.12872, section 3.1), the mean over the streams.

    Matching is independent for every stream; with two streams the result is the mean of their losses
    (BatchFormerV2, arXiv 2204.01254, section 3.3). Of several processes, the mean of their losses is the loss of all
    their images in one: what a loss is divided by counts the objects of all.
    """

    classification: Classification
    matcher: HungarianMatcher
    class_weight: float = 1.0
    bbox_weight: float = 5.0
    giou_weight: float = 2.0
    mask_weight: float = 1.0
    dice_weight: float = 1.0

    def __post_init__(self) -> None:
        names = ("class_weight", "bbox_weight", "giou_weight", "mask_weight", "dice_weight")
        check_factors("SetCriterion", {name: getattr(self, name) for name in names})

    def __call__(self, outputs: Outputs, targets: Sequence[Target]) -> LossReport:
        """Outputs for the R = num_streams x B rows of B targets; proposals, where there are any, count any object."""
        padded = PaddedTargets.of(targets, outputs.num_streams)
        num_boxes = _num_boxes(outputs, padded)
        matches, streams = self._stream_losses(outputs, padded, num_boxes)
        if outputs.masks is not None:
            by_row = _mask_losses(outputs, outputs.masks, targets, matches)
            streams |= {name: _per_stream(outputs, loss) / num_boxes for name, loss in by_row.items()}
        losses = _by_layer(streams)
        if outputs.proposals is not None:
            _, proposed = self._stream_losses(outputs.proposals, padded.of_one_class(), num_boxes)
            losses |= {f"{name}_enc": per_stream.mean() for name, per_stream in proposed.items()}
            streams |= {f"{name}_enc": per_stream for name, per_stream in proposed.items()}
        kinds = {
            "loss_ce": self.class_weight,
            "loss_bbox": self.bbox_weight,
            "loss_giou": self.giou_weight,
            "loss_mask": self.mask_weight,
            "loss_dice": self.dice_weight,
        }
        weights = {name: weight for name in losses for kind, weight in kinds.items() if name.startswith(kind)}
        logged = _stream_log(streams, weights) if outputs.num_streams > 1 else {}
        return LossReport(losses, weights, logged | self._quality(outputs, padded, matches))

    def _stream_losses(
        self, outputs: Outputs, targets: PaddedTargets, num_boxes: Tensor
    ) -> tuple[Matches, dict[str, Tensor]]:
        """The matches, and the losses by name, each (L, streams)."""
        num_streams = outputs.num_streams
        matches = self.matcher(outputs, targets)
        classes = _target_classes(outputs, targets, matches)
        per_stream = [
            self.classification.loss(at_least_float32(logits), stream_classes, num_boxes)
            for logits, stream_classes in zip(
                outputs.logits.chunk(num_streams, 1), classes.chunk(num_streams, 1), strict=True
            )
        ]
        distance, disparity = _box_losses(outputs, targets, matches)
        return matches, {
            "loss_ce": torch.stack(per_stream, 1),
            "loss_bbox": _per_stream(outputs, distance) / num_boxes,
            "loss_giou": _per_stream(outputs, disparity) / num_boxes,
        }

    @torch.no_grad()
    def _quality(self, outputs: Outputs, targets: PaddedTargets, matches: Matches) -> dict[str, Tensor]:
        """Class error of the matched queries in percent, and the error of the number of objects, of the last layer.

        The answer of a query is the best of all its logits, so with cross-entropy one that says no-object is wrong, as
        in the released code of DETR.
        """
        logits, wanted = outputs.logits[-1], _target_classes(outputs, targets, matches)[-1]
        matched = wanted >= 0
        right = matched & (logits.argmax(-1) == wanted)
        counts = torch.tensor(targets.counts, device=logits.device, dtype=torch.float)
        claimed = self.classification.is_object(logits).sum(1)
        return {
            "class_error": 100 - 100 * right.sum() / matched.sum().clamp(min=1),
            "cardinality_error": (claimed - counts).abs().mean(),
        }


def _target_classes(outputs: Outputs, targets: PaddedTargets, matches: Matches) -> Tensor:
    """(L, R, Q) int64: the label of the matched object, -1 for none."""
    classes = torch.full(outputs.logits.shape[:3], -1, dtype=torch.int64, device=outputs.logits.device)
    classes[matches.layer, matches.row, matches.query] = targets.labels[matches.row, matches.target]
    return classes


def _box_losses(outputs: Outputs, targets: PaddedTargets, matches: Matches) -> tuple[Tensor, Tensor]:
    """L1 and 1 - GIoU of the matched pairs, summed by layer and row: twice (L, R)."""
    predicted = at_least_float32(outputs.boxes[matches.layer, matches.row, matches.query])
    wanted = targets.boxes[matches.row, matches.target]
    distance = (predicted - wanted).abs().sum(-1)
    overlap = generalized_iou(box_convert(predicted, "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy"))
    place = (matches.layer, matches.row)
    empty = predicted.new_zeros(outputs.boxes.shape[:2])
    return empty.index_put(place, distance, accumulate=True), empty.index_put(place, 1 - overlap, accumulate=True)


def _num_boxes(outputs: Outputs, targets: PaddedTargets) -> Tensor:
    """The objects of one stream, at least 1 among all processes, on average over these: what sums are divided by."""
    here = torch.tensor(sum(targets.counts) / outputs.num_streams, dtype=torch.float64, device=outputs.logits.device)
    return distributed.all_reduce_sum(here).clamp(min=1) / distributed.world_size()


def _per_stream(outputs: Outputs, by_row: Tensor) -> Tensor:
    """Losses summed by layer and row (L, R) -> by layer and stream (L, streams)."""
    return by_row.unflatten(1, (outputs.num_streams, -1)).sum(2)


def _mask_losses(outputs: Outputs, masks: Masks, targets: Sequence[Target], matches: Matches) -> dict[str, Tensor]:
    """Losses of the last layer's pairs, summed by row: (1, R) by name."""
    last = matches.layer == len(outputs.logits) - 1
    row, query, place = matches.row[last], matches.query[last], matches.target[last]
    known = [target.masks for target in targets if target.masks is not None]
    assert len(known) == len(targets), "a detector with a mask head is trained on masks"
    wanted = padded_masks(known, row % len(targets), place)
    empty = torch.zeros(masks.rows, device=row.device)
    focal, dice = mask_losses(at_least_float32(masks.of(row, query)), wanted)
    return {
        "loss_mask": empty.index_put((row,), focal, accumulate=True)[None],
        "loss_dice": empty.index_put((row,), dice, accumulate=True)[None],
    }


def _by_layer(streams: dict[str, Tensor]) -> dict[str, Tensor]:
    """Losses (L, streams) by name -> the mean of the streams by name and layer: the last has no number."""
    return {
        name + ("" if layer == len(per_stream) - 1 else f"_{layer}"): loss
        for name, per_stream in streams.items()
        for layer, loss in enumerate(per_stream.mean(1))
    }


def _stream_log(streams: dict[str, Tensor], weights: dict[str, float]) -> dict[str, Tensor]:
    """Weighted total of each stream, and its unweighted terms of the last layer and of the proposals."""
    total = torch.stack([weights[name] * per_stream.sum(0) for name, per_stream in streams.items()]).sum(0).detach()
    logged = {}
    for index, stream in enumerate(STREAM_NAMES):
        logged[f"stream/{stream}"] = total[index]
        logged |= {f"stream/{stream}/{name}": value[-1, index].detach() for name, value in streams.items()}
    return logged
