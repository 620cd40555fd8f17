"""Headers of image files: format, sizes, EXIF rotation and channels, without decoding the pixels."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

from detr_bf.common.files import is_file

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
MOST_CHANNELS = 256
_SAMPLE = 500  # files of a data set whose headers say what may occur
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0")  # the last one: BigTIFF; Pillow reads no big-endian ones
_SUBFILE, _WIDTH, _HEIGHT, BITS_PER_SAMPLE, _PHOTOMETRIC = 254, 256, 257, 258, 262  # TIFF tags
SAMPLES_PER_PIXEL, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 277, 338, 339  # TIFF tags
_REDUCED_OR_MASK = 5  # bits of the tag
_GREY, _ALPHA, _UNSIGNED = 1, (1, 2), 1  # values of the tags
ORIENTATION = 0x0112  # EXIF tag
TRANSPOSITIONS = {  # by EXIF value; ImageOps.exif_transpose rewrites the EXIF data and fails if they are broken
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_QUARTER_TURNS = (5, 6, 7, 8)  # EXIF values that swap height and width


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
        raise ValueError(f"annotated for {size_text(annotated)}, but the file has {size_text(self.rotated)}")


class TooLargeError(ValueError):
    """The image has more pixels, or its file more bytes, than allowed."""


def header_size(path: Path) -> tuple[int, int] | None:
    """Return (height, width) after the EXIF rotation from the header of a file; None if it cannot be read."""
    sizes = _of_header(path, _header_sizes)
    return None if sizes is None else sizes.rotated


def _header_sizes(file: BinaryIO) -> ImageSizes | None:
    """Return the sizes of an image, also of a TIFF file with samples that Pillow does not read."""
    tags = tiff_tags(file)  # before Pillow, which logs an error for more samples than it reads
    if tags is not None:
        return oriented((tags[_HEIGHT], tags[_WIDTH]), tags.get(ORIENTATION))
    image = identified(file)
    return None if image is None else image_sizes(image)


def _of_header(path: Path, read: Callable[[BinaryIO], _Found | None]) -> _Found | None:
    """Return what ``read`` finds in the header of a file; None if it cannot be read."""
    if not is_file(path):
        return None
    try:
        with path.open("rb") as file:
            return read(file)
    except Exception:  # as in open_image
        return None


def any_grey_16(folder: Path, names: Sequence[str]) -> bool:
    """Return True if one of up to 500 files, evenly spaced, is a grey image of 16 bits, by its header."""

    def is_grey(file: BinaryIO) -> bool:
        return (image := identified(file)) is not None and is_grey_16(image)

    return any(_of_header(folder / name, is_grey) for name in spaced(names))


def stored_format(folder: Path, names: Sequence[str]) -> tuple[int, int] | None:
    """Return the channels and bits of a channel that up to 500 files, evenly spaced, have in common, by their headers.

    None: one is read as RGB of 8 bits as before, or they differ. Only TIFF files with several pages, or with samples
    that are neither grey nor RGB with or without transparency, are not; the samples are unsigned.
    """
    found = {_of_header(folder / name, tiff_format) for name in spaced(names)}
    return found.pop() if len(found) == 1 else None


def tiff_format(file: BinaryIO) -> tuple[int, int] | None:
    """Return the channels and bits of one TIFF file, see :func:`stored_format`; None also for a broken one."""
    try:
        return _tiff_format(file)
    except Exception:  # as in open_image
        return None


def _tiff_format(file: BinaryIO) -> tuple[int, int] | None:
    tags = tiff_tags(file)
    if tags is None:
        return None
    samples, bits = tags.get(SAMPLES_PER_PIXEL, 1), tags.get(BITS_PER_SAMPLE, (1,))[0]
    if any(kind != _UNSIGNED for kind in tags.get(_SAMPLE_FORMAT, ())):
        return None
    if samples == 1:
        image = identified(file)
        samples = 1 if image is None else len(page_numbers(image))
        return (samples, bits) if 1 < samples <= MOST_CHANNELS and bits in (8, 16) else None
    extra = tags.get(_EXTRA_SAMPLES, ())
    grey, first = tags.get(_PHOTOMETRIC) == _GREY, extra[:1]
    rgb = not grey and samples <= 4 and all(each in _ALPHA for each in first)
    transparent = grey and (samples, bits) == (2, 8) and any(each in _ALPHA for each in first)
    return None if rgb or transparent or samples > MOST_CHANNELS or bits not in (8, 16) else (samples, bits)


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
    read = {name: _of_header(folder / name, _header_sizes) for name, _ in spaced(known)}
    if all(sizes is None or sizes.orientation == 1 for sizes in read.values()):
        return None
    found = set()
    for name, size in known:
        sizes = read[name] if name in read else _of_header(folder / name, _header_sizes)
        if sizes and sizes.stored != sizes.rotated and size in (sizes.stored, sizes.rotated):
            found.add(size == sizes.stored)
    return found.pop() if len(found) == 1 else None


def spaced(listed: Sequence[_Found]) -> Sequence[_Found]:
    """Return up to 500 evenly spaced elements, or a few more."""
    return listed[:: max(1, len(listed) // _SAMPLE)]


def image_sizes(image: Image.Image) -> ImageSizes:
    """Return the sizes before and after the EXIF rotation."""
    return oriented((image.height, image.width), image.getexif().get(ORIENTATION))


def oriented(stored: tuple[int, int], orientation: int | None) -> ImageSizes:
    """Return the sizes of an image with this value of the EXIF tag, None or an unknown one: no rotation."""
    turned = orientation in _QUARTER_TURNS
    return ImageSizes(stored, stored[::-1] if turned else stored, orientation if orientation in TRANSPOSITIONS else 1)


def identified(file: BinaryIO) -> ImageFile | None:
    """Return the image whose header is at the start of the file, or None; the pixels are not decoded.

    Same as ``Image.open`` with ``formats=IMAGE_FORMATS``, but without its size limit, which is global to the process.
    """
    Image.init()
    file.seek(0)
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


def tiff_tags(file: BinaryIO) -> ImageFileDirectory_v2 | None:
    """Return the tags of the first page of a TIFF file, None of any other file; any exception: it is broken."""
    file.seek(0)
    start = file.read(16)
    if not start.startswith(_TIFF_STARTS):
        return None
    tags = ImageFileDirectory_v2(start if start[2] == 43 else start[:8])
    file.seek(tags.next)
    tags.load(file)
    return tags


def page_numbers(image: Image.Image) -> list[int]:
    """Return the numbers of the pages of a TIFF file, without reduced copies and masks of others."""
    numbers = []
    for number in range(getattr(image, "n_frames", 1)):
        image.seek(number)
        if not (isinstance(image, TiffImageFile) and image.tag_v2.get(_SUBFILE, 0) & _REDUCED_OR_MASK):
            numbers.append(number)
    return numbers


def is_grey_16(image: Image.Image) -> bool:
    """Return True for a grey image of 16 or 32 bits."""
    return image.mode.startswith("I")


def size_text(size: tuple[int, int]) -> str:
    """Return a (height, width) for messages."""
    return f"{size[1]} x {size[0]} pixels (width x height)"
