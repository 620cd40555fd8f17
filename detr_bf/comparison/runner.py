"""Training of the cells of an experiment: one process each, on this machine, or commands for other machines."""

from __future__ import annotations

import logging
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detr_bf.common.errors import InputError, Interrupted, TrainingError, prefix_errors
from detr_bf.common.files import read_records, write_json
from detr_bf.common.progress import progress_bar
from detr_bf.common.text import duration, listed, printable, safe_message
from detr_bf.comparison.experiment import CLASS_METRIC, Experiment, ExperimentCell, check_program
from detr_bf.comparison.records import ExperimentFolder, cell_record, changed_settings, read_cell, run_settings
from detr_bf.config import RunConfig, config_to_dict, saved_config
from detr_bf.engine import RunFolder
from detr_bf.engine.step import DeferredSignals
from detr_bf.tasks import task_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
_LAYOUT = "{desc}: {n_fmt} of {total_fmt} cells{postfix}"
LINES_OF_A_FAILURE = 15
LOG_BYTES_OF_A_FAILURE = 2**16  # read for these lines: a command may print much


def unfinished_cells(
    experiment: Experiment, folder: ExperimentFolder, *, write_records: bool = True
) -> list[ExperimentCell]:
    """Return the cells to train, in order.

    Args:
        write_records: of runs that have finished without one.

    Raises:
        InputError: a record or a run has other settings than the experiment file.
    """
    due = []
    for cell in experiment.cells():
        if folder.record(cell).exists():
            _check_settings(experiment, cell, folder.record(cell), read_cell(folder.record(cell))["settings"])
        elif not _is_finished(experiment, folder, cell):
            due.append(cell)
        elif write_records:
            write_json(folder.record(cell), cell_record(folder.run(cell), cell))
    return due


def _is_finished(experiment: Experiment, folder: ExperimentFolder, cell: ExperimentCell) -> bool:
    """Return True if the run of a cell has ended, after a check of its settings."""
    run = folder.run(cell)
    if not run.config.exists():
        return False
    config = saved_config(run.config)
    if config.seed != cell.seed:
        raise InputError(f"{printable(run.path)} has seed={config.seed}: give another folder with --output DIR")
    _check_settings(experiment, cell, run.path, run_settings(run))
    return run.evaluation.exists() and not run.in_use()


def _check_settings(experiment: Experiment, cell: ExperimentCell, path: Path, stored: Mapping[str, Any]) -> None:
    asked = experiment.settings(cell)
    if changed := changed_settings(asked, stored):
        shown = [f"{key}: {stored.get(key)} there, {asked.get(key)} now" for key in changed]
        raise InputError(
            f"{printable(path)} has other settings than the experiment ({listed(shown)}): restore them, or give "
            "another folder with --output DIR"
        )


# Commands.


def command_of(
    experiment: Experiment, folder: ExperimentFolder, cell: ExperimentCell, *, checked: bool = False
) -> list[str]:
    """Return the training command of a cell; ``checked``: its data need no further check."""
    own = experiment.commands.get(cell.arm)
    seconds = () if own is None or "seconds" not in own else (f"--seconds={own['seconds']}",)
    return [
        *(sys.executable, "-m", "detr_bf"),
        *(("train", "--auto-resume") if own is None else ("compare", "command", own["command"], *seconds)),
        *(*map(str, experiment.base), *experiment.overrides(cell)),
        *(("data.check=false",) if checked else ()),
        f"output_dir={folder.run(cell).path}",
    ]


def shell_line(command: Sequence[str], threads: int) -> str:
    """Return a command with its environment as one line of a shell."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in _environment(threads).items()), *command])


def _environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}  # waiting threads must not spin


def check_data(experiment: Experiment, cells: Sequence[ExperimentCell]) -> None:
    """Check the settings of each arm, and the data of the cells once for each distinct data and model settings.

    Raises:
        InputError: an arm has settings that make no model, or the data cannot be trained on.
    """
    for arm in dict.fromkeys(cell.arm for cell in cells):
        with prefix_errors(f"arm {arm}"):
            if arm in experiment.commands:
                check_program(experiment.commands[arm]["command"])
            else:
                task_of(experiment.configs[arm]).check_settings()
    known = set()
    for cell in cells:
        config = experiment.config(cell)
        tree = config_to_dict(config)
        # Of the augmentation only what the checks depend on: masks for copy-paste, images that are joined.
        augment, mixup = tree["data"].get("augment", {}), tree["data"].get("mixup", {})
        joined = [bool(augment.get(each)) for each in ("copy_paste", "mosaic")] + [bool(mixup.get("prob"))]
        data = {
            key: value for key, value in tree["data"].items() if key not in ("transforms", "augment", "mix", "mixup")
        }
        key = repr((data, joined, tree["model"]))
        if key not in known:
            known.add(key)
            with prefix_errors(f"arm {cell.arm}"):
                task_of(config).check()
                if experiment.primary.startswith(CLASS_METRIC):
                    names = task_of(config).load_data().class_map.distinct_names
                    if experiment.primary.removeprefix(CLASS_METRIC) not in names:
                        raise InputError(
                            f"primary '{printable(experiment.primary)}' names no class of the data; classes: "
                            f"{listed(names)}"
                        )


# Training.


@dataclass
class _Running:
    """Process that trains a cell."""

    cell: ExperimentCell
    process: subprocess.Popen[bytes]
    log_start: int  # bytes of the log before this process
    done_before: float  # share of the training that was done when the process started
    since: float = field(default_factory=time.monotonic)


@dataclass
class CellRunner:
    """Trains cells, ``jobs`` at a time, each in a process of its own."""

    experiment: Experiment
    folder: ExperimentFolder
    jobs: int
    threads: int = 1  # of each process
    discard_weights: bool = False  # remove the checkpoints of each finished run

    def __post_init__(self) -> None:
        self.failures: dict[ExperimentCell, str] = {}
        self._bad_input = 0  # failures with exit code 2
        self._running: list[_Running] = []
        self._waiting: list[ExperimentCell] = []
        self._elsewhere: list[ExperimentCell] = []  # cells that other processes train
        self._seconds: dict[str, list[float]] = defaultdict(list)  # of finished cells, by arm
        self._finished = 0
        self._shown = 0.0

    def train(self, cells: Sequence[ExperimentCell]) -> None:
        """Train the cells; failed ones are in ``failures`` afterwards.

        Raises:
            Interrupted: SIGINT or SIGTERM was received; the processes have saved and ended.
        """
        self._waiting = list(cells)
        total = len(self.experiment.cells())
        for cell in self.experiment.cells():
            if self.folder.record(cell).exists():
                self._seconds[cell.arm].append(read_cell(self.folder.record(cell))["cost"]["train_seconds"])
        with (
            DeferredSignals() as signals,
            progress_bar(total=total, initial=total - len(cells), desc="comparison", bar_format=_LAYOUT) as bar,
        ):
            try:
                while self._waiting or self._running or self._elsewhere:
                    if signals.received is not None:
                        self._stop(signals.received)
                    self._step()
                    bar.n = total - len(cells) + self._finished
                    self._show(bar)
                    time.sleep(POLL_SECONDS)
                bar.set_postfix_str("")
            finally:
                for running in self._running:
                    running.process.terminate()

    def raise_failures(self) -> None:
        """Report the failed cells.

        Raises:
            InputError: every cell has ended because of bad input.
            TrainingError: some cells have failed.
        """
        if not self.failures:
            return
        named = "; ".join(f"{cell.name} {reason}" for cell, reason in self.failures.items())
        message = f"{len(self.failures)} of {len(self.experiment.cells())} cells failed: {named}. Their output is in "
        message += f"{printable(self.folder.path / 'logs')}; the same command tries them again"
        if self._bad_input == len(self.experiment.cells()):
            raise InputError(message)
        raise TrainingError(message)

    def _step(self) -> None:
        """Start and finish processes where possible."""
        for running in [each for each in self._running if each.process.poll() is not None]:
            self._running.remove(running)
            self._end(running)
        if not (self._waiting or self._running):  # at the end, look again at the cells of other processes
            free = [cell for cell in self._elsewhere if not self.folder.run(cell).in_use()]
            self._elsewhere = [cell for cell in self._elsewhere if cell not in free]
            self._waiting = [cell for cell in free if not self._finish_if_done(cell)]
        while self._waiting and len(self._running) < self.jobs:
            cell = self._waiting.pop(0)
            if self.folder.run(cell).in_use():
                self._elsewhere.append(cell)
            elif not self._finish_if_done(cell):  # another runner may have trained it
                self._running.append(self._start(cell))

    def _start(self, cell: ExperimentCell) -> _Running:
        log = self.folder.log(cell)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = command_of(self.experiment, self.folder, cell, checked=True)
        with log.open("ab") as output:
            size = output.tell()
            process = subprocess.Popen(
                command,
                env=os.environ | _environment(self.threads),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the runner alone, which passes it on
            )
        share_done = _share(self.experiment.configs[cell.arm], _last_records(self.folder.run(cell)).get("train"))
        return _Running(cell, process, size, share_done)

    def _end(self, running: _Running) -> None:
        cell, code = running.cell, running.process.returncode
        if code == 0:
            if running.done_before == 0:
                self._seconds[cell.arm].append(time.monotonic() - running.since)
            try:
                done = self._finish_if_done(cell)
            except InputError as error:
                self._fail(running, f"ended, but {error}")
                return
            if not done:
                self._fail(running, "ended without a result")
        elif code == 2 and self.folder.run(cell).in_use():
            self._elsewhere.append(cell)
        elif code == 2 and self._finish_if_done(cell):  # another process has just trained it
            return
        else:
            self._bad_input += code == 2
            self._fail(running, f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}")

    def _fail(self, running: _Running, reason: str) -> None:
        cell = running.cell
        self.failures[cell] = reason
        with self.folder.log(cell).open("rb") as log:
            log.seek(max(running.log_start, log.seek(0, os.SEEK_END) - LOG_BYTES_OF_A_FAILURE))
            lines = log.read().decode("utf-8", errors="replace").replace("\r", "\n").splitlines()
        shown = "\n".join(f"    {line}" for line in lines[-LINES_OF_A_FAILURE:])
        command = shell_line(command_of(self.experiment, self.folder, cell), self.threads)
        logger.error("%s", safe_message(f"{cell.name} {reason}\n  {command}\n{shown}"))

    def _finish_if_done(self, cell: ExperimentCell) -> bool:
        """Write the record of a run that has ended and return True; False if it has not."""
        if not self.folder.record(cell).exists():
            if not _is_finished(self.experiment, self.folder, cell):
                return False
            write_json(self.folder.record(cell), cell_record(self.folder.run(cell), cell))
        self._finished += 1
        if self.discard_weights:
            remove_weights(self.folder.run(cell))
        return True

    def _stop(self, number: int) -> None:
        """Pass a signal on to the processes, wait until they have saved and ended, and raise :class:`Interrupted`."""
        for running in self._running:
            running.process.send_signal(number)
        for running in self._running:
            running.process.wait()
        self._running.clear()
        done = sum(self.folder.record(cell).exists() for cell in self.experiment.cells())
        raise Interrupted(
            number,
            f"stopped: {done} of {len(self.experiment.cells())} cells are finished, the running ones are saved. "
            "Continue with the same command.",
        )

    # Progress.

    def _show(self, bar: Any) -> None:
        """Refresh the progress line: once a second on a terminal, every half minute in a log."""
        now = time.monotonic()
        if now - self._shown < (1.0 if sys.stderr.isatty() else 30.0):
            return
        self._shown = now
        parts, shares = [], {}
        for running in self._running:
            records = _last_records(self.folder.run(running.cell))
            shares[running.cell] = _share(self.experiment.configs[running.cell.arm], records.get("train"))
            parts.append(_status(running.cell, records))
        if self._elsewhere:
            parts.append(f"{len(self._elsewhere)} trained by other processes")
        left = self._seconds_left(shares)
        bar.set_postfix_str("; ".join([f"{duration(left)} left" if left is not None else "time left unknown", *parts]))

    def _seconds_left(self, shares: Mapping[ExperimentCell, float]) -> float | None:
        """Estimate the time until the last cell ends; None before anything is known.

        Args:
            shares: share done of each running cell.
        """
        known = {arm: statistics.mean(values) for arm, values in self._seconds.items() if values}
        for running in self._running:
            gained = shares[running.cell] - running.done_before
            if gained > 0.02:
                known.setdefault(running.cell.arm, (time.monotonic() - running.since) / gained)
        if not known:
            return None
        usual = statistics.mean(known.values())
        left = [known.get(cell.arm, usual) for cell in self._waiting]
        left += [(1 - share) * known.get(cell.arm, usual) for cell, share in shares.items()]
        return max(sum(left) / self.jobs, max(left, default=0.0))


def _last_records(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Return the last record of each kind in the metrics of a run."""
    try:
        return {record["kind"]: record for _, record in read_records(run.metrics) if record is not None}
    except InputError:
        return {}


def _share(config: RunConfig, record: Mapping[str, Any] | None) -> float:
    if record is None:
        return 0.0
    minutes = getattr(config.train, "minutes", None)
    done = record.get("epoch") if minutes is None else record.get("minutes")
    share = float(done or 0) / (minutes or config.train.epochs)
    return min(1.0, max(share, record["step"] / (config.train.max_steps or math.inf)))


def _status(cell: ExperimentCell, records: Mapping[str, Mapping[str, Any]]) -> str:
    epoch, score = records.get("train", {}).get("epoch"), records.get("val", {}).get("score")
    text = cell.name if epoch is None else f"{cell.name} epoch {epoch:.3g}"
    return text if score is None else f"{text} score {score:.3f}"


def remove_weights(run: RunFolder) -> None:
    """Remove the checkpoints of a run that this program has trained, or the folder of a command; other files stay.

    Raises:
        InputError: the folder cannot be removed.
    """
    if run.marker.exists():
        if run.command.exists():
            run.remove_output()
        for path in (run.last, run.previous, run.best):
            path.unlink(missing_ok=True)
