"""Exit codes and error messages of the command lines; of a group of processes one prints."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from detr_bf import distributed
from detr_bf.errors import InputError, Interrupted, Told, TrainingError
from detr_bf.progress import close_bars
from detr_bf.text import safe_message

PATIENCE = 10.0  # seconds that the first process of a machine has for saying what all will say
_ROOM = "make room or choose another place, then run it again"
_ACCESS = "change the permissions or choose another place, then run it again"
_ADVICE = {  # errors of the file system that the user can mend
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _ROOM,
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: "choose another place, then run it again",
    errno.EIO: "the storage fails: choose another place, then run it again",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a folder is needed where a file of that name is",
    errno.EISDIR: "a file is needed where a folder of that name is",
    errno.EEXIST: "choose another name",
}


def run_tool(function: Callable[[], int]) -> int:
    """Run it and return the exit code: 0 done, 1 failed, 2 bad input, 128 + N stopped by signal N.

    A file that cannot be read or written for lack of space or permission is bad input, too. Messages go to standard
    error through :func:`detr_bf.text.safe_message`.
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
    """Discard what standard output cannot write, as on a full disk: Python would try again at exit and fail there."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # where standard output is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Told, message: str, code: int) -> int:
    """What all processes of a group raise together is printed by the first of each machine.

    What they raise before they meet is mostly the same too: the others wait until the first has said it, for the
    launcher ends all as soon as one has ended. One that it leaves alone has something else to say.
    """
    if distributed.local_rank() > 0:
        if error.by_all:
            return code
        if not distributed.in_group():
            time.sleep(PATIENCE)
    close_bars()
    print(safe_message(message), file=sys.stderr)
    return code
