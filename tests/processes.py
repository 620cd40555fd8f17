"""Run a function on several ranks of a process group, like torchrun."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from detr_bf.common import distributed

# forking a server that has imported torch is faster than starting Python
_SPAWN = multiprocessing.get_context("forkserver")
_SPAWN.set_forkserver_preload(["tests.processes", "detr_bf.assembly"])


def run_together(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of ``function(*arguments)`` on ``count`` ranks; it must be a module-level function."""
    port = str(_free_port())
    pipes = [_SPAWN.Pipe(duplex=False) for _ in range(count)]
    processes = [
        _SPAWN.Process(target=_member, args=(rank, count, port, pipes[rank][1], function, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        answers = [_answer(receiver, rank) for rank, (receiver, _) in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(timeout=20)
            process.kill()
    for rank, (_, error) in enumerate(answers):
        assert error is None, f"rank {rank}: {error}"
    return [result for result, _ in answers]


def _answer(receiver: Connection, rank: int) -> tuple[Any, str | None]:
    assert receiver.poll(timeout=120), f"rank {rank} hangs"
    result, error = pickle.loads(receiver.recv_bytes())
    return result, error


def _member(
    rank: int, count: int, port: str, sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    try:
        with distributed.process_group(torch.device("cpu"), timeout_minutes=1):
            answer: tuple[Any, str | None] = function(*arguments), None
    except BaseException:
        answer = None, traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
