"""Small images of coloured rectangles with their maps of classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLOURS = np.array([(200, 40, 40), (40, 200, 40), (40, 40, 200)])
NAMES = ("red", "green", "blue")
SIZE = (20, 28)  # height, width


def pairs(count: int, seed: int, size: tuple[int, int] = SIZE) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return noisy images (h, w, 3) uint8, each with the class 0 to 2 of its pixels (h, w)."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        labels = np.full(size, rng.integers(3), dtype=np.uint8)
        top, left = rng.integers(0, size[0] // 2), rng.integers(0, size[1] // 2)
        labels[top : top + size[0] // 2, left : left + size[1] // 2] = rng.integers(3)
        noise = rng.integers(-20, 20, (*size, 3))
        found.append(((COLOURS[labels] + noise).clip(0, 255).astype(np.uint8), labels))
    return found


def write_maps(root: Path, count: int = 8, first_class: int = 0, **settings: Any) -> None:
    """Write ``images/SPLIT`` and ``labels/SPLIT`` for train and val, and ``classes.txt``."""
    (root / "classes.txt").write_text("\n".join(NAMES))
    for seed, split in enumerate(("train", "val")):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for number, (image, labels) in enumerate(pairs(count, seed, **settings)):
            Image.fromarray(image).save(root / "images" / split / f"{number}.png")
            Image.fromarray(labels + np.uint8(first_class)).save(root / "labels" / split / f"{number}.png")


def write_panoptic_maps(root: Path, count: int = 4) -> None:
    """Write ``images/SPLIT``, COCO panoptic PNGs in ``panoptic/SPLIT`` and ``panoptic_SPLIT.json``.

    Classes have the ids 10, 20 and 30; each has one segment in an image, whose id is 256 times that, plus 7.
    """
    for seed, split in enumerate(("train", "val")):
        for kind in ("images", "panoptic"):
            (root / kind / split).mkdir(parents=True)
        annotations, images = [], []
        for number, (image, labels) in enumerate(pairs(count, seed)):
            ids = (labels.astype(np.int64) + 1) * 10 * 256 + 7
            png = np.stack([ids % 256, ids // 256 % 256, ids // 65536], axis=-1).astype(np.uint8)
            Image.fromarray(image).save(root / "images" / split / f"{number}.jpg", quality=95)
            Image.fromarray(png).save(root / "panoptic" / split / f"{number}.png")
            segments = [
                {"id": int(value), "category_id": int(value // 256), "area": int((ids == value).sum()), "iscrowd": 0}
                for value in np.unique(ids)
            ]
            annotations.append({"image_id": number, "file_name": f"{number}.png", "segments_info": segments})
            images.append({"id": number, "file_name": f"{number}.jpg", "height": SIZE[0], "width": SIZE[1]})
        categories = [{"id": 10 * (label + 1), "name": name, "isthing": 0} for label, name in enumerate(NAMES)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / f"panoptic_{split}.json").write_text(json.dumps(content))


def settings_of(root: Path, *, panoptic: bool = False) -> list[str]:
    """Return the settings of the data written by one of the functions above."""
    found = [] if panoptic else [f"data.classes={root / 'classes.txt'}"]
    for split in ("train", "val"):
        found.append(f"data.{split}.images={root / 'images' / split}")
        found.append(f"data.{split}.labels={root / ('panoptic' if panoptic else 'labels') / split}")
        if panoptic:
            found.append(f"data.{split}.annotations={root / f'panoptic_{split}.json'}")
    return found


TINY = [
    "model.backbone={name: timm:test_resnet, weights: none}",
    "model.channels=16",
    "model.auxiliary_channels=8",
    "data.transforms={short_side: 32, max_size: 64, crop: 32, max_share: 1.0, photometric_distort: false}",
    "data.workers=0",
    "optimizer={lr: 0.01, warmup_steps: 2}",
    "train={epochs: 2, batch_size: 4, log_every: 1}",
    "eval={batch_size: 4, pictures: 2}",
    "device=cpu",
]
