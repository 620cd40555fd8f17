"""Raw operators with inconsistent arguments: a clear exception, never a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from detr_bf.ops import library
from tests.kernels import needs_kernels

if library.DECLARED:
    from tests.ops.hostile import CASES
else:
    CASES = {}

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> Any:
    """Return the output of :mod:`tests.ops.hostile` in a separate process."""
    command = [sys.executable, "-m", "tests.ops.hostile", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ended with {done.returncode} in this call:\n{done.stderr[-2000:]}"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return run("CASES")


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_call_is_refused(name: str, found: dict[str, str]) -> None:
    if name.endswith("CUDA") and library.PROBLEMS["cuda"] is not None:
        pytest.skip("no kernels for CUDA here")
    assert CASES[name][1] in found[name]


@needs_kernels
def test_random_hostile_calls_do_not_crash() -> None:
    ends = run("0", "600")
    assert sum(ends.values()) == 600
    assert ends["done"] > 40, "some changes are harmless"
    assert ends["refused"] > 400
