"""What a batch sampler asks a data set for, and how the same is found again: random numbers and stand-ins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from detr_bf.errors import InputError

ATTEMPTS = 20  # images tried for one sample

T = TypeVar("T")


class SampleKey(NamedTuple):
    """What a batch sampler asks the data set for; the epoch is part of it because the augmentation depends on it."""

    epoch: int
    place: int  # in the data set, from 0
    copy: int = 0  # of several in one batch, each augmented in its own way

    def mixed_with(self, seed: int, attempt: int = 0) -> int:
        """A 64-bit seed of this sample in a run of that ``seed``; ``attempt`` numbers the choices of a stand-in."""
        if self.copy:
            return derive_seed(seed, self.epoch, self.place, attempt, self.copy)
        return derive_seed(seed, self.epoch, self.place, *([attempt] if attempt else []))


def derive_seed(*parts: int) -> int:
    """A 64-bit seed from several whole numbers, unrelated for neighbouring ones."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def read_or_replace(
    read: Callable[[int], T], key: SampleKey, count: int, *, seed: int, replace: bool
) -> tuple[int, T, str]:
    """The sample asked for, or one that stands in for it: its place, itself, and why the first was not readable.

    Args:
        read: place -> sample, or :class:`InputError`.
        count: samples there are.
        replace: whether others may stand in: random ones, a function of (seed, key).

    Raises:
        InputError: the sample cannot be read, and with ``replace`` as little ``ATTEMPTS`` - 1 others.
    """
    place, fault = key.place, ""
    for attempt in range(1, ATTEMPTS):
        try:
            return place, read(place), fault
        except InputError as error:
            if not replace:
                raise
            fault = fault or str(error)
        place = key.mixed_with(seed, attempt) % count
    return place, read(place), fault
