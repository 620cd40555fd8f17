from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cases
import run
from detr_bf.common.structures import Outputs, PaddedTargets
from detr_bf.losses import CrossEntropy, HungarianMatcher

TINY = cases.Preset(
    64,
    96,
    2,
    (
        "model.backbone.name=resnet18",
        "model.hidden_dim=32",
        "model.feedforward_dim=32",
        "model.encoder_layers=1",
        "model.decoder_layers=1",
        "model.num_queries=12",
    ),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.PRESETS, "small", TINY)
    monkeypatch.setattr(run, "MATCHING_SIZES", ((2, 12),))


@pytest.mark.full
@pytest.mark.usefixtures("tiny")
def test_everything_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results" / "tiny.json"
    assert run.main(["--device", "cpu", "--rounds", "2", "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    training, inference, matching = record["measurements"]
    assert training["facts"]["decoder rows"] == {"off": 2, "on": 4, "duplicate": 4}
    added = training["facts"]["parameters"]["on"] - training["facts"]["parameters"]["off"]
    assert added == 6 * 32**2 + 10 * 32  # one BatchFormer layer
    assert inference["checks"] == {"outputs with and without are bit-identical": True}
    assert matching["checks"] == {"matches are equal": True}
    assert all(len(times) == 2 for part in record["measurements"] for times in part["seconds"].values())
    assert record["machine"]["torch"] == torch.__version__
    shown = capsys.readouterr().out
    assert "on / duplicate" in shown
    assert "may be disturbed by other work" in shown


@pytest.mark.usefixtures("tiny")
def test_outputs_that_differ_fail_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        cases.INFERENCE, "with", "batch_former={enabled: true, mode: mini_batch_inference}"
    )  # not the identity
    monkeypatch.setattr(run, "measure", lambda setting: [cases.measure_inference(setting)])
    assert run.main(["--device", "cpu", "--rounds", "2"]) == 1
    printed = capsys.readouterr()
    assert "bit-identical: NO" in printed.out
    assert "failed: outputs with and without" in printed.err


def test_one_round_is_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--rounds", "1"]) == 2
    assert "--rounds must be 2 or more" in capsys.readouterr().err


def test_matching_layer_by_layer_finds_the_cheapest_pairs_of_every_layer() -> None:
    # Query q of layer l predicts object (q + l) % 2 exactly, so the pairs of the two layers are swapped.
    boxes = torch.tensor([[0.2, 0.2, 0.1, 0.1], [0.7, 0.7, 0.2, 0.2]])
    outputs = Outputs(torch.zeros(2, 1, 2, 4), torch.stack([boxes, boxes.flip(0)])[:, None])
    targets = PaddedTargets(torch.tensor([[0, 1]]), boxes[None], (2,))
    matches = cases.match_layer_by_layer(HungarianMatcher(CrossEntropy()), outputs, targets)
    found = torch.stack([matches.layer, matches.row, matches.query, matches.target], 1).tolist()
    assert found == [[0, 0, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1], [1, 0, 1, 0]]
