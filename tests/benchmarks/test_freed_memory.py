"""The benchmark of freed memory that is kept."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import freed_memory

FOLDER = Path(freed_memory.__file__).parent
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
IN_A_PROCESS = """
import sys
import torch
import freed_memory
freed_memory.call_of = lambda case: lambda: [torch.ones(2**24).shape for _ in range(8)]
freed_memory.measure("small", sys.argv[1])
"""


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is set")
@pytest.mark.skipif(LARGE_PAGES.is_file() and "[always]" in LARGE_PAGES.read_text(), reason="new memory in large pages")
@pytest.mark.parametrize("way", freed_memory.WAYS)
def test_pages_and_peak_of_each_way(way: str) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "THP_"))}
    variables["PYTHONPATH"] = os.pathsep.join((str(FOLDER), str(FOLDER.parent)))
    command = [sys.executable, "-c", IN_A_PROCESS, way]
    found = json.loads(subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout)
    block = 4 * 2**24
    share = found["pages"] / (8 * block / os.sysconf("SC_PAGE_SIZE"))
    assert share < 0.5 if way == freed_memory.ALL else 0.9 < share < 1.1
    assert found["peak"] > block
    assert found["seconds"] > 0


@pytest.mark.slow
def test_every_way_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "freed.json"
    assert freed_memory.main(["--rounds", "2", "--cases", "DETR, inference", "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert [len(row["measured"][way]) for way in freed_memory.WAYS] == [2, 2, 2]
    assert "| DETR, inference | all | " in capsys.readouterr().out


def test_too_few_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert freed_memory.main(["--rounds", "1"]) == 2
    assert "--rounds must be" in capsys.readouterr().err
