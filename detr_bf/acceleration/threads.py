"""OpenMP's threads beside other programs. Imports no torch: the runtime reads its settings when torch is loaded."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from detr_bf.acceleration import ON

OPENMP_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
BUSY_SHARE = 0.25  # of the cores, used by other programs


def spin_less_beside_others(seconds: float = 0.2) -> None:
    """Set ``GOMP_SPINCOUNT=1000`` if other programs use a quarter of the cores or more (Linux only).

    OpenMP's threads wait for each other by spinning, which beside other programs makes a step several times slower; few
    spins cost about a tenth alone (benchmarks/README.md, "Threads beside other programs"). The runtime reads the
    variable when torch is loaded, so this must be called before. Settings of the user are kept.

    Args:
        seconds: duration of the measurement.
    """
    is_set = any(name in os.environ for name in OPENMP_SETTINGS)
    if not ON or is_set or sys.platform != "linux" or "torch" in sys.modules:
        return
    with suppress(OSError, ValueError):  # no /proc, or another format
        before = _busy_and_all_ticks()
        time.sleep(seconds)
        busy, ticks = (after - start for after, start in zip(_busy_and_all_ticks(), before, strict=True))
        if ticks > 0 and busy >= BUSY_SHARE * ticks:
            os.environ["GOMP_SPINCOUNT"] = "1000"
            print(
                f"other programs use {100 * busy / ticks:.0f} % of the cores: OpenMP's threads wait with few spins "
                "(GOMP_SPINCOUNT=1000)",
                file=sys.stderr,
            )


def _busy_and_all_ticks() -> tuple[int, int]:
    """Return the busy and all clock ticks of the cores that this process may use, since the start of the system.

    Raises:
        OSError: there is no /proc/stat.
        ValueError: it has another format.
    """
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = [[int(value) for value in row[1:9]] for row in rows if row[0] in cores]  # user to steal
    if not all(len(row) == 8 for row in ticks):
        raise ValueError("/proc/stat has fewer than 8 columns")
    everything = sum(map(sum, ticks))
    return everything - sum(idle + waiting for _, _, _, idle, waiting, *_ in ticks), everything
