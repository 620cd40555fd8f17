from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from detr_bf.classification.checks import examine_images
from detr_bf.classification.data import LabelledSplits, array_split, class_map_of
from detr_bf.classification.sources import read_splits
from detr_bf.data.checks.annotations import Report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lists of four training and two validation images of two classes."""
    for number in range(6):
        Image.new("RGB", (6, 4), (number, 10, 20)).save(tmp_path / f"{number}.png")
    write(tmp_path, [(0, 0), (1, 1), (2, 0), (3, 1)], [(4, 0), (5, 1)])
    return tmp_path


def write(folder: Path, train: list[tuple[int, int]], val: list[tuple[int, int]]) -> None:
    for name, lines in (("train.txt", train), ("val.txt", val)):
        (folder / name).write_text("".join(f"{number}.png {label}\n" for number, label in lines))


def report(folder: Path, classify: bool = True) -> Report:
    splits = read_splits("list", str(folder), "train.txt", "val.txt")
    return examine_images(splits, classify=classify, cache_dir=folder / "cache", workers=2)


def found(folder: Path, classify: bool = True) -> list[tuple[str, str, str, int]]:
    return [(f.severity, f.split, f.code, f.count) for f in report(folder, classify).findings]


def test_good_data_has_nothing_to_say(folder: Path) -> None:
    assert found(folder) == []
    assert str(report(folder)) == (
        f"train: 4 images, 2 classes; from {folder / 'train.txt'}\n"
        f"val: 2 images, 2 classes; from {folder / 'val.txt'}\n"
        "0 errors, 0 warnings"
    )


def test_files_that_are_missing_or_broken(folder: Path) -> None:
    (folder / "1.png").unlink()
    (folder / "5.png").write_bytes(b"broken")
    assert found(folder) == [("error", "train", "file-missing", 1), ("error", "val", "file-unreadable", 1)]
    assert f"{folder / '5.png'}: it cannot be decoded" in str(report(folder))


def test_files_listed_twice_and_in_both_splits(folder: Path) -> None:
    write(folder, [(0, 0), (1, 1), (0, 0), (0, 0)], [(4, 0), (1, 1)])
    (folder / "5.png").write_bytes((folder / "0.png").read_bytes())
    assert found(folder) == [
        ("warning", "train", "file-repeated", 2),
        ("warning", "train, val", "train-val-overlap", 1),
    ]
    write(folder, [(0, 0), (1, 1)], [(5, 0), (4, 1)])
    [finding] = report(folder).findings
    assert finding.example == f"{folder / '5.png'} is {folder / '0.png'}", "the same content under another name"


def test_a_single_class_is_an_error_for_classifiers_alone(folder: Path) -> None:
    write(folder, [(0, 0), (1, 0)], [(4, 0), (5, 0)])
    assert found(folder) == [("error", "train", "single-class", 1)]
    assert report(folder).findings[0].example == "0"
    assert found(folder, classify=False) == []


def test_a_file_with_two_labels_is_an_error_for_classifiers_alone(folder: Path) -> None:
    write(folder, [(0, 0), (1, 1), (2, 1), (0, 1), (1, 0)], [(4, 0), (5, 1)])
    assert found(folder) == [
        ("error", "train", "file-of-two-classes", 2),
        ("warning", "train", "file-repeated", 2),
    ]
    assert report(folder).findings[0].example == f"{folder / '0.png'}: labels 0, 1"
    assert found(folder, classify=False) == [("warning", "train", "file-repeated", 2)]


def test_an_image_in_two_classes_under_two_names(folder: Path) -> None:
    for copy, original in ((2, 0), (3, 0), (4, 0), (5, 1)):
        (folder / f"{copy}.png").write_bytes((folder / f"{original}.png").read_bytes())
    for number in (6, 7, 8):
        Image.new("RGB", (6, 4), (number, 10, 20)).save(folder / f"{number}.png")
    write(folder, [(0, 0), (1, 1), (2, 0), (3, 1), (4, 2), (5, 0)], [(6, 0), (7, 1), (8, 2)])
    [finding] = report(folder).findings
    assert (finding.severity, finding.code, finding.count) == ("warning", "image-of-two-classes", 3)
    names = [str(folder / f"{number}.png") for number in range(6)]
    assert finding.example == (
        f"{names[0]} (label 0) is {names[3]} (label 1); {names[0]} (label 0) is {names[4]} (label 2); "
        f"{names[1]} (label 1) is {names[5]} (label 0)"
    )
    assert found(folder, classify=False) == []


def test_labels_that_training_does_not_know(folder: Path) -> None:
    write(folder, [(0, 0), (1, 1)], [(4, 0), (5, 7)])
    assert found(folder) == [
        ("error", "val", "label-outside", 1),
        ("warning", "val", "class-without-images", 1),
    ]
    assert "5.png: label 7, 2 classes" in str(report(folder))


def test_classes_without_images(tmp_path: Path) -> None:
    for part, name in (("train", "a"), ("train", "b"), ("val", "b"), ("val", "a")):
        (tmp_path / part / name).mkdir(parents=True)
    Image.new("RGB", (6, 4)).save(tmp_path / "train/a/1.png")
    Image.new("RGB", (6, 5)).save(tmp_path / "val/b/1.png")
    splits = read_splits("image_folder", str(tmp_path), "train", "val")
    findings = examine_images(splits, cache_dir=tmp_path / "cache").findings
    assert [(f.severity, f.split, f.code, f.example) for f in findings] == [
        ("error", "train", "class-without-images", "1 (b)"),
        ("warning", "val", "class-without-images", "0 (a)"),
    ]


def test_images_in_memory_have_no_files(tmp_path: Path) -> None:
    pixels = torch.zeros(3, 4, 4, dtype=torch.uint8)
    train, val = (array_split(pixels, torch.tensor(labels), "numbers") for labels in ([0, 1, 0], [1, 0, 2]))
    splits = LabelledSplits(train, val, class_map_of(["a", "b"]))
    [finding] = examine_images(splits, cache_dir=tmp_path).findings
    assert (finding.code, finding.example) == ("label-outside", "image 2: label 2, 2 classes")
    assert not list(tmp_path.iterdir())
