"""Batches in an order that can be taken up again at any batch."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Sampler

from detr_bf.data.coco import CocoDetection, SampleKey, mixed_seed
from detr_bf.errors import InputError
from detr_bf.structures import Batch

GRACE_SECONDS = 30  # that a worker lives on after SIGTERM


class EpochBatches(Sampler[list[SampleKey]]):
    """Training batches of one epoch from ``start_batch`` on; their order is a function of (seed, epoch) alone.

    An incomplete last batch is left out, unless it is the only one.
    """

    def __init__(self, num_samples: int, batch_size: int, *, seed: int, epoch: int, start_batch: int = 0) -> None:
        _check_batch_size(batch_size)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = epoch
        self.start_batch = start_batch
        self.num_batches = num_samples // batch_size or 1

    def __len__(self) -> int:
        """Batches still to come."""
        return max(0, self.num_batches - self.start_batch)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        order = torch.randperm(self.num_samples, generator=generator).tolist()
        for batch in range(self.start_batch, self.num_batches):
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [SampleKey(self.epoch, index) for index in chosen]


class SameSizeBatches(Sampler[list[SampleKey]]):
    """Evaluation batches: every image once, and only images of one size together, so that nothing is padded.

    ``sizes`` are (height, width) or None where it is not known; such an image comes alone.
    """

    def __init__(self, sizes: Sequence[tuple[int, int] | None], batch_size: int) -> None:
        _check_batch_size(batch_size)
        groups: dict[object, list[SampleKey]] = defaultdict(list)
        for place, size in enumerate(sizes):
            groups[size or place].append(SampleKey(0, place))
        self.batches = [
            group[start : start + batch_size] for group in groups.values() for start in range(0, len(group), batch_size)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.batches)


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"the batch size must be at least 1, got {batch_size}")


class BatchLoader(DataLoader[Batch]):
    """A DataLoader whose workers' :class:`InputError` arrives with its own message instead of a traceback's text."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        batches = super().__iter__()
        message = None
        try:
            yield from batches
        except InputError as error:
            message = original_message(str(error))
        finally:
            del batches  # closes the workers, now
        if message is not None:  # raised here, for an error with a context would keep them alive
            raise InputError(message)


def make_loader(
    dataset: CocoDetection, batches: Sampler[list[SampleKey]], *, workers: int, pin_memory: bool = False
) -> BatchLoader:
    """The ``batches`` of a data set, loaded by ``workers`` processes.

    Iterating does not touch torch's global generator, so that a resumed run continues with the random numbers of the
    run that was stopped.
    """
    return BatchLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=Batch.collate,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_the_parent,
        generator=torch.Generator(),
    )


def original_message(text: str) -> str:
    """The message of an :class:`InputError` whose worker's traceback DataLoader made its message."""
    marker = f"{InputError.__module__}.{InputError.__qualname__}: "
    return text.rpartition(marker)[2].strip()


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach every process of a job; the training process finishes its step and saves.

    So the workers live on until it closes them or dies, after SIGTERM at most ``GRACE_SECONDS``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: _end_later())


def _end_later() -> None:
    signal.alarm(GRACE_SECONDS)
