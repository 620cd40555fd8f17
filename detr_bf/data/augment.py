"""Augmentation of training images before DETR's own transforms: several images in one, cuts, scales and colours.

Every operation maps a :class:`~detr_bf.data.transforms.Sample` to a sample and takes its random numbers from torch's
global CPU generator. Images keep their type. Boxes and masks follow the pixels; an object is dropped if less than one
pixel of one side of its box is left, no pixel of its mask, or a smaller share of it than ``min_visible``.

Shape legend: T objects, h x w pixels of an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import masks_to_boxes
from torchvision.transforms.v2 import RandomIoUCrop, RandomPhotometricDistort, RandomZoomOut, functional
from torchvision.tv_tensors import BoundingBoxes, Image, Mask, wrap

from detr_bf.data.transforms import Sample, has_pixels, in_type_of

PASTED_SCALE = (0.5, 1.0)  # size of the image that copy-paste takes objects from, as a share of the largest that fits
_MOST_BYTES = 2**27  # of image and masks of a mosaic and after zoom-out; on a larger canvas everything is smaller

# Probabilities of :class:`Augmentation`, in the order of their application.
AUGMENTATIONS = ("copy_paste", "mosaic", "scale_jitter", "photometric_distort", "zoom_out", "iou_crop")


@dataclass(frozen=True)
class Augmentation:
    """Augmentations by probability, in the order of ``AUGMENTATIONS``, and the epochs that have them.

    A mosaic gets neither zoom-out nor IoU crop, as in DEIM (Huang et al. 2024, arXiv 2412.04234, authors' code).

    Args:
        copy_paste: paste objects of another image (:func:`pasted`); needs masks.
        mosaic: four images in one (:func:`mosaic`), with a change of scale.
        mosaic_offsets: range of the point where the four meet, as shares of height and width.
        mosaic_scale: range of the scale of the whole mosaic.
        scale_jitter: change the scale (:func:`scale_jittered`).
        scale_jitter_range: range of the factor.
        photometric_distort: of each change of :func:`photometrically_distorted`.
        zoom_out: put the image on a larger black canvas.
        zoom_out_max: largest side of the canvas as a multiple of the image's.
        iou_crop: crop around objects (Liu et al. 2016, arXiv 1512.02325, section 2.2), if there are any.
        iou_crop_scale: range of the crop's sides as shares of the image's.
        min_visible: least share of an object that a cut or a pasted object may leave of it.
        epochs: with augmentation, counted from 0.
        dense_epochs: with mosaic and copy-paste, as far as they are among ``epochs``.
    """

    copy_paste: float = 0.0
    mosaic: float = 0.0
    mosaic_offsets: Sequence[float] = (0.4, 0.6)
    mosaic_scale: Sequence[float] = (0.5, 1.5)
    scale_jitter: float = 0.0
    scale_jitter_range: Sequence[float] = (0.1, 2.0)
    photometric_distort: float = 0.0
    zoom_out: float = 0.0
    zoom_out_max: float = 4.0
    iou_crop: float = 0.0
    iou_crop_scale: Sequence[float] = (0.3, 1.0)
    min_visible: float = 0.0
    epochs: range = range(10**9)
    dense_epochs: range = range(10**9)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the augmentations that are on, in the order of their application."""
        return tuple(name for name in AUGMENTATIONS if getattr(self, name) > 0)

    def at(self, epoch: int) -> Augmentation | None:
        """Return the augmentation of an epoch; None if nothing is on."""
        found = self if epoch in self.dense_epochs else replace(self, mosaic=0.0, copy_paste=0.0)
        return found if found.names and epoch in self.epochs else None

    def only(self, name: str) -> Augmentation:
        """Return the augmentation of this name alone, for every image."""
        probabilities: dict[str, Any] = {**dict.fromkeys(AUGMENTATIONS, 0.0), name: 1.0}
        return replace(self, **probabilities)

    def __call__(self, sample: Sample, draw: Callable[[], Sample], is_thing: Sequence[bool]) -> Sample:
        """Augment a sample.

        Args:
            sample: with masks, if copy-paste is on.
            draw: () -> a random training sample.
            is_thing: by class; objects of the other classes, which are stuff, are not copied.
        """
        if _happens(self.copy_paste):
            sample = pasted(sample, draw(), is_thing, self.min_visible)
        is_mosaic = _happens(self.mosaic)
        if is_mosaic:
            centre = _uniform(*self.mosaic_offsets), _uniform(*self.mosaic_offsets)
            sample = mosaic([sample, draw(), draw(), draw()], centre)
            sample = scale_jittered(sample, _uniform(*self.mosaic_scale), self.min_visible)
        if _happens(self.scale_jitter):
            sample = scale_jittered(sample, _uniform(*self.scale_jitter_range), self.min_visible)
        if self.photometric_distort:
            sample = photometrically_distorted(sample, self.photometric_distort)
        if not is_mosaic and _happens(self.zoom_out):
            sample = zoomed_out(sample, self.zoom_out_max)
        if not is_mosaic and _happens(self.iou_crop):
            sample = iou_cropped(sample, self.iou_crop_scale, self.min_visible)
        return sample


def mosaic(samples: Sequence[Sample], centre: tuple[float, float]) -> Sample:
    """Put four images on a black canvas, with their objects (Bochkovskiy et al. 2020, arXiv 2004.10934, section 3.4).

    The canvas has the largest height and the largest width of the four, or is smaller, with their ratio, if image and
    masks would need more than ``_MOST_BYTES``. Each image is resized to the largest size that fits its quarter, with
    its aspect ratio, and touches the point where the quarters meet.

    Args:
        samples: upper left, upper right, lower left, lower right.
        centre: the point where the quarters meet: (row, column) as shares of the canvas, greater than 0, less than 1.
    """
    masked = all(sample.masks is not None for sample in samples)
    canvas = [max(2, *(sample.image.shape[dim] for sample in samples)) for dim in (-2, -1)]
    scale = _shrinking(canvas, samples[0].image, sum(len(sample.boxes) for sample in samples) if masked else 0)
    canvas = [max(2, int(side * scale)) for side in canvas]
    meeting = [min(max(1, round(share * side)), side - 1) for share, side in zip(centre, canvas, strict=True)]
    image = torch.zeros(len(samples[0].image), *canvas, dtype=samples[0].image.dtype)
    parts, places = [], []
    for number, sample in enumerate(samples):
        far = divmod(number, 2)  # 1 behind the meeting point: below, right
        quarter = [side - at if behind else at for side, at, behind in zip(canvas, meeting, far, strict=True)]
        size = _fitting(sample, quarter)
        begin = [at if behind else at - side for at, behind, side in zip(meeting, far, size, strict=True)]
        place = [slice(start, start + side) for start, side in zip(begin, size, strict=True)]
        part = _resized(sample if masked else sample._replace(masks=None), size)
        image[:, place[0], place[1]] = part.image
        padding = [begin[1], begin[0], canvas[1] - begin[1] - size[1], canvas[0] - begin[0] - size[0]]
        parts.append(_large_enough(part._replace(boxes=functional.pad(part.boxes, padding))))
        places.append(place)
    joined = _joined(Image(image), [part._replace(masks=None) for part in parts])
    if not masked:
        return joined
    masks, first = torch.zeros(len(joined.boxes), *canvas, dtype=torch.uint8), 0
    for part, place in zip(parts, places, strict=True):
        assert part.masks is not None
        masks[first : first + len(part.boxes), place[0], place[1]] = part.masks
        first += len(part.boxes)
    return joined._replace(masks=Mask(masks))


def pasted(sample: Sample, other: Sample, is_thing: Sequence[bool], min_visible: float = 0.0) -> Sample:
    """Paste objects of another image by their masks (Ghiasi et al. 2021, arXiv 2012.07177, section 3).

    The other image is scaled to a random share of the largest size that fits (``PASTED_SCALE``), flipped with
    probability 0.5 and placed anywhere. Each of its objects is taken with probability 0.5, at least one. Boxes of
    covered objects become the boxes of the pixels that are left.

    Args:
        sample: with masks.
        other: with masks.
        is_thing: by class; objects of the other classes are not taken.
        min_visible: least share of the pixels of an object that must stay uncovered.
    """
    assert sample.masks is not None
    assert other.masks is not None
    chosen = torch.tensor([is_thing[label] for label in other.labels.tolist()], dtype=torch.bool).nonzero()[:, 0]
    if not len(chosen):
        return sample
    taken = torch.rand(len(chosen)) < 0.5
    taken[_integer(0, len(chosen) - 1)] = True
    chosen = chosen[taken]
    canvas = list(sample.image.shape[-2:])
    size = _fitting(other, [max(1, round(side * _uniform(*PASTED_SCALE))) for side in canvas])
    pixels, _, _, masks = _resized(other._replace(masks=Mask(other.masks[chosen])), size)
    if _happens(0.5):
        pixels, masks = functional.horizontal_flip(pixels), functional.horizontal_flip(masks)
    top, left = (_integer(0, whole - part) for whole, part in zip(canvas, size, strict=True))
    padding = [left, top, canvas[1] - left - size[1], canvas[0] - top - size[0]]
    pixels, masks = functional.pad(pixels, padding), functional.pad(masks, padding)
    seen = has_pixels(masks)
    chosen, masks = chosen[seen], masks[seen]
    covered = masks.any(dim=0)
    left_over = _uncovered(sample, covered, min_visible)
    boxes = wrap(_boxes_of(masks), like=sample.boxes)
    added = Sample(sample.image, boxes, other.labels[chosen], Mask(masks))
    return _large_enough(_joined(Image(torch.where(covered.bool(), pixels, sample.image)), [left_over, added]))


def scale_jittered(sample: Sample, factor: float, min_visible: float = 0.0) -> Sample:
    """Enlarge or reduce an image on a canvas of its own size, at a random place.

    This is large-scale jitter (Ghiasi et al. 2021, arXiv 2012.07177, section 3). An enlarged image is only cropped to
    the part that the canvas shows: the resize that follows enlarges it.
    """
    height, width = sample.image.shape[-2:]
    if factor >= 1:
        size = max(1, round(height / factor)), max(1, round(width / factor))
        return _cut(sample, _integer(0, height - size[0]), _integer(0, width - size[1]), *size, min_visible)[0]
    small = max(1, round(height * factor)), max(1, round(width * factor))
    top, left = _integer(0, height - small[0]), _integer(0, width - small[1])
    resized = _resized(sample, list(small))
    padding = [left, top, width - left - small[1], height - top - small[0]]
    return _large_enough(_each(resized, functional.pad, padding=padding))


def photometrically_distorted(sample: Sample, probability: float) -> Sample:
    """Change brightness, contrast, saturation, hue and the order of the channels, each with that probability.

    Saturation, hue and order are those of colours: images of other channels than 3, or of 16 bits, get the same ranges
    of brightness and contrast alone, the contrast of each channel about its mean.
    """
    distort = RandomPhotometricDistort(p=probability)
    if len(sample.image) == 3 and sample.image.dtype == torch.uint8:
        return distort(sample)
    pixels = sample.image.as_subclass(Tensor).float()
    if _happens(probability):
        pixels = pixels * _uniform(*distort.brightness)
    if _happens(probability):
        mean = pixels.mean((1, 2), keepdim=True)
        pixels = mean + (pixels - mean) * _uniform(*distort.contrast)
    return sample._replace(image=wrap(in_type_of(sample.image, pixels.clamp(0, 255)), like=sample.image))


def zoomed_out(sample: Sample, largest: float) -> Sample:
    """Put an image on a black canvas, whose sides are 1 to ``largest`` times its own, at a random place.

    Canvas and image are smaller if image and masks would need more than ``_MOST_BYTES`` on the canvas drawn.
    """
    torch.rand(1)  # drawn by RandomZoomOut before its parameters: a seed gives the same canvas as with its forward()
    zoom = RandomZoomOut(side_range=(1.0, largest), p=1.0)
    left, top, right, bottom = padding = zoom.make_params([sample.image])["padding"]
    height, width = sample.image.shape[-2:]
    canvas = top + height + bottom, left + width + right
    scale = _shrinking(canvas, sample.image, 0 if sample.masks is None else len(sample.masks))
    if scale < 1:
        sample = _large_enough(_resized(sample, [max(1, int(side * scale)) for side in (height, width)]))
        padding = [int(side * scale) for side in padding]
    return _each(sample, functional.pad, padding=padding)


def iou_cropped(sample: Sample, scale: Sequence[float], min_visible: float = 0.0) -> Sample:
    """Crop a part that contains the centre of an object, or return the image whole.

    The least IoU of the crop with one of these objects is drawn from 0, 0.1, 0.3, 0.5, 0.7 and 0.9; a seventh choice
    leaves the image as it is. Objects whose centre is outside are dropped. An image without objects is not changed.

    Args:
        sample: the image.
        scale: least and largest side of the crop as shares of the image's; the aspect ratio of the shares is between
            1/2 and 2.
        min_visible: least share of an object that must be inside.
    """
    if not len(sample.boxes) or min(sample.image.shape[-2:]) * scale[0] < 1:  # a crop without a pixel
        return sample
    where = RandomIoUCrop(min_scale=scale[0], max_scale=scale[1]).make_params([sample.image, sample.boxes])
    if not where:
        return sample
    inside = where.pop("is_within_crop_area")
    cut, kept = _cut(sample, **where, min_visible=min_visible)
    return _chosen(cut, inside[kept])


def _cut(sample: Sample, top: int, left: int, height: int, width: int, min_visible: float) -> tuple[Sample, Tensor]:
    """Return the part of a sample in a rectangle inside the image, and (T,) bool: the objects that are left."""
    parts = _each(sample, functional.crop, top=top, left=left, height=height, width=width)
    before, after = (_areas(each) for each in (sample, parts))
    kept = _is_large_enough(parts) & (after >= min_visible * before)
    return _chosen(parts, kept), kept


def _uncovered(sample: Sample, covered: Tensor, min_visible: float) -> Sample:
    """Return the objects that are visible behind the pixels ``covered`` (h, w), with new boxes if they lost pixels."""
    assert sample.masks is not None
    masks = Mask(sample.masks * ~covered.bool())
    before, after = (each.flatten(1).sum(1) for each in (sample.masks, masks))
    boxes = sample.boxes.as_subclass(Tensor).clone()
    changed = (after < before) & (after > 0)
    boxes[changed] = _boxes_of(masks[changed])
    whole = Sample(sample.image, wrap(boxes, like=sample.boxes), sample.labels, masks)
    return _chosen(whole, (after > 0) & (after >= min_visible * before))


def _boxes_of(masks: Tensor) -> Tensor:
    """Return the boxes (T, 4) around the pixels of the masks (T, h, w), each with one pixel or more."""
    boxes = masks_to_boxes(masks.as_subclass(Tensor))
    boxes[:, 2:] += 1  # from the index of the last pixel to its end
    return boxes


def _areas(sample: Sample) -> Tensor:
    """Return (T,) float: pixels of the masks, or without masks the areas of the boxes."""
    if sample.masks is not None:
        return sample.masks.as_subclass(Tensor).flatten(1).sum(1).float()
    corners = sample.boxes.as_subclass(Tensor)
    return (corners[:, 2:] - corners[:, :2]).prod(1)


def _is_large_enough(sample: Sample) -> Tensor:
    """Return (T,) bool: the objects with a box of one pixel or more on each side, and a mask of one pixel or more."""
    corners = sample.boxes.as_subclass(Tensor)
    kept = (corners[:, 2:] - corners[:, :2] >= 1).all(1)
    return kept if sample.masks is None else kept & has_pixels(sample.masks.as_subclass(Tensor))


def _large_enough(sample: Sample) -> Sample:
    return _chosen(sample, _is_large_enough(sample))


def _chosen(sample: Sample, kept: Tensor) -> Sample:
    """Return a sample with the objects ``kept`` (T,) bool."""
    boxes = wrap(sample.boxes[kept], like=sample.boxes)
    masks = None if sample.masks is None else wrap(sample.masks[kept], like=sample.masks)
    return Sample(sample.image, boxes, sample.labels[kept], masks)


def _joined(image: Image, parts: Sequence[Sample]) -> Sample:
    """Return an image with the objects of all ``parts``, which have its size."""
    boxes = torch.cat([part.boxes.as_subclass(Tensor) for part in parts])
    masks = [part.masks for part in parts if part.masks is not None]
    return Sample(
        image,
        BoundingBoxes(boxes, format=parts[0].boxes.format, canvas_size=(image.shape[-2], image.shape[-1])),
        torch.cat([part.labels for part in parts]),
        Mask(torch.cat(masks)) if len(masks) == len(parts) else None,
    )


def _each(sample: Sample, function: Callable[..., Any], **settings: Any) -> Sample:
    """Apply a function of torchvision to image, boxes and masks."""
    image, boxes = (function(part, **settings) for part in (sample.image, sample.boxes))
    return Sample(image, boxes, sample.labels, None if sample.masks is None else function(sample.masks, **settings))


def _resized(sample: Sample, size: list[int]) -> Sample:
    """Resize to (height, width), bilinear with antialiasing, masks to the nearest pixel.

    A single pixel is computed in float32, because torch 2.15 fails with uint8 there.
    """
    single = size == [1, 1]
    image = wrap(sample.image.float(), like=sample.image) if single else sample.image
    resized = _each(sample._replace(image=image), functional.resize, size=size, antialias=True)
    return resized._replace(image=wrap(in_type_of(sample.image, resized.image), like=image)) if single else resized


def _fitting(sample: Sample, space: Sequence[int]) -> list[int]:
    """Return the largest (height, width) with the image's aspect ratio that fits ``space``, at least one pixel."""
    size = sample.image.shape[-2:]
    scale = min(limit / side for limit, side in zip(space, size, strict=True))
    return [min(max(1, round(side * scale)), limit) for limit, side in zip(space, size, strict=True)]


def _shrinking(canvas: Sequence[int], image: Tensor, masks: int) -> float:
    """Return the factor, at most 1, of the sides of a canvas that keeps image and masks within ``_MOST_BYTES``."""
    return min(1.0, math.sqrt(_MOST_BYTES / (math.prod(canvas) * (len(image) * image.itemsize + masks))))


def _happens(probability: float) -> bool:
    return probability > 0 and float(torch.rand(())) < probability


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def _integer(low: int, high: int) -> int:
    """Return a random integer between both bounds, inclusive."""
    return int(torch.randint(low, high + 1, ()))
