"""The exceptions the command lines turn into exit codes."""

from collections.abc import Iterator
from contextlib import contextmanager


class Told(BaseException):
    """Its message is meant for the user; ``by_all`` says that every process of a group raises it."""

    by_all = False


class InputError(Told, ValueError):
    """Bad input: the message says what was given, what was expected and what to do.

    The command lines print the message without a traceback and exit with code 2. Everything else that is raised is a
    fault of ours and keeps its traceback.
    """


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Begin the message of an InputError with ``source``, which is where the refused values were read."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


class TrainingError(Told, RuntimeError):
    """Training cannot go on; the message says where it stopped and why. The command lines exit with code 1."""


class Interrupted(Told):
    """SIGINT or SIGTERM was received and everything is saved. The command lines exit with 128 + the signal's number."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number
