"""SIGINT and SIGTERM as a wish that is heard at the end of the step."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

ONE_WISH_SECONDS = 2.0  # a terminal or scheduler and the launcher of the group may each pass on the same wish


class InterruptWatch:
    """While active, the first SIGINT or SIGTERM is only noted in ``signal_number``; a later one acts as usual.

    What comes within :data:`ONE_WISH_SECONDS` of the first is part of it.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._noted_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> InterruptWatch:
        self._previous = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is None:
            self.signal_number, self._noted_at = number, time.monotonic()
        elif time.monotonic() - self._noted_at > ONE_WISH_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
