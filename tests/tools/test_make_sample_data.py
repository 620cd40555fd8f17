from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools/make_sample_data.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)


def test_digits_from_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "digits"
    done = run("digits", "--output", str(output), "--num-train", "2", "--num-val", "1", "--image-size", "64")
    assert done.returncode == 0, done.stderr
    assert str(output) in done.stdout
    assert "Composites" in done.stdout
    assert "2/2" in done.stderr  # the progress bar
    assert len(list((output / "train").iterdir())) == 2


@pytest.mark.full
def test_scenes_from_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "scenes"
    done = run("scenes", "--output", str(output), "--num-train", "2", "--num-val", "1", "--image-size", "64")
    assert done.returncode == 0, done.stderr
    assert "train.json, train_panoptic.json, val.json, val_panoptic.json and their images" in done.stdout
    assert len(list((output / "train_panoptic").iterdir())) == 2


@pytest.mark.full
def test_pairs_from_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "pairs"
    small = ("--output", str(output), "--num-train", "2", "--num-val", "1", "--image-size", "64")
    done = run("pairs", *small, "--contrast", "40")
    assert done.returncode == 0, done.stderr
    assert "train.json, val.json and their images" in done.stdout
    assert "MNIST" not in done.stdout
    assert len(list((output / "train_templates").iterdir())) == 2


@pytest.mark.parametrize("name", ["digits", "scenes", "pairs"])
def test_bad_values_exit_with_2_and_one_line(tmp_path: Path, name: str) -> None:
    done = run(name, "--output", str(tmp_path / "out"), "--image-size", "8")
    assert done.returncode == 2
    assert "image_size is 8 pixels" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
