"""The package installed from a wheel, used from a folder that is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data.formats.test_coco_and_csv import write
from tests.docs.test_pages import ROOT
from tests.inference.test_finetuning import TINY

Factory = Callable[..., SimpleNamespace]
BLOCK = """
import json, sys
from pathlib import Path
import numpy as np, torch
from PIL import Image
import detr_bf
assert str(Path(detr_bf.__file__)).startswith(sys.argv[1]), detr_bf.__file__

overrides = ["device=cpu", "train.epochs=2", "data.workers=0"]
detector = detr_bf.finetune("photos/", model="tiny.yaml", output="runs/mine", overrides=overrides)
image = Path("photos/valid/0101.png")
array = np.asarray(Image.open(image))
tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
forms = [str(image), image, image.read_bytes(), Image.open(image), array, tensor, tensor / 255]
every = [detector(each, threshold=0) for each in forms] + [detector(array[..., ::-1], threshold=0, bgr=True)]
assert all(torch.equal(each.boxes, every[0].boxes) and len(each) for each in every)
found = every[0]
assert len(found.names) == len(found.boxes) == len(found.scores)
found.plot().save("picture.png")
assert len(found.crop()) == len(found)
json.loads(found.to_json()), found.to_coco(), found.to_csv(), found.to_supervision(), found.to_pandas()
assert len(detector([image, array])) == 2 and len(detector("photos/valid")) == 4
half = list(detector.predict("photos/valid", batch_size=8, threshold=0.4, device="cpu", half=True))
assert [each.image_id for each in half] == [0, 1, 2, 3]
result = detector.evaluate("photos/valid/annotations.json", images="photos/valid")
print(result)
detector.save("saved")
assert torch.equal(detr_bf.load("saved", "cpu")(image, threshold=0).boxes, found.boxes)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel and install it without its dependencies into a folder."""
    folder = tmp_path_factory.mktemp("installed")
    pip = partial(subprocess.run, capture_output=True, text=True, cwd=folder)
    command = [sys.executable, "-m", "pip"]
    built = pip([*command, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)])
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("detr_bf-*.whl")
    done = pip([*command, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)])
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def run(site: Path, tmp_path: Path, coco_folder: Factory) -> Callable[[Sequence[str]], str]:
    """Function that runs a program of the installed package beside a folder of photographs and returns what it says."""
    for name, first in (("train", 1), ("valid", 101)):
        write(tmp_path / "photos", f"{name}/annotations.json", name, coco_folder(name=name, first_image_id=first))
    (tmp_path / "tiny.yaml").write_text(TINY)
    environment = os.environ | {"PYTHONPATH": str(site)}

    def call(command: Sequence[str]) -> str:
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return call


@pytest.mark.slow  # compiles
def test_python(run: Callable[[Sequence[str]], str], site: Path) -> None:
    said = run([sys.executable, "-c", BLOCK, str(site)])
    assert "operators on cpu: compiled kernels" in said
    assert "AP 0." in said


@pytest.mark.slow
def test_commands(run: Callable[[Sequence[str]], str], site: Path, tmp_path: Path) -> None:
    program = [sys.executable, str(site / "bin" / "detr-bf")]
    small = ["device=cpu", "train.epochs=1", "data.workers=0", "data.root=photos", "data.val.split=valid"]
    small += ["data.train.split=train", "output_dir=runs/mine"]
    assert "0 errors" in run([*program, "check", "--config", "tiny.yaml", *small])
    run([*program, "train", "tiny.yaml", "finetune", *small])
    assert "AP 0." in run([*program, "evaluate", "runs/mine"])
    for form in ("coco", "csv", "jsonl", "yolo", "json"):
        command = ["predict", "runs/mine", "--output", form, "--format", form, "--threshold", "0"]
        run([*program, *command, "photos/valid/*.png"])
    assert (tmp_path / "json" / "0000_0101.png").is_file()
    assert "deformable_detr_r50" in run([*program, "recipes"])
