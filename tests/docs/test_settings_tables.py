"""Generated reference of settings, and the script of the guide to thresholds."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from detr_bf.classification.config import ClassifierConfig
from detr_bf.classification.contrastive_config import ContrastiveConfig
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.common.files import write_json
from detr_bf.common.structures import ClassMap, Detections
from detr_bf.config import DetectionConfig, known_keys
from detr_bf.config.described import described_settings
from detr_bf.evaluation.error_types import error_document
from detr_bf.evaluation.matching import image_errors
from detr_bf.segmentation.config import SegmentationConfig

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


@pytest.mark.parametrize(
    "schema", [DetectionConfig, ClassifierConfig, MaskedConfig, ContrastiveConfig, SegmentationConfig]
)
def test_every_setting_has_a_row(tables: ModuleType, schema: type) -> None:
    described = list(described_settings(schema))
    found = [setting.key for setting in described]
    assert sorted(found) == sorted(known_keys(schema))
    rows = [line for line in tables.markdown(schema).splitlines() if line.startswith("| `")]
    assert len(rows) == len(found)
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)
    assert not [setting.key for setting in described if not setting.comment], "write a comment after the field"


def test_a_row_has_type_default_range_and_comment() -> None:
    rows = {setting.key: setting for setting in described_settings(DetectionConfig)}
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
    (script,) = re.findall(r"```python\n(import json.*?)```", (DOCS / "thresholds.md").read_text(), re.DOTALL)
    boxes = [[0.0, 0.0, 10.0, 10.0], [50.0, 50.0, 10.0, 10.0]]
    annotations = [{"image_id": 1, "category_id": 7, "bbox": box, "iscrowd": 0} for box in boxes]
    found = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30], [50, 50, 60, 60]])
    detections = Detections(1, found, torch.tensor([0.9, 0.6, 0.3]), torch.zeros(3, dtype=torch.int64))
    images = image_errors({"annotations": annotations}, [detections], ClassMap((7,), ("a",)))
    write_json(tmp_path / "errors.json", error_document(images, {}, np.zeros((10, 101, 1)), ["a"], 0.5, 0, []))
    (tmp_path / "script.py").write_text(script)
    before = sys.argv
    try:
        sys.argv = ["script.py", str(tmp_path)]
        runpy.run_path(str(tmp_path / "script.py"))
    finally:
        sys.argv = before
    rows = {row.split()[0]: row.split()[1:] for row in capsys.readouterr().out.splitlines() if row.startswith("  ")}
    assert rows["0.20"] == ["0.667", "1.000", "0.800"]
    assert rows["0.50"] == ["0.500", "0.500", "0.500"]
    assert rows["0.80"] == ["1.000", "0.500", "0.667"]
