"""Alternating timing: compared functions run in turn in one process, so that drifts of the machine affect all."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

Seconds = dict[str, list[float]]  # name -> time of every round


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile (linear interpolation)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise two or more values."""
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
    """Measure the seconds of every function in every round.

    A round runs each function once. The order cycles through all permutations: over n! rounds each function has each
    position, and follows each other function, equally often.

    Args:
        warmup: uncounted rounds at the beginning.
        synchronize: waits for the device; called before each reading of the clock.
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
    """Return the time of ``name`` divided by that of ``baseline`` for every round."""
    return [one / other for one, other in zip(seconds[name], seconds[baseline], strict=True)]
