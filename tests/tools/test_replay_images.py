"""Captured steps of classifiers and masked autoencoders, replayed on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest

from detr_bf.classification.batch import LabelledImages
from detr_bf.config import load_config
from detr_bf.engine import RunFolder
from detr_bf.engine.checkpoint import rng_state
from detr_bf.engine.recovery import Capture, Fault, capture_step, load_capture
from detr_bf.tasks import task_of
from tests.tools.image_runs import classifier_config, contrastive_config, masked_config
from tests.tools.test_train_classifier import BALANCED, VARIANTS
from tests.tools.test_train_net import assert_same, tool
from tools.train_net import main as train_net

DIVERGING = ["optimizer.lr=1e30", "train.epochs=3", "train.max_skipped=1", "train.ema.enabled=false"]
SAME = "losses and module equal those of the run"

run_tool: Callable[[Sequence[str]], int] = tool("replay_capture").main


def captured(config: Path, *settings: str) -> Capture:
    """Capture a healthy step, two batches of the second epoch, as a run would."""
    task = task_of(load_config(config, settings))
    trainer = task.build_trainer(RunFolder(config.parent / "healthy"), None)
    batches = list(islice(trainer.make_batches(1, 0), 2))
    given = {"number": 17, "class_map": trainer.class_map, "config": trainer.config}
    return capture_step(trainer.step.train(), batches, rng_state(), **given)


def replay(folder: Path, capture: Capture, *options: str) -> int:
    capture.save(folder / "a.pt")
    return run_tool([str(folder / "a.pt"), "--device", "cpu", *options])


def check_reproduced(captures: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(captures.iterdir())
    assert len(files) == 2, "one step was skipped, and the next ended the run"
    for file in files:
        assert f"captured in {file}" in said
        assert run_tool([str(file)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2:] == [SAME, "REPRODUCED: it is not finite again"]
        assert lines[1].startswith("batch 1 holds image ")
        (module,) = (line for line in lines if line.startswith("first module whose output is not finite: "))
        assert module in said


@pytest.mark.parametrize("name", ["plain", "batchformer", "diverse_patch"])
def test_what_a_classifier_captures_is_reproduced(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--config", str(classifier_config(tmp_path)), *VARIANTS[name], *DIVERGING]
    assert train_net(command) == 1
    check_reproduced(tmp_path / "run" / "captures", capsys.readouterr().err, capsys)


def test_a_run_of_which_nothing_is_finite_in_the_end_leaves_its_report(tmp_path: Path) -> None:
    command = ["--config", str(classifier_config(tmp_path)), *DIVERGING, "train.max_steps=2", "report=true"]
    assert train_net(command) == 0
    assert (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "pictures" / "validation.png").exists(), "there is nothing to show"
    assert train_net(["--config", str(masked_config(tmp_path)), *DIVERGING, "train.max_steps=2", "report=true"]) == 0
    assert (tmp_path / "mae" / "report.html").exists()


def test_what_a_masked_autoencoder_captures_is_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_net(["--config", str(masked_config(tmp_path)), "batch_former.enabled=true", *DIVERGING]) == 1
    check_reproduced(tmp_path / "mae" / "captures", capsys.readouterr().err, capsys)


@pytest.mark.parametrize("name", ["masked", "contrastive", *VARIANTS])
def test_the_step_is_that_of_the_run_to_the_last_digit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replay includes dropout, masks, pairs of patches, class counts and the weight of the epoch."""
    if name == "masked":
        capture = captured(masked_config(tmp_path), "batch_former.enabled=true")
    elif name == "contrastive":
        capture = captured(contrastive_config(tmp_path), "batch_former.enabled=true")
    else:
        capture = captured(classifier_config(tmp_path), "model.dropout=0.3", *VARIANTS[name])
    assert replay(tmp_path, capture) == 3
    out = capsys.readouterr().out
    assert set(str(Fault.from_dict(capture.fault)).splitlines()) < set(out.splitlines())
    assert SAME in out


@pytest.mark.parametrize(("name", "kept"), [("plain", "soft_labels"), ("diverse_patch", "patch_labels")])
def test_mixed_batches_survive_the_file(name: str, kept: str, tmp_path: Path) -> None:
    capture = captured(classifier_config(tmp_path), *VARIANTS[name])
    capture.save(tmp_path / "a.pt")
    read = load_capture(tmp_path / "a.pt", lambda config: LabelledImages)
    for batch, again in zip(capture.batches, read.batches, strict=True):
        assert isinstance(again, LabelledImages)
        assert getattr(again.targets, kept) is not None
        assert again.targets.epoch == 1
        assert_same(asdict(again), asdict(batch))


@pytest.mark.parametrize("name", ["batchformer_v2", "batchformer"])
def test_missing_images_of_other_ranks_are_reported(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = captured(classifier_config(tmp_path), *VARIANTS[name], f"plugins.{name}.gather=true")
    assert replay(tmp_path, capture) == 3
    assert "gather" not in capsys.readouterr().out
    assert replay(tmp_path, replace(capture, world_size=2)) == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if "gather" in line]
    said = "let images attend to those of other ranks, which are missing here"
    assert lines == [f"different here: plugins.{name}.gather=true {said}"]


def test_class_counts_need_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = captured(classifier_config(tmp_path), *BALANCED)
    data = capture.config["data"] | {"name": "image_folder", "root": str(tmp_path / "gone")}
    assert replay(tmp_path, replace(capture, config=capture.config | {"data": data})) == 2
    assert str(tmp_path / "gone") in capsys.readouterr().err
