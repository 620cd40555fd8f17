"""The data set of classifiers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from detr_bf.classification.augmentation import ImageTransform
from detr_bf.classification.sources.splits import ArrayImages, Images, LabelledSplit
from detr_bf.data.batches import SampleKey, read_or_replace
from detr_bf.errors import InputError
from detr_bf.labelled import LabelledImage
from detr_bf.structures import ClassMap

_MAX_BYTES = 2**30  # of images in memory that are resized beforehand


class LabelledImageSet(Dataset[LabelledImage]):
    """Images of a split with their classes, transformed.

    Augmentation is a function of (seed, epoch, place, copy) alone, whichever process loads the sample, and leaves the
    global generators of Python, NumPy and torch as they were. With ``replace_unreadable`` a random image, a function of
    the same, stands in for one that cannot be read, augmented as that one would have been.

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
        self.class_map = class_map
        self.transform = transform
        self.seed = seed
        self.replace_unreadable = replace_unreadable

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: SampleKey) -> LabelledImage:
        place, pixels, replaced = read_or_replace(
            self.images.read, key, len(self), seed=self.seed, replace=self.replace_unreadable
        )
        image = self.transform(pixels, key.sample_seed(self.seed))
        return LabelledImage(image, self.labels[place], place, key.epoch, replaced)

    @property
    def class_counts(self) -> tuple[int, ...]:
        """How many images each class has."""
        return tuple(torch.bincount(torch.tensor(self.labels), minlength=self.class_map.num_classes).tolist())


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
    """Images in memory after what the transform does to all alike, where they do not become too many bytes."""
    resize = transform.fixed
    if resize is None or not isinstance(images, ArrayImages):
        return images
    count, channels = images.pixels.shape[:2]
    if count * channels * resize.size[0] * resize.size[1] > _MAX_BYTES or images.pixels.shape[-2:] == resize.size:
        return images
    resized: Tensor = torch.stack([resize(images.read(place)) for place in range(count)])
    return ArrayImages(resized)
