"""Conclusions drawn from the files of a killed run, and a short soak test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import soak
from attempts import Standing, fingerprints, phase_of_a_kill
from detr_bf.engine import Checkpoint
from tests.checkpoints import training


def save(path: Path, step: int, weight: float = 0.5) -> None:
    classes = {"category_ids": [1], "names": ["a"], "is_thing": [True]}
    Checkpoint({"w": torch.tensor([weight])}, classes, {}, training=training(step)).save(path)


def record(folder: Path, *steps: int, kind: str = "train") -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"kind": kind, "step": step, "loss": 0.5, "step_seconds": 0.1 * step}) + "\n")


def resume(folder: Path) -> None:
    with (folder / "log.txt").open("a") as file:
        file.write("INFO resumed at step 2 of 12\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write the files of a run that was killed in its third step."""
    save(tmp_path / "last.pt", 2)
    record(tmp_path, 1, 2)
    return tmp_path


def test_what_a_killed_run_was_doing(run: Path) -> None:
    assert phase_of_a_kill(run, Standing()) == "training"
    assert phase_of_a_kill(run, Standing.of(run)) == "starting again", "nothing has changed since"
    before = Standing.of(run)
    resume(run)
    record(run, 3)
    assert phase_of_a_kill(run, before) == "evaluating"
    record(run, 3, kind="val")
    assert phase_of_a_kill(run, before) == "training"
    (run / ".detr_bf-unfinished-last.abc.pt").touch()
    assert phase_of_a_kill(run, before) == "saving"
    (run / ".detr_bf-unfinished-last.abc.pt").unlink()
    (run / "last.pt").rename(run / "previous.pt")
    assert phase_of_a_kill(run, before) == "saving"
    (run / "previous.pt").unlink()
    assert phase_of_a_kill(run, before) == "before the first checkpoint"


def test_a_run_that_is_over_was_reporting(run: Path) -> None:
    record(run, *range(3, 13))
    record(run, 3, 6, 9, 12, kind="val")
    assert phase_of_a_kill(run, Standing()) == "reporting"


def test_nothing_is_wrong_with_a_run_that_lost_less_than_the_steps_between_checkpoints(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    standing = Standing.of(run)
    assert (standing.step, standing.recorded, standing.resumptions) == (2, 2, 0)
    record_after = Standing(step=2, recorded=4)
    assert list(record_after.faults(standing)) == []


def test_what_must_never_be_is_found(run: Path) -> None:
    before = Standing.of(run)
    assert [kind for kind, _ in Standing(step=2, recorded=5).faults(before)] == ["lost"]
    assert [kind for kind, _ in Standing(step=1).faults(before)] == ["lost"]
    assert [kind for kind, _ in Standing().faults(before)] == ["lost"]
    content = bytearray((run / "last.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (run / "last.pt").write_bytes(content[:-100])
    [(kind, detail), (lost, _)] = Standing.of(run).faults(before)
    assert (kind, lost) == ("corrupted", "lost")
    assert str(run / "last.pt") in detail


def test_every_bit_but_the_time_counts(run: Path) -> None:
    (run / "results.json").write_text("[]")
    before = fingerprints(run)
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step_seconds": 0.1', '"step_seconds": 9'))
    assert fingerprints(run) == before
    save(run / "last.pt", 2, weight=0.5 + 2**-24)
    assert different(before, fingerprints(run)) == ["model"]
    record(run, 3, kind="val")
    assert different(before, fingerprints(run)) == ["model", "val records"]


def different(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [name for name, value in first.items() if second[name] != value]


@pytest.mark.parametrize("arguments", [["--kills", "0"], ["--processes", "1"], ["--alone", "2"]])
def test_impossible_wishes_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert soak.main(arguments) == 2
    assert "must be" in capsys.readouterr().err


@pytest.mark.slow
def test_a_few_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "soak.json"
    assert soak.main(["--kills", "6", "--alone", "0.5", "--output", str(output)]) == 0
    counts = json.loads(output.read_text())
    assert sum(counts["kills"].values()) == sum(counts["phases"].values()) == 6
    assert sum(counts["finished"].values()) >= 1
    assert counts["faults"] == {}
    assert "kills: 6" in capsys.readouterr().out
