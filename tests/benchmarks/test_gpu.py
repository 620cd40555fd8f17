"""The script for a machine with a GPU, tried on a CPU, and its parts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import gpu

ROOT = Path(__file__).parents[2]
PHASES = ("build", "correct", "operators", "steps", "demo", "attention", "inference", "loading", "compile")


def without_network() -> list[str]:
    """Return the command that runs another one without a network, if this user may."""
    command = ["unshare", "--map-root-user", "--net"]
    allowed = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if allowed else []


@pytest.mark.slow  # CI runs it by itself
def test_all_phases_of_a_cpu_end_in_a_checkout_without_network(tmp_path: Path) -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    checkout = tmp_path / "checkout"
    for name in filter(None, files.split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    if (ROOT / "ops" / "compiled").is_dir():
        shutil.copytree(ROOT / "ops" / "compiled", checkout / "ops" / "compiled")
    before = files_without_operators(checkout)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "DETR_BF_OPS")}
    environment |= {"DEVICE": "cpu", "QUICK": "1", "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    environment |= {"SECONDS_TOTAL": "3000", "CARRY": str(tmp_path / "nothing"), "OMP_NUM_THREADS": "1"}
    command = [*without_network(), "bash", str(checkout / "benchmarks" / "gpu.sh")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode == 0, said
    assert done.stdout.rstrip().endswith("all phases are fine"), said
    for phase in PHASES:
        assert f"--- {phase}: exit 0" in done.stdout
    assert files_without_operators(checkout) == before, "nothing is left in the checkout"
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results) == {"operators", "steps", "attention", "inference"}
    assert all(each["rows"] and not each["failures"] and not each["left_out"] for each in results.values())
    assert len(list((tmp_path / "out").iterdir())) <= 8


def files_without_operators(checkout: Path) -> set[Path]:
    compiled = checkout / "ops" / "compiled"
    return {path for path in checkout.rglob("*") if path.is_file() and not path.is_relative_to(compiled)}


def run_phases(folder: Path, *phases: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run phases of the script in this checkout, on a CPU."""
    given = {"DEVICE": "cpu", "QUICK": "1", "PYTHON": sys.executable, "OUT": str(folder), "CARRY": str(folder / "none")}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *phases]
    return subprocess.run(command, env=os.environ | given | environment, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_a_failed_phase_does_not_stop_the_others_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    done = run_phases(tmp_path, "sanitize", "nonsense", "build", PATH="/usr/bin:/bin")  # no compute-sanitizer
    assert done.returncode == 1
    ended = done.stdout.splitlines()
    assert "NOT FINE: sanitize (exit 1)" in ended
    assert "NOT FINE: nonsense (unknown phase)" in ended
    assert any(line.startswith("--- build: exit 0") for line in ended), done.stdout
    assert (tmp_path / "log.txt").read_text() == done.stdout


@pytest.mark.full
def test_operators_that_do_not_compile_are_a_failure(tmp_path: Path) -> None:
    """The self-check alone would pass, with the reference."""
    checkout = tmp_path / "checkout"
    for folder in ("benchmarks", "detr_bf", "configs"):
        (checkout / folder).parent.mkdir(exist_ok=True)
        (checkout / folder).symlink_to(ROOT / folder)
    (checkout / "benchmarks").unlink()
    shutil.copytree(ROOT / "benchmarks", checkout / "benchmarks", ignore=shutil.ignore_patterns("results"))
    shutil.copytree(ROOT / "ops", checkout / "ops", ignore=shutil.ignore_patterns("compiled", "__pycache__"))
    environment = {"DEVICE": "cpu", "PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "CXX": "/bin/false"}
    command = ["bash", str(checkout / "benchmarks" / "gpu.sh"), "build"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "NOT BUILT: this command failed" in done.stdout
    assert "NOT FINE: build (exit 1)" in done.stdout.splitlines()


def test_a_case_that_fails_is_reported_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(phase: gpu.Phase) -> None:
        with phase.case("one"):
            raise ValueError("of one")
        with phase.case("two"):
            phase.note(case="two", ms=1.0)
        assert phase.over("three", 1e9)

    monkeypatch.setitem(gpu.PHASES, "target", broken)
    file = tmp_path / "results.json"
    file.write_text('{"steps": {"rows": []}}')
    assert gpu.main(["target", "--device", "cpu", "--output", str(file)]) == 1
    found = json.loads(file.read_text())
    assert set(found) == {"steps", "target"}, "the results of other phases stay"
    assert found["target"]["rows"] == [{"case": "two", "ms": 1.0}]
    assert found["target"]["failures"] == ["one: ValueError: of one"]
    assert found["target"]["left_out"] == ["three"]
    assert "FAILURE one: ValueError: of one" in capsys.readouterr().out


def test_every_kernel_is_called_for_the_sanitizer(tmp_path: Path) -> None:
    assert gpu.main(["target", "--device", "cpu", "--output", str(tmp_path / "results.json")]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["target"]["rows"] == [{"target": "done"}]


def test_a_folder_with_other_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("epoch 1, step 20\n")
    done = run_phases(tmp_path, "build")
    assert done.returncode == 2
    assert "choose another folder with OUT" in done.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["epoch 1, step 20\n"]


@pytest.fixture
def carry(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run carry.sh in a copy, with a pip that downloads nothing."""
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "carry.sh", tmp_path / "benchmarks")
    command = ["bash", str(tmp_path / "benchmarks" / "carry.sh")]

    def run(*given: Path) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHON": "true"}
        return subprocess.run(
            [*command, *map(str, given)], env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_carried_files_replace_only_those_of_an_earlier_call(
    tmp_path: Path, carry: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jpg").write_bytes(b"a")
    for _ in range(2):
        assert carry(data).returncode == 0
        assert (tmp_path / ".gpu" / "data" / "a.jpg").read_bytes() == b"a"
    (tmp_path / ".gpu" / "notes.txt").write_text("mine")
    refused = carry(data)
    assert refused.returncode == 2
    assert "files that this command has not written" in refused.stderr
    assert (tmp_path / ".gpu" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".gpu", "benchmarks", "data"]


def test_carried_files_are_named_and_limited(
    tmp_path: Path, carry: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert "missing.whl does not exist" in carry(tmp_path / "missing.whl").stderr
    with (tmp_path / "large.whl").open("wb") as file:
        file.write(os.urandom(1 << 20) * 50)
    large = carry(tmp_path / "large.whl")
    assert large.returncode == 1
    assert "at most 45 are allowed" in large.stderr
    assert not (tmp_path / ".gpu").exists()


def test_onnx_files_are_timed_and_built_with_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", 3, 8, 8])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, None)
    cast = helper.make_node("Cast", ["images"], ["scores"], to=TensorProto.FLOAT)
    made = helper.make_graph([cast], "graph", [images], [scores])
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(made, opset_imports=opset, ir_version=10), str(tmp_path / "it.onnx"))
    trtexec, results = tmp_path / "trtexec", tmp_path / "results.json"
    arguments = ["exported", "--device", "cpu", "--output", str(results)]
    monkeypatch.setenv("CARRY", str(tmp_path))
    assert gpu.main(arguments) == 0
    assert {"missing": "trtexec"} in json.loads(results.read_text())["exported"]["rows"]
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for code in (0, 1):
        trtexec.write_text(f"#!/bin/sh\necho '[E] refused'\nexit {code}\n")
        trtexec.chmod(0o755)
        assert gpu.main(arguments) == code
        rows = json.loads(results.read_text())["exported"]["rows"]
        assert rows[-1]["command"].endswith("it.onnx --stronglyTyped --shapes=images:1x3x8x8")
        assert rows[-1]["said"] == ["[E] refused"]
        assert rows[0]["differences_from_cpu"] == [0.0]
