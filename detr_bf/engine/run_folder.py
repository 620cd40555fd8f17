"""The output folder of a run: the names of its files, its lock, and the files that may be replaced or removed."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.common.files import (
    CONFIG_FILE,
    DATA_FILE,
    ERRORS_FILE,
    EVALUATION_FILE,
    MACHINE_FILE,
    MARKER_FILE,
    METRICS_FILE,
    PANOPTIC_SHEET_FILE,
    REPORT_FILE,
    SHEET_FILE,
    make_output_folder,
    remove_empty,
    remove_unfinished,
    write_json,
)
from detr_bf.common.text import listed, printable
from detr_bf.common.weights import BEST, LAST
from detr_bf.data.workers import end_unguarded

LOCK_SECONDS = 1.0  # to wait for the lock of a process that is just ending


@dataclass(frozen=True)
class RunMarker:
    """Content of the file that marks a folder as written by detr_bf, with the last process that wrote to it."""

    kind: str  # training or evaluation
    host: str
    pid: int
    since: str  # when the process locked the folder: local time, ISO 8601 with seconds
    launch: str  # distributed.launch_id()
    evaluated: str = ""  # evaluation: SHA-256 of the weights and settings

    @classmethod
    def of_this_process(cls, kind: str, evaluated: str = "") -> RunMarker:
        """Return a marker of this process."""
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(kind, socket.gethostname(), os.getpid(), since, distributed.launch_id(), evaluated)


class CreatedFiles:
    """Files that this process has created in a folder it has locked; removed if the input turns out to be bad.

    Args:
        existing: files and folders from before.
    """

    def __init__(self, existing: frozenset[Path]) -> None:
        self.kept = False
        self._existing = existing
        self._created: dict[Path, tuple[int, int]] = {}  # device and inode of each

    def add(self, *paths: Path) -> None:
        """Add files that this process has just written; existing and missing ones are ignored."""
        for path in paths:
            if self._existing.isdisjoint((path, *path.parents)):
                with suppress(FileNotFoundError):
                    self._created[path] = _identity(path)

    def check_not_overwriting(self, *paths: Path) -> None:
        """Refuse to overwrite files that have appeared since the folder was locked (InputError: there is one)."""
        for path in paths:
            if path not in self._existing and path not in self._created and path.exists():
                raise InputError(f"{path} was just created by another program and would be overwritten: move it away")

    def keep(self) -> None:
        """Keep the files, also after an InputError."""
        self.kept = True

    def remove(self) -> None:
        """Remove the files unless they are kept, in reverse order: the lock was created first and goes last."""
        for path, identity in () if self.kept else reversed(self._created.items()):
            with suppress(OSError):
                if _identity(path) != identity:
                    continue
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()  # an empty one only
                else:
                    path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


class _PathInRun:
    """Path of a file or folder in a run folder, as an attribute of :class:`RunFolder`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder | None, owner: type[RunFolder]) -> Any:
        return self if folder is None else folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The output folder of a training run or of an evaluation, and the paths of its files."""

    path: Path

    config = _PathInRun(CONFIG_FILE)
    log = _PathInRun("log.txt")
    metrics = _PathInRun(METRICS_FILE)
    machine = _PathInRun(MACHINE_FILE)
    marker = _PathInRun(MARKER_FILE)  # a RunMarker, in every folder that detr_bf writes to
    lock = _PathInRun("detr_bf-run.lock")  # held by the process that writes to the folder
    last = _PathInRun(LAST)
    best = _PathInRun(BEST)
    previous = _PathInRun("previous.pt")  # the ``last`` of the save before, used if ``last`` is damaged
    damaged = _PathInRun("last.damaged.pt")  # new name of a ``last`` that cannot be read
    captures = _PathInRun("captures")
    cost = _PathInRun("cost.json")  # memory of the last process that trained the run
    command = _PathInRun("command.json")  # of a run that a command of the user trained: its line and seconds
    output = _PathInRun("output")  # folder of that command
    evaluation = _PathInRun(EVALUATION_FILE)
    errors = _PathInRun(ERRORS_FILE)
    data = _PathInRun(DATA_FILE)  # statistics of a detector's training and validation data
    never_found = _PathInRun("never_found.json")  # validation objects that no evaluation of the run has found
    results = _PathInRun("results.json")
    predictions = _PathInRun("predictions.csv")  # of a classifier, one line per validation image
    panoptic = _PathInRun("panoptic")  # the PNG files that ``panoptic_results`` lists
    panoptic_results = _PathInRun("panoptic.json")
    report = _PathInRun(REPORT_FILE)
    pictures = _PathInRun(str(Path(SHEET_FILE).parent))
    sheet = _PathInRun(SHEET_FILE)
    panoptic_sheet = _PathInRun(PANOPTIC_SHEET_FILE)
    tensorboard = _PathInRun("tensorboard")
    wandb = _PathInRun("wandb")
    mlflow = _PathInRun("mlflow")
    loggers = _PathInRun("loggers.json")  # ids of the runs of W&B and MLflow, see detr_bf.engine.loggers

    def capture(self, step: int, rank: int) -> Path:
        return self.captures / f"step_{step:07d}_rank_{rank}.pt"

    def epoch(self, number: int) -> Path:
        return self.path / f"epoch_{number:04d}.pt"

    def create(self) -> list[Path]:
        """Create the folder, see :func:`detr_bf.common.files.make_output_folder`; return the folders that were missing.

        Raises:
            InputError: files cannot be written there.
        """
        return make_output_folder(self.path, "output_dir")

    @contextmanager
    def locked(self) -> Iterator[CreatedFiles]:
        """Create the folder and lock it within the block against every other process that writes to it.

        The kernel releases the lock when the process ends, however it ends. If an InputError ends the block, only the
        created files and folders are removed.

        Raises:
            InputError: the folder cannot be written, or another process holds the lock.
        """
        end_unguarded()  # the run of the process that started this one holds the lock
        folders = self.create()
        created = CreatedFiles(frozenset(path for path in (*self._all_paths, self.marker, self.lock) if path.exists()))
        try:
            with self._lock_held():
                created.add(self.lock)
                try:
                    yield created
                except InputError:
                    created.remove()
                    raise
        except InputError:
            remove_empty(() if created.kept else folders)
            raise

    @contextmanager
    def _lock_held(self) -> Iterator[None]:
        lock = FileLock(self.lock, timeout=LOCK_SECONDS, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            holder = self.read_marker()
            name = f"process {holder.pid} on {printable(holder.host)} since {printable(holder.since)}" if holder else ""
            raise InputError(
                f"output_dir {self.path} is in use by another run ({name or 'just started'}): wait until it has ended, "
                "stop it, or choose another folder with output_dir=DIR"
            ) from None
        except OSError as error:
            raise InputError(f"output_dir {self.path} cannot be locked ({error}): choose another folder") from error
        try:
            yield
        finally:
            lock.release()

    def in_use(self) -> bool:
        """Return True if a process holds the lock; False if there is no lock file.

        Raises:
            InputError: the lock file cannot be opened.
        """
        if not self.lock.exists():
            return False
        lock = FileLock(self.lock, timeout=0, fallback_to_soft=False)
        try:
            with lock:
                return False
        except Timeout:
            return True

    def mark(self, marker: RunMarker) -> None:
        """Write the marker, before any other file; the lock must be held."""
        write_json(self.marker, asdict(marker))

    def read_marker(self) -> RunMarker | None:
        """Return the marker, or None if there is none (InputError: the file is not a marker)."""
        try:
            return RunMarker(**json.loads(self.marker.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InputError(
                f"{self.marker} is damaged or not of this version ({error}): choose another folder with output_dir=DIR"
            ) from error

    def check_no_foreign_files(self) -> None:
        """Refuse a folder without marker that holds files a run would overwrite (InputError: there are such files)."""
        if self.marker.exists():
            return
        epochs = self.path.glob(self.epoch(0).name.replace("0000", "*"))
        foreign = [path.name for path in (*self._all_paths, *epochs) if path.exists() or path.is_symlink()]
        if foreign:
            raise InputError(
                f"output_dir {self.path} is not the folder of a run ({self.marker.name} is missing) and holds "
                f"{listed(foreign)}, which a run would overwrite: choose another "
                "folder with output_dir=DIR, or if it is the copy of a run that holds its last.pt, give --resume"
            )

    @property
    def logged(self) -> tuple[Path, ...]:
        """The metrics and the files and folders of the loggers."""
        return self.metrics, self.loggers, self.tensorboard, self.wandb, self.mlflow

    def logged_files(self) -> Iterator[Path]:
        """Yield the paths of :attr:`logged` and all files and folders in them, a folder before its content.

        Files that a logger moves or removes meanwhile do not matter.
        """
        for each in self.logged:
            yield each
            for parent, folders, files in os.walk(each):
                yield from (Path(parent, name) for name in (*folders, *files))

    @property
    def _all_paths(self) -> tuple[Path, ...]:
        checkpoints = self.last, self.best, self.previous, self.damaged
        results = self.evaluation, self.errors, self.never_found, self.results, self.predictions, self.report, self.data
        maps = self.panoptic, self.panoptic_results
        others = self.log, self.config, self.machine, self.pictures, self.captures, self.command, self.output
        return *others, *self.logged, *checkpoints, self.cost, *results, *maps

    def remove_unfinished(self) -> None:
        """Remove temporary files that killed processes have left; the lock must be held."""
        for folder in (self.path, self.pictures, self.panoptic, self.captures):
            remove_unfinished(folder)

    def remove_output(self) -> None:
        """Remove the folder of a command; of a symbolic link only the link.

        Raises:
            InputError: it cannot be removed.
        """
        try:
            if self.output.is_symlink():
                self.output.unlink()
            elif self.output.exists():
                shutil.rmtree(self.output)
        except OSError as error:
            raise InputError(
                f"{self.output}, the folder of a command, cannot be removed ({error.strerror or error}): remove it "
                "by hand"
            ) from error

    def holds_a_run(self) -> bool:
        """Return True if there is a checkpoint to resume; a run killed while renaming leaves only ``previous``."""
        return self.last.exists() or self.previous.exists()
