from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from detr_bf.common.progress import close_bars, progress_bar, setup_logging


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
def test_open_bars_are_closed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], leave: bool, end: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = progress_bar(range(3), desc="work", leave=leave)
    next(iter(bar))
    close_bars()
    printed = capsys.readouterr().err
    assert printed.endswith(end)
    close_bars()
    bar.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_file_has_whole_lines_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, terminal: bool
) -> None:
    """Nested bars with log lines between them. A terminal gets control characters, so the test would see them."""
    logger = logging.getLogger("detr_bf")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    setup_logging(tmp_path / "log.txt")
    fast = {"mininterval": 0.0, "miniters": 1}
    with progress_bar(total=2, desc="outer", **fast) as outer:
        for number in range(2):
            for _ in progress_bar(range(3), desc="inner", leave=False, **fast):
                logger.info("line %d", number)
            outer.update()
    printed = capsys.readouterr().err
    controls = {character for character in printed if not character.isprintable()} - {"\n"}
    assert controls == ({"\r", "\x1b"} if terminal else set())
    if not terminal:
        lines = printed.splitlines()
        assert all(line.startswith(("outer: ", "inner: ", "line ")) for line in lines)
        assert lines.count("line 1") == 3
        assert sum(line.startswith("outer: 100%") for line in lines) == 1
    logged = (tmp_path / "log.txt").read_text()
    assert "\r" not in logged
    assert "outer" not in logged
    assert logged.count("line 0") == 3


NOTEBOOK = """
import sys, types
shown = []
class Widget:
    def __init__(self, children=(), **options):
        self.children, self.layout, self.style = children, types.SimpleNamespace(), types.SimpleNamespace()
        self.value, self.bar_style = 0, ""
    def close(self): pass
shell = types.SimpleNamespace(config={"IPKernelApp": {}})
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
sys.modules["ipykernel.zmqshell"] = types.SimpleNamespace()
sys.modules["IPython.display"] = types.SimpleNamespace(display=shown.append)
names = {name: Widget for name in ("FloatProgress", "IntProgress", "HBox", "HTML")}
sys.modules["ipywidgets"] = types.SimpleNamespace(__version__="8.1.0", **names)
class OutStream:
    encoding = "utf-8"
    def write(self, text): sys.__stderr__.write(text)
    def flush(self): pass
    def isatty(self): return False
OutStream.__module__ = "ipykernel.iostream"
sys.stderr = OutStream()
from detr_bf.common.progress import progress_bar, setup_logging
import logging
setup_logging()
for _ in progress_bar(range(3), desc="work", mininterval=0, miniters=1):
    logging.getLogger("detr_bf").info("a line")
[box] = shown
assert box.children[1].value == 3, box.children[1].value
"""


def test_a_notebook_gets_a_widget() -> None:
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "work" not in done.stderr + done.stdout, "no bar of text"
    assert (done.stderr + done.stdout).count("a line\n") == 3


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
