"""DETR's training and evaluation transforms (Carion et al. 2020, arXiv 2005.12872, section 4, "Technical details").

Every transform maps a :class:`Sample` to a :class:`Sample` and takes its random numbers from torch's global CPU
generator. :data:`TRANSFORMS` holds further training transforms by name, for ``data.transforms.extra``; a file of the
user's own adds to it with ``@TRANSFORMS.register("NAME")``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Image, Mask, wrap

from detr_bf.common.extensions import Registry, UserFile, extended
from detr_bf.common.structures import Batch, Target, padding_mask
from detr_bf.data.images import pixel_values


class Sample(NamedTuple):
    """Image with its T objects; torchvision's transforms accept named tuples of tv_tensors."""

    image: Image  # (C, h, w) uint8, or float32 from 0 to 255; C is 3 except with other data.channels
    boxes: BoundingBoxes  # (T, 4) float32, x0, y0, x1, y1 in pixels
    labels: Tensor  # (T,)
    masks: Mask | None = None  # (T, h, w) uint8, 1 on the object; resized with nearest-neighbour interpolation


SampleTransform = Callable[[Sample], Sample]

# Further training transforms by name, applied in the order of ``data.transforms.extra`` after the standard ones. They
# keep the type of the image, and drop the objects of which they leave nothing.
TRANSFORMS: Registry[SampleTransform] = Registry(
    "transform",
    {"photometric_distort": v2.RandomPhotometricDistort(), "vertical_flip": v2.RandomVerticalFlip()},
)


def train_transform(
    *,
    short_sides: Sequence[int],
    max_size: int,
    horizontal_flip: float,
    random_crop: float,
    crop_short_sides: Sequence[int],
    crop_min: int,
    crop_max: int,
    square: int | None = None,
    size_divisor: int = 1,
    extra: Sequence[str] = (),
) -> SampleTransform:
    """Flip with probability ``horizontal_flip``, then resize; with probability ``random_crop`` crop before the resize.

    The crop is taken from the image resized to one of ``crop_short_sides``. Sizes in pixels. ``square`` replaces
    ``short_sides`` and ``max_size``: each image becomes a square of that side, without its aspect ratio. Otherwise the
    sides are rounded to multiples of ``size_divisor``. ``extra`` names transforms of :data:`TRANSFORMS` to apply at the
    end.

    Raises:
        InputError: a name of ``extra`` is not in :data:`TRANSFORMS`.
    """
    added = [_Registered(name) for name in extra]
    resize = RandomResize(short_sides, max_size, size_divisor) if square is None else SquareResize(square)
    crop = v2.Compose([RandomResize(crop_short_sides), RandomSizeCrop(crop_min, crop_max), resize])
    resize_or_crop = v2.RandomChoice([resize, crop], p=[1 - random_crop, random_crop])
    return v2.Compose([v2.RandomHorizontalFlip(horizontal_flip), resize_or_crop, *added])


class _Registered:
    """Transform of :data:`TRANSFORMS` whose results are checked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.transform = TRANSFORMS.find(name, "data.transforms.extra")
        self._file = TRANSFORMS.files.get(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """A process that is not forked executes the user's file again."""
        return _registered, (self.name, self._file)

    def __call__(self, sample: Sample) -> Sample:
        changed = self.transform(sample)
        if not isinstance(changed, Sample) or changed.image.dtype != sample.image.dtype:
            kind = str(sample.image.dtype).removeprefix("torch.")
            raise TypeError(f"the transform '{self.name}' must return a Sample whose image is {kind}")
        return changed


def _registered(name: str, file: UserFile | None) -> _Registered:
    with extended([] if file is None else [file]):
        return _Registered(name)


def eval_transform(
    *, short_side: int, max_size: int, square: int | None = None, size_divisor: int = 1
) -> SampleTransform:
    """Resize the shorter side to ``short_side`` pixels, the longer to at most ``max_size``, or both to ``square``.

    Without ``square`` the sides are rounded to multiples of ``size_divisor``.
    """
    return RandomResize([short_side], max_size, size_divisor) if square is None else SquareResize(square)


def eval_sample(transform: SampleTransform, pixels: Tensor, index: int) -> tuple[Tensor, Target]:
    """Return a transformed image (C, h, w) and its target, for ``pixels`` (C, H, W) without annotations."""
    original_size = (pixels.shape[-2], pixels.shape[-1])
    no_boxes = BoundingBoxes(torch.empty(0, 4), format=BoundingBoxFormat.XYXY, canvas_size=original_size)
    resized, _, labels, _ = transform(Sample(Image(pixel_values(pixels)), no_boxes, torch.empty(0, dtype=torch.int64)))
    size = (resized.shape[-2], resized.shape[-1])
    return resized.as_subclass(Tensor), Target(index, torch.empty(0, 4), labels, size, original_size)


def resized_size(
    height: int, width: int, short_side: int, max_size: int | None = None, divisor: int = 1
) -> tuple[int, int]:
    """Return (height, width) after resizing the shorter side to ``short_side``, with the aspect ratio kept.

    If the longer side would exceed ``max_size``, the shorter side is reduced and rounded to whole pixels. As in DETR,
    and unlike in torchvision, the longer side is then computed from that rounded number and rounded down, so it may
    differ from ``max_size`` by a few pixels. Last, each side is rounded to a multiple of ``divisor``, see
    :func:`rounded_side`, which changes the aspect ratio.
    """
    short, long = min(height, width), max(height, width)
    if max_size is not None and long / short * short_side > max_size:
        short_side = max(1, round(max_size * short / long))
    long_side = short_side * long // short
    if divisor > 1:
        short_side, long_side = (rounded_side(side, divisor, max_size) for side in (short_side, long_side))
    return (short_side, long_side) if height <= width else (long_side, short_side)


def rounded_side(side: float, divisor: int, most: int | None = None) -> int:
    """Return the multiple of ``divisor`` nearest to ``side``, at most ``most``, but at least ``divisor``."""
    nearest = math.floor(side / divisor + 0.5) * divisor
    limit = nearest if most is None else most // divisor * divisor
    return max(divisor, min(nearest, limit))


class RandomResize(v2.Transform):
    """Resize the shorter side to one of ``short_sides`` (see :func:`resized_size`), bilinear with antialiasing."""

    def __init__(self, short_sides: Sequence[int], max_size: int | None = None, divisor: int = 1) -> None:
        super().__init__()
        self.short_sides = list(short_sides)
        self.max_size = max_size
        self.divisor = divisor

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        short_side = self.short_sides[_uniform(0, len(self.short_sides) - 1)]
        return {"size": list(resized_size(height, width, short_side, self.max_size, self.divisor))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return functional.resize(inpt, params["size"], antialias=True)


class SquareResize(v2.Resize):
    """Resize to a square of ``side`` pixels, bilinear with antialiasing; masks to the nearest pixel."""

    def __init__(self, side: int) -> None:
        super().__init__((side, side), antialias=True)


class RandomSizeCrop(nn.Module):
    """Crop a random rectangle; each side is uniform between ``min_size`` and ``max_size`` pixels.

    The image's own side replaces a bound that exceeds it. Boxes are clipped to the crop. Objects whose box has no area
    left are removed, and objects whose mask has no pixel left.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        super().__init__()
        self.min_size = min_size
        self.max_size = max_size

    def forward(self, sample: Sample) -> Sample:
        full_height, full_width = sample.image.shape[-2:]
        width, height = self._side(full_width), self._side(full_height)
        corner = _uniform(0, full_height - height), _uniform(0, full_width - width)
        image, boxes = (functional.crop(part, *corner, height, width) for part in (sample.image, sample.boxes))
        keep, masks = has_area(boxes), None
        if sample.masks is not None:
            masks = functional.crop(sample.masks, *corner, height, width)
            keep &= has_pixels(masks)
            masks = wrap(masks[keep], like=masks)
        return Sample(image, wrap(boxes[keep], like=boxes), sample.labels[keep], masks)

    def _side(self, available: int) -> int:
        return _uniform(min(self.min_size, available), min(self.max_size, available))


def mixup(batch: Batch, share: float) -> Batch:
    """Blend each image with the one before it in the batch, the first with the last, and join their objects.

    Images stay aligned at the upper left corner and are not resized, and all objects count fully (Zhang et al. 2019,
    arXiv 1902.04103, section 3.1). A pixel outside of one of the two images is black in it. A batch of one image is
    returned unchanged.

    Args:
        batch: with targets.
        share: of the image itself, 0 to 1; the other gets the rest. A value near 0.5 leaves both visible.
    """
    if len(batch) < 2:
        return batch
    blended = share * batch.images.float() + (1 - share) * batch.images.roll(1, 0).float()
    targets = tuple(_joined(target, batch.targets[index - 1]) for index, target in enumerate(batch.targets))
    height, width = batch.padding_mask.shape[1:]
    mask = padding_mask([target.size for target in targets], (height, width))
    return Batch(in_type_of(batch.images, blended), mask, targets)


def in_type_of(image: Tensor, values: Tensor) -> Tensor:
    """Return float32 values from 0 to 255 in the type of an image, rounded if that is uint8."""
    return values if image.is_floating_point() else values.round().to(torch.uint8)


def _joined(first: Target, second: Target) -> Target:
    """Return ``first`` with the objects of ``second`` added, on a canvas that holds both images."""
    height, width = (max(sides) for sides in zip(first.size, second.size, strict=True))
    masks = None
    if first.masks is not None and second.masks is not None:
        padded = (F.pad(m, (0, width - m.shape[2], 0, height - m.shape[1])) for m in (first.masks, second.masks))
        masks = torch.cat(list(padded))
    return replace(
        first,
        boxes=torch.cat(
            [
                target.boxes * torch.tensor([target.size[1] / width, target.size[0] / height] * 2)
                for target in (first, second)
            ]
        ),
        labels=torch.cat([first.labels, second.labels]),
        size=(height, width),
        file_name=f"{first.file_name} with {second.file_name}",
        masks=masks,
    )


def has_area(boxes: Tensor) -> Tensor:
    """Return (T,) bool: the boxes (T, 4) x0, y0, x1, y1 with an area."""
    return (boxes[:, 2:] > boxes[:, :2]).all(dim=1)


def has_pixels(masks: Tensor) -> Tensor:
    """Return (T,) bool: the masks (T, h, w) with at least one pixel."""
    return masks.flatten(1).any(dim=1).bool()  # any() of uint8 is uint8


def _uniform(low: int, high: int) -> int:
    """Return a random integer between both bounds, inclusive."""
    return int(torch.randint(low, high + 1, ()))
