"""What every command line shares: exit codes, and one voice for a group of processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from detr_bf import distributed
from detr_bf.errors import InputError, Interrupted, Told, TrainingError

PATIENCE = 10.0  # seconds that the first process of a machine has for saying what all will say


def run_tool(function: Callable[[], int]) -> int:
    """Run it and return the exit code: 0 done, 1 training failed, 2 bad input, 128 + N stopped by signal N."""
    try:
        return function()
    except InputError as error:
        return _report(error, f"error: {error}", 2)
    except TrainingError as error:
        return _report(error, f"training stopped: {error}", 1)
    except Interrupted as error:
        return _report(error, str(error), 128 + error.signal_number)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


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
    print(message, file=sys.stderr)
    return code
