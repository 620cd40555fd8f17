"""Experiments: each variant runs once and gives a table and a record; finished runs are not repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from detr_bf.config import load_config
from experiments import CONFIGS, EXPERIMENTS, main

QUICK = ("train.max_steps=1", "eval.pictures=0", "data.check=false")


def run(tmp_path: Path, *arguments: str) -> int:
    return main([*arguments, "--runs", str(tmp_path / "runs"), *QUICK])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_variants_differ_from_their_file_in_one_thing(name: str) -> None:
    path = CONFIGS / "experiments" / f"{name}.yaml"
    base = load_config(path, task="classification")
    assert {path.stem for path in path.parent.glob("*.yaml")} == set(EXPERIMENTS)
    for variant, settings in EXPERIMENTS[name].variants.items():
        config = load_config(path, settings)
        assert (config == base) == (settings == ())
        if variant == "cutmix":
            config.data.mix = base.data.mix
        assert (config.data, config.train, config.optimizer) == (base.data, base.train, base.optimizer), variant
        assert config.model == base.model


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("size", ["small", "large"])
def test_settings_of_every_data_set_and_size_are_known(name: str, size: str) -> None:
    experiment = EXPERIMENTS[name]
    for data, settings in experiment.data.items():
        overrides = [*settings, *(experiment.large if size == "large" else ())]
        config = load_config(CONFIGS / "experiments" / f"{name}.yaml", overrides, task="classification")
        assert config.data.name == data
        assert config.train.eval_every == config.train.epochs, "only the last weights are measured"


def test_unfinished_runs_are_trained_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    arguments = ("long_tail", "--data", "digits", "--jobs", "2", "--seeds", "1", "--output", str(record))
    assert run(tmp_path, *arguments) == 0
    folder = tmp_path / "runs" / "long_tail_digits_small"
    first = {path: path.stat().st_mtime_ns for path in folder.rglob("last.pt")}
    assert len(first) == 3
    assert run(tmp_path, *arguments, "--picture", str(tmp_path / "dots.png")) == 0
    assert {path: path.stat().st_mtime_ns for path in first} == first, "finished runs are not repeated"
    printed = capsys.readouterr().out
    assert "| balanced_softmax_batchformer |" in printed
    assert "few (%)" in printed
    content = json.loads(record.read_text())
    assert [(row["variant"], row["seed"]) for row in content["runs"]] == [
        (variant, 0) for variant in EXPERIMENTS["long_tail"].variants
    ]
    found = json.loads((folder / "cross_entropy" / "seed_0" / "evaluation.json").read_text())
    assert content["runs"][0]["top1"] == found["top1"]
    assert content["machine"]["torch"]
    assert (tmp_path / "dots.png").stat().st_size > 1000
    assert run(tmp_path, *arguments, "optimizer.lr=0.5") == 2
    assert "with other settings" in capsys.readouterr().err


def test_bad_input_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "long_tail", "--data", "garment_pairs") == 2
    assert "--data must be one of fashion_mnist, digits, mnist" in capsys.readouterr().err
    assert run(tmp_path, "long_tail", "--seeds", "0") == 2
    assert "1 or more" in capsys.readouterr().err
    assert run(tmp_path, "long_tail", "--data", "digits", "--seeds", "1", "model.name=nothing") == 2
    assert "timm" in capsys.readouterr().err
