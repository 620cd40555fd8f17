"""Benchmark against transformers and onnxruntime, on tiny detectors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import peers

TINY = (
    *("model.hidden_dim=32", "model.heads=2", "model.encoder_layers=2", "model.decoder_layers=2"),
    *("model.feedforward_dim=32", "model.num_queries=12"),
)
SMALL = (*TINY, "model.backbone.name=resnet18")
FEW = ("--rounds", "2", "--batch-sizes", "2", "--sizes", "64x96")


def rows_of(output: Path, *arguments: str) -> list[dict[str, Any]]:
    assert peers.main([*arguments, *FEW, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert {"transformers", "onnxruntime", "threads"} <= set(record)
    rows: list[dict[str, Any]] = record["rows"]
    assert all(row["seconds"]["median"] > 0 and row["ratio"]["median"] > 0 for row in rows)
    return rows


@pytest.mark.full
def test_every_measurement_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = ("--what", "inference", "training", "streams", "--detectors", "detr_r50")
    rows = rows_of(tmp_path / "rows.json", *SMALL, *what)
    assert [(row["what"], row["way"]) for row in rows] == [
        *(("inference", way) for way in ("ours", "transformers", "onnxruntime", "ours-bf16", "transformers-bf16")),
        *(("training", way) for way in ("ours", "transformers")),
        *(("streams", way) for way in ("off", "on", "duplicate")),
    ]
    facts = {(row["what"], row["way"]): row["facts"] for row in rows}
    for way in ("ours", "onnxruntime"):
        assert max(facts["inference", way].values()) < 1e-4
    assert 1e-4 < facts["inference", "ours-bf16"]["logits"] < 0.5
    assert facts["training", "ours"]["loss"] < 1e-5
    assert facts["streams", "on"]["batch attention"] > 0
    assert facts["streams", "duplicate"]["rows of the encoder"] == 2
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| detr_r50, 64 x 96") for line in shown) == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", peers.DETECTORS)
def test_every_detector_gives_the_same(name: str, tmp_path: Path) -> None:
    what = ("--what", "inference", "training", "--ways", "ours", "onnxruntime", "--detectors", name)
    rows = rows_of(tmp_path / "rows.json", *TINY, *what)
    assert len(rows) == (5 if name in peers.TRAINED else 3)
    for row in rows:
        assert max(row["facts"].values(), default=0) < 1e-4, row


def test_the_step_is_compared_with_its_rows() -> None:
    """Check the sums by hand: the encoder and what follows cost twice, and batch attention and the optimizer more."""
    off = {"backbone": 4.0, "encoder": 2.0, "decoder": 1.0, "matching": 0.5, "loss": 0.25, "optimizer": 0.25}
    on = {**off, "encoder": 4.0, "decoder": 1.5, "BatchFormer": 0.8}
    rows = {"encoder": 2.0, "decoder": 2.0, "matching": 2.0, "loss": 2.0}
    facts = peers.stream_facts([on, on], [off, off], rows)
    assert facts["by rows"] == pytest.approx((8 + 2 + 1.75) / 8)
    assert facts["excess"] == pytest.approx((8 + 2 + 0.5 + 0.8 - 11.75) / 8)
    assert facts["excess, 10th"] == facts["excess"] == facts["excess, 90th"]
    assert facts["batch attention"] == pytest.approx(0.1)
    assert [facts[part] for part in peers.PARTS] == [1, 2, 1.5, 1, 1, 1]


@pytest.mark.parametrize(("position", "rows"), [("before", (2 * 4 + 2) / 6), ("after", (2 * 3 + 3) / 6)])
def test_the_rows_of_the_encoder_double_at_the_first_insertion(position: str, rows: float) -> None:
    inserted = SimpleNamespace(insertions=(2, 4), position=position)
    step: Any = SimpleNamespace(model=SimpleNamespace(encoder=SimpleNamespace(batch_former=inserted, layers=range(6))))
    assert peers.encoder_rows(step) == pytest.approx(rows)


def test_one_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--rounds", "1"]) == 2
    assert "--rounds must be 2 or more" in capsys.readouterr().err
