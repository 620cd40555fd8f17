"""Coverage of the folders: every recorded case is read by a test, and every kind of case was recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.golden import test_rtdetr
from tests.golden.cases import (
    KEY_LISTS,
    Case,
    build,
    family,
    features,
    num_select,
    set_criterion,
    targets_of,
)
from tests.golden.conftest import KINDS, case_paths
from tests.golden.test_successors import matched_with_tiny_box


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


class ReadKeys(dict[str, Any]):
    """Options that remember which were read."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def test_every_option_is_read(option_case: Case) -> None:
    """Run what the tests of a case read its options with; an option that nothing reads could have any value."""
    cfg = ReadKeys(option_case.cfg)
    case = Case(option_case.name, option_case.tensors, option_case.manifest | {"cfg": cfg})
    build(case)
    features(case)
    num_select(case)
    targets_of(case, "input.targets.step.")
    if family(case) in ("rtdetr", "rtdetrv2"):
        test_rtdetr.criterion(case)
    else:
        set_criterion(case)
        matched_with_tiny_box(case, "step", "pred_boxes", case.tensors["step.out.grad.pred_boxes"])
    assert set(cfg) - cfg.read == set()
