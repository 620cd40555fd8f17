"""Benchmark of linear layers through oneDNN, with few rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import linear
from detr_bf.acceleration import onednn
from tests.kernels import needs_kernels


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark sets the number of threads of the process, and the smallest product."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(onednn, "SMALLEST_PRODUCT", onednn.SMALLEST_PRODUCT)
    yield
    torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_every_comparison_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "FASTER", True)
    output = tmp_path / "rows.json"
    arguments = ["--rounds", "2", "--batch-sizes", "2", "3", "--cases", "256 to 256", "--output", str(output)]
    assert linear.main(arguments) == 0
    found = [(row["batch_size"], row["direction"]) for row in json.loads(output.read_text())["rows"]]
    assert found == [(rows, way) for rows in (2, 3) for way in ("forward", "forward + backward")]


def test_processors_without_a_difference_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onednn, "FASTER", False)
    assert linear.main([]) == 2
    assert "are torch's own" in capsys.readouterr().err
