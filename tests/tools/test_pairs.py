"""The demo of pairs in its quick form: sample data, a few steps, an evaluation that reads references."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from detr_bf.commands import main

CONFIG = str(Path(__file__).parents[2] / "configs" / "pairs.yaml")
QUICK = ("train.epochs=1", "train.batch_size=4", "model.backbone.weights=none", "device=cpu", "eval.pictures=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two steps on the data in ``pairs`` beside it."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DETR_BF_HOME", str(folder / "home"))
        small = ("--num-train", "8", "--num-val", "4", "--image-size", "64")
        assert main(["sample-data", "pairs", "--output", str(folder / "pairs"), *small]) == 0
        assert main(["train", CONFIG, *QUICK, *data_of(folder / "pairs"), f"output_dir={folder / 'run'}"]) == 0
    return folder / "run"


def data_of(folder: Path) -> list[str]:
    settings = [f"data.{split}.images={folder}" for split in ("train", "val")]
    settings += [f"data.{split}.annotations={folder}/{split}.json" for split in ("train", "val")]
    return [*settings, "data.transforms.short_sides=[64]", "data.transforms.eval_short_side=64"]


def test_it_trains_and_evaluates(run: Path) -> None:
    assert (run / "best.pt").is_file()
    assert (run / "report.html").is_file()
    statistics = json.loads((run / "data_statistics.json").read_text())
    assert [statistics["splits"][split]["references"]["images"] for split in ("train", "val")] == [8, 4]


def test_evaluation_reads_the_references(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    templates = run.parent / "pairs" / "val_templates"
    hidden = templates.rename(templates.with_name("hidden"))
    try:
        assert main(["evaluate", str(run)]) == 2
        assert "val_templates" in capsys.readouterr().err
    finally:
        hidden.rename(templates)
    assert main(["evaluate", str(run)]) == 0


def test_the_same_config_without_references(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", CONFIG, *QUICK, *data_of(run.parent / "pairs"), "--dry-run"]
    assert main([*command, f"output_dir={run.parent / 'on'}"]) == 0
    assert "images with a reference" in capsys.readouterr().err
    off = ["data.reference=none", "batch_former.enabled=false", f"output_dir={run.parent / 'off'}"]
    assert main([*command, *off]) == 0
    assert "images with a reference" not in capsys.readouterr().err
