"""Freed memory that is kept; the room for it in the system and in control groups."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from detr_bf import malloc

MIB = 2**20
FAULTS = """
import resource, sys, torch
from detr_bf.malloc import keep_freed_memory
count, mib, large = map(int, sys.argv[1:])
keep_freed_memory()
if large:
    keep_freed_memory(large=True)
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(mib * 2**18) for _ in range(count)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is set")
@pytest.mark.parametrize(
    ("variables", "count", "mib", "large", "kept"),
    [
        ({}, 20, 8, False, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, 20, 8, False, False),
        ({}, 3, 64, False, False),
        ({}, 3, 64, True, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, 3, 64, True, False),
    ],
)
def test_freed_memory_is_kept_unless_the_user_sets_malloc(
    variables: dict[str, str], count: int, mib: int, large: bool, kept: bool
) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    # new memory comes in small pages, as torch requests it by default
    environment.pop("THP_MEM_ALLOC_ENABLE", None)
    command = [sys.executable, "-c", FAULTS, str(count), str(mib), str(int(large))]
    result = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    pages = count * mib * MIB / os.sysconf("SC_PAGE_SIZE")
    assert (int(result.stdout) < 0.1 * pages) == kept


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


SYSTEM = "MemTotal:  900 kB\nMemAvailable:  800 kB\nHugePages_Total:       0\n"
VERSION_2 = "0::/work.slice/job.scope\n"
VERSION_1 = "5:cpu,cpuacct:/docker/f3\n4:memory:/docker/f3\n"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, [800 * 1024]),
        ({"proc/self/cgroup": VERSION_2}, [800 * 1024]),
        (  # the limit of the group above; its cache can be given up
            {
                "proc/self/cgroup": VERSION_2,
                "sys/fs/cgroup/work.slice/job.scope/memory.max": "max\n",
                "sys/fs/cgroup/work.slice/job.scope/memory.current": "100\n",
                "sys/fs/cgroup/work.slice/memory.max": "5000\n",
                "sys/fs/cgroup/work.slice/memory.current": "3000\n",
                "sys/fs/cgroup/work.slice/memory.stat": "anon 2600\ninactive_file 400\n",
            },
            [800 * 1024, 5000 - 3000 + 400],
        ),
        (  # a container sees its group at the top
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "7000\n",
                "sys/fs/cgroup/memory.current": "6000\n",
            },
            [800 * 1024, 1000],
        ),
        (
            {
                "proc/self/cgroup": VERSION_1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "8000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 500\n",
            },
            [800 * 1024, 1500],
        ),
    ],
)
def test_memory_that_is_left(files: dict[str, str], available: list[int], tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": SYSTEM, **files})
    assert list(malloc._available_bytes(tmp_path)) == available


@pytest.mark.parametrize(("processes", "available", "kept"), [(1, 1000, True), (1, 999, False), (2, 1000, False)])
def test_large_blocks_are_kept_if_the_memory_holds_twice_the_peak(
    processes: int, available: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1000))
    monkeypatch.setattr(malloc, "_available_bytes", lambda root: iter([10**12, available * 1024]))
    asked: list[bool] = []
    monkeypatch.setattr(malloc, "keep_freed_memory", lambda *, large: asked.append(large))
    malloc.keep_large_blocks_if_room(processes)
    assert asked == [True] * kept
