"""A sample data set on disk: ``OUT/{train,val}/*.jpg``, ``OUT/{train,val}.json`` (COCO) and ``OUT/dataset.json``.

``dataset.json`` holds the recipe and marks a set as complete. A set is built in a folder beside OUT and moved to OUT
when it is finished, so an interrupted build is never taken for a complete one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from detr_bf.data.samples.composite import Scene, Split
from detr_bf.errors import InputError
from detr_bf.files import write_json
from detr_bf.progress import progress_bar

MANIFEST = "dataset.json"
SPLITS: tuple[Split, ...] = get_args(Split)
JPEG_QUALITY = 92

Draw = Callable[[Split, np.random.Generator], Scene]


@dataclass(frozen=True)
class Recipe:
    """All that a sample set depends on, checked: ``InputError`` for a value that makes no set."""

    name: str
    version: int  # raised when the same parameters give other images
    num_train: int
    num_val: int
    image_size: int  # pixels, square
    seed: int
    object_size: tuple[float, float]  # least and largest longer side of an object, in parts of the image side

    def __post_init__(self) -> None:
        if min(self.num_train, self.num_val) < 1:
            raise InputError(f"num_train is {self.num_train} and num_val is {self.num_val}; both must be at least 1")
        if self.image_size < 32:
            raise InputError(f"image_size is {self.image_size} pixels; it must be at least 32")
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}; it must be 0 or larger")
        low, high = self.object_size
        if not 0.05 <= low <= high <= 1:
            raise InputError(f"object_size is {low} to {high} of the image; expected 0.05 <= least <= largest <= 1")

    def num_images(self, split: Split) -> int:
        return self.num_train if split == "train" else self.num_val

    def manifest(self) -> dict[str, Any]:
        """As it is read back from JSON."""
        return {**asdict(self), "object_size": list(self.object_size)}


def already_built(output: Path, recipe: Recipe) -> bool:
    """Whether ``output`` holds the complete set of this recipe.

    Raises ``InputError`` when it holds anything but a sample set of this name, which a build would replace.
    """
    if not output.exists():
        return False
    if not output.is_dir():
        raise InputError(f"{output} is a file; give a folder for the {recipe.name} data set")
    manifest = _read_manifest(output)
    if manifest.get("name") != recipe.name and any(output.iterdir()):
        raise InputError(f"{output} holds something else than the {recipe.name} data set; give a new or empty folder")
    return manifest == recipe.manifest() and all(_split_is_there(output, recipe, split) for split in SPLITS)


def write_dataset(
    output: Path, recipe: Recipe, names: Sequence[str], licence: dict[str, str], draw: Draw, progress: bool = False
) -> Path:
    """Draw and write every image of a recipe, then replace ``output`` by the result.

    ``names`` are the class names; their category ids count from 1. ``draw`` makes one scene; its generator depends on
    the seed, the split and the image's index only. ``progress`` shows bars with the time left. Returns ``output``.
    """
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot write to {output.parent}: {error}; give another output folder") from error
    for split in SPLITS:
        _write_split(partial, recipe, names, licence, draw, split, progress)
    write_json(partial / MANIFEST, recipe.manifest())
    _replace_folder(output, partial)
    return output


def annotation(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """COCO fields of the visible pixels of one object, (H, W): RLE, tight box x, y, w, h, and area in pixels."""
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    x, y = int(columns[0]), int(rows[0])
    return {
        "segmentation": {"size": list(mask.shape), "counts": rle["counts"].decode("ascii")},
        "bbox": [x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y],
        "area": int(mask.sum()),
        "iscrowd": 0,
    }


def _write_split(
    folder: Path,
    recipe: Recipe,
    names: Sequence[str],
    licence: dict[str, str],
    draw: Draw,
    split: Split,
    progress: bool,
) -> None:
    (folder / split).mkdir()
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    numbers = range(recipe.num_images(split))
    for index in progress_bar(numbers, desc=f"{recipe.name} {split}", unit="image", disable=not progress):
        scene = draw(split, np.random.default_rng([recipe.seed, SPLITS.index(split), index]))
        file_name = f"{split}_{index:06d}.jpg"
        Image.fromarray(scene.image).save(folder / split / file_name, quality=JPEG_QUALITY, subsampling=0)
        height, width = scene.owner.shape
        images.append({"id": index + 1, "file_name": file_name, "width": width, "height": height, "license": 1})
        for layer, category_id in enumerate(scene.category_ids):
            fields = {"id": len(annotations) + 1, "image_id": index + 1, "category_id": category_id}
            annotations.append(fields | annotation(scene.visible_mask(layer)))
    write_json(
        folder / f"{split}.json",
        {
            "info": {
                "description": f"detr_bf {recipe.name}: composites, {split} split",
                "version": str(recipe.version),
            },
            "licenses": [{"id": 1, **licence}],
            "images": images,
            "annotations": annotations,
            "categories": [{"id": number, "name": name} for number, name in enumerate(names, start=1)],
        },
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _split_is_there(folder: Path, recipe: Recipe, split: Split) -> bool:
    num_images = sum(1 for _ in (folder / split).glob("*.jpg"))
    return (folder / f"{split}.json").is_file() and num_images == recipe.num_images(split)


def _replace_folder(target: Path, source: Path) -> None:
    """Move ``source`` to ``target``; an older ``target`` is moved out of the way whole, then deleted."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)
