"""Log lines: to the screen without tearing the progress bar, and to ``log.txt``; of other processes errors alone."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tqdm import tqdm

from detr_bf import distributed
from detr_bf.text import safe_message


class _Safe(logging.Formatter):
    """Formatter that escapes the control characters of messages and tracebacks, except line breaks."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_message(super().format(record))


class _Screen(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class _File(logging.FileHandler):
    """File handler that reports a failing write once, where logging would print a traceback for every line."""

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
    logger = logging.getLogger("detr_bf")
    logger.setLevel(logging.INFO if distributed.is_main() else logging.ERROR)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    _add(logger, _Screen(), "%(message)s" if distributed.is_main() else f"process {distributed.rank()}: %(message)s")
    if log_file is not None:
        _add(logger, _File(log_file, encoding="utf-8"), "%(asctime)s %(levelname)s %(message)s")


def _add(logger: logging.Logger, handler: logging.Handler, layout: str) -> None:
    handler.setFormatter(_Safe(layout))
    logger.addHandler(handler)
