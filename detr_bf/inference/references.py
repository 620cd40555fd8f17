"""References given to a predictor: one for all images, one for each, or a folder with files of the images' names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import is_folder
from detr_bf.common.text import printable
from detr_bf.data.inputs import ImageLike, described, image_files, is_one_image, is_url, real_path
from detr_bf.data.references import files_by_stem, other_size

ReferenceLike: TypeAlias = ImageLike | Iterable[ImageLike]  # see GivenReferences


class GivenReferences:
    """Reference of each image that a predictor gets.

    Args:
        given: an image, the reference of all; a folder, in which the reference of an image has its name, without
            suffix; images in the order of those that are predicted; or None, no image has one.
        read: reads an image; its second argument is its name in messages.
        images: those that are predicted: one image, a folder, or several.
        folders: of the images, with ``images`` if that is one: the name of one of their files is its path below the
            folder, that of any other file its file name.

    Raises:
        InputError: ``given`` cannot be read, has another number of images, has no order that the images have, or is a
            folder in which no file has the name of an image of the folder ``images``.
    """

    def __init__(
        self, given: Any, read: Callable[[Any, str], Tensor], images: object, folders: Sequence[Path] = ()
    ) -> None:
        self._none, self._read = given is None, read
        self._folders = [Path(images)] if names_folder(images) else folders  # type: ignore[arg-type]
        self._named: dict[str, Path] | None = None  # files by the names of the images
        self._fixed: tuple[str, Tensor] | None = None  # of all images: name and pixels
        self._file = Path(given) if _shown(given) and not is_url(str(given)) else None
        self._following: Iterator[tuple[int, Any]] = iter(())
        is_single = is_one_image(images) and not names_folder(images)
        if names_folder(given):
            self._folder, self._named = Path(given), files_by_stem(Path(given))
            if names_folder(images):
                self.check_names(image_files([Path(images)]))  # type: ignore[arg-type]
        elif given is None:
            pass
        elif is_single or is_one_image(given) or not isinstance(given, Iterable):
            self._fixed = _shown(given) or "given", read(given, "the reference")
        elif names_folder(images):
            raise InputError(
                f"{printable(images)} is a folder: give one reference for all its images, or a folder of references "
                "with files of the same names"
            )
        elif isinstance(given, Sized) and isinstance(images, Sized) and len(given) != len(images):
            raise InputError(f"{len(images)} images and {len(given)} references: give as many references as images")
        else:
            self._following = enumerate(given)

    def check_names(self, images: Iterable[Path]) -> None:
        """Raise an InputError if the references are files of a folder and none has the name of one of the images."""
        if self._named is not None and not any(self._name_of(image) in self._named for image in images):
            raise InputError(
                f"in {printable(self._folder)} no file has the name of an image: references have the names of their "
                "images, with any suffix, and the same subfolders"
            )

    @property
    def files(self) -> list[Path]:
        """Files of the references, if they are a file or those of a folder."""
        return [*(self._named or {}).values(), *([] if self._file is None else [self._file])]

    @property
    def unusable(self) -> str:
        """Subject and verb of messages about images that are left out."""
        return "images cannot be read" if self._none else "images or their references cannot be used"

    def __call__(self, number: int, image: object, pixels: Tensor, name: str) -> Tensor | None:
        """Return the reference (C, H, W) of an image.

        Args:
            number: index of the image; higher than that of the call before.
            pixels: of the image, (C, H, W).
            name: what a message calls an image that is not a file.

        Raises:
            InputError: it has none or would be its own, or its reference cannot be read or has another size.
        """
        if self._none:
            return None
        shown = _shown(image) or name
        if self._fixed is not None:
            chosen, reference = self._fixed
        else:
            given = self._at(number, shown) if self._named is None else self._file_of(image, shown)
            chosen, reference = _shown(given) or "given", self._read(given, f"the reference of {name}")
        if reference.shape != pixels.shape:
            raise InputError(f"{shown}: {other_size(chosen, reference, pixels)}")
        return reference

    def _at(self, number: int, shown: str) -> Any:
        missing = object()
        given = next((each for index, each in self._following if index == number), missing)
        if given is missing:
            raise InputError(f"there is no reference for {shown}: give as many references as images")
        return given

    def _file_of(self, image: object, shown: str) -> Path:
        if not isinstance(image, (str, os.PathLike)) or is_url(str(image)):
            kind = "a URL" if isinstance(image, str) else described(image)
            raise InputError(
                f"{shown} is {kind}, which has no file name to find its reference in {printable(self._folder)} by: "
                "give the references themselves"
            )
        assert self._named is not None, "there is a folder"
        name = self._name_of(Path(image))
        if name not in self._named:
            raise InputError(
                f"{shown} has no reference: in {printable(self._folder)} there is no image file {printable(name)}, "
                "with any suffix"
            )
        if real_path(self._named[name]) == real_path(Path(image)):
            raise InputError(
                f"{shown} is also the file of that name in {printable(self._folder)}, its own reference: give the "
                "folder of the references"
            )
        return self._named[name]

    def _name_of(self, image: Path) -> str:
        base = next((folder for folder in self._folders if image.is_relative_to(folder)), image.parent)
        return image.relative_to(base).with_suffix("").as_posix()


def check_given(reads: bool, given: object) -> None:
    """Raise an InputError if a detector reads references and none is given (None), or the reverse."""
    if given is not None and not reads:
        raise InputError("a reference is given, and this detector reads none when it predicts: leave it out")
    if given is None and reads:
        raise InputError(
            "this detector compares each image with its reference, an aligned image of the same size, and none is "
            "given: give reference=IMAGE for all images, a list with one for each, or a folder with files of the same "
            "names (on the command line --reference FILE or --reference DIR)"
        )


def names_folder(given: object) -> bool:
    """Return True for the path of a folder."""
    return isinstance(given, (str, os.PathLike)) and is_folder(Path(given))


def _shown(image: object) -> str:
    """Return a path or a URL as text for messages; empty for other images."""
    return printable(image) if isinstance(image, (str, os.PathLike)) else ""


NO_REFERENCES = GivenReferences(None, lambda image, name: torch.empty(0), ())
