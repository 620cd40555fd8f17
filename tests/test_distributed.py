"""What the processes of a group tell each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from detr_bf import distributed
from detr_bf.errors import InputError, TrainingError
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
        "on_main": distributed.on_main(lambda: f"said by {rank}"),
    }


def test_two_processes() -> None:
    first, second = run_together(2, everything)
    common = {"world_size": 2, "total": [3.0, 4.0], "mean": 0.5, "known": ["a", "b"], "on_main": "said by 0"}
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
        "on_main": "said by 0",
    }


def test_sums_carry_no_gradient_and_leave_their_argument() -> None:
    value = torch.ones(2, requires_grad=True)
    assert not distributed.all_reduce_sum(value).requires_grad
    assert run_together(2, summed_twice) == [[1.0], [1.0]]


def summed_twice() -> list[float]:
    value = torch.ones(1)
    distributed.all_reduce_sum(value)
    return value.tolist()


def told(error: type[Exception]) -> str:
    def fail() -> None:
        raise error("the disk is full")

    try:
        distributed.on_main(fail)
    except error as caught:
        return f"{type(caught).__name__}: {caught}, by all: {getattr(caught, 'by_all', None)}"
    return "nothing"


@pytest.mark.parametrize("error", [InputError, TrainingError])
def test_what_fails_on_the_main_process_fails_everywhere(error: type[Exception]) -> None:
    assert run_together(2, told, error) == [f"{error.__name__}: the disk is full, by all: True"] * 2


def failing(ranks: tuple[int, ...]) -> str:
    try:
        with distributed.failing_together():
            if distributed.rank() in ranks:
                raise InputError(f"no folder on machine {distributed.rank()}")
    except InputError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [((), "fine"), ((1,), "no folder on machine 1"), ((0, 1), "no folder on machine 0\nno folder on machine 1")],
)
def test_bad_input_of_one_process_ends_all(ranks: tuple[int, ...], message: str) -> None:
    assert run_together(2, failing, ranks) == [message] * 2


def test_a_new_start_agrees_on_a_name_in_spite_of_what_the_dead_left_in_the_store() -> None:
    """As torchrun restarts a group: one store for all starts, in which the first left questions and addresses."""
    store, timeout = dist.HashStore(), timedelta(seconds=20)
    with ThreadPoolExecutor(3) as pool:
        names = []
        for _ in range(3):
            store.set("question/2", "asked by one that died before the answer")
            starts = [pool.submit(distributed.store_prefix, store, n, 3, timeout) for n in (0, 2, 1)]
            names.append({start.result() for start in starts})
    assert [len(agreed) for agreed in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_processes_that_do_not_come_are_named() -> None:
    with pytest.raises(TrainingError, match=r"processes \[1, 2\] have not come within 0:00:00.1"):
        distributed.store_prefix(dist.HashStore(), 0, 3, timedelta(seconds=0.1))
