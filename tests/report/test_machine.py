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


@pytest.mark.full
def test_memory_is_that_of_the_process_itself_and_not_of_its_parent() -> None:
    """ru_maxrss of a child begins with the memory of its parent; an array of 300 MiB shows the difference."""
    code = (
        "import torch; from detr_bf.report import process_memory; cpu = torch.device('cpu'); "
        "first = process_memory(cpu); big = torch.ones(300 * 2**18); second = process_memory(cpu); "
        "print(first['peak_memory_mib'], second['peak_memory_mib'], first['device_memory_mib'])"
    )
    parents = torch.ones(1000 * 2**18)  # 1,000 MiB, beside what this process has
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    del parents
    first, second, device = done.stdout.split()
    assert 100 < float(first) < 1000
    assert 290 < float(second) - float(first) < 320
    assert device == "None"


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
