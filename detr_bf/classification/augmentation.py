"""Transforms of images for classifiers: timm's augmentation, and every random number a function of a seed.

A transform takes the pixels of an image, (C, h, w) uint8 with one or three channels, and a seed; it gives (3, H, W)
float32, normalised. Grey becomes three equal channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from random import Random
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from timm.data import RandomResizedCropAndInterpolation, str_to_pil_interp
from timm.data.auto_augment import (
    augment_and_mix_transform,
    auto_augment_transform,
    posterize,
    rand_augment_transform,
)
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import ColorJitter

from detr_bf.classification.randomness import seeded
from detr_bf.errors import InputError

Picture = Callable[[Image.Image], Image.Image]
SHIFT_SHARE = 0.45  # of the image's shorter side, the largest shift of an automatic policy, as timm's own recipes have


class ImageTransform(Protocol):
    """See the top of the file."""

    fixed: Resize | None  # what it does first whatever the seed, if there is such a thing

    def __call__(self, pixels: Tensor, seed: int) -> Tensor: ...


class Resize:
    """To ``size`` (height, width), whatever the ratio was."""

    def __init__(self, size: tuple[int, int], interpolation: str) -> None:
        self.size = size
        self.method = Image.Resampling(str_to_pil_interp(interpolation))

    def __call__(self, pixels: Tensor) -> Tensor:
        """(C, h, w) uint8 -> (C, *size) uint8; an image of that size is returned as it is."""
        if tuple(pixels.shape[-2:]) == self.size:
            return pixels
        return pixels_of(picture_of(pixels).resize(self.size[::-1], self.method))


class TrainTransform:
    """Crop, flip, change of colours, normalisation, random erasing: in this order, each only where it is wanted.

    Args:
        size: (height, width) in pixels.
        crop: ``resized``: a random part of the image, its area in ``area`` and its ratio of sides 3/4 to 4/3, is
            resized to ``size``; ``padded``: the image is resized to ``size`` and shifted by up to ``padding`` pixels
            either way, black coming in (He et al. 2016, section 4.2); ``none``: it is resized alone.
        color_jitter: of brightness, contrast and saturation, where there is no ``auto_augment``.
        auto_augment: timm's name of a policy (``rand-m9-mstd0.5-inc1``, ``augmix-m3``, ``original``); empty: none.
        erase: probability of erasing a random rectangle, which becomes noise.
        mean, std: of the three channels, pixels counting from 0 to 1.

    Raises:
        InputError: timm does not know the policy.
    """

    def __init__(
        self,
        size: tuple[int, int],
        *,
        crop: str,
        area: Sequence[float],
        padding: int,
        horizontal_flip: float,
        color_jitter: float,
        auto_augment: str,
        erase: float,
        interpolation: str,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self.fixed = None if crop == "resized" else Resize(size, interpolation)
        self.padding = padding if crop == "padded" else 0
        self.horizontal_flip = horizontal_flip
        self.crop: Picture | None = None
        if crop == "resized":
            self.crop = RandomResizedCropAndInterpolation(size, scale=tuple(area), interpolation=interpolation)
        self.colours: Picture | None = None
        if auto_augment:
            self.colours = _policy(auto_augment, size, interpolation, mean)
        elif color_jitter:
            self.colours = ColorJitter(*[color_jitter] * 3)
        self.normalize = Normalize(mean, std)
        self.erase = erase
        self._eraser = RandomErasing(1.0, mode="pixel", device="cpu")
        self._numpy = bool(auto_augment)  # draws numbers there, too

    def __call__(self, pixels: Tensor, seed: int) -> Tensor:
        draw = Random(seed)  # of numbers of our own; timm and torchvision draw from global generators
        if self.fixed is not None:
            pixels = self.fixed(pixels)
        if self.padding:
            down, right = (draw.randint(-self.padding, self.padding) for _ in range(2))
            pixels = shifted(pixels, down, right)
        flip, erase = draw.random() < self.horizontal_flip, draw.random() < self.erase
        if not (self.crop or self.colours or erase):
            return self.normalize(pixels.flip(-1) if flip else pixels)
        with seeded(draw.getrandbits(64), numpy=self._numpy):
            if self.crop is not None:
                pixels = pixels_of(self.crop(picture_of(pixels)))
            if flip:
                pixels = pixels.flip(-1)
            if self.colours is not None:
                pixels = pixels_of(self.colours(picture_of(pixels).convert("RGB")))
            image = self.normalize(pixels)
            return self._eraser(image) if erase else image


class EvalTransform:
    """Resize, then the middle of it; the seed changes nothing.

    Args:
        size: (height, width) of what is looked at, in pixels.
        share: of the resized image's height and width that is looked at.
        keep_ratio: whether the image keeps its ratio of sides, and what juts out is cut off; else all of it is resized,
            as the crops ``padded`` and ``none`` of training do.
    """

    def __init__(
        self,
        size: tuple[int, int],
        *,
        share: float,
        keep_ratio: bool,
        interpolation: str,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        if not 0 < share <= 1:
            raise InputError(f"data.transforms.eval_crop must be greater than 0 and at most 1, got {share}")
        self.size = size
        self.full = (round(size[0] / share), round(size[1] / share))
        self.interpolation = interpolation
        self.fixed = None if keep_ratio else Resize(self.full, interpolation)
        self.normalize = Normalize(mean, std)

    def __call__(self, pixels: Tensor, seed: int) -> Tensor:
        return self.normalize(centre((self.fixed or self._covering(pixels))(pixels), self.size))

    def _covering(self, pixels: Tensor) -> Resize:
        """To the smallest size of the image's own ratio that covers ``full``."""
        height, width = pixels.shape[-2:]
        factor = max(self.full[0] / height, self.full[1] / width)
        return Resize((round(height * factor), round(width * factor)), self.interpolation)


class Normalize:
    """(C, h, w) uint8 -> (3, h, w) float32 of mean 0 and deviation 1 over the data set, C = 1 or 3."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        deviation = torch.tensor(std, dtype=torch.float64).view(3, 1, 1)
        self.factor = (1 / (255 * deviation)).float()
        self.offset = (-torch.tensor(mean, dtype=torch.float64).view(3, 1, 1) / deviation).float()

    def __call__(self, pixels: Tensor) -> Tensor:
        return torch.addcmul(self.offset, pixels.float(), self.factor)


def shifted(pixels: Tensor, down: int, right: int) -> Tensor:
    """(C, h, w) uint8 moved by so many pixels, up and left if negative, with zeros where nothing was."""
    there, array = np.zeros(tuple(pixels.shape), np.uint8), pixels.numpy()  # NumPy cuts small arrays faster than torch
    (to_rows, from_rows), (to_columns, from_columns) = _overlap(down, array.shape[1]), _overlap(right, array.shape[2])
    there[:, to_rows, to_columns] = array[:, from_rows, from_columns]
    return torch.from_numpy(there)


def _overlap(shift: int, length: int) -> tuple[slice, slice]:
    """Where values stay that are moved by ``shift`` within ``length``: their places afterwards and before."""
    count = max(length - abs(shift), 0)
    to, start = max(shift, 0), max(-shift, 0)
    return slice(to, to + count), slice(start, start + count)


def centre(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle (C, *size) of an image that is at least as large."""
    top, left = (pixels.shape[-2] - size[0]) // 2, (pixels.shape[-1] - size[1]) // 2
    return pixels[:, top : top + size[0], left : left + size[1]]


def picture_of(pixels: Tensor) -> Image.Image:
    """(C, h, w) uint8 as Pillow's, grey for one channel and RGB for three."""
    array = pixels.permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if len(pixels) == 1 else array))


def pixels_of(picture: Image.Image) -> Tensor:
    """Inverse of :func:`picture_of`."""
    array = torch.from_numpy(np.array(picture))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def _policy(name: str, size: tuple[int, int], interpolation: str, mean: Sequence[float]) -> Picture:
    """timm's automatic augmentation of that name, as its own recipes set it up."""
    settings = {
        "translate_const": int(min(size) * SHIFT_SHARE),
        "img_mean": tuple(round(255 * value) for value in mean),
        "interpolation": str_to_pil_interp(interpolation),
    }
    try:
        if name.startswith("rand"):
            policy = rand_augment_transform(name, settings)
        elif name.startswith("augmix"):
            policy = augment_and_mix_transform(name, settings)
        else:
            policy = auto_augment_transform(name, settings)
    except (AssertionError, KeyError, ValueError) as error:
        raise InputError(
            f"data.transforms.auto_augment={name!r} is no policy that timm knows ({error!r}): expected one as "
            "rand-m9-mstd0.5-inc1, augmix-m3-w3, original or v0, or nothing"
        ) from error
    for operation in policy.ops if hasattr(policy, "ops") else chain(*policy.policy):
        if operation.aug_fn is posterize:
            operation.aug_fn = _posterized
    return policy


def _posterized(picture: Image.Image, bits: int, **settings: object) -> Image.Image:
    """timm's, where Pillow from 13 on refuses what the strongest level asks for: to keep none of a pixel's bits."""
    return posterize(picture, bits, **settings) if bits else picture.point(lambda value: 0)
