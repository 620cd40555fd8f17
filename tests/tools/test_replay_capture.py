"""Replay of captured steps from the command line: reproduced or not, and bad input."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from detr_bf.assembly import build_detector_criterion, build_model
from detr_bf.common.structures import ClassMap
from detr_bf.config import config_to_dict, load_config
from detr_bf.detectors import Detector
from detr_bf.engine.checkpoint import rng_state
from detr_bf.engine.recovery import Capture, Fault, capture_step
from tests.engine.steps import batches, step_of
from tests.tools.test_train_net import tool, train_net

CLASSES = ClassMap((3, 7, 90), ("cat", "dog", "bird"))
SETTINGS = [
    "batch_former.enabled=true",
    *("model.hidden_dim=32", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=2", "model.dropout=0.3"),
    *("model.feedforward_dim=32", "model.num_queries=6", "model.backbone.name=resnet18", "device=cpu"),
    *("model.backbone.weights=none", "model.backbone.frozen_norm=false", "batch_former.dropout=0.4"),
]
LOCALIZATION = ("plugins.relative_localization.enabled=true", "plugins.relative_localization.weight=0.5")
LAYER = "encoder.layers.0.feed_forward.expand"

run_tool: Callable[[Sequence[str]], int] = tool("replay_capture").main


def nothing(model: Detector) -> None:
    """Leave the model unchanged."""


def overflow(model: Detector) -> None:
    """Set weights that overflow in half precision but not in float32."""
    model.get_submodule(LAYER).weight.data[:, :16] = 6e4


def captured(
    spoil: Callable[[Detector], None] = nothing, *changes: str, precision: torch.dtype = torch.float32, **settings: Any
) -> Capture:
    torch.manual_seed(0)
    config = load_config(None, [*SETTINGS, *changes])
    model = build_model(config, CLASSES.num_classes)
    spoil(model)
    step = step_of(model.train(), precision, build_detector_criterion(config, model))
    given = {"number": 17, "class_map": CLASSES, "config": config_to_dict(config)}
    return capture_step(step, batches(2, masks=config.model.masks), rng_state(), **(given | settings))


@functools.cache
def healthy() -> Capture:
    """Return the capture of a finite step; do not change it."""
    return captured()


def replay(folder: Path, capture: Capture, *options: str) -> int:
    capture.save(folder / "a.pt")
    return run_tool([str(folder / "a.pt"), "--device", "cpu", *options])


def test_a_broken_weight_is_reproduced_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(model: Detector) -> None:
        model.get_submodule(LAYER).bias.data[3] = float("nan")

    assert replay(tmp_path, captured(spoil)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path / 'a.pt'}: step 17, rank 0 of 1, cpu, float32, torch {torch.__version__}"
    assert lines[1:3] == ["batch 1 holds 00.png, 01.png", "batch 2 holds 10.png, 11.png"]
    assert lines[3].startswith("batch 1: loss nan (loss_ce_0 nan, ")
    assert f"parameters that are not finite: {LAYER}.bias" in lines
    found = f"{LAYER} (Linear), batch 1, call 1: its inputs are finite; not finite in it: {LAYER}.bias"
    assert f"first module whose output is not finite: {found}" in lines
    assert lines[-2:] == ["losses and module equal those of the run", "REPRODUCED: it is not finite again"]


def test_what_a_run_captures_is_reproduced(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diverging = ["optimizer.lr=1e18", "optimizer.clip_norm=0", "train.accumulate=2", "model.dropout=0.3"]
    assert train_net(["--config", str(tiny), *diverging]) == 1
    said = capsys.readouterr().err
    (file,) = (tmp_path / "run" / "captures").iterdir()
    assert f"captured in {file}" in said
    assert run_tool([str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["losses and module equal those of the run", "REPRODUCED: it is not finite again"]
    (module,) = (line for line in lines if line.startswith("first module whose output is not finite: "))
    assert module in said


@pytest.mark.default_tier("changes0", "changes3")
@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["batch_former.enabled=false", "train.recompute_encoder=true"],
        ["model.name=conditional_detr", "loss.classification=focal"],
        ["model.name=deformable_detr", "loss.classification=focal", "model.deformable.box_refine=true"],
        ["model.masks=true", "freeze.detector=true"],
        ["plugins.context_broadcasting.enabled=true", *LOCALIZATION],
    ],
)
def test_the_step_is_that_of_the_run_to_the_last_digit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str]
) -> None:
    capture = captured(nothing, *changes)
    assert replay(tmp_path, capture) == 3
    out = capsys.readouterr().out
    assert set(str(Fault.from_dict(capture.fault)).splitlines()) < set(out.splitlines())
    assert "losses and module equal those of the run" in out
    assert out.endswith(
        "NOT REPRODUCED: everything is finite now, perhaps because of kernels that do not always add in the same "
        "order\n"
    )


def test_full_precision_cures_an_overflow_of_the_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = captured(overflow, precision=torch.float16)
    assert replay(tmp_path, capture) == 0
    out = capsys.readouterr().out
    assert f"first module whose output is not finite: {LAYER} (Linear)" in out
    assert "losses and module equal those of the run" in out
    assert replay(tmp_path, capture, "--precision", "float32") == 3
    out = capsys.readouterr().out
    assert "first module whose output is not finite: none" in out
    assert "in the run\n  batch 1: loss nan" in out
    assert f"\n  first module whose output is not finite: {LAYER} (Linear)" in out
    assert "different here: it ran in fp16, now in float32" in out
    assert out.endswith("NOT REPRODUCED: everything is finite now, perhaps because of the differences above\n")


def test_the_scale_of_the_loss_is_that_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path, captured(scale=1e38)) == 0
    out = capsys.readouterr().out
    assert "loss inf" not in out
    assert "the gradient of the output of " in out
    assert replay(tmp_path, replace(healthy(), scale=1024.0)) == 3


@pytest.mark.full
def test_anomaly_detection_names_the_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="Traceback of forward call"):
        assert replay(tmp_path, captured(overflow, precision=torch.float16), "--anomaly") == 0
    assert "anomaly detection: Function '" in capsys.readouterr().out
    assert replay(tmp_path, healthy(), "--anomaly") == 3
    assert "anomaly detection: no operation of the backward pass gives NaN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"world_size": 4}, ["it had 4 ranks: the objects and gradients of the others are missing here"]),
        ({"device": "cuda"}, ["it ran on cuda, now on cpu: other kernels and random numbers"]),
        ({"threads": 99}, [f"it had 99 threads, now {torch.get_num_threads()}: sums in another order"]),
        ({"torch_version": "1.0"}, [f"it ran in torch 1.0, now in {torch.__version__}"]),
    ],
)
def test_differences_from_the_run_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: list[str]
) -> None:
    assert replay(tmp_path, replace(healthy(), **changes)) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("different here: ")] == [f"different here: {one}" for one in said]


def test_missing_images_of_other_ranks_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = copy.deepcopy(healthy().config)
    config["batch_former"]["gather"] = config["train"]["compile"] = True
    assert replay(tmp_path, replace(healthy(), world_size=2, rank=1, config=config)) == 3
    out = capsys.readouterr().out
    assert "step 17, rank 1 of 2" in out
    assert "batch_former.gather=true let images attend to those of other ranks, which are missing here" in out
    assert "different here: it was compiled, and is not now" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.pt"], "file not found: nowhere.pt"),
        (["garbage.pt"], "garbage.pt is truncated or damaged"),
        (["other.pt"], "other.pt is not a captured step of detr_bf"),
        (["a.pt", "--device", "tpu"], "device must be auto, cpu, cuda or cuda:N; got 'tpu'"),
        (["a.pt", "--precision", "float64"], "the precision must be one of float32, bf16, fp16; got 'float64'"),
        (["lacking.pt", "--device", "cpu"], "lacking.pt belongs to another architecture"),
        (["newer.pt"], "unknown key 'colour'"),
        (["three.pt", "--device", "cpu"], "the config in three.pt: model.heads=3 must divide"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    healthy().save(Path("a.pt"))
    replace(healthy(), model={"a": torch.zeros(1)}).save(Path("lacking.pt"))
    replace(healthy(), config=healthy().config | {"colour": 1}).save(Path("newer.pt"))
    three = copy.deepcopy(healthy().config)
    three["model"]["heads"] = 3
    replace(healthy(), config=three).save(Path("three.pt"))
    torch.save({"model": {}}, "other.pt")
    Path("garbage.pt").write_bytes(b"anything")
    capsys.readouterr()  # what the preparation printed
    assert run_tool(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert said in printed.err
