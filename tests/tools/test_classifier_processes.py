"""Classifiers and masked autoencoders trained by several processes: as by one process, and after a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from detr_bf.config import load_config
from detr_bf.engine import RunFolder
from detr_bf.tasks import Task, task_of
from tests.processes import run_together
from tests.tools.image_runs import classifier_config, masked_config
from tests.tools.launch import Job, left_by, unfinished
from tests.tools.test_train_classifier import CNN, PLAIN, VARIANTS, VIT
from tests.tools.test_train_net import assert_same
from tools.train_net import main as train_net

TOTAL = 24  # images per step, five steps an epoch
ROUNDING = 1e-6  # of the weights, in float32; 3e-8 was measured
EXACT = ["optimizer.name=sgd", "optimizer.lr=0.1", "model.drop_path=0", "train.ema.enabled=false", PLAIN]
WITHOUT_CHANCE = {
    "plain": (),
    "batchformer_v2": (*VARIANTS["batchformer_v2"], "plugins.batchformer_v2.dropout=0"),
    "batchformer": (*VARIANTS["batchformer"], "plugins.batchformer.dropout=0", "data.long_tail.imbalance=1"),
    "context_broadcasting": VARIANTS["context_broadcasting"],
}
SLOW = {"context_broadcasting", "batchformer", "augmented", "cnn", "diverse_patch"}


def marked(*names: str) -> list[Any]:
    """Return the names as parameters of a test, slow ones marked; all of them together take minutes."""
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


def task_with(config: str, settings: list[str]) -> Task[Any]:
    return task_of(load_config(config, settings))


def trained(config: str, settings: list[str], folder: str) -> dict[str, Tensor]:
    """Return the weights of this rank after training."""
    RunFolder(Path(folder)).create()
    trainer = task_with(config, settings).build_trainer(RunFolder(Path(folder)), None)
    trainer.train()
    return trainer.model.state_dict()


def evaluated(config: str, source: str) -> dict[str, Any]:
    """Return the contents of ``evaluation.json``."""
    task = task_with(config, [])
    model, classes = task.load_evaluated(Path(source))
    return task.build_evaluation(classes, RunFolder(Path(source).parent))(model).to_dict()


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between two sets of weights."""
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.default_tier("plain")
@pytest.mark.parametrize("name", marked(*WITHOUT_CHANCE))
def test_two_processes_train_as_one_with_the_images_of_both(name: str, tmp_path: Path) -> None:
    config, settings = str(classifier_config(tmp_path)), [*EXACT, "train.epochs=1", *WITHOUT_CHANCE[name]]
    halves, gather = [*settings, f"train.batch_size={TOTAL // 2}"], f"plugins.{name}.gather=true"
    has_streams = name.startswith("batchformer")
    one = trained(config, [*settings, f"train.batch_size={TOTAL}"], str(tmp_path / "one"))
    two, other = run_together(2, trained, config, [*halves, gather] if has_streams else halves, str(tmp_path / "two"))
    assert_same(dict(other), dict(two))
    assert furthest(one, two) < ROUNDING
    still = trained(config, [*settings, "optimizer.lr=0", "train.max_steps=1"], str(tmp_path / "still"))
    assert furthest(one, still) > 1e4 * ROUNDING, "the model has learnt"
    if has_streams:
        apart, _ = run_together(2, trained, config, halves, str(tmp_path / "apart"))
        assert furthest(one, apart) > 10 * ROUNDING, "batch attention reads the images of both ranks"


@pytest.mark.full
@pytest.mark.parametrize("name", marked("diverse_patch", "relative_localization", "cnn", "augmented", "masked"))
def test_everything_else_trains_in_two_processes_that_stay_the_same(name: str, tmp_path: Path) -> None:
    """Every parameter gets a gradient; gradients and buffers of norms are equal on all ranks."""
    settings = ["train.max_steps=3", "train.batch_size=12", "train.ema.enabled=false"]
    if name == "masked":
        config = masked_config(tmp_path)
        settings += ["batch_former.enabled=true", "batch_former.gather=true"]
    else:
        config = classifier_config(tmp_path)
        settings += VARIANTS[name]
    if name == "cnn":
        config.write_text(config.read_text().replace(VIT, CNN))
    one, other = run_together(2, trained, str(config), settings, str(tmp_path / "two"))
    assert_same(dict(one), dict(other))
    assert all(value.isfinite().all() for value in one.values())
    assert torch.load(tmp_path / "two" / "last.pt", weights_only=True)["training"]["progress"]["step"] == 3


@pytest.mark.full
def test_an_evaluation_that_is_shared_is_that_of_one_process(tmp_path: Path) -> None:
    config = classifier_config(tmp_path)
    assert train_net(["--config", str(config), *VARIANTS["batchformer"], "train.max_steps=3"]) == 0
    arguments = str(tmp_path / "run" / "config.yaml"), str(tmp_path / "run" / "last.pt")
    alone = evaluated(*arguments)
    assert alone["num_images"] == 359
    for found in run_together(3, evaluated, *arguments):
        assert found == alone


RUNS = {
    "classifier": (
        classifier_config,
        (*VARIANTS["batchformer_v2"], "plugins.batchformer_v2.gather=true", "model.dropout=0.1"),
    ),
    "mae": (masked_config, ("batch_former.enabled=true", "batch_former.gather=true")),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["step:1:5", "writing:0:4"])
@pytest.mark.parametrize("task", RUNS)
def test_a_killed_process_leaves_no_trace(task: str, moment: str, tmp_path: Path) -> None:
    """The launcher restarts the group, which ends with the same bits, although mixing and dropout are random."""
    make_config, settings = RUNS[task]
    settings = ("train.batch_size=15", "data.workers=1", *settings)
    job = Job(make_config(tmp_path), tmp_path / "run", settings, restarts=1, fault=f"kill:{moment}")
    run = job.run()
    assert run.code == 0, run.said
    assert job.marker.exists(), "the fault has happened"
    assert "resumed at step" in run.said
    undisturbed = replace(job, folder=tmp_path / "undisturbed", restarts=0, fault="")
    run = undisturbed.run()
    assert run.code == 0, run.said
    assert_same(left_by(job.folder), left_by(undisturbed.folder))
    assert unfinished(job.folder) == []
