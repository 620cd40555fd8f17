"""Cells as processes: order, jobs, resuming after SIGKILL, failures, signals, commands for other machines."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import detr_bf.commands.compare  # noqa: F401  before a test replaces a name that it imports
from detr_bf.commands import command_main
from detr_bf.common.errors import InputError
from detr_bf.common.text import duration
from detr_bf.comparison import runner
from detr_bf.comparison.experiment import Experiment, ExperimentCell, flat_settings, read_experiment
from detr_bf.comparison.records import ExperimentFolder, _metrics, changed_settings, num_rows
from detr_bf.config import config_to_yaml, load_config
from detr_bf.engine import RunFolder, RunMarker
from tests.comparison import stubs
from tests.tools.launch import children

main = command_main("compare")

VAL = {"AP": 0.25, "AP50": 0.5, "APs": None}
CELLS = [ExperimentCell(arm, seed, None) for seed in (0, 1) for arm in ("off", "two_stream")]
SCRIPT = """
import os, shutil, sys, time
print("training", os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"])
open(sys.argv[3], "a").write(f"{sys.argv[4]} {time.monotonic()}\\n")
time.sleep(float(sys.argv[5]))
open(sys.argv[3], "a").write(f"{sys.argv[4]} {time.monotonic()}\\n")
if sys.argv[1] == "-":
    sys.exit("no good" if len(sys.argv) == 6 else int(sys.argv[6]))
shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True)
"""


def finished_run(path: Path, experiment: Experiment, cell: ExperimentCell) -> RunFolder:
    """Write the files of a finished run of a cell."""
    run = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    config = experiment.config(cell)
    config.output_dir = str(path)
    run.mark(RunMarker.of_this_process("training"))
    run.config.write_text(config_to_yaml(config))
    records: list[dict[str, Any]] = []
    for epoch in (1, 2):
        records += [{"kind": "train", "step": 10 * epoch, "epoch": epoch, "step_seconds": epoch / 10}]
        records += [{"kind": "val", "step": 10 * epoch, "epoch": epoch, "score": 0.1, **VAL, "AP50": epoch / 4}]
    run.metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run.machine.write_text('{"torch": "2", "command": "x"}')
    run.cost.write_text('{"peak_memory_mib": 300.5, "device_memory_mib": null}')
    run.results.write_text("[1, 2, 3]")
    run.evaluation.write_text("{}")
    for weights in (run.last, run.best, run.previous):
        weights.write_bytes(b"weights")
    return run


@pytest.fixture
def fake(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Replace training by a script that copies a finished run after some seconds, or ends with an exit code.

    ``fake(fails={cell: code}, seconds=0.0)`` returns the file to which it writes the cell at its start and at its end.
    """
    times = tmp_path / "times.txt"
    experiment = read_experiment(file)

    def install(fails: dict[ExperimentCell, int] | None = None, seconds: float = 0.0) -> Path:
        def command(
            asked: Experiment, folder: ExperimentFolder, cell: ExperimentCell, *, checked: bool = False
        ) -> list[str]:
            source = finished_run(tmp_path / "templates" / cell.name, experiment, cell).path
            code = (fails or {}).get(cell)
            arguments = [
                "-" if code else source,
                folder.run(cell).path,
                times,
                cell.name,
                seconds,
                *([code] if code else []),
            ]
            return [sys.executable, "-c", SCRIPT, *map(str, arguments)]

        monkeypatch.setattr(runner, "command_of", command)
        return times

    return install


def order(times: Path) -> list[str]:
    """Return the cells in the order of their starts and ends."""
    return [line.split()[0] for line in times.read_text().splitlines()] if times.exists() else []


@contextmanager
def when(condition: Callable[[], bool], action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` in a thread as soon as ``condition`` holds, unless the body ends before."""
    ended = threading.Event()

    def watch() -> None:
        while not condition():
            if ended.wait(0.02):
                return
        action()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def run(file: Path, *arguments: str) -> int:
    return main(["run", str(file), "--output", str(file.parent / "out"), "data.check=false", *arguments])


@pytest.mark.full
def test_a_killed_experiment_goes_on_and_finished_cells_are_not_touched(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Kill the runner and its training process with SIGKILL in the middle of the second cell."""
    file.write_text(file.read_text().replace("seeds: 2", "seeds: 1\noverrides: [train.epochs=6]"))
    out = tmp_path / "out"
    first, second = RunFolder(out / "runs/off/seed_0"), RunFolder(out / "runs/two_stream/seed_0")
    command = [sys.executable, stubs.__file__, "run", str(file), "--output", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2])])}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline = time.monotonic() + 600
    while not (second.metrics.exists() and second.metrics.read_text().count('"train"') >= 2):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    trained = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    for child in trained:
        os.kill(child, signal.SIGKILL)
    process.wait()
    assert first.evaluation.exists()
    assert not second.evaluation.exists()
    assert (out / "cells/off/seed_0.json").exists()
    before = state(first.path) | state(out / "cells" / "off")
    capfd.readouterr()
    assert main(["run", str(file), "--output", str(out)]) == 0
    assert "resumed at step" in (out / "logs/two_stream/seed_0.txt").read_text()
    assert "resumed at step" not in (out / "logs/off/seed_0.txt").read_text()
    assert state(first.path) | state(out / "cells" / "off") == before
    record = json.loads((out / "cells/two_stream/seed_0.json").read_text())
    assert [each["epoch"] for each in record["curve"]] == [1, 2, 3, 4, 5, 6]
    assert record["cost"]["steps"] == 12
    assert record["cost"]["rows"] == 6
    assert 50 < record["cost"]["peak_memory_mib"] < 4000
    assert 0 < record["cost"]["step_seconds"] <= record["cost"]["train_seconds"]
    assert record["data"]["train"]["images"] == 6
    assert record["data"]["val"]["objects"] == 8
    assert record["settings"]["batch_former.enabled"] is True
    assert record["machine"]["torch"]
    assert json.loads((out / "comparison.json").read_text())["cells"] == ["off 0 None", "two_stream 0 None"]
    assert "| AP | 2 cells |" in capfd.readouterr().out
    everything = state(out / "runs") | state(out / "cells" / "off") | state(out / "cells" / "two_stream")
    assert main(["run", str(file), "--output", str(out)]) == 0
    assert state(out / "runs") | state(out / "cells" / "off") | state(out / "cells" / "two_stream") == everything


def test_cells_are_trained_seed_by_seed_with_one_thread_each(file: Path, fake: Callable[..., Path]) -> None:
    times = fake()
    assert run(file) == 0
    assert order(times)[::2] == [cell.name for cell in CELLS]
    assert (file.parent / "out/logs/off/seed_1.txt").read_text().splitlines()[-1] == "training 1 passive"
    times.unlink()
    assert run(file) == 0
    assert not times.exists(), "nothing is trained twice"


@pytest.mark.full
def test_jobs_and_threads_are_numbers_of_the_command_line(file: Path, fake: Callable[..., Path]) -> None:
    times = fake(seconds=1.0)
    assert run(file, "--jobs", "4", "--threads", "3") == 0
    assert sorted(order(times)[:4]) == sorted(cell.name for cell in CELLS), "all have started before one has ended"
    assert "training 3 passive" in (file.parent / "out/logs/off/seed_1.txt").read_text()
    assert run(file, "--jobs", "0") == 2


def test_a_failing_cell_is_named_and_the_others_are_trained(
    file: Path, fake: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    times = fake({CELLS[1]: 3})
    assert run(file) == 1
    said = capfd.readouterr().err
    assert "two_stream/seed_0 ended with exit code 3" in said
    assert "training 1 passive" in said, "the end of its log"
    assert "1 of 4 cells failed" in said
    assert len(order(times)) == 8
    assert len(list((file.parent / "out/cells").glob("*/*.json"))) == 3
    assert json.loads((file.parent / "out/comparison.json").read_text())["cells"][-1] == "two_stream 1 None"


def test_failures_are_named_even_if_nothing_is_left_to_compare(
    file: Path, fake: Callable[..., Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake({CELLS[1]: 3})

    def nothing(*arguments: object) -> None:
        raise InputError("there is nothing to compare")

    monkeypatch.setattr("detr_bf.commands.compare.collect", nothing)
    monkeypatch.setattr(runner, "LOG_BYTES_OF_A_FAILURE", len("1 passive\n"))
    assert run(file) == 1
    said = capfd.readouterr().err
    assert "no report: there is nothing to compare" in said
    assert "1 of 4 cells failed" in said
    assert "    1 passive\n" in said, "the end of a log of any length"


def test_scores_of_raw_and_averaged_weights_are_no_metrics() -> None:
    scores = {"score": 0.1, "score/raw": 0.1, "score/averaged": 0.0, "loss": 2.0, "ece": 0.1}
    assert _metrics({"kind": "val", "step": 10, "epoch": 1, **scores, **VAL}) == VAL


def test_a_setting_that_is_younger_than_a_record_has_its_default_there() -> None:
    now = flat_settings(load_config(None, ["batch_former.heads=2"]))
    before = {key: value for key, value in now.items() if not key.startswith("data.mixup.")}
    assert changed_settings(now, before) == changed_settings(before, now) == []
    other = {**now, "data.mixup.prob": 0.5}
    assert changed_settings(other, before) == ["data.mixup.prob"]


@pytest.mark.parametrize("name", ["a: b", "${oc.env:HOME}"])
def test_a_folder_that_settings_cannot_name_is_refused(
    file: Path, name: str, fake: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    fake()
    assert main(["run", str(file), "--output", str(file.parent / name)]) == 2
    assert "characters with a meaning in YAML" in capsys.readouterr().err
    assert not (file.parent / "o").exists()


def test_cells_that_all_have_bad_input_give_exit_code_2(file: Path, fake: Callable[..., Path]) -> None:
    fake(dict.fromkeys(CELLS, 2))
    assert run(file) == 2
    assert not (file.parent / "out/comparison.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on(
    file: Path, fake: Callable[..., Path], number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    times = fake(seconds=600.0)

    start = time.monotonic()
    with when(lambda: len(order(times)) == 2, lambda: os.kill(os.getpid(), number)):
        assert run(file, "--jobs", "2") == 128 + number
    assert time.monotonic() - start < 500, "the cells do not go on"
    assert sorted(order(times)) == ["off/seed_0", "two_stream/seed_0"], "started, not ended, and no others started"
    assert "0 of 4 cells are finished" in capfd.readouterr().err


def test_a_cell_that_another_process_trains_is_left_to_it(file: Path, fake: Callable[..., Path]) -> None:
    """The lock of its run folder is held; at the end it is looked at again, and trained if there is no result."""
    times = fake()
    busy = [RunFolder(file.parent / "out/runs" / cell.name) for cell in CELLS[:2]]
    experiment = read_experiment(file, ["data.check=false"])
    locks = []
    for each in busy:
        each.path.mkdir(parents=True)
        locks.append(FileLock(each.lock, thread_local=False))
        locks[-1].acquire()

    def release() -> None:
        finished_run(busy[0].path, experiment, CELLS[0])
        for lock in locks:
            lock.release(force=True)

    with when(lambda: len(order(times)) > 0, release):  # then the two have been passed over
        assert run(file) == 0
    assert order(times)[::2] == [cell.name for cell in (*CELLS[2:], CELLS[1])]


def test_other_settings_than_before_are_refused(
    file: Path, fake: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    fake()
    assert run(file) == 0
    assert run(file, "train.epochs=4") == 2
    assert "has other settings than the experiment (train.epochs: 3 there, 4 now)" in capfd.readouterr().err
    for path in (file.parent / "out/cells").glob("*/*.json"):
        path.unlink()
    assert run(file, "optimizer.lr=1") == 2, "the run folders say it, too"
    assert "optimizer.lr" in capfd.readouterr().err


def test_bad_data_are_told_before_anything_trains(
    file: Path, fake: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    times = fake()
    (next((file.parent / "train/images").glob("*.png"))).write_bytes(b"no picture")
    assert main(["run", str(file), "--output", str(file.parent / "out")]) == 2
    assert "the data cannot be trained on" in capfd.readouterr().err
    assert not times.exists()


def test_weights_are_kept_unless_told_otherwise(file: Path, fake: Callable[..., Path]) -> None:
    fake()
    assert run(file) == 0
    runs = file.parent / "out/runs"
    assert len(list(runs.rglob("*.pt"))) == 12
    (runs / "off/seed_0/mine.pt").write_bytes(b"the user's")
    kept = RunFolder(runs / "off/seed_1")
    kept.marker.unlink()
    assert run(file, "--discard-weights") == 0
    assert sorted(path.name for path in runs.rglob("*.pt") if path.parent != kept.path) == ["mine.pt"]
    assert kept.last.exists(), "a folder without the mark of this program is left alone"


def test_printed_commands_train_the_unfinished_cells(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "with space"
    experiment = read_experiment(file, ["train.max_steps=2"])
    finished_run(out / "runs/off/seed_0", experiment, CELLS[0])
    assert main(["run", str(file), "train.max_steps=2", "--output", str(out), "--print"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.rpartition("/")[0].rpartition("/")[2] for line in lines] == ["two_stream", "off", "two_stream"]
    assert not (out / "cells").exists(), "nothing is written"
    words = shlex.split(lines[0])
    assert words[:3] == ["env", "OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=passive"]
    assert words[4:7] == ["-m", "detr_bf", "train"]
    assert {"--auto-resume", "seed=0", "train.max_steps=2", f"output_dir={out}/runs/two_stream/seed_0"} <= set(words)
    ended = subprocess.run(lines[0], shell=True, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert main(["report", str(out)]) == 0, "cells finished by hand are found by their folders"
    assert json.loads((out / "comparison.json").read_text())["cells"] == ["off 0 None", "two_stream 0 None"]


def test_quick_trains_every_arm_in_a_folder_of_its_own(file: Path, fake: Callable[..., Path]) -> None:
    fake()
    experiment = read_experiment(file, quick=True)
    assert [cell.name for cell in experiment.cells()] == ["off/seed_0", "two_stream/seed_0"]
    assert run(file, "--quick", "--print") == 0
    assert not (file.parent / "out").exists()


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        (["batch_former.enabled=false"], 5),
        (["batch_former.enabled=true", "batch_former.mode=two_stream"], 10),
        (["batch_former.enabled=true", "batch_former.mode=duplicate"], 10),
        (["batch_former.enabled=true", "batch_former.mode=single_stream"], 5),
        (["task=classification"], 5),
        (["task=classification", "plugins.batchformer_v2.enabled=true"], 10),
        (["task=classification", "plugins.batchformer.enabled=true"], 10),
    ],
)
def test_rows_are_counted_over_both_streams(settings: list[str], rows: int) -> None:
    assert num_rows(load_config(None, [*settings, "train.batch_size=5"])) == rows


@pytest.mark.parametrize(
    ("seconds", "text"), [(4, "4 s"), (200, "3 min"), (7300, "2 h 2 min"), (100_000, "1 d 3 h"), (3599, "1 h 0 min")]
)
def test_times_are_written_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_time_left_is_estimated_from_finished_cells_of_the_arm(file: Path) -> None:
    experiment = read_experiment(file)
    found = runner.CellRunner(experiment, ExperimentFolder(file.parent / "out"), jobs=2)
    assert found._seconds_left({}) is None
    found._seconds["off"], found._seconds["two_stream"] = [20.0], [20.0, 40.0]
    found._waiting = [CELLS[2], CELLS[3]]
    assert found._seconds_left({CELLS[1]: 0.5}) == pytest.approx((20 + 30 + 15) / 2)
    found._waiting = []
    assert found._seconds_left({CELLS[1]: 0.5}) == pytest.approx(15), "one cell cannot be shared by two jobs"


def test_a_foreign_run_in_the_place_of_a_cell_is_refused(file: Path) -> None:
    experiment = read_experiment(file)
    folder = ExperimentFolder(file.parent / "out")
    finished_run(folder.run(CELLS[0]).path, experiment, CELLS[2])
    with pytest.raises(InputError, match="has seed=1"):
        runner.unfinished_cells(experiment, folder)


def test_data_are_checked_again_where_the_checks_depend_on_augmentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {
        "plain": ["data.augment.zoom_out=0"],
        "zoom": ["data.augment.zoom_out=0.5"],  # nothing that the checks read
        "mosaic": ["data.augment.mosaic=0.5"],
        "pasted": ["data.augment.copy_paste=0.5"],
        "mixed": ["data.mixup.prob=0.5"],
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps({"title": "t", "base": "demo", "arms": arms, "baseline": "plain", "seeds": 1}))
    checked: list[Any] = []

    class Recorded:
        def __init__(self, config: Any) -> None:
            self.config = config

        def check_settings(self) -> None:
            pass

        def check(self) -> None:
            checked.append(self.config)

    monkeypatch.setattr(runner, "task_of", Recorded)
    experiment = read_experiment(path)
    runner.check_data(experiment, [ExperimentCell(arm, 0, None) for arm in arms])
    assert len(checked) == 4


def test_every_arm_is_built_before_the_first_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm with an unknown mixer fails before any data are read."""
    arms = {"off": ["batch_former.enabled=false"], "own": ["batch_former.mixer=mine"]}
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps({"title": "t", "base": "demo", "arms": arms, "baseline": "off", "seeds": 1}))
    experiment = read_experiment(path)
    monkeypatch.setattr("detr_bf.tasks.detection.DetectionTask.check", lambda self: pytest.fail("data were read"))
    with pytest.raises(InputError, match=r"arm own: batch_former\.mixer must be one of attention; got 'mine'"):
        runner.check_data(experiment, experiment.cells())
