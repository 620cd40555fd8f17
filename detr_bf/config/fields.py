"""Fields of the schemas whose values the loader checks, each with what is allowed. No torch in here.

Every number has a range, also above: a setting that is too large by a slip would make a run hang, or fill the memory,
before anything is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What a value must be, in words and as a test; ``None`` always passes."""

    wanted: str
    holds: Callable[[Any], bool]

    @property
    def field(self) -> dict[str, Any]:
        return {"metadata": {"rule": self}}


LARGE = 1e6  # the largest weight, cost or factor
RATE = 1e30  # the largest learning rate: one that is too large ends a run by itself, at once
STEPS = 10**9  # the most steps, images or pixels
LAYERS = 100  # the most layers of one kind
WIDTH = 16_384  # the largest number of channels, and of pixels of a side


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
    "a path on this machine with names of at most 255 bytes (a URL is not fetched: download it first, and give the "
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
    """A word of a closed list."""
    return field(default=default, metadata={"choices": (default, *others)})


def positive(default: float | None, most: float = LARGE) -> Any:
    return field(default=default, **positive_rule(most).field)


def not_negative(default: float | None, most: float = LARGE) -> Any:
    return field(default=default, **not_negative_rule(most).field)


def fraction(default: float | None) -> Any:
    return field(default=default, **FRACTION.field)


def below_one(default: float | None) -> Any:
    """A share that must not be whole: with a dropout of 1 nothing is left."""
    return field(default=default, **BELOW_ONE.field)


def seed(default: int) -> Any:
    return field(default=default, **SEED.field)


def sizes(*default: int) -> Any:
    return field(default_factory=lambda: list(default), **SIZES.field)


def indices(*default: int) -> Any:
    """Layers, epochs or classes, counted from 0."""
    return field(default_factory=lambda: list(default), **INDICES.field)


def numbers(*default: float) -> Any:
    """Numbers whose meaning the group of settings checks."""
    return field(default_factory=lambda: list(default), **NUMBERS.field)


def arguments() -> Any:
    """Arguments of a function of another library, by name."""
    return field(default_factory=dict, **ARGUMENTS.field)


def path(default: str | None) -> Any:
    """A file or folder; a leading ``~`` is replaced by the home folder."""
    return field(default=default, metadata={"rule": LOCAL_PATH, "path": True})
