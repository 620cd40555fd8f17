"""What every command line shares: exit codes, and one voice for a group of processes."""

from __future__ import annotations

import sys
from collections.abc import Callable

from detr_bf import distributed
from detr_bf.errors import InputError, Interrupted, TrainingError


def run_tool(function: Callable[[], int]) -> int:
    """Run it and return the exit code: 0 done, 1 training failed, 2 bad input, 128 + N stopped by signal N."""
    try:
        return function()
    except InputError as error:
        return _report(f"error: {error}", 2)
    except TrainingError as error:
        return _report(f"training stopped: {error}", 1)
    except Interrupted as error:
        return _report(str(error), 128 + error.signal_number)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _report(message: str, code: int) -> int:
    """What all processes of a group raise, before they meet or together, is printed by the first of each machine."""
    if distributed.local_rank() == 0 or distributed.in_group():
        print(message, file=sys.stderr)
    return code
