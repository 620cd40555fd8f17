"""Data sets of classifiers: images with labels, long-tailed subsets, and the torch data set on top of both.

Shape legend: N images of a split, C channels, h x w pixels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from detr_bf.classification.augmentation import ImageTransform
from detr_bf.classification.batch import LabelledImage
from detr_bf.common.errors import InputError
from detr_bf.common.files import file_size
from detr_bf.common.structures import ClassMap
from detr_bf.data.batches import SampleKey, read_or_replace
from detr_bf.data.images import MAX_PIXELS, PixelFormat, read_image

_MAX_BYTES = 2**30  # of images kept in memory after resizing
_ROUNDING = 1 + 1e-12  # larger than the rounding error of a power


@dataclass(frozen=True)
class ArrayImages:
    """Images in memory."""

    pixels: Tensor  # (N, C, h, w) uint8, C = 1 or 3

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int) -> Tensor:
        """Return an image (C, h, w)."""
        return self.pixels[index]

    def subset(self, indices: Tensor) -> ArrayImages:
        """Return the images at ``indices`` (n,) int64, in that order."""
        return ArrayImages(self.pixels[indices])


@dataclass(frozen=True)
class FileImages:
    """Image files of a folder."""

    folder: Path
    names: Sequence[str]  # paths within the folder
    max_pixels: int = MAX_PIXELS
    grey_bits: int | None = None  # of 16-bit grey images, see read_image

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Tensor:
        """Return an image (C, h, w) uint8, C = 1 or 3; InputError if it cannot be read."""
        pixel_format = PixelFormat(grey_bits=self.grey_bits)
        return read_image(self.folder / self.names[index], max_pixels=self.max_pixels, pixel_format=pixel_format)

    def subset(self, indices: Tensor) -> FileImages:
        return replace(self, names=[self.names[index] for index in indices.tolist()])


Images = ArrayImages | FileImages


@dataclass(frozen=True)
class LabelledSplit:
    """Images and their labels."""

    images: Images
    labels: Tensor  # (N,) int64
    origin: str  # source of the images, for messages
    label_sets: tuple[tuple[int, ...], ...] = ()  # all right labels of each of the N images; empty: only ``labels``

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self, names: Sequence[str]) -> dict[str, Any]:
        """Return ``sha256`` of class names, labels and images, and the numbers ``images`` and ``objects``, which agree.

        Image files count with their names and sizes in bytes, images in memory with their pixels.
        """
        labels = self.label_sets or self.labels.tolist()
        digest = hashlib.sha256(json.dumps([names, labels]).encode())
        if isinstance(self.images, ArrayImages):
            digest.update(self.images.pixels.numpy().tobytes())
        else:
            sizes = [(name, file_size(self.images.folder / name)) for name in self.images.names]
            digest.update(json.dumps(sizes).encode())
        return {"sha256": digest.hexdigest(), "images": len(self), "objects": len(self)}

    def subset(self, indices: Tensor) -> LabelledSplit:
        """Return the images at ``indices`` (n,) int64, in that order."""
        sets = tuple(self.label_sets[index] for index in indices.tolist()) if self.label_sets else ()
        return LabelledSplit(self.images.subset(indices), self.labels[indices], self.origin, sets)


@dataclass(frozen=True)
class LabelledSplits:
    """Training and validation data of the same classes."""

    train: LabelledSplit
    val: LabelledSplit
    class_map: ClassMap
    mirrored: str = ""  # why a horizontal flip changes the class; empty: it does not


def class_map_of(names: Sequence[str]) -> ClassMap:
    """Return a class map with these names, numbered in this order."""
    return ClassMap(tuple(range(len(names))), tuple(names))


def array_split(pixels: Tensor, labels: Tensor, origin: str) -> LabelledSplit:
    """Return a split of images (N, C, h, w), or grey ones (N, h, w), uint8, with their labels (N,)."""
    return LabelledSplit(ArrayImages(pixels if pixels.ndim == 4 else pixels[:, None]), labels.long(), origin)


def require_two_classes(splits: LabelledSplits) -> None:
    """Check that a classifier has two or more classes to learn; InputError if there is only one class."""
    names = splits.class_map.names
    if len(names) < 2:
        raise InputError(
            f"{splits.train.origin}: the only class is {', '.join(names)}, and a classifier needs two or more: add "
            "images of another class to both splits"
        )


def require_no_flips(splits: LabelledSplits, name: str, horizontal_flip: float) -> None:
    """Check that training does not flip images of a data set, ``data.name``, in which a flip changes the class.

    Raises:
        InputError: such images would be flipped.
    """
    if splits.mirrored and horizontal_flip > 0:
        raise InputError(
            f"data.name={name}: {splits.mirrored}, and data.transforms.horizontal_flip={horizontal_flip:g} mirrors "
            "images: set data.transforms.horizontal_flip=0"
        )


def long_tail_counts(n: int, classes: int, imbalance: float) -> list[int]:
    """Return the images kept per class: n * imbalance ** (-c / (classes - 1)) for c = 0 ... classes - 1, rounded down.

    This is how CIFAR-100-LT was made (Cui et al. 2019, CVPR, arXiv 1901.05555).

    Raises:
        InputError: ``imbalance`` is below 1, or leaves a class without images.
    """
    if not 1 <= imbalance < math.inf:
        raise InputError(
            f"data.long_tail.imbalance must be 1 or more and finite, got {imbalance}: it is the images of the first "
            "class / those of the last"
        )
    counts = [int(n * imbalance ** (-c / max(classes - 1, 1)) * _ROUNDING) for c in range(classes)]
    if counts[-1] < 1:
        raise InputError(
            f"data.long_tail.imbalance={imbalance:g} leaves no image of the last class, of {n} in the first: expected "
            f"{n} or less, or more images of a class"
        )
    return counts


def kept_indices(
    labels: Tensor,
    num_classes: int,
    *,
    per_class: int | None = None,
    imbalance: float = 1.0,
    order: Sequence[int] = (),
    seed: int = 0,
) -> Tensor:
    """Return the indices (n,) int64, ascending, of the images that a reduced split keeps.

    First, at most ``per_class`` images of each class are kept. Then, if ``imbalance`` is above 1, class ``order[c]``
    keeps the number of :func:`long_tail_counts`, computed from what is left of ``order[0]``, or all its images if it
    has fewer. The images kept are the first of a shuffle of the class that depends on ``seed`` alone: a larger
    imbalance keeps a subset of what a smaller one keeps.

    Args:
        labels: (N,) int64.
        order: classes from the most to the fewest images; empty: in ascending order.
        seed: of the shuffle, 0 or more.

    Raises:
        InputError: ``order`` is not a permutation of the classes, ``per_class`` is below 1, or
            :func:`long_tail_counts` raises it.
    """
    order = list(order) or list(range(num_classes))
    if sorted(order) != list(range(num_classes)):
        raise InputError(
            f"data.long_tail.order must name each of the {num_classes} classes, 0 to {num_classes - 1}, once; "
            f"got {order}"
        )
    if per_class is not None and per_class < 1:
        raise InputError(f"data.per_class must be 1 or more, got {per_class}")
    counts = torch.bincount(labels, minlength=num_classes).clamp(max=len(labels) if per_class is None else per_class)
    if imbalance != 1:
        tail = long_tail_counts(int(counts[order[0]]), num_classes, imbalance)
        counts[order] = torch.minimum(counts[order], torch.tensor(tail))
    shuffle = np.random.RandomState(seed % 2**32).permutation(len(labels))  # stable between NumPy versions
    shuffled = labels.numpy()[shuffle]
    kept = [shuffle[shuffled == label][:count] for label, count in enumerate(counts.tolist())]
    return torch.from_numpy(np.sort(np.concatenate(kept)))


class LabelledImageSet(Dataset[LabelledImage]):
    """Transformed images of a split with their labels.

    Augmentation depends only on (seed, epoch, index, copy), not on the worker that loads the sample, and restores the
    global generators of Python, NumPy and torch. With ``replace_unreadable`` an unreadable image is replaced by a
    random one, chosen and augmented by the same values.

    Raises:
        InputError: there are no images, or a label is outside the classes.
    """

    def __init__(
        self,
        split: LabelledSplit,
        class_map: ClassMap,
        transform: ImageTransform,
        *,
        seed: int = 0,
        replace_unreadable: bool = False,
    ) -> None:
        _check_labels(split, class_map.num_classes)
        self.images = _resized(split.images, transform)
        self.labels: list[int] = split.labels.tolist()
        self.label_sets = split.label_sets
        self.class_map = class_map
        self.transform = transform
        self.seed = seed
        self.replace_unreadable = replace_unreadable

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: SampleKey) -> LabelledImage:
        index, pixels, replaced = read_or_replace(
            self.images.read, key, len(self), seed=self.seed, replace=self.replace_unreadable
        )
        seed = key.sample_seed(self.seed)
        return LabelledImage(self.transform(pixels, seed), self.labels[index], index, key.epoch, replaced, seed)

    def fingerprint(self) -> dict[str, Any]:
        """Return ``sha256`` of class names, labels and file names, and the numbers ``images`` and ``objects``.

        No image is read: of images in memory the labels alone count.
        """
        names = list(self.images.names) if isinstance(self.images, FileImages) else []
        content = json.dumps([self.class_map.names, self.label_sets or self.labels, names]).encode()
        return {"sha256": hashlib.sha256(content).hexdigest(), "images": len(self), "objects": len(self)}

    @property
    def class_counts(self) -> tuple[int, ...]:
        """Number of images of each class."""
        return tuple(torch.bincount(torch.tensor(self.labels), minlength=self.class_map.num_classes).tolist())

    @property
    def present_classes(self) -> tuple[int, ...]:
        """The classes that some image has, ascending."""
        return tuple(sorted(set(chain(self.labels, *self.label_sets))))


def _check_labels(split: LabelledSplit, num_classes: int) -> None:
    if not len(split):
        raise InputError(f"{split.origin} has no images")
    outside = ((split.labels < 0) | (split.labels >= num_classes)).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        raise InputError(
            f"{split.origin}: {len(outside)} labels are outside the {num_classes} classes of the training data, the "
            f"first is {int(split.labels[first])} of image {first}; expected 0 to {num_classes - 1}"
        )


def _resized(images: Images, transform: ImageTransform) -> Images:
    """Apply the transform's fixed resize to images in memory, unless the result exceeds ``_MAX_BYTES``."""
    resize = transform.fixed
    if resize is None or not isinstance(images, ArrayImages):
        return images
    count, channels = images.pixels.shape[:2]
    if count * channels * resize.size[0] * resize.size[1] > _MAX_BYTES or images.pixels.shape[-2:] == resize.size:
        return images
    return ArrayImages(torch.stack([resize(images.read(index)) for index in range(count)]))
