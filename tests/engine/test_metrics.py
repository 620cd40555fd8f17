from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from detr_bf.common.errors import InputError
from detr_bf.engine import MetricsLog
from detr_bf.engine.metrics import EpochMeans, training_line
from tests.references.damage import DAMAGED_LINES


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_log_drops_later_records_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.write("train", step, {"loss": float(step)})
    for step in (2, 3):
        log.write("val", step, {"loss": 0.5})
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    resumed = MetricsLog(path, resume_from={"train": 3, "val": 2})
    resumed.write("train", 4, {"loss": 40.0})
    resumed.close()
    assert [(record["step"], record["loss"]) for record in read(path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (2, 0.5),
        (4, 40.0),
    ]


@pytest.mark.parametrize("line", DAMAGED_LINES)
def test_a_resumed_log_drops_damaged_lines_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    first, last = (json.dumps({"kind": "train", "step": step, "name": "ü"}, ensure_ascii=False) for step in (1, 2))
    path.write_bytes(b"\n".join([first.encode(), line, last.encode(), b""]))
    with caplog.at_level(logging.WARNING):
        MetricsLog(path, resume_from={"train": 2, "val": 0}).close()
    assert path.read_text(encoding="utf-8") == f"{first}\n{last}\n"
    assert "1 of 3 lines are damaged and dropped, the first is line 2" in caplog.text


def test_a_resumed_log_may_be_missing_or_all_garbage_but_no_folder(tmp_path: Path) -> None:
    path, state = tmp_path / "metrics.jsonl", {"train": 3, "val": 2}
    for garbage in (None, b"", b"\xff\xfe\x00" * 1000):
        if garbage is not None:
            path.write_bytes(garbage)
        MetricsLog(path, resume_from=state).close()
        assert path.read_bytes() == b""
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="it is a folder, expected a regular file of one JSON object a line"):
        MetricsLog(tmp_path / "folder", resume_from=state)


def test_a_new_log_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n')
    MetricsLog(path).close()
    assert path.read_text() == ""


def test_numbers_that_json_does_not_have_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write("train", 1, {"grad_norm": float("inf"), "loss": float("nan"), "lr": 0.1})
    log.close()
    assert read(path) == [{"kind": "train", "step": 1, "grad_norm": None, "loss": None, "lr": 0.1}]


def test_means_of_an_epoch_weigh_records_by_their_batches() -> None:
    means = EpochMeans()
    means.add({"loss": 2.0, "lr": 0.1}, 3)
    means.add({"loss": 6.0, "lr": 0.1, "grad_norm": 5.0}, 1)
    assert means.take() == ({"loss": 3.0, "lr": pytest.approx(0.1), "grad_norm": 5.0}, 4)
    assert means.take() == ({}, 0)


def test_the_line_of_an_epoch_names_terms_with_weights_and_streams() -> None:
    terms = {"loss_ce": 1.25, "loss_ce_0": 9.0, "loss_ce_enc": 8.0, "loss_localization": 0.123456}
    weights = {"weight/loss_ce": 1.0, "weight/loss_localization": 0.01}
    streams = {"stream/clean": 20.0, "stream/batchformer": 21.5, "stream/clean/loss_ce": 7.0}
    assert training_line({"loss": 20.75, "lr": 0.1, **terms, **weights, **streams, "grad_norm": float("inf")}) == (
        "loss 20.75 (ce 1.25, localization 0.1235 x 0.01, 2 of auxiliary layers and proposals), "
        "clean stream 20, batchformer stream 21.5, gradient norm inf"
    )
