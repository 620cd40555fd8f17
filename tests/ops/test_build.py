"""Build of the kernels: detection of tools, errors, and the resulting libraries."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from functools import partial
from pathlib import Path

import pytest
import torch

from detr_bf.ops import build as building
from detr_bf.ops.build import BuildError, build, find_compiler, find_cuda, find_torch

ROOT = Path(__file__).parents[2]
TESTS_OF_OPERATORS = ("ms_deform_attn", "batch_attention", "dropout", "hostile_calls")
SANITIZER = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=8192"
needs_compiler = pytest.mark.skipif(not shutil.which("c++") and not shutil.which("g++"), reason="no C++ compiler here")


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sysconfig, "get_path", lambda kind: str(tmp_path / kind))


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_torch_on_disk_is_the_one_imported() -> None:
    found = find_torch()
    assert found.folder == Path(torch.__file__).parent
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda


def test_without_torch(no_torch: None, tmp_path: Path) -> None:
    """Installation continues; the error names the missing part."""
    with pytest.raises(BuildError, match=r"torch 2.11 or newer is not installed in this environment"):
        find_torch()
    results = build(tmp_path / "out")
    assert all(isinstance(result, BuildError) and "torch 2.11 or newer" in str(result) for result in results.values())
    assert not list((tmp_path / "out").iterdir()), "a record would make `make` skip the build once torch is installed"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="CXX=no-such-compiler is not found"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    result = build(tmp_path / "out")["cpu"]
    assert isinstance(result, BuildError)
    assert str(result).startswith("no C++ compiler")


def test_a_compiler_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An older library is removed, so that it is not mistaken for the new one."""
    failing = executable(tmp_path / "failing")
    failing.write_text("#!/bin/sh\necho 'error: out of ink' >&2\nexit 1\n")
    monkeypatch.setenv("CXX", str(failing))
    monkeypatch.setattr(building, "find_cuda", _no_cuda)
    (tmp_path / "cpu.so").write_text("old")
    results = build(tmp_path)
    assert re.search(r"^this command failed:\n  .*failing(.|\n)*out of ink", str(results["cpu"]))
    assert str(results["cuda"]) == "not wanted here"
    assert not list(tmp_path.glob("*.so"))


def test_cuda_is_found_by_its_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrapper named nvcc may be far from the headers."""
    nvcc = executable(tmp_path / "bin" / "nvcc")
    home = tmp_path / "elsewhere"
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda_runtime.h").touch()
    monkeypatch.setenv("PATH", str(nvcc.parent))
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_cuda() == (str(nvcc), home)
    monkeypatch.setenv("PATH", "")
    executable(home / "bin" / "nvcc")
    assert find_cuda() == (str(home / "bin" / "nvcc"), home)


def test_each_step_is_said_and_cuda_needs_a_gpu_or_a_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = executable(tmp_path / "compiler")
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\ntouch "$1"\n')
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv("FORCE_CUDA", raising=False)
    monkeypatch.setattr(building, "find_cuda", lambda: (str(compiler), tmp_path))
    monkeypatch.setattr(building, "find_torch", lambda: building.Torch(tmp_path, "2.11", "12.8"))
    monkeypatch.setattr(building, "has_gpu", lambda: False)
    said: list[str] = []
    results = build(tmp_path / "out", say=said.append)
    assert results["cpu"] == tmp_path / "out" / "cpu.so"
    assert re.match(r"there is no NVIDIA GPU here; .* build --cuda", str(results["cuda"]))
    assert re.match(r"cpu: compiling \d+ files with .*compiler, up to \d+ at a time", said[0])
    assert re.match(r"cpu: 1 of \d+, \w+\.cpp, \d+ s", said[1])
    for request in ({"cuda": True}, {"strict": True}, {}):
        if not request:
            monkeypatch.setattr(building, "has_gpu", lambda: True)
        said.clear()
        assert build(tmp_path / "out", say=said.append, **request)["cuda"] == tmp_path / "out" / "cuda.so"
        kinds = [line.partition(":")[0] for line in said]
        assert kinds == ["cpu"] * kinds.count("cpu") + ["cuda"] * kinds.count("cuda"), "CPU first"
        assert kinds.count("cuda") > 1


@needs_compiler
def test_the_kernels_of_this_checkout_are_built_and_used() -> None:
    """Without kernels, which `make test` builds, all other tests would still pass with the reference, only slower."""
    done = subprocess.run([sys.executable, "-m", "detr_bf.ops"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "cpu: compiled kernels (" in done.stdout
    assert done.stdout.count("(fine)") >= 2
    assert "(WRONG)" not in done.stdout


@pytest.mark.full
def test_the_reference_on_request() -> None:
    environment = os.environ | {"DETR_BF_OPS": "reference"}
    command = [sys.executable, "-m", "detr_bf.ops"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "cpu: plain PyTorch, because DETR_BF_OPS=reference" in done.stdout


def copy_of_the_package(folder: Path) -> Path:
    """Copy the package with its operators, as installed, without compiled libraries."""
    package = folder / "package" / "detr_bf"
    leave_out = shutil.ignore_patterns("__pycache__", "compiled")
    shutil.copytree(ROOT / "detr_bf", package, ignore=leave_out)
    shutil.copytree(ROOT / "ops", package / "ops", ignore=leave_out)
    shutil.copytree(ROOT / "configs", package / "configs")
    return package


def pretend_to_be_built(package: Path, sources: str) -> None:
    compiled = package / "ops" / "compiled"
    compiled.mkdir()
    (compiled / "cpu.so").write_bytes(b"not a library")
    (compiled / building.RECORD).write_text(json.dumps({"sources": sources}))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (None, "they are not built"),
        ("others", "was built from other sources than those installed with it"),
        (building.digest_of_sources(), "does not load"),
    ],
)
def test_libraries_that_cannot_be_used_are_said_once(sources: str | None, message: str, tmp_path: Path) -> None:
    """The program continues with the reference and logs how to build."""
    package = copy_of_the_package(tmp_path)
    if sources is not None:
        pretend_to_be_built(package, sources)
    code = (
        "import logging, torch; logging.basicConfig(level='INFO'); from detr_bf.ops import ms_deform_attn\n"
        "value, places = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1, 1, 2), 0.5)\n"
        "for _ in range(2): print(ms_deform_attn(value, [(1, 1)], None, places, places[..., 0]).item())"
    )
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.split() == ["0.5", "0.5"], done.stderr
    assert done.stderr.count("plain PyTorch, many times slower") == 1
    assert "To build them: python -m detr_bf.ops build" in done.stderr
    assert message in done.stderr


@pytest.mark.slow  # compiles everything
@needs_compiler
def test_addresses_and_undefined_behaviour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the tests of the operators on a library built with both sanitizers."""
    package = copy_of_the_package(tmp_path)
    monkeypatch.setattr(building, "find_cuda", _no_cuda)
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"]
    building.build(package / "ops" / "compiled", extra=flags)
    runtimes = [
        subprocess.run(["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
        for name in ("asan", "ubsan", "stdc++")
    ]
    copy = package.parent
    shutil.copytree(ROOT / "tests", copy / "tests")
    shutil.copy(ROOT / "pyproject.toml", copy)
    environment = os.environ | {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": SANITIZER}
    run = partial(subprocess.run, cwd=copy, env=environment, capture_output=True, text=True)
    shown = run([sys.executable, "-m", "detr_bf.ops"])
    assert str(package / "ops" / "compiled" / "cpu.so") in shown.stdout, shown.stdout + shown.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not compile and not instruction"]
    done = run(command + [f"tests/ops/test_{name}.py" for name in TESTS_OF_OPERATORS])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "compiled kernels:" not in done.stdout, f"skipped without the kernels: {done.stdout[-2000:]}"


def _no_cuda() -> tuple[str, Path]:
    raise BuildError("not wanted here")


@pytest.mark.slow  # downloads nothing, but compiles
@needs_compiler
def test_an_isolated_build_finds_the_torch_of_the_environment(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--wheel-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("detr_bf-*.whl")
    assert "none-any" not in wheel.name
    listed = subprocess.run([sys.executable, "-m", "zipfile", "-l", str(wheel)], capture_output=True, text=True).stdout
    assert "detr_bf/ops/compiled/cpu.so" in listed
    assert "detr_bf/ops/csrc/schema.cpp" in listed


@pytest.mark.slow
def test_an_environment_without_torch_installs_all_the_same(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--no-deps", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "env").glob("lib/python*/site-packages/detr_bf/ops")
    assert not list(folder.glob("compiled/*.so"))


@pytest.mark.slow  # installs another torch
@needs_compiler
def test_one_build_loads_in_another_torch(tmp_path: Path) -> None:
    """A library built against the installed torch loads in the oldest supported one and in another version."""
    loaded = []
    for version in ("2.11.0", "2.13.0"):
        environment = tmp_path / version
        venv.create(environment, with_pip=True)
        python = str(environment / "bin" / "python")
        installed = subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={version}", "numpy"])
        if installed.returncode:
            continue
        code = (
            "import json, torch\n"
            f"torch.ops.load_library({str(building.FOLDER / 'cpu.so')!r})\n"
            "value, places = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1, 1, 2), 0.5)\n"
            "found = torch.ops.detr_bf.ms_deform_attn(value, [1, 1], [0], places, places[..., 0])\n"
            "print(json.dumps([torch.__version__, found.item()]))"
        )
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        name, value = json.loads(done.stdout)
        assert value == 0.5
        loaded.append(name.split("+")[0])
    assert set(loaded) - {torch.__version__.split("+")[0]}, "pip could install no other torch here"
