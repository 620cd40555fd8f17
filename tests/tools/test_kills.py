"""Processes that are killed or stopped at critical moments: the results equal those of an uninterrupted run."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from detr_bf.engine import load_checkpoint
from tests.tools.launch import (
    SETTINGS,
    Job,
    check_same,
    children,
    ended,
    process_of_rank,
    unfinished,
    wait_for,
    wait_for_steps,
)
from tests.tools.test_train_net import records

COUNTS = {"step": 5, "backward": 5, "evaluation": 1, "writing": 4, "renaming": 4}
FAST = {("step", "1")}
KILLS = [
    pytest.param(moment, who, marks=() if (moment, who) in FAST else pytest.mark.slow)
    for moment, one in (("step", "1"), ("backward", "0"), ("evaluation", "0"), ("writing", "0"), ("renaming", "0"))
    for who in (one, "all")
]


@pytest.mark.full
@pytest.mark.parametrize(("moment", "who"), KILLS)
def test_a_killed_group_is_restarted_and_ends_with_the_same_bits(
    tiny: Path, tmp_path: Path, moment: str, who: str
) -> None:
    job = Job(tiny, tmp_path / "run", SETTINGS[2], restarts=1, fault=f"kill:{moment}:{who}:{COUNTS[moment]}")
    run = job.run()
    assert run.code == 0, run.said
    assert job.marker.exists(), "the fault happened"
    check_same(job)


@pytest.mark.parametrize(
    ("processes", "moment"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "backward"), *((2, moment) for moment in COUNTS))],
)
def test_the_same_command_goes_on_with_resume(tiny: Path, tmp_path: Path, processes: int, moment: str) -> None:
    job = Job(tiny, tmp_path / "run", SETTINGS[processes], processes, fault=f"kill:{moment}:all:{COUNTS[moment]}")
    assert job.run().code != 0
    assert (job.folder / "last.pt").exists() == (moment != "renaming")
    assert (unfinished(job.folder) == []) == (moment not in ("writing", "renaming"))
    run = job.again("--resume")
    assert run.code == 0, run.said
    assert "resumed at step" in run.said
    check_same(job)


@pytest.mark.full
def test_a_group_that_gets_sigterm_saves_and_reports_it_once(tiny: Path, tmp_path: Path) -> None:
    job = Job(tiny, tmp_path / "run", (*SETTINGS[2], "checkpoint.every_steps=1000"))
    process = job.start()
    wait_for_steps(process, job.folder, 4)
    process.send_signal(signal.SIGTERM)
    run = ended(process)
    assert run.code != 0
    assert run.said.count("everything is saved") == 1, run.said
    assert run.said.count("--resume") == 1
    done = load_checkpoint(job.folder / "last.pt").training["progress"]["step"]
    assert done == records(job.folder / "metrics.jsonl", "train")[-1]["step"] >= 4
    assert job.run("--resume").code == 0
    check_same(job)


@pytest.mark.slow
def test_processes_that_all_get_sigterm_save_too(tiny: Path, tmp_path: Path) -> None:
    """Schedulers signal every process of a job, and torchrun forwards its own signal: each process gets two."""
    job = Job(tiny, tmp_path / "run", (*SETTINGS[2], "checkpoint.every_steps=1000"))
    process = job.start()
    wait_for_steps(process, job.folder, 4)
    for each in children(process.pid):
        os.kill(each, signal.SIGTERM)
    time.sleep(0.1)  # both signals have arrived
    process.send_signal(signal.SIGTERM)
    run = ended(process)
    assert run.code != 0
    assert run.said.count("everything is saved") == 1, run.said
    done = load_checkpoint(job.folder / "last.pt").training["progress"]["step"]
    assert done == records(job.folder / "metrics.jsonl", "train")[-1]["step"] >= 4


@pytest.mark.slow
def test_a_process_that_is_slow_is_waited_for(tiny: Path, tmp_path: Path) -> None:
    job = Job(tiny, tmp_path / "run", SETTINGS[2])
    process = job.start()
    wait_for_steps(process, job.folder, 3)
    slow = process_of_rank(process.pid, 1)
    os.kill(slow, signal.SIGSTOP)
    time.sleep(3)
    os.kill(slow, signal.SIGCONT)
    run = ended(process)
    assert run.code == 0, run.said
    check_same(job)


@pytest.mark.slow
def test_a_process_that_does_not_come_back_ends_the_group(tiny: Path, tmp_path: Path) -> None:
    job = Job(tiny, tmp_path / "run", (*SETTINGS[2], "train.timeout_minutes=0.25"))
    process = job.start()
    wait_for_steps(process, job.folder, 3)
    stopped, waiting = process_of_rank(process.pid, 1), process_of_rank(process.pid, 0)
    os.kill(stopped, signal.SIGSTOP)
    start = time.monotonic()
    wait_for(lambda: waiting not in children(process.pid), process, seconds=60)
    assert time.monotonic() - start > 10
    os.kill(stopped, signal.SIGCONT)  # otherwise torchrun kills it after half a minute
    assert ended(process, seconds=60).code != 0
    assert job.run("--resume").code == 0
    check_same(job)


@pytest.mark.slow
def test_loader_processes_that_die_leave_no_trace(tiny: Path, tmp_path: Path) -> None:
    """Kill one worker of one rank in the middle of an epoch."""
    job = Job(tiny, tmp_path / "run", (*SETTINGS[2], "data.workers=2"), fault="dead_worker:4")
    run = job.run()
    assert run.code == 0, run.said
    assert run.said.count("The workers are restarted") == 1, run.said
    check_same(job)


@pytest.mark.slow
def test_one_process_goes_on_where_two_were(tiny: Path, tmp_path: Path) -> None:
    job = Job(tiny, tmp_path / "run", SETTINGS[2], fault="kill:step:all:5")
    assert job.run().code != 0
    run = replace(job, processes=1).again("--resume")
    assert run.code == 0, run.said
    assert "the checkpoint is of another number of ranks" in run.said
    assert load_checkpoint(job.folder / "last.pt").training["progress"]["step"] == 21
