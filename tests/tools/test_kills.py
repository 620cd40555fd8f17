"""Processes that are killed or stopped, at every moment that matters: the run ends with the bits of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.launch import Job, left_by, undisturbed, unfinished
from tests.tools.test_train_net import assert_same

SETTINGS = ("train.batch_size=2",)  # of two processes: three steps an epoch, nine in all
COUNTS = {"step": 5, "backward": 5, "evaluation": 1, "writing": 4, "renaming": 4}


def check_same(job: Job) -> None:
    assert_same(left_by(job.folder), undisturbed(job.config, *job.settings, processes=job.processes))
    assert unfinished(job.folder) == []


@pytest.mark.parametrize(
    ("moment", "who"),
    [
        ("step", "1"),
        ("evaluation", "0"),
        ("writing", "all"),
    ],
)
def test_a_killed_group_is_started_anew_and_ends_with_the_same_bits(
    tiny: Path, tmp_path: Path, moment: str, who: str
) -> None:
    job = Job(tiny, tmp_path / "run", SETTINGS, restarts=1, fault=f"kill:{moment}:{who}:{COUNTS[moment]}")
    ended = job.run()
    assert ended.code == 0, ended.said
    assert job.marker.exists()
    check_same(job)
