from __future__ import annotations

from pathlib import Path

import pytest

DEFAULT = Path(__file__).parents[3] / "shared" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", type=Path, default=DEFAULT, help="folder of recorded reference outputs")
