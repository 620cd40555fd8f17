"""Settings of glibc's malloc, for processes that are ours: memory that a step frees is kept for the next one.

By default each forward or backward pass returns up to gigabytes to the system and gets them back page by page. On a
virtual machine this took a third of a training step of Deformable DETR (benchmarks/README.md, "Freed memory"). With
another C library, or if an environment variable sets malloc, nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt, in glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 2**25  # bytes; glibc refuses more


def keep_freed_memory(*, large: bool = False) -> None:
    """Keep freed blocks of up to 32 MiB, with ``large`` all, in this process.

    Keeping large ones costs memory in training: the peak of Deformable DETR with 2 to 4 images grew by 13 to 43 %, that
    of inference by 3 %.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt(_TRIM_THRESHOLD, -1)
    if large:
        mallopt(_MMAP_MAX, 0)
    else:
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)  # also ends the automatic change of both


def keep_large_blocks_if_room(processes: int) -> None:
    """Keep freed blocks of all sizes if the memory could hold twice what ``processes`` like this one ever used."""
    if not Path("/proc/meminfo").is_file():
        return
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    if processes * peak <= min(_available_bytes(Path("/"))):
        keep_freed_memory(large=True)


def _available_bytes(root: Path) -> Iterator[int]:
    """Yield what the system has left, and each control group of this process with a limit (versions 1 and 2)."""
    meminfo = _table(root / "proc/meminfo")
    yield meminfo["MemAvailable:"] * 2**10
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
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
    return {name: int(value.split()[0]) for name, value in (line.split(maxsplit=1) for line in _lines(file))}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
