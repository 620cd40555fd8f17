"""Alternating timing: what is compared runs in turn in one process, so that a drift of the machine hits all alike."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

Seconds = dict[str, list[float]]  # name -> the time of every round, in the order of the rounds


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile (linear interpolation)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of two or more values."""
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), deciles[0], deciles[-1])


def alternate(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    description: str = "",
) -> Seconds:
    """Seconds of every function in every round.

    A round runs each function once. The order goes through all permutations in turn, so that over n! rounds each
    function stands equally often at each place and behind each other function.

    Args:
        warmup: rounds before the first that counts.
        synchronize: waits for the device; called before each reading of the clock.
        description: for the progress bar.
    """
    seconds: Seconds = {name: [] for name in functions}
    orders = itertools.cycle(itertools.permutations(functions))
    for number in tqdm(range(-warmup, rounds), desc=description, unit="round", disable=None, leave=False):
        for name in functions if number < 0 else next(orders):
            synchronize()
            start = clock()
            functions[name]()
            synchronize()
            elapsed = clock() - start
            if number >= 0:
                seconds[name].append(elapsed)
    return seconds


def paired_ratios(seconds: Mapping[str, Sequence[float]], name: str, baseline: str) -> list[float]:
    """Time of ``name`` over time of ``baseline`` in the same round, for every round."""
    return [one / other for one, other in zip(seconds[name], seconds[baseline], strict=True)]
