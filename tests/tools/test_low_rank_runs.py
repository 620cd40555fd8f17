"""Low-rank fine-tuning on the command line: resuming, and what reads its checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import detr_bf
from detr_bf.commands import command_main
from detr_bf.config import config_from_dict
from detr_bf.engine import load_checkpoint
from detr_bf.interop.weights import read_weights
from detr_bf.tasks import task_of
from tests.tools.test_every_detector import DETECTORS
from tests.tools.test_train_net import assert_same, predict, train_net

RTDETR = [*DETECTORS["rtdetr"], "batch_former.enabled=false", "data.transforms.size_divisor=1"]
LORA = "freeze.lora=4"


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> list[str]:
    """Train a detector for two steps, and return a command that starts from it."""
    command = ["--config", str(tiny), *RTDETR, "eval.pictures=0", "train.accumulate=2"]
    assert train_net([*command, f"output_dir={tmp_path / 'start'}", "train.max_steps=2"]) == 0
    return [*command, f"init_from={tmp_path / 'start'}"]


def test_a_run_resumes_to_the_same_bits_and_its_weights_are_merged(
    start: list[str], tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    capsys.readouterr()
    assert train_net([*start, LORA, f"output_dir={whole}", "train.max_steps=5"]) == 0
    assert "low-rank changes of 26 linear layers; " in capsys.readouterr().err
    assert train_net([*start, LORA, f"output_dir={parted}", "train.max_steps=2"]) == 0
    assert train_net([*start, f"output_dir={parted}", "--resume"]) == 2
    assert "error: freeze.lora=null: the run was started with freeze.lora=4; resume" in capsys.readouterr().err
    assert train_net([*start, LORA, f"output_dir={parted}", "train.max_steps=5", "--resume"]) == 0
    straight, resumed = load_checkpoint(whole / "last.pt"), load_checkpoint(parted / "last.pt")
    assert straight.training is not None
    assert resumed.training is not None
    assert_same(resumed.model, straight.model)
    assert_same(resumed.ema, straight.ema)
    assert_same(resumed.training["optimizer"], straight.training["optimizer"])

    before = load_checkpoint(tmp_path / "start" / "best.pt").weights
    assert set(straight.weights) == set(before)
    changed = {name for name, value in straight.weights.items() if not torch.equal(value, before[name])}
    trained = {name for name in changed if not name.endswith(("running_mean", "running_var", "_tracked"))}
    assert not any(re.match(r"backbone\.|(de|en)coder\.(encoder\.)?layers\..*(norm|bias)", name) for name in trained)
    assert {name.split(".")[0] for name in trained} == {"tokens", "encoder", "decoder"}
    assert {"encoder.encoder.layers.0.feed_forward.expand.weight", "decoder.heads.classes.0.bias"} <= trained
    assert_same(read_weights(whole / "last.pt"), straight.weights)
    config = config_from_dict(straight.config)
    step = task_of(config).build_step(straight.model, 3, torch.device("cpu"), torch.float32, "capture")
    assert_same(dict(step.model.state_dict()), dict(straight.model))

    again, best = tmp_path / "again", tmp_path / "best"
    assert train_net([*start[:-1], f"init_from={whole / 'last.pt'}", f"output_dir={again}", "--eval-only"]) == 0
    assert (again / "results.json").read_text() == (whole / "results.json").read_text(), "as evaluated in training"
    image = str(sorted((tmp_path / "val" / "images").iterdir())[0])
    assert predict([str(whole), "--output", str(best), "--threshold", "0", image]) == 0
    (entry,) = json.loads((best / "predictions.json").read_text())
    assert entry["objects"]


@pytest.mark.full
def test_the_exported_file_has_the_outputs_of_the_merged_detector(start: list[str], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    assert train_net([*start, LORA, f"output_dir={tmp_path / 'run'}", "train.max_steps=2"]) == 0
    detector = detr_bf.load(tmp_path / "run")
    assert detector.export(tmp_path / "model.onnx", batch=1, size=(64, 64)), "compared with torch"
    detector.save(tmp_path / "saved")
    again = detr_bf.load(tmp_path / "saved")
    assert_same(dict(again.model.state_dict()), dict(load_checkpoint(tmp_path / "run" / "best.pt").weights))


def test_what_it_needs_is_told_before_the_first_step(
    start: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"output_dir={tmp_path / 'run'}"
    assert train_net([*start[:-1], LORA, run]) == 2
    assert "freeze.lora=4 trains small changes of a trained detector, and there is none" in capsys.readouterr().err
    assert train_net([*start, LORA, run, "model.encoder_layers=2"]) == 2
    assert "does not hold all weights that are frozen" in capsys.readouterr().err
    assert train_net([*start, LORA, run, "model.num_queries=5", "train.max_steps=1"]) == 0, "queries are trained"


def test_finetune_passes_the_rank_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(tmp_path), "--model", "small", "--lora", "0", "--output", str(tmp_path / "run")]
    assert command_main("finetune")(command) == 2
    assert "freeze.lora must be greater than 0 and at most 1024, got 0" in capsys.readouterr().err
