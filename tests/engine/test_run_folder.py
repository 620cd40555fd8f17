"""Output folder: locked against other processes; foreign files in it are never removed or replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from detr_bf.common.errors import InputError
from detr_bf.common.files import UNFINISHED, atomic_write
from detr_bf.engine import CreatedFiles, RunFolder, RunMarker

HOLD = """
import multiprocessing, sys, time
from pathlib import Path
from detr_bf.engine import RunFolder, RunMarker

folder = RunFolder(Path(sys.argv[1]))
with folder.locked():
    folder.mark(RunMarker.of_this_process("training"))
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    print(child.pid, flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Process that holds the lock of the folder, and its forked child, like a loader worker."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_locked_folder_is_refused_and_its_holder_named(tmp_path: Path) -> None:
    process, child = holder(tmp_path / "run")
    try:
        with pytest.raises(InputError, match=f"process {process.pid} on {socket.gethostname()} since 20") as refused:
            RunFolder(tmp_path / "run").locked().__enter__()
        assert str(tmp_path / "run") in str(refused.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(child, 0)  # the child is alive but does not hold the lock
        with RunFolder(tmp_path / "run").locked():
            pass
    finally:
        process.kill()
        process.wait()
        os.kill(child, signal.SIGKILL)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"detr_bf-run.lock", "detr_bf-run.json"}, "a refused process removes nothing"


def test_two_folders_of_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    a, b = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    with a.locked(), b.locked(), pytest.raises(InputError, match="in use by another run"):
        a.locked().__enter__()
    with RunFolder(tmp_path / "a").locked():
        pass


def written_by_us(folder: RunFolder, created: CreatedFiles) -> None:
    folder.mark(RunMarker.of_this_process("training"))
    for path in (folder.log, folder.metrics, folder.config, folder.machine):
        path.write_text("ours")
    folder.tensorboard.mkdir(exist_ok=True)
    events = folder.tensorboard / "events.out.tfevents.1"
    events.write_text("ours")
    paths = folder.marker, folder.log, folder.metrics, folder.config, folder.machine, folder.tensorboard, events
    created.add(*paths)


def end_with(
    error: BaseException, folder: RunFolder, write: Callable[[RunFolder, CreatedFiles], None], begun: bool = False
) -> None:
    """Lock the folder, write into it and raise the error."""

    def run() -> None:
        with folder.locked() as created:
            write(folder, created)
            if begun:
                created.keep()
            raise error

    with pytest.raises(type(error)):
        run()


def test_bad_input_leaves_no_trace_of_a_new_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new" / "deeper" / "run")
    end_with(InputError("bad"), folder, written_by_us)
    assert list(tmp_path.iterdir()) == []


def test_bad_input_removes_what_this_process_wrote_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new" / "run")
    (tmp_path / "mine.txt").write_text("before")
    names = ("notes.md", "last.pt", "epoch_0003.pt", "results.json", "tensorboard/notes")

    def written_by_both(folder: RunFolder, created: CreatedFiles) -> None:
        written_by_us(folder, created)
        for name in names:
            (folder.path / name).write_text("theirs")
        (folder.path / "pictures").mkdir()

    end_with(InputError("bad"), folder, written_by_both)
    left = {path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*")}
    assert left == {
        "notes.md",
        "last.pt",
        "epoch_0003.pt",
        "results.json",
        "pictures",
        "tensorboard",
        "tensorboard/notes",
    }


def test_bad_input_removes_the_files_of_loggers_unless_their_folder_was_there(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new" / "run")
    names = "run-1/files/config.yaml", "run-1/run-1.wandb"

    def written_by_wandb(folder: RunFolder, created: CreatedFiles) -> None:
        for name in names:
            (folder.wandb / name).parent.mkdir(parents=True, exist_ok=True)
            (folder.wandb / name).write_text("ours")
        (folder.wandb / "latest-run").symlink_to("run-1")
        created.add(*folder.logged_files())

    end_with(InputError("bad"), folder, written_by_wandb)
    assert list(tmp_path.iterdir()) == []
    folder.wandb.mkdir(parents=True)
    end_with(InputError("bad"), folder, written_by_wandb)
    assert all((folder.wandb / name).exists() for name in names)


def test_bad_input_leaves_what_was_there_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked() as created:
        written_by_us(folder, created)
        created.keep()
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    end_with(InputError("bad"), folder, written_by_us)
    assert before.keys() == {path for path in folder.path.rglob("*") if path.is_file()}, "rewritten, not removed"


def test_a_file_that_somebody_puts_in_the_place_of_ours_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")

    def replaced(folder: RunFolder, created: CreatedFiles) -> None:
        written_by_us(folder, created)
        for path in (folder.config, folder.tensorboard / "events.out.tfevents.2"):
            (tmp_path / "theirs").write_text("theirs")
            (tmp_path / "theirs").rename(path)

    end_with(InputError("bad"), folder, replaced)
    assert {path.name for path in folder.path.rglob("*")} == {"config.yaml", "tensorboard", "events.out.tfevents.2"}


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked() as created:
        folder.log.write_text("ours")
        created.add(folder.log)
        created.check_not_overwriting(folder.log, folder.config)
        folder.config.write_text("theirs")
        with pytest.raises(InputError, match=r"config\.yaml was just created by another program"):
            created.check_not_overwriting(folder.log, folder.config)
        created.keep()
    with folder.locked() as created:
        created.check_not_overwriting(folder.log, folder.config)


def test_the_lock_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed, unlink = [], Path.unlink

    def noted(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    end_with(InputError("bad"), RunFolder(tmp_path / "run"), written_by_us)
    ours = [name for name in removed if not name.startswith(UNFINISHED)]
    assert ours[-1] == "detr_bf-run.lock"
    assert len(ours) == 7


@pytest.mark.parametrize("error", [InputError("late"), RuntimeError("ours"), KeyboardInterrupt()])
def test_files_stay_once_training_has_begun_and_when_it_is_no_bad_input(tmp_path: Path, error: BaseException) -> None:
    folder = RunFolder(tmp_path / "run")
    end_with(error, folder, written_by_us, begun=isinstance(error, InputError))
    assert folder.marker.exists()
    assert folder.log.exists()


NAMES = (
    *("config.yaml", "log.txt", "metrics.jsonl", "machine.json", "last.pt", "best.pt", "previous.pt"),
    *(
        "last.damaged.pt",
        "epoch_0012.pt",
        "cost.json",
        "evaluation.json",
        "results.json",
        "data_statistics.json",
        "predictions.csv",
        "panoptic.json",
    ),
    *("report.html", "panoptic/", "pictures/", "captures/", "tensorboard/", "wandb/", "mlflow/", "loggers.json"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_file_of_the_name_of_ours_is_refused(tmp_path: Path, name: str) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / name
    path.mkdir() if name.endswith("/") else path.write_text("theirs")
    with pytest.raises(InputError, match=f"holds {name.strip('/')}, which a run would overwrite"):
        folder.check_no_foreign_files()
    folder.mark(RunMarker.of_this_process("training"))
    folder.check_no_foreign_files()


def test_files_of_other_names_are_nobodys_business(tmp_path: Path) -> None:
    for name in ("notes.md", ".env.production.local", "model.pt", "config.yml", "epoch.txt"):
        (tmp_path / name).write_text("theirs")
    RunFolder(tmp_path).check_no_foreign_files()


def test_a_dangling_link_counts_as_a_foreign_file(tmp_path: Path) -> None:
    (tmp_path / "results.json").symlink_to(tmp_path / "missing")
    with pytest.raises(InputError, match=r"results\.json"):
        RunFolder(tmp_path).check_no_foreign_files()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\x00", b'{"kind": 1}', b"[" * 100_000])
def test_a_damaged_marker_is_told(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.marker.write_bytes(content)
    with pytest.raises(InputError, match=r"detr_bf-run\.json is damaged"):
        folder.read_marker()


def test_the_marker_says_who_writes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_marker() is None
    folder.mark(RunMarker.of_this_process("evaluation", "abc"))
    marker = folder.read_marker()
    assert marker is not None
    assert (marker.kind, marker.pid, marker.evaluated) == ("evaluation", os.getpid(), "abc")
    assert marker.since.startswith(time.strftime("%Y-"))


def test_unfinished_files_are_removed_from_every_folder_of_a_run(tmp_path: Path) -> None:
    folder, left = RunFolder(tmp_path), []
    for path in (folder.last, folder.sheet, folder.panoptic / "0001.png", folder.capture(3, 0)):
        with atomic_write(path) as temporary:
            copy = temporary.with_suffix(".copy")
            copy.touch()
        left.append(copy)
    (folder.pictures / ".mine.a.png").touch()
    folder.remove_unfinished()
    assert not any(path.exists() for path in left)
    assert (folder.pictures / ".mine.a.png").exists()
    assert folder.last.exists()
