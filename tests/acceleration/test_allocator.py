"""Freed memory that is kept, and the memory that the system and control groups have left."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from detr_bf.acceleration import allocator

MIB = 2**20
FAULTS = """
import resource, sys, threading, torch
from detr_bf.acceleration.allocator import keep_freed_memory
count, mib, large, in_a_thread = map(int, sys.argv[1:])
keep_freed_memory()
if large:
    keep_freed_memory(large=True)

def work():
    global faults
    for number in range(16):
        if number == 8:  # until then the heap still grows
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(mib * 2**18) for _ in range(count)]
        del blocks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if in_a_thread:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
print(faults)
"""
FORK = """
import sys, torch
from detr_bf.data.loader import BatchLoader
from detr_bf.acceleration.allocator import keep_freed_memory

def resident(process):
    lines = open(f"/proc/{process}/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024

keep_freed_memory(large=True)
block = torch.ones(2**26)
del block
before = resident("self")
batches = iter(BatchLoader(range(4), num_workers=int(sys.argv[1])))
next(batches)
print(before - resident("self"))
"""
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is set")


@pytest.mark.default_tier("variables0-20-8-False-True-False")
@needs_glibc
@pytest.mark.skipif(LARGE_PAGES.is_file() and "[always]" in LARGE_PAGES.read_text(), reason="new memory in large pages")
@pytest.mark.parametrize("in_a_thread", [False, True])
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
    variables: dict[str, str], count: int, mib: int, large: bool, kept: bool, in_a_thread: bool
) -> None:
    if in_a_thread and not large:
        pytest.skip("depends on the arena of the thread")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    # new memory comes in small pages, as torch requests it by default
    environment.pop("THP_MEM_ALLOC_ENABLE", None)
    command = [sys.executable, "-c", FAULTS, str(count), str(mib), str(int(large)), str(int(in_a_thread))]
    result = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    share = int(result.stdout) / (8 * count * mib * MIB / os.sysconf("SC_PAGE_SIZE"))
    assert share < 0.5 if kept else share > 0.9


@pytest.mark.full
@needs_glibc
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_with_workers_releases_what_is_kept(workers: int) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FORK, str(workers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 200) == (workers > 0)  # MiB of 256


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


SYSTEM = "MemTotal:  900 kB\nMemAvailable:  800 kB\nHugePages_Total:       0\n"
VERSION_2 = "0::/work.slice/job.scope\n"
VERSION_1 = "5:cpuset:/docker/f3\n4:cpu,memory:/docker/f3\n"


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
    assert list(allocator._available_bytes(tmp_path)) == available


@pytest.mark.parametrize(("processes", "available", "kept"), [(1, 1000, True), (1, 999, False), (2, 1000, False)])
@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="the memory that is left is known on Linux only")
def test_large_blocks_are_kept_if_the_memory_holds_twice_the_peak(
    processes: int, available: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1000))
    monkeypatch.setattr(allocator, "_available_bytes", lambda root: iter([10**12, available * 1024]))
    asked: list[bool] = []
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda *, large: asked.append(large))
    allocator.keep_large_blocks_if_possible(processes)
    assert asked == [True] * kept
