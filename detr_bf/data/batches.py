"""Sample keys, and the batch samplers of training and evaluation for one process or several ranks."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from detr_bf.common.errors import InputError

logger = logging.getLogger(__name__)

ATTEMPTS = 20  # images tried for one sample

T = TypeVar("T")


@dataclass(frozen=True)
class SampleKey:
    """Item that a batch sampler requests from a data set; the augmentation depends on all three numbers."""

    epoch: int
    index: int  # in the data set, from 0
    copy: int = 0  # with repeated augmentation: number of the copy, each augmented in its own way
    side: int | None = None  # pixels of a side of the images of this batch; no part of the seed
    phase: int | None = None  # epoch whose augmentation is used; None: that of ``epoch``; no part of the seed

    def sample_seed(self, seed: int, attempt: int = 0) -> int:
        """Return the 64-bit seed of this sample in a run of that ``seed``; ``attempt`` counts the replacements."""
        if self.copy:
            return derive_seed(seed, self.epoch, self.index, attempt, self.copy)
        return derive_seed(seed, self.epoch, self.index, *([attempt] if attempt else []))


def derive_seed(*parts: int) -> int:
    """Return a 64-bit seed computed from several integers; neighbouring integers give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def read_or_replace(
    read: Callable[[int], T], key: SampleKey, count: int, *, seed: int, replace: bool
) -> tuple[int, T, str]:
    """Read the sample of a key, or a replacement if it is not readable.

    Args:
        read: index -> sample, or :class:`InputError`.
        key: the sample to read.
        count: samples in the data set.
        seed: of the run.
        replace: allow replacements: random samples, a function of (seed, key).

    Returns:
        Index of the sample that was read, the sample, and the error message of the first one ("" if it was readable).

    Raises:
        InputError: the sample cannot be read; with ``replace``, ``ATTEMPTS`` - 1 others cannot be read either.
    """
    index, fault = key.index, ""
    for attempt in range(1, ATTEMPTS):
        try:
            return index, read(index), fault
        except InputError as error:
            if not replace:
                raise
            fault = fault or str(error)
        index = key.sample_seed(seed, attempt) % count
    return index, read(index), fault


class EpochBatches(Sampler[list[SampleKey]]):
    """Training batches of one epoch from ``start_batch`` on, for one ``rank`` of ``world_size``.

    A global batch has ``world_size`` x ``batch_size`` images; every rank takes a consecutive slice. The global batches
    and their order are a function of (seed, epoch) and of the global batch size alone (but see ``repeated_augment``),
    so two ranks together load the images that one process with twice the batch size loads. The images of an incomplete
    last batch are left out. If it is the only batch, it is split among the ranks as evenly as possible.

    Args:
        num_samples: images in the data set.
        batch_size: images of one rank.
        seed: of the run.
        epoch: from 0.
        start_batch: number of batches to skip, after a resume.
        rank: of this process.
        world_size: number of ranks.
        buckets: a bucket number for each sample. All images of a batch have the same number, except in a few batches
            made of the remaining images. The order of the batches is random.
        features: (N, F) float32, the batches hold images of similar features: of all images in the order of a random
            linear combination of the features. Not together with ``buckets``.
        repeated_augment: copies of an image in an epoch, each with its own key (Hoffer et al. 2020, arXiv 1901.09335).
            The number of batches does not change, so an epoch uses only a part of the images. A rank never has two
            copies of an image in one batch. With at least as many ranks as copies, all copies are in one global batch,
            on different ranks, as with DeiT's sampler. With fewer ranks, they are also in the next global batches,
            which then depend on the number of ranks; with one rank and 3 copies, 3 consecutive batches have the same
            images. Some images have fewer copies: where the sizes are no multiples, and in the last batches of an
            epoch.
        sides: the images of a global batch get one of these sides in pixels, a function of (seed, epoch, number of the
            batch); empty: none.
        phase: of the keys.

    Raises:
        InputError: a batch size below 1, or fewer images than ranks.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        start_batch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        buckets: Sequence[int] | None = None,
        features: Tensor | None = None,
        repeated_augment: int = 1,
        sides: Sequence[int] = (),
        phase: int | None = None,
    ) -> None:
        assert 0 <= rank < world_size
        assert repeated_augment >= 1
        assert repeated_augment == 1 or buckets is None
        assert buckets is None or len(buckets) == num_samples
        assert features is None or (len(features) == num_samples and buckets is None and repeated_augment == 1)
        _check_batch_size(batch_size)
        if num_samples < world_size:
            raise InputError(
                f"{num_samples} training images cannot be shared by {world_size} processes, expected one image or more "
                "for each: start fewer processes, or give more images"
            )
        self.num_samples = num_samples
        self.global_size = world_size * batch_size
        self.seed = seed
        self.epoch = epoch
        self.start_batch = start_batch
        self.rank = rank
        self.world_size = world_size
        self.buckets = buckets
        self.features = features
        self.sides = sides
        self.phase = phase
        self.num_batches = num_samples // self.global_size or 1
        self.size = min(self.global_size, num_samples)  # images of a global batch
        self.group = math.ceil(repeated_augment / world_size)  # consecutive batches that share their images
        self.different = math.ceil(self.group * self.size / repeated_augment)  # images of a group

    def __len__(self) -> int:
        """Return the number of remaining batches."""
        return max(0, self.num_batches - self.start_batch)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for number, indices in enumerate(self._global_batches()[self.start_batch :], self.start_batch):
            copies = self._positions(number) // self.different
            side = self._side(number)
            keys = [
                SampleKey(self.epoch, *key, side, self.phase)
                for key in zip(indices.tolist(), copies.tolist(), strict=True)
            ]
            mine = torch.tensor_split(torch.arange(len(keys)), self.world_size)[self.rank]
            yield [keys[number] for number in mine.tolist()]

    def _side(self, number: int) -> int | None:
        """Return the side of the images of a global batch."""
        if not self.sides:
            return None
        return self.sides[derive_seed(self.seed, self.epoch, -1, number) % len(self.sides)]  # -1 is no index of images

    def _positions(self, number: int) -> Tensor:
        """Return the positions of a global batch in its group of batches that share images: first all first copies."""
        return torch.arange(self.size) + number % self.group * self.size

    def _global_batches(self) -> list[Tensor]:
        """Return the image indices of all global batches of the epoch."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        if self.features is not None:
            kept = order[: self.num_batches * self.global_size]  # images left out are random
            combination = self.features[kept] @ torch.randn(self.features.shape[1], generator=generator)
            similar = kept[combination.argsort(stable=True)].split(self.global_size)
            return [similar[number] for number in torch.randperm(self.num_batches, generator=generator).tolist()]
        if self.buckets is None:
            images = order.split(self.different)
            return [
                images[number // self.group][self._positions(number) % self.different]
                for number in range(self.num_batches)
            ]
        batches = self._bucketed(order.tolist(), self.buckets)
        return [batches[number] for number in torch.randperm(self.num_batches, generator=generator).tolist()]

    def _bucketed(self, order: Sequence[int], buckets: Sequence[int]) -> list[Tensor]:
        """Return one batch for every full bucket; the remaining images of neighbouring buckets share batches."""
        batches: list[list[int]] = []
        waiting: dict[int, list[int]] = defaultdict(list)
        for index in order:
            bucket = buckets[index]
            waiting[bucket].append(index)
            if len(waiting[bucket]) == self.global_size:
                batches.append(waiting.pop(bucket))
        left = {index for indices in waiting.values() for index in indices}
        wanted = (self.num_batches - len(batches)) * self.global_size
        mixed = [index for index in order if index in left][:wanted]  # images left out are random, of any bucket
        mixed.sort(key=lambda index: buckets[index])
        batches += [mixed[start : start + self.global_size] for start in range(0, len(mixed), self.global_size)]
        return [torch.tensor(batch) for batch in batches]


def warn_of_mixed_batches(groups: Sequence[int], batches: EpochBatches) -> None:
    """Warn if the groups of images do not fill all batches of an epoch."""
    size, count = batches.global_size, batches.num_batches
    full = sum(images // size for images in Counter(groups).values())
    if full < count:
        logger.warning(
            "data.sampler=group: %d of %d batches of an epoch hold %d images of one group; the others hold what is "
            "left of several groups: choose a smaller batch size, or larger groups",
            *(full, count, size),
        )


class SameSizeBatches(Sampler[list[SampleKey]]):
    """Evaluation batches without padding: every image once, and only images of one size in a batch.

    ``rank`` takes every ``world_size``-th batch, from its own batch ``start_batch`` on. ``sizes`` are (height, width),
    or None if not known; such an image is a batch of its own.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int] | None],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        start_batch: int = 0,
    ) -> None:
        assert 0 <= rank < world_size
        _check_batch_size(batch_size)
        groups: dict[object, list[SampleKey]] = defaultdict(list)
        for index, size in enumerate(sizes):
            groups[size or index].append(SampleKey(0, index))
        batches = [
            group[start : start + batch_size] for group in groups.values() for start in range(0, len(group), batch_size)
        ]
        self.batches = batches[rank::world_size][start_batch:]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.batches)


class IndexBatches(Sampler[list[SampleKey]]):
    """Batches of the images at these indices, from number ``start_batch`` on."""

    def __init__(self, batches: Sequence[Sequence[int]], start_batch: int = 0) -> None:
        self.batches = batches[start_batch:]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for batch in self.batches:
            yield [SampleKey(0, index) for index in batch]


def aspect_buckets(sizes: Sequence[tuple[int, int] | None], count: int) -> list[int] | None:
    """Return a bucket number for each image: ``count`` groups of similar width / height, from tallest to widest.

    The groups have about the same number of images; images of one ratio stay together. None if ``count`` is 1.

    Args:
        sizes: (height, width) in pixels, or None if not known.
        count: number of buckets.

    Raises:
        InputError: a count below 1, or an unknown size.
    """
    if count < 1:
        raise InputError(f"data.aspect_buckets must be 1 or more, got {count}")
    if count == 1:
        return None
    known = [size for size in sizes if size is not None and min(size) > 0]
    if len(known) < len(sizes):
        raise InputError(
            f"data.aspect_buckets={count} needs the size of every training image, and the annotations lack it for "
            f"{len(sizes) - len(known)} of {len(sizes)}: add width and height to them, or set data.aspect_buckets=1"
        )
    ratios = [width / height for height, width in known]
    _, which, images = np.unique(ratios, return_inverse=True, return_counts=True)
    middle = images.cumsum() - images / 2  # rank of each ratio among the images sorted by ratio
    return (middle * count // len(ratios)).astype(int)[which].tolist()


def object_features(counts: Tensor) -> Tensor:
    """Return features of images from their numbers of objects: (N, K) int64 by class -> (N, K) float32.

    The logarithm of 1 + the number, with a standard deviation of 1 for each class.
    """
    features = counts.float().log1p()
    return (features - features.mean(0)) / features.std(0, correction=0).clamp(min=1e-6)


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"the batch size must be at least 1, got {batch_size}")
