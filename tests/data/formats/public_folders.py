"""Kind of a row in the table of folders that public tools write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PublicFolder:
    """Small folder as a tool writes it, with its boxes or the message that refuses it."""

    name: str
    tool: str
    build: Callable[[Path], None]
    boxes: dict[str, list[tuple[str, float, float, float, float]]] | None = None  # class, x, y, w, h in pixels by file
    message: str | None = None  # regular expression
