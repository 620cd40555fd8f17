"""Reading metrics and drawing them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from detr_bf.errors import InputError
from detr_bf.report import curves
from detr_bf.report.curves import draw_curves, running_mean
from detr_bf.report.metrics import read_metrics, series


def train(step: int, loss: float | None = 3.0, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "epoch": step / 10, "loss": loss, "loss_ce": 1.0, **more}


def val(step: int, precision: float | None) -> dict[str, Any]:
    return {"kind": "val", "step": step, "epoch": step // 10, "AP": precision, "AP50": precision, "AP75": None}


def write(path: Path, *records: dict[str, Any], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def test_records_are_split_ordered_and_the_later_of_two_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", train(1), train(3, 9.0), val(10, 0.1), train(2), train(3, 2.0))
    metrics = read_metrics(path)
    assert [(record["step"], record["loss"]) for record in metrics.train] == [(1, 3.0), (2, 3.0), (3, 2.0)]
    assert [record["AP"] for record in metrics.val] == [0.1]


def test_a_last_line_cut_short_is_left_out_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "m.jsonl", train(1), tail='{"kind": "train", "st')
    with caplog.at_level(logging.WARNING):
        assert len(read_metrics(path).train) == 1
    assert "incomplete" in caplog.text


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"kind": "train", "step": "x", "epoch": 1}'])
def test_a_broken_line_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f"{json.dumps(train(1))}\n{line}\n{json.dumps(train(2))}\n")
    with pytest.raises(InputError, match="line 2"):
        read_metrics(path)


def test_series_leaves_out_what_was_not_measured() -> None:
    records = [val(10, None), val(20, 0.2), {"epoch": 3.0}, val(40, float("nan"))]
    assert series(records, "AP") == ([2.0], [0.2])


def test_running_mean() -> None:
    np.testing.assert_allclose(running_mean(np.array([2.0, 4.0, 9.0, 2.0]), 2), [2.0, 3.0, 6.5, 5.5])
    np.testing.assert_allclose(running_mean(np.array([2.0, 4.0]), 5), [2.0, 3.0])


def test_the_curves_hold_the_logged_values(tmp_path: Path) -> None:
    streams = {"stream/clean": 1.0, "stream/batchformer": 2.0, "loss_bbox": 0.5, "loss_giou": 0.6}
    path = write(tmp_path / "m.jsonl", train(1, 4.0, **streams), train(2, 3.0, **streams), val(10, 0.1), val(20, 0.25))
    total, terms, precision = curves._figure(read_metrics(path), curves.DETECTION_CURVES).axes
    assert {line.get_label(): list(line.get_ydata()) for line in total.lines} == {
        "total": [4.0, 3.0],
        "clean stream": [1.0, 1.0],
        "BatchFormer stream": [2.0, 2.0],
    }
    assert [line.get_label() for line in terms.lines] == ["class", "box L1", "box GIoU"]
    assert {line.get_label(): list(line.get_ydata()) for line in precision.lines} == {
        "AP50 25.0": [10.0, 25.0],
        "AP 25.0": [10.0, 25.0],
    }
    assert precision.get_xlim()[1] >= 2.0


def labels(path: Path, plan: curves.CurvePlan) -> list[tuple[str, list[str]]]:
    """Title of every panel, and what its legend says."""
    panels = curves._figure(read_metrics(path), plan).axes
    return [(axes.get_title(loc="left"), [str(line.get_label()) for line in axes.lines]) for axes in panels]


def test_a_classifier_has_the_terms_it_logged_its_groups_and_the_validation_loss(tmp_path: Path) -> None:
    scores = {"top1": 0.5, "top5": 0.9, "many": 0.75, "medium": None, "few": 0.25, "loss": 1.5}
    validation = {"kind": "val", "step": 10, "epoch": 1, **scores}
    path = write(tmp_path / "m.jsonl", train(1, loss_diverse_patch=0.1), validation)
    assert labels(path, curves.CLASSIFICATION_CURVES) == [
        ("Loss", ["total", "validation"]),
        ("Terms", ["ce", "diverse patch"]),
        ("Validation (%)", ["many-shot 75.0", "few-shot 25.0", "top-5 90.0", "top-1 50.0"]),
    ]


def test_a_single_term_and_a_single_group_are_not_drawn(tmp_path: Path) -> None:
    validation = {"kind": "val", "step": 10, "epoch": 1, "top1": 0.5, "top5": None, "many": 0.5}
    path = write(tmp_path / "m.jsonl", train(1), validation)
    assert labels(path, curves.CLASSIFICATION_CURVES) == [("Loss", ["total"]), ("Validation (%)", ["top-1 50.0"])]


def test_a_masked_autoencoder_has_losses_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", train(1), {"kind": "val", "step": 10, "epoch": 1, "loss": 0.75})
    assert labels(path, curves.RECONSTRUCTION_CURVES) == [("Loss", ["total", "validation"])]
    draw_curves(path, tmp_path / "curves.svg", curves.RECONSTRUCTION_CURVES)
    assert "<svg" in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize("records", [[train(1)], [val(10, 0.0)], [val(10, None)], [train(i) for i in range(60)]])
def test_few_or_many_records_are_drawn(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    draw_curves(write(tmp_path / "m.jsonl", *records), tmp_path / "pictures" / "curves.png")
    with Image.open(tmp_path / "pictures" / "curves.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000


def test_svg_and_refusals(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", train(1), val(10, 0.3))
    draw_curves(path, tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    with pytest.raises(InputError, match=r"\.svg, \.png or \.pdf"):
        draw_curves(path, tmp_path / "curves.bmp")
    with pytest.raises(InputError, match="not found"):
        draw_curves(tmp_path / "none.jsonl", tmp_path / "curves.svg")
    with pytest.raises(InputError, match="no training and no evaluation record"):
        draw_curves(write(tmp_path / "empty.jsonl"), tmp_path / "empty.svg")
    assert not (tmp_path / "empty.svg").exists()
