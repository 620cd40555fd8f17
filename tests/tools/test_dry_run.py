"""``detr-bf train --dry-run``: everything up to the first step, the time of a step, and no files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from detr_bf.commands import main
from detr_bf.engine import Trainer
from detr_bf.engine.step import TrainingBatch
from tests.tools.image_runs import classifier_config, masked_config


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Count the steps by a clock on which the first one takes 9 seconds and the others 2."""
    done, times, step = list[float](), iter([0.0, 9.0, 11.0, 13.0, 15.0]), Trainer.train_step

    def train_step(trainer: Trainer, batches: Sequence[TrainingBatch]) -> None:
        step(trainer, batches)
        done.append(1)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr("detr_bf.engine.trainer.time", SimpleNamespace(perf_counter=lambda: next(times)))
    return done


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Use an own folder of temporary files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    return scratch


def test_a_detector(
    tiny: Path, tmp_path: Path, scratch: Path, steps: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(tiny), "train.loggers=[tensorboard]", "eval.loss=true"]
    before = sorted(tmp_path.rglob("*"))
    assert main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "to learn from: 15 images" in printed.err
    out = printed.out.splitlines()
    assert out[0].startswith("model: ")
    assert out[1].endswith(f"batches of 3. batch_former.enabled=true is set by file {tiny}.")
    assert out[2].startswith("first batch: 00")
    assert out[2].count(".png") == 3
    assert out[3:] == [
        "steps: 15, 5 an epoch",
        "time: 2 s a step (measured), 30 s for the run without evaluations and checkpoints",
        f"dry run: nothing was written; a run would be written to {tmp_path / 'run'}",
    ]
    assert not (tmp_path / "run").exists()
    assert sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts) == before
    assert list(scratch.iterdir()) == []
    assert len(steps) == 4


def test_a_run_by_time(tiny: Path, steps: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """The number of steps, and what follows from it, is known from the time of a step."""
    assert main(["train", str(tiny), "--dry-run", "train.minutes=10", "train.ema.decay=auto"]) == 0
    assert capsys.readouterr().out.splitlines()[3:6] == [
        "steps: about 300 in train.minutes=10, 5 an epoch",
        "time: 2 s a step (measured); evaluations and checkpoints come on top",
        "chosen for 300 steps: train.ema.decay=0.98",
    ]
    assert len(steps) == 4


@pytest.mark.parametrize("skipped", [0, 9])
def test_a_step_that_is_not_finite(skipped: int, tiny: Path, scratch: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No file is named that is never kept: neither a checkpoint nor a captured step."""
    settings = ["optimizer.lr=1e30", "optimizer.warmup_steps=0", f"train.max_skipped={skipped}"]
    assert main(["train", str(tiny), "--dry-run", *settings]) == (0 if skipped else 1)
    said = capfd.readouterr().err
    assert "first module whose output is not finite: " in said
    assert ("The step is skipped, 1 of 9." if skipped else "a step of the dry run failed: the loss") in said
    assert str(scratch) not in said
    assert "checkpoint" not in said
    assert "replay" not in said


def test_batch_attention_is_off_unless_asked_for(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tiny.read_text()
    tiny.write_text(text.replace("batch_former: {enabled: true}\n", "batch_former: {heads: 2}\n"))
    off = (
        "BatchFormerV2 is off. batch_former.enabled=false is the default. batch_former.heads has no effect without it."
    )
    assert main(["train", str(tiny), "--dry-run"]) == 0
    assert off in capsys.readouterr().out.splitlines()
    for settings, said in (([], off), (["batch_former.enabled=true"], "by override 'batch_former.enabled=true'.")):
        assert main(["check", str(tiny), *settings]) == 0
        assert capsys.readouterr().out.endswith(f"{said}\n")


@pytest.mark.parametrize("make_config", [classifier_config, masked_config])
def test_other_tasks(make_config: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "not_yet"
    assert main(["train", str(make_config(tmp_path)), f"output_dir={run}", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith(f"a run would be written to {run}\n")
    assert not run.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data.train.images=nowhere"], "image folder nowhere does not exist"),
        (["model.num_queries=4", "init_from=nowhere.pt"], "nowhere.pt"),
        (["model.heads=5"], "heads"),
        (["output_dir={file}"], "output_dir"),
        (["output_dir={run}"], "last.pt"),
        (["--resume"], "exclude each other"),
    ],
)
def test_what_training_refuses_is_refused(
    arguments: list[str], said: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"file": tiny, "run": tmp_path / "theirs"}
    places["run"].mkdir()
    (places["run"] / "last.pt").write_text("theirs")
    before = {path: path.read_bytes() for path in places["run"].iterdir()}
    assert main(["train", str(tiny), "--dry-run", *(each.format(**places) for each in arguments)]) == 2
    assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in places["run"].iterdir()} == before
    assert not (tmp_path / "run").exists()
