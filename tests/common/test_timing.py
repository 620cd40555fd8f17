from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from detr_bf.common.timing import Spread, alternate, paired_ratios


class Machine:
    """Clock that advances only by its own work, with a log of what ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.diary: list[str] = []

    def work(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.diary.append(name)
            self.now += seconds

        return run

    def clock(self) -> float:
        return self.now


def test_each_function_is_timed_by_itself_once_a_round() -> None:
    machine = Machine()
    functions = {"short": machine.work("short", 1.0), "long": machine.work("long", 4.0)}
    assert alternate(functions, 3, clock=machine.clock) == {"short": [1.0] * 3, "long": [4.0] * 3}


def test_warmup_rounds_run_and_do_not_count() -> None:
    machine = Machine()
    seconds = alternate({"a": machine.work("a", 1.0)}, 2, warmup=3, clock=machine.clock)
    assert machine.diary == ["a"] * 5
    assert seconds == {"a": [1.0, 1.0]}


def test_order_gives_every_function_every_place_equally_often() -> None:
    machine = Machine()
    alternate({name: machine.work(name, 1.0) for name in "abc"}, 6, warmup=0, clock=machine.clock)
    rounds = [machine.diary[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    for position in range(3):
        assert Counter(order[position] for order in rounds) == {"a": 2, "b": 2, "c": 2}
    assert set(Counter(pair for order in rounds for pair in pairwise(order)).values()) == {2}


def test_waiting_for_the_device_counts_for_the_function_that_caused_it() -> None:
    machine = Machine()
    queue = [0.0]

    def launch(seconds: float) -> Callable[[], None]:
        return lambda: queue.append(seconds)

    def synchronize() -> None:
        machine.now += sum(queue)
        queue.clear()

    functions = {"a": launch(2.0), "b": launch(5.0)}
    seconds = alternate(functions, 2, synchronize=synchronize, clock=machine.clock)
    assert seconds == {"a": [2.0, 2.0], "b": [5.0, 5.0]}


def test_ratios_are_taken_round_by_round() -> None:
    drifting = {"baseline": [1.0, 10.0, 100.0], "variant": [2.0, 20.0, 200.0]}
    assert paired_ratios(drifting, "variant", "baseline") == [2.0, 2.0, 2.0]
    assert paired_ratios(drifting, "baseline", "variant") == [0.5, 0.5, 0.5]


def test_ratios_need_as_many_rounds_of_both() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        paired_ratios({"a": [1.0], "b": [1.0, 2.0]}, "a", "b")


@pytest.mark.parametrize("count", [2, 3, 10, 31])
def test_spread_agrees_with_numpy(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count)
    low, median, high = np.percentile(values, [10, 50, 90])
    spread = Spread.of(values.tolist())
    assert (spread.low, spread.median, spread.high) == pytest.approx((low, median, high))
