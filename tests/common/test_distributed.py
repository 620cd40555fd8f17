"""Collectives of a process group, and errors that all ranks raise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from detr_bf.common import distributed
from detr_bf.common.errors import InputError, TrainingError
from tests.processes import run_together


def everything() -> dict[str, Any]:
    rank = distributed.rank()
    return {
        "rank": rank,
        "world_size": distributed.world_size(),
        "is_main": distributed.is_main(),
        "total": distributed.all_reduce_sum(torch.tensor([1.0 + rank, 2.0])).tolist(),
        "mean": distributed.all_reduce_mean(torch.tensor(float(rank))).item(),
        "gathered": distributed.gather_to_main({"from": rank}),
        "known": distributed.all_gather_object("ab"[rank]),
        "run_on_main": distributed.run_on_main(lambda: f"from {rank}"),
    }


def test_two_processes() -> None:
    first, second = run_together(2, everything)
    common = {"world_size": 2, "total": [3.0, 4.0], "mean": 0.5, "known": ["a", "b"], "run_on_main": "from 0"}
    assert first == {**common, "rank": 0, "is_main": True, "gathered": [{"from": 0}, {"from": 1}]}
    assert second == {**common, "rank": 1, "is_main": False, "gathered": None}


def test_one_process_needs_no_group() -> None:
    assert everything() == {
        "rank": 0,
        "world_size": 1,
        "is_main": True,
        "total": [1.0, 2.0],
        "mean": 0.0,
        "gathered": [{"from": 0}],
        "known": ["a"],
        "run_on_main": "from 0",
    }


def test_sums_carry_no_gradient_and_leave_their_argument() -> None:
    value = torch.ones(2, requires_grad=True)
    assert not distributed.all_reduce_sum(value).requires_grad
    assert run_together(2, summed_twice) == [[1.0], [1.0]]


def summed_twice() -> list[float]:
    value = torch.ones(1)
    distributed.all_reduce_sum(value)
    return value.tolist()


def raised(error: type[Exception]) -> str:
    def fail() -> None:
        raise error("the disk is full")

    try:
        distributed.run_on_main(fail)
    except error as caught:
        return f"{type(caught).__name__}: {caught}, on all ranks: {getattr(caught, 'on_all_ranks', None)}"
    return "nothing"


@pytest.mark.parametrize("error", [InputError, TrainingError])
def test_an_error_of_the_main_rank_is_raised_on_every_rank(error: type[Exception]) -> None:
    assert run_together(2, raised, error) == [f"{error.__name__}: the disk is full, on all ranks: True"] * 2


def failing(ranks: tuple[int, ...]) -> str:
    try:
        with distributed.raise_on_all_ranks():
            if distributed.rank() in ranks:
                raise InputError(f"no folder on machine {distributed.rank()}")
    except InputError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [((), "fine"), ((1,), "no folder on machine 1"), ((0, 1), "no folder on machine 0\nno folder on machine 1")],
)
def test_bad_input_of_one_rank_is_raised_on_every_rank(ranks: tuple[int, ...], message: str) -> None:
    assert run_together(2, failing, ranks) == [message] * 2


def end_alone() -> None:
    if distributed.rank() == 1:
        raise ValueError("a fault of one rank")
    distributed.all_reduce_sum(torch.ones(1))


def test_a_lost_rank_is_told() -> None:
    with pytest.raises(AssertionError, match=r"TrainingError: rank 0 on .* has lost the connection to another rank"):
        run_together(2, end_alone)


def test_a_restarted_group_agrees_on_a_new_prefix() -> None:
    """Restart like torchrun: one store for all starts, with requests and addresses of the first start."""
    store, timeout = dist.HashStore(), timedelta(seconds=20)
    with ThreadPoolExecutor(3) as pool:
        names = []
        for _ in range(3):
            store.set("question/2", "asked by one that died before the answer")
            starts = [pool.submit(distributed.store_prefix, store, n, 3, timeout) for n in (0, 2, 1)]
            names.append({start.result() for start in starts})
    assert [len(agreed) for agreed in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_ranks_that_do_not_start_are_named() -> None:
    with pytest.raises(TrainingError, match=r"ranks \[1, 2\] did not start within 0:00:00.1"):
        distributed.store_prefix(dist.HashStore(), 0, 3, timedelta(seconds=0.1))
