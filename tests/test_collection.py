"""Collection of every test file by a bare ``pytest``."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def not_collected(file: Path, top: Path, config: pytest.Config) -> bool:
    """Return whether pytest leaves out the file or a folder up to ``top`` (``norecursedirs``, ignore options)."""
    paths = [file, *(folder for folder in file.parents if folder.is_relative_to(top))]
    return any(config.hook.pytest_ignore_collect(collection_path=path, config=config) for path in paths)


def test_every_test_file_is_collected(request: pytest.FixtureRequest) -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    assert Path(__file__) in files
    assert [str(file.relative_to(TESTS)) for file in files if not_collected(file, TESTS, request.config)] == []


def test_a_folder_that_pytest_leaves_out_is_found(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for name, left_out in (("build", True), ("assembly", False)):  # `build` is in pytest's norecursedirs
        (tmp_path / name).mkdir()
        assert not_collected(tmp_path / name / "test_x.py", tmp_path, request.config) == left_out


def test_tests_stand_in_test_files() -> None:
    others = [path for path in TESTS.rglob("*.py") if not path.name.startswith("test_")]
    misplaced = [
        f"{path.relative_to(TESTS)}: {node.name}"
        for path in others
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert misplaced == []


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_an_option_of_make_test_may_stand_before_its_value() -> None:
    """Without a name of a test pytest reads ``--golden DIR`` as tests in DIR, and does not know the option there."""
    for given in ("--golden some/folder -x", "--golden=some/folder -x"):
        command = ["make", "--dry-run", "--no-print-directory", "test", f"ARGS={given}"]
        printed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout
        assert "--dist worksteal --golden=some/folder -x" in printed
