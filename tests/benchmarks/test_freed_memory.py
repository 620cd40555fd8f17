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
IN_A_PROCESS = """
import json, sys
import torch
import freed_memory
freed_memory.CASES["small"] = ("", 0, 0, 0, False)
freed_memory.call_of = lambda case: lambda: torch.ones(2**24)
sys.exit(freed_memory.main(["--rounds", "2", "--cases", "small", "--output", sys.argv[1]]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is set")
def test_pages_and_peaks_of_each_way(tmp_path: Path) -> None:
    output = tmp_path / "freed.json"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(FOLDER), str(FOLDER.parent)))}
    command = [sys.executable, "-c", IN_A_PROCESS, str(output)]
    done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    assert "| small | all | " in done.stdout
    (row,) = json.loads(output.read_text())["rows"]
    block = 4 * 2**24
    pages = block // os.sysconf("SC_PAGE_SIZE")
    assert min(row["pages"]["default"] + row["pages"]["to 32 MiB"]) > 0.9 * pages
    assert max(row["pages"]["all"]) < 0.1 * pages
    assert min(peak for peaks in row["peak_bytes"].values() for peak in peaks) > block


def test_too_few_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert freed_memory.main(["--rounds", "1"]) == 2
    assert "--rounds must be" in capsys.readouterr().err
