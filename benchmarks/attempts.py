"""Launches of a tiny training run, alone or under torchrun, that can be killed, and checks of the files they leave."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from detr_bf.common.errors import InputError
from detr_bf.common.files import write_json
from detr_bf.engine import load_checkpoint

TRAIN_NET = Path(__file__).parent.parent / "tools" / "train_net.py"
ONE, EVERY_ONE, LAUNCHER = "one rank", "all ranks", "launcher and all"
ALONE = "process"
STEPS, EPOCHS, SAVED_EVERY = 3, 4, 2  # steps per epoch, epochs, steps between checkpoints
BATCH = 2  # images per process
GRACE = 10.0  # seconds from SIGKILL to the end of a process
SAID = 3000  # last characters of the output of a run that are shown

# a fork server with all imports done starts processes quickly
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["detr_bf.tasks.run", "attempts"])


@dataclass(frozen=True)
class Launch:
    """Config and number of processes of a run."""

    config: Path
    processes: int

    @classmethod
    def prepared(cls, folder: Path, processes: int) -> Launch:
        """Write data and a config to ``folder``."""
        train = _make_split(folder / f"train{processes}", range(1, STEPS * BATCH * processes + 1))
        val = _make_split(folder / f"val{processes}", range(101, 102 + 2 * processes))
        config = folder / f"config{processes}.yaml"
        write_json(config, _settings(train, val))  # JSON is valid YAML
        return cls(config, processes)


class Attempt:
    """One launch of a run with --auto-resume; ``restarts`` is torchrun's --max-restarts."""

    def __init__(self, launch: Launch, folder: Path, restarts: int = 0) -> None:
        self.launch = launch
        self.folder = folder
        self.restarts = restarts
        self.resumed_after: float | None = None  # seconds until it had loaded its checkpoint
        self.trained_after: float | None = None  # seconds until its folder had the record of a step
        self._log = folder.with_suffix(".said")
        self._resumptions = resumptions(folder)
        self._start = time.monotonic()
        arguments = ["--config", str(launch.config), f"output_dir={folder}", "--auto-resume"]
        self._process = self._alone(arguments) if launch.processes == 1 else self._group(arguments)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill the remaining processes."""
        if self._code() is None:
            for each in [self._pid, *children(self._pid)]:
                _kill(each)
            self.wait(GRACE)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None after a timeout in seconds."""
        end = time.monotonic() + seconds
        while (code := self._code()) is None and time.monotonic() < end:
            seconds = time.monotonic() - self._start
            if self.resumed_after is None and resumptions(self.folder) > self._resumptions:
                self.resumed_after = seconds
            if self.trained_after is None and records(self.folder, "train"):
                self.trained_after = seconds
            time.sleep(0.02)
        return code

    def kill(self, kind: str, choice: random.Random) -> str:
        """Send SIGKILL; return what was killed (the launcher if no rank runs yet)."""
        ranks = children(self._pid)
        if kind in (ALONE, LAUNCHER) or not ranks:
            for each in [self._pid, *ranks]:
                _kill(each)
            return ALONE if self.launch.processes == 1 else LAUNCHER
        for each in [choice.choice(ranks)] if kind == ONE else ranks:
            _kill(each)
        return kind

    def said(self) -> str:
        """Return the end of its output."""
        return self._log.read_text(errors="replace")[-SAID:]

    def _alone(self, arguments: list[str]) -> Any:
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # it cleans up after killed processes
        process = _FORK.Process(target=_train, args=(arguments, self._log))
        process.start()
        return process

    def _group(self, arguments: list[str]) -> Any:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self.launch.processes}", f"--max-restarts={self.restarts}"]
        with self._log.open("w") as log:
            return subprocess.Popen(
                [*command, str(TRAIN_NET), *arguments],
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def _pid(self) -> int:
        return int(self._process.pid)

    def _code(self) -> int | None:
        code = self._process.exitcode if self.launch.processes == 1 else self._process.poll()
        return None if code is None else int(code)


def _train(arguments: list[str], log: Path) -> None:
    """Run tools/train_net.py in a forked process."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = [str(TRAIN_NET), *arguments]
    runpy.run_path(str(TRAIN_NET), run_name="__main__")


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):  # already ended
        os.kill(process, signal.SIGKILL)


def children(process: int) -> list[int]:
    """Return the child processes; none if the process has ended."""
    try:
        lists = [task.read_text() for task in Path(f"/proc/{process}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for text in lists for child in text.split()]


@dataclass(frozen=True)
class Standing:
    """Progress of a run according to its files."""

    step: int | None = None  # of the newest intact checkpoint
    recorded: int = 0  # the last step in metrics.jsonl
    resumptions: int = 0
    damaged: tuple[str, ...] = ()  # files that cannot be read

    @classmethod
    def of(cls, folder: Path) -> Standing:
        """Read the progress of the run in ``folder``, which may not exist yet."""
        steps, damaged = [], []
        for name in ("last.pt", "previous.pt", "best.pt"):
            with suppress(FileNotFoundError):
                (folder / name).stat()
                try:
                    training = load_checkpoint(folder / name).training or {}
                    steps.append(int(training["progress"]["step"]))
                except InputError as error:
                    damaged.append(str(error))
        recorded = max((record["step"] for record in records(folder, "train")), default=0)
        return cls(max(steps, default=None), recorded, resumptions(folder), tuple(damaged))

    def faults(self, before: Standing) -> Iterator[tuple[str, str]]:
        """Yield kind and description of every forbidden change since ``before``."""
        for message in self.damaged:
            yield "corrupted", message
        if before.step is not None and (self.step is None or self.step < before.step):
            yield "lost", f"the newest checkpoint was of step {before.step}, now of step {self.step}"
        if self.recorded - (self.step or 0) > SAVED_EVERY:
            yield "lost", f"step {self.recorded} was recorded, but the newest checkpoint is of step {self.step}"


def phase_of_a_kill(folder: Path, before: Standing) -> str:
    """Guess from its files what a run was doing; ``before`` is its progress at its last start."""
    last, previous = ((folder / name).exists() for name in ("last.pt", "previous.pt"))
    if any(folder.glob(".*.pt")) or (previous and not last):
        return "saving"
    if not last:
        return "before the first checkpoint"
    if before.step is not None and resumptions(folder) == before.resumptions:
        return "starting again"
    trained, evaluated = (
        max((record["step"] for record in records(folder, kind)), default=0) for kind in ("train", "val")
    )
    if evaluated == STEPS * EPOCHS:
        return "reporting"
    return "evaluating" if trained > evaluated and trained % STEPS == 0 else "training"


def resumptions(folder: Path) -> int:
    """Count how often the run was resumed from a checkpoint."""
    log = folder / "log.txt"
    return log.read_text(errors="replace").count("resumed at step") if log.exists() else 0


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Read the records of ``metrics.jsonl``; a killed run may have left an incomplete last line."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [record for line in lines if line.endswith("\n") and (record := json.loads(line))["kind"] == kind]


def fingerprints(folder: Path) -> dict[str, str]:
    """Hash each part of a finished run that must equal that of an undisturbed one."""
    last = load_checkpoint(folder / "last.pt")
    parts: dict[str, Any] = {name: getattr(last, name) for name in ("model", "ema", "class_map")}
    parts |= {f"training.{name}": value for name, value in (last.training or {}).items()}
    parts["results"] = (folder / "results.json").read_text()
    for kind in ("train", "val"):
        parts[f"{kind} records"] = [record | {"step_seconds": None} for record in records(folder, kind)]
    return {name: _digest(value) for name, value in parts.items()}


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield value.contiguous().numpy().tobytes()
    elif isinstance(value, dict):
        for name, item in value.items():
            yield repr(name).encode()
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value).encode()


def _make_split(folder: Path, numbers: range) -> dict[str, str]:
    """Write images of one rectangle each, with annotations."""
    (folder / "images").mkdir(parents=True)
    content: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": [], "categories": []}
    content["categories"] = [{"id": number, "name": f"class {number}"} for number in (1, 2)]
    for number in numbers:
        x, y, name = number * 5 % 30, number * 7 % 20, f"{number}.png"
        picture = Image.new("RGB", (64, 48), (20, 40, number))
        picture.paste((250, 60 * number % 250, 0), (x, y, x + 24, y + 20))
        picture.save(folder / "images" / name)
        content["images"].append({"id": number, "file_name": name, "width": 64, "height": 48})
        box = {"id": number, "image_id": number, "category_id": 1 + number % 2, "bbox": [x, y, 24, 20]}
        content["annotations"].append({**box, "area": 480, "iscrowd": 0})
    write_json(folder / "annotations.json", content)
    return {"images": str(folder / "images"), "annotations": str(folder / "annotations.json")}


def _settings(train: dict[str, str], val: dict[str, str]) -> dict[str, Any]:
    backbone = {"name": "resnet18", "weights": "none", "strides": [8], "frozen_stages": 0, "frozen_norm": False}
    sizes = {"short_sides": [32, 40], "max_size": 64, "eval_short_side": 32, "crop_short_sides": [40], "crop_min": 24}
    return {
        "device": "cpu",
        "model": {
            **{"hidden_dim": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feedforward_dim": 32},
            **{"num_queries": 6, "backbone": backbone},
        },
        "data": {"train": train, "val": val, "transforms": sizes, "workers": 0},
        "train": {"epochs": EPOCHS, "batch_size": BATCH, "log_every": 1, "ema": {"enabled": True, "decay": 0.9}},
        "checkpoint": {"every_steps": SAVED_EVERY},
        "eval": {"pictures": 0},
    }
