"""Start of loader workers, and detection and restart of dead ones.

A worker killed by the kernel, for lack of memory for instance, would make DataLoader hang or raise from any line of the
main thread. Here its death raises :class:`WorkerDiedError` where a batch is waited for, and only there.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TypeVar

from torch.utils.data._utils import signal_handling

from detr_bf.common.errors import InputError, TrainingError

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30  # from SIGTERM to the end of a worker
MAX_DEATHS = 3  # of workers, without a batch in between
EXIT_SECONDS = 1.0  # from a closed connection, the first sign of a death, to the end of the process
UNGUARDED = 78  # exit code of a process that runs the main script again, up to a place where it would start a run
GUARD = (
    "loader workers are not forked here, so each of them runs the main script again: put its code under "
    "'if __name__ == \"__main__\":'"
)

BatchT = TypeVar("BatchT")


class WorkerDiedError(RuntimeError):
    """A loader worker ended while it still had batches to load; the message says how."""


def restart_dead_workers(make_batches: Callable[[int], Iterator[BatchT]], start: int) -> Iterator[BatchT]:
    """Yield the batches of ``make_batches(start)``; after a worker's death continue with the first missing batch.

    Args:
        make_batches: index of a batch -> the batches from there on, the same ones at every call.
        start: index of the first batch.

    Raises:
        TrainingError: workers died :data:`MAX_DEATHS` times without a batch in between.
    """
    due, deaths = start, 0
    while True:
        try:
            for batch in make_batches(due):
                due, deaths = due + 1, 0
                yield batch
            return
        except WorkerDiedError as death:
            message = str(death)
        deaths += 1
        if deaths == MAX_DEATHS:
            raise TrainingError(
                f"loader workers died {deaths} times without a batch in between, last: {message}; give the job more "
                "memory or a larger /dev/shm, or set data.workers to fewer, 0 to load in the training process"
            )
        logger.error(
            "%s: out of memory, or of shared memory (/dev/shm)? The workers are restarted; fewer of them "
            "(data.workers) need less",
            message,
        )


def start_method() -> str:
    """Return how loader workers start: forked on Linux, unless the program has chosen another method.

    From Python 3.14 on the default on Linux is a fork server, which runs the main script again.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    if sys.platform == "linux" and (chosen is None or (chosen == "forkserver" and sys.version_info >= (3, 14))):
        return "fork"
    return chosen or multiprocessing.get_start_method()


def startable_workers(workers: int) -> int:
    """Return the number of workers, or 0, with a warning, if the main script has no guard and they are not forked."""
    return 0 if workers and start_method() != "fork" and _lacks_guard() else workers


@cache
def _lacks_guard() -> bool:
    """Return True, with a warning, for a main script that never reads ``__name__``."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None:  # a notebook, or python -m
        return False
    try:
        lacks = "__name__" not in Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    if lacks:
        logger.warning("%s; until then images are loaded in this process, as with data.workers=0", GUARD)
    return lacks


def end_unguarded() -> None:
    """End this process if it is a worker that is starting, and runs the main script again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stdout.flush()
        os._exit(UNGUARDED)  # a fork server would make 1 of the code of sys.exit


@contextmanager
def raise_deaths(workers: Sequence[BaseProcess]) -> Iterator[None]:
    """Raise :class:`WorkerDiedError` within the block as soon as one of ``workers`` is dead.

    A worker that dies in the middle of a message leaves its reader waiting for ever, so SIGCHLD interrupts the wait.
    Outside the main thread, which alone receives signals, DataLoader finds most deaths itself within seconds.
    """
    if not _is_main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGCHLD)

    def check(number: int, frame: FrameType | None) -> None:
        message = death_of(workers)
        if message:
            signal.signal(signal.SIGCHLD, previous)
            raise WorkerDiedError(message)
        if callable(previous):
            previous(number, frame)

    signal.signal(signal.SIGCHLD, check)
    try:
        message = death_of(workers)
        if message:
            raise WorkerDiedError(message)
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous)


def death_of(workers: Sequence[BaseProcess], seconds: float = 0) -> str:
    """Describe how one of ``workers`` ended, waiting up to ``seconds`` for it; empty if all are alive.

    Raises:
        InputError: it has run a main script without guard again.
    """
    ended = wait([worker.sentinel for worker in workers], seconds) if workers else ()
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(EXIT_SECONDS)
            code = worker.exitcode
            if code == UNGUARDED:
                raise InputError(GUARD)
            if code is not None and code < 0:
                return f"loader worker {worker.pid} was killed by signal {-code} ({signal.strsignal(-code)})"
            return f"loader worker {worker.pid} ended with exit code {code}"
    return ""


def disarm_dataloader_handler() -> None:
    """Make DataLoader install its SIGCHLD handler, once per process, and restore the previous handler.

    DataLoader's handler would raise a worker's death from any line of the main thread, even inside an optimizer step.
    """
    if _is_main_thread():
        previous = signal.getsignal(signal.SIGCHLD)
        signal_handling._set_SIGCHLD_handler()
        signal.signal(signal.SIGCHLD, previous)


def start_worker(worker: int) -> None:
    """Ignore SIGINT in this worker, end :data:`GRACE_SECONDS` after SIGTERM, and keep inherited garbage.

    A ``worker_init_fn``. Garbage of the training process must not be collected in a forked worker: destructors may wait
    for ever for threads that only the training process has, such as those of video frames of PyAV.

    Ctrl-C and a scheduler's SIGTERM reach every process of a job. The training process finishes its step and saves; the
    workers live until it closes them or dies. DataLoader's workers compare their parent with the one at their start, so
    a forked worker whose parent was killed before that would never end: it ends here.
    """
    parent = multiprocessing.parent_process()
    if start_method() == "fork" and parent is not None and os.getppid() != parent.pid:
        os._exit(1)
    gc.freeze()
    gc.enable()  # the loader disables it before the fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE_SECONDS))


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
