"""Images given to a predictor, in any common form, as tensors."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import UNFINISHED, is_folder
from detr_bf.common.structures import Batch, Target
from detr_bf.common.text import counted, printable
from detr_bf.data.image_headers import IMAGE_FORMATS
from detr_bf.data.images import (
    MAX_PIXELS,
    RGB,
    FormatError,
    PixelFormat,
    decode_image,
    file_limit,
    pillow_pixels,
    read_image,
    scale_to_8_bits,
    stored_pixels,
)

_Result = TypeVar("_Result")

# What is taken as an image; `image_pixels` has the exact rules.
ImageLike: TypeAlias = str | Path | bytes | Tensor | NDArray[Any] | Image.Image
_IMAGE = (
    "an image is a path, a URL, the bytes of an image file, a Pillow image, a NumPy array (H, W), (H, W, 1), (H, W, 3) "
    "or (H, W, 4), or a tensor (H, W), (1, H, W), (3, H, W) or (4, H, W); with data.channels those channels"
)
_PIXELS = "uint8, uint16, or floating-point numbers from 0 to 1"
_CHANNELS = (1, 3, 4)
_TENSOR_TYPES = (torch.uint8, torch.uint16, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SECONDS = 30  # without a byte from a server
_HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.UnknownHandler,
)


def image_pixels(
    image: object, name: str, max_pixels: int = MAX_PIXELS, *, pixel_format: PixelFormat = RGB, bgr: bool = False
) -> Tensor:
    """Return an image as (3, H, W) uint8 RGB, or in another format, on the CPU.

    - The path of a file, the bytes of one, and a URL (http, https) are decoded as images of the training data are: see
      :func:`detr_bf.data.images.read_image`. They are rotated as their EXIF data say.
    - A Pillow image of any mode with integers is treated as the file it may have been read from.
    - NumPy arrays have shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), tensors (H, W), (1, H, W), (3, H, W) or
      (4, H, W): grey, RGB, or RGB with a transparency, which is dropped. Values are uint8; uint16, scaled to 8 bits as
      those of files; or floating-point from 0 to 1, multiplied by 255 and rounded.

    Args:
        name: what a message calls the image.
        max_pixels: largest number of pixels.
        pixel_format: of the images. In another one than RGB of 8 bits images have its channels, as stored, and arrays
            its bits, or floating-point values from 0 to 1.
        bgr: the channels of arrays and tensors are in the order blue, green, red (OpenCV's), perhaps with a fourth;
            files and Pillow images know their order.

    Raises:
        InputError: ``image`` is something else, has no or too many pixels, or cannot be read.
    """
    if isinstance(image, (bytes, bytearray, memoryview)):
        return _decoded(bytes(image), name, max_pixels, pixel_format)
    if isinstance(image, str) and is_url(image):
        return _decoded(_download(image, file_limit(max_pixels)), printable(image), max_pixels, pixel_format)
    if isinstance(image, (str, os.PathLike)):
        return read_image(Path(image), max_pixels=max_pixels, pixel_format=pixel_format)
    if isinstance(image, Image.Image):
        _check_extent(image.height, image.width, name, max_pixels)
        try:
            if not pixel_format.is_rgb:
                return stored_pixels(image, max_pixels, pixel_format)
            return pillow_pixels(image, grey_bits=pixel_format.grey_bits)
        except Exception as error:  # a lazily read image is decoded now, and decoders raise almost anything
            shown = printable(error) or type(error).__name__
            raise InputError(f"{name} is a Pillow image of mode {image.mode} that cannot be used: {shown}") from error
    if isinstance(image, (np.ndarray, Tensor)):
        return _array_pixels(image, name, max_pixels, pixel_format, bgr)
    many = "; give several images to predict" if isinstance(image, Iterable) else ""
    raise InputError(f"{name} is {described(image)}, but {_IMAGE}{many}")


def is_url(image: str) -> bool:
    """Return True for an address that :func:`image_pixels` downloads."""
    return image.lower().startswith(("http://", "https://"))


def image_files(inputs: Sequence[Path], written: Collection[Path] = ()) -> Iterator[Path]:
    """Yield the given files and the image files of the given folders, by name, without those in ``written``.

    Broken links are included: reading them reports the error.

    Raises:
        InputError: something does not exist, or a folder has no image files.
    """
    for path in inputs:
        if not path.exists():
            raise InputError(f"no such file or folder: {printable(path)}")
        if not path.is_dir():
            yield path
            continue
        found = sorted(
            file
            for file in path.rglob("*")
            if is_image_file(file)
            and not is_folder(file)
            and real_path(file) not in written
            and not file.name.startswith(UNFINISHED)
        )
        if not found:
            raise InputError(f"no image files in {printable(path)}")
        yield from found


def is_image_file(file: Path) -> bool:
    """Return True for the suffix of a format that :func:`image_pixels` reads."""
    return Image.registered_extensions().get(file.suffix.lower()) in IMAGE_FORMATS


def real_path(path: Path) -> Path:
    """Return the path without links; unlike ``Path.resolve``, this works for a link to itself."""
    return Path(os.path.realpath(path))


def described(image: object) -> str:
    """Return the type, and of arrays the shape and dtype."""
    if isinstance(image, (Tensor, np.ndarray)):
        kind = "a tensor" if isinstance(image, Tensor) else "a NumPy array"
        return f"{kind} of shape {tuple(image.shape)} and {str(image.dtype).removeprefix('torch.')}"
    return f"of type {type(image).__name__}"


def check_batch_size(batch_size: object) -> None:
    """Raise an InputError unless ``batch_size`` is a whole number from 1."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InputError(f"batch_size must be a whole number from 1, got {printable(repr(batch_size))}")


def chunks(images: Iterable[ImageLike], batch_size: int) -> Iterator[list[tuple[int, ImageLike]]]:
    """Yield lists of ``batch_size`` images with their indices; the last list may be shorter."""
    check_batch_size(batch_size)
    if isinstance(images, (str, os.PathLike)) and not Path(images).is_file():
        raise InputError(f"there is no folder {printable(images)}: predict takes a folder or several images")
    if is_one_image(images) or not isinstance(images, Iterable):
        raise InputError(f"predict takes several images, and this is {described(images)}: call the predictor itself")
    numbered = enumerate(images)
    return iter(lambda: list(islice(numbered, batch_size)), [])


def is_one_image(images: object) -> bool:
    """Return True for a path, the bytes of a file, a Pillow image, or an array of one image."""
    if isinstance(images, (Tensor, np.ndarray)):
        return images.ndim < 4
    return isinstance(images, (str, bytes, bytearray, memoryview, os.PathLike, Image.Image))


def by_size(
    samples: Sequence[tuple[Tensor, Target] | tuple[Tensor, Target, Tensor | None]],
    compute: Callable[[Batch], Sequence[_Result]],
    *,
    together: bool = False,
) -> list[_Result]:
    """Return the result of each sample, computed in a batch with the others of its size.

    In a batch of several sizes the smaller images would be padded, and convolutions see the padding.

    Args:
        samples: images (3, h, w) with their targets, and their references if there are any.
        compute: returns the results of a batch, in order.
        together: compute all samples in one batch.
    """
    groups: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(None if together else sample[0].shape, []).append(index)
    results: dict[int, _Result] = {}
    for indices in groups.values():
        results.update(zip(indices, compute(Batch.collate([samples[index] for index in indices])), strict=True))
    return [results[index] for index in range(len(samples))]


def _decoded(data: bytes, name: str, max_pixels: int, pixel_format: PixelFormat) -> Tensor:
    try:
        return decode_image(data, max_pixels, pixel_format=pixel_format)
    except ValueError as error:
        raise InputError(f"{name} cannot be used: {error}") from error


def _download(url: str, limit: int) -> bytes:
    """Return the content of a URL of at most ``limit`` bytes; redirects lead to http and https only."""
    opener = urllib.request.OpenerDirector()
    for handler in _HANDLERS:  # none for other schemes, which the default opener has
        opener.add_handler(handler())
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "detr_bf"})
        with opener.open(request, timeout=_SECONDS) as answer:
            data: bytes = answer.read(limit + 1)
    except (OSError, ValueError, HTTPException) as error:  # URLError is an OSError
        raise InputError(f"{printable(url)} cannot be downloaded: {printable(error)}") from error
    if len(data) > limit:
        raise InputError(f"{printable(url)} has more than {limit:,} bytes, the limit of data.max_pixels")
    return data


def _array_pixels(
    image: Tensor | NDArray[Any], name: str, max_pixels: int, pixel_format: PixelFormat, bgr: bool
) -> Tensor:
    height, width = _check_array(image, name, _CHANNELS if pixel_format.is_rgb else (pixel_format.channels,))
    _check_extent(height, width, name, max_pixels)
    if isinstance(image, Tensor):
        on_host = image.detach().cpu().as_subclass(Tensor)
        values = (on_host.float() if on_host.dtype == torch.bfloat16 else on_host).numpy()
        values = values if values.ndim == 2 else np.moveaxis(values, 0, 2)
    else:
        values = image
    if not pixel_format.is_rgb:
        stored = np.atleast_3d(values)
        if stored.dtype.kind == "f":
            _check_fractions(stored, name, described(image))
            levels, kind = (255, np.uint8) if pixel_format.depth == 8 else (0xFFFF, np.uint16)
            stored = (stored.astype(np.float64) * levels).round().astype(kind)
        try:
            return pixel_format.pixels(_as_rgb(stored, name) if bgr else stored)
        except FormatError as error:
            raise InputError(f"{name} is {described(image)}, and {error}") from error
    scaled = _as_uint8(np.ascontiguousarray(values), name, described(image), pixel_format.grey_bits)
    colours = np.atleast_3d(scaled)[:, :, :3]
    if bgr:
        colours = colours[:, :, ::-1]
    return torch.from_numpy(np.array(colours)).permute(2, 0, 1).expand(3, -1, -1).contiguous()


def _as_rgb(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Return values (H, W, C) with the first three channels in reverse order."""
    if values.shape[2] not in (3, 4):
        count = counted(values.shape[2], "channel")
        raise InputError(f"{name} has {count}, and bgr=True is the order of 3, or 4 with transparency: leave it out")
    return np.concatenate([values[:, :, 2::-1], values[:, :, 3:]], axis=2)


def _check_array(image: Tensor | NDArray[Any], name: str, channels: Sequence[int]) -> tuple[int, int]:
    """Return height and width; check shape and dtype, but no values.

    Raises:
        InputError: it is not an array of an image.
    """
    if isinstance(image, Tensor) and (
        image.is_nested or image.layout != torch.strided or image.is_meta or image.is_quantized
    ):
        raise InputError(f"{name} is a nested, sparse, meta or quantized tensor, expected a dense one with values")
    is_tensor, shape = isinstance(image, Tensor), tuple(image.shape)
    first, last = (shape[0], shape[-1]) if shape else (0, 0)
    if len(shape) not in (2, 3) or 0 in shape or (len(shape) == 3 and (first if is_tensor else last) not in channels):
        advice = ""
        if len(shape) == 4:
            advice = ": give several images to predict"
        elif len(shape) == 3 and 0 not in shape and (last if is_tensor else first) in channels:
            advice = ": give image.permute(2, 0, 1)" if is_tensor else ": give image.transpose(1, 2, 0)"
        expected = "(H, W) or (C, H, W)" if is_tensor else "(H, W) or (H, W, C)"
        known = "1, 3 or 4 channels" if len(channels) > 1 else counted(channels[0], "channel")
        raise InputError(f"{name} is {described(image)}, expected {expected} with {known}{advice}")
    if isinstance(image, Tensor):
        accepted = image.dtype in _TENSOR_TYPES
    else:
        accepted = image.dtype.kind == "f" or (image.dtype.kind == "u" and image.dtype.itemsize <= 2)
    if not accepted:
        raise InputError(f"{name} is {described(image)}, expected {_PIXELS}")
    if len(shape) == 2:
        return shape
    return shape[1:] if is_tensor else shape[:2]


def _as_uint8(values: NDArray[Any], name: str, shown: str, grey_bits: int | None) -> NDArray[np.uint8]:
    """Scale values (H, W) or (H, W, C) of one of the accepted types to 8 bits."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind == "u":
        is_grey = values.ndim == 2 or values.shape[2] == 1
        return scale_to_8_bits(values, grey_bits) if is_grey else (values >> 8).astype(np.uint8)
    _check_fractions(values, name, shown)
    return (values.astype(np.float32) * 255).round().astype(np.uint8)


def _check_fractions(values: NDArray[Any], name: str, shown: str) -> None:
    """Raise an InputError for floating-point values that are not from 0 to 1."""
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 1):  # NaN is neither
        raise InputError(
            f"{name} is {shown} with values from {low:g} to {high:g}, expected 0 to 1: divide 0 to 255 by 255, and "
            "leave normalisation to the predictor"
        )


def _check_extent(height: int, width: int, name: str, max_pixels: int) -> None:
    if not height * width:
        raise InputError(f"{name} has no pixels: its size is {width} x {height} (width x height)")
    if height * width > max_pixels:
        raise InputError(
            f"{name} is of {width} x {height} pixels (width x height), more than max_pixels={max_pixels}: give a "
            "smaller one, or raise max_pixels"
        )
