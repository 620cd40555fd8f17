"""Files of examples/clusters: real commands, accepted by their own tools; two machines as network namespaces."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from detr_bf.commands.arguments import split_settings, train_arguments
from detr_bf.config import load_config
from tests.docs.test_pages import ROOT
from tests.tools.conftest import tiny  # noqa: F401
from tests.tools.launch import descendants, ended, left_by, wait_for_steps
from tests.tools.test_train_net import assert_same

CLUSTERS = ROOT / "examples" / "clusters"
MACHINE = {  # environment that each system gives to the second of two machines
    "kubernetes": {"JOB_COMPLETION_INDEX": "1", "POD_IP": "10.0.0.2"},
    "skypilot": {
        **{"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"},
        "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    },
    "slurm": {
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURMD_NODENAME": "n2",
        "SLURM_NODEID": "1",
    },
}
STUBS = {
    "torchrun": 'test "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE$OMP_NUM_THREADS" = 14 && printf "%s\\0" "$@"',
    "srun": 'test "$1" = --cpus-per-task=32 && shift && exec "$@"',
    "scontrol": "printf 'n1\\nn2\\n'",
}


def script_of(name: str) -> tuple[str, dict[str, str]]:
    """Return what a file runs on each machine, and the environment that it gives itself."""
    if name == "slurm":
        return (CLUSTERS / "slurm.sbatch").read_text(), {}
    if name == "skypilot":
        return yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())["run"], {}
    [container] = job()["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    return container["args"][0], {each["name"]: each["value"] for each in container["env"] if "value" in each}


def job() -> dict:
    [found] = [each for each in yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text()) if each["kind"] == "Job"]
    return found


def run_script(script: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with stubs for the commands of a cluster."""
    (folder / "bin").mkdir()
    for name, body in STUBS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-c", script, "script", *arguments]
    return subprocess.run(command, env={**environment, "PATH": path}, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("name", MACHINE)
def test_the_commands_are_real(name: str, tmp_path: Path) -> None:
    script, environment = script_of(name)
    given = ("deformable_detr_r50_bfv2", "train.batch_size=3", "output_dir=runs/bfv2") if name == "slurm" else ()
    said = run_script(script, tmp_path, *given, **MACHINE[name], **environment)
    assert said.returncode == 0, said.stderr
    launch = get_args_parser().parse_args(said.stdout.rstrip("\0").split("\0"))
    config, program, words = config_from_args(launch)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 4)
    assert (program, words[0]) == ("detr-bf", "train")
    options = train_arguments(words[1:])
    assert options.auto_resume
    files, overrides = split_settings([*options.config, *options.settings])
    read = load_config(files, overrides)
    published = load_config(files, [])
    assert 2 * 4 * read.train.batch_size == published.train.batch_size
    assert config.rdzv_configs["is_host"] == "0", "the first machine has the store"
    assert launch.local_addr in ("10.0.0.2", "n2")
    if name == "kubernetes":
        assert (job()["spec"]["completions"], job()["spec"]["parallelism"]) == (2, 2)


def test_a_job_array_runs_the_lines_of_a_file(tmp_path: Path) -> None:
    script, _ = script_of("slurm")
    (tmp_path / "commands.txt").write_text("env A='a b' sh -c 'echo $A'\necho second\n")
    shown = [run_script(script, folder, "../commands.txt", SLURM_ARRAY_TASK_ID=str(number), **MACHINE["slurm"])
             for number in (1, 2, 3) if (folder := tmp_path / str(number)).mkdir() is None]  # fmt: skip
    assert [each.stdout for each in shown] == ["a b\n", "second\n", ""]
    assert [each.returncode for each in shown] == [0, 0, 1]
    assert "commands.txt has no line 3" in shown[2].stderr


def test_kubernetes_accepts_its_file() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text()):
        validate(document, "1.31", strict=True)


def test_skypilot_accepts_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    task = pytest.importorskip("sky").Task.from_yaml(str(CLUSTERS / "skypilot.yaml"))
    assert task.num_nodes == 2


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Create two network namespaces with a link between them; yield their names, which end in 1 and 2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip (iproute2)")
    names = [f"detr-bf-{os.getpid()}-{number}" for number in (1, 2)]
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("this machine allows no network namespaces")
        ip("link", "add", "link1", "netns", names[0], "type", "veth", "peer", "name", "link2", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.231.7.{number}/24", "dev", f"link{number}")
            ip("-n", name, "link", "set", f"link{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def start(name: str, config: Path, folder: Path, *settings: str) -> subprocess.Popen[str]:
    """Start torchrun on one of two machines, as the files in examples/clusters do."""
    number = name[-1]
    variables = {"GLOO_SOCKET_IFNAME": f"link{number}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    command += ["--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=test", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=10.231.7.1:29500", f"--rdzv-conf=is_host={2 - int(number)}"]
    command += [f"--local-addr=10.231.7.{number}", "-m", "detr_bf", "train", "--auto-resume", str(config)]
    return subprocess.Popen(
        [*command, f"output_dir={folder}", *settings],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True},
    )


def kill(process: subprocess.Popen[str]) -> None:
    for each in [process.pid, *descendants(process.pid)]:
        os.kill(each, signal.SIGKILL)


@pytest.mark.slow
def test_two_machines_lose_one_and_go_on(tiny: Path, tmp_path: Path, machines: list[str]) -> None:  # noqa: F811
    """A machine is killed and replaced, then the link is cut and both are started again: the result stays the same.

    The second machine has another ``output_dir``, which must stay unused.
    """
    settings = ["train.batch_size=2", "train.epochs=8", "checkpoint.every_steps=1", "batch_former.gather=true"]
    settings += ["train.timeout_minutes=0.25", "data.workers=1"]
    one, two, elsewhere = tmp_path / "one", tmp_path / "two", tmp_path / "elsewhere"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "detr_bf"]
    command += ["train", str(tiny), f"output_dir={one}", *settings]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True, capture_output=True)

    both = [start(name, tiny, folder, *settings) for name, folder in zip(machines, (two, elsewhere), strict=True)]
    wait_for_steps(both[0], two, 4)
    kill(both[1])
    both[1] = start(machines[1], tiny, elsewhere, *settings)
    wait_for_steps(both[0], two, 10)
    ip("-n", machines[1], "link", "set", "link2", "down")
    cut = time.monotonic()
    told = next(line for line in both[0].stderr or () if "Timed out" in line)
    assert "training stopped: rank 0" in told
    assert time.monotonic() - cut < 60
    for process in both:
        kill(process)
        process.communicate()
    ip("-n", machines[1], "link", "set", "link2", "up")

    both = [start(name, tiny, folder, *settings) for name, folder in zip(machines, (two, elsewhere), strict=True)]
    runs = [ended(process) for process in both]
    assert [run.code for run in runs] == [0, 0], runs[0].said
    assert "resumed at step" in runs[0].said
    assert_same(left_by(two), left_by(one))
    assert not elsewhere.exists()
