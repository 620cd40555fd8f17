"""Images with which an export is compared and calibrated, each with its reference if the detector reads references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from detr_bf.assembly.data import references_of_run
from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.config import config_from_dict
from detr_bf.data.images import RGB, PixelFormat
from detr_bf.data.inputs import ImageLike
from detr_bf.data.references import named_references
from detr_bf.export.parity import ImagePair, synthetic_pairs
from detr_bf.export.precision import EXPORT_PRECISIONS, calibration_files
from detr_bf.inference.references import GivenReferences


def compared_pairs(
    images: Iterable[ImageLike],
    references: Iterable[ImageLike],
    read: Callable[[Any, str], Tensor],
    reads_references: bool,
    pixel_format: PixelFormat = RGB,
) -> tuple[list[ImagePair], str]:
    """Read images and, with ``reads_references``, the reference of each; return them and their description.

    Without images they are synthetic.

    Raises:
        InputError: there is not one reference for each image, references are given and not read, or see
            :func:`read_pairs`.
    """
    given, others = list(images), list(references)
    if others and not reads_references:
        raise InputError("the detector reads no references in evaluation, and some are given: leave them out")
    if len(others) != len(given) and reads_references:
        raise InputError(
            f"the detector reads a reference of each image, and there are {len(given)} images and {len(others)} "
            "references: give one reference for each image, in the same order"
        )
    if given:
        return read_pairs(given, others, read), "given"
    return synthetic_pairs(reads_references, pixel_format), "synthetic"


def read_pairs(
    images: Sequence[ImageLike], references: Sequence[ImageLike], read: Callable[[Any, str], Tensor]
) -> list[ImagePair]:
    """Return images with their references, if these are not empty.

    Raises:
        InputError: one cannot be read, or a reference has another size than its image.
    """
    of_images, pairs = GivenReferences(references or None, read, images), list[ImagePair]()
    for number, image in enumerate(images):
        name = f"image {number}"
        pixels = read(image, name)
        pairs.append((pixels, of_images(number, image, pixels, name)))
    return pairs


def calibration_pairs(
    precision: str,
    folder: str | Path | None,
    references: str | Path | None,
    config: Mapping[str, Any] | None,
) -> tuple[list[Path], list[Path]]:
    """Return the images of a folder for int8, and the reference of each if references are read; none otherwise.

    Args:
        folder: of images; needed for int8 alone.
        references: folder of references with the names of the images; None: those that the data of the run name.
        config: of the checkpoint, if references are read.

    Raises:
        InputError: the precision is unknown, a folder is missing or not used, or a reference is not known.
    """
    if precision not in EXPORT_PRECISIONS:
        raise InputError(f"precision={printable(repr(precision))} must be one of {', '.join(EXPORT_PRECISIONS)}")
    if (precision == "int8") != (folder is not None):
        raise InputError(f"precision={precision}: give calibration, a folder with images, for int8 and only for it")
    if references is not None and (config is None or folder is None):
        raise InputError("calibration_references are for int8, of a detector that reads references: leave them out")
    if folder is None:
        return [], []
    files = calibration_files(Path(folder))
    if references is not None:
        return files, named_references(files, Path(folder), Path(references))
    if config is None:
        return files, []
    return files, references_of_run(config_from_dict(dict(config), source="the config of the checkpoint"), files)
