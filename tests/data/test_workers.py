"""Dead loader workers: batches are the same after a restart, and repeated deaths end the training."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from detr_bf.common.errors import TrainingError
from detr_bf.common.structures import Batch, Target
from detr_bf.data.batches import EpochBatches, SampleKey
from detr_bf.data.coco import CocoDetection
from detr_bf.data.loader import make_loader
from detr_bf.data.workers import MAX_DEATHS, WorkerDiedError, restart_dead_workers
from tests.data.test_loader import TRAINING, Factory, assert_same, load, load_all


def test_batches_continue_with_the_first_missing_one() -> None:
    starts: list[int] = []

    def make_batches(start: int) -> Iterator[int]:
        starts.append(start)
        for index in range(start, 6):
            if index in (2, 4) and starts.count(index) == 0:
                raise WorkerDiedError("killed")
            yield index

    assert list(restart_dead_workers(make_batches, 1)) == [1, 2, 3, 4, 5]
    assert starts == [1, 2, 4]


def test_deaths_without_a_batch_in_between_end_the_training() -> None:
    def make_batches(start: int) -> Iterator[int]:
        raise WorkerDiedError("killed")
        yield

    with pytest.raises(TrainingError, match=rf"died {MAX_DEATHS} times .* last: killed; .*data.workers"):
        list(restart_dead_workers(make_batches, 0))


def kill_a_worker(number: int = 0) -> None:
    """Kill a worker and wait until it is dead."""
    worker = sorted(multiprocessing.active_children(), key=lambda child: child.pid)[number]
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def maker(dataset: CocoDetection, starts: list[int], workers: int = 2) -> Callable[[int], Iterator[Batch]]:
    """Return the argument of ``restart_dead_workers``; ``starts`` collects the indices it is called with."""

    def make(start: int) -> Iterator[Batch]:
        assert not multiprocessing.active_children(), "the workers of the last iterator must have ended"
        starts.append(start)
        chosen = EpochBatches(len(dataset), 2, seed=5, epoch=1, start_batch=start)
        return iter(make_loader(dataset, chosen, collate=Batch.collate, workers=workers))

    return make


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_worker_changes_no_batch(coco_folder: Factory, victim: int, caplog: pytest.LogCaptureFixture) -> None:
    data = coco_folder(num_images=12)
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    starts: list[int] = []
    found = []
    for batch in restart_dead_workers(maker(dataset, starts), 1):
        found.append(batch)
        if len(found) == victim + 1 and len(starts) == 1:
            kill_a_worker()
            sum(range(1_000_000))  # time for a signal handler to be called
    assert_same(found, load(data)[1:])
    assert starts == [1, victim + 2]
    assert "was killed by signal 9 (Killed): out of memory" in caplog.text
    assert "data.workers" in caplog.text


class Deadly(CocoDetection):
    """Data set with an image that kills its worker the first ``deaths`` times; files in ``count`` count them."""

    count: Path
    deaths = 1
    index = 4

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, Target]:
        deaths = len(list(self.count.iterdir()))
        if key.index == self.index and deaths < self.deaths:
            (self.count / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def deadly(data: SimpleNamespace, tmp_path: Path, deaths: int) -> Deadly:
    dataset = Deadly(data.images, data.annotations, TRAINING, seed=5)
    dataset.count, dataset.deaths = tmp_path / "deaths", deaths
    dataset.count.mkdir()
    return dataset


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_while_its_batch_is_waited_for(coco_folder: Factory, tmp_path: Path, workers: int) -> None:
    data = coco_folder(num_images=12)
    starts: list[int] = []
    began = time.monotonic()
    found = list(restart_dead_workers(maker(deadly(data, tmp_path, MAX_DEATHS - 1), starts, workers), 0))
    assert time.monotonic() - began < 9, "DataLoader itself looks every five seconds"
    assert_same(found, load(data))
    assert len(starts) == MAX_DEATHS


def test_workers_that_keep_dying_end_the_training(coco_folder: Factory, tmp_path: Path) -> None:
    dataset = deadly(coco_folder(num_images=12), tmp_path, 1000)
    dataset.index = next(iter(EpochBatches(len(dataset), 2, seed=5, epoch=1)))[0].index  # no batch in between
    starts: list[int] = []
    with pytest.raises(TrainingError, match=rf"died {MAX_DEATHS} times .* was killed by signal 9 .*data.workers"):
        list(restart_dead_workers(maker(dataset, starts), 0))
    assert len(starts) == MAX_DEATHS
    assert not multiprocessing.active_children()


def test_deaths_with_batches_in_between_do_not_add_up(coco_folder: Factory) -> None:
    data = coco_folder(num_images=12)
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    starts: list[int] = []
    found = []
    for batch in restart_dead_workers(maker(dataset, starts), 0):
        found.append(batch)
        if len(found) < 6:
            kill_a_worker()
    assert_same(found, load(data))
    assert starts == [0, 1, 2, 3, 4, 5]


def test_a_death_after_the_last_batch_is_ignored(coco_folder: Factory) -> None:
    data = coco_folder(num_images=4)
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    batches = iter(make_loader(dataset, EpochBatches(4, 2, seed=5, epoch=1), collate=Batch.collate, workers=1))
    found = [next(batches), next(batches)]
    kill_a_worker()
    assert next(batches, None) is None
    assert_same(found, load(data))


class Large(CocoDetection):
    """Data set whose samples are larger than the buffer of the pipe."""

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, Target]:
        image, target = super().__getitem__(key)
        return image, replace(target, file_name="x" * 1_000_000)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_in_the_middle_of_a_message(coco_folder: Factory, victim: int) -> None:
    """Without a restart, the reader would wait for the rest forever, and the other worker for the lock of the pipe."""
    data = coco_folder(num_images=12)
    dataset = Large(data.images, data.annotations, TRAINING, seed=5)
    starts: list[int] = []
    batches = restart_dead_workers(maker(dataset, starts), 0)
    found = [next(batches)]
    time.sleep(1)  # until one writes and the other waits
    kill_a_worker(victim)
    assert_same([*found, *batches], load(data))
    assert starts == [0, 1]


class Inherited:
    """Object in a cycle, which says when a process other than its own destroys it."""

    def __init__(self, note: Path) -> None:
        self.note, self.process, self.cycle = note, os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.process:
            self.note.touch()


class Collecting(CocoDetection):
    """Data set that collects garbage for each sample; ``enabled`` counts the samples with automatic collection."""

    enabled: Path

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, Target]:
        gc.collect()
        if gc.isenabled():
            (self.enabled / str(key.index)).touch()
        return super().__getitem__(key)


def test_workers_do_not_destroy_the_garbage_of_their_parent(
    coco_folder: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destructors may wait for threads that a forked process does not have, such as those of PyAV's video frames."""
    data = coco_folder(num_images=8)
    dataset = Collecting(data.images, data.annotations, TRAINING, seed=5)
    dataset.enabled = tmp_path / "enabled"
    dataset.enabled.mkdir()
    gc.disable()  # so that the object is still there
    try:
        Inherited(tmp_path / "destroyed")
        load_all(dataset, workers=2)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert not (tmp_path / "destroyed").exists()
    assert len(list(dataset.enabled.iterdir())) == 8
    collects: list[bool] = []
    start = multiprocessing.process.BaseProcess.start

    def record(process: multiprocessing.process.BaseProcess) -> None:
        collects.append(gc.isenabled())
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", record)
    load_all(dataset, workers=2)
    assert collects == [False, False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0  # in this process


@pytest.mark.full
def test_a_death_is_found_outside_the_main_thread_too(coco_folder: Factory, tmp_path: Path) -> None:
    data = coco_folder(num_images=12)
    dataset, found = deadly(data, tmp_path, 1), []
    starts: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(restart_dead_workers(maker(dataset, starts), 0)))
    thread.start()
    thread.join(60)
    assert_same(found, load(data))
    assert len(starts) == 2


def test_a_death_is_raised_without_restart_dead_workers(coco_folder: Factory, tmp_path: Path) -> None:
    dataset = deadly(coco_folder(num_images=12), tmp_path, 1)
    with pytest.raises(WorkerDiedError, match=r"loader worker \d+ was killed by signal 9 \(Killed\)"):
        load_all(dataset, workers=2)
    assert not multiprocessing.active_children()


class Leaving(CocoDetection):
    """Data set whose worker exits."""

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, Target]:
        os._exit(7)


def test_the_exit_code_of_a_death_is_reported(coco_folder: Factory) -> None:
    data = coco_folder()
    with pytest.raises(WorkerDiedError, match="ended with exit code 7"):
        load_all(Leaving(data.images, data.annotations, TRAINING), workers=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_other_faults_are_not_tried_again(coco_folder: Factory, workers: int) -> None:
    data = coco_folder(num_images=12)
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    dataset.file_names.pop()
    starts: list[int] = []
    with pytest.raises(IndexError):
        list(restart_dead_workers(maker(dataset, starts, workers), 0))
    assert starts == [0]


def test_the_handler_of_sigchld_is_restored(coco_folder: Factory, tmp_path: Path) -> None:
    calls = []
    before = signal.signal(signal.SIGCHLD, mine := lambda number, frame: calls.append(number))
    try:
        data = coco_folder(num_images=12)
        list(restart_dead_workers(maker(deadly(data, tmp_path, 1), []), 0))
        assert signal.getsignal(signal.SIGCHLD) is mine
        assert calls
    finally:
        signal.signal(signal.SIGCHLD, before)


ORPHAN = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from detr_bf.data.workers import start_worker

def work():
    while kill and os.getppid() == parent:
        time.sleep(0.01)
    start_worker(0)
    Path(sys.argv[1]).touch()

parent, kill = os.getpid(), sys.argv[2] == "kill"
multiprocessing.set_start_method("fork")
process = multiprocessing.Process(target=work)
process.start()
if kill:
    os.kill(parent, signal.SIGKILL)
process.join()
"""


@pytest.mark.parametrize("end", ["kill", "wait"])
def test_a_worker_whose_parent_was_killed_at_its_start_ends(tmp_path: Path, end: str) -> None:
    """DataLoader takes the parent after the fork for the training process, and such a worker would wait for ever."""
    started = tmp_path / "started"
    run = subprocess.run(
        [sys.executable, "-c", ORPHAN, str(started), end], capture_output=True, text=True, timeout=120, check=False
    )  # returns when the worker has closed its output, too
    assert run.returncode == (-signal.SIGKILL if end == "kill" else 0), run.stderr
    assert started.exists() == (end == "wait")


UNGUARDED_SCRIPT = """
import multiprocessing, sys
from pathlib import Path
from detr_bf.data.coco import CocoDetection
from detr_bf.data.batches import EpochBatches
from detr_bf.data.loader import make_loader
from detr_bf.common.structures import Batch
from tests.data.test_loader import TRAINING

def main():
    multiprocessing.set_start_method("{method}", force=True)
    data = CocoDetection(Path(sys.argv[1]), Path(sys.argv[2]), TRAINING, seed=5)
    loader = make_loader(data, EpochBatches(len(data), 2, seed=5, epoch=1), collate=Batch.collate, workers=2)
    print(len(list(loader)), "batches", loader.num_workers, "workers")

{call}
"""


@pytest.mark.default_tier("guarded")
@pytest.mark.parametrize(
    ("method", "call", "code", "said"),
    [
        ("spawn", "main()", 0, "3 batches 0 workers"),
        ("forkserver", "if __name__ == '__main__':\n    main()", 0, "3 batches 2 workers"),
        ("spawn", "print(__name__)\nmain()", 1, "put its code under 'if __name__ == \"__main__\":'"),
        ("forkserver", "print(__name__)\nmain()", 1, "put its code under 'if __name__ == \"__main__\":'"),
    ],
    ids=["without", "guarded", "read but not as a guard", "read, with a server"],
)
def test_a_script_without_guard_loads_alone_or_is_told_about_the_guard(
    method: str, call: str, code: int, said: str, coco_folder: Factory, tmp_path: Path
) -> None:
    """Workers that are not forked run the main script again."""
    data = coco_folder(num_images=6)
    (tmp_path / "script.py").write_text(UNGUARDED_SCRIPT.format(method=method, call=call))
    command = [sys.executable, str(tmp_path / "script.py"), str(data.images), str(data.annotations)]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": root}, check=False
    )
    assert done.returncode == code, done.stderr
    printed = done.stdout + done.stderr
    assert said in printed
    assert printed.count("put its code under") == (0 if "2 workers" in said else 1)
    assert "memory" not in printed
