"""Sample set ``scenes``: the digits of ``digits`` as things, textures of scikit-image as stuff.

Shape legend: H x W pixels of the image, which is square. Every pixel belongs to one segment; there is no void.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from detr_bf.common.files import output_path
from detr_bf.data.samples.composite import Area, SampleSplit, Scene, area_of, populate, random_crop
from detr_bf.data.samples.digits import (
    DIGIT_NAMES,
    LICENCE,
    Glyphs,
    load_glyphs,
    load_photos,
    random_digit,
    split_glyphs,
)
from detr_bf.data.samples.writing import SPLITS, Recipe, already_built, write_dataset

STUFF = ("brick", "grass", "gravel")
MAX_REGIONS = 3  # an image
STUFF_SHARES = (0.25, 0.75)  # fraction of the remaining pixels in one region
WAVES = 6  # in the noise whose level sets are the regions
CYCLES = (0.3, 1.4)  # of one wave, in periods across the image
TINT = 0.12  # largest relative change of a colour channel of a texture
BRIGHTNESS = (0.75, 1.25)


def build_scenes(
    output: str | Path,
    *,
    num_train: int = 3000,
    num_val: int = 400,
    image_size: int = 128,
    seed: int = 0,
    object_size: tuple[float, float] = (0.22, 0.5),
    progress: bool = False,
) -> Path:
    """Write the ``scenes`` set to the folder ``output`` if it is not there yet, and return that folder.

    ``image_size`` is in pixels, ``object_size`` the range of a digit's longer side as a fraction of it. Digit d has
    category id d + 1, stuff has ids from 11 on. ``{train,val}.json`` list the digits as COCO detection with masks,
    ``{train,val}_panoptic.json`` all classes as COCO panoptic. Digits and areas of textures are disjoint between the
    splits for every seed.

    Raises:
        InputError: a missing package, a value out of range, or a folder with other content.
    """
    output = output_path(output, "output")
    recipe = Recipe("scenes", 1, num_train, num_val, image_size, seed, object_size)
    if already_built(output, recipe, panoptic=True):
        return output
    glyphs, textures = split_glyphs(*load_glyphs()), load_photos([f"{name}.png" for name in STUFF])
    areas = {split: stuff_areas(textures, split) for split in SPLITS}

    def draw(split: SampleSplit, rng: np.random.Generator) -> Scene:
        return random_panoptic_scene(areas[split], glyphs[split], recipe.image_size, recipe.object_size, rng)

    return write_dataset(output, recipe, DIGIT_NAMES, LICENCE, draw, progress, STUFF)


def stuff_areas(textures: list[Image.Image], split: SampleSplit) -> dict[int, Area]:
    """Return the split's part of each texture by category id, in the order of ``STUFF``."""
    return {number: area_of(texture, split) for number, texture in enumerate(textures, start=len(DIGIT_NAMES) + 1)}


def random_panoptic_scene(
    areas: Mapping[int, Area],
    glyphs: Glyphs,
    image_size: int,
    object_size: tuple[float, float],
    rng: np.random.Generator,
) -> Scene:
    """Return digits on 1 to ``MAX_REGIONS`` regions of different stuff, (image_size, image_size)."""
    chosen = rng.permutation(list(areas))[: rng.integers(1, MAX_REGIONS + 1)]
    stuff = chosen[random_regions(image_size, len(chosen), rng)]
    ground = np.empty((image_size, image_size, 3), dtype=np.uint8)
    for category_id in chosen:
        region = stuff == category_id
        ground[region] = tinted(random_crop(areas[category_id], image_size, rng), rng)[region]
    return replace(populate(ground, partial(random_digit, glyphs), object_size, rng), stuff=stuff)


def random_regions(size: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return (size, size) region numbers 0 to ``count`` - 1 with smooth boundaries.

    Each region except 0 gets a fraction within ``STUFF_SHARES`` of the remaining pixels, so none is very small.
    """
    regions = np.zeros((size, size), dtype=np.int64)
    for number in range(1, count):
        left = regions == 0
        field = smooth_noise(size, rng)
        regions[left & (field <= np.quantile(field[left], rng.uniform(*STUFF_SHARES)))] = number
    return regions


def smooth_noise(size: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return smooth noise (size, size): a sum of plane waves of random directions, lengths and phases."""
    angles, phases = rng.uniform(0, 2 * np.pi, (2, WAVES))
    cycles = rng.uniform(*CYCLES, WAVES)
    position = np.arange(size)[:, None] / size
    along_x, along_y = position * (cycles * np.cos(angles)), position * (cycles * np.sin(angles))
    return np.cos(2 * np.pi * (along_x[None] + along_y[:, None]) + phases).sum(axis=-1)


def tinted(pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return a texture (H, W, 3) with a random gain for each channel and for the brightness."""
    gains = rng.uniform(1 - TINT, 1 + TINT, 3) * rng.uniform(*BRIGHTNESS)
    return np.clip(np.rint(pixels * gains), 0, 255).astype(np.uint8)
