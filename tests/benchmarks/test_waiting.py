"""The benchmark of waiting threads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import waiting


@pytest.mark.slow
def test_every_way_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "waiting.json"
    assert waiting.main(["--busy", "0", "1", "--rounds", "2", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["busy"], list(row["seconds"])) for row in rows] == [(0, list(waiting.WAYS)), (1, list(waiting.WAYS))]
    assert all(len(times) == 2 and min(times) > 0 for row in rows for times in row["seconds"].values())
    assert "| 0 | default | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--rounds", "1"], "--rounds must be"), (["--busy", "-1"], "--busy must")]
)
def test_impossible_wishes_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert waiting.main(arguments) == 2
    assert said in capsys.readouterr().err
