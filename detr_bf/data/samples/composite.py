"""Composite images: objects with soft edges pasted on a crop of a photograph, with exact masks of visible pixels.

Shape legend: H x W pixels of the image, h x w pixels of one object. Colours are float32 in 0..255, coverage (alpha)
float32 in 0..1. A scene is a stack of layers: ``Scene.owner`` is the top layer of every pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SampleSplit = Literal["train", "val"]
Floats = NDArray[np.float32]
Window = tuple[slice, slice]  # rows, columns

BACKGROUND = -1  # owner of a pixel without a layer
MIN_VISIBLE = 0.6  # fraction of every object's pixels that must stay visible
MAX_BOX_OVERLAP = 0.35  # of two objects, as a fraction of the smaller box
VAL_SHARE = 0.4  # fraction of the longer side of a photograph
MAX_OBJECTS = 4  # an image
CROP_RANGE = (0.6, 1.0)  # side of a crop, as a fraction of the largest square in the areas of both splits


@dataclass(frozen=True)
class Area:
    """Part of a photograph that belongs to one split."""

    photo: Image.Image  # RGB
    box: tuple[int, int, int, int]  # left, top, right, bottom in pixels
    crop_side: int  # largest crop in pixels, the same for both splits


@dataclass(frozen=True)
class Sprite:
    """Object to paste."""

    category_id: int
    alpha: Floats  # (h, w)
    paint: Callable[[Floats, np.random.Generator], Floats]  # background (h, w, 3) -> colours (h, w, 3)

    @property
    def solid(self) -> NDArray[np.bool_]:
        """Pixels (h, w) that count as the object."""
        return self.alpha >= 0.5


@dataclass(frozen=True)
class Scene:
    """Composite image with its layers."""

    image: NDArray[np.uint8]  # (H, W, 3)
    category_ids: tuple[int, ...]  # of layer 0, 1, ..., bottom first
    owner: NDArray[np.int64]  # (H, W) top layer of every pixel, or BACKGROUND
    stuff: NDArray[np.int64] | None = None  # (H, W) category ids of the background, if it has classes
    reference: NDArray[np.uint8] | None = None  # (H, W, 3) the background alone, if the set has references

    def visible_mask(self, layer: int) -> NDArray[np.bool_]:
        """Return the (H, W) pixels of a layer that no later layer covers."""
        return self.owner == layer


def area_of(photo: Image.Image, split: SampleSplit) -> Area:
    """Cut a photograph across its longer side; the first part is for training, the last for validation."""
    width, height = photo.size
    longer = max(width, height)
    cut = longer - round(longer * VAL_SHARE)
    start, end = (0, cut) if split == "train" else (cut, longer)
    box = (start, 0, end, height) if width >= height else (0, start, width, end)
    return Area(photo, box, min(width, height, longer - cut))


def random_crop(area: Area, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return a random square of an area, flipped with probability 0.5, resized to (size, size, 3)."""
    left, top, right, bottom = area.box
    side = round(area.crop_side * rng.uniform(*CROP_RANGE))
    x = int(rng.integers(left, right - side + 1))
    y = int(rng.integers(top, bottom - side + 1))
    # crop before the resize: the resampling filter must not read pixels of the other split
    crop = area.photo.crop((x, y, x + side, y + side)).resize((size, size), Image.Resampling.LANCZOS)
    pixels = np.asarray(crop)
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def rotate_and_fit(cut_out: Image.Image, degrees: float, longer_side: int) -> tuple[Floats, Floats]:
    """Rotate an RGBA cut-out, trim it to its solid pixels and scale these to ``longer_side`` pixels.

    Returns:
        Colours (h, w, 3) and coverage (h, w), with max(h, w) = ``longer_side``.
    """
    rotated = cut_out.rotate(degrees, Image.Resampling.BILINEAR, expand=True)
    solid_box = rotated.getchannel("A").point([0] * 128 + [255] * 128).getbbox()
    assert solid_box is not None, "a cut-out without solid pixels"
    trimmed = rotated.crop(solid_box)
    scale = longer_side / max(trimmed.size)
    width, height = (max(1, round(side * scale)) for side in trimmed.size)
    pixels = np.asarray(trimmed.resize((width, height), Image.Resampling.LANCZOS), dtype=np.float32)
    return pixels[..., :3], pixels[..., 3] / np.float32(255)


def random_scene(
    areas: list[Area],
    draw_sprite: Callable[[int, np.random.Generator], Sprite],
    image_size: int,
    object_size: tuple[float, float],
    rng: np.random.Generator,
) -> Scene:
    """Return 1 to ``MAX_OBJECTS`` sprites on a crop of one area, (image_size, image_size); see :func:`populate`."""
    return populate(random_crop(areas[rng.integers(len(areas))], image_size, rng), draw_sprite, object_size, rng)


def populate(
    background: NDArray[np.uint8],
    draw_sprite: Callable[[int, np.random.Generator], Sprite],
    object_size: tuple[float, float],
    rng: np.random.Generator,
) -> Scene:
    """Return 1 to ``MAX_OBJECTS`` sprites on a square background (H, H, 3).

    ``object_size`` is the range of a sprite's longer side as a fraction of the image side; ``draw_sprite`` gets that
    side in pixels.
    """
    image_size = len(background)
    sizes = [round(image_size * rng.uniform(*object_size)) for _ in range(rng.integers(1, MAX_OBJECTS + 1))]
    return compose(background, [draw_sprite(size, rng) for size in sizes], rng)


def compose(background: NDArray[np.uint8], sprites: Sequence[Sprite], rng: np.random.Generator) -> Scene:
    """Paste sprites in order, each at a random position inside the image.

    A sprite may cover others if each keeps ``MIN_VISIBLE`` of its pixels and boxes overlap by at most
    ``MAX_BOX_OVERLAP``. A sprite for which no such position is found is left out; the first sprite is always pasted.
    """
    canvas = background.astype(np.float32)
    owner = np.full(canvas.shape[:2], BACKGROUND, dtype=np.int64)
    pasted: list[Sprite] = []
    windows: list[Window] = []
    for sprite in sprites:
        window = _find_window(sprite.solid, owner, windows, [int(other.solid.sum()) for other in pasted], rng)
        if window is None:
            continue
        under = canvas[window]
        alpha = sprite.alpha[..., None]
        canvas[window] = under * (1 - alpha) + sprite.paint(under, rng) * alpha
        owner[window][sprite.solid] = len(pasted)
        pasted.append(sprite)
        windows.append(window)
    image = np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
    return Scene(image, tuple(sprite.category_id for sprite in pasted), owner)


def box_overlap(first: Window, second: Window) -> float:
    """Return the area shared by two windows, as a fraction of the smaller one."""
    pairs = list(zip(first, second, strict=True))
    shared = [max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in pairs]
    areas = [(rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in (first, second)]
    return shared[0] * shared[1] / min(areas)


def _find_window(
    solid: NDArray[np.bool_],
    owner: NDArray[np.int64],
    taken: list[Window],
    full_pixels: list[int],
    rng: np.random.Generator,
    tries: int = 30,
) -> Window | None:
    """Return a window of ``owner`` that ``solid`` may cover, or None.

    ``taken`` and ``full_pixels`` are the windows and the numbers of solid pixels of the layers pasted so far.
    """
    height, width = solid.shape
    least = MIN_VISIBLE * np.asarray(full_pixels)
    visible = np.bincount(owner[owner != BACKGROUND], minlength=len(full_pixels))
    for _ in range(tries):
        y = int(rng.integers(0, owner.shape[0] - height + 1))
        x = int(rng.integers(0, owner.shape[1] - width + 1))
        window = slice(y, y + height), slice(x, x + width)
        if any(box_overlap(window, other) > MAX_BOX_OVERLAP for other in taken):
            continue
        hidden = owner[window][solid]
        left = visible - np.bincount(hidden[hidden != BACKGROUND], minlength=len(full_pixels))
        if np.all(left >= least):
            return window
    return None
