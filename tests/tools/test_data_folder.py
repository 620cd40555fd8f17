"""Training, evaluation and checks of a Pascal VOC folder through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from detr_bf.commands import main
from detr_bf.config import saved_config
from detr_bf.data.formats import read_folder, read_split
from detr_bf.data.formats.splitting import divided
from tests.tools.conftest import TINY

XML = (
    "<annotation><size><width>64</width><height>48</height></size>{objects}</annotation>",
    "<object><name>{name}</name><bndbox><xmin>{x}</xmin><ymin>5</ymin><xmax>40</xmax><ymax>30</ymax></bndbox></object>",
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write twelve images of two classes with XML files beside them, and a config of a tiny detector."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    root = tmp_path / "cells"
    root.mkdir()
    for number in range(12):
        Image.effect_noise((64, 48), 90).convert("RGB").save(root / f"{number:02d}.JPG")
        objects = "".join(XML[1].format(name=name, x=2 + number) for name in ("red", "white")[: 1 + number % 2])
        (root / f"{number:02d}.xml").write_text(XML[0].format(objects=objects))
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("data:\n", f"data:\n  root: {root}\n") + f"output_dir: {tmp_path / 'run'}\n")
    return path


def results(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / "results.json").read_text())
    return found


def test_a_run_on_a_fold_is_evaluated_on_the_same_images(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = ["data.folds=3", "train.max_steps=1", "eval.max_detections=3"]
    validated = []
    for fold in range(3):
        target = f"output_dir={run}_{fold}"
        assert main(["train", str(config), *settings, f"data.fold={fold}", f"seed={fold}", target]) == 0
        found = results(Path(f"{run}_{fold}"))
        validated.append({entry["image_id"] for entry in found})
        saved = Path(f"{run}_{fold}") / "config.yaml"
        assert saved_config(saved).data.fold == fold
    assert [len(images) for images in validated] == [4, 4, 4]
    assert set().union(*validated) == set(range(1, 13))
    assert main(["evaluate", str(saved), f"output_dir={run}_2"]) == 0
    assert {entry["image_id"] for entry in results(run.with_name("run_2") / "eval-best")} == validated[2]
    capsys.readouterr()
    assert main(["check", str(config), "data.val_fraction=0.25"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{config.parent / 'cells'}: Pascal VOC, 12 images, splits: none\n")
    assert "\nto learn from: 9 images, " in printed
    assert "train: 9 images" in printed
    assert "val: 3 images" in printed


def test_a_folder_without_a_validation_split_is_refused_before_training(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config)]) == 2
    assert "take the validation images from the training images with data.val_fraction" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("changed", ["data.split_seed=1", "data.val_fraction=0.5", "new images"])
def test_a_run_is_not_resumed_with_validation_images_that_were_trained_on(
    changed: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(config), "data.val_fraction=0.25", "eval.pictures=0"]
    assert main([*command, "train.max_steps=1"]) == 0
    given = [changed]
    if "=" not in changed:
        given, root = [], tmp_path / "cells"
        for number in range(12, 20):
            Image.effect_noise((64, 48), 90).convert("RGB").save(root / f"{number}.JPG")
            objects = XML[1].format(name="white", x=number)
            (root / f"{number}.xml").write_text(XML[0].format(objects=objects))
        read_folder.cache_clear()
        read_split.cache_clear()
        divided.cache_clear()
    capsys.readouterr()
    assert main([*command, *given, "train.max_steps=2", "--resume"]) == 2
    said = capsys.readouterr().err
    assert "validation would use images that were trained on" in said
    assert "another output_dir" in said
