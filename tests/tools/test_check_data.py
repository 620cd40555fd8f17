"""Data checks of every task on the command line; the findings themselves are tested in tests/data/checks."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from detr_bf.assembly.data import build_train_data
from detr_bf.commands import main as cli
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Target
from detr_bf.config import DetectionConfig, load_config
from detr_bf.report import Augmented, augmented_sheet
from detr_bf.tasks import augmented, detection
from detr_bf.tasks.augmented import _versions, sheet_path
from tests.tools.image_runs import classifier_config, contrastive_config, masked_config
from tests.tools.test_train_net import tool

run_tool: Callable[[Sequence[str]], int] = tool("check_data").main


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two classes of two images in both splits."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    generator = torch.Generator().manual_seed(0)
    for place in ("train/cat/a", "train/cat/b", "train/dog/a", "train/dog/b", "val/cat/a", "val/dog/a"):
        file = tmp_path / "images" / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        to_pil_image(torch.randint(256, (3, 9, 9), generator=generator, dtype=torch.uint8)).save(file)
    return tmp_path / "images"


@pytest.mark.parametrize("make_config", [classifier_config, masked_config, contrastive_config])
def test_the_task_is_that_of_the_file(
    make_config: Callable[[Path], Path], folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--config", str(make_config(tmp_path)), "data.name=image_folder", f"data.root={folders}"]
    assert run_tool(command) == 0
    assert "train: 4 images, 2 classes" in capsys.readouterr().out
    broken = folders / "train" / "cat" / "b.png"
    broken.write_bytes(broken.read_bytes()[:40])
    assert run_tool(command) == 2
    out = capsys.readouterr().out
    assert "file-unreadable" in out
    assert str(broken) in out


def test_hostile_image_files_are_findings(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ghostscript is not started, a FIFO is not read, and a name does not forge lines of the table."""
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a program was started"))
    cats = folders / "train" / "cat"
    Image.new("RGB", (9, 9)).save(cats / "eps.jpg", format="EPS")
    os.mkfifo(cats / "pipe.jpg")
    with (cats / "sparse.jpg").open("wb") as file:
        file.truncate(30 * 2**30)
    (cats / "x\n0 errors, 0 warnings\x1b[2J.jpg").write_bytes(b"")
    (cats / os.fsdecode(b"caf\xe9.jpg")).write_bytes((cats / "a.png").read_bytes()[:40])
    assert (
        run_tool(["--config", str(classifier_config(tmp_path)), "data.name=image_folder", f"data.root={folders}"]) == 2
    )
    out = capsys.readouterr().out
    assert re.search(r"error +train +file-unreadable +5 ", out)
    assert [line for line in out.splitlines() if line.startswith("0 errors")] == []
    assert all(line.isprintable() for line in out.splitlines())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.root=" + "x" * 300, "data.root must be a path on this machine with names of at most 255 bytes"),
        ("data.root=/dev/null", "there is no folder"),
        ("data.train=" + "y" * 300, "data.train must be a path on this machine with names of at most 255 bytes"),
    ],
)
def test_names_that_cannot_be_are_bad_input(
    setting: str, said: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["data.name=image_folder", f"data.root={folders}", setting]
    assert run_tool(["--config", str(classifier_config(tmp_path)), *given]) == 2
    assert f"error: {said}" in capsys.readouterr().err


AUGMENTED = "data.augment={mosaic: 0.5, scale_jitter: 0.5, photometric_distort: 0.5, zoom_out: 0.5, iou_crop: 0.5}"


@pytest.fixture
def detector(tmp_path: Path, coco_folder: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that check training data of six images."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    data = coco_folder(num_images=6)
    return [f"data.train.images={data.images}", f"data.train.annotations={data.annotations}", "data.workers=0"]


@pytest.mark.full
def test_training_images_are_drawn_with_each_augmentation(
    detector: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*detector, AUGMENTED, "data.mixup.prob=1", "--images", "3", "--show-augmented"]
    assert run_tool([*command, str(tmp_path / "sheets" / "a.png")]) == 0
    names = "original, mosaic, scale_jitter, photometric_distort, zoom_out, iou_crop, as trained, with mixup"
    assert f"3 training images, {names}: {tmp_path}/sheets/a.png" in capsys.readouterr().out
    first = (tmp_path / "sheets" / "a.png").read_bytes()
    with Image.open(tmp_path / "sheets" / "a.png") as sheet:
        assert sheet.width > 8 * 400
        assert sheet.height > 3 * 300
    assert run_tool([*command, str(tmp_path / "sheets" / "a.png")]) == 0, "it replaces its own sheet"
    assert (tmp_path / "sheets" / "a.png").read_bytes() == first, "the same images each time"
    assert run_tool([*detector, "--show-augmented", str(tmp_path / "sheets")]) == 0
    assert "4 training images, original, as trained: " in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "sheets").iterdir()) == ["a.png", "augmented.png"]


def test_a_sheet_replaces_no_other_file(
    detector: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photograph = tmp_path / "photograph.png"
    Image.new("RGB", (9, 9)).save(photograph)
    before = photograph.read_bytes()
    assert run_tool([*detector, "--show-augmented", str(photograph)]) == 2
    assert "exists and was not written by this command" in capsys.readouterr().err
    assert photograph.read_bytes() == before


def test_files_in_place_of_the_sheet_are_not_read_whole(
    detector: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(30 * 2**30)
    assert run_tool([*detector, "--show-augmented", str(large)]) == 2
    assert "large.png exists and was not written by this command" in capsys.readouterr().err

    def unreadable(path: Path, mode: str = "r") -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("detr_bf.tasks.augmented.Path.open", unreadable)
    with pytest.raises(InputError, match=r"large\.png exists and was not written by this command"):
        sheet_path(large)


@pytest.mark.parametrize("number", [1, 3])
def test_images_of_the_sheet_are_mixed_in_pairs(
    number: int, detector: list[str], coco_folder: Callable[..., SimpleNamespace]
) -> None:
    """One image, too, is mixed, with the last one of the training data; with no other there is nothing to mix."""
    config = load_config(None, [*detector, "data.mixup.prob=1", "data.transforms.random_crop=0"])
    assert isinstance(config, DetectionConfig)
    data = build_train_data(config)
    found, titles = _versions(config, data, [0] if number == 1 else [0, 2, 5])
    rows = [list(row) for row in found]
    assert len(rows) == number
    assert titles == ["original", "as trained", "with mixup"]
    trained, mixed = ([row[titles.index(name)] for row in rows] for name in ("as trained", "with mixup"))
    _, last, *_ = next(_versions(config, data, [len(data) - 1])[0])
    for one, before, both in zip(trained, [last, *trained], mixed, strict=False):
        assert both.labels.tolist() == [*one.labels.tolist(), *before.labels.tolist()]
        assert not torch.equal(both.image, one.image)
    single = coco_folder(num_images=1, objects=3, name="single")
    paths = [f"data.train.images={single.images}", f"data.train.annotations={single.annotations}"]
    config = load_config(None, [*paths, "data.mixup.prob=1"])
    assert isinstance(config, DetectionConfig)
    _, alone, pair = next(_versions(config, build_train_data(config), [0])[0])
    assert torch.equal(alone.image, pair.image)


def test_the_sheet_keeps_no_version_of_full_size(detector: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown, living = augmented._shown, []

    def counted(image: Tensor, target: Target) -> Augmented:
        gc.collect()
        assert sum(each() is not None for each in living) <= 1, "the one that was drawn last"
        made = shown(image, target)
        living.append(weakref.ref(made.image))
        return made

    monkeypatch.setattr(augmented, "_shown", counted)
    config = load_config(None, [*detector, AUGMENTED, "data.mixup.prob=1"])
    assert isinstance(config, DetectionConfig)
    gc.collect()
    gc.freeze()  # what is there before is not searched each time
    try:
        rows, titles = _versions(config, build_train_data(config), range(3))
        augmented_sheet(rows, titles, ["a", "b", "c"])
    finally:
        gc.unfreeze()
    assert len(living) == 3 * 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--show-augmented", "sheet.jpg"], "expected a folder, or a file with the suffix .png"),
        (["--show-augmented", "s", "--images", "0"], "--images must be from 1 to 100, got 0"),
        (["--images", "2"], "give both"),
    ],
)
def test_options_of_the_sheet_that_make_no_sense(
    arguments: list[str], said: str, detector: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tool([*detector, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_only_images_of_detectors_are_drawn(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config", str(classifier_config(tmp_path)), "data.name=image_folder", f"data.root={folders}"]
    assert run_tool([*command, "--show-augmented", str(tmp_path / "sheet")]) == 2
    assert "this config is task=classification" in capsys.readouterr().err


def test_the_task_may_be_inherited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classifier_config(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: classifier.yaml\nseed: 3\n")
    assert run_tool(["--config", str(tmp_path / "mine.yaml")]) == 0
    assert re.search(r"train: [\d,]+ images, 10 classes; from .*digits", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.name=image_folder", "data.root=nowhere"], "nowhere"),
        (["data.colour=1"], "unknown key 'data.colour'"),
        (["task=detection"], "override 'task=detection' is of the task detection"),
    ],
)
def test_bad_input_is_one_message(
    settings: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tool(["--config", str(classifier_config(tmp_path)), *settings]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert said in printed.err


def _as_val(arguments: list[str]) -> list[str]:
    return [each.replace("data.train.", "data.val.") for each in arguments if each.startswith("data.train.")]


def _unread(*_: object, **__: object) -> NoReturn:
    raise AssertionError("the data were read")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.name=rtdetr", "loss.classification=cross_entropy"], "set loss.classification=focal"),
        (["model.name=rtdetr", "loss.classification=focal", "model.rtdetr.points=[4,4]"], "rtdetr.points=[4, 4]"),
        (["model.hidden_dim=32", "model.heads=5"], "heads"),
        (["batch_former.enabled=true", "batch_former.layers=[90]"], "batch_former"),
        (["model.backbone.name=resnet18", "model.backbone.dilation=true"], "dilation"),
        (["freeze.detector=true"], "it needs model.masks=true"),
    ],
)
def test_settings_that_contradict_each_other_are_told_before_the_data_are_read(
    settings: list[str],
    said: str,
    detector: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("examine", "read_annotations", "build_train_data"):
        monkeypatch.setattr(detection, name, _unread)
    for command in (["check"], ["train"], ["train", "--dry-run"]):
        command.append("detr_r50")
        assert cli([*command, *detector, *_as_val(detector), *settings]) == 2
        assert said in capsys.readouterr().err


def test_weights_that_a_new_run_needs_are_asked_for_before_the_data_are_read(
    detector: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(detection, "examine", _unread)
    assert cli(["train", "detr_r50", *detector, *_as_val(detector), "freeze.detector=true", "model.masks=true"]) == 2
    assert "needs init_from=RUN_OR_FILE" in capsys.readouterr().err
