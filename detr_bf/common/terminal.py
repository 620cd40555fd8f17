"""Exit codes of the command lines, and error messages that one rank of a machine prints."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from detr_bf.common.errors import CommandError, InputError, Interrupted, TrainingError
from detr_bf.common.progress import close_bars
from detr_bf.common.text import safe_message

PATIENCE = 10.0  # seconds that local rank 0 has to print an error that all ranks raise
_SPACE = "free some space or choose another folder, then run it again"
_ACCESS = "change the permissions or choose another folder, then run it again"
_ADVICE = {  # errors of the file system that the user can fix
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: _SPACE,
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: "choose another folder, then run it again",
    errno.EIO: "the storage fails: choose another folder, then run it again",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a folder is needed where a file of that name is",
    errno.EISDIR: "a file is needed where a folder of that name is",
    errno.EEXIST: "choose another name",
}


def run_tool(function: Callable[[], int]) -> int:
    """Run ``function`` and return the exit code: 0 done, 1 failed, 2 bad input, 128 + N stopped by signal N.

    A file that cannot be read or written for lack of space or permission is bad input too. Messages go to standard
    error through :func:`detr_bf.common.text.safe_message`.
    """
    try:
        code = function()
        sys.stdout.flush()
        return code
    except InputError as error:
        return _report(error, f"error: {error}", 2)
    except TrainingError as error:
        return _report(error, f"training stopped: {error}", 1)
    except Interrupted as error:
        return _report(error, str(error), 128 + error.signal_number)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_has_ended():
            _discard_unwritable_output()
            return 128 + signal.SIGPIPE
        if error.errno not in _ADVICE:
            raise
        _discard_unwritable_output()
        file = "" if error.filename is None else f"{error.filename}: "
        return _report(InputError(), f"error: {file}{error.strerror}; {_ADVICE[error.errno]}", 2)
    except KeyboardInterrupt:
        close_bars()
        print("interrupted", file=sys.stderr)
        return 130


def _discard_unwritable_output() -> None:
    """Discard output that cannot be written: Python would try again at exit, and fail there."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # if standard output is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_has_ended() -> bool:
    """Return True if standard output is a pipe that nobody reads any more, as after ``| head``."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # standard output is no file, as in a notebook
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _report(error: CommandError, message: str, code: int) -> int:
    """Print an error once per machine and return ``code``.

    An error of all ranks is printed by local rank 0. Before the process group exists, every rank usually fails in the
    same way: the others wait :data:`PATIENCE` seconds so that rank 0 prints first, because torchrun ends all processes
    as soon as one ends. A rank that is not ended by then has an error of its own and prints it.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        from detr_bf.common import distributed  # imports torch

        if error.on_all_ranks:
            return code
        if not distributed.is_initialized():
            time.sleep(PATIENCE)
    close_bars()
    print(safe_message(message), file=sys.stderr)
    return code
