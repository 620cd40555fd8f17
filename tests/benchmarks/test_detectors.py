"""Table of detectors, on a few tiny images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import detectors


@pytest.mark.slow  # full-size detectors
def test_every_row_with_and_without_batch_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--height", "64", "--width", "96", "--rounds", "2", "--device", "cpu"]
    recipes = ["detr/detr_r50", "deformable_detr/deformable_detr_r50_single_scale"]
    assert detectors.main([*size, "--recipes", *recipes, "--output", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["recipe"], row["batch_former"]) for row in rows] == [(r, b) for r in recipes for b in (False, True)]
    for without, with_it in zip(rows[::2], rows[1::2], strict=True):
        assert with_it["parameters"] - without["parameters"] == 395_776
        assert with_it["gflops"] > without["gflops"] > 1
        assert with_it["kept"] > without["kept"] > 1e6
    assert capsys.readouterr().out.count("\n| ") == len(rows)


def test_one_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert detectors.main(["--rounds", "1"]) == 2
    assert "--rounds must be 2 or more" in capsys.readouterr().err
