"""Coverage of the folders: every recorded case is read by a test, and every kind of case was recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.golden.cases import KEY_LISTS
from tests.golden.conftest import KINDS, case_paths


def test_every_case_is_covered(golden: Sequence[Path]) -> None:
    names = [path.stem for path in case_paths(golden)]
    assert names or case_paths([folder / KEY_LISTS for folder in golden]), f"{golden} hold no case"
    uncovered = [name for name in names if not any(re.match(pattern, name) for pattern in KINDS.values())]
    assert not uncovered, f"no test reads {', '.join(uncovered)}: add a kind to tests/golden/conftest.py"


def test_every_kind_is_recorded(golden: Sequence[Path], request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--golden"):
        pytest.skip("the folders of --golden may hold some kinds only")
    names = [path.stem for path in case_paths(golden)]
    assert [kind for kind, pattern in KINDS.items() if not any(re.match(pattern, name) for name in names)] == []
