"""Loggers of a run. Weights & Biases and MLflow are the real programs, which work here without network."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import pytest
from PIL import Image

from detr_bf.common.errors import InputError, Interrupted
from detr_bf.engine import Logger, MetricsLog, RunFolder, check_loggers, make_loggers
from tests.references.wandb_file import wandb_rows

CONFIG = {"seed": 42, "train.epochs": 3, "train.loggers": ["wandb"], "model.name": "detr"}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "a run")
    folder.pictures.mkdir(parents=True)
    Image.new("RGB", (40, 30), (255, 120, 0)).save(folder.sheet)
    return folder


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return wandb without settings and credentials of the user; its service is stopped after the test."""
    module = pytest.importorskip("wandb", reason="needs detr_bf[wandb]")
    for name in [each for each in os.environ if each.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no.netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    module.teardown()
    yield module
    module.teardown()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of MLflow without runs; it takes seconds to make its tables."""
    module = pytest.importorskip("mlflow", reason="needs detr_bf[mlflow]")
    for name in ("sqlalchemy", "alembic"):
        pytest.importorskip(name, reason="needs detr_bf[mlflow]")
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    module.MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow(folder: RunFolder, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return MLflow without settings of the user, and with a store without runs in the folder."""
    for name in [each for each in os.environ if each.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    folder.mlflow.mkdir()
    shutil.copy(empty_store, folder.mlflow)
    return import_module("mlflow")


def records(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def run_steps(folder: RunFolder, names: tuple[str, ...], steps: range, resume_from: int | None = None) -> None:
    """Log like a run of two steps an epoch that ends with a picture; without steps like one that has ended before."""
    kept = None if resume_from is None else {"train": resume_from, "val": resume_from}
    with MetricsLog(folder.metrics, kept, make_loggers(names, folder, CONFIG, kept)) as log:
        for step in steps:
            log.write("train", step, {"loss": 1 / step, "lr/backbone": 1e-4})
            if step % 2 == 0:
                log.write("val", step, {"AP": step / 100})
        log.write_picture("validation", steps.stop - 1, folder.sheet)


def mlflow_runs(mlflow: ModuleType, folder: RunFolder) -> list[Any]:
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.mlflow / 'mlflow.db'}")
    return [run for each in client.search_experiments() for run in client.search_runs(each.experiment_id)]


def mlflow_history(mlflow: ModuleType, folder: RunFolder, key: str) -> list[tuple[int, float]]:
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.mlflow / 'mlflow.db'}")
    (run,) = mlflow_runs(mlflow, folder)
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, key)]


class Recorder:
    """A user's logger, which needs no base class."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, int, dict[str, float]]] = []
        self.pictures: list[tuple[str, int, Path]] = []

    def log_scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self.scalars.append((kind, step, dict(values)))

    def log_picture(self, name: str, step: int, path: Path) -> None:
        self.pictures.append((name, step, path))


class Managed(Recorder):
    """A logger that notes when it is entered and left."""

    def __init__(self, faults: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.faults = faults

    def __enter__(self) -> Managed:
        self.calls.append("entered")
        if "start" in self.faults:
            raise InputError("no key")
        return self

    def log_scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if step in (2, 3) and "scalars" in self.faults:
            raise ConnectionError(f"the server is away at step {step}")
        super().log_scalars(kind, step, values)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.calls.append(error)
        if "end" in self.faults:
            raise OSError("disk full")


def test_an_object_of_the_user_gets_the_numbers_of_the_file_and_the_pictures(folder: RunFolder) -> None:
    mine = Recorder()
    conforming: Logger = mine
    log = MetricsLog(folder.metrics, loggers=[conforming])
    log.write("train", 1, {"loss": 2.5, "epoch": 0.5, "note": "text", "lr": 0.1})
    log.write("val", 1, {"AP": math.inf})
    log.write_picture("validation", 1, folder.sheet)
    log.close()
    assert mine.scalars == [("train", 1, {"loss": 2.5, "epoch": 0.5, "lr": 0.1}), ("val", 1, {"AP": math.inf})]
    assert mine.pictures == [("validation", 1, folder.sheet)]
    assert records(folder)[1] == {"kind": "val", "step": 1, "AP": None}


def test_the_file_has_a_record_before_a_logger_gets_it(folder: RunFolder) -> None:
    class Reading(Recorder):
        def log_scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
            self.scalars.append((kind, step, records(folder)[-1]))

    reading = Reading()
    log = MetricsLog(folder.metrics, loggers=[reading])
    log.write("train", 7, {"loss": 2.5})
    log.close()
    assert reading.scalars == [("train", 7, {"kind": "train", "step": 7, "loss": 2.5})]


def test_a_failing_logger_is_left_out_with_one_warning(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    failing, other = Managed(faults=("scalars", "end")), Recorder()
    with MetricsLog(folder.metrics, loggers=[failing, other]) as log:
        for step in (1, 2, 3, 4):
            log.write("train", step, {"loss": 1.0})
        log.write_picture("validation", 4, folder.sheet)
    assert [step for _, step, _ in failing.scalars] == [1]
    assert failing.pictures == []
    assert [step for _, step, _ in other.scalars] == [record["step"] for record in records(folder)] == [1, 2, 3, 4]
    assert failing.calls == ["entered", None], "it is left all the same"
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "Managed gets nothing more of this run (ConnectionError: the server is away at step 2); "
        f"{folder.metrics} is complete"
    )
    assert "could not be closed (OSError: disk full)" in second


@pytest.mark.parametrize("error", [RuntimeError("ours"), Interrupted(15, "stopped")])
def test_loggers_are_left_with_the_exception_that_ended_the_run(folder: RunFolder, error: BaseException) -> None:
    managed = Managed()
    with pytest.raises(type(error)), MetricsLog(folder.metrics, loggers=[managed]):
        raise error
    assert managed.calls == ["entered", error]


def test_a_logger_that_cannot_be_started_refuses_a_new_run_only(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    first, broken = Managed(), Managed(faults=("start",))
    with pytest.raises(InputError, match="no key") as refused:
        MetricsLog(folder.metrics, loggers=[first, broken])
    assert first.calls == ["entered", refused.value]
    assert not folder.metrics.exists()
    log = MetricsLog(folder.metrics, {"train": 3, "val": 3}, [broken])
    log.write("train", 4, {"loss": 1.0})
    log.close()
    assert "no key. The resumed run goes on without it" in caplog.text
    assert broken.scalars == []


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow"), ("mlflow", "alembic")],
)
def test_a_missing_library_is_told_with_the_extra_to_install(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ModuleType("found")
    found.__file__ = "found.py"
    for other in ("mlflow", "sqlalchemy"):  # mlflow remembers what was missing when it was imported first
        monkeypatch.setitem(sys.modules, other, found)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"train\.loggers: {name} needs .* pip install 'detr_bf\[{name}\]'"):
        check_loggers([name])


def test_a_folder_of_the_name_of_a_library_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # a run of W&B leaves one in the current directory
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(InputError, match=r"wandb is only a folder.*pip install 'detr_bf\[wandb\]'"):
        check_loggers(["wandb"])
    del sys.modules["wandb"]


def test_tensorboard_gets_numbers_and_pictures_once(folder: RunFolder) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_steps(folder, ("tensorboard",), range(1, 6))
    run_steps(folder, ("tensorboard",), range(4, 7), resume_from=3)
    run_steps(folder, ("tensorboard",), range(7, 7), resume_from=6)
    events = accumulator.EventAccumulator(str(folder.tensorboard)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(step, pytest.approx(1 / step)) for step in range(1, 7)]
    assert [event.step for event in events.Scalars("val/AP")] == [2, 4, 6]
    pictures = [(each.step, each.width, each.height) for each in events.Images("pictures/validation")]
    assert pictures == [(6, 40, 30)], "that of step 5 was after the checkpoint"


def test_wandb_gets_the_numbers_of_the_file_settings_and_pictures(
    folder: RunFolder, wandb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_steps(folder, ("wandb",), range(1, 5))
    config, *rows = wandb_rows(folder.path)
    assert {key: config["config"][key] for key in CONFIG} == CONFIG
    logged = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
    assert logged[:-1] == [
        {f"{record['kind']}/{key}": value for key, value in record.items() if key not in ("kind", "step")}
        | {"step": record["step"]}
        for record in records(folder)
    ]
    assert (logged[-1]["step"], logged[-1]["pictures/validation.width"]) == (4, 40)
    (picture,) = folder.path.glob(f"wandb/offline-run-*/files/{logged[-1]['pictures/validation.path']}")
    assert picture.read_bytes() == folder.sheet.read_bytes()
    assert wandb.run is None


def test_wandb_continues_its_run_without_repeating_steps(
    folder: RunFolder, wandb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_steps(folder, ("wandb",), range(1, 6))
    run_steps(folder, ("wandb",), range(4, 5), resume_from=3)  # and is killed before the step that was logged already
    run_steps(folder, ("wandb",), range(4, 8), resume_from=3)
    run_steps(folder, ("wandb",), range(8, 8), resume_from=7)
    ids = {path.stem.removeprefix("run-") for path in folder.wandb.glob("offline-run-*/*.wandb")}
    assert ids == {json.loads(folder.loggers.read_text())["wandb"]["id"]}
    rows = wandb_rows(folder.path)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in rows if "val/AP" in row] == [2, 4, 6]
    assert [row["step"] for row in rows if "pictures/validation.path" in row] == [5, 7]
    run_steps(folder, ("wandb",), range(1, 3))  # a new run in the folder
    assert json.loads(folder.loggers.read_text())["wandb"]["id"] not in ids
    assert [row["step"] for row in wandb_rows(folder.path) if "train/loss" in row][-2:] == [1, 2]


def test_wandb_without_a_key_is_offline_and_asks_nothing(
    folder: RunFolder, wandb: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("wandb asks"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    run_steps(folder, ("wandb",), range(1, 3))
    assert f"this run is logged offline. To upload it later: cd '{folder.path}' && wandb sync" in caplog.text
    assert [row["step"] for row in wandb_rows(folder.path) if "train/loss" in row] == [1, 2]


def test_a_wrong_key_of_wandb_is_told_before_training(
    folder: RunFolder, wandb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "too-short")
    with pytest.raises(InputError, match=r"train\.loggers: wandb cannot be started .*WANDB_API_KEY invalid"):
        run_steps(folder, ("wandb",), range(1, 3))


@pytest.mark.full
def test_mlflow_gets_the_numbers_of_the_file_settings_and_pictures(folder: RunFolder, mlflow: ModuleType) -> None:
    run_steps(folder, ("mlflow",), range(1, 5))
    (run,) = mlflow_runs(mlflow, folder)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a run")
    assert run.data.params == {
        "seed": "42",
        "train.epochs": "3",
        "train.loggers": "['wandb']",
        "model.name": "detr",
    }
    assert set(run.data.metrics) == {"train/loss", "train/lr/backbone", "val/AP"}
    for kind, name in (("train", "loss"), ("train", "lr/backbone"), ("val", "AP")):
        written = [(each["step"], each[name]) for each in records(folder) if each["kind"] == kind]
        assert mlflow_history(mlflow, folder, f"{kind}/{name}") == written
    (picture,) = folder.mlflow.glob("artifacts/*/artifacts/pictures/validation.png")
    assert picture.read_bytes() == folder.sheet.read_bytes()
    assert not mlflow.is_tracking_uri_set(), "nothing of the calling program is changed"
    assert not Path("mlruns").exists()


def test_mlflow_continues_its_run_without_repeating_steps(folder: RunFolder, mlflow: ModuleType) -> None:
    run_steps(folder, ("mlflow",), range(1, 6))
    run_steps(folder, ("mlflow",), range(4, 5), resume_from=3)
    run_steps(folder, ("mlflow",), range(4, 8), resume_from=3)
    assert mlflow_history(mlflow, folder, "train/loss") == [(step, 1 / step) for step in range(1, 8)]
    assert [step for step, _ in mlflow_history(mlflow, folder, "val/AP")] == [2, 4, 6]
    run_steps(folder, ("mlflow",), range(1, 3))
    assert len(mlflow_runs(mlflow, folder)) == 2, "a new run in the folder"


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("ours"), "FAILED"), (Interrupted(2, "stopped"), "KILLED")])
def test_mlflow_knows_how_a_run_ended(folder: RunFolder, mlflow: ModuleType, error: BaseException, status: str) -> None:
    loggers = make_loggers(("mlflow",), folder, {})
    with pytest.raises(type(error)), MetricsLog(folder.metrics, loggers=loggers):
        raise error
    (run,) = mlflow_runs(mlflow, folder)
    assert run.info.status == status


def test_names_that_mlflow_does_not_allow_are_replaced(folder: RunFolder, mlflow: ModuleType) -> None:
    with MetricsLog(folder.metrics, loggers=make_loggers(("mlflow",), folder, {})) as log:
        log.write("val", 1, {"AP@50 (größer)": 0.5, "inf": math.inf, "nan": math.nan})
    (run,) = mlflow_runs(mlflow, folder)
    assert run.data.metrics["val/AP_50 _größer_"] == 0.5
    assert math.isnan(run.data.metrics["val/nan"])


def test_mlflow_follows_its_environment(
    folder: RunFolder, mlflow: ModuleType, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder.mlflow)
    shutil.copy(empty_store, tmp_path / "team.db")
    uri = f"sqlite:///{tmp_path / 'team.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("ours", artifact_location=(tmp_path / "artifacts").as_uri())
    run_steps(folder, ("mlflow",), range(1, 3))
    assert not folder.mlflow.exists()
    (run,) = client.search_runs(experiment)
    assert run.data.metrics["train/loss"] == 0.5
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", client.create_experiment("by id", (tmp_path / "other").as_uri()))
    run_steps(folder, ("mlflow",), range(1, 3))
    assert len(client.search_runs(experiment)) == 1


def test_passwords_of_a_tracking_server_are_not_stored(
    folder: RunFolder, mlflow: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        def __init__(self, tracking_uri: str) -> None:
            assert tracking_uri == "http://me:secret@tracking.example"

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: SimpleNamespace(experiment_id="1", info=SimpleNamespace(run_id="r"))

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@tracking.example")
    monkeypatch.setattr(mlflow, "MlflowClient", Client)
    run_steps(folder, ("mlflow",), range(1, 3))
    assert json.loads(folder.loggers.read_text())["mlflow"] == {"id": "r", "store": "http://tracking.example"}


def test_a_moved_run_folder_gets_a_new_run_of_mlflow(folder: RunFolder, mlflow: ModuleType) -> None:
    run_steps(folder, ("mlflow",), range(1, 3))
    moved = RunFolder(folder.path.with_name("moved"))
    folder.path.rename(moved.path)
    run_steps(moved, ("mlflow",), range(3, 4), resume_from=2)
    assert not folder.path.exists(), "its artifacts must not go where the folder was"
    assert {run.info.run_name for run in mlflow_runs(mlflow, moved)} == {"a run", "moved"}
    assert len(list(moved.mlflow.glob("artifacts/*/artifacts/pictures/validation.png"))) == 2


def test_mlflow_refuses_a_folder_that_a_url_cannot_name(tmp_path: Path, mlflow: ModuleType) -> None:
    before = set(tmp_path.iterdir())
    folder = RunFolder(tmp_path / "which?")
    folder.path.mkdir()
    with pytest.raises(InputError, match=r"cannot be in .*which\?/mlflow.*set MLFLOW_TRACKING_URI"):
        MetricsLog(folder.metrics, loggers=make_loggers(("mlflow",), folder, {}))
    assert set(tmp_path.iterdir()) - before == {folder.path}


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"mlflow": 1}', '{"mlflow": {"id": "a"}}', '{"mlflow": {"train": "x"}}']
)
def test_a_damaged_list_of_runs_begins_new_ones(
    folder: RunFolder, mlflow: ModuleType, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.metrics.write_text('{"kind": "train", "step": 1, "loss": 1}\n')
    folder.loggers.write_text(content)
    run_steps(folder, ("mlflow",), range(2, 3), resume_from=1)
    assert "loggers.json is damaged" in caplog.text
    assert mlflow_history(mlflow, folder, "train/loss") == [(2, 0.5)]
