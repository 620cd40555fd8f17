"""Table of detectors, on a few tiny images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cases
import detectors
from detr_bf.acceleration import onednn
from detr_bf.assembly import build_model


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


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_flops_are_the_same_through_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ("backbone.name=resnet18", "hidden_dim=32", "feedforward_dim=32", "num_queries=12", "dropout=0")
    preset = cases.Preset(64, 96, 2, ("device=cpu", *(f"model.{setting}" for setting in tiny)))
    setting = cases.Setting(preset, torch.device("cpu"), rounds=2)
    model = build_model(preset.config(), cases.NUM_CLASSES)
    monkeypatch.setattr(onednn, "SMALLEST_PRODUCT", 0)
    found = []
    for faster in (False, True):
        monkeypatch.setattr(onednn, "FASTER", faster)
        found.append(detectors.flops(model, setting))
    assert found[0] == found[1] > 0
