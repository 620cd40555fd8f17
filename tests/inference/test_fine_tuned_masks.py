"""Fine-tuning with masks on folders of labels with outlines, and what comes after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask

import detr_bf
from detr_bf.commands import command_main
from detr_bf.common.errors import InputError
from detr_bf.config import DetectionConfig, load_config, packaged_configs
from detr_bf.data.coco import read_annotations
from detr_bf.data.formats import read_folder
from detr_bf.data.masks import joined, outlines
from detr_bf.data.samples import build_scenes
from detr_bf.engine import load_checkpoint
from detr_bf.inference import finetuning
from detr_bf.inference.finetuning import folder_splits
from detr_bf.inference.loading import recipe_file
from tests.data.formats.test_masks_of_folders import object_pixels, put, voc, yolo
from tests.inference.test_finetuning import SMALL, TINY

POLYGON, BOX = "0 0.1 0.2 0.5 0.2 0.5 0.6\n", "0 0.25 0.5 0.5 1\n"


@pytest.fixture(autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path_factory.mktemp("cache")))
    read_folder.cache_clear()


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return str(tmp_path / "tiny.yaml")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[DetectionConfig]:
    """Record the configs with which training would start."""
    configs: list[DetectionConfig] = []
    monkeypatch.setattr(finetuning, "train", lambda task, resume_if_possible: configs.append(task.config))
    monkeypatch.setattr(finetuning, "load", lambda folder, device: None)
    return configs


def test_masks_are_a_setting_of_the_model(tmp_path: Path, tiny: str, started: list[DetectionConfig]) -> None:
    root = yolo(tmp_path / "set", POLYGON)
    detr_bf.finetune(root, model=tiny, output=tmp_path / "run", masks=True)
    detr_bf.finetune(root, model=tiny, output=tmp_path / "run")
    detr_bf.finetune(root, model=tiny, output=tmp_path / "run", masks=True, overrides=["model.masks=false"])
    assert command_main("finetune")([str(root), "--masks", "--model", tiny, "--output", str(tmp_path / "run")]) == 0
    assert [each.model.masks for each in started] == [True, False, False, True]


@pytest.mark.parametrize("lines", [BOX, POLYGON + BOX])
def test_objects_without_mask_are_refused_before_the_first_step(tmp_path: Path, tiny: str, lines: str) -> None:
    root = yolo(tmp_path / "set", lines)
    splits = ["data.train.split=.", "data.val.split=."]
    with pytest.raises(InputError, match=r"mask-missing.*the object has a box and no mask: draw its outline, or"):
        detr_bf.finetune(root, model=tiny, output=tmp_path / "run", masks=True, overrides=[*SMALL, *splits])
    assert not (tmp_path / "run").exists()


def test_published_weights_are_the_start_of_a_detector_with_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetuning, "get_published", lambda weights, seconds: Path(__file__))
    files, _ = finetuning.fine_tuning_files("rtdetr_r50")
    chosen, _ = finetuning.published_start("rtdetr_r50", files, ["model.masks=true"])
    assert [each.partition("=")[0] for each in chosen] == ["init_from"]


def test_the_splits_of_pascal_voc_with_masks(tmp_path: Path) -> None:
    root = voc(tmp_path, object_pixels())
    for folder in ("Main", "Segmentation"):
        for split in ("train", "val"):
            put(root / f"ImageSets/{folder}/{split}.txt", "a\n")
    files = [recipe_file("rtdetr_r50"), packaged_configs()["finetune"]]
    boxes, masks = (
        load_config(files, [f"data.root={root}", f"model.masks={value}"], task="detection") for value in (False, True)
    )
    assert folder_splits(boxes) == ['data.train.split="train"', 'data.val.split="val"']
    assert folder_splits(masks) == ['data.train.split="Segmentation/train"', 'data.val.split="Segmentation/val"']


def test_lists_of_segmentation_alone_do_not_divide_the_boxes(tmp_path: Path) -> None:
    root = voc(tmp_path, object_pixels())
    put(root / "ImageSets/Segmentation/train.txt", "a\n")
    files = [recipe_file("rtdetr_r50"), packaged_configs()["finetune"]]
    assert folder_splits(load_config(files, [f"data.root={root}"], task="detection")) == ["data.val_fraction=0.2"]


def yolo_of_scenes(scenes: Path, root: Path) -> Path:
    """Write the set ``scenes`` as a folder of YOLO's segmentation labels."""
    for split in ("train", "val"):
        content = read_annotations(scenes / f"{split}.json")
        names = [category["name"] for category in content.categories]
        for image in content.images:
            path = root / split / "images" / image["file_name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(scenes / split / image["file_name"], path)
            lines = []
            for each in content.annotations:
                if each["image_id"] == image["id"]:
                    polygon = joined(outlines(coco_mask.decode(each["segmentation"]).astype(bool)))
                    points = np.reshape(polygon, (-1, 2)) / [image["width"], image["height"]]
                    lines.append(" ".join([str(each["category_id"] - 1), *map(str, points.ravel())]))
            put(root / split / "labels" / Path(image["file_name"]).with_suffix(".txt"), "\n".join(lines))
    put(root / "data.yaml", f"train: train/images\nval: val/images\nnames: {json.dumps(names)}\n")
    return root


def mean_iou(found: Any, expected: Any) -> float:
    """Return the mean of the best IoU of each expected mask."""
    return float(coco_mask.iou(list(found), list(expected), [0] * len(expected)).max(axis=0).mean())


@pytest.mark.full
def test_from_labels_of_yolo_to_masks_on_new_photographs(tmp_path: Path, tiny: str) -> None:
    """The commands of docs/fine_tuning.md, in Python: masks with the boxes, and after them."""
    root = yolo_of_scenes(build_scenes(tmp_path / "scenes", num_train=8, num_val=4, image_size=64), tmp_path / "set")
    both = detr_bf.finetune(
        root, model=tiny, output=tmp_path / "both", masks=True, overrides=[*SMALL, "train.max_steps=3"]
    )
    evaluation = json.loads((tmp_path / "both/evaluation.json").read_text())
    assert evaluation["masks"].keys() >= {"AP", "AP50"}
    errors = json.loads((tmp_path / "both/errors.json").read_text())
    assert errors["masks"] is not None
    assert "Masks" in (tmp_path / "both/report.html").read_text()

    detr_bf.finetune(root, model=tiny, output=tmp_path / "boxes", overrides=[*SMALL, "train.max_steps=2"])
    after = [*SMALL, "train.max_steps=2", "freeze.detector=true"]
    detr_bf.finetune(
        root, model=tiny, output=tmp_path / "after", masks=True, init_from=tmp_path / "boxes", overrides=after
    )
    boxes, masks = (load_checkpoint(tmp_path / name / "last.pt").model for name in ("boxes", "after"))
    assert all(torch.equal(value, masks[name]) for name, value in boxes.items())
    assert any(name.startswith("mask_head") for name in masks)

    photographs = tmp_path / "new"
    photographs.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(photographs / "one.png")
    found = both(photographs / "one.png", 0.0)
    assert found.masks is not None
    assert len(found.masks) == len(found) > 0
    tiles = both(photographs / "one.png", 0.0, tile=(64, 16))
    assert all(tuple(each["size"]) == (90, 120) for each in tiles.masks or [{"size": (0, 0)}])
    arguments = [str(tmp_path / "both"), "--threshold", "0", "--no-save-pictures", str(photographs)]
    for form in ("yolo", "labelme"):
        assert command_main("predict")([*arguments, "--output", str(photographs), "--format", form]) == 0
        read = read_folder(photographs, form).content
        kept = [mask for mask in found.masks if coco_mask.area(dict(mask))]
        assert len(read.annotations) == len(kept)
        size = found.size
        again = [coco_mask.merge(coco_mask.frPyObjects(each["segmentation"], *size)) for each in read.annotations]
        holes = [coco_mask.merge(coco_mask.frPyObjects(p, *size)) for p in found.polygons() or [] if p]
        assert mean_iou(again, holes) == pytest.approx(1)
        shutil.rmtree(photographs / "labels")
