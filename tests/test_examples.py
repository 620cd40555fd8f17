"""The notebook of examples/ runs from start to end in a folder of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.test_pages import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


@pytest.mark.full
@pytest.mark.parametrize("images", [pytest.param(600, marks=pytest.mark.slow), 64])
def test_the_notebook_runs(images: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    sample = next(cell for cell in notebook.cells if "sample-data" in cell.source)
    assert "--num-train 600" in sample.source
    sample.source = sample.source.replace("--num-train 600", f"--num-train {images}")
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output for output in outputs if "image/png" in output.get("data", {})]
    text = "".join(output.get("text", "") for output in outputs)
    assert len(shown) == 1, "the picture of the prediction"
    assert "same as: detr-bf train demo finetune" in text
    assert "\x1b[" not in text
    assert [line for line in text.splitlines() if line.startswith("AP ") and "AP50" in line], text
    assert (tmp_path / "digit_detector" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
