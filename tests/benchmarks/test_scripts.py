"""The plain scripts that finetune is compared with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from detr_bf.comparison.experiment import read_experiment
from detr_bf.config import packaged_experiments
from detr_bf.evaluation import check_results

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"


@pytest.mark.parametrize("name", ["bccd", "cards", "kangaroo"])
def test_the_experiments_give_each_script_the_same_time(name: str) -> None:
    experiment = read_experiment(packaged_experiments()[f"yardstick_{name}"])
    for minutes in (2, 5, 15):
        for arm in ("finetune", "faster_rcnn", "retinanet"):
            own = experiment.commands[f"{arm}_{minutes}m"]
            assert own["seconds"] == 60 * minutes
            script = "finetune.py" if arm == "finetune" else f"torchvision_detector.py {arm}"
            assert f"benchmarks/scripts/{script} " in " ".join(own["command"].split())
            assert (f"finetune_{minutes}m", f"{arm}_{minutes}m") in experiment.contrasts or arm == "finetune"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["faster_rcnn", "retinanet"])
def test_a_script_trains_for_its_seconds_and_writes_detections(
    name: str, tmp_path: Path, coco_folder: Callable[..., SimpleNamespace]
) -> None:
    train, val = coco_folder(num_images=6), coco_folder(num_images=3, name="val", first_image_id=101)
    paths = train.images, train.annotations, val.images, val.annotations, tmp_path
    command = [sys.executable, SCRIPTS / "torchvision_detector.py", name, *paths, "--seconds", "5", "--seed", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[0]) >= 1, "steps"
    results = json.loads((tmp_path / "results.json").read_text())
    check_results(results, val.content, "results.json")
    boxes = [result["bbox"] for result in results]
    assert all(x >= 0 and y >= 0 and x + width <= 64.1 and y + height <= 48.1 for x, y, width, height in boxes)
