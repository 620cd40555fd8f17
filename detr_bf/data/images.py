"""Image decoding with Pillow, the same for training, data checks and prediction.

Pillow instead of ``torchvision.io.decode_image``, which is deprecated in torchvision 0.29, reads neither BMP nor TIFF
and ignores the EXIF rotation of WebP. Both give the same pixels for JPEG and PNG.
"""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import file_size, is_file, is_folder, read_regular
from detr_bf.common.text import printable
from detr_bf.data.duplicates import perceptual_hash

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")

IMAGE_FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "BMP",
    "TIFF",
    "GIF",
    "AVIF",
)  # JPEG is MPO too; AVIF where Pillow was built with it
MAX_PIXELS = 178_956_970  # default of data.max_pixels: Pillow warns above it
_BYTES_PER_PIXEL = 8  # limit of the file size: uncompressed RGBA of 16 bits
_SMALLEST_LIMIT = 2**26  # bytes; the limit of the file size is never smaller

_DEPTHS = (8, 10, 12, 14, 16)  # bits of the values in 16-bit images
_HOT = 10_000  # pixels of a 16-bit grey image, of which one may exceed its depth
_LEAST_HOT = 1000  # pixels; in a smaller image none may
_SAMPLE = 500  # files of a data set whose headers say if 16-bit images or EXIF rotations may occur
_BITS_PER_SAMPLE = 258  # TIFF tag
_ORIENTATION = 0x0112  # EXIF tag
_TRANSPOSITIONS = {  # by EXIF value; ImageOps.exif_transpose rewrites the EXIF data and fails if they are broken
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_QUARTER_TURNS = (5, 6, 7, 8)  # EXIF values that swap height and width
_warned: set[Path] = set()  # folders with a 16-bit image that was logged


@dataclass(frozen=True)
class ImageSizes:
    """Sizes of an image file before and after the EXIF rotation, (height, width) in pixels, and the rotation."""

    stored: tuple[int, int]
    rotated: tuple[int, int]
    orientation: int = 1  # EXIF value; 1: none

    def wants_rotation(self, annotated: tuple[int, int] | None, as_stored: bool = False) -> bool:
        """Return True if boxes annotated for an image of size ``annotated`` refer to the rotated image.

        Viewers and annotation tools rotate images, so the result is False only if the annotation file gives the size
        before rotation, or if both sizes are the same and ``as_stored`` is True (see :func:`boxes_as_stored`). Without
        a size the image is rotated.

        Raises:
            ValueError: ``annotated`` is neither of the two sizes.
        """
        if annotated is None:
            return True
        if annotated == self.rotated:
            return not (as_stored and self.stored == self.rotated)
        if annotated == self.stored:
            return False
        raise ValueError(f"annotated for {_as_text(annotated)}, but the file has {_as_text(self.rotated)}")


class TooLargeError(ValueError):
    """The image has more pixels, or its file more bytes, than allowed."""


def read_image(
    path: Path,
    annotated: tuple[int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
    *,
    grey_bits: int | None = None,
    as_stored: bool = False,
) -> Tensor:
    """Return the pixels of a file as (3, h, w) uint8 RGB, rotated by its EXIF tag; the first frame of an animation.

    Grey, palette, CMYK and 16-bit images become 8-bit RGB; transparency is dropped. ``annotated`` is the (height,
    width) in the annotation file: if it is the size before rotation, the image is not rotated, because the boxes refer
    to the unrotated image; ``as_stored`` decides where both sizes are the same. The first 16-bit image of a folder is
    logged as a warning.

    A grey image of 16 bits often holds values of 10, 12 or 14 bits. Its 8-bit values are ``value >> (grey_bits - 8)``,
    at most 255. ``grey_bits`` are those of the data set that the detector was trained on; if they are None, those of
    the image: the smallest of 8, 10, 12, 14 and 16 that fits its values, except the largest one of 10,000 (hot
    pixels). For 16-bit colour Pillow returns the upper 8 bits.

    Raises:
        InputError: the file is missing, is not a regular file, cannot be decoded, has another size than annotated or
            more than ``max_pixels`` pixels; the message names it.
    """
    try:
        data = image_bytes(path, max_pixels)
        image = open_image(data, max_pixels)
        # not in the loader processes, each of which would log it; the data checks list these images
        if is_deep(image, data) and parent_process() is None and path.parent not in _warned:
            _warned.add(path.parent)
            chosen = f"the smallest of {', '.join(map(str, _DEPTHS))} bits that fits the values of each image"
            logger.warning(
                "%s has 16 bits a channel; the 16-bit images of this folder are scaled to 8 bits: grey from %s, colour "
                "from the upper 8 bits",
                printable(path),
                chosen if grey_bits is None else f"{grey_bits} bits (data.grey_bits)",
            )
        return pillow_pixels(image, annotated, grey_bits=grey_bits, as_stored=as_stored)
    except FileNotFoundError:
        shown = printable(path)
        raise InputError(f"image file {shown} does not exist; check the image folder and the file names") from None
    except ValueError as error:
        shown = printable(path)
        raise InputError(
            f"image file {shown} cannot be used: {error}; replace the file or drop the image; 'detr-bf "
            "check DATA --fix OUT' writes a copy of a data set without it"
        ) from error


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS, *, grey_bits: int | None = None) -> Tensor:
    """Decode the bytes of a file as :func:`read_image` does.

    Raises:
        ValueError: they cannot be decoded; the message does not name the file.
    """
    return pillow_pixels(open_image(data, max_pixels), grey_bits=grey_bits)


def check_image(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[ImageSizes, int | None, str]:
    """Decode all pixels; return the sizes, the bits in use of a 16-bit image, and the perceptual hash when rotated.

    The bits are those of a grey image, see :func:`read_image`, 0 for colour, and None for 8 bits a channel.

    Raises:
        ValueError: the image cannot be decoded.
    """
    image = open_image(data, max_pixels)
    pixels = _rgb(image)
    depth = None if not is_deep(image, data) else _depth(np.asarray(image)) if _is_grey_16(image) else 0
    turn = _TRANSPOSITIONS.get(image.getexif().get(_ORIENTATION, 1))
    return image_sizes(image), depth, perceptual_hash(pixels if turn is None else pixels.transpose(turn))


def image_bytes(path: Path, max_pixels: int = MAX_PIXELS) -> bytes:
    """Return the content of an image file; ``max_pixels`` limits its size in bytes.

    Raises:
        FileNotFoundError: there is no such file.
        TooLargeError: it has more bytes than an image of ``max_pixels`` pixels needs.
        ValueError: it is not a regular file, or cannot be read.
    """
    limit = file_limit(max_pixels)
    if (size := file_size(path)) > limit:
        raise TooLargeError(f"it has {size:,} bytes, {limit:,} are allowed with data.max_pixels={max_pixels}")
    return read_regular(path, limit)


def file_limit(max_pixels: int) -> int:
    """Return the largest size of an image file in bytes."""
    return max(_SMALLEST_LIMIT, _BYTES_PER_PIXEL * max_pixels)


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode the bytes of a file of one of :data:`IMAGE_FORMATS`.

    No other decoder of Pillow is used, because some start programs (EPS). The file extension is ignored. Only frames of
    videos and images that detectron2 loads are decoded elsewhere.

    Raises:
        TooLargeError: it has more than ``max_pixels`` pixels; nothing was decoded.
        ValueError: it cannot be decoded.
    """
    if not data:
        raise ValueError("the file is empty")
    try:
        image = _identified(io.BytesIO(data))
        if image is not None:
            if image.width * image.height > max_pixels:
                size = f"{image.width} x {image.height} pixels (width x height)"
                raise TooLargeError(f"it has {size}, more than data.max_pixels={max_pixels}")
            image.load()
            image.getexif()  # raises if the EXIF data are broken; the result is cached
    except TooLargeError:
        raise
    except Exception as error:  # on a broken file decoders raise almost anything (struct, zlib, SyntaxError, ...)
        raise ValueError(f"it cannot be decoded ({printable(error) or type(error).__name__})") from error
    if image is None:
        raise ValueError(f"it cannot be decoded (none of the formats {', '.join(IMAGE_FORMATS)})")
    return image


def header_size(path: Path) -> tuple[int, int] | None:
    """Return (height, width) after the EXIF rotation from the header of a file; None if it cannot be read."""
    return _of_header(path, lambda image: image_sizes(image).rotated)


def _of_header(path: Path, read: Callable[[ImageFile], _Found]) -> _Found | None:
    """Return what ``read`` finds in the header of a file; None if it cannot be read."""
    if not is_file(path):
        return None
    try:
        with path.open("rb") as file:
            image = _identified(file)
            return None if image is None else read(image)
    except Exception:  # as in open_image
        return None


def any_grey_16(folder: Path, names: Sequence[str]) -> bool:
    """Return True if one of up to 500 files, evenly spaced, is a grey image of 16 bits, by its header."""
    return any(_of_header(folder / name, _is_grey_16) for name in names[:: _step(names)])


def boxes_as_stored(folder: Path, images: Iterable[tuple[str, tuple[int, int] | None]]) -> bool | None:
    """Return True if the boxes of an annotation file refer to images without EXIF rotation, False if to rotated ones.

    A mirrored image, one turned by 180 degrees, and a square one have the same size before and after the rotation, so
    the other images of the file decide: those whose sides the rotation exchanges, if all of them agree. None: there are
    none, or they disagree. If none of up to 500 evenly spaced files has an EXIF rotation, no other file is read.

    Args:
        folder: of the images.
        images: file name, and (height, width) as annotated or None, of each image.
    """
    known = [(name, size) for name, size in images if size is not None]
    read = {name: _of_header(folder / name, image_sizes) for name, _ in known[:: _step(known)]}
    if all(sizes is None or sizes.orientation == 1 for sizes in read.values()):
        return None
    found = set()
    for name, size in known:
        sizes = read[name] if name in read else _of_header(folder / name, image_sizes)
        if sizes and sizes.stored != sizes.rotated and size in (sizes.stored, sizes.rotated):
            found.add(size == sizes.stored)
    return found.pop() if len(found) == 1 else None


def _step(listed: Sequence[object]) -> int:
    return max(1, len(listed) // _SAMPLE)


def image_sizes(image: Image.Image) -> ImageSizes:
    """Return the sizes before and after the EXIF rotation."""
    stored, orientation = (image.height, image.width), image.getexif().get(_ORIENTATION)
    turned = orientation in _QUARTER_TURNS
    return ImageSizes(stored, stored[::-1] if turned else stored, orientation if orientation in _TRANSPOSITIONS else 1)


def _identified(file: BinaryIO) -> ImageFile | None:
    """Return the image whose header is at the start of the file, or None; the pixels are not decoded.

    Same as ``Image.open`` with ``formats=IMAGE_FORMATS``, but without its size limit, which is global to the process.
    """
    Image.init()
    start = file.read(16)
    for name in IMAGE_FORMATS:
        if name not in Image.OPEN:
            continue
        factory, accept = Image.OPEN[name]
        accepted = accept is None or accept(start)
        if not accepted or isinstance(accepted, str):  # a string names a library that is not installed
            continue
        file.seek(0)
        try:
            return factory(file, "")
        except (SyntaxError, IndexError, TypeError, struct.error):  # Image.open, too, treats these as "another format"
            continue
    return None


def pillow_pixels(
    image: Image.Image,
    annotated: tuple[int, int] | None = None,
    *,
    grey_bits: int | None = None,
    as_stored: bool = False,
) -> Tensor:
    """Return a Pillow image as (3, h, w) uint8 RGB; see :func:`read_image` for modes and the arguments.

    Raises:
        ValueError: its pixels have 32 bits, or its size is not the annotated one.
    """
    rotate = image_sizes(image).wants_rotation(annotated, as_stored)
    turn = _TRANSPOSITIONS.get(image.getexif().get(_ORIENTATION, 1)) if rotate else None
    pixels = np.array(_rgb(image if turn is None else image.transpose(turn), grey_bits))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _rgb(image: Image.Image, grey_bits: int | None = None) -> Image.Image:
    if _is_grey_16(image):  # Pillow would clip values above 255 instead of scaling
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its pixels have 32 bits; expected 8 or 16 bits a channel")
        return Image.fromarray(scale_to_8_bits(values, grey_bits)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; expected 8 or 16 bits a channel")
    return image.convert("RGB")


def _is_grey_16(image: Image.Image) -> bool:
    return image.mode.startswith("I")


def is_deep(image: Image.Image, data: bytes) -> bool:
    """Return True for 16 bits a channel; Pillow's mode does not show it for colour."""
    if image.format == "PNG":
        return data[24] == 16  # bit depth of the header
    bits = image.tag_v2.get(_BITS_PER_SAMPLE) if isinstance(image, TiffImageFile) else None
    return _is_grey_16(image) or (isinstance(bits, tuple) and 16 in bits)


def scale_to_8_bits(values: NDArray[Any], grey_bits: int | None = None) -> NDArray[np.uint8]:
    """Scale the values of a 16-bit grey image to 8 bits, see :func:`read_image`."""
    scaled = values >> ((_depth(values) if grey_bits is None else grey_bits) - 8)
    return np.minimum(scaled, 255).astype(np.uint8)


def _depth(values: NDArray[Any]) -> int:
    """Return the bits that the values of a 16-bit grey image need, hot pixels aside, rounded up to ``_DEPTHS``."""
    hot = -(-values.size // _HOT) if values.size >= _LEAST_HOT else 0
    needed = int(np.partition(values, values.size - 1 - hot, axis=None)[values.size - 1 - hot]).bit_length()
    return next(depth for depth in _DEPTHS if depth >= needed)


def _as_text(size: tuple[int, int]) -> str:
    return f"{size[1]} x {size[0]} pixels (width x height)"


def check_folder(images: Path) -> None:
    """Raise :class:`InputError` unless the image folder exists."""
    if not is_folder(images):
        raise InputError(f"image folder {printable(images)} does not exist or is not a folder")
