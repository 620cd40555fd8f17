"""Tools on a full disk: a one-line error, exit code 2, and no partly written files."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tools.test_convert_checkpoint import checkpoint
from tests.tools.test_train_net import tool


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Limit every file written to so many bytes, as on a nearly full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write() fails instead of a signal
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def said(name: str, arguments: Sequence[object], capture: pytest.CaptureFixture[str], limit: int = 4000) -> str:
    """Run a tool that fails, and return its error message."""
    main = tool(name).main
    with small_files(limit):
        code = main([str(argument) for argument in arguments])
    assert code == 2
    last = capture.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    checkpoint(average=False).save(tmp_path / "in.pth")
    target = tmp_path / f"out{suffix}"
    message = said("convert_checkpoint", [tmp_path / "in.pth", target], capsys)
    assert f"{target} cannot be written (" in message
    assert "free some space, or name another file" in message
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["model.backbone.name=resnet18", "model.hidden_dim=32", "model.heads=2", "model.num_queries=6"]
    message = said("plan", ["--json", tmp_path / "plan.json", *settings], capsys, limit=10)
    assert "File too large; free some space or choose another folder" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [32, 256])
def test_sample_data(tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int) -> None:
    """The annotations exceed the limit of small images; every image exceeds the limit of large ones."""
    counts = ["--num-train", "40", "--num-val", "1", "--image-size", size]
    message = said("make_sample_data", ["digits", "--output", tmp_path / "d", *counts], capsys)
    assert "File too large; free some space or choose another folder" in message
    assert not list(tmp_path.iterdir())
