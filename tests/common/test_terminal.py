"""Exit codes and messages of the command lines."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from detr_bf.common.errors import InputError, TrainingError
from detr_bf.common.progress import setup_logging
from detr_bf.common.terminal import run_tool

SPACE = "free some space or choose another folder, then run it again"
ESCAPE = "\x1b]0;owned\x07"


@contextmanager
def log_to(file: Path) -> Iterator[logging.Logger]:
    """Set up the package's logger inside the block."""
    logger = logging.getLogger("detr_bf")
    before = logger.level, logger.propagate
    setup_logging(file)
    try:
        yield logger
    finally:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            with suppress(OSError):
                handler.close()
        logger.level, logger.propagate = before


def failing(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "No space left on device; free some space or choose another folder"),
        (errno.EDQUOT, "free some space or choose another folder"),
        (errno.EFBIG, "free some space or choose another folder"),
        (errno.EROFS, "Read-only file system; choose another folder"),
        (errno.EACCES, "Permission denied; change the permissions or choose another folder"),
        (errno.EIO, "the storage fails"),
        (errno.ENAMETOOLONG, "choose a shorter name"),
    ],
)
def test_storage_that_the_user_can_mend_is_one_line(number: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(lambda: failing(OSError(number, os.strerror(number), "out/a.json"))) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out/a.json: ")
    assert said in line
    assert run_tool(lambda: failing(OSError(number, os.strerror(number)))) == 2, "write() gives no file name"
    assert capsys.readouterr().err.startswith(f"error: {os.strerror(number)}; ")


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "gone", "a"), OSError("no number"), ValueError("ours")])
def test_other_faults_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_tool(lambda: failing(error))


def test_a_full_device(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")

    def write() -> int:
        Path("/dev/full").write_text("text")
        return 0

    assert run_tool(write) == 2
    assert "No space left on device; free some space" in capsys.readouterr().err


@pytest.mark.parametrize("lines", [1, 10_000])
def test_output_on_a_full_disk(lines: int) -> None:
    """Python would write the rest at exit and end with code 120."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    tool = f"run_tool(lambda: print('text\\n' * {lines}) or 0)"
    script = f"import sys; from detr_bf.common.terminal import run_tool; sys.exit({tool})"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == f"error: No space left on device; {SPACE}\n"
    assert done.returncode == 2


def test_a_log_that_cannot_be_written_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with log_to(Path("/dev/full")) as logger:
        for number in range(3):
            logger.warning("line %d", number)
    assert capsys.readouterr().err.splitlines() == [
        "line 0",
        "/dev/full cannot be written: No space left on device",
        "line 1",
        "line 2",
    ]


@pytest.mark.parametrize("error", [InputError, TrainingError])
def test_messages_cannot_steer_the_terminal(error: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(lambda: failing(error(f"first {ESCAPE}\nsecond \ud800"))) != 0
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert printed.endswith("first \\x1b]0;owned\\x07\nsecond \\ud800\n")


def test_log_lines_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log_to(tmp_path / "log.txt") as logger:
        try:
            raise ValueError(ESCAPE)
        except ValueError:
            logger.warning("image %s\nnext \udcff", ESCAPE, exc_info=True)
    for text in (capsys.readouterr().err, (tmp_path / "log.txt").read_text(encoding="utf-8")):
        assert "\x1b" not in text
        assert "image \\x1b]0;owned\\x07\nnext \\udcff\nTraceback" in text


def test_a_reader_that_ends_early_is_no_error() -> None:
    """Behave like ``detr-bf recipes | head -1``."""
    call = "run_tool(lambda: print('x\\n' * 10**6) or 0)"
    code = f"from detr_bf.common.terminal import run_tool; import sys; sys.exit({call})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "x\n"
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (128 + signal.SIGPIPE, "")


def test_a_broken_pipe_without_a_file_as_output_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave in a notebook as for any other fault."""

    def fail() -> int:
        raise BrokenPipeError(errno.EPIPE, "of a worker")

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(BrokenPipeError):
        run_tool(fail)
