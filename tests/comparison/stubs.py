"""Stand-ins for the statistics and the page of a comparison, so that the tests of running cells need neither."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def modules() -> dict[str, ModuleType]:
    """Return modules by name: the table of a run counts its detections, the analysis lists the cells."""
    resampling, analysis, page = (
        ModuleType(f"detr_bf.comparison.{name}") for name in ("resampling", "document", "page")
    )
    resampling.table_of = _table_of  # type: ignore[attr-defined]
    analysis.analyze = _analyze  # type: ignore[attr-defined]
    page.write_page = _write_page  # type: ignore[attr-defined]
    page.check_result_files = lambda folder: None  # type: ignore[attr-defined]
    page.markdown_table = lambda document: f"| {document['primary']} | {len(document['cells'])} cells |"  # type: ignore[attr-defined]
    return {module.__name__: module for module in (resampling, analysis, page)}


def _table_of(run: Path) -> Any:
    results = json.loads((run / "results.json").read_text())
    return SimpleNamespace(to_dict=lambda: {"kind": "boxes", "detections": len(results)})


def _analyze(cells: list[dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    names = [f"{cell['arm']} {cell['seed']} {cell['fold']}" for cell in cells]
    return {"format": "detr_bf comparison 1", "cells": names, **arguments, "sentences": ["a finding"]}


def _write_page(document: dict[str, Any], folder: Path) -> Path:
    (folder / "comparison.json").write_text(json.dumps(document))
    return folder / "index.html"


if __name__ == "__main__":  # the command with the stand-ins, for tests that kill it
    sys.modules.update(modules())
    from detr_bf.commands import command_main

    main = command_main("compare")

    sys.exit(main(sys.argv[1:]))
