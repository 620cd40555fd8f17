"""Hungarian matching of queries with objects (Carion et al. 2020, arXiv 2005.12872, section 3.1).

Shape legend: L decoder layers, R rows, Q queries, K logits, T objects of the row with most of them, M matched pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from detr_bf.common.boxes import corners_of, generalized_iou
from detr_bf.common.devices import send
from detr_bf.common.extensions import Registry
from detr_bf.common.structures import Outputs, PaddedTargets
from detr_bf.losses.classification import NOT_SUPERVISED, Classification, at_least_float32, check_factors
from detr_bf.losses.point_masks import mask_costs

# (logits (..., R, Q, K), boxes (..., R, Q, 4), targets) -> (..., R, Q, T), undefined for padding in T
MatchingCost = Callable[[Tensor, Tensor, PaddedTargets], Tensor]
MATCHING_COSTS: Registry[MatchingCost] = Registry("matching cost", {})  # added to those of HungarianMatcher
STACK_LIMIT = 350_000  # elements of one layer's cost above which stacking all layers is slower than looping
UNMATCHABLE = 1e8  # replaces costs that are not finite, so that such queries are matched last


@dataclass(frozen=True)
class Matches:
    """Matched pairs as four index vectors (M,) int64: layer, row, query and object of the row.

    Ordered by layer; every layer has as many pairs as the others.
    """

    layer: Tensor
    row: Tensor
    query: Tensor
    target: Tensor

    @classmethod
    def of_all_layers(cls, pairs: Tensor, layers: int) -> Matches:
        """Repeat pairs (3, M) of row, query and object for each layer."""
        layer = torch.arange(layers, device=pairs.device).repeat_interleave(pairs.shape[1])
        return cls(layer, *pairs.repeat(1, layers))

    @classmethod
    def of(cls, assigned: Tensor, layers: int, device: torch.device) -> tuple[Matches, Tensor]:
        """Read ``QueryGroup.assigned`` (R, Q), the same for all layers; also return where it is -2 (R, Q)."""
        row, query = (assigned >= 0).nonzero(as_tuple=True)
        layer = torch.arange(layers, device=assigned.device).repeat_interleave(len(row))
        row, query = row.repeat(layers), query.repeat(layers)
        pairs = torch.stack([layer, row, query, assigned[row, query]])
        return cls(*send(pairs, device)), send(assigned == NOT_SUPERVISED, device)


@dataclass(frozen=True)
class HungarianMatcher:
    """One-to-one assignment of least cost, separately for every decoder layer and row.

    The cost is ``class_cost`` x the cost of the classification + ``bbox_cost`` x L1 - ``giou_cost`` x generalized IoU,
    which has ``giou_eps`` added to its divisors, here and in the loss (1e-6 in DAB-DETR and its successors), + each of
    the ``extra`` costs, names of :data:`MATCHING_COSTS`, x its factor. With a mask head that is trained in all layers
    (RF-DETR), ``mask_cost`` x cross-entropy + ``dice_cost`` x (1 - Dice) of the masks are added, at one random point
    for each ``cells_per_point`` cells; with ``fixed_points`` these are the same at each call.
    """

    classification: Classification
    class_cost: float = 1.0
    bbox_cost: float = 5.0
    giou_cost: float = 2.0
    giou_eps: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)
    mask_cost: float = 5.0
    dice_cost: float = 5.0
    cells_per_point: int = 16
    fixed_points: bool = False
    _added: tuple[tuple[str, MatchingCost, float], ...] = field(init=False, repr=False)  # ``extra`` as functions

    def __post_init__(self) -> None:
        added = [(name, MATCHING_COSTS.find(name, "loss.matcher.extra"), each) for name, each in self.extra.items()]
        object.__setattr__(self, "_added", tuple(added))
        costs = {"class_cost": self.class_cost, "bbox_cost": self.bbox_cost, "giou_cost": self.giou_cost}
        check_factors("HungarianMatcher", costs)
        check_factors("HungarianMatcher", costs | {"mask_cost": self.mask_cost, "dice_cost": self.dice_cost})

    def __call__(self, outputs: Outputs, targets: PaddedTargets, repeats: int = 1) -> Matches:
        """Match all layers; each object is matched with up to ``repeats`` queries."""
        return self.match_all([(outputs, targets, repeats)])[0]

    @torch.no_grad()
    def match_all(self, problems: Sequence[tuple[Outputs, PaddedTargets, int]]) -> list[Matches]:
        """Match several sets of queries, each as in a call, with one copy to the host."""
        return [Matches(*send(pairs, problems[0][0].logits.device)) for pairs in self._pairs(problems)]

    @torch.no_grad()
    def match_united(self, problems: Sequence[tuple[Outputs, PaddedTargets, int]]) -> tuple[list[Matches], Tensor]:
        """Match several predictions of the same queries; also return the union (3, M) of all pairs, on the CPU.

        See :func:`united_pairs`.
        """
        found = self._pairs(problems)
        matches = [Matches(*send(pairs, problems[0][0].logits.device)) for pairs in found]
        return matches, united_pairs(torch.cat([pairs[1:] for pairs in found], dim=1))

    def _pairs(self, problems: Sequence[tuple[Outputs, PaddedTargets, int]]) -> list[Tensor]:
        """Return the pairs of each problem (4, M) on the CPU, in the order of the fields of Matches."""
        costs = [self._stacked_cost(outputs, targets) for outputs, targets, _ in problems]
        copied = torch.cat([cost.flatten() for cost in costs]).cpu().split([cost.numel() for cost in costs])
        found = []
        for cost, on_host, (_, targets, repeats) in zip(costs, copied, problems, strict=True):
            numbers = on_host.view(cost.shape).numpy()
            pairs = [
                _assign(numbers[layer, row, :, :count], layer, row, repeats)
                for layer in range(len(numbers))
                for row, count in enumerate(targets.counts)
            ]
            found.append(torch.from_numpy(np.concatenate(pairs, axis=1)))
        return found

    def _stacked_cost(self, outputs: Outputs, targets: PaddedTargets) -> Tensor:
        layers, rows, queries = outputs.logits.shape[:3]
        if rows * queries * targets.labels.shape[1] <= STACK_LIMIT:
            cost = self.cost(outputs.logits, outputs.boxes, targets)
        else:
            cost = torch.stack([self.cost(outputs.logits[i], outputs.boxes[i], targets) for i in range(layers)])
        if outputs.layer_masks and (self.mask_cost or self.dice_cost):
            entropy, dice = mask_costs(outputs, targets, self.cells_per_point, fixed=self.fixed_points)
            cost = bounded(cost + self.mask_cost * entropy + self.dice_cost * dice)
        return cost

    def cost(self, logits: Tensor, boxes: Tensor, targets: PaddedTargets) -> Tensor:
        """logits (..., R, Q, K), boxes (..., R, Q, 4) -> (..., R, Q, T); undefined for padding in T."""
        logits, boxes = at_least_float32(logits), at_least_float32(boxes)
        distance = (boxes[..., :, None, :] - targets.boxes[:, None]).abs().sum(-1)
        overlap = generalized_iou(corners_of(boxes)[..., :, None, :], corners_of(targets.boxes)[:, None], self.giou_eps)
        classes = self.classification.match_cost(logits, targets.labels)
        cost = self.class_cost * classes + self.bbox_cost * distance - self.giou_cost * overlap
        for name, function, factor in self._added:
            added = function(logits, boxes, targets)
            if added.shape != cost.shape:
                raise TypeError(f"the matching cost '{name}' must be {tuple(cost.shape)}, got {tuple(added.shape)}")
            cost = cost + factor * added
        return bounded(cost)


def bounded(cost: Tensor) -> Tensor:
    """Replace costs that are not finite."""
    return cost.nan_to_num(UNMATCHABLE, UNMATCHABLE, -UNMATCHABLE)


def united_pairs(pairs: Tensor) -> Tensor:
    """Return the union (3, M') of pairs (3, M) of row, query and object on the CPU, ordered by row and query.

    A query that is paired with several objects keeps the one that it is paired with most often; an object keeps all its
    queries (D-FINE, Peng et al. 2024, arXiv 2410.13842, "Global Optimal Localization Self-Distillation"). Objects that
    are paired with a query equally often are in the order that torch's sorting leaves them in, as in the authors' code.
    """
    united = []
    for row in pairs[0].unique():
        distinct, counts = pairs[:, pairs[0] == row].unique(dim=1, return_counts=True)
        distinct = distinct[:, counts.argsort(descending=True)]
        _, first = np.unique(distinct[1].numpy(), return_index=True)
        united.append(distinct[:, torch.from_numpy(first)])
    return torch.cat(united, dim=1) if united else pairs


def _assign(cost: np.ndarray, layer: int, row: int, repeats: int) -> np.ndarray:
    """Assign by cost (Q, T) -> (4, pairs) int64: layer, row, query, object."""
    query, copy = linear_sum_assignment(np.tile(cost, (1, repeats)))
    target = copy % max(cost.shape[1], 1)
    return np.stack([np.full_like(query, layer), np.full_like(query, row), query, target]).astype(np.int64)
