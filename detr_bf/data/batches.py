"""Which images make up which batch, of one process or of several that train together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from detr_bf.data.sample_key import SampleKey, derive_seed
from detr_bf.errors import InputError


class EpochBatches(Sampler[list[SampleKey]]):
    """Training batches of one epoch from ``start_batch`` on, as process ``rank`` of ``world_size`` sees them.

    A global batch is ``world_size`` times ``batch_size`` images, of which the processes take consecutive slices. What
    the global batches are and their order is a function of (seed, epoch) and of their size alone, so that two processes
    see together what one sees with twice the batch size. Images of an incomplete last batch are left out, unless it is
    the only one: then they are dealt out as evenly as possible.

    Args:
        buckets: a number for each sample; images of a batch then have the same one, except in the few batches of what
            is left over. The order of the batches is random.
        repeats: copies of an image in a global batch, each with a key of its own (repeated augmentation, Hoffer et al.
            2020, arXiv 1901.09335). An epoch has as many batches as without, and so a share of the images only. First
            come all first copies, then all second ones, so that the processes mostly see different images. Where the
            size of the global batch is not a multiple, the last copies of some images are left out.

    Raises:
        InputError: a batch size below 1, or fewer images than processes.
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
        repeats: int = 1,
    ) -> None:
        assert 0 <= rank < world_size
        assert repeats >= 1
        assert repeats == 1 or buckets is None
        assert buckets is None or len(buckets) == num_samples
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
        self.repeats = repeats
        self.num_batches = num_samples // self.global_size or 1

    def __len__(self) -> int:
        """Batches still to come."""
        return max(0, self.num_batches - self.start_batch)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for places in self._global_batches()[self.start_batch :]:
            size = min(self.global_size, self.num_samples)
            keys = [SampleKey(self.epoch, place, copy) for copy in range(self.repeats) for place in places.tolist()]
            mine = torch.tensor_split(torch.arange(min(size, len(keys))), self.world_size)[self.rank]
            yield [keys[number] for number in mine.tolist()]

    def _global_batches(self) -> list[Tensor]:
        """All batches of the epoch, places of images without their copies."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        if self.buckets is None:
            different = math.ceil(min(self.global_size, self.num_samples) / self.repeats)
            return list(order.split(different)[: self.num_batches])
        batches = self._bucketed(order.tolist(), self.buckets)
        return [batches[number] for number in torch.randperm(self.num_batches, generator=generator).tolist()]

    def _bucketed(self, order: Sequence[int], buckets: Sequence[int]) -> list[Tensor]:
        """A batch whenever a bucket has enough images; neighbouring buckets share batches of what is left over."""
        batches: list[list[int]] = []
        waiting: dict[int, list[int]] = defaultdict(list)
        for place in order:
            bucket = buckets[place]
            waiting[bucket].append(place)
            if len(waiting[bucket]) == self.global_size:
                batches.append(waiting.pop(bucket))
        left = {place for places in waiting.values() for place in places}
        wanted = (self.num_batches - len(batches)) * self.global_size
        mixed = [place for place in order if place in left][:wanted]  # chance, not its bucket, leaves an image out
        mixed.sort(key=lambda place: buckets[place])
        batches += [mixed[start : start + self.global_size] for start in range(0, len(mixed), self.global_size)]
        return [torch.tensor(batch) for batch in batches]


class SameSizeBatches(Sampler[list[SampleKey]]):
    """Evaluation batches: every image once, and only images of one size together, so that nothing is padded.

    Process ``rank`` of ``world_size`` takes every ``world_size``-th batch, from ``start_batch`` of its own on.
    ``sizes`` are (height, width) or None where it is not known; such an image comes alone.
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
        for place, size in enumerate(sizes):
            groups[size or place].append(SampleKey(0, place))
        batches = [
            group[start : start + batch_size] for group in groups.values() for start in range(0, len(group), batch_size)
        ]
        self.batches = batches[rank::world_size][start_batch:]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.batches)


def aspect_buckets(sizes: Sequence[tuple[int, int] | None], count: int) -> list[int] | None:
    """``count`` groups of images of similar width / height, numbered from the tallest to the widest.

    They are about equally large, as far as images of one ratio, which stay together, allow. None for one group.

    Args:
        sizes: (height, width) in pixels, or None where it is not known.

    Raises:
        InputError: a count below 1, or a size that is not known.
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
    middle = images.cumsum() - images / 2  # of each ratio, in the images sorted by ratio
    return (middle * count // len(ratios)).astype(int)[which].tolist()


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"the batch size must be at least 1, got {batch_size}")
