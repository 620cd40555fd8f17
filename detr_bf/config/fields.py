"""Fields of the schemas whose values the loader checks, each with what is allowed. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What a value must be, in words and as a test; ``None`` always passes."""

    wanted: str
    holds: Callable[[Any], bool]


POSITIVE = Rule("greater than 0 and finite", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Rule("0 or more and finite", lambda value: 0 <= value < math.inf)
FRACTION = Rule("between 0 and 1", lambda value: 0 <= value <= 1)
SEED = Rule("at least 0 and less than 2**63", lambda value: 0 <= value < 2**63)
SIZES = Rule("one or more sizes greater than 0", lambda sizes: bool(sizes) and min(sizes) >= 1)


def choice(default: str, *others: str) -> Any:
    """A word of a closed list."""
    return field(default=default, metadata={"choices": (default, *others)})


def positive(default: float | None) -> Any:
    return field(default=default, metadata={"rule": POSITIVE})


def not_negative(default: float | None) -> Any:
    return field(default=default, metadata={"rule": NOT_NEGATIVE})


def fraction(default: float | None) -> Any:
    return field(default=default, metadata={"rule": FRACTION})


def seed(default: int) -> Any:
    return field(default=default, metadata={"rule": SEED})


def sizes(*default: int) -> Any:
    return field(default_factory=lambda: list(default), metadata={"rule": SIZES})
