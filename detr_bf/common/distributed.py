"""Rank, process group and collectives of a run that torchrun started; trivial for a single process.

Every function that communicates is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from detr_bf.common.errors import CommandError, InputError, TrainingError
from detr_bf.common.text import printable

_LOST = re.compile(  # in messages of gloo, NCCL and torch's store about a rank that has ended or cannot be reached
    r"Connection (closed|reset|refused)|[Tt]imed out|Application timeout|Broken pipe|[Rr]emote process exited"
    r"|ncclRemoteError|No route to host|failed to recv"
)
T = TypeVar("T")
E = TypeVar("E", bound=CommandError)

_model_group: Any = None


def launched() -> bool:
    """Return True if torchrun started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_rank() -> int:
    """Return the number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def restart_count() -> int:
    """Return how often torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch_id() -> str:
    """Return a text that identifies one torchrun launch across its restarts."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {socket.gethostname()} {os.getppid()}"


def is_initialized() -> bool:
    """Return True while this process belongs to a process group; a rank that fails alone stays in it."""
    return dist.is_initialized()


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return True on rank 0, which writes the files and the messages."""
    return rank() == 0


@contextmanager
def process_group(device: torch.device, timeout_minutes: float) -> Iterator[None]:
    """Create the process group for the block: gloo for CPU tensors, NCCL for CUDA tensors.

    ``device`` becomes the current device. A rank that waits longer than the timeout fails. An exception that only some
    ranks raise leaves the group open, because closing it would wait for the other ranks.

    Raises:
        TrainingError: in the block, the connection to another rank was lost.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if not launched():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    store, number, count = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(store_prefix(store, number, count, timeout), store)
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=timeout)
    global _model_group
    _model_group = dist.new_group(timeout=timeout)
    try:
        yield
    except BaseException as error:
        if isinstance(error, CommandError) and error.on_all_ranks:
            dist.destroy_process_group()
        if isinstance(error, RuntimeError) and _LOST.search(str(error)):  # DistError is one
            raise TrainingError(
                f"rank {rank()} on {socket.gethostname()} has lost the connection to another rank, which has ended or "
                "whose machine cannot be reached: look at its messages. torchrun starts all ranks again while "
                "--max-restarts allows it; otherwise continue with --resume or --auto-resume "
                f"({printable(error, 300)})"
            ) from error
        raise
    dist.destroy_process_group()


def model_group() -> Any:
    """Return a second process group of all ranks, for collectives inside the model.

    During the backward pass the default group reduces the gradients of the parameters at the same time.
    """
    return _model_group


def store_prefix(store: Store, number: int, count: int, timeout: timedelta) -> str:
    """Return a store prefix agreed by the ``count`` live ranks and unknown to ranks of an earlier, dead group.

    torchrun keeps one store across restarts, with the addresses of dead processes in it; a rank that reads those fails
    or waits for ever. So every rank asks under a new random name, and rank 0 answers all questions it finds, old ones
    too, until every other rank has shown that it knows rank 0's name.

    Raises:
        TrainingError: some ranks have not asked within ``timeout``.
    """
    own = uuid.uuid4().hex
    if number > 0:
        store.set(f"question/{number}", own)
        name: str = store.get(f"answer/{own}").decode()
        store.set(f"{name}/{number}", "here")
        return name
    missing, end = list(range(1, count)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"question/{other}"]):
                store.set(f"answer/{store.get(f'question/{other}').decode()}", own)
        missing = [other for other in missing if not store.check([f"{own}/{other}"])]
        if time.monotonic() > end:
            raise TrainingError(f"ranks {missing} did not start within {timeout}: look at their messages")
        time.sleep(0.02)
    return own


def all_reduce_sum(values: Tensor) -> Tensor:
    """Return the sum over the ranks, without gradient."""
    if world_size() == 1:
        return values.detach()
    summed = values.detach().clone()
    dist.all_reduce(summed)
    return summed


def all_reduce_mean(values: Tensor) -> Tensor:
    """Return the mean over the ranks, without gradient."""
    return all_reduce_sum(values) / world_size()


def all_gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows (n, ...) of all ranks, by rank, without gradient, and the index of the first one of this rank.

    Ranks may have different numbers of rows.
    """
    rows = rows.detach()
    if world_size() == 1:
        return rows, 0
    own = torch.tensor([len(rows)])
    lengths = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(lengths, own)
    counts = [int(length) for length in lengths]
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]), sum(counts[: rank()])


def broadcast_from_main(tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor in-place with that of the main rank."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def gather_to_main(value: T) -> list[T] | None:
    """Return the values of all ranks, by rank, on the main rank; None on the others."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if is_main() else None
    dist.gather_object(value, values)
    return values


def all_gather_object(value: T) -> list[T]:
    """Return the values of all ranks, by rank, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_main(function: Callable[[], T]) -> T:
    """Run ``function`` on the main rank and return its result on every rank.

    Raises:
        InputError, TrainingError: on every rank, if ``function`` raises it.
    """
    if world_size() == 1:
        return function()
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome = [function(), None]
        except (InputError, TrainingError) as error:
            outcome = [None, (type(error), str(error))]
    dist.broadcast_object_list(outcome)
    result, fault = outcome
    if fault is not None:
        kind, message = fault
        raise on_all_ranks(kind(message))
    return result


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise an :class:`InputError` of any rank on every rank at the end of the block, which must not communicate."""
    message = None
    try:
        yield
    except InputError as error:
        if world_size() == 1:
            raise
        message = str(error)
    faults = [fault for fault in dict.fromkeys(all_gather_object(message)) if fault is not None]
    if faults:
        raise on_all_ranks(InputError("\n".join(faults)))


def on_all_ranks(error: E) -> E:
    """Mark ``error`` as raised by every rank, so that only one rank of a machine prints it."""
    error.on_all_ranks = True
    return error
