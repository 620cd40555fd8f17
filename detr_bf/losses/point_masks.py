"""Losses and matching costs of masks at sampled points, as in the released code of RF-DETR (rfdetr 1.11.2).

Points after PointRend (Kirillov et al. 2020, arXiv 1912.08193, section 3.2): most of them where a prediction is
uncertain. The costs of the matching are those of Mask2Former (Cheng et al. 2022, arXiv 2112.01527, section 3.3).

Shape legend: R rows, Q queries, T objects, M matched pairs, P points, h x w cells of a predicted mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.common.masks import bilinear
from detr_bf.common.structures import Outputs, PaddedTargets
from detr_bf.losses.classification import at_least_float32

OVERSAMPLING = 3  # random points per point of a loss, among which the most uncertain are chosen
UNCERTAIN = 0.75  # share of the points that are chosen so; the others are random


def random_points(*counts: int, device: torch.device, fixed: bool, seed: int = 0) -> Tensor:
    """Draw points (..., 2), uniform in [0, 1); ``fixed``: those of ``seed``, and no random state is changed."""
    generator = torch.Generator(device).manual_seed(seed) if fixed else None
    return torch.rand(*counts, 2, device=device, generator=generator)


def mask_costs(outputs: Outputs, targets: PaddedTargets, cells_per_point: int, *, fixed: bool) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and 1 - Dice of all queries with all objects: twice (L, R, Q, T), undefined for padding.

    All masks of a layer are compared at the same random points, one for each ``cells_per_point`` cells.

    Args:
        outputs: with ``layer_masks``; each part of a group may be a row of its own.
        targets: with ``masks``, and the rows of ``outputs``.
    """
    _, rows, queries, _ = outputs.logits.shape
    objects, device = targets.masks, outputs.logits.device
    assert objects is not None, "a detector with a mask head is trained on masks"
    image, target = (torch.arange(count, device=device) for count in (len(objects.first), targets.labels.shape[1]))
    parts, costs = rows // outputs.layer_masks[0].rows, []
    for masks in outputs.layer_masks:
        points = random_points(max(masks.cells // cells_per_point, 1), device=device, fixed=fixed)
        logits = masks.at(points).reshape(rows, queries, -1)
        wanted = objects.at(image[:, None], target, points).to(logits.dtype)
        costs.append(pair_costs(logits, wanted.repeat(outputs.num_streams, 1, 1).repeat_interleave(parts, 0)))
    entropy, dice = (torch.stack(each) for each in zip(*costs, strict=True))
    return entropy, dice


def pair_costs(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropy (mean over the points) and 1 - Dice of logits (R, Q, P) with masks (R, T, P): (R, Q, T)."""
    wanted = wanted.transpose(1, 2)
    entropy = (F.softplus(logits).sum(-1, keepdim=True) - logits @ wanted) / logits.shape[-1]
    probability = logits.sigmoid()
    areas = probability.sum(-1, keepdim=True) + wanted.sum(1, keepdim=True)
    return entropy, 1 - (2 * probability @ wanted + 1) / (areas + 1)


def point_losses(
    outputs: Outputs,
    targets: PaddedTargets,
    pairs: Sequence[Tensor],
    *,
    cells_per_point: int,
    fixed: bool,
) -> tuple[Tensor, Tensor]:
    """Return cross-entropy (mean over the points) and 1 - Dice of the matched pairs of all layers: twice (M,).

    Args:
        outputs, targets: as those of :func:`mask_costs`.
        pairs: rows, queries and objects (M,) of all matched pairs, layer after layer, in each ordered by row.
    """
    layers, rows, queries, _ = outputs.logits.shape
    assert targets.masks is not None, "a detector with a mask head is trained on masks"
    whole, images = outputs.layer_masks[0].rows, len(targets.masks.first)
    parts = rows // whole
    matched = [min(count, queries) for count in targets.counts]
    counts = [sum(matched[row * parts : (row + 1) * parts]) for row in range(whole)]
    losses = []
    for masks, row, query, target in zip(outputs.layer_masks, *(x.chunk(layers) for x in pairs), strict=True):
        logits = at_least_float32(masks.by_row(query + row % parts * queries, counts))
        number = max(logits.shape[1], masks.cells // cells_per_point)
        points = uncertain_points(logits.detach(), number, fixed=fixed)
        wanted = targets.masks.at(row // parts % images, target, points).to(logits.dtype)
        losses.append(losses_at_points(bilinear(logits[:, None], points)[:, 0], wanted))
    entropy, dice = (torch.cat(each) for each in zip(*losses, strict=True))
    return entropy, dice


def losses_at_points(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropy (mean over the points) and 1 - Dice of logits and masks (M, P): twice (M,)."""
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(1)
    probability = logits.sigmoid()
    overlap = 2 * (probability * wanted).sum(1)
    return entropy, 1 - (overlap + 1) / (probability.sum(1) + wanted.sum(1) + 1)


def uncertain_points(logits: Tensor, number: int, *, fixed: bool) -> Tensor:
    """Draw points (M, number, 2) for each mask (M, h, w): those with logits closest to 0 first, then random ones."""
    chosen = int(UNCERTAIN * number)
    drawn = random_points(len(logits), OVERSAMPLING * number, device=logits.device, fixed=fixed).to(logits.dtype)
    certainty = bilinear(logits[:, None], drawn)[:, 0].abs()
    best = certainty.topk(chosen, dim=1, largest=False).indices[..., None].expand(-1, -1, 2)
    others = random_points(len(logits), number - chosen, device=logits.device, fixed=fixed, seed=1).to(logits.dtype)
    return torch.cat([drawn.gather(1, best), others], dim=1)
