from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf.assembly import build_train_data, data_source
from detr_bf.assembly.data import build_val_data
from detr_bf.common.errors import InputError
from detr_bf.config import DetectionConfig, config_from_dict, config_to_dict, load_config
from detr_bf.data.batches import SampleKey
from detr_bf.data.images import PixelFormat
from detr_bf.data.inputs import image_pixels
from detr_bf.engine import Checkpoint, RunFolder
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
        assert data_source(config(prefix), split)[:3] == wanted
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


@pytest.mark.parametrize("check", ["true", "false"])
def test_16_bit_images_are_scaled_by_the_bits_of_the_training_images(
    coco_folder: Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    check: str,
) -> None:
    """The choice is in the config, which checkpoints store, and prediction has it."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    values, settings = np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) % 1024, []
    for split, most in (("train", (1023, 4095, 1000)), ("val", (200, 60_000, 1023))):
        folder = coco_folder(num_images=3, name=split, first_image_id=1 if split == "train" else 101)
        for entry, value in zip(folder.content["images"], most, strict=True):
            image = np.minimum(values, value)
            image[:2, :2] = value
            Image.fromarray(image).save(folder.images / entry["file_name"])
        settings += [f"data.{split}.images={folder.images}", f"data.{split}.annotations={folder.annotations}"]
    task = DetectionTask(load_config(None, [*settings, f"data.check={check}", "data.workers=0"]))
    found = {(each.split, each.code): each for each in task.examine().findings}
    assert found["train", "image-16-bit"].example == "image 1, 0001.png: 10 bits in use, scaled from 12"
    assert found["val", "grey-bits-exceeded"].example == "image 102, 0102.png: 16 bits in use, scaled from 12"
    classes = task.load_data().class_map
    assert task.config.data.grey_bits == 12
    assert "from the 12 bits that the training images use" in caplog.text
    data = build_val_data(task.config, classes, transform=lambda sample: sample)
    pixels, file = data[SampleKey(0, 1)][0], data.folder / "0102.png"
    assert (pixels[0, 0, 0], pixels[0, 3, 3]) == (255, values[3, 3] >> 4)
    stored = config_from_dict(config_to_dict(task.config))
    assert stored.data.grey_bits == 12
    resumed = DetectionTask(load_config(None, settings))
    resumed.adopt_settings(Checkpoint({}, classes.to_dict(), config_to_dict(task.config)))
    assert resumed.config.data.grey_bits == 12
    for given in (file, file.read_bytes(), Image.open(file), np.asarray(Image.open(file))):
        assert torch.equal(image_pixels(given, "it", pixel_format=PixelFormat(grey_bits=12)), pixels)


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
