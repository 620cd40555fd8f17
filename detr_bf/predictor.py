"""A trained detector ready for images."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as PillowImage
from torch import Tensor
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Image

from detr_bf.data.images import MAX_PIXELS, read_image
from detr_bf.data.transforms import Sample, SampleTransform
from detr_bf.detectors import Detector
from detr_bf.errors import InputError
from detr_bf.evaluation import DEFAULT_THRESHOLD, ScoreThresholds
from detr_bf.postprocess import PanopticPostprocess, Postprocess
from detr_bf.structures import Batch, ClassMap, Detections, PanopticMap, Target
from detr_bf.text import printable

# What is taken as an image; `image_pixels` has the exact rules.
ImageLike: TypeAlias = str | Path | Tensor | NDArray[np.uint8] | PillowImage.Image
_IMAGE = (
    "an image is a path, a (3, H, W) tensor (RGB; uint8, or floating-point from 0 to 1), an (H, W, 3) uint8 NumPy "
    "array or a Pillow image of mode RGB"
)
_ORIENTATION = 0x0112  # EXIF tag


@dataclass(frozen=True)
class Predictor:
    """Images in, :class:`~detr_bf.structures.Detections` out, in pixels of the image given.

    With a mask head the detections have masks, and :meth:`panoptic` gives panoptic maps.

    An image is one of these; anything else is an InputError:

    - the path of a file, rotated as its EXIF data say;
    - a (3, H, W) RGB tensor: uint8, or floating-point from 0 to 1, which is multiplied by 255 and rounded;
    - an (H, W, 3) uint8 RGB array of NumPy;
    - a Pillow image of mode RGB without EXIF rotation.

    None of them may have more than ``max_pixels`` pixels, the run's data.max_pixels.

    Only detections with a score of at least ``threshold`` are returned: a number, ``"class"`` for the stored threshold
    of each class, or None for the stored threshold of all classes (0.5 if the checkpoint has none). Stored
    thresholds are those with the highest F1 in the last evaluation before the checkpoint was written; with 0 all
    ``eval.max_detections`` are returned.
    """

    model: Detector
    class_map: ClassMap
    transform: SampleTransform
    postprocess: Postprocess
    panoptic_postprocess: PanopticPostprocess
    device: torch.device
    max_pixels: int = MAX_PIXELS  # of an image
    thresholds: ScoreThresholds | None = None  # of the checkpoint

    def __call__(self, image: ImageLike, threshold: float | str | None = None) -> Detections:
        """Detect in one image.

        Raises:
            InputError: it is no image, or cannot be read; the threshold is not one.
        """
        least = self.least_scores(threshold)
        (detections,) = self._detect([self._sample(image_pixels(image, "the image", self.max_pixels), 0)])
        return _above(detections, least)

    @torch.no_grad()
    def panoptic(self, image: ImageLike) -> PanopticMap:
        """Return the panoptic map of one image.

        Raises:
            InputError: the detector has no mask head, or as :meth:`__call__`.
        """
        if self.model.mask_head is None:
            raise InputError("this detector has no mask head: train one with model.masks=true, on data with masks")
        batch = Batch.collate([self._sample(image_pixels(image, "the image", self.max_pixels), 0)]).to(self.device)
        (found,) = self.panoptic_postprocess(self.model(batch), batch.targets)
        return found

    def predict(
        self, images: Iterable[ImageLike], batch_size: int = 1, threshold: float | str | None = None
    ) -> Iterator[Detections]:
        """Detect in many images; ``image_id`` is the index in the sequence, from 0.

        Batches pad smaller images, which moves scores and boxes a little: 1 is the exact choice.

        Raises:
            InputError: ``images`` is a single image, one of them is no image or cannot be read, ``batch_size`` is
                not a whole number from 1, or ``threshold`` is not one.
        """
        least = self.least_scores(threshold)
        return (
            _above(found, least)
            for chunk in chunks(images, batch_size)
            for found in self._detect(
                [self._sample(image_pixels(image, f"image {n}", self.max_pixels), n) for n, image in chunk]
            )
        )

    def least_scores(self, threshold: float | str | None = None) -> Tensor:
        """Return the score from which the detections of each class are returned, (K,) float64 on the CPU.

        Raises:
            InputError: ``threshold`` is not a number from 0 to 1, ``"class"`` or None.
        """
        stored = self.thresholds or ScoreThresholds.same(DEFAULT_THRESHOLD, self.class_map.num_classes)
        if isinstance(threshold, str) and threshold == "class":
            return torch.tensor(stored.by_class, dtype=torch.float64)
        if threshold is None:
            threshold = stored.overall
        if isinstance(threshold, (bool, str)) or not (isinstance(threshold, numbers.Real) and 0 <= threshold <= 1):
            raise InputError(
                f"a threshold must be a number from 0 to 1, or 'class' for the stored threshold of each class; "
                f"got {printable(repr(threshold))}"
            )
        return torch.full((self.class_map.num_classes,), float(threshold), dtype=torch.float64)

    @torch.no_grad()
    def _detect(self, samples: Sequence[tuple[Tensor, Target]]) -> list[Detections]:
        batch = Batch.collate(samples).to(self.device)
        return self.postprocess(self.model(batch), batch.targets)

    def _sample(self, pixels: Tensor, index: int) -> tuple[Tensor, Target]:
        original_size = (pixels.shape[-2], pixels.shape[-1])
        no_boxes = BoundingBoxes(torch.empty(0, 4), format=BoundingBoxFormat.XYXY, canvas_size=original_size)
        resized, _, labels, _ = self.transform(Sample(Image(pixels), no_boxes, torch.empty(0, dtype=torch.int64)))
        size = (resized.shape[-2], resized.shape[-1])
        target = Target(index, torch.empty(0, 4), labels, size, original_size)
        return resized.as_subclass(Tensor), target


def _above(detections: Detections, least: Tensor) -> Detections:
    """Return the detections whose scores reach the least score of their class, (K,)."""
    keep = detections.scores.cpu().double() >= least[detections.labels.cpu()]
    masks = detections.masks and tuple(mask for mask, kept in zip(detections.masks, keep, strict=True) if kept)
    keep = keep.to(detections.scores.device)
    boxes, scores, labels = (x[keep] for x in (detections.boxes, detections.scores, detections.labels))
    return Detections(detections.image_id, boxes, scores, labels, masks)


def chunks(images: Iterable[ImageLike], batch_size: int) -> Iterator[list[tuple[int, ImageLike]]]:
    """Yield lists of ``batch_size`` images with their indices; the last list may be shorter."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError(f"batch_size must be a whole number from 1, got {printable(repr(batch_size))}")
    is_one = isinstance(images, (Tensor, np.ndarray)) and images.ndim < 4
    if is_one or isinstance(images, (str, os.PathLike)) or not isinstance(images, Iterable):
        raise InputError(f"predict takes several images, such as a list, got {_described(images)}: call the predictor")
    numbered = enumerate(images)
    return iter(lambda: list(islice(numbered, batch_size)), [])


def image_pixels(image: object, name: str, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Return an image as (3, H, W) uint8 RGB on the CPU; see :class:`Predictor` for the accepted types.

    Raises:
        InputError: ``image`` is something else, which the message calls ``name``, or its file cannot be read.
    """
    if isinstance(image, (str, os.PathLike)):
        return read_image(Path(image), max_pixels=max_pixels)
    if isinstance(image, Tensor):
        return _tensor_pixels(image, name, max_pixels)
    if isinstance(image, PillowImage.Image):
        if image.mode != "RGB":
            raise InputError(f"{name} is a Pillow image of mode {image.mode}, expected RGB: give image.convert('RGB')")
        if image.getexif().get(_ORIENTATION, 1) != 1:
            raise InputError(
                f"{name} is a Pillow image with an EXIF rotation: give PIL.ImageOps.exif_transpose(image), or its path"
            )
        image = np.asarray(image)
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
            raise InputError(f"{name} is {_described(image)}, expected (H, W, 3) uint8, RGB")
        _check_extent(image.shape[0], image.shape[1], name, max_pixels)
        return torch.from_numpy(image.copy()).permute(2, 0, 1)
    many = "; give several images to predict" if isinstance(image, Iterable) else ""
    raise InputError(f"{name} is {_described(image)}, but {_IMAGE}{many}")


def _tensor_pixels(image: Tensor, name: str, max_pixels: int) -> Tensor:
    if image.is_nested or image.layout != torch.strided or image.is_meta or image.is_quantized:
        raise InputError(f"{name} is a nested, sparse, meta or quantized tensor, expected a dense one with values")
    if image.ndim != 3 or image.shape[0] != 3 or image.numel() == 0:
        advice = ""
        if image.ndim == 4:
            advice = ": give several images to predict"
        elif image.ndim == 3 and image.shape[2] == 3:
            advice = ": give image.permute(2, 0, 1)"
        raise InputError(f"{name} is {_described(image)}, expected (3, H, W), RGB{advice}")
    _check_extent(image.shape[1], image.shape[2], name, max_pixels)
    pixels = image.detach().cpu().as_subclass(Tensor)
    if pixels.dtype == torch.uint8:
        return pixels
    if not pixels.dtype.is_floating_point:
        raise InputError(f"{name} is {_described(image)}, expected uint8, or floating-point numbers from 0 to 1")
    pixels = pixels.float()
    low, high = (value.item() for value in pixels.aminmax())
    if not (low >= 0 and high <= 1):  # NaN is neither
        raise InputError(
            f"{name} is a floating-point tensor with values from {low:g} to {high:g}, expected 0 to 1: divide 0 to 255 "
            "by 255, and leave normalisation to the predictor"
        )
    return (pixels * 255).round().to(torch.uint8)


def _check_extent(height: int, width: int, name: str, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise InputError(
            f"{name} is of {width} x {height} pixels (width x height), more than max_pixels={max_pixels}: give a "
            "smaller one, or raise max_pixels"
        )


def _described(image: object) -> str:
    """The type, and of arrays the shape and dtype."""
    if isinstance(image, (Tensor, np.ndarray)):
        kind = "a tensor" if isinstance(image, Tensor) else "a NumPy array"
        return f"{kind} of shape {tuple(image.shape)} and {str(image.dtype).removeprefix('torch.')}"
    return f"of type {type(image).__name__}"
