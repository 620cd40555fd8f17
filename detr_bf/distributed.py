"""Several processes that train together: which one this is, and what they tell each other.

torchrun starts them and describes the group in the environment. Without it there is one process, and everything here is
trivial. What is called by one process must be called by all, in the same order.
"""

from __future__ import annotations

import os
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

from detr_bf.errors import InputError, Told, TrainingError

T = TypeVar("T")
E = TypeVar("E", bound=Told)

_side_group: Any = None


def launched() -> bool:
    """Whether a launcher started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_rank() -> int:
    """The number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def restarts() -> int:
    """How often the launcher has started the group anew after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch() -> str:
    """What all starts of this process by one launcher have in common, and those by another have not."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {socket.gethostname()} {os.getppid()}"


def in_group() -> bool:
    """Whether this process is in a group now; one that fails alone stays in it."""
    return dist.is_initialized()


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is process 0, the one that writes files and speaks."""
    return rank() == 0


@contextmanager
def process_group(device: torch.device, timeout_minutes: float) -> Iterator[None]:
    """Within the block the processes of the launcher form a group: gloo on CPUs, NCCL between GPUs as well.

    ``device`` becomes the current one. Who waits longer than the timeout for the others fails. An exception that the
    others do not share leaves the group as it is, since they may never come to close it.
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
    global _side_group
    _side_group = dist.new_group(timeout=timeout)
    try:
        yield
    except BaseException as error:
        if isinstance(error, Told) and error.by_all:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def side_group() -> Any:
    """A second channel between the same processes, for messages within the model.

    During a backward pass the gradients of the parameters travel on the first at the same time.
    """
    return _side_group


def store_prefix(store: Store, number: int, count: int, timeout: timedelta) -> str:
    """A name that the ``count`` processes that call this now agree on, and none that died before them knows.

    torchrun keeps one store over all starts of a group, and the addresses of dead processes stand in it: whoever reads
    those fails or waits for ever. So every process asks under a name that nobody had before it, and process 0 answers
    all questions it finds, old ones too, until all others have shown that they know its own name.

    Raises:
        TrainingError: the others have not come within ``timeout``.
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
            raise TrainingError(f"processes {missing} have not come within {timeout}: look at what they said")
        time.sleep(0.02)
    return own


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum over the processes, without gradient; of one process the tensor itself."""
    if world_size() == 1:
        return values.detach()
    summed = values.detach().clone()
    dist.all_reduce(summed)
    return summed


def all_reduce_mean(values: Tensor) -> Tensor:
    """The mean over the processes, without gradient."""
    return all_reduce_sum(values) / world_size()


def broadcast_from_main(tensors: Iterable[Tensor]) -> None:
    """Overwrite each with that of the main process."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def gather_to_main(value: T) -> list[T] | None:
    """What each process gives, in their order, on the main one; None on the others."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if is_main() else None
    dist.gather_object(value, values)
    return values


def all_gather_object(value: T) -> list[T]:
    """What each process gives, in their order, on all."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def on_main(function: Callable[[], T]) -> T:
    """Run it on the main process; all get its result, or raise its :class:`InputError` or :class:`TrainingError`."""
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
        raise shared(kind(message))
    return result


@contextmanager
def failing_together() -> Iterator[None]:
    """An :class:`InputError` of any process within the block ends it on all; no messages are exchanged within."""
    message = None
    try:
        yield
    except InputError as error:
        if world_size() == 1:
            raise
        message = str(error)
    faults = [fault for fault in dict.fromkeys(all_gather_object(message)) if fault is not None]
    if faults:
        raise shared(InputError("\n".join(faults)))


def shared(error: E) -> E:
    """``error`` as one that all processes raise, so that the main one alone tells it."""
    error.by_all = True
    return error
