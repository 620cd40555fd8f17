"""Losses of the distributions of D-FINE (Peng et al. 2024, arXiv 2410.13842).

Shape legend: L decoder layers, R rows (streams x images), Q queries, N bins, M matched pairs of all layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.common.boxes import corners_of
from detr_bf.common.structures import Distributions
from detr_bf.losses.matcher import Matches

TEMPERATURE = 5.0  # of the distillation
TINY = 1e-16  # least width and height of a first box


def side_distances(boxes: Tensor, wanted: Tensor) -> Tensor:
    """Return the distances (..., 4) of the sides of ``wanted`` outwards from those of ``boxes``, in their sizes.

    Both are (..., 4), cx, cy, w, h; the sides are left, top, right and bottom.
    """
    centre, size = boxes[..., :2], boxes[..., 2:] + TINY
    corners = corners_of(wanted)
    return torch.cat([centre - corners[..., :2], corners[..., 2:] - centre], dim=-1) / size.repeat(1, 2) - 0.5


def bins_around(distances: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bin to the left of each distance, int64, and the weight of the bin to its right, linear between them.

    ``bins`` (N,) are the distances of the bins, ascending. Distances outside are those of the first or the last bin.
    """
    left = (torch.searchsorted(bins, distances.contiguous(), right=True) - 1).clamp(0, len(bins) - 2)
    low, high = bins[left], bins[left + 1]
    return left, ((distances - low) / (high - low)).clamp(0, 1)


def localization_loss(predicted: Distributions, matches: Matches, wanted: Tensor, quality: Tensor) -> Tensor:
    """Return the fine-grained localisation loss of each matched pair, summed over the sides: (M,).

    Cross-entropy with the two bins around the distance of the object's side, weighted with ``quality`` (M,), the IoU of
    the pair.

    Args:
        wanted: (M, 4) boxes of the objects.
    """
    layers = len(predicted.logits)
    log_probability = predicted.logits[matches.layer, matches.row, matches.query].log_softmax(-1)
    # The targets are those of the last layer in all layers, as in the authors' code. This makes a difference only if
    # the layers have pairs of their own.
    last = slice((layers - 1) * (len(wanted) // layers), None)
    first_boxes = predicted.boxes[matches.row[last], matches.query[last]]
    left, right_weight = bins_around(side_distances(first_boxes, wanted[last]), predicted.distances)
    left, right_weight = (x.repeat(layers, 1)[..., None] for x in (left, right_weight))
    at_left, at_right = (log_probability.gather(-1, bin)[..., 0] for bin in (left, left + 1))
    entropy = -(at_left * (1 - right_weight[..., 0]) + at_right * right_weight[..., 0])
    return entropy.sum(-1) * quality


def distillation_loss(
    logits: Tensor, quality: Tensor, matched: Tensor, scores: Tensor, shares: tuple[float, float]
) -> Tensor:
    """Return the decoupled distillation loss of one stream (L,): the distributions of a layer follow the last layer's.

    The Kullback-Leibler divergence of each side is weighted with the IoU of a matched query, and with the score of
    another one. The means over matched and over other queries are weighted with ``shares``.

    Args:
        logits: (L, R, Q, 4, N) of the bins.
        quality, matched: (L, R, Q), IoU, and which queries are matched.
        scores: (R, Q), the largest score of a query in the last layer, without gradient.
        shares: two numbers whose sum is 1.
    """
    *earlier, last = logits / TEMPERATURE
    if not earlier:
        return last.new_zeros(1)
    target = last.detach().log_softmax(-1).expand(len(earlier), *last.shape)
    divergence = F.kl_div(torch.stack(earlier).log_softmax(-1), target, reduction="none", log_target=True).sum(-1)
    matched = matched[:-1]
    losses = TEMPERATURE**2 * torch.where(matched, quality[:-1], scores) * divergence.mean(-1)
    of_matched, of_others = (
        (losses * kind).sum((1, 2)) / kind.sum((1, 2)).clamp(min=1) for kind in (matched, ~matched)
    )
    return F.pad(shares[0] * of_matched + shares[1] * of_others, (0, 1))  # nothing for the last layer
