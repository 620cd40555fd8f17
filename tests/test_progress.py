from __future__ import annotations

import sys

import pytest

from detr_bf.progress import close_bars, progress_bar


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
