"""Progress bars and log lines; on several ranks only the main one shows bars and logs more than errors.

Bars are live on a terminal, and widgets in a notebook with ipywidgets. Elsewhere (a file, a pipe, a notebook without
ipywidgets) a bar is a line every half minute, without carriage returns and escape codes. Nothing is coloured. Log lines
are written above the bar.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakSet

from tqdm.auto import tqdm

from detr_bf.common.text import printable, safe_message

SECONDS_IN_A_LOG = 30.0
_bars: WeakSet[tqdm] = WeakSet()


class _Lines:
    """File that gets each new state of a bar as a line; a bar rewrites its line with carriage returns."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._last = file, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        line = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).strip()  # the codes that move to the line of a nested bar
        state = line.rpartition(" [")[0] or line  # without times: a bar that is closed shows its last state again
        if line and state != self._last:
            self._last = state
            self._file.write(f"{line}\n")


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """Return a tqdm bar over ``items`` on standard error; ``options`` are those of tqdm."""
    from detr_bf.common import distributed  # imports torch, which the command line reads its arguments without

    if options.get("desc") is not None:
        options["desc"] = printable(options["desc"])
    pace: dict[str, Any] = {}
    if not (sys.stderr.isatty() or tqdm.display.__module__ == "tqdm.notebook"):
        pace = {"file": _Lines(sys.stderr), "mininterval": SECONDS_IN_A_LOG, "maxinterval": SECONDS_IN_A_LOG}
    bar = tqdm(items, **{"dynamic_ncols": True, "disable": not distributed.is_main(), **pace, **options})
    _bars.add(bar)
    return bar


def close_bars() -> None:
    """Close the bars that an exception has left open, so that its message starts on a new line."""
    for bar in list(_bars):
        bar.close()


class _SafeFormatter(logging.Formatter):
    """Formatter that escapes the control characters of messages and tracebacks, except line breaks."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_message(super().format(record))


class _ScreenHandler(logging.Handler):
    """Handler that writes above the progress bars; a screen that cannot be written does not end a run."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # stderr is a file on a full disk, or a pipe whose reader has ended
            tqdm.write(self.format(record), file=sys.stderr)


class _FileHandler(logging.FileHandler):
    """File handler that reports a failed write once instead of printing a traceback for every line."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            tqdm.write(safe_message(f"{self.baseFilename} cannot be written: {error.strerror}"), file=sys.stderr)


def setup_logging(log_file: Path | None = None) -> None:
    """Send the package's log to the screen and, when given, append it to ``log_file``."""
    from detr_bf.common import distributed

    logger = logging.getLogger("detr_bf")
    logger.setLevel(logging.INFO if distributed.is_main() else logging.ERROR)
    logger.propagate = False
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    on_screen = "%(message)s" if distributed.is_main() else f"rank {distributed.rank()}: %(message)s"
    handlers: list[tuple[logging.Handler, str]] = [(_ScreenHandler(), on_screen)]
    if log_file is not None:
        handlers.append((_FileHandler(log_file, encoding="utf-8"), "%(asctime)s %(levelname)s %(message)s"))
    for handler, layout in handlers:
        handler.setFormatter(_SafeFormatter(layout))
        logger.addHandler(handler)
