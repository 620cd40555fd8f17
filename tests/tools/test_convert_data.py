from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from pycocotools.coco import COCO

from detr_bf.assembly import build_train_data, data_source
from detr_bf.commands import command_main
from detr_bf.config import load_config
from detr_bf.data.coco import read_annotations

SIDES = ("xmin", "ymin", "xmax", "ymax")
main = command_main("convert-data")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a YOLO folder of 12 images of two classes, in two subfolders."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "pets"
    for number in range(12):
        split = "train" if number < 8 else "more/test"
        image, label = (folder / kind / split for kind in ("images", "labels"))
        image.mkdir(parents=True, exist_ok=True)
        label.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40 + number, 30), 80).convert("RGB").save(image / f"{number:02d}.png")
        (label / f"{number:02d}.txt").write_text(f"{number % 2} 0.5 0.5 0.5 0.5\n" * (1 + number % 3))
    (folder / "classes.txt").write_text("dog\ncat\n")
    return folder


def test_splits_become_files_that_train_as_the_folder(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(root), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--split", "train", "--split", "more/test"]) == 0
    printed = capsys.readouterr().out
    assert "train.json: 8 images, 15 objects\n  cat: 8 objects in 4 images\n  dog: 7 objects in 4 images" in printed
    assert main(arguments) == 0
    assert [len(COCO(tmp_path / "out" / f"{name}.json").imgs) for name in ("train", "more_test", "all")] == [8, 4, 12]
    one = load_config(None, [f"data.root={root}", "data.train.split=train"])
    other = load_config(None, [f"data.train.images={root}", f"data.train.annotations={tmp_path}/out/train.json"])
    one, other = (build_train_data(config) for config in (one, other))
    assert (one.image_ids, one.file_names, one.sizes) == (other.image_ids, other.file_names, other.sizes)
    assert one.class_map == other.class_map
    assert one._boxes.equal(other._boxes)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--folds", "3", "--fold", "2"], ["data.folds=3", "data.fold=2"]),
        (["--val-fraction", "0.25", "--split-seed", "5"], ["data.val_fraction=0.25", "data.split_seed=5"]),
        (["--folds", "2", "--fold", "0", "--split", "train"], ["data.folds=2", "data.train.split=train"]),
    ],
)
def test_divisions_are_those_of_training(root: Path, tmp_path: Path, options: list[str], settings: list[str]) -> None:
    assert main([str(root), "--output", str(tmp_path / "out"), *options]) == 0
    config = load_config(None, [f"data.root={root}", *settings])
    for split in ("train", "val"):
        written = json.loads((tmp_path / "out" / f"{split}.json").read_text())
        given = read_annotations(data_source(config, split).annotations)
        assert written["images"] == given.images
        assert written["annotations"] == given.annotations


@pytest.mark.parametrize(
    "options", [[], ["--split", "train"], ["--val-fraction", "0.5"], ["--folds", "2", "--fold", "0"]]
)
def test_references_are_kept(root: Path, tmp_path: Path, options: list[str]) -> None:
    assert main([str(root), "--output", str(tmp_path / "boards")]) == 0
    content = json.loads((tmp_path / "boards" / "all.json").read_text())
    for image in content["images"]:
        image |= {"template": f"plain/{image['id']}.png", "group": image["id"] % 3}
    (root / "train.json").write_text(json.dumps(content))
    assert main([str(root), "--format", "coco", "--output", str(tmp_path / "out"), *options]) == 0
    for path in (tmp_path / "out").iterdir():
        for image in json.loads(path.read_text())["images"]:
            assert (image["template"], image["group"]) == (f"plain/{image['id']}.png", image["id"] % 3)


def test_crowds_are_named_by_the_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "of them are {} (iscrowd 1): not trained on, and ignored in evaluation"
    for form, kind in (("coco", "crowds"), ("voc", "difficult objects")):
        folder = tmp_path / form
        folder.mkdir()
        Image.new("RGB", (40, 30)).save(folder / "a.png")
        if form == "voc":
            sides = "".join(f"<{side}>{value}</{side}>" for side, value in zip(SIDES, (1, 1, 9, 9), strict=True))
            one = f"<object><name>dog</name><difficult>1</difficult><bndbox>{sides}</bndbox></object>"
            other = one.replace("<difficult>1</difficult>", "").replace(">9<", ">8<")
            (folder / "a.xml").write_text(f"<annotation>{one}{other}</annotation>")
        else:
            annotation = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 8, 8], "iscrowd": 1}
            other = {**annotation, "id": 2, "bbox": [1, 1, 7, 7], "iscrowd": 0}
            image, category = {"id": 1, "file_name": "a.png"}, {"id": 1, "name": "dog"}
            content = {"images": [image], "annotations": [annotation, other], "categories": [category]}
            (folder / "train.json").write_text(json.dumps(content))
        assert main([str(folder), "--output", str(tmp_path / f"{form} out")]) == 0
        assert f"  1 {said.format(kind)}" in capsys.readouterr().out


def test_files_are_replaced_only_when_asked(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(root), "--output", str(tmp_path), "--folds", "2", "--fold", "1"]
    (tmp_path / "val.json").write_text("mine")
    assert main(arguments) == 2
    assert "val.json exists: give --overwrite" in capsys.readouterr().err
    assert not (tmp_path / "train.json").exists()
    assert (tmp_path / "val.json").read_text() == "mine"
    assert main([*arguments, "--overwrite"]) == 0
    assert len(json.loads((tmp_path / "val.json").read_text())["images"]) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--folds", "1", "--fold", "0"], "expected 2 folds or more"),
        (["--folds", "3", "--fold", "3"], "--folds 3 --fold 3"),
        (["--folds", "100", "--fold", "3"], "cannot be divided into 100 parts"),
        (["--val-fraction", "1.5"], "--val-fraction is 1.5"),
        (["--val-fraction", "nan"], "--val-fraction is nan"),
        (["--split", "none"], "has no split none"),
        (["--format", "voc"], "no images with labels"),
    ],
)
def test_bad_options(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main([str(root), "--output", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_data_with_errors_are_not_converted(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "images" / "train" / "03.png").write_bytes(b"no image")
    arguments = [str(root), "--output", str(tmp_path / "out"), "--split", "train", "--split", "more/test"]
    assert main(arguments) == 1
    told = capsys.readouterr().out
    assert re.search(r"error +train +file-unreadable +1 .*images/train/03\.png", told)
    assert "nothing is written" in told
    assert not (tmp_path / "out").exists()
    assert main(arguments[:3] + arguments[5:]) == 0, "the other split has no error"
