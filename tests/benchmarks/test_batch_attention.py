"""Benchmark of batch attention against torch's, on few positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import batch_attention
from tests.kernels import needs_kernels


@pytest.fixture(autouse=True)
def _threads() -> None:
    """The benchmark sets the number of threads of the process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@needs_kernels
def test_every_comparison_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.json"
    arguments = ["--rounds", "2", "--positions", "20", "--batch-sizes", "2", "3", "--output", str(output)]
    assert batch_attention.main(arguments) == 0
    record = json.loads(output.read_text())
    found = [(row["case"], row["batch_size"], row["direction"]) for row in record["rows"]]
    directions = ("forward", "forward + backward")
    assert found == [(case, size, way) for case in ("core", "layer") for size in (2, 3) for way in directions]
    assert all(len(times) == 2 for seconds in record["seconds"].values() for times in seconds.values())
    assert capsys.readouterr().out.count("\n| ") == len(found)


@needs_kernels
def test_who_computes_something_else_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = batch_attention.batch_attention_packed
    monkeypatch.setattr(batch_attention, "batch_attention_packed", lambda *arguments: right(*arguments) * 1.01)
    assert batch_attention.main(["--rounds", "2", "--positions", "20"]) == 2
    assert "core: ours differs from torch's" in capsys.readouterr().err


def test_one_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch_attention.main(["--rounds", "1"]) == 2
    assert "--rounds must be 2 or more" in capsys.readouterr().err
