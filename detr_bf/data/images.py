"""Image files to tensors: one decoder (Pillow) for every format, so that training, checking and prediction agree.

Pillow rather than ``torchvision.io.decode_image``: torchvision 0.29 deprecates that one for removal, it reads neither
BMP nor TIFF, ignores the EXIF rotation of WebP, and the pixels of JPEG and PNG are the same.
"""

from __future__ import annotations

import io
import logging
import struct
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from detr_bf.errors import InputError
from detr_bf.files import file_size, read_regular
from detr_bf.text import printable

logger = logging.getLogger(__name__)

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")  # JPEG is MPO too; AVIF where Pillow was built with it
MAX_PIXELS = 178_956_970  # default of data.max_pixels: the limit from which Pillow warns
_BYTES_PER_PIXEL = 8  # of the largest file that is read: uncompressed RGBA of 16 bits
_SMALLEST_LIMIT = 2**26  # bytes that a file may have however few pixels are allowed

_DEPTHS = (8, 10, 12, 14, 16)  # bits of the values that 16-bit images hold
_BITS_PER_SAMPLE = 258  # TIFF tag
_ORIENTATION = 0x0112  # EXIF tag
_TRANSPOSITIONS = {  # by EXIF value; ImageOps.exif_transpose rewrites the EXIF data and fails on broken ones
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
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


@dataclass(frozen=True)
class ImageFacts:
    """Size and depth of an image file, as :func:`check_image` finds them."""

    sizes: ImageSizes
    depth: int | None = None  # of a 16-bit image, which is scaled to 8 bits: those of its values that count


class TooLargeError(ValueError):
    """The image has more pixels, or its file more bytes, than allowed."""


def read_image(path: Path, annotated: tuple[int, int] | None = None, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Return the pixels of a file as (3, h, w) uint8 RGB, rotated as EXIF says; of an animation the first frame.

    Grey, palette, CMYK and 16-bit images become 8-bit RGB; transparency is dropped. ``annotated`` is the (height,
    width) that the annotation file names: if it is the size before rotation, the image is not rotated, because the
    boxes were made that way. The first 16-bit image of a folder is logged as a warning.

    A grey image of 16 bits often holds values of 10, 12 or 14. Its depth is the least of 8, 10, 12, 14 and 16 bits
    that holds its largest value, and ``value >> (depth - 8)`` are its 8 bits. Of 16-bit colour Pillow gives the upper
    8 bits.

    Raises:
        InputError: the file is missing, is no regular file, cannot be decoded, has another size than annotated or more
            than ``max_pixels`` pixels; the message names it.
    """
    try:
        data = image_bytes(path, max_pixels)
        image = open_image(data, max_pixels)
        if is_deep(image, data):
            _warn_of_16_bits(path)
        return _pixels(image, annotated)
    except FileNotFoundError:
        shown = printable(path)
        raise InputError(f"image file {shown} does not exist; check the image folder and the file names") from None
    except ValueError as error:
        shown = printable(path)
        raise InputError(f"image file {shown} cannot be used: {error}; replace the file or drop the image") from error


def decode_image(data: bytes, annotated: tuple[int, int] | None = None, max_pixels: int = MAX_PIXELS) -> Tensor:
    """:func:`read_image` for the bytes of a file; raises :class:`ValueError` without a file's name."""
    return _pixels(open_image(data, max_pixels), annotated)


def check_image(data: bytes, max_pixels: int = MAX_PIXELS) -> ImageFacts:
    """Decode every pixel and report size and depth; raises :class:`ValueError` where :func:`decode_image` would."""
    image = open_image(data, max_pixels)
    _rgb(image)
    deep = is_deep(image, data)
    return ImageFacts(image_sizes(image), (_depth(image) if _is_grey_16(image) else 16) if deep else None)


def image_bytes(path: Path, max_pixels: int = MAX_PIXELS) -> bytes:
    """Return the content of an image file, which ``max_pixels`` limits before it is read.

    Raises:
        FileNotFoundError: there is no such file.
        TooLargeError: it has more bytes than an image of so many pixels needs.
        ValueError: it is no regular file, or cannot be read.
    """
    limit = max(_SMALLEST_LIMIT, _BYTES_PER_PIXEL * max_pixels)
    if (size := file_size(path)) > limit:
        raise TooLargeError(f"it has {size:,} bytes, {limit:,} are allowed with data.max_pixels={max_pixels}")
    return read_regular(path, limit)


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the decoded image in the bytes of a file of one of :data:`FORMATS`; all images are opened here.

    No other decoder is asked: Pillow has some that start programs (EPS), and a name's ending says nothing.

    Raises:
        TooLargeError: it has more than ``max_pixels`` pixels; nothing of it was decoded.
        ValueError: it cannot be decoded.
    """
    if not data:
        raise ValueError("the file is empty")
    try:
        image = _identified(data)
        if image is not None:
            _check_pixels(image, max_pixels)
            image.load()
            image.getexif()  # which may be broken, too; it is kept
    except TooLargeError:
        raise
    except (
        Exception
    ) as error:  # a broken file makes the decoders raise nearly anything (struct, zlib, SyntaxError, ...)
        raise ValueError(f"it cannot be decoded ({printable(error) or type(error).__name__})") from error
    if image is None:
        raise ValueError(f"it cannot be decoded (none of the formats {', '.join(FORMATS)})")
    return image


def image_sizes(image: Image.Image) -> ImageSizes:
    """Sizes before and after the EXIF rotation."""
    stored = (image.height, image.width)
    turned = image.getexif().get(_ORIENTATION) in _QUARTER_TURNS
    return ImageSizes(stored, stored[::-1] if turned else stored)


def _identified(data: bytes) -> ImageFile | None:
    """Return the image whose header is in ``data``.

    As ``Image.open`` with ``formats=FORMATS``, but for the size limit: that one's is a variable of the whole process.
    """
    Image.init()
    for name in FORMATS:
        if name not in Image.OPEN:
            continue
        factory, accept = Image.OPEN[name]
        accepted = accept is None or accept(data[:16])
        if not accepted or isinstance(accepted, str):  # a string says which library is not installed
            continue
        try:
            return factory(io.BytesIO(data), "")
        except (SyntaxError, IndexError, TypeError, struct.error):  # what Image.open takes for "another format"
            continue
    return None


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise TooLargeError(
            f"it has {image.width} x {image.height} pixels (width x height), more than data.max_pixels={max_pixels}"
        )


def _pixels(image: Image.Image, annotated: tuple[int, int] | None) -> Tensor:
    """(3, h, w) uint8."""
    rotate = image_sizes(image).wants_rotation(annotated)
    turn = _TRANSPOSITIONS.get(image.getexif().get(_ORIENTATION, 1)) if rotate else None
    pixels = np.array(_rgb(image if turn is None else image.transpose(turn)))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _rgb(image: Image.Image) -> Image.Image:
    if _is_grey_16(image):  # Pillow's own conversion would clip 16 bits to 255 instead of scaling them
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its pixels have 32 bits; expected 8 or 16 bits a channel")
        return Image.fromarray((values >> (_depth(image) - 8)).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; expected 8 or 16 bits a channel")
    return image.convert("RGB")


def _is_grey_16(image: Image.Image) -> bool:
    return image.mode.startswith("I")


def is_deep(image: Image.Image, data: bytes) -> bool:
    """Return whether it has 16 bits a channel; of colour Pillow's mode does not say it."""
    if image.format == "PNG":
        return data[24] == 16  # bit depth of the header
    bits = image.tag_v2.get(_BITS_PER_SAMPLE) if isinstance(image, TiffImageFile) else None
    return _is_grey_16(image) or (isinstance(bits, tuple) and 16 in bits)


def _depth(image: Image.Image) -> int:
    """Return the bits that the largest value of a 16-bit grey image needs, rounded up to one of ``_DEPTHS``."""
    needed = int(np.asarray(image).max()).bit_length()
    return next(depth for depth in _DEPTHS if depth >= needed)


_warned: set[Path] = set()  # folders


def _warn_of_16_bits(path: Path) -> None:
    """Log once for each folder, and not in loader processes, each of which would: the doctor lists these images."""
    if parent_process() is None and path.parent not in _warned:
        _warned.add(path.parent)
        logger.warning(
            "%s has 16 bits a channel; it and others of its folder are scaled to 8: grey by the least of %s bits that "
            "holds its largest value, colour by its upper 8 bits",
            printable(path),
            ", ".join(map(str, _DEPTHS)),
        )


def _as_text(size: tuple[int, int]) -> str:
    return f"{size[1]} x {size[0]} pixels (width x height)"
