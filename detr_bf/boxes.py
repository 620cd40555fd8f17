"""Box arithmetic torchvision.ops does not have: overlaps that broadcast, boxes relative to a reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    """The logit of ``x``, with ``x`` and ``1 - x`` kept at ``eps`` or more."""
    x = x.clamp(0, 1)
    return (x.clamp(min=eps) / (1 - x).clamp(min=eps)).log()


def relative_boxes(offsets: Tensor, reference: Tensor | None) -> Tensor:
    """Boxes (..., 4) cx, cy, w, h in [0, 1] from logits (..., 4), counted from the logits of ``reference``.

    ``reference`` is a point (..., 2), which moves the centre only, a box (..., 4), or None.
    """
    if reference is None:
        return offsets.sigmoid()
    logit = inverse_sigmoid(reference)
    return (offsets + F.pad(logit, (0, 4 - logit.shape[-1]))).sigmoid()
