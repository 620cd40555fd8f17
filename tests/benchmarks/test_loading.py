"""The benchmark of evaluation and loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import loading

Factory = Callable[..., SimpleNamespace]


def test_evaluations_agree_and_every_way_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "evaluation.json"
    assert loading.main(["evaluation", "--count", "20", "--rounds", "2", "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    ways = ["pycocotools", "metrics", "ours, first", "ours", "errors", "ours + errors"]
    assert [row["way"] for row in written["rows"]] == ways
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in written["rows"])
    assert len(written["numbers"]["ours"]) == 12
    assert written["identical"]
    assert "2,000 detections" in capsys.readouterr().out


def test_random_detections_are_plausible_and_the_same_every_time() -> None:
    content, detections = loading.random_detections(300)
    assert json.dumps(loading.random_detections(300)[0]) == json.dumps(content)
    assert [len(image.scores) for image in detections] == [loading.DETECTIONS] * 300
    areas = [annotation["area"] for annotation in content["annotations"]]
    assert 6 < len(areas) / 300 < 8.6
    assert 0.3 < sum(area < 32**2 for area in areas) / len(areas) < 0.5
    assert 0.15 < sum(area > 96**2 for area in areas) / len(areas) < 0.35


def test_loader_without_detr(coco_folder: Factory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = coco_folder(num_images=3), tmp_path / "loader.json"
    paths = ["--images", str(data.images), "--annotations", str(data.annotations)]
    assert loading.main(["loader", *paths, "--workers", "0", "--rounds", "2", "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert written["count"] == 2
    assert [(row["workers"], list(row["seconds"])) for row in written["rows"]] == [(0, ["ours", "ours, normalised"])]
    assert "| 0 | ours | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evaluation", "--rounds", "1"], "--rounds must be"),
        (["evaluation", "--count", "0"], "--count must be"),
        (["loader"], "needs --images"),
        (["loader", "--images", "a", "--annotations", "b", "--batch-size", "0"], "--batch-size must be"),
    ],
)
def test_impossible_wishes_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert loading.main(arguments) == 2
    assert said in capsys.readouterr().err
