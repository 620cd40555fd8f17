"""Image files to tensors: one decoder (Pillow) for every format, so that training, checking and prediction agree.

Pillow rather than ``torchvision.io.decode_image``: torchvision 0.29 deprecates that one for removal, it reads neither
BMP nor TIFF, ignores the EXIF rotation of WebP, and the pixels of JPEG and PNG are the same.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from detr_bf.errors import InputError

_ORIENTATION = 0x0112  # EXIF tag
_QUARTER_TURNS = (5, 6, 7, 8)  # its values that swap height and width


@dataclass(frozen=True)
class ImageSizes:
    """Both sizes of an image file as (height, width) in pixels; they differ when EXIF asks for a quarter turn."""

    stored: tuple[int, int]
    rotated: tuple[int, int]

    def wants_rotation(self, annotated: tuple[int, int] | None) -> bool:
        """Whether boxes made for an image of size ``annotated`` belong to the rotated image.

        Viewers and annotation tools rotate, so this is false only for an annotation file that names the stored size
        of an image whose two sizes differ. Without a named size the image is rotated. Raises :class:`ValueError` for
        a size that is neither of the two.
        """
        if annotated is None or annotated == self.rotated:
            return True
        if annotated == self.stored:
            return False
        raise ValueError(f"annotated for {_as_text(annotated)}, but the file has {_as_text(self.rotated)}")


def read_image(path: Path, annotated: tuple[int, int] | None = None) -> Tensor:
    """The pixels of a file as (3, h, w) uint8 RGB, rotated as EXIF says.

    Grey, palette, CMYK and 16-bit images become 8-bit RGB; transparency is dropped. ``annotated`` is the (height,
    width) that the annotation file names: if it is the size before rotation, the image is not rotated, because the
    boxes were made that way. Raises :class:`InputError`, naming the file, when it cannot be read or has another size.
    """
    try:
        return decode_image(path.read_bytes(), annotated)
    except FileNotFoundError:
        raise InputError(f"image file {path} does not exist; check the image folder and the file names") from None
    except (OSError, ValueError) as error:
        raise InputError(f"image file {path} cannot be used: {error}; replace the file or drop the image") from error


def decode_image(data: bytes, annotated: tuple[int, int] | None = None) -> Tensor:
    """:func:`read_image` for the bytes of a file; raises :class:`ValueError` without a file's name."""
    image = _open(data)
    rotate = image_sizes(image).wants_rotation(annotated)
    pixels = np.array(_rgb(ImageOps.exif_transpose(image) if rotate else image))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def image_sizes(image: Image.Image) -> ImageSizes:
    """Sizes before and after the EXIF rotation."""
    stored = (image.height, image.width)
    turned = image.getexif().get(_ORIENTATION) in _QUARTER_TURNS
    return ImageSizes(stored, stored[::-1] if turned else stored)


def check_image(data: bytes) -> ImageSizes:
    """Decode every pixel and report the sizes; raises :class:`ValueError` where :func:`decode_image` would."""
    image = _open(data)
    _rgb(image)
    return image_sizes(image)


def _open(data: bytes) -> Image.Image:
    """A fully decoded Pillow image."""
    if not data:
        raise ValueError("the file is empty")
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except (
        Exception
    ) as error:  # a broken file makes the decoders raise nearly anything (struct, zlib, SyntaxError, ...)
        reason = "not an image format Pillow knows" if isinstance(error, UnidentifiedImageError) else str(error)
        raise ValueError(f"it cannot be decoded ({reason})") from error
    return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # Pillow's own conversion would clip 16 bits to 255 instead of scaling them
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its pixels have 32 bits; expected 8 or 16 bits a channel")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; expected 8 or 16 bits a channel")
    return image.convert("RGB")


def _as_text(size: tuple[int, int]) -> str:
    return f"{size[1]} x {size[0]} pixels (width x height)"
