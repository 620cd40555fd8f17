"""Test cases from every file of the folder ``--golden``; skipped with a message if the folder does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.golden.cases import Case

# Contents of a file by the start of its name; each kind is the argument of the tests that read it.
KINDS = {
    "model_case": r"0\d",
    "gradient_case": r"0\d(?!m)",  # multi-scale SMCA's image 1 depends on image 0 there, see test_models
    "mini_batch_case": r"09",
    "criterion_case": r"10[abcd]_",
    "step_case": r"10[ef]_",
    "op_case": r"11_",
    "attention_case": r"11b_",
    "postprocess_case": r"12[acd]_",
    "mask_postprocess_case": r"12a_",
    "panoptic_case": r"12b_",
    "position_case": r"13a_",
    "levels_case": r"13b_",
    "sine_case": r"13c_",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    folder: Path = metafunc.config.getoption("--golden")
    for kind, pattern in KINDS.items():
        if kind in metafunc.fixturenames:
            names = [name for name in case_names(folder) if re.match(pattern, name) and _has(kind, folder, name)]
            metafunc.parametrize(kind, names or [None], indirect=True)


def _has(kind: str, folder: Path, name: str) -> bool:
    """Return whether the case contains the tensors of the kind, if not all cases of the name do."""
    if kind != "mini_batch_case":
        return True
    tensors = json.loads((folder / f"{name}.json").read_text())["tensors"]
    return any(key.startswith("eval_bf.") for key in tensors)


def case_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.json"))


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.config.getoption("--golden")
    if not folder.is_dir():
        pytest.skip(f"no recorded reference outputs at {folder}; give a folder with --golden DIR")
    return folder


def _case(golden: Path, request: pytest.FixtureRequest) -> Case:
    if request.param is None:
        pytest.fail(f"{golden} has no {request.fixturename}: no file name starts with {KINDS[request.fixturename]}")
    return Case.load(golden, request.param)


for _kind in KINDS:
    globals()[_kind] = pytest.fixture(name=_kind)(_case)
