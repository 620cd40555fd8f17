"""Detector training on the command line: runs from start to end, and wrong arguments."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import detr_bf
from detr_bf.common.errors import InputError
from detr_bf.engine import Checkpoint, RunFolder, load_checkpoint
from detr_bf.engine.loggers import TensorBoardLogger, WandbLogger
from tests.references.wandb_file import wandb_rows
from tests.tools.conftest import with_report

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_net: Callable[[Sequence[str]], int] = tool("train_net").main
check_data_tool: Callable[[Sequence[str]], int] = tool("check_data").main
predict: Callable[[Sequence[str]], int] = tool("predict").main


def assert_same(actual: object, expected: object, path: str = "checkpoint") -> None:
    """Assert bitwise equality, through dictionaries and lists."""
    assert type(actual) is type(expected), path
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), path
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_same(actual[key], value, f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{path}[{index}]")
    else:
        assert actual == expected, path


def records(path: Path, kind: str) -> list[dict[str, float]]:
    return [record for line in path.read_text().splitlines() if (record := json.loads(line))["kind"] == kind]


def test_a_run_leaves_everything_in_its_folder(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_report(tiny)
    assert train_net(["--config", str(tiny)]) == 0
    run = tmp_path / "run"
    said = capsys.readouterr().out
    assert said.startswith("AP 0.")
    assert str(run / "report.html") in said
    for name in ("config.yaml", "log.txt", "metrics.jsonl", "last.pt", "best.pt", "evaluation.json", "results.json"):
        assert (run / name).stat().st_size, name
    assert (run / "pictures" / "validation.png").read_bytes().startswith(b"\x89PNG")
    assert "<img" in (run / "report.html").read_text() or "<svg" in (run / "report.html").read_text()
    steps = records(run / "metrics.jsonl", "train")
    assert [record["step"] for record in steps] == list(range(1, 16))
    assert all(record["stream/clean"] > 0 and record["stream/batchformer"] > 0 for record in steps)
    for record in steps:
        assert record["loss"] == pytest.approx((record["stream/clean"] + record["stream/batchformer"]) / 2, rel=1e-5)
        assert [record[f"weight/loss_{term}"] for term in ("ce", "bbox", "giou")] == [1, 5, 2]
    means = [line for line in (run / "log.txt").read_text().splitlines() if "mean of 5 steps: loss" in line]
    assert len(means) == 3, "one line for every epoch"
    assert all(f"epoch {epoch}, step {5 * epoch}" in line for epoch, line in enumerate(means, start=1))
    assert f"loss {sum(record['loss'] for record in steps[5:10]) / 5:.4g} (ce" in means[1]
    evaluations = records(run / "metrics.jsonl", "val")
    assert [record["epoch"] for record in evaluations] == [1, 2, 3]
    last = evaluations[-1]
    assert {name: last[name] for name in json.loads((run / "evaluation.json").read_text())["losses"]} == {
        name: last[name] for name in ("loss", "loss_ce", "loss_bbox", "loss_giou")
    }
    assert "BatchFormerV2 is on: before encoder layer 0" in (run / "log.txt").read_text()
    results = json.loads((run / "results.json").read_text())
    assert {result["category_id"] for result in results} <= {3, 7, 90}
    assert {result["image_id"] for result in results} <= set(range(101, 105))


@pytest.mark.full
def test_the_data_are_described_with_and_without_checks_and_in_evaluations(tiny: Path, tmp_path: Path) -> None:
    with_report(tiny)
    common = ["--config", str(tiny), "train.max_steps=1", "data.check=false"]
    assert train_net([*common, f"output_dir={tmp_path / 'unchecked'}"]) == 0
    assert train_net([*common, "data.check=true"]) == 0
    texts = [(tmp_path / name / "data_statistics.json").read_text() for name in ("unchecked", "run")]
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["splits"]["train"]["images"] == 15
    assert "<h2>Data</h2>" in (tmp_path / "run" / "report.html").read_text()
    elsewhere = [f"output_dir={tmp_path / 'other'}", f"init_from={tmp_path / 'run'}"]
    assert train_net([*common, "--eval-only", *elsewhere]) == 0
    described = json.loads((tmp_path / "other" / "data_statistics.json").read_text())
    assert described["splits"] == {"val": json.loads(texts[0])["splits"]["val"]}
    assert "class7" in (tmp_path / "other" / "report.html").read_text()


@pytest.mark.full
def test_loggers_hold_what_the_run_has_written_also_after_a_resumption(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorboard", "wandb", "mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(module, reason="needs detr_bf[tensorboard,wandb,mlflow]")
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in [each for each in os.environ if each.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("MLFLOW_DISABLE_TELEMETRY", "true")):
        monkeypatch.setenv(name, value)
    arguments = ["--config", str(tiny), "train.loggers=[tensorboard,wandb,mlflow]"]
    assert train_net([*arguments, "train.epochs=1"]) == 0
    assert train_net([*arguments, "train.epochs=2", "--resume"]) == 0
    run = tmp_path / "run"
    pictures = {path.stem for path in (run / "pictures").iterdir() if path.suffix in (".png", ".jpg")}
    assert "validation" in pictures
    losses = [(record["step"], record["loss"]) for record in records(run / "metrics.jsonl", "train")]
    scores = [(record["step"], record["AP"]) for record in records(run / "metrics.jsonl", "val")]
    assert [step for step, _ in losses] == list(range(1, 11))
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    shown = events.Scalars("train/loss")
    assert [each.step for each in shown] == [step for step, _ in losses]
    assert [each.value for each in shown] == pytest.approx([loss for _, loss in losses])
    assert {tag.removeprefix("pictures/") for tag in events.Tags()["images"]} == pictures
    rows = wandb_rows(run)
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == losses
    assert [(row["step"], row["val/AP"]) for row in rows if "val/AP" in row] == scores
    assert {key for row in rows for key in row if key.endswith(".path")} == {f"pictures/{x}.path" for x in pictures}
    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow' / 'mlflow.db'}")
    (entry,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    history = client.get_metric_history(entry.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == losses
    assert {Path(each.path).stem for each in client.list_artifacts(entry.info.run_id, "pictures")} == pictures
    assert entry.data.params["model.hidden_dim"] == "32"


def test_a_logger_that_cannot_be_started_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")

    def fail(logger: object) -> None:
        (tmp_path / "run" / "wandb").mkdir()
        raise InputError("no key")

    monkeypatch.setattr(WandbLogger, "__enter__", fail)
    monkeypatch.setattr("detr_bf.tasks.run.check_loggers", lambda names: None)
    assert train_net(["--config", str(tiny), "train.loggers=[tensorboard,wandb]"]) == 2
    assert "no key" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_loggers_are_closed_if_the_run_cannot_be_resumed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with other trainable weights than the checkpoint's is found after the loggers have started."""
    pytest.importorskip("tensorboard")
    closed = []
    monkeypatch.setattr(TensorBoardLogger, "__exit__", lambda logger, *error: closed.append(error[0]))
    arguments = ["--config", str(tiny), "train.loggers=[tensorboard]", "train.max_steps=1"]
    assert train_net(arguments) == 0
    assert train_net([*arguments, "--resume", "train.max_steps=2", "model.backbone.frozen_stages=2"]) == 2
    assert closed == [None, InputError]


def test_a_missing_library_of_a_logger_is_told_before_the_folder_is_made(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(RunFolder, "create", lambda folder: pytest.fail("the folder is made"))
    assert train_net(["--config", str(tiny), "train.loggers=[wandb]"]) == 2
    assert "pip install 'detr_bf[wandb]'" in capsys.readouterr().err


def test_checkpoint_holds_the_class_map_and_the_config(tiny: Path, tmp_path: Path) -> None:
    train_net(["--config", str(tiny), "train.max_steps=1"])
    checkpoint = load_checkpoint(tmp_path / "run" / "last.pt")
    assert checkpoint.classes.category_ids == (3, 7, 90)
    assert checkpoint.model["decoder.heads.classes.0.weight"].shape[0] == 3 + 1
    assert checkpoint.config["train"]["max_steps"] == 1


@pytest.mark.default_tier("2")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_resumes_to_the_same_bits(tiny: Path, tmp_path: Path, workers: int) -> None:
    common = ["--config", str(tiny), f"data.workers={workers}", "checkpoint.every_steps=2"]
    assert train_net([*common, f"output_dir={tmp_path / 'whole'}"]) == 0
    killed = [*common, f"output_dir={tmp_path / 'killed'}"]
    metrics = tmp_path / "killed" / "metrics.jsonl"
    command = [sys.executable, str(TOOLS / "train_net.py"), *killed]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait_for(lambda: metrics.exists() and len(records(metrics, "train")) >= 7, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    step = load_checkpoint(tmp_path / "killed" / "last.pt").training["progress"]["step"]
    assert 5 <= step < 15, "killed during the run"
    assert train_net([*killed, "--resume"]) == 0
    whole, resumed = (load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "killed"))
    for part in ("model", "ema", "training", "class_map"):
        assert_same(getattr(resumed, part), getattr(whole, part), part)
    assert (tmp_path / "whole" / "results.json").read_text() == (tmp_path / "killed" / "results.json").read_text()
    for kind in ("train", "val"):
        here, there = (records(tmp_path / name / "metrics.jsonl", kind) for name in ("whole", "killed"))
        assert [_untimed(record) for record in here] == [_untimed(record) for record in there]


def _untimed(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "step_seconds"}


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < end, "the run did not get that far"
        time.sleep(0.02)


@pytest.mark.default_tier("15-143-2")
@pytest.mark.parametrize(
    ("number", "code", "workers"), [(signal.SIGINT, 130, 0), (signal.SIGTERM, 143, 0), (signal.SIGTERM, 143, 2)]
)
def test_an_interrupted_run_saves_and_says_how_to_go_on(
    tiny: Path, tmp_path: Path, number: int, code: int, workers: int
) -> None:
    """The signal goes to the whole process group, as a terminal, ``timeout`` and schedulers send it."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    command = [sys.executable, str(TOOLS / "train_net.py"), "--config", str(tiny), "train.epochs=500"]
    command += ["checkpoint.every_steps=100000", f"data.workers={workers}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    _wait_for(lambda: metrics.exists() and len(records(metrics, "train")) >= 2, process)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "--resume" in said
    saved = load_checkpoint(tmp_path / "run" / "last.pt").training["progress"]["step"]
    assert saved == records(metrics, "train")[-1]["step"], "the last finished step is saved"


def test_resume_of_a_finished_run_evaluates_again(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_net(["--config", str(tiny), "train.max_steps=2"])
    first = capsys.readouterr().out
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert train_net(["--config", str(tiny), "train.max_steps=2", "--resume"]) == 0
    assert capsys.readouterr().out == first
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_damaged_metrics_stop_neither_the_resumption_nor_the_report(tiny: Path, tmp_path: Path) -> None:
    assert train_net(["--config", str(tiny), "eval.pictures=0", "train.max_steps=2"]) == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    first, *others = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(first + b'{"kind": "train", "st\n\xff\x00\n{"kind": 7}\n' + b"".join(others))
    assert train_net(["--config", str(tiny), "eval.pictures=0", "train.max_steps=3", "--resume"]) == 0
    assert [record["step"] for record in records(metrics, "train")] == [1, 2, 3]
    assert "3 of 6 lines are damaged and dropped, the first is line 2" in (tmp_path / "run" / "log.txt").read_text()
    metrics.unlink()
    assert train_net(["--config", str(tiny), "eval.pictures=0", "train.max_steps=4", "--resume"]) == 0
    assert [record["step"] for record in records(metrics, "train")] == [4]


def test_eval_only_repeats_the_numbers(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_net(["--config", str(tiny), "train.max_steps=4"])
    trained = capsys.readouterr().out.split("report")[0]
    last = tmp_path / "run" / "last.pt"
    assert (
        train_net(["--config", str(tiny), "--eval-only", f"init_from={last}", f"output_dir={tmp_path / 'eval'}"]) == 0
    )
    assert capsys.readouterr().out.split("report")[0] == trained
    here, there = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("run", "eval"))
    assert here == there


def test_the_same_config_without_batch_former(tiny: Path, tmp_path: Path) -> None:
    assert train_net(["--config", str(tiny), "batch_former.enabled=false", "train.max_steps=2"]) == 0
    checkpoint = load_checkpoint(tmp_path / "run" / "last.pt")
    assert not any("batch_former" in name for name in checkpoint.model)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_accumulation_and_precision(tiny: Path, tmp_path: Path, precision: str) -> None:
    overrides = [f"train.precision={precision}", "train.accumulate=2", "train.batch_size=2", "train.epochs=1"]
    assert train_net(["--config", str(tiny), *overrides]) == 0
    steps = records(tmp_path / "run" / "metrics.jsonl", "train")
    assert [record["step"] for record in steps] == [1, 2, 3, 4], "seven batches; the last step has one batch"


def test_a_batch_of_one_and_images_without_objects(
    tiny: Path, tmp_path: Path, coco_folder: Callable[..., object]
) -> None:
    empty = coco_folder(num_images=2, objects=0, name="empty", first_image_id=51)
    overrides = [f"data.train.images={empty.images}", f"data.train.annotations={empty.annotations}", "data.check=false"]
    assert train_net(["--config", str(tiny), *overrides, "train.batch_size=1", "train.max_steps=2"]) == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "no effect across images" in log
    assert all(record["loss"] > 0 for record in records(tmp_path / "run" / "metrics.jsonl", "train"))


def test_fine_tuning_with_other_classes_and_queries(
    tiny: Path, tmp_path: Path, coco_folder: Callable[..., object]
) -> None:
    train_net(["--config", str(tiny), "train.max_steps=1"])
    other = coco_folder(num_images=6, category_ids=(1, 2), name="other", first_image_id=201)
    overrides = [
        f"data.{split}.{key}={getattr(other, key)}" for split in ("train", "val") for key in ("images", "annotations")
    ]
    overrides += [
        "model.num_queries=9",
        f"init_from={tmp_path / 'run' / 'last.pt'}",
        f"output_dir={tmp_path / 'tuned'}",
    ]
    assert (
        train_net(["--config", str(tiny), *overrides, "train.max_steps=1", "optimizer.lr=0", "optimizer.backbone_lr=0"])
        == 0
    )
    log = (tmp_path / "tuned" / "log.txt").read_text()
    assert "0 of 2 classes by name, 2 new: class1, class2" in log
    assert "decoder.queries.position.weight (file (6, 32), model (9, 32))" in log
    before, after = (load_checkpoint(tmp_path / name / "last.pt").weights for name in ("run", "tuned"))
    name = "decoder.layers.0.cross_attention.attention.value.weight"
    assert torch.equal(before[name], after[name])


def broken_json(tmp_path: Path) -> str:
    path = tmp_path / "broken.json"
    path.write_text('[{"image_id": 1, "score": 0.5}]')
    return f"data.train.annotations={path}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.train.annotations=/nowhere/train.json"], "/nowhere/train.json"),
        ([broken_json], "not a COCO detection file"),
        (["data.train.images=/nowhere"], "image folder /nowhere"),
        (["data.val.annotations=''"], "data.val.annotations is not set"),
        (["data.val.annotations=''", "data.val.images=''"], "data.val.images and data.val.annotations are not set"),
        (["train.epoch=3"], "unknown key 'train.epoch'"),
        (["train.epochs=many"], "train.epochs must be int"),
        (["batch_former.layers=[3]"], "batch_former.layers=[3]"),
        (["batch_former.layers=[]"], "batch_former.layers=[]"),
        (["--resume"], "nothing to resume"),
        (["--eval-only"], "nothing to evaluate"),
        (["init_from=/nowhere.pt"], "/nowhere.pt"),
        (["output_dir=/proc/nowhere"], "output_dir /proc/nowhere cannot be written"),
        (["device=cuda:77"], "device"),
        (["model.backbone.name=resnet49"], "resnet49"),
        (["model.backbone.strides=[8,16]"], "one feature map"),
        (["init_from=/"], "/last.pt"),
        (["output_dir=/dev/null"], "output_dir /dev/null cannot be written"),
    ],
)
def test_bad_input_exits_with_2_before_anything_is_written(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[object], message: str
) -> None:
    given = [argument(tmp_path) if callable(argument) else str(argument) for argument in arguments]
    assert train_net(["--config", str(tiny), *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_resuming_with_other_settings_follows_them(tiny: Path, tmp_path: Path) -> None:
    common = ["--config", str(tiny), "optimizer.schedule=cosine"]
    train_net([*common, "train.epochs=1", "optimizer.lr=1e-4"])
    assert train_net([*common, "train.epochs=2", "optimizer.lr=1e-3", "--resume"]) == 0
    steps = records(tmp_path / "run" / "metrics.jsonl", "train")
    assert len(steps) == 10
    expected = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(5, 10)]
    assert [record["lr"] for record in steps[5:]] == pytest.approx(expected)
    assert "optimizer.lr: 0.0001 -> 0.001" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [("model.backbone.frozen_stages=2", "other parameters frozen"), ("model.decoder_layers=3", "another architecture")],
)
def test_resuming_another_model_is_refused(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    train_net(["--config", str(tiny), "train.max_steps=1"])
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.suffix == ".pt"}
    assert train_net(["--config", str(tiny), override, "--resume"]) == 2
    assert message in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.suffix == ".pt"}


def test_a_kill_between_two_files_of_a_save_loses_neither(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_at_best(self: Checkpoint, path: Path, previous: Path | None = None) -> None:
        if path.name == "best.pt":
            raise KeyboardInterrupt
        save(self, path, previous)

    save = Checkpoint.save
    monkeypatch.setattr(Checkpoint, "save", killed_at_best)
    assert train_net(["--config", str(tiny), "train.epochs=1"]) == 130
    monkeypatch.undo()
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    assert train_net(["--config", str(tiny), "train.epochs=1", "--resume"]) == 0
    assert (tmp_path / "run" / "best.pt").exists()
    assert len(records(tmp_path / "run" / "metrics.jsonl", "val")) == 1


def test_a_folder_that_holds_a_run_is_not_overwritten(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_net(["--config", str(tiny), "train.max_steps=1"])
    before = (tmp_path / "run" / "last.pt").read_bytes()
    assert train_net(["--config", str(tiny)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert (tmp_path / "run" / "last.pt").read_bytes() == before


def test_checkpoints_of_other_kinds(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_net(["--config", str(tiny), "train.max_steps=1"])
    last = tmp_path / "run" / "last.pt"
    evaluate = ["--config", str(tiny), "--eval-only", f"output_dir={tmp_path / 'eval'}"]
    capsys.readouterr()

    assert train_net([*evaluate, f"init_from={last}", "model.decoder_layers=3"]) == 2
    said = capsys.readouterr().err
    assert "another architecture" in said
    assert "decoder.layers.2." in said

    truncated = tmp_path / "truncated.pt"
    truncated.write_bytes(last.read_bytes()[:5000])
    assert train_net([*evaluate, f"init_from={truncated}"]) == 2
    assert "truncated or damaged" in capsys.readouterr().err

    armed = tmp_path / "armed.pt"
    torch.save({"model": _Armed(str(tmp_path / "executed"))}, armed)
    assert train_net([*evaluate, f"init_from={armed}"]) == 2
    assert "refused" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


class _Armed:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.marker,)


def test_data_errors_stop_the_run_with_the_table(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train" / "images" / "0003.png").unlink()
    for main in (train_net, check_data_tool):
        assert main(["--config", str(tiny)]) == 2
        said = capsys.readouterr()
        assert "0003.png" in said.err + said.out
    assert not (tmp_path / "run" / "last.pt").exists()


def test_a_loss_that_is_not_finite_stops_with_names(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["optimizer.lr=1e30", "optimizer.backbone_lr=1e30", "optimizer.clip_norm=0"]
    assert train_net(["--config", str(tiny), *arguments]) == 1
    said = capsys.readouterr().err
    assert "step" in said
    assert ".png" in said
    assert "loss_ce" in said


@pytest.mark.full
def test_predictor_and_predict_tool(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_report(tiny)
    train_net(["--config", str(tiny), "train.max_steps=2"])
    val = tmp_path / "val" / "images"
    found = detr_bf.load(tmp_path / "run", device="cpu")(val / "0101.png", threshold=0)
    assert found.boxes.shape == (6, 4)
    assert (found.scores[:-1] >= found.scores[1:]).all()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    (from_best,) = [load_checkpoint(tmp_path / "run" / "best.pt")]
    assert from_best.classes.names == ("class3", "class7", "class90")
    same = [result for result in results if result["image_id"] == 101]
    assert sorted(round(r["score"], 4) for r in same) == sorted(round(s, 4) for s in found.scores.tolist())

    output = tmp_path / "predictions"
    arguments = [str(tmp_path / "run"), "--output", str(output), "--threshold", "0", "--device", "cpu"]
    assert predict([*arguments, str(val), str(val / "0101.png")]) == 0
    entries = json.loads((output / "predictions.json").read_text())
    assert len(entries) == 5
    assert len(list(output.glob("*.png"))) == 5
    assert {o["category_id"] for entry in entries for o in entry["objects"]} <= {3, 7, 90}

    errors = json.loads((tmp_path / "run" / "errors.json").read_text())
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert errors["ap50"] == pytest.approx(evaluation["AP50"], abs=1e-12)
    assert errors["classes"] == ["class3", "class7", "class90"]
    assert {entry["file"] for entry in errors["worst"]} <= {path.name for path in val.iterdir()}
    assert "Annotations to check" in (tmp_path / "run" / "report.html").read_text()
    best = evaluation["best"]
    assert from_best.thresholds == (
        best
        and {
            "overall": best["threshold"],
            "by_class": [(own["best"] or best)["threshold"] for own in evaluation["per_class"].values()],
        }
    )
    kept = detr_bf.load(tmp_path / "run", device="cpu")(val / "0101.png")
    threshold = best["threshold"] if best else 0.5
    assert kept.scores.tolist() == [score for score in found.scores.tolist() if score >= threshold]
    (val / "notes.pdf").write_text("not an image")
    (val / "folder.png").mkdir()
    inside = [argument.replace(str(output), str(val / "predictions")) for argument in arguments]
    for _ in range(2):
        assert predict([*inside, str(val)]) == 0
        assert len(json.loads((val / "predictions" / "predictions.json").read_text())) == 4, "not its own pictures"
    capsys.readouterr()
    assert predict([*arguments, str(tmp_path / "missing.jpg")]) == 2
    assert "missing.jpg" in capsys.readouterr().err
    a_file = [argument.replace(str(output), str(val / "notes.pdf")) for argument in arguments]
    assert predict([*a_file, str(val / "0101.png")]) == 2
    assert "notes.pdf" in capsys.readouterr().err


def test_evaluation_does_not_depend_on_the_batch_size(
    tiny: Path, tmp_path: Path, coco_folder: Callable[..., SimpleNamespace]
) -> None:
    """Images of several sizes: padding would change scores and boxes, so batches must not contain padding."""
    mixed = coco_folder(num_images=3, name="mixed", first_image_id=301)
    for number, size in enumerate(((40, 70), (80, 48), (64, 64)), start=1):
        other = coco_folder(num_images=2, name=f"other{number}", first_image_id=310 + 10 * number, size=size)
        for file in other.images.iterdir():
            shutil.copy(file, mixed.images)
        mixed.content["images"] += other.content["images"]
        mixed.content["annotations"] += other.content["annotations"]
    mixed.save()
    train_net(["--config", str(tiny), "train.max_steps=3"])
    found = []
    for size in (1, 3):
        output = tmp_path / f"eval{size}"
        arguments = ["--eval-only", f"init_from={tmp_path / 'run' / 'last.pt'}", f"eval.batch_size={size}"]
        arguments += [f"output_dir={output}", f"data.val.images={mixed.images}"]
        assert train_net(["--config", str(tiny), *arguments, f"data.val.annotations={mixed.annotations}"]) == 0
        found.append(json.loads((output / "results.json").read_text()))
    assert len(found[0]) == 9 * 6
    for one, other in zip(*found, strict=True):
        assert one["image_id"] == other["image_id"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)
        assert one["bbox"] == pytest.approx(other["bbox"], abs=1e-3)


def test_what_its_launcher_starts_anew_goes_on_with_its_own_run_alone(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun restarts every failed process, including one that was refused because the folder holds another run."""
    command = ["--config", str(tiny)]
    assert train_net([*command, "train.max_steps=2"]) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train_net([*command, "train.max_steps=3"]) == 0, "like the launcher of that run"
    assert load_checkpoint(tmp_path / "run" / "last.pt").training["progress"]["step"] == 3
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    capsys.readouterr()
    assert train_net([*command, "train.max_steps=4"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert load_checkpoint(tmp_path / "run" / "last.pt").training["progress"]["step"] == 3


def test_a_resumed_run_notices_other_data_and_counts_in_images(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Annotations are edited in place, and a step has twice the images."""
    command, run = ["--config", str(tiny), "eval.pictures=0"], tmp_path / "run"
    assert train_net([*command, "train.max_steps=7"]) == 0
    progress = load_checkpoint(run / "last.pt").training["progress"]
    assert (progress["epoch"], progress["images"]) == (1, 6)
    for split, images in (("train", 12), ("val", 4)):
        path = tmp_path / split / "annotations.json"
        content = json.loads(path.read_text())
        kept = {image["id"] for image in content["images"][:images]}
        content["images"] = content["images"][:images]
        content["annotations"] = [each for each in content["annotations"] if each["image_id"] in kept]
        content["annotations"][0]["bbox"] = [1, 1, 9, 8]
        path.write_text(json.dumps(content))
    capsys.readouterr()
    assert train_net([*command, "--resume", "train.accumulate=2"]) == 0
    said = capsys.readouterr().err
    for text in ("data.train had 15 images with", "has 12 images with", "data.val had 4 images with", "best.pt"):
        assert text in said, text
    assert "resumed at step 7 of 10, after 1.5 of 3 epochs" in said, "2 steps of 6 images an epoch"
    found = records(run / "metrics.jsonl", "val")
    assert [(record["epoch"], "score" in record) for record in found] == [(1, False), (2, False), (2, True), (3, True)]
    assert load_checkpoint(run / "best.pt").training["progress"]["best_step"] in (8, 10)
    assert train_net([*command, "--resume", "train.accumulate=2", "train.epochs=2"]) == 2
    assert "has trained for 3 epochs" in capsys.readouterr().err
