from __future__ import annotations

import json
from pathlib import Path

import pytest

from detr_bf.engine import MetricsLog


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


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = MetricsLog(tmp_path / "metrics.jsonl", tensorboard=tmp_path / "tensorboard")
    log.write("train", 7, {"loss": 2.5})
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (7, 2.5)
