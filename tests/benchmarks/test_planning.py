"""The benchmark of the planner's estimates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import planning


@pytest.mark.slow
def test_times_and_memory_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "planning.json"
    assert planning.main(["--rounds", "2", "--cases", "DETR", "--output", str(output)]) == 0
    content = json.loads(output.read_text())
    assert min(content["rates"][rate] for rate in ("float32", "tf32", "bandwidth")) > 0
    (row,) = content["rows"]
    assert row["case"] == "DETR"
    assert 0.5 < row["time"]["median"] < 2  # the baseline against itself
    assert row["planned_bytes"] == pytest.approx(row["allocated_bytes"], rel=0.05)
    assert 0.5 < row["planned_bytes"] / row["resident_bytes"] < 2
    assert "| DETR | " in capsys.readouterr().out


def test_too_few_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning.main(["--rounds", "1"]) == 2
    assert "--rounds must be" in capsys.readouterr().err
