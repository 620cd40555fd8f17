"""``stamps``: photographic cut-outs of twelve classes on photographs, from Tux Paint's Debian packages (GPL-2+)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from detr_bf.data.samples.composite import (
    Area,
    Floats,
    Scene,
    Split,
    Sprite,
    area_of,
    random_scene,
    read_photo,
    rotate_and_fit,
)
from detr_bf.data.samples.debian import Package, unpacked
from detr_bf.data.samples.writing import SPLITS, Recipe, already_built, write_dataset
from detr_bf.errors import InputError
from detr_bf.files import cache_folder, output_path

STAMPS = Package(
    "tuxpaint-stamps-default", "2022.06.04-1", "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34"
)
PHOTOS = Package("tuxpaint-data", "1:0.9.28-sdl2-1", "f5d0de8f9a70d2efc1241d19f26168cb8bf279f1b77abd3631e7a1a55c40e5e5")
STAMP_FOLDER = Path("usr/share/tuxpaint/stamps")
PHOTO_FOLDER = Path("usr/share/tuxpaint/templates")

# Class -> folders of the stamp package (their own PNG files, not those of folders below) or single files.
CLASSES: dict[str, tuple[str, ...]] = {
    "bird": ("animals/birds",),
    "mammal": (
        "animals/mammals",
        "animals/mammals/apes",
        "animals/mammals/aquatic/otter.png",
        "animals/mammals/bears",
        "animals/mammals/bovines",
        "animals/mammals/camel",
        "animals/mammals/cats",
        "animals/mammals/deer",
        "animals/mammals/dogs",
        "animals/mammals/equines",
        "animals/mammals/rodents",
        "animals/marsupials",
    ),
    "sea animal": ("animals/fish", "animals/mammals/aquatic", "animals/shellfish"),
    "insect": ("animals/insects",),
    "fruit": ("food/fruit",),
    "vegetable": ("food/vegetables",),
    "flower": ("plants/flowers", "plants/flowers/plastic"),
    "coin": (
        "symbols/money/canadian/coins",
        "symbols/money/euro/coins",
        "symbols/money/japanese",
        "symbols/money/us/coins",
    ),
    "road sign": ("town/roadsigns",),
    "vehicle": (
        "military/vehicles",
        "vehicles",
        "vehicles/auto",
        "vehicles/construction",
        "vehicles/cycle",
        "vehicles/emergency",
        "vehicles/flight",
        "vehicles/flight/planes",
        "vehicles/masstransit",
        "vehicles/race",
        "vehicles/ship",
    ),
    "tool": (
        "household/arttools/scissors_small_closed.png",
        "household/arttools/scissors_small_open.png",
        "household/dishes/utensils/nutcracker.png",
        "household/tools",
    ),
    "instrument": (
        "hobbies/music/brass",
        "hobbies/music/percussion",
        "hobbies/music/string",
        "hobbies/music/wind",
    ),
}
# In those folders, but drawings, no member of the class, or without transparency. "*_mirror.png" copies go as well.
EXCLUDED = frozenset(
    {
        "animals/insects/Brown_slug.png",
        "animals/insects/Woodlouse.png",
        "animals/insects/bee.png",
        "animals/mammals/echidna.png",
        "animals/mammals/hedgehog.png",
        "town/roadsigns/stoplight_01_red.png",
        "town/roadsigns/stoplight_02_yellow.png",
        "town/roadsigns/stoplight_03_green.png",
        "town/roadsigns/traffic_cone.png",
        "vehicles/7spoke256.png",
        "vehicles/emergency/sedan_police.png",
        "vehicles/wheel_tractor.png",
    }
)
# The backgrounds, by what fills them. Photographs that show objects of the twelve classes are not among them.
STUFF: dict[str, tuple[str, ...]] = {
    "bark": ("burnt_bark.jpg", "mossy_bark.jpg"),
    "foliage": ("corn_maze.jpg", "redwoods_above.jpg", "sun_behind_leaves.jpg", "trees_above.jpg"),
    "moss": ("mossy_log.jpg",),
    "rock": ("cliff.jpg", "mudstone.jpg", "rocks.jpg"),
    "sky": ("sun_behind_clouds.jpg", "trees_at_dusk.jpg"),
    "water": ("ocean_splash.jpg", "ocean_waves.jpg"),
}
LICENCE = {
    "name": "Composites of Tux Paint's stamps and photographs, GNU GPL version 2 or later",
    "url": "https://www.gnu.org/licenses/old-licenses/gpl-2.0.html",
}
MAX_ROTATION = 12.0  # degrees
LARGEST_STAMP = 512  # pixels; larger ones are reduced when they are read


@dataclass(frozen=True)
class Stamp:
    """One cut-out."""

    category_id: int
    cut_out: Image.Image  # RGBA


def build_stamps(
    output: str | Path,
    *,
    num_train: int = 3000,
    num_val: int = 400,
    image_size: int = 160,
    seed: int = 0,
    object_size: tuple[float, float] = (0.3, 0.65),
    cache: Path | None = None,
    source: Path | None = None,
    progress: bool = False,
) -> Path:
    """Write the ``stamps`` set to the folder ``output`` unless it is already there, and return that folder.

    ``image_size`` is in pixels, ``object_size`` the range of a stamp's longer side in parts of it. The packages are
    fetched into ``cache`` (default: ``stamps`` in :func:`~detr_bf.files.cache_folder`), unless ``source`` names a
    folder that holds their unpacked files (``usr/share/tuxpaint/...``). Every stamp is drawn equally often, so classes
    keep their long tail. Stamps and areas of photographs are disjoint between the splits, whatever the seed. Raises
    ``InputError`` for packages that cannot be had, a value out of range or a folder that holds something else.
    """
    output = output_path(output, "output")
    recipe = Recipe("stamps", 1, num_train, num_val, image_size, seed, object_size)
    if already_built(output, recipe):
        return output
    cache = cache or cache_folder("stamps")
    stamp_files = split_stamps(find_stamps((source or unpacked(STAMPS, cache)) / STAMP_FOLDER))
    photos = load_photos((source or unpacked(PHOTOS, cache)) / PHOTO_FOLDER)
    stamps: dict[Split, list[Stamp]] = {split: load_stamps(files) for split, files in stamp_files.items()}
    areas: dict[Split, list[Area]] = {split: [area_of(photo, split) for photo in photos] for split in SPLITS}

    def draw(split: Split, rng: np.random.Generator) -> Scene:
        draw_sprite = partial(random_stamp, stamps[split])
        return random_scene(areas[split], draw_sprite, recipe.image_size, recipe.object_size, rng)

    return write_dataset(output, recipe, tuple(CLASSES), LICENCE, draw, progress)


def random_stamp(stamps: list[Stamp], size: int, rng: np.random.Generator) -> Sprite:
    """A random stamp slightly rotated, ``size`` pixels on its longer side, in its own colours."""
    stamp = stamps[rng.integers(len(stamps))]
    colors, alpha = rotate_and_fit(stamp.cut_out, rng.uniform(-MAX_ROTATION, MAX_ROTATION), size)

    def own_colors(under: Floats, rng: np.random.Generator) -> Floats:
        return colors

    return Sprite(stamp.category_id, alpha, own_colors)


def find_stamps(folder: Path) -> dict[str, list[Path]]:
    """Files of every class, sorted by their path. ``InputError`` when a class has fewer than two."""
    named = {folder / place for places in CLASSES.values() for place in places if place.endswith(".png")}
    found: dict[str, list[Path]] = {}
    for name, places in CLASSES.items():
        own = {folder / place for place in places}
        in_folders = {path for place in own - named for path in place.glob("*.png")}
        files = {path for path in own & named if path.is_file()} | (in_folders - named)
        found[name] = sorted(path for path in files if not _is_excluded(path.relative_to(folder)))
        if len(found[name]) < 2:
            raise InputError(f"{folder} has {len(found[name])} stamps of class {name!r}, at least 2 are needed")
    return found


def split_stamps(found: Mapping[str, list[Path]]) -> dict[Split, dict[str, list[Path]]]:
    """Of every class, each fourth stamp from the second on is for validation, the others are for training."""
    return {
        "train": {name: [file for i, file in enumerate(files) if i % 4 != 1] for name, files in found.items()},
        "val": {name: files[1::4] for name, files in found.items()},
    }


def load_stamps(files: Mapping[str, list[Path]]) -> list[Stamp]:
    """Read the cut-outs; category ids count the classes from 1."""
    return [Stamp(number, _read_cut_out(file)) for number, name in enumerate(CLASSES, start=1) for file in files[name]]


def load_photos(folder: Path) -> list[Image.Image]:
    """The background photographs as RGB, without the black bars that some have."""
    paths = [folder / name for names in STUFF.values() for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise InputError(f"{folder} lacks {', '.join(missing)}; expected the files of {PHOTOS.name} {PHOTOS.version}")
    return [trim_black_bars(read_photo(path)) for path in paths]


def trim_black_bars(photo: Image.Image, darkest: int = 24) -> Image.Image:
    """Cut off outer rows and columns whose brightness (0..255) stays below ``darkest``."""
    bright = ImageOps.grayscale(photo).point([0] * darkest + [255] * (256 - darkest))
    return photo.crop(bright.getbbox())


def _is_excluded(path: Path) -> bool:
    return path.as_posix() in EXCLUDED or path.stem.endswith("_mirror")


def _read_cut_out(path: Path) -> Image.Image:
    cut_out = read_photo(path, "RGBA")
    cut_out.thumbnail((LARGEST_STAMP, LARGEST_STAMP), Image.Resampling.LANCZOS)
    return cut_out
