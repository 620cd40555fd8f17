"""``detr-bf benchmark``: times of alternating calls, and memory of processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import detr_bf
from detr_bf.commands import main
from detr_bf.commands.benchmark import WARMUP, alternate_calls
from tests.tools.test_predict import weights as weights  # a fixture: the checkpoint of a tiny detector


def test_a_run_and_its_file_are_timed_in_turn(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.onnx"
    detr_bf.load(weights, "cpu").export(file)
    written = tmp_path / "bench.json"
    arguments = ["--half", "--batch-sizes", "1", "2", "--threads", "1", "--rounds", "3", "--device", "cpu"]
    assert main(["benchmark", str(weights), str(file), *arguments, "--output", str(written)]) == 0
    content = json.loads(written.read_text())
    timings = content["timings"]
    assert {"command", "torch", "CPU"} <= set(content["machine"])
    candidates = [(str(weights), "float32"), (str(weights), "half"), (str(file), "float32")]
    expected = [(*candidate, batch) for batch in (1, 2) for candidate in candidates]
    assert [(each["source"], each["precision"], each["batch_size"]) for each in timings] == expected
    for each in timings:
        assert 0 < each["low"] <= each["seconds"] <= each["high"]
        assert each["images_per_second"] == pytest.approx(each["batch_size"] / each["seconds"])
        assert each["ratio_low"] <= each["ratio"] <= each["ratio_high"]
        assert 50 < each["memory_mib"] < 20_000
        assert each["device_memory_mib"] is None
    assert [each["ratio"] for each in timings[::3]] == [1, 1], "of the first candidate to itself"
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(timings)


def test_every_call_is_made_in_every_round_and_each_is_first_in_turn() -> None:
    made, ticks = list[str](), iter(range(10_000))
    calls = {name: lambda name=name: made.append(name) for name in "abc"}
    seconds = alternate_calls(calls, 6, clock=lambda: float(next(ticks)))
    rounds = ["".join(made[start : start + 3]) for start in range(0, len(made), 3)]
    assert len(rounds) == 6 + WARMUP
    assert rounds[WARMUP:] == ["abc", "bca", "cab"] * 2
    assert seconds == {name: [1.0] * 6 for name in "abc"}, "without the uncounted rounds"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-sizes", "0"], "--batch-sizes 0: expected whole numbers from 1"),
        (["--rounds", "1"], "--rounds 1: expected whole numbers from 2"),
        (["--threads", "-3"], "--threads -3: expected whole numbers from 1"),
        (["{weights}"], "is given twice"),
        (["missing.pt"], "missing.pt"),
        (["--images", "nowhere"], "no such file or folder: nowhere"),
        (["--output", "{folder}"], "--output"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], said: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [each.format(weights=weights, folder=tmp_path) for each in arguments]
    assert main(["benchmark", str(weights), *given, "--no-memory"]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
