"""Fixtures: tiny data sets, configs and trained runs of every task, shared by all cases and read-only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

WIDTH, HEIGHT = 32, 24
THINGS = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]
STUFF = [{"id": 3, "name": "cat", "isthing": 1}, {"id": 100, "name": "sky", "isthing": 0}]

MODEL = """
model:
  hidden_dim: 16
  heads: 2
  encoder_layers: 1
  decoder_layers: 1
  feedforward_dim: 16
  num_queries: 4
  backbone: {name: "timm:test_resnet", weights: none, strides: [8], frozen_stages: 0, frozen_norm: false}
batch_former: {enabled: true, heads: 2}
"""
REST = """
  transforms: {short_sides: [24], max_size: 32, eval_short_side: 24, crop_short_sides: [24], crop_min: 16}
  workers: 0
train: {epochs: 1, batch_size: 3, log_every: 1, ema: {enabled: true, decay: 0.5}}
eval: {pictures: 2, picture_threshold: 0.0}
device: cpu
"""
TRANSFORMS = (
    "{size: 16, crop: padded, padding: 1, auto_augment: '', color_jitter: 0.0, erase: 0.0, horizontal_flip: 0.0}"
)
CLASSIFIER = """task: classification
model:
  name: vit_tiny_patch16_224
  options: {patch_size: 8, embed_dim: 8, depth: 1, num_heads: 1}
"""
MASKED = """task: masked_autoencoding
model:
  decoder_dim: 8
  decoder_depth: 1
  decoder_heads: 1
  name: vit_tiny_patch16_224
  options: {patch_size: 8, embed_dim: 8, depth: 1, num_heads: 1}
batch_former: {enabled: false}
"""
CONTRASTIVE = """task: contrastive_learning
model:
  hidden: 8
  dim: 4
  name: vit_tiny_patch16_224
  options: {patch_size: 8, embed_dim: 8, depth: 1, num_heads: 1}
"""
IMAGE_REST = f"""
  transforms: {TRANSFORMS}
  workers: 0
optimizer: {{lr: 0.001, min_lr: 0, warmup_epochs: 0, schedule: step}}
train: {{epochs: 1, batch_size: 4, log_every: 1}}
eval: {{batch_size: 8, pictures: 2}}
device: cpu
"""


def picture(seed: int = 0, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    """An RGB image with one bright rectangle."""
    image = Image.new("RGB", size, (20, 10 + seed % 200, 30))
    image.paste((255, 120, 0), (2, 2, 12, 12))
    return image


def coco(categories: list[dict[str, Any]] | None = None, first: int = 1, count: int = 3) -> dict[str, Any]:
    """A COCO detection file with one box and one polygon per image."""
    categories = THINGS if categories is None else categories
    numbers = range(first, first + count)
    return {
        "images": [{"id": i, "file_name": f"{i:04d}.png", "width": WIDTH, "height": HEIGHT} for i in numbers],
        "annotations": [
            {
                "id": i,
                "image_id": i,
                "category_id": categories[i % len(categories)]["id"],
                "bbox": [2, 2, 10, 10],
                "area": 100,
                "iscrowd": 0,
                "segmentation": [[2, 2, 12, 2, 12, 12, 2, 12]],
            }
            for i in numbers
        ],
        "categories": [dict(category) for category in categories],
    }


def panoptic(first: int = 1, count: int = 3) -> dict[str, Any]:
    """A COCO panoptic file with two segments per image, a thing and stuff."""
    numbers = range(first, first + count)
    return {
        "images": [{"id": i, "file_name": f"{i:04d}.png", "width": WIDTH, "height": HEIGHT} for i in numbers],
        "annotations": [
            {
                "image_id": i,
                "file_name": f"{i:04d}_map.png",
                "segments_info": [
                    {"id": 11, "category_id": 3, "area": 100, "bbox": [2, 2, 10, 10], "iscrowd": 0},
                    {"id": 12, "category_id": 100, "area": 668, "bbox": [0, 0, 32, 24], "iscrowd": 0},
                ],
            }
            for i in numbers
        ],
        "categories": [dict(category) for category in STUFF],
    }


def write_split(folder: Path, content: dict[str, Any]) -> None:
    """Write ``images``, ``annotations.json`` and, for panoptic content, ``panoptic``."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for image in content["images"]:
        picture(image["id"]).save(folder / "images" / image["file_name"])
    for annotation in content["annotations"]:
        if "segments_info" in annotation:
            ids = np.full((HEIGHT, WIDTH), 12, np.uint8)
            ids[2:12, 2:12] = 11
            (folder / "panoptic").mkdir(exist_ok=True)
            Image.fromarray(np.stack([ids, ids * 0, ids * 0], -1)).save(folder / "panoptic" / annotation["file_name"])
    (folder / "annotations.json").write_text(json.dumps(content))


def detector_config(train: Path, val: Path, output: Path, panoptic: bool = False) -> str:
    """Return the YAML of a tiny detector on splits written by :func:`write_split`."""

    def split(folder: Path) -> str:
        maps = f", panoptic: {folder}/panoptic" if panoptic else ""
        return f"{{images: {folder}/images, annotations: {folder}/annotations.json{maps}}}"

    return f"{MODEL}data:\n  train: {split(train)}\n  val: {split(val)}{REST}output_dir: {output}\n"


def classifier_config(data: str, output: Path, head: str = CLASSIFIER) -> str:
    """Return the YAML of a tiny classifier; ``data`` are the lines that name its images."""
    return f"{head}data:\n{data}{IMAGE_REST}output_dir: {output}\n"


def image_folder(root: Path) -> str:
    """Write two classes of four images in ``train`` and ``val``; return the config lines that read them."""
    for number, split in enumerate(("train", "val")):
        for label, name in enumerate(("cats", "dogs")):
            (root / split / name).mkdir(parents=True)
            for i in range(4):
                picture(i + 10 * label + 50 * number, (16, 16)).save(root / split / name / f"{i}.png")
    return f"  name: image_folder\n  root: {root}\n"


def make_fixtures(folder: Path) -> None:
    """Write data, configs and runs: ``detector``, ``masks`` (panoptic), ``capture.pt`` and one of each image task."""
    from tools.train_net import main as train

    write_split(folder / "train", coco())
    write_split(folder / "val", coco(first=101))
    write_split(folder / "panoptic_train", panoptic())
    write_split(folder / "panoptic_val", panoptic(first=101))
    plain = detector_config(folder / "train", folder / "val", folder / "detector")
    masks = detector_config(folder / "panoptic_train", folder / "panoptic_val", folder / "masks", panoptic=True)
    data = image_folder(folder / "classes")
    configs = {
        "detector": plain,
        "masks": masks.replace("  heads: 2\n", "  heads: 2\n  masks: true\n", 1),
        "classifier": classifier_config(data, folder / "classifier"),
        "masked": classifier_config(data, folder / "masked", MASKED),
        "contrastive": classifier_config(data, folder / "contrastive", CONTRASTIVE)
        .replace(TRANSFORMS, "{size: 16}")
        .replace(", pictures: 2", ""),
    }
    for name, text in configs.items():
        (folder / f"{name}.yaml").write_text(text)
        code = train(["--config", str(folder / f"{name}.yaml")])
        assert code == 0, f"training the {name} of the fixtures failed with exit code {code}"
    _capture(folder)


def _capture(folder: Path) -> None:
    """Write a captured step, as a run does when its loss is not finite."""
    from detr_bf.assembly import build_detector_criterion, build_model
    from detr_bf.common.structures import Batch, ClassMap, Target
    from detr_bf.config import config_to_dict, load_config
    from detr_bf.engine.checkpoint import rng_state
    from detr_bf.engine.recovery import capture_step
    from detr_bf.engine.step import TrainingStep

    config = load_config(folder / "detector.yaml")
    model = build_model(config, 2).train()
    step = TrainingStep(model, build_detector_criterion(config, model), torch.device("cpu"), torch.float32)
    target = Target(1, torch.tensor([[0.5, 0.5, 0.2, 0.2]]), torch.tensor([0]), (24, 32), (24, 32), "0001.png")
    images = torch.zeros(2, 3, 24, 32, dtype=torch.uint8)
    batch = Batch(images, torch.zeros(2, 24, 32, dtype=torch.bool), (target, target))
    classes = ClassMap((3, 7), ("cat", "dog"))
    settings: dict[str, Any] = {"number": 3, "class_map": classes, "config": config_to_dict(config)}
    capture_step(step, [batch], rng_state(), **settings).save(folder / "capture.pt")
