"""Sample set ``pairs``: faint marks on photographs of scikit-image, and each photograph without marks as the reference.

The splits have different photographs, so a detector cannot learn them by heart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from detr_bf.common.errors import InputError
from detr_bf.common.files import output_path
from detr_bf.data.samples.composite import (
    Area,
    Floats,
    SampleSplit,
    Scene,
    Sprite,
    populate,
    random_crop,
    rotate_and_fit,
)
from detr_bf.data.samples.digits import load_photos
from detr_bf.data.samples.writing import Recipe, already_built, write_dataset

PHOTOS: dict[SampleSplit, tuple[str, ...]] = {
    "train": (
        "astronaut.png",
        "brick.png",
        "coffee.png",
        "gravel.png",
        "hubble_deep_field.jpg",
        "motorcycle_left.png",
    ),
    "val": ("camera.png", "chelsea.png", "grass.png", "ihc.png"),
}
PHOTO_LICENCE = {
    "name": "Marks drawn on photographs carried by scikit-image; see its terms",
    "url": "https://scikit-image.org/docs/stable/api/skimage.data.html",
}
MARK_NAMES = ("spot", "ring", "cross", "scratch")
CONTRASTS = range(1, 129)  # levels of 255
DRAWN = 128  # pixels of a side on which a mark is drawn


@dataclass(frozen=True)
class PairsRecipe(Recipe):
    """Recipe of pairs."""

    contrast: int  # levels of 255 by which a mark is lighter or darker than the photograph

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.contrast not in CONTRASTS:
            raise InputError(
                f"contrast is {self.contrast} levels of 255; it must be at least {CONTRASTS.start} and at most "
                f"{CONTRASTS.stop - 1}"
            )


def build_pairs(
    output: str | Path,
    *,
    num_train: int = 800,
    num_val: int = 200,
    image_size: int = 160,
    seed: int = 0,
    contrast: int = 32,
    object_size: tuple[float, float] = (0.15, 0.3),
    progress: bool = False,
) -> Path:
    """Write the ``pairs`` set to the folder ``output`` if it is not there yet, and return that folder.

    ``image_size`` is in pixels, ``object_size`` the range of a mark's longer side as a fraction of it, ``contrast`` how
    much lighter or darker a mark is than what it covers, in levels of 255.

    Raises:
        InputError: a missing package, a value out of range, or a folder with other content.
    """
    output = output_path(output, "output")
    recipe = PairsRecipe("pairs", 1, num_train, num_val, image_size, seed, object_size, contrast)
    if already_built(output, recipe, references=True):
        return output
    areas = {split: [whole(photo) for photo in load_photos(names)] for split, names in PHOTOS.items()}

    def draw(split: SampleSplit, rng: np.random.Generator) -> Scene:
        of_split = areas[split]
        photo = random_crop(of_split[rng.integers(len(of_split))], recipe.image_size, rng)
        marked = populate(photo, partial(random_mark, contrast=recipe.contrast), recipe.object_size, rng)
        return replace(marked, reference=photo)

    return write_dataset(output, recipe, MARK_NAMES, PHOTO_LICENCE, draw, progress)


def whole(photo: Image.Image) -> Area:
    """Return all of a photograph as an area."""
    return Area(photo, (0, 0, *photo.size), min(photo.size))


def random_mark(size: int, rng: np.random.Generator, *, contrast: int) -> Sprite:
    """Return a random mark, ``size`` pixels on its longer side, lighter or darker than what it covers."""
    kind = int(rng.integers(len(MARK_NAMES)))
    canvas = Image.new("L", (DRAWN, DRAWN))
    DRAWINGS[MARK_NAMES[kind]](ImageDraw.Draw(canvas))
    _, alpha = rotate_and_fit(Image.merge("RGBA", (canvas,) * 4), rng.uniform(0, 360), size)
    return Sprite(kind + 1, alpha, partial(faint, contrast=contrast))


def _spot(draw: ImageDraw.ImageDraw) -> None:
    draw.ellipse((4, 14, 124, 114), fill=255)


def _ring(draw: ImageDraw.ImageDraw) -> None:
    draw.ellipse((4, 4, 124, 124), outline=255, width=28)


def _cross(draw: ImageDraw.ImageDraw) -> None:
    draw.rectangle((50, 4, 78, 124), fill=255)
    draw.rectangle((4, 50, 124, 78), fill=255)


def _scratch(draw: ImageDraw.ImageDraw) -> None:
    draw.rectangle((4, 48, 124, 80), fill=255)


DRAWINGS = {"spot": _spot, "ring": _ring, "cross": _cross, "scratch": _scratch}


def faint(under: Floats, rng: np.random.Generator, *, contrast: int) -> Floats:
    """Return ``under`` (h, w, 3) lighter or darker by ``contrast`` levels: where both fit, drawn at random."""
    mean = float(under.mean())
    lighter = mean + contrast <= 255 and (mean < contrast or rng.random() < 0.5)
    return under + np.float32(contrast if lighter else -contrast)
