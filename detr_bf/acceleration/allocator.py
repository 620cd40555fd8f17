"""Settings of glibc's malloc, which keep freed memory for the next call, and a pause of the garbage collector.

By default a forward or backward pass returns up to gigabytes to the system and gets them back page by page
(benchmarks/README.md, "Freed memory"). The settings hold for the whole process, that of a notebook as well, and memory
of a GPU is not concerned. With another C library, or if an environment variable sets malloc, nothing is changed.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from detr_bf.acceleration import ON

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # of mallopt, in glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 2**25  # bytes; glibc refuses more


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the search for reference cycles, for example while many objects without cycles are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_freed_memory(*, large: bool = False) -> None:
    """Keep freed blocks of up to 32 MiB, with ``large`` all, also those of threads that start later.

    Keeping large ones costs memory in training: 34 % of the peak of Deformable DETR with 3 images.
    """
    libc = _libc()
    if libc is None:
        return
    libc.mallopt(_TRIM_THRESHOLD, -1)
    if large:
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_ARENA_MAX, 1)  # an arena of another thread returns large blocks in any case
    else:
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)  # also ends the automatic change of both


def keep_large_blocks_if_possible(processes: int) -> None:
    """Keep freed blocks of all sizes if the memory could hold twice what ``processes`` like this one ever used."""
    if not Path("/proc/meminfo").is_file():
        return
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    if processes * peak <= min(_available_bytes(Path("/"))):
        keep_freed_memory(large=True)


def release_freed_memory() -> None:
    """Return what is kept to the system, before a fork: child processes would hold it for as long as they live."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def _libc() -> Any:
    """Return the C library if it is glibc, and neither malloc is set nor this package off, else None."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    is_set = not ON or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") and not is_set else None


def _available_bytes(root: Path) -> Iterator[int]:
    """Yield what the system has left, and each control group of this process with a limit (versions 1 and 2)."""
    yield _table(root / "proc/meminfo").get("MemAvailable:", 0) * 2**10
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        cache = "total_inactive_file" if controllers else "inactive_file"
        group = top / path.strip().lstrip("/")
        for folder in (group, *group.parents):  # a container may see its own group at the top only
            limit, used = (_lines(folder / name) for name in names)
            if limit and used and limit[0].isdecimal():
                yield int(limit[0]) - int(used[0]) + _table(folder / "memory.stat").get(cache, 0)
            if folder == top:
                break


def _table(file: Path) -> dict[str, int]:
    fields = (line.split() for line in _lines(file))
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdecimal()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
