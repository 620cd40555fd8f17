"""Augmentation of images for classifiers, and mixup and CutMix of batches: timm's, as functions of a seed.

An image transform maps the pixels of an image, (C, h, w) uint8 with one or three channels, and a seed to a normalised
(3, H, W) float32 image. Grey images get three equal channels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter, ImageOps
from timm.data import RandomResizedCropAndInterpolation, str_to_pil_interp
from timm.data.auto_augment import (
    augment_and_mix_transform,
    auto_augment_transform,
    posterize,
    rand_augment_transform,
)
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import AutoAugment, AutoAugmentPolicy, ColorJitter
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from detr_bf.classification.batch import LabelledImage, LabelledImages
from detr_bf.common.errors import InputError
from detr_bf.data.batches import derive_seed

Picture = Callable[[Image.Image], Image.Image]
Mix = Callable[[LabelledImages, int], LabelledImages]  # (batch, seed) -> mixed batch

SHIFT_SHARE = 0.45  # largest shift of an automatic policy / the shorter side of the image, as in timm's recipes
_MIXING = 1  # separates the seed of a batch from that of its first image


@contextmanager
def seeded(seed: int, *, numpy: bool = True) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch (CPU) within the block; restore them afterwards.

    Args:
        numpy: seed NumPy's generator too; saving its state is much slower than that of the others.
    """
    python, array = random.getstate(), np.random.get_state() if numpy else None
    try:
        random.seed(seed)
        if numpy:
            np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed every accelerator
            yield
    finally:
        random.setstate(python)
        if array is not None:
            np.random.set_state(array)


class Resize:
    """Resize to ``size`` (height, width), ignoring the aspect ratio."""

    def __init__(self, size: tuple[int, int], interpolation: str) -> None:
        self.size = size
        self.method = Image.Resampling(str_to_pil_interp(interpolation))

    def __call__(self, pixels: Tensor) -> Tensor:
        """(C, h, w) uint8 -> (C, *size) uint8; an image of that size is returned unchanged."""
        if tuple(pixels.shape[-2:]) == self.size:
            return pixels
        return pil_to_tensor(to_pil_image(pixels).resize(self.size[::-1], self.method))


class TrainTransform:
    """Crop, horizontal flip, colour augmentation, normalisation and random erasing, in this order.

    Args:
        size: (height, width) in pixels.
        crop: ``resized``: a random part of the image, with a relative area in ``area`` and an aspect ratio of 3/4 to
            4/3, is resized to ``size``; ``padded``: the image is resized to ``size`` and shifted by up to ``padding``
            pixels in each direction, with black borders (He et al. 2016, section 4.2); ``none``: it is only resized.
        horizontal_flip: probability.
        color_jitter: strength for brightness, contrast and saturation; unused with ``auto_augment``.
        auto_augment: timm's name of a policy (``rand-m9-mstd0.5-inc1``, ``augmix-m3``, ``original``), or ``cifar10``,
            AutoAugment's for CIFAR (Cubuk et al. 2019, arXiv 1805.09501); empty: none.
        cutout: side of a black square around a random pixel, cut off at the border (DeVries and Taylor 2017,
            arXiv 1708.04552); 0: none.
        erase_prob: probability of replacing a random rectangle by noise.
        mean, std: of the three channels, for pixels from 0 to 1.

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
        cutout: int = 0,
        erase_prob: float,
        interpolation: str,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        # First operation if it does not depend on the seed: data.py applies it once to each image.
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
        self.cutout = cutout
        self.normalize = Normalize(mean, std)
        self.erase_prob = erase_prob
        self._eraser = RandomErasing(1.0, mode="pixel", device="cpu")
        self._numpy = bool(auto_augment)  # the policies also draw from NumPy's generator

    def __call__(self, pixels: Tensor, seed: int) -> Tensor:
        draw = random.Random(seed)  # for our own numbers; timm and torchvision draw from global generators
        if self.fixed is not None:
            pixels = self.fixed(pixels)
        if self.padding:
            down, right = (draw.randint(-self.padding, self.padding) for _ in range(2))
            pixels = shifted(pixels, down, right)
        flip, erase = draw.random() < self.horizontal_flip, draw.random() < self.erase_prob
        if not (self.crop or self.colours or self.cutout or erase):
            return self.normalize(pixels.flip(-1) if flip else pixels)
        with seeded(draw.getrandbits(64), numpy=self._numpy):
            if self.crop is not None:
                pixels = pil_to_tensor(self.crop(to_pil_image(pixels)))
            if flip:
                pixels = pixels.flip(-1)
            if self.colours is not None:
                pixels = pil_to_tensor(self.colours(to_pil_image(pixels).convert("RGB")))
            if self.cutout:
                pixels = cutout(pixels, self.cutout, *(draw.randrange(side) for side in pixels.shape[-2:]))
            image = self.normalize(pixels)
            return self._eraser(image) if erase else image


class EvalTransform:
    """Resize and centre crop; the seed is unused.

    Args:
        size: (height, width) of the crop in pixels.
        share: crop size / size of the resized image, greater than 0 and at most 1.
        keep_ratio: keep the aspect ratio and cut off what exceeds the crop; False: resize without keeping it, like the
            crops ``padded`` and ``none`` in training.

    Raises:
        InputError: ``share`` is out of range.
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
        resize = self.fixed
        if resize is None:  # to the smallest size with the image's aspect ratio that covers ``full``
            height, width = pixels.shape[-2:]
            factor = max(self.full[0] / height, self.full[1] / width)
            resize = Resize((round(height * factor), round(width * factor)), self.interpolation)
        return self.normalize(centre(resize(pixels), self.size))


class ViewPairTransform:
    """Two views of an image as MoCo v3 augments them (Chen et al. 2021, arXiv 2104.02057; values of its code).

    Random resized crop, colour jitter, grey, Gaussian blur (sigma 0.1 to 2 pixels), solarization of the second view
    alone, horizontal flip, normalisation: (2, 3, H, W) float32.

    Args:
        size: (height, width) in pixels.
        area: minimum and maximum share of the image.
        color_jitter: strength for brightness and contrast, at most 1; for saturation half, for hue a quarter of it.
        jitter_prob, grey, solarize, horizontal_flip: probabilities.
        blur: probabilities of the first and of the second view.
        mean, std: of the three channels, for pixels from 0 to 1.
    """

    fixed = None

    def __init__(
        self,
        size: tuple[int, int],
        *,
        area: Sequence[float],
        color_jitter: float,
        jitter_prob: float,
        grey: float,
        blur: Sequence[float],
        solarize: float,
        horizontal_flip: float,
        interpolation: str,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self.crop = RandomResizedCropAndInterpolation(size, scale=tuple(area), interpolation=interpolation)
        self.jitter = ColorJitter(color_jitter, color_jitter, color_jitter / 2, color_jitter / 4)
        self.jitter_prob, self.grey, self.horizontal_flip = jitter_prob, grey, horizontal_flip
        self.views = ((blur[0], 0.0), (blur[1], solarize))  # probabilities of blur and solarization
        self.normalize = Normalize(mean, std)

    def __call__(self, pixels: Tensor, seed: int) -> Tensor:
        """(C, h, w) uint8 -> (2, 3, *size)."""
        image, draw = to_pil_image(pixels).convert("RGB"), random.Random(seed)
        return torch.stack([self._view(image, draw, *probabilities) for probabilities in self.views])

    def _view(self, image: Image.Image, draw: random.Random, blur: float, solarize: float) -> Tensor:
        with seeded(draw.getrandbits(64), numpy=False):
            view = self.crop(image)
            if draw.random() < self.jitter_prob:
                view = self.jitter(view)
        if draw.random() < self.grey:
            view = view.convert("L").convert("RGB")
        if draw.random() < blur:
            view = view.filter(ImageFilter.GaussianBlur(draw.uniform(0.1, 2.0)))
        if draw.random() < solarize:
            view = ImageOps.solarize(view)
        if draw.random() < self.horizontal_flip:
            view = ImageOps.mirror(view)
        return self.normalize(pil_to_tensor(view))


ImageTransform = TrainTransform | EvalTransform | ViewPairTransform


class Normalize:
    """(C, h, w) uint8 -> (3, h, w) float32 of mean 0 and standard deviation 1 over the data set, C = 1 or 3."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        deviation = torch.tensor(std, dtype=torch.float64).view(3, 1, 1)
        self.factor = (1 / (255 * deviation)).float()
        self.offset = (-torch.tensor(mean, dtype=torch.float64).view(3, 1, 1) / deviation).float()

    def __call__(self, pixels: Tensor) -> Tensor:
        return torch.addcmul(self.offset, pixels.float(), self.factor)


def shifted(pixels: Tensor, down: int, right: int) -> Tensor:
    """Shift (C, h, w) uint8 by ``down`` and ``right`` pixels, up and left if negative; new pixels are 0."""
    down, right = (max(-side, min(by, side)) for by, side in zip((down, right), pixels.shape[1:], strict=True))
    return F.pad(pixels, (right, -right, down, -down))  # a negative number crops


def cutout(pixels: Tensor, side: int, row: int, column: int) -> Tensor:
    """Return (C, h, w) uint8 with 0 in the square of ``side`` pixels around a pixel, as far as it is in the image."""
    top, left = row - side // 2, column - side // 2
    result = pixels.clone()
    result[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0
    return result


def centre(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the centre crop (C, *size) of an image that is at least that large."""
    top, left = (pixels.shape[-2] - size[0]) // 2, (pixels.shape[-1] - size[1]) // 2
    return pixels[:, top : top + size[0], left : left + size[1]]


def _policy(name: str, size: tuple[int, int], interpolation: str, mean: Sequence[float]) -> Picture:
    """Build the automatic augmentation policy of this name, timm's with the settings of timm's recipes."""
    if name == "cifar10":
        return AutoAugment(AutoAugmentPolicy.CIFAR10)
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
            f"data.transforms.auto_augment={name!r} is no policy that timm knows ({error!r}): expected one such as "
            "rand-m9-mstd0.5-inc1, augmix-m3-w3, original or v0, or cifar10, or nothing"
        ) from error
    for operation in policy.ops if hasattr(policy, "ops") else chain(*policy.policy):
        if operation.aug_fn is posterize:
            operation.aug_fn = _posterized
    return policy


def _posterized(picture: Image.Image, bits: int, **settings: object) -> Image.Image:
    """timm's posterize; Pillow 13 and later refuse 0 bits, timm's strongest level."""
    return posterize(picture, bits, **settings) if bits else picture.point(lambda value: 0)


class BatchMix:
    """Mixup and CutMix (Zhang et al. 2018, arXiv 1710.09412; Yun et al. 2019, arXiv 1905.04899), one mode per batch.

    Image i is mixed with image B - 1 - i. The last image of an odd batch keeps its pixels.

    Args:
        mixup: alpha of the Beta distribution of the mixing share; 0: no mixup.
        cutmix: the same for CutMix.
        probability: of mixing a batch.
        switch: probability of CutMix if both are enabled.
        smoothing: label smoothing, of mixed and of unmixed targets.

    Raises:
        InputError: mixup and CutMix are both off.
    """

    def __init__(
        self, num_classes: int, *, mixup: float, cutmix: float, probability: float, switch: float, smoothing: float
    ) -> None:
        if not mixup > 0 and not cutmix > 0:
            raise InputError(f"mixup={mixup} and cutmix={cutmix}: expected one of them to be greater than 0")
        self.num_classes = num_classes
        self.smoothing = smoothing
        self.mixup = Mixup(
            mixup, cutmix, prob=probability, switch_prob=switch, label_smoothing=smoothing, num_classes=num_classes
        )

    def __call__(self, batch: LabelledImages, seed: int) -> LabelledImages:
        images, labels = batch.images.clone(), batch.targets.labels
        shares = mixup_target(labels, self.num_classes, smoothing=self.smoothing)
        pairs = len(batch) // 2 * 2
        if pairs:
            with seeded(seed):
                images[:pairs], shares[:pairs] = self.mixup(images[:pairs], labels[:pairs])
        return replace(batch, images=images, targets=replace(batch.targets, soft_labels=shares))


def collate_mixed(mix: Mix, samples: list[LabelledImage]) -> LabelledImages:
    """Stack images and mix the batch; the mixing depends only on the images and the seed of the first one."""
    return mix(LabelledImages.collate(samples), derive_seed(samples[0].seed, _MIXING))
