"""Exceptions that the command lines turn into exit codes."""

from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(BaseException):
    """An error that the command lines show without a traceback; ``on_all_ranks``: every rank raises it."""

    on_all_ranks = False


class InputError(CommandError, ValueError):
    """Bad input; the message says what was given, what was expected and what to do. Exit code 2.

    Every other exception is a fault of this package and keeps its traceback.
    """


@contextmanager
def prefix_errors(source: str) -> Iterator[None]:
    """Put ``source``, the origin of the checked values, before the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


class TrainingError(CommandError, RuntimeError):
    """Training cannot continue; the message says at which step and why. Exit code 1."""


class Interrupted(CommandError):  # noqa: N818
    """SIGINT or SIGTERM was received and everything is saved. Exit code 128 + ``signal_number``."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number
