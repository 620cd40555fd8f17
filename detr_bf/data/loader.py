"""Batches from loader workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from detr_bf.acceleration.allocator import release_freed_memory, without_garbage_collection
from detr_bf.common.errors import InputError
from detr_bf.data.batches import SampleKey
from detr_bf.data.workers import (
    EXIT_SECONDS,
    GUARD,
    WorkerDiedError,
    death_of,
    disarm_dataloader_handler,
    end_unguarded,
    raise_deaths,
    start_method,
    start_worker,
    startable_workers,
)

SampleT = TypeVar("SampleT")
BatchT = TypeVar("BatchT")

_STARTING = threading.Lock()  # while the garbage collector is disabled


class BatchLoader(DataLoader[BatchT]):
    """DataLoader that raises typed errors instead of RuntimeErrors with the text of a traceback.

    While a batch is waited for, and only then, it raises the :class:`InputError` of a worker, or
    :class:`~detr_bf.data.workers.WorkerDiedError` for a killed worker. Its workers have ended when it raises.
    Workers that cannot start raise an :class:`InputError` at once.
    """

    def __iter__(self) -> Iterator[BatchT]:  # type: ignore[override]
        disarm_dataloader_handler()
        if self.num_workers:
            end_unguarded()
            release_freed_memory()
        with _STARTING, without_garbage_collection():  # in the workers until start_worker
            try:
                batches = super().__iter__()
            except (ConnectionError, EOFError):  # a worker ended before it had got its data set
                if start_method() == "fork":
                    raise
                raise InputError(GUARD) from None
        workers: Sequence[BaseProcess] = batches._workers if self.num_workers else ()  # type: ignore[attr-defined]
        try:
            for _ in range(len(self)):
                with raise_deaths(workers):
                    batch = next(batches)
                yield batch
        except InputError as error:
            name = f"{InputError.__module__}.{InputError.__qualname__}: "  # before the message, in a worker's traceback
            raise InputError(str(error).rpartition(name)[2].strip()) from None
        except Exception:
            try:
                message = death_of(workers, EXIT_SECONDS)
            except InputError as error:
                raise error from None
            if message:
                raise WorkerDiedError(message) from None
            raise
        finally:
            if workers:
                batches._shutdown_workers()  # type: ignore[attr-defined]


def make_loader(
    dataset: Dataset[SampleT],
    batches: Sampler[list[SampleKey]],
    *,
    collate: Callable[[list[SampleT]], BatchT],
    workers: int,
    pin_memory: bool = False,
) -> BatchLoader[BatchT]:
    """Return a loader of the ``batches`` of a data set with ``workers`` processes, if they can start.

    Iterating does not touch torch's global generator, so that a resumed run continues with the random numbers of the
    run that was stopped.
    """
    workers = startable_workers(workers)
    return BatchLoader(
        dataset,  # type: ignore[arg-type]  # the stubs know no collate that changes the type
        batch_sampler=batches,
        num_workers=workers,
        multiprocessing_context=start_method() if workers else None,
        collate_fn=collate,
        pin_memory=pin_memory,
        worker_init_fn=start_worker,
        generator=torch.Generator(),
    )
