"""What README and guides name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")]
)
NAMED = re.compile(r"\b(?:configs/[\w/-]+\.yaml|(?:tools|docs|benchmarks)/(?!test_)\w+\.(?:py|md|sh|sbatch|png))")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(NAMED.findall(page.read_text(encoding="utf-8")))
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing


def test_names_are_found() -> None:
    found = {name for page in PAGES for name in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert {"configs/demo.yaml", "tools/train_net.py", "docs/recipes.md"} <= found
