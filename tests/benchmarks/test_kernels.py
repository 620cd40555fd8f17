"""Kernels against references end to end, on a tiny image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cases
import kernels
from detr_bf.ops import library
from tests.kernels import needs_kernels


@pytest.mark.full
@needs_kernels
def test_one_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    usual = cases.training_step
    monkeypatch.setattr(cases, "training_step", lambda *args: (seen.append(library.PROBLEMS["cpu"]), usual(*args)))
    size = ["--height", "64", "--width", "96", "--rounds", "2", "--device", "cpu"]
    recipe = "deformable_detr/deformable_detr_r50_single_scale"
    assert kernels.main([*size, "--recipes", recipe, "--output", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["training step", "inference"]
    assert {problem is None for problem in seen} == {True, False}, "both must run"
    assert library.PROBLEMS["cpu"] is None


def test_one_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--rounds", "1"]) == 2
    assert "--rounds must be 2 or more" in capsys.readouterr().err
