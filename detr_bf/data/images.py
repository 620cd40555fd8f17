"""Image decoding with Pillow, the same for training, data checks and prediction.

Pillow instead of ``torchvision.io.decode_image``, which is deprecated in torchvision 0.29, reads neither BMP nor TIFF
and ignores the EXIF rotation of WebP. Both give the same pixels for JPEG and PNG. TIFF files with several samples per
pixel are read by tifffile where their channels are read as stored (:class:`PixelFormat`).

Shape legend: C channels, H x W pixels.
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import file_size, is_folder, read_regular
from detr_bf.common.text import counted, printable
from detr_bf.data.duplicates import perceptual_hash
from detr_bf.data.image_headers import (
    BITS_PER_SAMPLE,
    IMAGE_FORMATS,
    MOST_CHANNELS,
    ORIENTATION,
    SAMPLES_PER_PIXEL,
    TRANSPOSITIONS,
    ImageSizes,
    TooLargeError,
    identified,
    image_sizes,
    is_grey_16,
    oriented,
    page_numbers,
    tiff_format,
    tiff_tags,
)

logger = logging.getLogger(__name__)

MAX_PIXELS = 178_956_970  # default of data.max_pixels: Pillow warns above it
_BYTES_PER_PIXEL = 8  # limit of the file size: uncompressed RGBA of 16 bits
_SMALLEST_LIMIT = 2**26  # bytes; the limit of the file size is never smaller

_DEPTHS = (8, 10, 12, 14, 16)  # bits of the values in 16-bit images
_HOT = 10_000  # pixels of a 16-bit grey image, of which one may exceed its depth
_LEAST_HOT = 1000  # pixels; in a smaller image none may
_PNG_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by the colour type of the header
_STRETCH = (1, 99)  # percentiles of a picture of 16 bits that are drawn black and white
_STRETCHED = 10**6  # values at most from which they are computed
_ADVICE = "set it to that of the images, all of which must have the same, or leave out this one"
_warned: set[Path] = set()  # folders with a 16-bit image that was logged


@dataclass(frozen=True)
class PixelFormat:
    """Channels and bits of the images of a data set, as they are read.

    RGB of 8 bits is the default: images of any kind are converted to it. In every other format an image must have
    these channels and bits, which are read as stored: the samples of a pixel, or the pages of a TIFF file. Only a grey
    image of 16 bits may be scaled to one channel of 8 bits.

    Args:
        channels: 1: grey.
        depth: bits of a channel, 8 or 16.
        grey_bits: of 16-bit grey images scaled to 8 bits, see :func:`read_image`.
    """

    channels: int = 3
    depth: int = 8
    grey_bits: int | None = None

    @property
    def is_rgb(self) -> bool:
        """True for RGB of 8 bits."""
        return (self.channels, self.depth) == (3, 8)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the pixels as they are read."""
        return torch.uint8 if self.depth == 8 else torch.uint16

    def pixels(self, samples: NDArray[Any]) -> Tensor:
        """Return samples (H, W, C) uint8 or uint16 as pixels (C, H, W).

        Raises:
            FormatError: they have other channels or bits.
        """
        count, bits = samples.shape[2], 8 * samples.dtype.itemsize
        if count != self.channels:
            raise FormatError(
                f"it has {counted(count, 'channel')}, expected {self.channels} (data.channels): {_ADVICE}"
            )
        if count == 1 and bits > self.depth:
            samples = scale_to_8_bits(samples, self.grey_bits)
        elif bits != self.depth:
            raise FormatError(f"it has {bits} bits a channel, expected {self.depth} (data.depth): {_ADVICE}")
        # a copy: the caller may change its array, and torch takes neither read-only nor big-endian ones
        return torch.from_numpy(np.array(np.moveaxis(samples, 2, 0), samples.dtype.newbyteorder("="), order="C"))

    def blank(self, height: int, width: int) -> Tensor:
        """Return black pixels (C, H, W)."""
        return torch.zeros(self.channels, height, width, dtype=self.dtype)

    def check_rgb(self, what: str) -> None:
        """Raise an InputError unless this is RGB of 8 bits, which ``what``, a subject with its verb, alone."""
        if not self.is_rgb:
            raise InputError(
                f"{what} RGB images of 8 bits, and this detector reads images of data.channels={self.channels} and "
                f"data.depth={self.depth}: this is not supported"
            )

    def random_pixels(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Return random pixels (..., C, H, W); ``shape`` is without channels."""
        whole = (*shape[:-2], self.channels, *shape[-2:])
        return torch.randint(2**self.depth, whole, generator=generator, dtype=self.dtype)


RGB = PixelFormat()


class FormatError(ValueError):
    """An image has other channels or bits than the data set; the message says what to do."""


class MissingPackageError(InputError):
    """A package that reads these files is not installed."""


def pixel_values(pixels: Tensor) -> Tensor:
    """Return pixels in the type in which they are transformed: uint8 as it is, uint16 as float32 (value / 257).

    torch resizes no 16-bit integers. Both types have values from 0 to 255, so that nothing behind needs to know the
    depth, and all 65,536 values of 16 bits stay different.
    """
    return pixels.float() / 257 if pixels.dtype == torch.uint16 else pixels


def read_image(
    path: Path,
    annotated: tuple[int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
    *,
    pixel_format: PixelFormat = RGB,
    as_stored: bool = False,
) -> Tensor:
    """Return the pixels of a file as (3, h, w) uint8 RGB, rotated by its EXIF tag; the first frame of an animation.

    In another ``pixel_format`` they are (C, h, w) uint8 or uint16, and what follows is only true of one channel.

    Grey, palette, CMYK and 16-bit images become 8-bit RGB; transparency is dropped. ``annotated`` is the (height,
    width) in the annotation file: if it is the size before rotation, the image is not rotated, because the boxes refer
    to the unrotated image; ``as_stored`` decides where both sizes are the same. The first 16-bit image of a folder is
    logged as a warning.

    A grey image of 16 bits often holds values of 10, 12 or 14 bits. Its 8-bit values are ``value >> (grey_bits - 8)``,
    at most 255. The ``grey_bits`` of the format are those of the data set that the detector was trained on; if they
    are None, those of the image: the smallest of 8, 10, 12, 14 and 16 that fits its values, except the largest one of
    10,000 (hot pixels). For 16-bit colour Pillow returns the upper 8 bits.

    Raises:
        InputError: the file is missing, is not a regular file, cannot be decoded, has another size than annotated or
            more than ``max_pixels`` pixels; the message names it.
    """
    try:
        data = image_bytes(path, max_pixels)
        if not pixel_format.is_rgb:
            samples, sizes = _stored_samples(data, max_pixels)
            turn = sizes.wants_rotation(annotated, as_stored)
            return pixel_format.pixels(_turned(samples, sizes.orientation) if turn else samples)
        image, grey_bits = open_image(data, max_pixels), pixel_format.grey_bits
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
    except MissingPackageError:
        raise
    except FileNotFoundError:
        shown = printable(path)
        raise InputError(f"image file {shown} does not exist; check the image folder and the file names") from None
    except FormatError as error:
        raise InputError(f"image file {printable(path)} cannot be used: {error}") from error
    except ValueError as error:
        shown = printable(path)
        raise InputError(
            f"image file {shown} cannot be used: {error}; replace the file or drop the image; 'detr-bf "
            "check DATA --fix OUT' writes a copy of a data set without it"
        ) from error


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS, *, pixel_format: PixelFormat = RGB) -> Tensor:
    """Decode the bytes of a file as :func:`read_image` does.

    Raises:
        ValueError: they cannot be decoded; the message does not name the file.
    """
    if pixel_format.is_rgb:
        return pillow_pixels(open_image(data, max_pixels), grey_bits=pixel_format.grey_bits)
    samples, sizes = _stored_samples(data, max_pixels)
    return pixel_format.pixels(_turned(samples, sizes.orientation))


def displayed(pixels: Tensor) -> Tensor:
    """Return pixels (C, H, W) of any format, or their values, as a picture (3, H, W) uint8.

    It shows the first three channels, or the first one as grey. Those of 16 bits are stretched from the 1st to the 99th
    percentile of the image.
    """
    shown = pixel_values(pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1))
    if shown.dtype == torch.uint8:
        return shown
    values = shown.numpy().ravel()
    low, high = np.percentile(values[:: max(1, values.size // _STRETCHED)], _STRETCH)
    return ((shown - low) * (255 / max(high - low, 1e-3))).round().clamp(0, 255).to(torch.uint8)


class CheckedImage(NamedTuple):
    """Content of an image file, all of whose pixels were decoded."""

    sizes: ImageSizes
    depth: int | None  # bits in use of a 16-bit grey image that is scaled to 8, 0 for colour; None: not scaled
    phash: str  # perceptual hash when rotated
    stored: tuple[int, int] | None  # channels and bits of a TIFF file that is read as RGB of 8 bits
    moments: tuple[tuple[float, float], ...]  # mean and mean square of each channel, 1 is full brightness; () for RGB


def check_image(data: bytes, max_pixels: int = MAX_PIXELS, pixel_format: PixelFormat = RGB) -> CheckedImage:
    """Decode all pixels.

    Raises:
        ValueError: the image cannot be decoded, or is not of this format.
    """
    if pixel_format.is_rgb:
        image = open_image(data, max_pixels)
        pixels = _rgb(image)
        depth = None if not is_deep(image, data) else _depth(np.asarray(image)) if is_grey_16(image) else 0
        turn = TRANSPOSITIONS.get(image.getexif().get(ORIENTATION, 1))
        phash = perceptual_hash(pixels if turn is None else pixels.transpose(turn))
        return CheckedImage(image_sizes(image), depth, phash, tiff_format(io.BytesIO(data)), ())
    samples, sizes = _stored_samples(data, max_pixels)
    found = pixel_format.pixels(_turned(samples, sizes.orientation))
    depth = _depth(samples) if 8 * samples.dtype.itemsize > pixel_format.depth else None
    phash = perceptual_hash(Image.fromarray(displayed(found).permute(1, 2, 0).contiguous().numpy()))
    channels = pixel_values(found).double().flatten(1) / 255
    moments = zip(channels.mean(1).tolist(), channels.square().mean(1).tolist(), strict=True)
    return CheckedImage(sizes, depth, phash, None, tuple(moments))


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
        image = identified(io.BytesIO(data))
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
        if (stored := tiff_format(io.BytesIO(data))) is not None:
            raise FormatError(
                f"it has {stored[0]} channels of {stored[1]} bits, expected RGB or grey: convert it; a detector reads "
                "it with data.channels and data.depth"
            )
        raise ValueError(f"it cannot be decoded (none of the formats {', '.join(IMAGE_FORMATS)})")
    return image


def _stored_samples(data: bytes, max_pixels: int) -> tuple[NDArray[Any], ImageSizes]:
    """Return the samples (H, W, C) uint8 or uint16 of a file as stored, and its sizes.

    Raises:
        MissingPackageError: tifffile is needed and not installed.
        TooLargeError, ValueError: see :func:`open_image`.
    """
    try:
        tags = tiff_tags(io.BytesIO(data))
        of_tifffile = tags is not None and tags.get(SAMPLES_PER_PIXEL, 1) > 1
    except Exception as error:  # as in open_image
        raise ValueError(f"it cannot be decoded ({printable(error) or type(error).__name__})") from error
    if of_tifffile:
        samples = _tiff_samples(data, max_pixels)
        return samples, oriented((samples.shape[0], samples.shape[1]), tags.get(ORIENTATION) if tags else None)
    image = open_image(data, max_pixels)
    try:
        return _image_samples(image, max_pixels, data), image_sizes(image)
    except ValueError:
        raise
    except Exception as error:  # of a page after the first
        raise ValueError(f"it cannot be decoded ({printable(error) or type(error).__name__})") from error


def stored_pixels(image: Image.Image, max_pixels: int, pixel_format: PixelFormat) -> Tensor:
    """Return a Pillow image, which stays as it is, as pixels of another format than RGB of 8 bits.

    Raises:
        ValueError: it has another format, or its pages differ.
    """
    image.load()  # Pillow rotates a TIFF file when it is decoded
    page = image.tell()
    try:
        samples, sizes = _image_samples(image, max_pixels), image_sizes(image)
    finally:
        image.seek(page)
    return pixel_format.pixels(_turned(samples, sizes.orientation))


def _check_samples(count: int, max_pixels: int) -> None:
    """Raise TooLargeError for more samples than a file of the largest size has, if it is not compressed."""
    if 2 * count > file_limit(max_pixels):
        limit = file_limit(max_pixels) // 2
        raise TooLargeError(f"it has {count:,} samples, {limit:,} are allowed with data.max_pixels={max_pixels}")


def _tiff_samples(data: bytes, max_pixels: int) -> NDArray[Any]:
    """Return the samples (H, W, C) of a TIFF file of one page, whose pixels have several samples."""
    try:
        import tifffile
    except ImportError as error:
        raise MissingPackageError(
            "TIFF images with several samples per pixel need the package tifffile: pip install 'detr_bf[multispectral]'"
        ) from error
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            pages = [page for page in file.pages if not page.is_reduced and not page.is_mask]
            if len(pages) != 1:
                raise FormatError(f"it has {len(pages)} pages with several samples per pixel, expected one: convert it")
            page = pages[0]
            if page.imagewidth * page.imagelength > max_pixels:
                size = f"{page.imagewidth} x {page.imagelength} pixels (width x height)"
                raise TooLargeError(f"it has {size}, more than data.max_pixels={max_pixels}")
            if page.dtype not in (np.uint8, np.uint16):
                raise FormatError(
                    f"its samples are of the type {page.dtype}, expected unsigned ones of 8 or 16 bits: convert it"
                )
            _check_samples(page.size, max_pixels)
            samples: NDArray[Any] = np.moveaxis(page.asarray(), page.axes.index("S"), -1)
            return samples
    except (TooLargeError, FormatError):
        raise
    except Exception as error:  # tifffile, too, raises almost anything
        if "imagecodecs" in str(error):
            raise MissingPackageError(
                f"TIFF images of this compression need the package imagecodecs ({printable(error)}): pip install "
                "'detr_bf[multispectral]'"
            ) from error
        raise ValueError(f"it cannot be decoded ({printable(error) or type(error).__name__})") from error


def _image_samples(image: Image.Image, max_pixels: int, data: bytes = b"") -> NDArray[Any]:
    """Return the samples (H, W, C) uint8 or uint16 of a Pillow image; those of a TIFF file are its pages.

    Args:
        image: of one sample per pixel, if it is a TIFF file with several pages.
        data: of the file; without them 16-bit colours lose their lower 8 bits.

    Raises:
        TooLargeError: see :func:`_check_samples`.
        ValueError: a page has another size, type or rotation than the first, or its pixels are not of 8 or 16 bits.
    """
    numbers = page_numbers(image) if isinstance(image, TiffImageFile) else []
    _check_samples(image.width * image.height * max(1, len(numbers)), max_pixels)
    if image.format == "PNG" and data and is_deep(image, data) and not is_grey_16(image):
        return _png_16(data)
    if not isinstance(image, TiffImageFile) or not numbers or image.n_frames == 1:
        return _samples(image)
    if len(numbers) > MOST_CHANNELS:
        raise FormatError(f"it has {len(numbers)} pages; at most {MOST_CHANNELS} are read as channels: convert it")
    pages, seen = list[NDArray[Any]](), set[object]()
    for number in numbers:
        image.seek(number)
        seen.add((image.size, image.mode, image.tag_v2.get(ORIENTATION, 1)))  # Pillow rotates each page by its own tag
        if len(seen) > 1:
            raise FormatError(f"page {number} has another size, type or rotation than the first: convert it")
        pages.append(_samples(image))
    return np.concatenate(pages, axis=2)


def _samples(image: Image.Image) -> NDArray[Any]:
    if is_grey_16(image):
        return _grey_16(image).astype(np.uint16)[:, :, None]
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; expected 8 or 16 bits a channel")
    kept = image if image.mode in ("L", "LA", "RGB", "RGBA") else image.convert("L" if image.mode == "1" else "RGB")
    samples = np.atleast_3d(np.array(kept))
    is_grey = image.mode == "P" and (samples == samples[:, :, :1]).all()
    return samples[:, :, :1] if is_grey else samples


def _png_16(data: bytes) -> NDArray[Any]:
    """Return the samples (H, W, C) of a PNG file with 2 to 4 channels of 16 bits.

    Pillow returns one byte of each value: the upper one of big-endian values, which PNG has. Read as little-endian
    values they give the other byte. Two channels of 16 bits are read as four of 8 bits, of which a pixel has as many.
    """

    def decoded(form: str) -> NDArray[np.uint8]:
        image = identified(io.BytesIO(data))
        assert image is not None, "it has been opened"
        image.tile = [(*tile[:3], form) for tile in image.tile]  # type: ignore[misc]
        return np.array(image)

    if _PNG_CHANNELS[data[25]] == 2:
        return decoded("RGBA").view(">u2").astype(np.uint16)
    mode = "RGB" if _PNG_CHANNELS[data[25]] == 3 else "RGBA"
    high, low = (decoded(f"{mode};16{order}").astype(np.uint16) for order in ("B", "L"))
    return high << 8 | low


def _turned(samples: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return samples (H, W, C) rotated by the value of an EXIF tag."""
    turn = TRANSPOSITIONS.get(orientation)
    if turn is None:
        return samples
    numbers = np.arange(samples.shape[0] * samples.shape[1], dtype=np.int32).reshape(samples.shape[:2])
    places = np.asarray(Image.fromarray(numbers).transpose(turn))
    return samples.reshape(-1, samples.shape[2])[places]


def pillow_pixels(
    image: Image.Image,
    annotated: tuple[int, int] | None = None,
    *,
    grey_bits: int | None = None,
    as_stored: bool = False,
) -> Tensor:
    """Return a Pillow image as (3, h, w) uint8 RGB; see :func:`read_image` for modes and the arguments.

    Raises:
        ValueError: its pixels are not of 8 or 16 bits, or its size is not the annotated one.
    """
    rotate = image_sizes(image).wants_rotation(annotated, as_stored)
    turn = TRANSPOSITIONS.get(image.getexif().get(ORIENTATION, 1)) if rotate else None
    pixels = np.array(_rgb(image if turn is None else image.transpose(turn), grey_bits))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _rgb(image: Image.Image, grey_bits: int | None = None) -> Image.Image:
    if is_grey_16(image):  # Pillow would clip values above 255 instead of scaling
        return Image.fromarray(scale_to_8_bits(_grey_16(image), grey_bits)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; expected 8 or 16 bits a channel")
    return image.convert("RGB")


def _grey_16(image: Image.Image) -> NDArray[Any]:
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 0xFFFF:
        kind = "values below 0" if values.min() < 0 else "values of more than 16 bits"
        raise ValueError(f"its pixels have {kind}; expected 8 or 16 bits a channel, from 0")
    return values


def is_deep(image: Image.Image, data: bytes) -> bool:
    """Return True for 16 bits a channel; Pillow's mode does not show it for colour."""
    if image.format == "PNG":
        return data[24] == 16  # bit depth of the header
    bits = image.tag_v2.get(BITS_PER_SAMPLE) if isinstance(image, TiffImageFile) else None
    return is_grey_16(image) or (isinstance(bits, tuple) and 16 in bits)


def scale_to_8_bits(values: NDArray[Any], grey_bits: int | None = None) -> NDArray[np.uint8]:
    """Scale the values of a 16-bit grey image to 8 bits, see :func:`read_image`."""
    scaled = values >> ((_depth(values) if grey_bits is None else grey_bits) - 8)
    return np.minimum(scaled, 255).astype(np.uint8)


def _depth(values: NDArray[Any]) -> int:
    """Return the bits that the values of a 16-bit grey image need, hot pixels aside, rounded up to ``_DEPTHS``."""
    hot = -(-values.size // _HOT) if values.size >= _LEAST_HOT else 0
    needed = int(np.partition(values, values.size - 1 - hot, axis=None)[values.size - 1 - hot]).bit_length()
    return next(depth for depth in _DEPTHS if depth >= needed)


def check_folder(images: Path) -> None:
    """Raise :class:`InputError` unless the image folder exists."""
    if not is_folder(images):
        raise InputError(f"image folder {printable(images)} does not exist or is not a folder")
