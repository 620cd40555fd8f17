"""Tools on a full disk: one line that says so, exit code 2, and nothing half-written."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.tools.test_convert_checkpoint import checkpoint
from tests.tools.test_train_net import tool


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit every file written to 4,000 bytes, as a disk that is nearly full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write() fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def said(main: Callable[[Sequence[str]], int], arguments: Sequence[object], capture: pytest.CaptureFixture[str]) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    last = capture.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, suffix: str
) -> None:
    checkpoint(average=False).save(tmp_path / "in.pth")
    request.getfixturevalue("small_files")
    target = tmp_path / f"out{suffix}"
    message = said(tool("convert_checkpoint").main, [tmp_path / "in.pth", target], capsys)
    assert f"{target} cannot be written (" in message
    assert "make room, or name another file" in message
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], small_files: None) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    message = said(tool("plan").main, ["--json", tmp_path / "plan.json", *PLANNED], capsys)
    assert "File too large; make room or choose another place" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [32, 256])
def test_sample_data(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    small_files: None,
    size: int,
) -> None:
    arguments = ["digits", "--output", tmp_path / "d", "--num-train", "40", "--num-val", "1", "--image-size", size]
    message = said(tool("make_sample_data").main, arguments, capsys)
    assert "File too large; make room or choose another place" in message
    assert not list(tmp_path.iterdir())


PLANNED = ["model.backbone.name=resnet18", "model.hidden_dim=32", "model.heads=2", "model.num_queries=6"]
