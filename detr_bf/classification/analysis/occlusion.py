"""Accuracy when patches are missing (Naseer et al. 2021, arXiv 2105.10497), as in table 8 of Context Broadcasting.

Shape legend: B images, H x W pixels, P patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from matplotlib.figure import Figure
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.classification.analysis.accuracy import AccuracyCurve, accuracy_curve, draw_accuracy
from detr_bf.classification.analysis.subject import Pixels
from detr_bf.errors import InputError
from detr_bf.labelled import LabelledImages

SHARES = tuple(n / 10 for n in range(10))
_PATCHES_ACROSS = 14  # of images that a network without patches of its own sees: 16 pixels of 224


def drop_patches(images: Tensor, order: Tensor, share: float, patch: tuple[int, int], fill: Tensor) -> Tensor:
    """Images (B, 3, H, W) whose first ``share`` of the patches in ``order`` (B, P) have the pixels ``fill`` (3, 1, 1).

    The number of patches is rounded to the nearest; patches are counted row by row.
    """
    rows, columns = images.shape[2] // patch[0], images.shape[3] // patch[1]
    dropped = torch.zeros_like(order, dtype=torch.bool)
    dropped.scatter_(1, order[:, : round(share * order.shape[1])], True)
    mask = dropped.view(-1, 1, rows, columns).repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3)
    return torch.where(mask, fill, images)


def occlusion(
    model: nn.Module,
    batches: Iterable[LabelledImages],
    *,
    pixels: Pixels,
    patch: int | None = None,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
) -> AccuracyCurve:
    """Accuracy when a share of an image's patches is black; those of a smaller share are among those of a larger.

    Args:
        pixels: how images were normalised.
        patch: side of a patch in pixels; None means a timm ViT's own patches, else a 14th of the image.
        shares: of the patches, from 0 to 1.
        seed: of the choice, the same for every model with the same patches and batches.

    Raises:
        InputError: patches that do not fill the images, no images, or labels outside the classes.
    """
    generator = torch.Generator().manual_seed(seed)

    def spoil(batch: LabelledImages) -> Iterator[Tensor]:
        images = batch.images
        size = _patch_size(model, images, patch)
        count = (images.shape[2] // size[0]) * (images.shape[3] // size[1])
        order = torch.rand(len(images), count, generator=generator).argsort(1).to(images.device)
        black = pixels.normalised(0.0, images)
        return (drop_patches(images, order, share, size, black) for share in shares)

    return accuracy_curve(model, batches, spoil, strength="dropped", strengths=shares)


def _patch_size(model: nn.Module, images: Tensor, patch: int | None) -> tuple[int, int]:
    height, width = images.shape[2:]
    if patch is not None:
        size = (patch, patch)
    elif isinstance(model, VisionTransformer):
        size = model.patch_embed.patch_size
    else:
        size = (max(1, height // _PATCHES_ACROSS), max(1, width // _PATCHES_ACROSS))
    if min(size) < 1 or height % size[0] or width % size[1]:
        raise InputError(
            f"patches of {size[0]} x {size[1]} pixels do not fill images of {height} x {width}: give a patch size that "
            "divides both"
        )
    return size


def draw_occlusion(runs: Mapping[str, AccuracyCurve]) -> Figure:
    """One line a run."""
    return draw_accuracy(runs, title="Accuracy with patches missing", xlabel="patches dropped, %", scale=100)
