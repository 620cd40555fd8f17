"""Detectors with plug-ins in the encoder on the command line: train, resume, evaluate, predict, fine-tune."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from detr_bf.engine import load_checkpoint
from tests.tools.test_every_detector import DETECTORS
from tests.tools.test_train_net import assert_same, predict, records, train_net

CONTEXT = ("plugins.context_broadcasting.enabled=true", "plugins.context_broadcasting.scaled=true")
LOCAL = "plugins.relative_localization."
BOTH = (*CONTEXT, "plugins.context_broadcasting.layers=all", f"{LOCAL}enabled=true", f"{LOCAL}weight=0.3")


@pytest.mark.parametrize(
    "name", ["detr", *(pytest.param(name, marks=pytest.mark.slow) for name in ("smca_multi_scale", "deformable_detr"))]
)
def test_trains_resumes_evaluates_predicts(name: str, tiny: Path, tmp_path: Path) -> None:
    """Config with BatchFormerV2, averaged weights and recomputed layers."""
    sizes = ["data.transforms.short_sides=[160]", "data.transforms.max_size=240", "data.transforms.random_crop=0"]
    larger = [] if name == "detr" else sizes  # the coarsest level needs two cells
    settings = [*DETECTORS[name], *BOTH, *larger, "train.recompute_encoder=true", "eval.pictures=0"]
    command = ["--config", str(tiny), *settings]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train_net([*command, f"output_dir={whole}", "train.max_steps=6"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=2"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=6", "--resume"]) == 0
    straight, resumed = load_checkpoint(whole / "last.pt"), load_checkpoint(parted / "last.pt")
    assert_same(resumed.model, straight.model)
    assert_same(resumed.weights, straight.weights)
    (scale,) = (value for key, value in straight.weights.items() if "context_broadcasting" in key)
    assert scale.abs().sum() > 0, "it starts at 0 and is trained"
    assert all(0 < record["loss_localization"] < 0.6 for record in records(whole / "metrics.jsonl", "train"))
    trained = (whole / "results.json").read_text()
    for number, setting in enumerate((f"{LOCAL}variant=all", f"{LOCAL}enabled=false")):
        overrides = [setting, f"init_from={whole / 'last.pt'}", f"output_dir={tmp_path / str(number)}", "--eval-only"]
        assert train_net([*command, *overrides]) == 0
        assert (tmp_path / str(number) / "results.json").read_text() == trained, "localization is used in training only"
    image = sorted((tmp_path / "val" / "images").iterdir())[0]
    assert predict([str(whole), "--output", str(tmp_path / "found"), "--threshold=0", str(image)]) == 0
    (entry,) = json.loads((tmp_path / "found" / "predictions.json").read_text())
    assert len(entry["objects"]) > 0


def test_weights_go_from_and_to_detectors_without_plugins(tiny: Path, tmp_path: Path) -> None:
    command = ["--config", str(tiny), "eval.pictures=0", "train.max_steps=1", "optimizer.lr=0", "train.ema.decay=0"]
    chain = {"plugged": BOTH, "plain": (), "again": BOTH}
    source: list[str] = []
    for name, settings in chain.items():
        assert train_net([*command, *settings, *source, f"output_dir={tmp_path / name}"]) == 0
        source = [f"init_from={tmp_path / name / 'last.pt'}"]
    plugged, plain = (load_checkpoint(tmp_path / name / "last.pt").model for name in ("plugged", "plain"))
    kept = [key for key in plain if key.startswith("encoder.layers")]
    assert kept
    assert all(torch.equal(plain[key], plugged[key]) for key in kept)
    assert "in the file, not in the model, left out (7): encoder.plugins." in (tmp_path / "plain/log.txt").read_text()
    assert "not in the file, freshly initialised (7): encoder.plugins." in (tmp_path / "again/log.txt").read_text()


def test_what_cannot_be_is_told_before_the_run_begins(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_net(["--config", str(tiny), f"{LOCAL}enabled=true"]) == 2
    assert f"{LOCAL}weight must be given" in capsys.readouterr().err
    assert train_net(["--config", str(tiny), *BOTH, "plugins.context_broadcasting.layers=[1]"]) == 2
    assert "plugins.context_broadcasting.layers=[1]: the model has 1 blocks" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
