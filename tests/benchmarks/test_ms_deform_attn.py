"""Benchmark of deformable attention against other implementations, on few queries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ms_deform_attn as benchmark
from detr_bf.common.errors import InputError
from tests.kernels import needs_kernels


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SHAPES", ((8, 10), (4, 5)))
    monkeypatch.setattr(benchmark, "STARTS", (0, 80))
    monkeypatch.setattr(benchmark, "CELLS", 100)


@needs_kernels
@pytest.mark.parametrize("scaling", [False, True])
def test_all_cases(scaling: bool, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    arguments = ["--rounds", "2", "--batch-sizes", "1", "2", "--output", str(tmp_path / "rows.json")]
    try:
        assert benchmark.main(arguments + ["--scaling"] * scaling) == 0
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    found = {(row["case"], row["batch_size"], row["direction"]) for row in rows}
    assert len(found) == 3 * 2 * 2
    pairs = {(row["contestant"], row["baseline"]) for row in rows}
    assert (("2 threads", "1 threads") if scaling else ("detr_bf", "grid_sample")) in pairs


def test_a_peer_that_computes_something_else_is_refused() -> None:
    contestants = benchmark.peers(torch.device("cpu"))
    contestants["wrong"] = lambda v, x, w: contestants["grid_sample"](v, x, w) * 1.01
    with pytest.raises(InputError, match="wrong differs from the reference"):
        benchmark.check(contestants, torch.device("cpu"))


def test_local_samples_lie_near_their_query() -> None:
    _, locations, weights = benchmark.make_inputs("encoder_local", 1, torch.float32, torch.device("cpu"))
    sizes = torch.tensor([(width, height) for height, width in benchmark.SHAPES])
    cells = (locations - benchmark._cell_centres()[:, None, None, None]) * sizes[:, None]
    assert 0.8 * benchmark.REACH / 2 < cells.std() < 1.2 * benchmark.REACH / 2
    torch.testing.assert_close(weights.flatten(3).sum(-1), torch.ones(1, 100, 8))


@pytest.mark.full
@needs_kernels
def test_memory_can_be_kept() -> None:
    """Run in a separate process, because malloc keeps the setting."""
    script = str(Path(benchmark.__file__))
    command = [sys.executable, script, "--keep-memory", "--cases", "decoder", "--batch-sizes", "1", "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "detr_bf / grid_sample" in done.stdout
