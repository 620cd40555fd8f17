"""DETR's matching and losses for one image at a time, in float64, with loops; slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import box_convert
from torchvision.ops import generalized_box_iou as pairwise_giou

from detr_bf.common.structures import Outputs, Target

Pairs = list[tuple[int, int]]


def softmax_cost(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute (Q, K), (T,) -> (Q, T): minus the probability of the label."""
    exponential = logits.double().exp()
    return -(exponential / exponential.sum(1, keepdim=True))[:, labels]


def focal_cost(logits: Tensor, labels: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Compute (Q, K), (T,) -> (Q, T): focal loss of the label as a positive, minus that of it as a negative."""
    p = 1 / (1 + (-logits.double()).exp())
    positive = -alpha * (1 - p) ** gamma * torch.log(p)
    negative = -(1 - alpha) * p**gamma * torch.log(1 - p)
    return (positive - negative)[:, labels]


def image_cost(
    logits: Tensor,
    boxes: Tensor,
    target: Target,
    *,
    class_cost: Callable[[Tensor, Tensor], Tensor] = softmax_cost,
    weights: tuple[float, float, float] = (1.0, 5.0, 2.0),
) -> Tensor:
    """Compute logits (Q, K), boxes (Q, 4) of one image -> (Q, T), with weights of class, L1 and generalized IoU."""
    boxes, wanted = boxes.double(), target.boxes.double()
    by_class, by_distance, by_overlap = weights
    return (
        by_class * class_cost(logits, target.labels)
        + by_distance * torch.cdist(boxes, wanted, p=1)
        - by_overlap * pairwise_giou(box_convert(boxes, "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy"))
    )


def match(cost: Tensor) -> Pairs:
    """Match (Q, T) -> pairs of query and object with the least total cost."""
    query, target = linear_sum_assignment(cost.detach().numpy())
    return list(zip(query.tolist(), target.tolist(), strict=True))


def least_total(cost: Tensor) -> float:
    """Return the least total cost of (Q, T) by trying every assignment."""
    if cost.shape[0] < cost.shape[1]:
        cost = cost.T
    columns = range(cost.shape[1])
    return min(
        sum(cost[row, column].item() for column, row in zip(columns, rows, strict=True))
        for rows in permutations(range(cost.shape[0]), len(columns))
    )


def box_losses(boxes: Tensor, target: Target, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Compute boxes (Q, 4) of one image -> sums over the pairs of L1 and of 1 - generalized IoU."""
    distance = overlap = torch.zeros((), dtype=torch.float64)
    for query, index in pairs:
        box, wanted = boxes[query].double(), target.boxes[index].double()
        corners = (box_convert(x[None], "cxcywh", "xyxy") for x in (box, wanted))
        distance = distance + (box - wanted).abs().sum()
        overlap = overlap + 1 - pairwise_giou(*corners)[0, 0]
    return distance, overlap


def weighted_cross_entropy(logits: Tensor, classes: Sequence[int], no_object_weight: float) -> Tensor:
    """Compute logits (N, K) -> scalar; class K - 1 is no-object."""
    weight_sum, loss = 0.0, torch.zeros((), dtype=torch.float64)
    for row, wanted in zip(logits.double(), classes, strict=True):
        weight = no_object_weight if wanted == len(row) - 1 else 1.0
        loss = loss - weight * (row[wanted] - row.exp().sum().log())
        weight_sum += weight
    return loss / weight_sum


def layer_losses(
    logits: Tensor, boxes: Tensor, targets: Sequence[Target], no_object_weight: float
) -> dict[str, Tensor]:
    """Compute logits (B, Q, K), boxes (B, Q, 4) of one layer and stream -> the three losses, not weighted."""
    num_boxes = max(sum(len(target.labels) for target in targets), 1)
    classes: list[int] = []
    distance = overlap = torch.zeros((), dtype=torch.float64)
    for image_logits, image_boxes, target in zip(logits, boxes, targets, strict=True):
        pairs = match(image_cost(image_logits, image_boxes, target))
        label_of_query = {query: target.labels[index].item() for query, index in pairs}
        no_object = logits.shape[-1] - 1
        classes += [int(label_of_query.get(query, no_object)) for query in range(logits.shape[1])]
        image_distance, image_overlap = box_losses(image_boxes, target, pairs)
        distance, overlap = distance + image_distance, overlap + image_overlap
    return {
        "loss_ce": weighted_cross_entropy(logits.flatten(0, 1), classes, no_object_weight),
        "loss_bbox": distance / num_boxes,
        "loss_giou": overlap / num_boxes,
    }


def set_losses(outputs: Outputs, targets: Sequence[Target], no_object_weight: float) -> list[list[dict[str, Tensor]]]:
    """Compute the losses of every stream and layer."""
    images = len(targets)
    return [
        [
            layer_losses(logits[first : first + images], boxes[first : first + images], targets, no_object_weight)
            for logits, boxes in zip(outputs.logits, outputs.boxes, strict=True)
        ]
        for first in range(0, outputs.num_streams * images, images)
    ]
