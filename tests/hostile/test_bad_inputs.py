"""Bad inputs (every fifth case in ``make test-full``, all with ``-m slow``), and tests of the runner itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.faulty import FAULTS, RAISED

SCRIPT = Path(__file__).with_name("bad_inputs.py")
EVERY = 5
SECONDS = 20  # limit of a call in parallel with other tests; alone it is 10

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux to confine its cases")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the verdicts on the cases of faulty.py, by title."""
    path = tmp_path_factory.mktemp("faulty") / "verdicts.json"
    ended = run("--module", "faulty", "--seconds", 1, "--json", path)
    assert ended.returncode == 1, ended.stderr
    return {verdict["case"]: verdict for verdict in json.loads(path.read_text())}


@pytest.mark.parametrize("name", [*FAULTS, *RAISED])
def test_a_fault_is_found(name: str, faulty: dict[str, Any]) -> None:
    expected = (FAULTS | RAISED)[name][1]
    assert any(expected in fault for fault in faulty[f"faulty/{name}"]["faults"]), faulty[f"faulty/{name}"]


def test_a_case_that_cannot_be_built_is_broken(faulty: dict[str, Any]) -> None:
    [fault] = faulty["faulty/a broken case"]["faults"]
    assert "the case itself is broken: RuntimeError: cannot be built" in fault


def test_what_is_right_passes(faulty: dict[str, Any]) -> None:
    right = {title: verdict["faults"] for title, verdict in faulty.items() if title.startswith("right/")}
    assert len(right) == 4
    assert not any(right.values()), right


def test_the_part_that_ci_runs_has_more_than_300_cases() -> None:
    listed = run("--list", "--every", EVERY)
    assert listed.returncode == 0, listed.stderr
    titles = listed.stdout.splitlines()
    assert len(titles) > 300
    groups = {
        "annotations",
        "panoptic",
        "images",
        "classifiers",
        "checkpoints",
        "configs",
        "folders",
        "commands",
        "api",
    }
    assert {title.partition("/")[0] for title in titles} >= groups


@pytest.mark.full
def test_bad_inputs() -> None:
    ended = run("--every", EVERY, "--seconds", SECONDS)
    assert ended.returncode == 0, ended.stdout[-30_000:] + ended.stderr[-3000:]


@pytest.mark.slow
def test_all_bad_inputs() -> None:
    ended = run()
    assert ended.returncode == 0, ended.stdout[-30_000:] + ended.stderr[-3000:]
