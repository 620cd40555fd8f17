"""Raw operators with inconsistent arguments: a clear exception, never a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from detr_bf.ops import library
from tests.kernels import CUDA_KERNELS, needs_kernels

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
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=CUDA_KERNELS.marks if name.endswith("CUDA") else ()) for name in CASES]
)
def test_a_hostile_call_is_refused(name: str, found: dict[str, str]) -> None:
    assert CASES[name][1] in found[name]


@needs_kernels
def test_random_hostile_calls_do_not_crash() -> None:
    ends = run("0", "600")
    assert sum(ends.values()) == 600
    assert ends["done"] > 40, "some changes are harmless"
    assert ends["refused"] > 400
