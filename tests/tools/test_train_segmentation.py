"""Semantic segmentation on the command line: training, resumption, evaluation, prediction, analysis, conversion."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf import load, load_classifier
from detr_bf.commands import main as detr_bf
from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.engine import load_checkpoint
from detr_bf.tasks import task_of
from tests.segmentation.maps import NAMES, SIZE, TINY, pairs, settings_of, write_maps, write_panoptic_maps
from tests.tools.test_train_net import assert_same


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a tiny network on 24 images of three colours; the data are beside it."""
    folder = tmp_path_factory.mktemp("segmentation")
    write_maps(folder, count=24)
    settings = ["train.epochs=8", f"output_dir={folder / 'run'}"]
    assert train(folder, *settings) == 0
    return folder / "run"


def train(folder: Path, *arguments: str, panoptic: bool = False) -> int:
    return detr_bf(["train", str(config_file(folder)), *settings_of(folder, panoptic=panoptic), *TINY, *arguments])


def config_file(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text("task: segmentation\n")
    return path


def evaluation(folder: Path) -> dict[str, float]:
    content: dict[str, float] = json.loads((folder / "evaluation.json").read_text())
    return content


def test_training_learns_three_colours(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss_ce"] for record in records if "loss_ce" in record]
    assert np.mean(losses[-6:]) < 0.6 * np.mean(losses[:6])
    assert evaluation(trained)["mIoU"] > 0.8
    page = (trained / "report.html").read_text()
    assert "mIoU" in page
    assert all(name in page for name in NAMES)
    with Image.open(trained / "pictures/validation.png") as sheet:
        assert min(sheet.size) > 300


def test_it_resumes_to_the_same_bits_and_evaluates(tmp_path: Path) -> None:
    write_panoptic_maps(tmp_path, count=8)
    whole, parted, again = (tmp_path / name for name in ("whole", "parted", "again"))
    quiet = ("report=false", "eval.pictures=0", "train.ema.enabled=true")
    assert train(tmp_path, *quiet, f"output_dir={whole}", "train.max_steps=3", panoptic=True) == 0
    assert train(tmp_path, *quiet, f"output_dir={parted}", "train.max_steps=2", panoptic=True) == 0
    assert train(tmp_path, *quiet, f"output_dir={parted}", "train.max_steps=3", "--resume", panoptic=True) == 0
    straight, resumed = load_checkpoint(whole / "last.pt"), load_checkpoint(parted / "last.pt")
    assert_same(resumed.model, straight.model)
    assert_same(resumed.weights, straight.weights)
    named = f"init_from={whole / 'last.pt'}"
    assert train(tmp_path, *quiet, f"output_dir={again}", named, "--eval-only", panoptic=True) == 0
    assert evaluation(again) == evaluation(whole)


def test_a_dry_run_and_the_checks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_maps(tmp_path)
    assert train(tmp_path, "--dry-run", f"output_dir={tmp_path / 'run'}") == 0
    assert "steps: 4, 2 an epoch" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert detr_bf(["check", str(config_file(tmp_path)), *settings_of(tmp_path)]) == 0
    assert "train: 8 images, 3 classes" in capsys.readouterr().out
    Image.fromarray(np.zeros((*SIZE, 3), np.uint8)).save(tmp_path / "labels/train/0.png")
    assert detr_bf(["check", str(config_file(tmp_path)), *settings_of(tmp_path)]) == 2


def test_prediction_writes_pictures_and_maps(trained: Path, tmp_path: Path) -> None:
    for number, (image, _) in enumerate(pairs(2, seed=5, size=(30, 44))):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    out = tmp_path / "out"
    assert (
        detr_bf(["predict", str(trained), str(tmp_path / "0.png"), str(tmp_path / "1.png"), "--output", str(out)]) == 0
    )
    assert (out / "classes.txt").read_text().split() == list(NAMES)
    for number, (_, labels) in enumerate(pairs(2, seed=5, size=(30, 44))):
        with Image.open(out / f"maps/{number:04d}_{number}.png") as found:
            assert found.mode == "L"
            assert (np.asarray(found) == labels).mean() > 0.8
        with Image.open(out / f"{number:04d}_{number}.png") as picture:
            assert max(picture.size) >= 640


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--panoptic"], "is of a segmentation network, and --panoptic needs a detector with masks"),
        (["--threshold", "0.5"], "a segmentation network does not use --threshold"),
        (["--tile", "64", "8"], "a segmentation network does not use --tile"),
    ],
)
def test_prediction_refuses_options_of_detectors(
    options: list[str], message: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = trained.parent / "images/val/0.png"
    assert detr_bf(["predict", str(trained), str(image), "--output", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err


def test_python_functions_for_other_models_say_what_it_is(trained: Path) -> None:
    with pytest.raises(InputError, match="is of a segmentation network, expected a detector: use detr-bf predict"):
        load(trained)
    with pytest.raises(InputError, match="is of a segmentation network, expected a classifier"):
        load_classifier(trained)


def test_noise_and_blur_are_analysed(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["analyze", "corruptions", str(trained), "--output", str(tmp_path), "--images", "6"]
    assert detr_bf(command) == 0
    rows = list(csv.DictReader((tmp_path / "corruptions.csv").open()))
    assert [row["corruption"] for row in rows][:2] == ["none", "shot noise"]
    assert [int(row["repetitions"]) for row in rows] == [1, 5, 5, 5, 1, 1]
    assert all(row["images"] == "6" for row in rows)
    assert all((row["interval_95"] == "") == (row["repetitions"] == "1") for row in rows)
    assert (tmp_path / "corruptions.png").is_file()
    assert detr_bf([*command, "--split", "train"]) == 2
    assert detr_bf(["analyze", "fgsm", str(trained), "--output", str(tmp_path)]) == 2
    assert "is a run of the task segmentation, expected classification" in capsys.readouterr().err


def test_deployed_weights_have_no_second_head_and_evaluate_alike(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "plain.pth"
    assert detr_bf(["convert", str(trained), str(target), "--strip-auxiliary"]) == 0
    weights = torch.load(target, weights_only=True)
    weights = weights.get("model", weights)
    assert weights
    assert not any(name.startswith("auxiliary.") for name in weights)
    plain = [*TINY, "model.auxiliary_weight=0", *settings_of(trained.parent)]
    model, _ = task_of(load_config(None, plain, task="segmentation")).load_evaluated(target)
    kept = load_checkpoint(trained / "best.pt").weights
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_other_classes_and_one_image_a_batch_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_maps(tmp_path)
    (tmp_path / "classes.txt").write_text("red\ngreen\nyellow\n")
    named = f"init_from={trained / 'best.pt'}"
    assert train(tmp_path, named, "--eval-only", f"output_dir={tmp_path / 'run'}") == 2
    assert "trained on the classes red, green, blue, the data has red, green, yellow" in capsys.readouterr().err
    assert train(tmp_path, "loss.class_weights=[1, 2]", f"output_dir={tmp_path / 'other'}") == 2
    assert "loss.class_weights has 2 numbers for 3 classes" in capsys.readouterr().err
    assert train(tmp_path, "loss.class_weights=[1, -2, 1]", f"output_dir={tmp_path / 'other'}") == 2
    assert "loss.class_weights must be 0 or more, and one above 0" in capsys.readouterr().err
    assert train(tmp_path, "train.batch_size=1", f"output_dir={tmp_path / 'other'}") == 2
    assert "train.batch_size=1: the batch norm" in capsys.readouterr().err


def test_init_from_takes_the_rows_of_classes_by_name(trained: Path, tmp_path: Path) -> None:
    write_maps(tmp_path)
    (tmp_path / "classes.txt").write_text("blue\nred\nyellow\n")
    settings = [*settings_of(tmp_path), *TINY, f"init_from={trained / 'best.pt'}"]
    task = task_of(load_config(None, settings, task="segmentation"))
    classes = task.load_data().class_map
    model = task.build_model(classes.num_classes)
    task.initialize(model, classes)
    before = load_checkpoint(trained / "best.pt").weights["head.classify.1.weight"]
    rows = model.get_parameter("head.classify.1.weight")
    assert torch.equal(rows[0], before[2])
    assert torch.equal(rows[1], before[0])
