"""Images in files: a folder for each class, or lists of files with their labels."""

from __future__ import annotations

import string
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from detr_bf.classification.sources.splits import FileImages, LabelledSplit, LabelledSplits, class_map_of
from detr_bf.data.images import MAX_PIXELS
from detr_bf.errors import InputError
from detr_bf.files import is_file, is_folder, read_regular
from detr_bf.text import listed, printable

_MAX_LIST_BYTES = 2**30
_BLANKS = string.whitespace + ","  # between path and label
_DIGITS = 18  # of a label, which is an int64


def image_folder(root: str, train: str = "train", val: str = "val", max_pixels: int = MAX_PIXELS) -> LabelledSplits:
    """``root/train/CLASS/...`` and ``root/val/CLASS/...``; the classes are the sorted names of train's folders.

    A class's images may lie in folders of their own below it; only files with an image's extension count.

    Raises:
        InputError: a folder is missing, has no classes or no images, or val's classes are not those of train.
    """
    folders = [Path(root) / name for name in (train, val)]
    names, others = _class_names(folders[0]), _class_names(folders[1])
    if names != others:
        raise InputError(
            f"the classes of {folders[1]} must be those of {folders[0]}, but {_alone(others, names)} "
            f"stand in the first alone and {_alone(names, others)} in the second: make both the same, "
            "with empty folders where there are no validation images"
        )
    train_split, val_split = (_folder_split(folder, names, max_pixels) for folder in folders)
    return LabelledSplits(train_split, val_split, class_map_of(names))


def _class_names(folder: Path) -> list[str]:
    if not is_folder(folder):
        raise InputError(
            f"there is no folder {printable(folder)}: data.name=image_folder needs data.root/data.train/CLASS/ and "
            "data.root/data.val/CLASS/ with the images"
        )
    names = sorted(path.name for path in folder.iterdir() if is_folder(path) and not path.name.startswith("."))
    if not names:
        raise InputError(f"{printable(folder)} has no folders in it: expected one for each class, with its images")
    return names


def _alone(names: Sequence[str], others: Sequence[str]) -> str:
    """The first of those that are none of the others."""
    alone = sorted(set(names) - set(others))
    return listed(alone) or "none"


def _folder_split(folder: Path, classes: Sequence[str], max_pixels: int) -> LabelledSplit:
    index = {name: number for number, name in enumerate(classes)}
    files = make_dataset(str(folder), index, extensions=IMG_EXTENSIONS, allow_empty=True)
    if not files:
        raise InputError(
            f"{printable(folder)} has no images in its folders; known extensions are {', '.join(IMG_EXTENSIONS)}"
        )
    names = [Path(path).relative_to(folder).as_posix() for path, _ in files]
    return LabelledSplit(
        FileImages(folder, names, max_pixels), torch.tensor([label for _, label in files]), str(folder)
    )


def image_list(root: str, train: str, val: str, max_pixels: int = MAX_PIXELS) -> LabelledSplits:
    """Files of ``relative/path label`` lines, as ImageNet-LT, Places-LT and iNaturalist 2018 publish them.

    Paths are relative to ``root``; the lists themselves are looked for in ``root``, then where they are. There are as
    many classes as the largest training label + 1, and their names are the labels.

    Raises:
        InputError: a list or the folder is missing, a line is not of that form, or the training labels have gaps.
    """
    folder = Path(root)
    if not is_folder(folder):
        raise InputError(
            f"image folder {printable(folder)} does not exist or is not a folder: data.root must hold the images"
        )
    split = _list_split(folder, train, max_pixels)
    found = split.labels.unique().tolist()
    missing = found[-1] + 1 - len(found)
    if missing:
        known = set(found)
        gaps = (str(label) for label in count() if label not in known)
        raise InputError(
            f"{split.origin}: labels must be 0 to {found[-1]} without gaps, but no line has "
            f"{listed(islice(gaps, missing), total=missing)}: number the classes anew, in both lists"
        )
    return LabelledSplits(split, _list_split(folder, val, max_pixels), class_map_of([str(label) for label in found]))


def _list_split(folder: Path, name: str, max_pixels: int) -> LabelledSplit:
    path = next((path for path in (folder / name, Path(name)) if is_file(path)), None)
    if path is None:
        places = f"{printable(folder / name)} and no {printable(name)}"
        raise InputError(f"there is no list {places}: expected a file of `path label` lines")
    names, labels = _parsed(path)
    return LabelledSplit(FileImages(folder, names, max_pixels), labels, str(path))


def _parsed(path: Path) -> tuple[list[str], Tensor]:
    names, labels, shown = [], [], printable(path)
    try:
        lines = read_regular(path, _MAX_LIST_BYTES).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{shown} is not a text in UTF-8 ({error}): expected `path label` lines") from None
    except (OSError, ValueError) as error:
        raise InputError(f"the list {shown} cannot be used: {error}; expected `path label` lines") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        head = line.strip().rstrip(string.digits)
        label = line.strip()[len(head) :]
        name = head.rstrip(_BLANKS)
        if not label or not name or name == head or len(label.lstrip("0")) > _DIGITS:
            raise InputError(
                f"{shown}, line {number}: expected a path and a label from 0 on, of {_DIGITS} digits at most, got "
                f"'{printable(line.strip())}'"
            )
        names.append(name)
        labels.append(int(label.lstrip("0") or "0"))
    if not names:
        raise InputError(f"{shown} lists no images: expected `path label` lines")
    return names, torch.tensor(labels)
