"""Coverage of the folder: every recorded case is read by a test."""

from __future__ import annotations

import re
from pathlib import Path

from tests.golden.conftest import KINDS, case_names


def test_every_case_is_covered(golden: Path) -> None:
    names = case_names(golden)
    assert names, f"{golden} holds no case"
    uncovered = [name for name in names if not any(re.match(pattern, name) for pattern in KINDS.values())]
    assert not uncovered, f"no test reads {', '.join(uncovered)}: add a kind to tests/golden/conftest.py"
