"""Reader of metrics, and charts of them."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detr_bf.classification.page import CLASSIFICATION_PAGE, MASKED_PAGE
from detr_bf.common.errors import InputError
from detr_bf.report import write_report
from detr_bf.report.charts import chart_group
from detr_bf.report.curves import (
    DETECTION_CURVES,
    CurvePlan,
    curves,
    curves_of_runs,
    read_metrics,
    running_mean,
    series,
)
from tests.references.damage import DAMAGED_LINES
from tests.report.page import Page


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
    assert "1 of 2 lines are damaged and left out" in caplog.text


def with_epoch(epoch: str) -> bytes:
    return b'{"kind": "train", "step": 5, "epoch": %s}' % epoch.encode()


@pytest.mark.parametrize("line", [*DAMAGED_LINES, *map(with_epoch, ("null", '"1"', "-1", "NaN", "1e400", "9" * 400))])
def test_a_damaged_line_is_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"\n".join([json.dumps(train(1)).encode(), line, json.dumps(train(2)).encode(), b""]))
    with caplog.at_level(logging.WARNING):
        assert [record["step"] for record in read_metrics(path).train] == [1, 2]
    assert "1 of 3 lines are damaged and left out" in caplog.text


ODD_VALUES = ('"x"', "[]", "true", "null", "NaN", "-Infinity", "9" * 400, "1e308", "-1e99", "1e-320", "0")


@pytest.mark.parametrize("value", ODD_VALUES)
def test_values_of_any_kind_are_drawn_or_left_out(tmp_path: Path, value: str) -> None:
    """Draw odd values in every panel; values that are left out do not affect the others."""
    names = ("loss", "loss_ce", "loss_localization", "weight/loss_localization", "loss_other", "AP", "stream/clean")
    odd = ", ".join(f'"{name}": {value}' for name in names)
    lines = [f'{{"kind": "{kind}", "step": 3, "epoch": 0.3, {odd}}}\n' for kind in ("train", "val")]
    path = write(tmp_path / "m.jsonl", train(1, loss_localization=0.5), val(2, 0.5), tail="".join(lines))
    for plan in (DETECTION_CURVES, CLASSIFICATION_PAGE.curves):
        found = curves(read_metrics(path), plan)
        html = chart_group(found)
        assert Page(html).tags.count("svg") == len(found) >= 2
        assert not re.search(r"\bnan\b|\binf\b|Infinity", html)


@pytest.mark.parametrize(
    "name", ["loss_$\\frac{$", "loss_\ud800", "loss_" + "x" * 100_000, "loss_\n", "loss_a b", "loss_"]
)
def test_names_that_no_term_has_are_not_drawn(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "m.jsonl", train(1, **{name: 1.0, "loss_localization": 0.5}))
    assert labels(path, CLASSIFICATION_PAGE.curves)[1][1] == ["cross-entropy", "relative localization"]


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is a folder, expected a regular file of one JSON object a line"):
        read_metrics(tmp_path)


def test_series_leaves_out_what_was_not_measured() -> None:
    records = [val(10, None), val(20, 0.2), {"epoch": 3.0}, val(40, float("nan"))]
    assert series(records, "AP") == ([2.0], [0.2])


def test_running_mean() -> None:
    np.testing.assert_allclose(running_mean(np.array([2.0, 4.0, 9.0, 2.0]), 2), [2.0, 3.0, 6.5, 5.5])
    np.testing.assert_allclose(running_mean(np.array([2.0, 4.0]), 5), [2.0, 3.0])


def test_the_curves_hold_the_logged_values(tmp_path: Path) -> None:
    streams = {"stream/clean": 1.0, "stream/batchformer": 2.0, "loss_bbox": 0.5, "loss_giou": 0.6}
    rates = {"lr": 1e-3, "lr/backbone": 1e-4}
    path = write(
        tmp_path / "m.jsonl", train(1, 4.0, **streams, **rates), train(2, 3.0, **streams), val(10, 0.1), val(20, 0.25)
    )
    total, terms, learning_rates, scores = curves(read_metrics(path), DETECTION_CURVES)
    assert {line.name: (list(line.x), list(line.y)) for line in total.lines} == {
        "total": ([0.1, 0.2], [4.0, 3.0]),
        "clean stream": ([0.1, 0.2], [1.0, 1.0]),
        "BatchFormer stream": ([0.1, 0.2], [2.0, 2.0]),
    }
    assert [line.name for line in terms.lines] == ["class", "box L1", "box GIoU"]
    assert [(line.name, list(line.y)) for line in learning_rates.lines] == [("backbone", [1e-4])]
    assert {line.name: list(line.y) for line in scores.lines} == {"AP50": [10.0, 25.0], "AP": [10.0, 25.0]}
    assert scores.x_range == total.x_range == (0.0, 2.0)


def labels(path: Path, plan: CurvePlan) -> list[tuple[str, list[str]]]:
    """Return the title of every chart and the names in its legend."""
    return [(chart.title, [line.name for line in chart.lines]) for chart in curves(read_metrics(path), plan)]


def test_a_classifier_has_the_terms_it_logged_its_groups_and_the_validation_loss(tmp_path: Path) -> None:
    scores = {"top1": 0.5, "top5": 0.9, "many": 0.75, "medium": None, "few": 0.25, "loss": 1.5}
    validation = {"kind": "val", "step": 10, "epoch": 1, **scores}
    path = write(tmp_path / "m.jsonl", train(1, loss_diverse_patch=0.1), validation)
    assert labels(path, CLASSIFICATION_PAGE.curves) == [
        ("Loss", ["total", "validation"]),
        ("Unweighted terms, logarithmic", ["cross-entropy", "diverse patch"]),
        ("Validation (%)", ["many-shot", "few-shot", "top-5", "top-1"]),
    ]


def test_terms_of_plugins_have_a_logarithmic_chart_that_names_their_weights(tmp_path: Path) -> None:
    """Auxiliary layers and proposals add no terms."""
    terms = {"loss_ce_0": 2.0, "loss_ce_enc": 2.0, "loss_localization": 0.004, "loss_contrastive": 40.0}
    weights = {"weight/loss_localization": 0.01, "weight/loss_contrastive": 1.0}
    path = write(tmp_path / "m.jsonl", train(1, **terms, **weights), train(2, **terms, **weights))
    found = curves(read_metrics(path), DETECTION_CURVES)
    assert [chart.log for chart in found] == [False, False, True]
    assert [line.name for line in found[2].lines] == ["relative localization x 0.01", "contrastive"]


def test_a_weight_that_changes_is_named_with_its_range(tmp_path: Path) -> None:
    records = [train(step, loss_localization=0.2, **{"weight/loss_localization": step / 100}) for step in range(4)]
    path = write(tmp_path / "m.jsonl", *records)
    assert labels(path, CLASSIFICATION_PAGE.curves)[1][1] == ["cross-entropy", "relative localization x 0 to 0.03"]


def test_a_single_term_and_a_single_group_are_not_drawn(tmp_path: Path) -> None:
    validation = {"kind": "val", "step": 10, "epoch": 1, "top1": 0.5, "top5": None, "many": 0.5}
    path = write(tmp_path / "m.jsonl", train(1), validation)
    assert labels(path, CLASSIFICATION_PAGE.curves) == [("Loss", ["total"]), ("Validation (%)", ["top-1"])]


def test_a_masked_autoencoder_has_losses_alone(tmp_path: Path) -> None:
    scores = {"score": -0.75, "score/raw": -0.8, "score/averaged": -0.75}  # no percentages
    path = write(tmp_path / "m.jsonl", train(1), {"kind": "val", "step": 10, "epoch": 1, "loss": 0.75, **scores})
    assert labels(path, MASKED_PAGE.curves) == [("Loss", ["total", "validation"])]


def test_the_best_epoch_is_marked(tmp_path: Path) -> None:
    records = [{**val(step, score), "score": score} for step, score in ((10, 0.1), (20, 0.3), (30, 0.2))]
    (chart,) = curves(read_metrics(write(tmp_path / "m.jsonl", *records)), DETECTION_CURVES)
    assert chart.mark == (2.0, "best")


def test_long_curves_are_drawn_faint_below_their_mean(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", *(train(step, float(step % 2)) for step in range(100)))
    line = curves(read_metrics(path), DETECTION_CURVES)[0].lines[0]
    assert list(line.raw) == [step % 2 for step in range(100)]
    np.testing.assert_allclose(line.y, running_mean(np.array(line.raw, dtype=float), 5))


def test_weights_and_losses_of_validation_do_not_divide_the_charts_of_runs(tmp_path: Path) -> None:
    term = {"loss_localization": 0.2}
    one = [train(1, **term, **{"weight/loss_localization": 0.01}), {**val(10, 0.1), "loss": 2.0}]
    two = [train(1, **term, **{"weight/loss_localization": 0.1})]
    runs = {"a": read_metrics(write(tmp_path / "a", *one)), "b": read_metrics(write(tmp_path / "b", *two))}
    found = {chart.title: [line.name for line in chart.lines] for chart in curves_of_runs(runs, DETECTION_CURVES)}
    assert found["Loss: total"] == found["Further terms, unweighted, logarithmic: relative localization"] == ["a", "b"]
    assert found["Loss: validation"] == ["a"]


def test_runs_share_one_chart_for_each_quantity(tmp_path: Path) -> None:
    """A quantity that one run alone has logged is shown too; all charts have the axis of the longest run."""
    one = read_metrics(write(tmp_path / "one.jsonl", train(1, 4.0), val(10, 0.1)))
    two = read_metrics(write(tmp_path / "two.jsonl", train(2, 3.0, loss_giou=0.5), val(40, 0.2)))
    found = curves_of_runs({"a": one, "b": two}, DETECTION_CURVES)
    shown = {chart.title: [(line.name, line.colour, list(line.y)) for line in chart.lines] for chart in found}
    assert shown == {
        "Loss: total": [("a", "blue", [4.0]), ("b", "red", [3.0])],
        "Unweighted terms, last decoder layer: class": [("a", "blue", [1.0]), ("b", "red", [1.0])],
        "Unweighted terms, last decoder layer: box GIoU": [("b", "red", [0.5])],
        "Validation (%): AP50": [("a", "blue", [10.0]), ("b", "red", [20.0])],
        "Validation (%): AP": [("a", "blue", [10.0]), ("b", "red", [20.0])],
    }
    assert {chart.x_range for chart in found} == {(0.0, 4.0)}


@pytest.mark.parametrize("rest", [b"", json.dumps(train(1200)).encode() + b"\n"])
def test_a_page_is_written_from_a_damaged_file(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\x00garbage\n" + b"\n".join(DAMAGED_LINES) + b"\n" + rest)
    page = write_report(tmp_path).read_text()
    assert ("Trained for 1,200 steps" in page) == bool(rest)
    assert ("metrics.jsonl is missing or empty" in page) == (not rest)


def test_terms_of_denoising_queries_are_named(tmp_path: Path) -> None:
    logged = {"loss_ce_dn": 0.8, "loss_giou_one_to_many": 0.9, "loss_localization": 0.5}
    path = write(tmp_path / "m.jsonl", train(1, **logged), train(2, **logged))
    (panel,) = (chart for chart in curves(read_metrics(path), DETECTION_CURVES) if "Further" in chart.title)
    assert panel.title == "Further terms, unweighted, logarithmic"
    assert [line.name for line in panel.lines] == ["class, denoising", "box GIoU, one to many", "relative localization"]


def test_logged_batch_attention_has_a_panel(tmp_path: Path) -> None:
    logged = {"attention/0/others": 0.8, "attention/0/entropy": 0.9, "attention/0/others/head_0": 0.7}
    logged |= {"attention/3.1/others": 0.5, "stream_distance/0": 1.2}
    path = write(tmp_path / "m.jsonl", train(1), train(2, **logged), val(10, 0.1))
    panels = labels(path, DETECTION_CURVES)
    assert panels[2] == (
        "Batch attention",
        ["layer 0: share on other images", "layer 0: entropy over the batch", "layer 3.1: share on other images"],
    )
    assert len(panels) == 4
    assert len(labels(write(tmp_path / "n.jsonl", train(1)), DETECTION_CURVES)) == 2
