"""Losses of masks: focal (Lin et al. 2017, arXiv 1708.02002) and DICE (Milletari et al. 2016, arXiv 1606.04797), as in
DETR (Carion et al. 2020, arXiv 2005.12872, section 4.4).

Shape legend: M pairs of a query and its object, h x w cells of the prediction, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss


def mask_losses(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Focal loss, the mean over the pixels, and 1 - DICE of each pair: twice (M,).

    Args:
        logits: (M, h, w), enlarged to the pixels of ``wanted``.
        wanted: (M, H, W) bool.
    """
    enlarged = F.interpolate(logits[:, None], size=wanted.shape[-2:], mode="bilinear")[:, 0].flatten(1)
    target = wanted.flatten(1).to(enlarged.dtype)
    focal = sigmoid_focal_loss(enlarged, target, alpha=0.25, gamma=2.0, reduction="none").mean(1)
    probability = enlarged.sigmoid()
    overlap = 2 * (probability * target).sum(1)
    dice = 1 - (overlap + 1) / (probability.sum(1) + target.sum(1) + 1)
    return focal, dice


def padded_masks(masks: Sequence[Tensor], image: Tensor, place: Tensor) -> Tensor:
    """Of the masks (T, h, w) of each image those at (``image``, ``place``), padded to the largest: (M, H, W) bool."""
    height, width = (max(x.shape[dim] for x in masks) for dim in (1, 2))
    chosen = torch.zeros(len(image), height, width, dtype=torch.bool, device=image.device)
    for index, of_image in enumerate(masks):
        here = image == index
        chosen[here, : of_image.shape[1], : of_image.shape[2]] = of_image[place[here]]
    return chosen
