"""Resizing and augmentation of images with a class for every pixel.

Both transforms map an image (3, h, w) uint8 and its map (h, w) uint8 to another pair. Random numbers are those of
torch's global CPU generator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from detr_bf.data.transforms import resized_size
from detr_bf.segmentation.batch import IGNORE

# Limits of PhotoMetricDistortion of mmsegmentation (hue: 18 of OpenCV's 180), whose changes of brightness are added.
# Torchvision's RandomPhotometricDistort also permutes the channels, as SSD does.
PHOTOMETRIC = v2.Compose(
    [
        v2.RandomApply([v2.ColorJitter(**{name: limits})])
        for name, limits in {
            "brightness": (0.875, 1.125),
            "contrast": (0.5, 1.5),
            "saturation": (0.5, 1.5),
            "hue": (-0.1, 0.1),
        }.items()
    ]
)
_ATTEMPTS = 10  # to find a crop with enough of a second class


@dataclass(frozen=True)
class EvalResize:
    """Resize the image, and keep the map, which the prediction is compared with at its own size."""

    short_side: int
    max_size: int

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        height, width = image.shape[-2:]
        size = resized_size(height, width, self.short_side, self.max_size)
        return functional.resize_image(image, list(size), antialias=True), labels


@dataclass(frozen=True)
class TrainCrop:
    """Resize by a random factor, crop a square, flip, and distort the colours.

    An image smaller than the crop is not padded here; see :meth:`SegmentationBatch.collate`.

    Args:
        scales: smallest and largest factor, drawn uniformly.
        crop: side of the square in pixels.
        max_share: largest share of one class among the pixels with a class; after ten attempts any crop is taken.
        horizontal_flip: probability.
        photometric: distort brightness, contrast, saturation and hue, each with a probability of 0.5.
    """

    short_side: int
    max_size: int
    scales: tuple[float, float]
    crop: int
    max_share: float
    horizontal_flip: float
    photometric: bool

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.scales
        scale = low + (high - low) * float(torch.rand(()))
        short_side, max_size = (max(1, round(scale * side)) for side in (self.short_side, self.max_size))
        height, width = image.shape[-2:]
        size = list(resized_size(height, width, short_side, max_size))
        labels = functional.resize_mask(labels[None], size)[0]
        top, left = self._corner(labels)
        rows, columns = slice(top, top + self.crop), slice(left, left + self.crop)
        image = functional.resize_image(image, size, antialias=True)[:, rows, columns]
        labels = labels[rows, columns]
        if float(torch.rand(())) < self.horizontal_flip:
            image, labels = image.flip(-1), labels.flip(-1)
        if self.photometric:
            image = PHOTOMETRIC(image)
        return image.contiguous(), labels.contiguous()

    def _corner(self, labels: Tensor) -> tuple[int, int]:
        """Return row and column of the upper left corner of the crop."""
        for _ in range(_ATTEMPTS):
            top, left = (int(torch.randint(max(side - self.crop, 0) + 1, ())) for side in labels.shape)
            counts = labels[top : top + self.crop, left : left + self.crop].flatten().bincount(minlength=IGNORE + 1)
            known = counts[:IGNORE]
            if self.max_share >= 1 or 0 < int(known.max()) <= self.max_share * int(known.sum()):
                break
        return top, left
