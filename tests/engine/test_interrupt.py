from __future__ import annotations

import signal

import pytest

from detr_bf.engine import interrupt
from detr_bf.engine.interrupt import InterruptWatch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_come_together_are_one_wish(number: int) -> None:
    """A terminal sends to the whole group, and the launcher passes on what it got."""
    with InterruptWatch() as watch:
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert watch.signal_number == number


def test_a_later_signal_acts_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "ONE_WISH_SECONDS", -1.0)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with InterruptWatch():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, usual)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in InterruptWatch.SIGNALS]
    with InterruptWatch():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in InterruptWatch.SIGNALS] == before
