"""Runs of the training commands as real processes, and the files they write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from detr_bf.engine import load_checkpoint
from tests.tools.test_train_net import TOOLS, assert_same, records
from tests.tools.test_train_net import _wait_for as wait_for

DRIVER = Path(__file__).parent / "driver.py"
SECONDS = 240  # limit of a run; a longer one counts as hanging
SETTINGS = {1: ("train.batch_size=5",), 2: ("train.batch_size=2",)}  # by ranks: three steps an epoch, nine in total
_undisturbed: dict[int, dict[str, Any]] = {}


class Ended(NamedTuple):
    code: int
    out: str
    said: str


@dataclass(frozen=True)
class Job:
    """Training command with its settings; one process runs without torchrun."""

    config: Path
    folder: Path
    settings: tuple[str, ...] = ()
    processes: int = 2
    restarts: int = 0
    fault: str = ""  # first argument of driver.py
    before: tuple[str, ...] = ()  # command that starts the others
    tool: str = "train_net.py"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable]
        if self.processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
            command += [f"--max-restarts={self.restarts}"]
        command += [str(DRIVER), self.fault, str(self.marker), self.tool] if self.fault else [str(TOOLS / self.tool)]
        command += ["--config", str(self.config), f"output_dir={self.folder}"]
        command += ["checkpoint.every_steps=1", *self.settings, *arguments]
        return subprocess.Popen(
            [*self.before, *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> Ended:
        return ended(self.start(*arguments))

    def again(self, *arguments: str) -> Ended:
        """Run the command again without the fault."""
        return replace(self, fault="").run(*arguments)

    @property
    def marker(self) -> Path:
        """Return the file that exists once the fault has happened."""
        return self.folder.with_name(f"{self.folder.name}.struck")


def ended(process: subprocess.Popen[str], seconds: float = SECONDS) -> Ended:
    """Wait for the process; if it hangs, kill it with all its descendants and fail the test."""
    try:
        out, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for each in [*descendants(process.pid), process.pid]:
            os.kill(each, signal.SIGKILL)
        out, said = process.communicate()
        raise AssertionError(f"no end after {seconds} s; output\n{out}\n{said}") from None
    return Ended(process.returncode, out, said)


def descendants(pid: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    for child in children(pid):
        yield from descendants(child)
        yield child


def children(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    try:
        lists = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for text in lists for child in text.split()]


def process_of_rank(agent: int, rank: int) -> int:
    """Return the process that torchrun has started with this rank."""
    [found] = [
        child for child in children(agent) if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0")
    ]
    return found


def wait_for_steps(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Wait until a run has recorded ``count`` steps."""
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(records(metrics, "train")) >= count, process)


def left_by(folder: Path) -> dict[str, Any]:
    """Return all results of a run that must not depend on interruptions."""
    last, best = load_checkpoint(folder / "last.pt"), load_checkpoint(folder / "best.pt")
    parts = {name: getattr(last, name) for name in ("model", "ema", "training", "class_map")}
    found = (folder / name for name in ("results.json", "predictions.csv", "evaluation.json"))
    texts = {file.name: file.read_text() for file in found if file.exists()}
    untimed = {
        kind: [
            {name: value for name, value in record.items() if name != "step_seconds"}
            for record in records(folder / "metrics.jsonl", kind)
        ]
        for kind in ("train", "val")
    }
    return {**parts, "best": best.model, **texts, **untimed}


def undisturbed(config: Path, processes: int = 2) -> dict[str, Any]:
    """Return the results of a run without a fault; made once, because all tests have the same data."""
    if processes not in _undisturbed:
        job = Job(config, config.parent / "undisturbed", SETTINGS[processes], processes)
        run = job.run()
        assert run.code == 0, run.said
        _undisturbed[processes] = left_by(job.folder)
    return _undisturbed[processes]


def check_same(job: Job) -> None:
    """Check that the results of a run equal those of a run without a fault."""
    assert_same(left_by(job.folder), undisturbed(job.config, job.processes))
    assert unfinished(job.folder) == []


def unfinished(folder: Path) -> list[Path]:
    """Return the temporary files in a folder."""
    return sorted(folder.rglob(".*"))
