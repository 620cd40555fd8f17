"""Section about the data of a detector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from detr_bf.common.errors import InputError
from detr_bf.data.checks.statistics import describe_splits
from detr_bf.report.data import data_section
from tests.data.checks.test_statistics import split, thing
from tests.report.page import Page


def document(*names: str) -> dict[str, Any]:
    sizes = dict.fromkeys(range(30), (640, 480))
    parts = {
        "train": split("train", sizes, [thing(i, 10 + 10 * (i % 3 == 0), 50, 50) for i in range(30)]),
        "val": split("val", sizes, [thing(i, 20, 200, 200, iscrowd=int(i == 0)) for i in range(20)]),
    }
    return describe_splits([parts[name] for name in names])


def page(folder: Path, content: Any) -> Page:
    (folder / "data_statistics.json").write_text(json.dumps(content))
    return Page("<html>" + "".join(data_section(folder)) + "</html>")


def test_both_splits_are_shown_with_their_classes(tmp_path: Path) -> None:
    shown = page(tmp_path, document("train", "val"))
    start = shown.texts.index("validation")
    assert shown.texts[start + 1 : start + 8] == ["30", "11", "19", "1", "0.0", "0.0", "100.0"]
    start = shown.texts.index("class2")
    assert shown.texts[start + 1 : start + 7] == ["10", "10", "33.3", "19", "19", "100.0"]
    assert shown.texts.index("class1") < start, "classes with many training objects come first"
    assert any(text.startswith("Train and val differ in size of the objects / image: median") for text in shown.texts)
    assert len(shown.addresses) == 1
    svg = (tmp_path / "pictures" / "data.svg").read_text()
    assert "<svg" in svg


@pytest.mark.parametrize("name", ["train", "val"])
def test_one_split_is_enough(tmp_path: Path, name: str) -> None:
    shown = page(tmp_path, document(name))
    assert {"training", "validation"} & set(shown.texts) == {{"train": "training", "val": "validation"}[name]}
    assert len(shown.addresses) == 1
    assert not any("differ" in text for text in shown.texts)


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    content = document("train", "val")
    content["classes"][0]["name"] = "<script>x</script> $a$"
    content["statements"] = ["classes of val without training objects: <b>"]
    shown = page(tmp_path, content)
    assert not {"script", "b"} & set(shown.tags)
    assert "<script>x</script> $a$" in shown.texts


def test_a_run_without_statistics_says_so(tmp_path: Path) -> None:
    (found,) = data_section(tmp_path)
    assert "no statistics of its data: data_statistics.json is missing" in found


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"splits": 3, "statements": []}'])
def test_damaged_statistics_are_told(tmp_path: Path, damage: str) -> None:
    (tmp_path / "data_statistics.json").write_text(damage)
    with pytest.raises(InputError, match=r"data_statistics\.json is damaged"):
        list(data_section(tmp_path))
