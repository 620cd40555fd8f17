"""Sample data sets on disk: ``OUT/{train,val}/*.jpg``, ``OUT/{train,val}.json`` (COCO) and ``OUT/dataset.json``.

A set with stuff also has ``OUT/{train,val}_panoptic/*.png`` and ``OUT/{train,val}_panoptic.json`` (COCO panoptic). A
set with references has them in ``OUT/{train,val}_templates/*.jpg`` under the names of their images, and the paths in
its COCO files are relative to OUT.
``dataset.json`` contains the recipe and marks a set as complete. A set is built in a folder next to OUT and moved to
OUT at the end, so an interrupted build is not mistaken for a complete set.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from detr_bf.common.errors import InputError
from detr_bf.common.files import make_output_folder, read_json, remove_empty, write_json
from detr_bf.common.progress import progress_bar
from detr_bf.common.text import printable
from detr_bf.data.annotation_values import MAX_ID
from detr_bf.data.masks import encoded_ids
from detr_bf.data.references import KEY
from detr_bf.data.samples.composite import BACKGROUND, SampleSplit, Scene

MANIFEST = "dataset.json"
SPLITS: tuple[SampleSplit, ...] = get_args(SampleSplit)
JPEG_QUALITY = 92
_STEM = 40  # characters of the folder name in the name of its temporary folder

MAX_IMAGES = 1_000_000  # of a split
IMAGE_SIZES = range(32, 4097)  # pixels

Draw = Callable[[SampleSplit, np.random.Generator], Scene]


@dataclass(frozen=True)
class Recipe:
    """Parameters of a sample set; :class:`InputError` for an invalid value."""

    name: str
    version: int  # increased when the same parameters give other images
    num_train: int
    num_val: int
    image_size: int  # pixels, square
    seed: int
    object_size: tuple[float, float]  # range of the longer side of an object, as a fraction of the image side

    def __post_init__(self) -> None:
        if not 1 <= min(self.num_train, self.num_val) <= max(self.num_train, self.num_val) <= MAX_IMAGES:
            raise InputError(
                f"num_train is {self.num_train} and num_val is {self.num_val}; both must be at least 1 and at most "
                f"{MAX_IMAGES}"
            )
        if self.image_size not in IMAGE_SIZES:
            raise InputError(
                f"image_size is {self.image_size} pixels; it must be at least {IMAGE_SIZES.start} and at most "
                f"{IMAGE_SIZES.stop - 1}"
            )
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}; it must be 0 or larger")
        low, high = self.object_size
        if not 0.05 <= low <= high <= 1:
            raise InputError(f"object_size is {low} to {high} of the image; expected 0.05 <= least <= largest <= 1")

    def num_images(self, split: SampleSplit) -> int:
        return self.num_train if split == "train" else self.num_val

    def manifest(self) -> dict[str, Any]:
        """Return the recipe as it is read from JSON."""
        return {**asdict(self), "object_size": list(self.object_size)}


def already_built(output: Path, recipe: Recipe, panoptic: bool = False, references: bool = False) -> bool:
    """Return True if ``output`` contains the complete set of this recipe, with its panoptic files or its references.

    Raises:
        InputError: the folder has other content; a set is written to new or empty folders only.
    """
    if not output.exists():
        return False
    if not output.is_dir():
        raise InputError(f"{printable(output)} is a file; give a folder for the {recipe.name} data set")
    if not any(output.iterdir()):
        return False
    manifest = _read_manifest(output)
    if manifest.get("name") != recipe.name:
        raise InputError(
            f"{printable(output)} holds something else than the {recipe.name} data set; give a new or empty folder"
        )
    if manifest == recipe.manifest() and all(
        _split_is_there(output, recipe, split, panoptic, references) for split in SPLITS
    ):
        return True
    raise InputError(
        f"{printable(output)} holds a {recipe.name} data set of another recipe, or one that has lost files: give a new "
        "folder, or delete this one first"
    )


def write_dataset(
    output: Path,
    recipe: Recipe,
    names: Sequence[str],
    licence: dict[str, str],
    draw: Draw,
    progress: bool = False,
    stuff_names: Sequence[str] = (),
) -> Path:
    """Draw and write all images of a recipe to ``output``, a new or empty folder, and return it.

    The folder appears when everything is written. ``names`` are the class names of things; their category ids count
    from 1. With ``stuff_names``, whose ids follow, panoptic files are written too, and every scene must have ``stuff``.
    ``draw`` returns one scene; its generator depends on the seed, the split and the index of the image only.
    ``progress`` shows progress bars.
    """
    made = make_output_folder(output.parent, f"output {printable(output)}: the folder")
    working = Path(tempfile.mkdtemp(prefix=f".{output.name[:_STEM]}.", suffix=".partial", dir=output.parent))
    try:
        for split in SPLITS:
            _write_split(working, recipe, names, licence, draw, split, progress, stuff_names)
        write_json(working / MANIFEST, recipe.manifest())
        working.chmod(0o755)
        try:
            working.rename(output)
        except OSError as error:
            if not output.is_dir() or not any(output.iterdir()):
                raise
            raise InputError(f"{printable(output)} was filled by another process; give a new folder") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)
        remove_empty(made)  # after a failure
    return output


def annotation(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Return COCO fields of the visible pixels (H, W) of one object: RLE, tight box x, y, w, h, and area in pixels."""
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"segmentation": {"size": list(mask.shape), "counts": rle["counts"].decode("ascii")}, **extent(mask)}


def extent(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the fields of a mask (H, W), not empty, in COCO's detection and panoptic formats."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    x, y = int(columns[0]), int(rows[0])
    return {
        "bbox": [x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y],
        "area": int(mask.sum()),
        "iscrowd": 0,
    }


def panoptic_segments(scene: Scene, rng: np.random.Generator) -> tuple[NDArray[np.int32], list[dict[str, Any]]]:
    """Return segment ids (H, W) of a scene with stuff and its ``segments_info``: all layers, then the visible stuff.

    The ids are random, so they use all three bytes of a PNG.
    """
    assert scene.stuff is not None, "a panoptic map needs stuff"
    ground = scene.owner == BACKGROUND
    masks = [(category_id, scene.visible_mask(layer)) for layer, category_id in enumerate(scene.category_ids)]
    masks += [
        (int(category_id), ground & (scene.stuff == category_id)) for category_id in np.unique(scene.stuff[ground])
    ]
    ids = np.zeros(scene.owner.shape, dtype=np.int32)
    segments = []
    for segment_id, (category_id, mask) in zip(rng.choice(MAX_ID, len(masks), replace=False) + 1, masks, strict=True):
        ids[mask] = segment_id
        segments.append({"id": int(segment_id), "category_id": category_id, **extent(mask)})
    return ids, segments


def _write_split(
    folder: Path,
    recipe: Recipe,
    names: Sequence[str],
    licence: dict[str, str],
    draw: Draw,
    split: SampleSplit,
    progress: bool,
    stuff_names: Sequence[str],
) -> None:
    if stuff_names:
        _panoptic_folder(folder, split).mkdir()
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    panoptic: list[dict[str, Any]] = []
    numbers = range(recipe.num_images(split))
    for index in progress_bar(numbers, desc=f"{recipe.name} {split}", unit="image", disable=not progress):
        rng = np.random.default_rng([recipe.seed, SPLITS.index(split), index])
        scene = draw(split, rng)
        file_name = f"{split}_{index:06d}.jpg"
        _write_jpeg(folder / split / file_name, scene.image)
        height, width = scene.owner.shape
        images.append({"id": index + 1, "file_name": file_name, "width": width, "height": height, "license": 1})
        if scene.reference is not None:
            templates = _templates_folder(folder, split)
            _write_jpeg(templates / file_name, scene.reference)
            images[-1] |= {"file_name": f"{split}/{file_name}", KEY: f"{templates.name}/{file_name}"}
        for layer, category_id in enumerate(scene.category_ids):
            fields = {"id": len(annotations) + 1, "image_id": index + 1, "category_id": category_id}
            annotations.append(fields | annotation(scene.visible_mask(layer)))
        if stuff_names:
            png_name = file_name.replace(".jpg", ".png")
            ids, segments = panoptic_segments(scene, rng)
            (_panoptic_folder(folder, split) / png_name).write_bytes(encoded_ids(torch.from_numpy(ids)))
            panoptic.append({"image_id": index + 1, "file_name": png_name, "segments_info": segments})
    common = {
        "info": {"description": f"detr_bf {recipe.name}: composites, {split} split", "version": str(recipe.version)},
        "licenses": [{"id": 1, **licence}],
        "images": images,
    }
    categories = [{"id": number, "name": name} for number, name in enumerate(names, start=1)]
    write_json(folder / f"{split}.json", {**common, "annotations": annotations, "categories": categories})
    if stuff_names:
        categories = _panoptic_categories(names, stuff_names)
        write_json(folder / f"{split}_panoptic.json", {**common, "annotations": panoptic, "categories": categories})


def _write_jpeg(file: Path, pixels: NDArray[np.uint8]) -> None:
    """Write an image (H, W, 3), and its folder if it does not exist."""
    jpeg = io.BytesIO()  # not to the file: on a full disk Pillow truncates a JPEG without an error
    Image.fromarray(pixels).save(jpeg, format="JPEG", quality=JPEG_QUALITY, subsampling=0)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(jpeg.getvalue())


def _templates_folder(folder: Path, split: SampleSplit) -> Path:
    return folder / f"{split}_templates"


def _panoptic_folder(folder: Path, split: SampleSplit) -> Path:
    return folder / f"{split}_panoptic"


def _panoptic_categories(names: Sequence[str], stuff_names: Sequence[str]) -> list[dict[str, Any]]:
    kinds = [(name, "thing") for name in names] + [(name, "stuff") for name in stuff_names]
    return [
        {"id": number, "name": name, "isthing": int(kind == "thing"), "supercategory": kind}
        for number, (name, kind) in enumerate(kinds, start=1)
    ]


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_json(folder / MANIFEST, limit=2**20)
    except (FileNotFoundError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _split_is_there(folder: Path, recipe: Recipe, split: SampleSplit, panoptic: bool, references: bool) -> bool:
    annotated = [folder / split, *[_panoptic_folder(folder, split)] * panoptic]
    return all(images.with_name(f"{images.name}.json").is_file() for images in annotated) and all(
        sum(1 for _ in images.glob(f"{split}_*")) == recipe.num_images(split)
        for images in (*annotated, *[_templates_folder(folder, split)] * references)
    )
