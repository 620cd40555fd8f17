"""Field constructors of the config dataclasses; each attaches the rule that the loader checks. Imports no torch.

Every number has a lower and an upper limit: without the upper one, a mistyped value could hang a run or fill the memory
without an error message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Allowed values of a setting, as text and as a predicate."""

    wanted: str
    holds: Callable[[Any], bool]

    def allows(self, value: Any) -> bool:
        """Return True if the rule holds, or if the value is None."""
        try:
            return value is None or self.holds(value)
        except TypeError:  # for example a list inside a list
            return False

    @property
    def field(self) -> dict[str, Any]:
        return {"metadata": {"rule": self}}


LARGE = 1e6  # maximum of weights, costs and factors
RATE = 1e30  # maximum learning rate: a run with too large a one stops by itself at its first steps
STEPS = 10**9  # maximum number of steps, images or pixels
LAYERS = 100  # maximum number of layers of one kind
WIDTH = 16_384  # maximum number of channels, and of pixels along one side of an image


def _written(number: float) -> str:
    return f"{number:g}" if number < 1e6 else f"{number:.0e}".replace("e+0", "e").replace("e+", "e")


def positive_rule(most: float = LARGE) -> Rule:
    return Rule(f"greater than 0 and at most {_written(most)}", lambda value: 0 < value <= most)


def not_negative_rule(most: float = LARGE) -> Rule:
    return Rule(f"0 or more and at most {_written(most)}", lambda value: 0 <= value <= most)


FRACTION = Rule("between 0 and 1", lambda value: 0 <= value <= 1)
BELOW_ONE = Rule("between 0 and 1, and less than 1", lambda value: 0 <= value < 1)
SEED = Rule("at least 0 and less than 2**63", lambda value: 0 <= value < 2**63)
SIZES = Rule(
    f"one or more sizes greater than 0 and at most {WIDTH}",
    lambda sizes: bool(sizes) and all(1 <= size <= WIDTH for size in sizes),
)
INDICES = Rule(
    f"integers from 0 to {_written(STEPS)}",
    lambda values: len(values) <= 10**6 and all(0 <= x <= STEPS for x in values),
)
NUMBERS = Rule(
    f"finite numbers of at most {_written(LARGE)}", lambda values: all(abs(value) <= LARGE for value in values)
)
LOCAL_PATH = Rule(
    "a path on this machine with names of at most 255 bytes (URLs are not supported: download it first, and give the "
    "path of the file)",
    lambda value: _is_local_path(value),
)
ARGUMENTS = Rule(
    f"plain values with finite numbers of at most {_written(LARGE)}, depths of at most {LAYERS}, and no more than four "
    "levels",
    lambda values: _plain_arguments(values),
)


def _is_local_path(value: str) -> bool:
    longest = max(len(name.encode(errors="surrogatepass")) for name in value.split("/"))
    return longest <= 255 and len(value) <= 4000 and "\0" not in value and not re.match(r"[A-Za-z][\w+.-]*://", value)


def _plain_arguments(value: Any, key: str = "", level: int = 0) -> bool:
    if isinstance(value, dict):
        return level < 4 and all(_plain_arguments(each, str(name), level + 1) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return level < 4 and len(value) <= 1000 and all(_plain_arguments(each, key, level + 1) for each in value)
    if isinstance(value, (int, float)):
        return abs(value) <= (LAYERS if "depth" in key else LARGE)
    return True


def choice(default: str, *others: str) -> Any:
    """Return a field for one of a fixed set of words; the first is the default."""
    return field(default=default, metadata={"choices": (default, *others)})


def positive(default: float | None, most: float = LARGE) -> Any:
    return field(default=default, **positive_rule(most).field)


def not_negative(default: float | None, most: float = LARGE) -> Any:
    return field(default=default, **not_negative_rule(most).field)


def fraction(default: float | None) -> Any:
    return field(default=default, **FRACTION.field)


def below_one(default: float | None) -> Any:
    """Return a field for a fraction below 1, such as a dropout rate."""
    return field(default=default, **BELOW_ONE.field)


def seed(default: int) -> Any:
    return field(default=default, **SEED.field)


def sizes(*default: int) -> Any:
    return field(default_factory=lambda: list(default), **SIZES.field)


def indices(*default: int) -> Any:
    """Return a field for a list of layers, epochs or classes, counted from 0."""
    return field(default_factory=lambda: list(default), **INDICES.field)


def numbers(*default: float) -> Any:
    """Return a field for a list of finite numbers; its dataclass checks their number and range."""
    return field(default_factory=lambda: list(default), **NUMBERS.field)


def arguments() -> Any:
    """Return a field for keyword arguments of a function of another library."""
    return field(default_factory=dict, **ARGUMENTS.field)


def path(default: str | None) -> Any:
    """Return a field for a file or folder; the loader replaces a leading ``~`` by the home folder."""
    return field(default=default, metadata={"rule": LOCAL_PATH, "path": True})
