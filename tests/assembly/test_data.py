from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from detr_bf.assembly import build_train_data, data_source
from detr_bf.config import DetectionConfig, load_config
from detr_bf.data.batches import SampleKey
from detr_bf.engine import RunFolder
from detr_bf.errors import InputError
from detr_bf.tasks.detection import DetectionTask, _panoptic_evaluation, build_evaluation

Factory = Callable[..., SimpleNamespace]


def config(prefix: str, *overrides: str) -> DetectionConfig:
    """Data settings with the training folder ``train``, the validation folder ``val``, and masks."""
    paths = [
        f"data.{split}.{key}={prefix}{split}/{name}"
        for split in ("train", "val")
        for key, name in (("images", "images"), ("annotations", "panoptic.json"), ("panoptic", "panoptic"))
    ]
    return load_config(None, [*paths, "model.masks=true", "eval.engine=pycocotools", "data.workers=0", *overrides])


@pytest.fixture
def root(panoptic_folder: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set $DETECTRON2_DATASETS to a folder with both splits; the working directory is a different folder."""
    panoptic_folder(name="train")
    panoptic_folder(name="val", first_image_id=101)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("prefix", ["", "data/", "./data/"])
def test_paths_are_found_below_the_datasets_of_detectron2(root: Path, prefix: str) -> None:
    for split in ("train", "val"):
        folder = root / split
        wanted = (folder / "images", folder / "panoptic.json", folder / "panoptic")
        assert data_source(config(prefix), split) == wanted
    assert len(build_train_data(config(prefix))) == 4


def test_a_path_that_exists_is_taken_as_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert data_source(config(""), "train").images == Path("train/images")
    assert data_source(config(f"{root}/"), "train").images == root / "train" / "images"


def test_a_folder_called_data_there_comes_first(root: Path) -> None:
    (root / "data" / "train" / "images").mkdir(parents=True)
    assert data_source(config("data/"), "train").images == root / "data" / "train" / "images"


def test_a_missing_path_says_where_it_was_looked_for(root: Path) -> None:
    with pytest.raises(InputError) as told:
        data_source(config("data/coco/"), "val")
    candidates = [f"{root}/elsewhere/data/coco/val/images", f"{root}/data/coco/val/images", f"{root}/coco/val/images"]
    assert str(told.value) == (
        "data.val.images is data/coco/val/images, which does not exist; "
        f"looked for {', '.join(candidates)} ($DETECTRON2_DATASETS)"
    )


def test_without_the_variable_paths_are_as_they_are(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DETECTRON2_DATASETS")
    assert data_source(config("data/"), "train").images == Path("data/train/images")
    with pytest.raises(InputError, match="image folder data/train/images does not exist"):
        build_train_data(config("data/"))


def test_the_doctor_and_evaluation_see_the_same_files(root: Path, tmp_path: Path) -> None:
    settings = config("data/")
    report = DetectionTask(settings).examine()
    assert not report.errors
    classes = build_train_data(settings).class_map
    built = build_evaluation(settings, classes, torch.device("cpu"), RunFolder(tmp_path / "run")).make_evaluator()
    assert built.class_map == classes
    assert built.panoptic is not None
    assert built.panoptic.make_evaluator().class_map == classes


@pytest.mark.parametrize("check", ["true", "false"])
def test_a_run_without_validation_data_is_refused_before_images_are_read(
    monkeypatch: pytest.MonkeyPatch, root: Path, check: str
) -> None:
    unset = [f"data.val.{key}=''" for key in ("images", "annotations", "panoptic")]
    task = DetectionTask(config("", *unset, f"data.check={check}"))
    monkeypatch.setattr(DetectionTask, "examine", lambda self: pytest.fail("images were read"))
    with pytest.raises(InputError, match=r"data\.val\.images and data\.val\.annotations are not set: .*validation"):
        task.check()


def test_the_pixel_limit_reaches_every_reader(root: Path, tmp_path: Path) -> None:
    tight = config("", f"data.max_pixels={64 * 48 - 1}")
    said = r"64 x 48 pixels .*data\.max_pixels=3071"
    with pytest.raises(InputError, match=said):
        DetectionTask(tight).check()
    with pytest.raises(InputError, match=said):
        build_train_data(tight)[SampleKey(0, 0)]
    data = build_train_data(config(""))
    evaluation = build_evaluation(tight, data.class_map, torch.device("cpu"), RunFolder(tmp_path / "run"))
    with pytest.raises(InputError, match=said):
        evaluation.make_evaluator()
    panoptic = _panoptic_evaluation(tight, data, RunFolder(tmp_path / "run"))
    assert panoptic is not None
    with pytest.raises(InputError, match=said):
        panoptic.make_evaluator()._truths[101]
