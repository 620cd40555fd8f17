"""Examples in the guide to classifiers: they run as printed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "classifiers.md"


@cache
def example(section: str) -> dict[str, Any]:
    """Return the names defined after the code of a section has run."""
    (block,) = re.findall(rf"## {section}.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_loss_of_pairs_runs_and_trains_its_predictor() -> None:
    names = example("Relative localization in other networks")
    assert names["tokens"].shape == (8, 196, 384)
    assert 0 < names["loss"].item() < 0.1, "distances are shares of the grid"
    names["loss"].backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in names["predict"].parameters())
    grids = []
    names["predict"].register_forward_pre_hook(lambda module, args: grids.append(args[1]))
    names["predict"](*names["pooled"](names["tokens"], (14, 14)))
    assert grids == [(7, 7)]
