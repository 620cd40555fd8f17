"""What a source gives: images that are read one by one, their labels, the classes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from detr_bf.data.images import MAX_PIXELS, read_image
from detr_bf.errors import InputError
from detr_bf.structures import ClassMap


class Images(Protocol):
    """Images by their places from 0 on."""

    def __len__(self) -> int: ...

    def read(self, place: int) -> Tensor:
        """(C, h, w) uint8 with C = 1 or 3 channels; :class:`InputError` where it cannot be read."""

    def subset(self, places: Tensor) -> Images:
        """Those at ``places`` (n,) int64, in that order."""


@dataclass(frozen=True)
class ArrayImages:
    """Images in memory."""

    pixels: Tensor  # (N, C, h, w) uint8, C = 1 or 3

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, place: int) -> Tensor:
        return self.pixels[place]

    def subset(self, places: Tensor) -> ArrayImages:
        return ArrayImages(self.pixels[places])


@dataclass(frozen=True)
class FileImages:
    """Image files of a folder."""

    folder: Path
    names: Sequence[str]  # paths within the folder
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.names)

    def read(self, place: int) -> Tensor:
        return read_image(self.folder / self.names[place], max_pixels=self.max_pixels)

    def subset(self, places: Tensor) -> FileImages:
        return FileImages(self.folder, [self.names[place] for place in places.tolist()], self.max_pixels)


@dataclass(frozen=True)
class LabelledSplit:
    """Images and the class of each."""

    images: Images
    labels: Tensor  # (N,) int64
    origin: str  # where they come from, for messages

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, places: Tensor) -> LabelledSplit:
        """Those at ``places`` (n,) int64, in that order."""
        return LabelledSplit(self.images.subset(places), self.labels[places], self.origin)


@dataclass(frozen=True)
class LabelledSplits:
    """Training and validation data of the same classes."""

    train: LabelledSplit
    val: LabelledSplit
    class_map: ClassMap
    mirrored: str = ""  # what a mirrored image is, if it is no longer one of its class


def require_two_classes(splits: LabelledSplits) -> None:
    """For classifiers, which get everything right where there is one class.

    Raises:
        InputError: there is.
    """
    names = splits.class_map.names
    if len(names) < 2:
        raise InputError(
            f"{splits.train.origin}: the only class is {', '.join(names)}, and a classifier needs two or more to tell "
            "apart: give images of another class, in both splits"
        )


def require_no_flips(splits: LabelledSplits, name: str, horizontal_flip: float) -> None:
    """For classifiers, where a mirror changes an image's class.

    Args:
        name: of the data, as ``data.name``.
        horizontal_flip: the probability that a training image is mirrored.

    Raises:
        InputError: such images are to be mirrored.
    """
    if splits.mirrored and horizontal_flip > 0:
        raise InputError(
            f"data.name={name}: {splits.mirrored}, and data.transforms.horizontal_flip={horizontal_flip:g} mirrors "
            "images: set data.transforms.horizontal_flip=0"
        )


def class_map_of(names: Sequence[str]) -> ClassMap:
    """The classes of these names, in this order."""
    return ClassMap(tuple(range(len(names))), tuple(names))


def array_split(pixels: Tensor, labels: Tensor, origin: str) -> LabelledSplit:
    """Images (N, C, h, w) or grey ones (N, h, w), uint8, and their labels (N,)."""
    return LabelledSplit(ArrayImages(pixels if pixels.ndim == 4 else pixels[:, None]), labels.long(), origin)


def data_folder(root: str) -> Path:
    """The folder of fetched data sets: ``root`` if it is set, else $DETR_BF_DATA, else ``.cache``."""
    return Path(root or os.environ.get("DETR_BF_DATA") or ".cache").expanduser()


@contextmanager
def fetching(folder: Path) -> Iterator[None]:
    """Within the block no other process of this machine fetches data into ``folder``, which is made.

    Raises:
        InputError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".fetching").open("w")
    except OSError as error:
        raise InputError(
            f"cannot write to the data folder {folder}: {error}; set data.root or DETR_BF_DATA to another"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
