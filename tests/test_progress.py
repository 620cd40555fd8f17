from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest

from detr_bf.progress import close_bars, progress_bar, setup_logging


@pytest.mark.parametrize(("terminal", "refreshes"), [(True, range(50, 10_000)), (False, range(1, 4))])
def test_a_log_file_gets_few_refreshes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, refreshes: range
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    bar = progress_bar(range(500), desc="work", **({"mininterval": 0.0, "miniters": 1} if terminal else {}))
    assert list(bar) == list(range(500))
    assert capsys.readouterr().err.count("work") in refreshes


def test_the_description_is_one_harmless_line(capsys: pytest.CaptureFixture[str]) -> None:
    list(progress_bar(range(2), desc="checking \x1b]0;owned\x07\n0 errors"))
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert "checking \\x1b]0;owned\\x07\\n0 errors" in printed


@pytest.mark.parametrize(("leave", "end"), [(True, "\n"), (False, "\r")])
def test_open_bars_are_closed_once(capsys: pytest.CaptureFixture[str], leave: bool, end: str) -> None:
    bar = progress_bar(range(3), desc="work", leave=leave)
    next(iter(bar))
    close_bars()
    printed = capsys.readouterr().err
    assert printed.endswith(end)
    close_bars()
    bar.close()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has /dev/full")
def test_a_full_disk_under_the_screen_raises_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logger, log = logging.getLogger("detr_bf"), tmp_path / "log.txt"
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    with Path("/dev/full").open("wb", buffering=0) as raw:
        full = io.TextIOWrapper(raw, write_through=True)
        monkeypatch.setattr(sys, "stderr", full)
        setup_logging(log)
        logger.info("step %d", 3)
        monkeypatch.undo()
    assert "step 3" in log.read_text()
