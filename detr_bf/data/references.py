"""Reference images: for each image of a data set another one that the detector sees beside it.

An inspected board has the picture of a board without defects (its own reference); the controls of an experiment are a
random image and a random image of the same group, such as the same camera. A reference has no objects. It goes through
the same random transforms as its image, so it stays aligned with it pixel for pixel.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import file_size, is_folder
from detr_bf.common.text import printable
from detr_bf.data.annotation_values import value_text
from detr_bf.data.batches import derive_seed
from detr_bf.data.inputs import image_files, real_path
from detr_bf.data.transforms import Sample, in_type_of

logger = logging.getLogger(__name__)

KEY = "template"  # of an entry of a COCO file's images: the file name of its own reference
GROUP_KEY = "group"  # the name or number of its group


class Pair(NamedTuple):
    """An image and its reference, with the same objects, on which some transforms depend."""

    image: Sample
    reference: Sample | None

    @property
    def reference_or_image(self) -> Sample:
        """The reference, or the image if it has none."""
        return self.reference or self.image


@dataclass(frozen=True)
class References:
    """Choice of the reference of each image.

    Args:
        choice: ``own``, ``random`` or ``same_group``.
        files: of the images that can be chosen; with ``own`` one for each image, None where it has none.
        groups: number of the group of each image, for ``same_group``.
        shift: pixels of the image by which the reference is moved in both directions, each way drawn at random; the
            pixels at its border are repeated.
    """

    choice: str
    files: Sequence[Path | None]
    groups: Sequence[int] = ()
    shift: int = 0

    def file_of(self, index: int, seed: int) -> Path | None:
        """Return the file of the reference of an image; a random one is a function of ``seed``. None: it has none."""
        if self.choice == "own":
            return self.files[index]
        others: Sequence[int] = range(len(self.files))
        if self.choice == "same_group":
            others = self._members[self.groups[index]]
        if len(others) < 2:
            return None
        drawn = derive_seed(seed, 1) % (len(others) - 1)  # among the others, by their order
        other = others[drawn]
        return self.files[others[-1] if other == index else other]

    @cached_property
    def _members(self) -> dict[int, list[int]]:
        """Indices of the images of each group."""
        found = defaultdict(list)
        for index, group in enumerate(self.groups):
            found[group].append(index)
        return found

    @property
    def missing(self) -> int:
        """Number of images without a reference."""
        return sum(self.file_of(index, 0) is None for index in range(len(self.files)))

    def fingerprint(self, *, quick: bool) -> bytes:
        """Return a hash of choice, shift, groups and names of the files, without ``quick`` also of their sizes."""
        names = [None if file is None else file.name for file in self.files]
        sizes = [] if quick else [None if file is None else file_size(file) for file in self.files]
        content = json.dumps([self.choice, self.shift, list(self.groups), names, sizes])
        return hashlib.sha256(content.encode()).digest()

    def fitted(self, reference: Tensor, image: Tensor, seed: int, name: str) -> Tensor:
        """Return a reference (C, h, w) in the size of its image (C, H, W), shifted.

        One that was chosen at random is resized.

        Raises:
            InputError: the image's own reference has another size.
        """
        if reference.shape != image.shape:
            if self.choice == "own":
                raise InputError(other_size(name, reference, image))
            resized = F.interpolate(reference[None].float(), image.shape[-2:], mode="bilinear", antialias=True)
            reference = in_type_of(image, resized[0])
        if not self.shift:
            return reference
        signs = derive_seed(seed, 2)
        return translated(reference, *(self.shift if signs >> bit & 1 else -self.shift for bit in (0, 1)))


def other_size(name: str, reference: Tensor, image: Tensor) -> str:
    """Return the message for a reference whose size is not that of its image."""
    sizes = (f"{tensor.shape[-1]} x {tensor.shape[-2]}" for tensor in (reference, image))
    return (
        "the reference {} has {} pixels (width x height) and its image {}: give references of the same size, aligned "
        "with the image".format(name, *sizes)
    )


def translated(image: Tensor, down: int, right: int) -> Tensor:
    """Move an image (C, H, W) by whole pixels, which may be negative; the pixels at its border are repeated."""
    height, width = image.shape[-2:]
    rows = (torch.arange(height) - down).clamp(0, height - 1)
    columns = (torch.arange(width) - right).clamp(0, width - 1)
    return image[:, rows][:, :, columns]


def own_files(images: Sequence[Mapping[str, Any]], folder: Path, references: Path | None) -> list[Path | None]:
    """Return the file of each image's own reference, which may not exist; None for an image without one.

    It is the file named by the key :data:`KEY` of the image, below ``references`` or, if that is None, below the
    ``folder`` of the images. An image without the key has the file of its own name, or of its name with another
    suffix, below ``references``.

    Raises:
        InputError: there is no such folder, a name is no text, or no image has a reference.
    """
    if references is not None and not is_folder(references):
        raise InputError(f"the folder of references {printable(references)} does not exist or is not a folder")
    by_name = references is not None and any(image.get(KEY) is None for image in images)
    known = files_by_stem(references) if references is not None and by_name else {}
    found: list[Path | None] = []
    for image in images:
        name = image.get(KEY)
        if name is None:
            path = PurePosixPath(image["file_name"])
            found.append(known.get(path.with_suffix("").as_posix()) if path.name else None)
        elif isinstance(name, str) and name and not PurePosixPath(name).is_absolute():
            found.append((references or folder) / name)
        else:
            where = "references" if references else "images"
            raise InputError(
                f"image {image['id']}: {KEY} is {value_text(name)}, expected the path of a file relative to the folder "
                f"of the {where}, {printable(references or folder)}"
            )
    if not any(found):
        where = f"in {printable(references)} no file has the name of an image" if references else "none is given"
        raise InputError(
            f"each image needs its own reference, and {where}: give the key {KEY} of the images in the annotation "
            "file, or a folder of references (data.train.references, data.val.references; in Python references)"
        )
    return found


def own_references(
    images: Sequence[Mapping[str, Any]], folder: Path, references: Path | None, name: str, shift: int = 0
) -> References:
    """Return each image's own reference, and warn of images without one, or that are their own.

    ``name`` is that of the images in the warnings.

    Raises:
        InputError: as :func:`own_files`.
    """
    found = References("own", own_files(images, folder, references), shift=shift)
    warn_of_missing(found, name)
    pairs = zip(images, found.files, strict=True)
    same = [file is not None and real_path(folder / image["file_name"]) == real_path(file) for image, file in pairs]
    if any(same):
        logger.warning("%s: %d of %d images are their own reference", name, sum(same), len(same))
    return found


def warn_of_missing(references: References, name: str) -> None:
    """Warn of images without a reference; ``name`` is that of the images in messages.

    Raises:
        InputError: no image has one.
    """
    count, missing = len(references.files), references.missing
    if missing == count:
        raise InputError(f"{name}: data.reference={references.choice} finds no reference for any of {count} images")
    if missing:
        logger.warning("%s: %d of %d images have no reference", name, missing, count)


def named_references(files: Sequence[Path], folder: Path, references: Path) -> list[Path]:
    """Return for each file below ``folder`` the file of its name, or with another suffix, below ``references``.

    Raises:
        InputError: there is no such folder, or a file has no reference.
    """
    if not is_folder(references):
        raise InputError(f"the folder of references {printable(references)} does not exist or is not a folder")
    known = files_by_stem(references)
    found = [known.get(file.relative_to(folder).with_suffix("").as_posix()) for file in files]
    missing = [file for file, reference in zip(files, found, strict=True) if reference is None]
    if missing:
        raise InputError(
            f"{printable(references)} has no reference of {len(missing)} of {len(files)} images, such as "
            f"{printable(missing[0])}: give a folder with an image of the same name for each"
        )
    return [reference for reference in found if reference is not None]


def files_by_stem(folder: Path) -> dict[str, Path]:
    """Return the image files below a folder by their path in it without suffix, with / between its parts.

    Raises:
        InputError: there are none, or two differ in their suffix alone.
    """
    found: dict[str, Path] = {}
    for path in image_files([folder]):
        other = found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
        if other is not path:
            raise InputError(
                f"{printable(other)} and {printable(path)} are both the reference of the image of that name: remove one"
            )
    return found


def groups_of(images: Sequence[Mapping[str, Any]], least: int = 2) -> list[int]:
    """Return the number of the group of each image: its key :data:`GROUP_KEY`, or the folder in its file name.

    Raises:
        InputError: a group is neither text nor a whole number, or there are fewer groups than ``least``.
    """
    numbers: dict[object, int] = {}
    found = []
    for image in images:
        group = image.get(GROUP_KEY)
        if group is None:
            group = PurePosixPath(image["file_name"]).parent.as_posix()
        if not isinstance(group, (str, int)):
            raise InputError(
                f"image {image['id']}: {GROUP_KEY} is {printable(repr(group))}, expected text or a whole number"
            )
        found.append(numbers.setdefault(group, len(numbers)))
    if len(numbers) < least:
        raise InputError(
            f"groups of images are needed, and all images are in one: give the key {GROUP_KEY} of the images in the "
            "annotation file, or a folder for each group in their file names"
        )
    return found
