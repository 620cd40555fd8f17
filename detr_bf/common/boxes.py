"""Box arithmetic missing in torchvision.ops: broadcasting generalized IoU, boxes relative to a reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def corners_of(boxes: Tensor) -> Tensor:
    """Convert boxes (..., 4) cx, cy, w, h to x0, y0, x1, y1; a negative width or height counts as 0."""
    centre, half = boxes[..., :2], boxes[..., 2:].clamp(min=0) / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def generalized_iou(a: Tensor, b: Tensor, eps: float = 0.0) -> Tensor:
    """Generalized IoU of boxes (..., 4) x0, y0, x1, y1 that broadcast against each other -> (...), in [-1, 1].

    Rezatofighi et al. 2019, arXiv 1902.09630. torchvision's function takes all pairs of two lists only; this one
    takes the pairs of all images and layers at once, or single pairs. Degenerate boxes do not divide by zero. ``eps``
    is added to both divisors.
    """
    intersection, union = _intersection_and_union(a, b)
    hull = _extent(torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:]))
    tiny = torch.finfo(union.dtype).tiny
    return intersection / (union + eps).clamp(min=tiny) - (hull - union) / (hull + eps).clamp(min=tiny)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU of boxes (..., 4) x0, y0, x1, y1 that broadcast against each other -> (...), in [0, 1]."""
    intersection, union = _intersection_and_union(a, b)
    return intersection / union.clamp(min=torch.finfo(union.dtype).tiny)


def _intersection_and_union(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the areas (...) of the intersection and of the union."""
    area_a, area_b = (_extent(boxes[..., :2], boxes[..., 2:]) for boxes in (a, b))
    intersection = _extent(torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:]))
    return intersection, area_a + area_b - intersection


def _extent(low: Tensor, high: Tensor) -> Tensor:
    return (high - low).clamp(min=0).prod(dim=-1)


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Return the logit of ``x``, with ``x`` and ``1 - x`` clamped to at least ``eps``."""
    x = x.clamp(0, 1)
    return (x.clamp(min=eps) / (1 - x).clamp(min=eps)).log()


def relative_boxes(offsets: Tensor, reference: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Return boxes (..., 4) cx, cy, w, h in [0, 1] from logits (..., 4) added to the logits of ``reference``.

    ``reference`` is a point (..., 2), which shifts the centre only, a box (..., 4), or None. ``eps`` is that of
    :func:`inverse_sigmoid`.
    """
    if reference is None:
        return offsets.sigmoid()
    logit = inverse_sigmoid(reference, eps)
    return (offsets + F.pad(logit, (0, 4 - logit.shape[-1]))).sigmoid()


def scaled_boxes(offsets: Tensor, reference: Tensor) -> Tensor:
    """Return boxes (..., 4) cx, cy, w, h from changes (..., 4) in units of the boxes ``reference`` (..., 4).

    Centre + change x size, and size x exp(change) (Chen et al. 2024, arXiv 2406.03459; Lin et al. 2023, arXiv
    2308.01904). They may lie outside the image.
    """
    size = reference[..., 2:]
    return torch.cat([reference[..., :2] + offsets[..., :2] * size, offsets[..., 2:].exp() * size], dim=-1)
