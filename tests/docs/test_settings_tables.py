"""Generated reference of settings, and the script of the guide to thresholds."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from detr_bf.config import ClassifierConfig, DetectionConfig, MaskedConfig, known_keys

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_tables", DOCS / "settings_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["settings_tables"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("schema", [DetectionConfig, ClassifierConfig, MaskedConfig])
def test_every_setting_has_a_row(tables: ModuleType, schema: type) -> None:
    found = [setting.key for setting in tables.settings(schema)]
    assert sorted(found) == sorted(known_keys(schema))
    rows = [line for line in tables.markdown(schema).splitlines() if line.startswith("| `")]
    assert len(rows) == len(found)
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)


def test_a_row_has_type_default_range_and_comment(tables: ModuleType) -> None:
    rows = {setting.key: setting for setting in tables.settings(DetectionConfig)}
    assert rows["train.batch_size"].default == "2"
    assert rows["train.batch_size"].allowed.startswith("greater than 0")
    assert rows["batch_former.position"].allowed == "before, after"
    assert rows["batch_former.layers"][1:3] == ("list[int]", "[0]")
    assert "counted from 0" in rows["batch_former.layers"].comment
    assert rows["optimizer.lr"].default == "0.0001"
    assert rows["init_from"].default == "null"
    assert rows["data.train.images"].default == '""'


def test_threshold_script_counts_as_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Detections of one image with two objects: right at 0.9, wrong at 0.6, right at 0.3."""
    (script,) = re.findall(r"```python\n(import sys.*?)```", (DOCS / "thresholds.md").read_text(), re.DOTALL)
    boxes = [[0, 0, 10, 10], [50, 50, 10, 10]]
    annotations = [
        {"id": i + 1, "image_id": 1, "category_id": 7, "bbox": box, "area": 100, "iscrowd": 0}
        for i, box in enumerate(boxes)
    ]
    truth = {
        "images": [{"id": 1, "width": 100, "height": 100}],
        "categories": [{"id": 7, "name": "a"}],
        "annotations": annotations,
    }
    detections = [(boxes[0], 0.9), ([20, 20, 10, 10], 0.6), (boxes[1], 0.3)]
    found = [{"image_id": 1, "category_id": 7, "bbox": box, "score": score} for box, score in detections]
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "val.json").write_text(json.dumps(truth))
    (tmp_path / "results.json").write_text(json.dumps(found))
    before = sys.argv
    try:
        sys.argv = ["script.py", str(tmp_path / "val.json"), str(tmp_path / "results.json")]
        runpy.run_path(str(tmp_path / "script.py"))
    finally:
        sys.argv = before
    rows = {row.split()[0]: row.split()[1:] for row in capsys.readouterr().out.splitlines() if row.startswith("  ")}
    assert rows["0.25"] == ["0.667", "1.000", "0.800"]
    assert rows["0.50"] == ["0.500", "0.500", "0.500"]
    assert rows["0.80"] == ["1.000", "0.500", "0.667"]
