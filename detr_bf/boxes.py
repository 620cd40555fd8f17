"""Box arithmetic torchvision.ops does not have: overlaps that broadcast."""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_iou(a: Tensor, b: Tensor) -> Tensor:
    """Generalized IoU of boxes (..., 4) x0, y0, x1, y1 that broadcast against each other -> (...), in [-1, 1].

    Rezatofighi et al. 2019, arXiv 1902.09630. Torchvision's takes all pairs of two lists only; this one serves the
    pairs of every image and layer at once, and single pairs as well. Degenerate boxes do not divide by zero.
    """
    area_a, area_b = _area(a), _area(b)
    intersection = _extent(torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:]))
    hull = _extent(torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:]))
    union = area_a + area_b - intersection
    tiny = torch.finfo(union.dtype).tiny
    return intersection / union.clamp(min=tiny) - (hull - union) / hull.clamp(min=tiny)


def _area(boxes: Tensor) -> Tensor:
    return _extent(boxes[..., :2], boxes[..., 2:])


def _extent(low: Tensor, high: Tensor) -> Tensor:
    return (high - low).clamp(min=0).prod(dim=-1)
