"""Test cases from every file of the folders ``--golden``; skipped with a message if there are none of a kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.golden.cases import FOLDERS, KEY_LISTS, Case

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
    "successor_case": r"2[0-4]",
    "inner_case": r"2[0-5]",
    "option_case": r"2[0-5]",
    "dn_case": r"21",
    "contrastive_case": r"22",
    "anchor_case": r"26a_",
    "noise_case": r"26b_",
    "rtdetr_case": r"25",
    "rtdetr_functions_case": r"26c_",
    "rtdetr_noise_case": r"25",
    "dfine_case": r"27[^f]|28[^f]",
    "dfine_functions_case": r"27f_",
    "deim_functions_case": r"28f_",
    "dfine_encoder_case": r"27[^f]|28[^bf]",
    "dfine_pixels_case": r"27[pq]_",
    "rfdetr_case": r"29[^f]",
    "rfdetr_functions_case": r"29f_",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    folders = metafunc.config.getoption("--golden") or FOLDERS
    for kind, pattern in KINDS.items():
        if kind in metafunc.fixturenames:
            paths = [path for path in case_paths(folders) if re.match(pattern, path.stem) and _has(kind, path)]
            _parametrize(metafunc, kind, paths)
    if "listed" in metafunc.fixturenames:
        _parametrize(metafunc, "listed", case_paths([folder / KEY_LISTS for folder in folders]))


def _parametrize(metafunc: pytest.Metafunc, name: str, paths: Sequence[Path]) -> None:
    metafunc.parametrize(name, paths or [None], ids=[path.stem for path in paths] or ["none"], indirect=True)


def _has(kind: str, path: Path) -> bool:
    """Return whether the case contains the tensors of the kind, if not all cases of the name do."""
    if kind != "mini_batch_case":
        return True
    return any(key.startswith("eval_bf.") for key in json.loads(path.read_text())["tensors"])


def case_paths(folders: Sequence[Path]) -> list[Path]:
    """Return the manifests in ``folders``, sorted by name."""
    return sorted(_manifests(folders), key=lambda path: path.name)


def _manifests(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from folder.glob("*.json")


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Sequence[Path]:
    """Folders of recorded reference outputs that exist."""
    given: Sequence[Path] = request.config.getoption("--golden") or FOLDERS
    found = [folder for folder in given if folder.is_dir()]
    if not found:
        pytest.skip(f"no recorded reference outputs at {', '.join(map(str, given))}; give a folder with --golden DIR")
    return found


def _case(golden: Sequence[Path], request: pytest.FixtureRequest) -> Case:
    if request.param is None:
        kind = request.fixturename
        pytest.skip(f"no {kind} in {', '.join(map(str, golden))}: no file name starts with {KINDS[str(kind)]}")
    return Case.load(request.param)


for _kind in KINDS:
    globals()[_kind] = pytest.fixture(name=_kind)(_case)
