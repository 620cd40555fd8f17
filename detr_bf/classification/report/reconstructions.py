"""One picture that shows images, what a masked autoencoder sees of them, and what it makes of that."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from torch import Tensor

from detr_bf.errors import InputError
from detr_bf.report.drawing import save_picture
from detr_bf.report.sheet import Strip, fit, lay_out

_CELL = 240  # pixels
_TITLES = ("Original", "Masked", "Reconstruction")


def reconstruction_sheet(
    originals: Tensor, masked: Tensor, reconstructed: Tensor, images_per_line: int = 2
) -> Image.Image:
    """Three pictures of every image, side by side; each argument is (N, 3, H, W) uint8.

    Raises:
        InputError: there is no image, or the three differ in shape.
    """
    shapes = [tuple(pictures.shape) for pictures in (originals, masked, reconstructed)]
    if len(set(shapes)) != 1:
        raise InputError(f"originals, masked and reconstructed pictures must be of one shape, got {shapes}")
    strips = [
        Strip(tuple(fit(picture, _CELL)[0] for picture in triple), ("", "", ""))
        for triple in zip(originals, masked, reconstructed, strict=True)
    ]
    return lay_out(strips, _TITLES, images_per_line, _CELL)


def save_reconstructions(path: str | Path, originals: Tensor, masked: Tensor, reconstructed: Tensor) -> None:
    """Atomically write :func:`reconstruction_sheet` as PNG."""
    save_picture(path, reconstruction_sheet(originals, masked, reconstructed))
