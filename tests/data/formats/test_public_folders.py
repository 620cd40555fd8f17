"""Folders in the forms of public tools: boxes as the tool stored them, or a refusal with a way out."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

from detr_bf.commands import command_main
from detr_bf.data.formats import read_folder
from tests.data.formats.public_folders import FOLDERS, PublicFolder
from tests.data.formats.yolo_folders import NAMED_FILES, YOLO_FOLDERS

DOCS = Path(__file__).parents[3] / "docs" / "data.md"
READ = [each for each in FOLDERS if each.boxes is not None]
REFUSED = [each for each in FOLDERS if each.message is not None]

convert_data = command_main("convert-data")


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))


def built(folder: PublicFolder, tmp_path: Path) -> Path:
    root = tmp_path / "set"
    root.mkdir()
    folder.build(root)
    return root


@pytest.mark.parametrize("folder", READ, ids=[each.name for each in READ])
def test_boxes_of_a_public_folder(folder: PublicFolder, tmp_path: Path) -> None:
    root = built(folder, tmp_path)
    content = read_folder(root).content
    files = {image["id"]: PurePosixPath(image["file_name"]).name for image in content.images}
    names = {category["id"]: category["name"] for category in content.categories}
    found = Counter(
        (files[a["image_id"]], names[a["category_id"]], *(round(value, 3) for value in a["bbox"]))
        for a in content.annotations
    )
    assert folder.boxes is not None
    assert set(files.values()) == set(folder.boxes)
    assert found == Counter((file, *box) for file, boxes in folder.boxes.items() for box in boxes)
    assert all((root / image["file_name"]).is_file() for image in content.images)
    assert convert_data([str(root), "--output", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("folder", REFUSED, ids=[each.name for each in REFUSED])
def test_refusal_of_a_public_folder(folder: PublicFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.message is not None
    assert convert_data([str(built(folder, tmp_path)), "--output", str(tmp_path / "out")]) in (1, 2)
    told = capsys.readouterr()
    assert re.search(folder.message, told.out + told.err)
    assert not (tmp_path / "out").exists()


def test_the_guide_lists_all_public_folders() -> None:
    folders = [*FOLDERS, *YOLO_FOLDERS, *NAMED_FILES]  # the last two are read in test_yolo_and_roboflow.py
    assert len(folders) >= 40
    assert all((each.boxes is None) != (each.message is None) for each in folders)
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| (read|refused).* \|$", DOCS.read_text(encoding="utf-8"), re.M)
    assert rows == [(each.tool, each.name, "read" if each.boxes is not None else "refused") for each in folders]
