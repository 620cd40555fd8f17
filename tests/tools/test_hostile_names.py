"""Runs on data with hostile names, and runs whose pictures fail: exit code 0, results, and a warning."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from detr_bf.report import fonts
from tests.report.page import Page
from tests.tools.image_runs import classifier_config, masked_config
from tests.tools.test_train_net import train_net


def failing(*arguments: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_detector(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {3: "cat\n", 7: r"$\frac{$" + "\t\ud800", 90: "猫 <script>alert(1)</script>"}
    for split in ("train", "val"):
        annotations = tmp_path / split / "annotations.json"
        content = json.loads(annotations.read_text())
        for category in content["categories"]:
            category["name"] = names[category["id"]]
        image = content["images"][0]
        odd = "a\n\x1b[2J" + os.fsdecode(b"caf\xe9") + ".png"
        (tmp_path / split / "images" / image["file_name"]).rename(tmp_path / split / "images" / odd)
        image["file_name"] = odd
        annotations.write_text(json.dumps(content))
    run = tmp_path / "run"
    assert train_net(["--config", str(tiny), "train.max_steps=1", "report=true"]) == 0
    assert (run / "pictures" / "validation.png").is_file()
    assert Page((run / "report.html").read_text(encoding="utf-8")).tags.count("script") == 1
    assert "\x1b" not in (run / "log.txt").read_text(encoding="utf-8")
    no_font = fonts._entry_with(frozenset("猫")) is None  # on this machine
    assert ("pictures show their ids: #90 (猫" in (run / "log.txt").read_text(encoding="utf-8")) == no_font
    monkeypatch.setattr("detr_bf.tasks.outputs.comparison_sheet", failing)
    assert train_net(["--config", str(tiny), "train.max_steps=2", "--resume"]) == 0
    assert json.loads((run / "results.json").read_text())
    assert not (run / "pictures" / "validation.png").exists(), "not the picture of the previous evaluation"
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert "validation.png was not written: [Errno 28] No space left on device" in log


def test_a_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    generator = torch.Generator().manual_seed(0)
    for name in (r"$\frac{$", os.fsdecode(b"caf\xe9"), "=1+1", "猫", "a\nb"):
        for split in ("train", "val"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            pixels = torch.randint(256, (20, 20, 3), generator=generator, dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(folder / "1.png")
    settings = ["data.name=image_folder", f"data.root={tmp_path / 'images'}", "data.per_class=null"]
    settings += ["train.batch_size=5", "train.max_steps=1", "report=true"]
    assert train_net(["--config", str(classifier_config(tmp_path)), *settings]) == 0
    run = tmp_path / "run"
    for picture in ("validation.png", "confusion.png", "classes.svg"):
        assert (run / "pictures" / picture).is_file(), picture
    with (run / "predictions.csv").open(encoding="utf-8") as file:
        assert {row["class"] for row in csv.DictReader(file)} == {r"$\frac{$", r"caf\udce9", "'=1+1", "猫", r"a\nb"}


@pytest.mark.parametrize(
    ("config", "main", "drawing", "folder"),
    [
        (classifier_config, train_net, "detr_bf.classification.task.classification_sheet", "run"),
        (masked_config, train_net, "detr_bf.classification.task.reconstruction_sheet", "mae"),
    ],
)
def test_a_failing_picture_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: Callable[[Path], Path],
    main: Callable[[list[str]], int],
    drawing: str,
    folder: str,
) -> None:
    monkeypatch.setattr(drawing, failing)
    assert main(["--config", str(config(tmp_path)), "train.max_steps=1", "eval.pictures=2", "report=true"]) == 0
    run = tmp_path / folder
    assert "validation.png was not written: [Errno 28] No space left" in (run / "log.txt").read_text()
    assert (run / "evaluation.json").is_file()
    assert (run / "report.html").is_file()
