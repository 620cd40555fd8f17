"""Plan tool: prints the plan, writes its numbers, refuses impossible settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools.image_runs import classifier_config, masked_config
from tests.tools.test_train_net import tool

ROOT = Path(__file__).parents[2]
plan = tool("plan").main


def test_prints_every_part_of_the_plan(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(tiny), "--gpus", "4", "--gpu-memory", "80", "--gpu", "a100", "--images", "120"]
    assert plan([*arguments, "batch_former.gather=true"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "4 x NVIDIA A100 80GB, 80.0 GB each; 3 images each, 1 batch a step, float32",
        "Memory of a GPU: ",
        "averaged weights (train.ema)",
        "Steps: 12 images each, 10 an epoch of 120 images, 30 in 3 epochs",
        "s a step (estimated)",
        "Batch attention spans 12 images (with batch_former.gather 12, without 3); accumulation does not increase this",
        "Learning rate: published for 3 images a step (the config file, without overrides), here 12, x 4",
        "of gradients a step",
        "for batch_former.gather at the largest images",
        "Checkpoints: ",
        "Assumptions:",
    ):
        assert part in printed


def test_writes_its_numbers(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = ["--config", str(tiny), "--gpus", "2", "--gpu-memory", "0.01", "--seconds-per-step", "2"]
    assert plan([*arguments, "--json", str(file)]) == 0
    numbers = json.loads(file.read_text())
    assert numbers["fits"] is False
    memory = numbers["memory"]
    assert memory["total"] == pytest.approx(sum(value for name, value in memory.items() if name != "total"))
    assert numbers["available"] == pytest.approx(0.01 * 2**30)
    assert numbers["helps"][0]["needed"] < memory["total"]
    assert numbers["time"]["seconds_per_step"] == 2
    assert numbers["disk"]["total"] == numbers["disk"]["files"] * numbers["disk"]["file"]
    assert numbers["sequence"] == {"alone": 3, "gathered": 6, "used": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus must be greater than 0 and finite, got 0"),
        (["--gpus", "-1"], "--gpus must be greater than 0 and finite, got -1"),
        (["--gpus", "1", "--gpu-memory", "0"], "--gpu-memory must be greater than 0 and finite, got 0.0"),
        (["--gpus", str(2**70)], f"--gpus must be at most 1048576, got {2**70}"),
        (["--classes", str(2**62)], f"--classes must be at most 1048576, got {2**62}"),
        (["--images", str(2**62)], "--images must be at most"),
        (["--gpu-memory", "1e300"], "--gpu-memory must be at most 1048576, got 1e+300"),
        (["--gpu", "abacus"], "--gpu abacus is not known; known are h200"),
        (["train.batchsize=3"], "unknown key 'train.batchsize'"),
    ],
)
def test_bad_input_is_told_in_one_line(
    arguments: list[str], message: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(["--config", str(tiny), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "--json . is a folder: name the file to write"),
        ("pipe", "--json pipe is a FIFO and would be replaced"),
        ("/proc/plan.json", "--json /proc/plan.json cannot be written"),
        ("a\0b", "--json a\\x00b cannot be written"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_planning(
    name: str,
    message: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    before = set(tmp_path.rglob("*"))
    assert plan(["--config", str(tiny), "--json", name]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message}")
    assert printed.out == ""
    assert set(tmp_path.rglob("*")) == before
    assert Path("pipe").is_fifo()


def test_the_images_of_a_folder_are_counted(
    coco_folder: Callable[..., Any], tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = coco_folder(num_images=12, name="photos").images.parent
    monkeypatch.setattr("detr_bf.data.formats.readable", None)  # images that cannot be decoded are not looked for
    settings = [f"data.root={root}", "data.val_fraction=0.25", "train.batch_size=2", "train.ema.decay=auto"]
    settings.append("data.skip_unreadable=0.5")
    assert plan(["--config", str(tiny), "--gpus", "1", *settings]) == 0
    printed = capsys.readouterr().out
    assert "Steps: 2 images each, 4 an epoch of 9 images, " in printed
    assert "with 3 classes (--classes)" in printed
    absent = ["--config", str(tiny), "--gpus", "1", "data.root=absent"]
    assert plan(absent) == 2
    error = "error: without --images N and --classes N the data are counted: folder absent does not"
    assert capsys.readouterr().err.startswith(error)
    assert plan([*absent, "--images", "9", "--classes", "3"]) == 0


@pytest.mark.parametrize("make_config", [classifier_config, masked_config])
def test_what_is_no_detector_is_refused(
    make_config: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path)
    assert plan(["--config", str(config)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: file {config} is of the task ")
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


@pytest.mark.full
def test_a_measured_record_replaces_the_estimate(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measurement is made by the benchmark itself."""
    record = tmp_path / "step.json"
    command = [sys.executable, "benchmarks/step.py", "--device", "cpu", "--recipe", "small", "--rounds", "2"]
    command += ["--batch-sizes", "3", "--height", "64", "--width", "64", "--output", str(record)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert plan(["--config", str(tiny), "--measured", str(record)]) == 0
    median = json.loads(record.read_text())["rows"][0]["step"]["median"]
    seconds = median * 36 * 48 / 64**2  # short sides 32 and 40, 4 : 3
    assert f"{seconds:.3f} s a step (measured: small 64 x 64 in {record}" in capsys.readouterr().out


def test_without_a_config_the_defaults_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--gpus", "8", "train.batch_size=1", "--published-batch", "16"]) == 0
    assert "published for 16 images a step (--published-batch), here 8, x 0.5" in capsys.readouterr().out


@pytest.mark.full
def test_runs_by_itself_and_says_nothing_else(tiny: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tools/plan.py", "--config", str(tiny)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("1 x NVIDIA H100 80GB")
    assert done.stderr == ""
