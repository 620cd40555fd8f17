"""Record of hardware, versions and command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from detr_bf.report.machine import git_commit, machine_info


def test_machine_info_names_versions_command_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_net.py", "--config", "my file.yaml"])
    info = machine_info()
    assert info["torch"] == torch.__version__
    assert info["python"] == ".".join(map(str, sys.version_info[:3]))
    assert info["command"].endswith(" train_net.py --config 'my file.yaml'")
    assert "cores usable" in info["CPU"]
    monkeypatch.setattr(sys, "argv", ["detr-bf train", "train", "my file.yaml"])
    assert machine_info()["command"] == "detr-bf train 'my file.yaml'"
    assert all(info.values())
    assert json.loads(json.dumps(info)) == info


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_is_that_of_a_tracked_file_only(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    tracked, untracked = tmp_path / "tracked.py", tmp_path / "untracked.py"
    tracked.write_text("1")
    assert git_commit(tracked) == ""
    git("init")
    git("add", "tracked.py")
    git("commit", "-m", "first")
    untracked.write_text("2")
    assert git_commit(tracked) == git("rev-parse", "HEAD")
    assert git_commit(untracked) == ""
    tracked.write_text("3")
    assert git_commit(tracked) == git("rev-parse", "HEAD") + " (with local changes)"
