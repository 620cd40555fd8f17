"""Conclusions of the load test, and a short run of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import serving
from detr_bf.common.errors import InputError


def found(*boxes: list[float]) -> dict[str, object]:
    return {"objects": [{"bbox": box} for box in boxes]}


def test_the_numbers_of_a_load() -> None:
    load = serving.Load(2, seconds=2.0, sent=6, statuses=Counter({"200": 4, "429": 1}), latencies=[0.1, 0.2, 0.3, 0.4])
    summary = load.summary()
    assert (summary["lost"], summary["per_second"], summary["p50"]) == (1, 2.0, 0.25)
    assert 0.39 < summary["p99"] < 0.4
    assert serving.Load(1, seconds=1.0).summary()["p99"] is None, "no answer at all"


def test_answers_of_other_images_are_noticed() -> None:
    one, two = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
    assert serving._same(found(one, two), found(two, [1.01, 2.0, 3.0, 4.0])), "the order may differ, and rounding"
    assert not serving._same(found(one), found([1.2, 2.0, 3.0, 4.0]))
    assert serving._same(found(one, two), found(one, one)), "half of them"
    assert not serving._same(found(one, two, two), found(one, one, one))
    assert serving._same(found(), found())
    assert not serving._same(found(one), found(one, one))
    with pytest.raises(InputError, match="mixed-up"):
        serving._require_different([found(one), found(two), found(one)])


@pytest.mark.parametrize("arguments", [["--clients", "0"], ["--seconds", "0"], ["--recipe", "none"]])
def test_impossible_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert serving.main(arguments) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "load.json"
    arguments = ["--clients", "1", "3", "--seconds", "2", "--size", "160", "120", "--output", str(output)]
    assert serving.main(arguments) == 0
    numbers = json.loads(output.read_text())
    assert [load["clients"] for load in numbers["loads"]] == [1, 3]
    assert all(load["statuses"] == {"200": load["sent"]} and load["sent"] > 0 for load in numbers["loads"])
    assert set(numbers["full_queue"]["statuses"]) == {"200", "429"}
    assert numbers["exit_code"] == 0
    assert "exit code 0" in capsys.readouterr().out
