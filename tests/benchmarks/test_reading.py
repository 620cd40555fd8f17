"""The benchmark of reading annotation files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reading
from detr_bf.data import coco
from detr_bf.data.coco import read_annotations


def test_the_file_is_valid_and_repeatable(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        reading.write_annotations(tmp_path / name, 3, objects=8)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    content = read_annotations(tmp_path / "a.json")
    assert (len(content.images), len(content.annotations), len(content.categories)) == (3, 24, 365)
    assert [annotation["id"] for annotation in content.annotations] == list(range(1, 25))


def test_a_measurement_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(coco, "LARGE_FILE", 1)
    reading.write_annotations(tmp_path / "a.json", 4, objects=8)
    reading.measure("columns", str(tmp_path / "a.json"), True)
    found = json.loads(capsys.readouterr().out)
    assert min(found[key] for key in ("read", "dataset", "checks")) > 0
    assert len(list((tmp_path / "home").rglob("*.columns"))) == 1


@pytest.mark.slow
def test_every_way_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "reading.json"
    assert reading.main(["--images", "50", "--rounds", "2", "--checks", "--output", str(output)]) == 0
    measured = json.loads(output.read_text())["measured"]
    assert list(measured) == list(reading.WAYS)
    assert all(len(rows) == 2 and min(row["read"] for row in rows) > 0 for rows in measured.values())
    assert "| objects | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--rounds", "1"], "--rounds must be"), (["--images", "0"], "--images and --objects must")]
)
def test_impossible_wishes_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reading.main(arguments) == 2
    assert said in capsys.readouterr().err
