"""DETR's training and evaluation transforms (Carion et al. 2020, arXiv 2005.12872, section 4, "Technical details").

A sample is (image, boxes, labels): a (3, h, w) uint8 ``tv_tensors.Image``, (T, 4) float32 ``tv_tensors.BoundingBoxes``
in pixels (x0, y0, x1, y1), and (T,) labels. All randomness comes from torch's global CPU generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes, Image, wrap

SampleTransform = Callable[[Image, BoundingBoxes, Tensor], tuple[Image, BoundingBoxes, Tensor]]


def train_transform(
    *,
    short_sides: Sequence[int],
    max_size: int,
    horizontal_flip: float,
    random_crop: float,
    crop_short_sides: Sequence[int],
    crop_min: int,
    crop_max: int,
) -> SampleTransform:
    """Flip with probability ``horizontal_flip``, then resize; with probability ``random_crop`` crop before that.

    The crop is taken from the image resized to one of ``crop_short_sides``. Sizes in pixels.
    """
    resize = RandomResize(short_sides, max_size)
    crop = v2.Compose([RandomResize(crop_short_sides), RandomSizeCrop(crop_min, crop_max), resize])
    return v2.Compose(
        [v2.RandomHorizontalFlip(horizontal_flip), v2.RandomChoice([resize, crop], p=[1 - random_crop, random_crop])]
    )


def eval_transform(*, short_side: int, max_size: int) -> SampleTransform:
    """Resize the shorter side to ``short_side`` pixels, the longer to at most ``max_size``."""
    return RandomResize([short_side], max_size)


def resized_size(height: int, width: int, short_side: int, max_size: int | None = None) -> tuple[int, int]:
    """(height, width) after the shorter side became ``short_side``, the aspect ratio kept, the longer side cut off.

    If the longer side would exceed ``max_size``, the shorter side is lowered to the nearest whole pixel that fits.
    Like DETR, and unlike torchvision, the longer side is then computed from that rounded number, so that it may
    miss ``max_size`` by a few pixels either way.
    """
    short, long = min(height, width), max(height, width)
    if max_size is not None and long / short * short_side > max_size:
        short_side = max(1, round(max_size * short / long))
    long_side = short_side * long // short
    return (short_side, long_side) if height <= width else (long_side, short_side)


class RandomResize(v2.Transform):
    """Resize the shorter side to one of ``short_sides`` (see :func:`resized_size`), bilinear with antialiasing."""

    def __init__(self, short_sides: Sequence[int], max_size: int | None = None) -> None:
        super().__init__()
        self.short_sides = list(short_sides)
        self.max_size = max_size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        short_side = self.short_sides[_uniform(0, len(self.short_sides) - 1)]
        return {"size": list(resized_size(height, width, short_side, self.max_size))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return functional.resize(inpt, params["size"], antialias=True)


class RandomSizeCrop(nn.Module):
    """Cut out a rectangle whose sides are whole pixels between ``min_size`` and ``max_size``, all equally likely.

    An image smaller than a bound is the bound. Boxes are clipped to the crop; those left without area are removed,
    with their labels.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        super().__init__()
        self.min_size = min_size
        self.max_size = max_size

    def forward(self, image: Image, boxes: BoundingBoxes, labels: Tensor) -> tuple[Image, BoundingBoxes, Tensor]:
        full_height, full_width = image.shape[-2:]
        width, height = self._side(full_width), self._side(full_height)
        top, left = _uniform(0, full_height - height), _uniform(0, full_width - width)
        image, boxes = (functional.crop(part, top, left, height, width) for part in (image, boxes))
        keep = has_area(boxes)
        return image, wrap(boxes[keep], like=boxes), labels[keep]

    def _side(self, available: int) -> int:
        return _uniform(min(self.min_size, available), min(self.max_size, available))


def has_area(boxes: Tensor) -> Tensor:
    """(T,) bool: whether corners (T, 4) enclose anything."""
    return (boxes[:, 2:] > boxes[:, :2]).all(dim=1)


def _uniform(low: int, high: int) -> int:
    """A whole number between both bounds, inclusive."""
    return int(torch.randint(low, high + 1, ()))
