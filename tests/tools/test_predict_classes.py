"""Prediction with a classifier's run, by tools/predict.py and detr_bf.load_classifier."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import detr_bf
from detr_bf.common.errors import InputError
from detr_bf.engine import load_checkpoint
from detr_bf.report import ProbableClasses, prediction_sheet
from tests.tools.image_runs import classifier_config, masked_config
from tests.tools.test_train_net import tool
from tools.train_net import main as train_net

NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu")

predict: Callable[[Sequence[str]], int] = tool("predict").main


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train a classifier with batch attention and seven classes; validation images have three sizes, one is grey."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    generator = torch.Generator().manual_seed(0)
    for number, name in enumerate(NAMES):
        for split, size in (("train", (20, 20)), ("train", (16, 30)), ("val", (18, 15 + number % 3))):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8).numpy()
            picture = Image.fromarray(pixels)
            (picture.convert("L") if name == "cat" else picture).save(folder / f"{size[0]}.png")
    settings = ["data.name=image_folder", f"data.root={tmp_path / 'images'}", "data.per_class=null"]
    settings += ["data.transforms.crop=resized", "data.transforms.eval_crop=0.8", "train.batch_size=14"]
    settings += ["plugins.batchformer_v2.enabled=true", "plugins.batchformer_v2.layers=all", "train.max_steps=2"]
    assert train_net(["--config", str(classifier_config(tmp_path)), *settings]) == 0
    return tmp_path / "run"


def test_predictions_are_those_of_the_evaluation(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    output, val = tmp_path / "found", tmp_path / "images" / "val"
    last = [str(run / "last.pt"), "--device", "cpu"]
    assert predict([*last, "--output", str(output), str(val)]) == 0
    lines = capsys.readouterr().out.splitlines()
    entries = json.loads((output / "predictions.json").read_text())
    with (run / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(entries) == len(rows) == 7
    assert [Path(entry["file"]).parent.name for entry in entries] == [row["class"] for row in rows]
    for line, entry, row in zip(lines[:-1], entries, rows, strict=True):
        best = entry["classes"][0]
        assert best["name"] == row["predicted"]
        assert best["score"] == pytest.approx(float(row["score"]), abs=1e-5)
        assert NAMES[best["category_id"]] == best["name"]
        assert len(entry["classes"]) == 5
        scores = [found["score"] for found in entry["classes"]]
        assert scores == sorted(scores, reverse=True)
        assert line.startswith(f"{entry['file']}: {best['name']} {best['score']:.1%}, ")
    assert lines[-1] == f"classes of 7 images, 7 of them on the sheet: {output}"
    assert (output / "sheet.png").stat().st_size > 1000
    for _ in range(2):
        assert predict([*last, "--output", str(val / "found"), str(val)]) == 0
    assert len(json.loads((val / "found" / "predictions.json").read_text())) == 7, "not its own sheet"


def test_a_predictor_in_code(run: Path, tmp_path: Path) -> None:
    predictor = detr_bf.load_classifier(run, device="cpu")
    assert predictor.class_map.names == NAMES
    files = sorted((tmp_path / "images" / "val").rglob("*.png"))
    alone = [predictor(file) for file in files]
    for found in alone:
        assert found.sum().item() == pytest.approx(1)
    for found, expected in zip(predictor.predict(files, batch_size=3), alone, strict=True):
        torch.testing.assert_close(found, expected)
    pixels = torch.from_numpy(np.array(Image.open(files[0]))).permute(2, 0, 1)
    assert torch.equal(predictor(pixels), alone[0])
    with pytest.raises(InputError, match="is of a classifier, expected a detector: use detr_bf"):
        detr_bf.load(run)


def test_a_threshold_leaves_classes_out(run: Path, tmp_path: Path) -> None:
    command = [str(run), "--output", str(tmp_path / "found"), str(tmp_path / "images" / "val")]
    assert predict([*command, "--threshold", "0.2"]) == 0
    some = json.loads((tmp_path / "found" / "predictions.json").read_text())
    assert all(found["score"] >= 0.2 for entry in some for found in entry["classes"])
    assert predict([*command, "--threshold", "1"]) == 0, "a sheet of images without classes"
    none = json.loads((tmp_path / "found" / "predictions.json").read_text())
    assert [entry["classes"] for entry in none] == [[]] * 7


def test_what_cannot_be_predicted(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = next((tmp_path / "images" / "val").rglob("*.png"))
    (tmp_path / "text.png").write_text("no image")
    assert train_net(["--config", str(masked_config(tmp_path)), "train.max_steps=1"]) == 0
    broken = load_checkpoint(run / "last.pt")
    broken.weights["head.bias"][1] = float("nan")
    broken.save(tmp_path / "broken.pt")
    capsys.readouterr()
    for arguments, said in (
        ([str(run), str(image), "--panoptic"], "is of a classifier, and --panoptic needs a detector"),
        ([str(run), str(tmp_path / "text.png")], "text.png cannot be used"),
        ([str(tmp_path / "mae"), str(image)], "is of a masked autoencoder, which knows no classes: train a classifier"),
        ([str(tmp_path / "broken.pt"), str(image)], "holds NaN or infinite weights"),
    ):
        assert predict(["--output", str(tmp_path / "found"), *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert re.match("error: ", printed.err.splitlines()[-1])
        assert said in printed.err


def test_a_detector_is_no_classifier(tiny: Path, tmp_path: Path) -> None:
    assert train_net(["--config", str(tiny), "train.max_steps=1"]) == 0
    with pytest.raises(InputError, match="is of a detector, expected a classifier: use detr_bf"):
        detr_bf.load_classifier(tmp_path / "run")


def test_the_sheet_shows_every_image_with_its_classes() -> None:
    image = torch.full((3, 20, 30), 200, dtype=torch.uint8)
    rows = [ProbableClasses(image, ("shirt", "coat of an unbelievably long name"), (0.75, 0.2), "a.png")] * 4
    one, four = (prediction_sheet(rows[:count]) for count in (1, 4))
    assert four.width > one.width
    assert four.height > one.height
    colours = dict(reversed(pair) for pair in one.getcolors(2**24))
    assert colours[0, 90, 160] == sum((round(score * 239) + 1) * 6 for score in (0.75, 0.2)), "bars in proportion"
    with pytest.raises(InputError, match="at least one image"):
        prediction_sheet([])
