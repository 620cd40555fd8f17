"""Batches from loader processes, some of which may die."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils import signal_handling

from detr_bf.data.batches import SampleKey
from detr_bf.errors import InputError, TrainingError

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30  # that a worker lives on after SIGTERM
MAX_DEATHS = 3  # of workers without a batch in between
_DYING_SECONDS = 1.0  # from the first sign of a death, a closed connection, to the end of the process

SampleT = TypeVar("SampleT")
BatchT = TypeVar("BatchT")


class WorkerDiedError(RuntimeError):
    """A loader process ended while it still had batches to load; the message says how."""


class BatchLoader(DataLoader[BatchT]):
    """A DataLoader that tells apart what goes wrong, each with its own message instead of a traceback's text.

    While a batch is waited for, and only then, it raises the :class:`InputError` of a worker, and
    :class:`WorkerDiedError` for one that was killed. When it raises, its workers have ended.
    """

    def __iter__(self) -> Iterator[BatchT]:  # type: ignore[override]
        _keep_deaths_from_surfacing_anywhere()
        batches = super().__iter__()
        workers: Sequence[BaseProcess] = batches._workers if self.num_workers else ()  # type: ignore[attr-defined]
        try:
            for _ in range(len(self)):
                with _deaths_raised(workers):
                    batch = next(batches)
                yield batch
        except InputError as error:
            raise InputError(original_message(str(error))) from None
        except Exception:
            message = _death(workers, _DYING_SECONDS)
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
    """The ``batches`` of a data set, loaded by ``workers`` processes; ``collate`` makes one of its samples.

    Iterating does not touch torch's global generator, so that a resumed run continues with the random numbers of the
    run that was stopped.
    """
    return BatchLoader(
        dataset,  # type: ignore[arg-type]  # the stubs know no collate that changes the type
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_the_parent,
        generator=torch.Generator(),
    )


def steady(make: Callable[[int], Iterator[BatchT]], start: int) -> Iterator[BatchT]:
    """The batches of ``make(start)``, in spite of workers that die.

    Args:
        make: number of a batch -> the batches from there on, always the same ones.

    Raises:
        TrainingError: workers died ``MAX_DEATHS`` times without a batch in between.
    """
    due, deaths = start, 0
    while True:
        try:
            for batch in make(due):
                due, deaths = due + 1, 0
                yield batch
            return
        except WorkerDiedError as death:
            message = str(death)
        deaths += 1
        if deaths == MAX_DEATHS:
            raise TrainingError(
                f"loader processes died {deaths} times without a batch in between, last: {message}; give the job more "
                "memory or a larger /dev/shm, or set data.workers to fewer, 0 to load in the training process"
            )
        logger.error(
            "%s: out of memory, or of shared memory (/dev/shm)? The workers are started anew; fewer of them "
            "(data.workers) need less",
            message,
        )


def _keep_deaths_from_surfacing_anywhere() -> None:
    """Install, and take back at once, the handler of SIGCHLD that DataLoader installs once in a process.

    It would raise a worker's death wherever the main thread is then, be it in the middle of an optimiser step.
    """
    if _is_main_thread():
        usual = signal.getsignal(signal.SIGCHLD)
        signal_handling._set_SIGCHLD_handler()
        signal.signal(signal.SIGCHLD, usual)


@contextmanager
def _deaths_raised(workers: Sequence[BaseProcess]) -> Iterator[None]:
    """Within the block the death of one of ``workers``, also an earlier one, raises :class:`WorkerDiedError`.

    At once, for a worker that dies in the middle of a message leaves its reader waiting for ever. Outside the main
    thread, to which signals go, DataLoader finds most deaths itself within seconds.
    """
    if not _is_main_thread():
        yield
        return
    usual = signal.getsignal(signal.SIGCHLD)

    def tell(number: int, frame: FrameType | None) -> None:
        message = _death(workers)
        if message:
            signal.signal(signal.SIGCHLD, usual)
            raise WorkerDiedError(message)
        if callable(usual):
            usual(number, frame)

    signal.signal(signal.SIGCHLD, tell)
    try:
        message = _death(workers)
        if message:
            raise WorkerDiedError(message)
        yield
    finally:
        signal.signal(signal.SIGCHLD, usual)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _death(workers: Sequence[BaseProcess], seconds: float = 0) -> str:
    """How one of them ended, if any has or does within ``seconds``; else nothing."""
    ended = wait([worker.sentinel for worker in workers], seconds) if workers else ()
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(_DYING_SECONDS)
            return f"loader process {worker.pid} {_how(worker.exitcode)}"
    return ""


def _how(exit_code: int | None) -> str:
    """How a process ended."""
    if exit_code is not None and exit_code < 0:
        return f"was killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"ended with exit code {exit_code}"


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
