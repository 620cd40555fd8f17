"""SIGINT and SIGTERM as a wish that is heard at the end of the step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class InterruptWatch:
    """While active, the first SIGINT or SIGTERM is only noted in ``signal_number``; the next one acts as usual."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> InterruptWatch:
        self._previous = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
