"""Folder of a data set, read as the content of a COCO file.

Image ids count from 1 in the sorted order of the file names, category ids from 1 in the sorted order of the class
names, both over the whole folder: they are the same in every split and fold.
"""

from __future__ import annotations

import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from detr_bf.common.errors import InputError
from detr_bf.common.files import read_regular
from detr_bf.common.text import counted, listed, printable
from detr_bf.data.coco import CocoAnnotations
from detr_bf.data.references import KEY

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"))
MASK_SPLITS = "Segmentation/"  # begin of the names of splits whose images have masks
MAX_TEXT_BYTES = 2**26  # limit of a label file and of a list of images
_KIND_FOLDERS = frozenset(("images", "jpegimages", "labels", "annotations"))  # they tell images from labels


class AnnotatedImage(NamedTuple):
    """Image file and its objects."""

    file_name: str  # relative to the root, with forward slashes
    size: tuple[int, int] | None  # (height, width) in pixels, None if the labels do not state it
    objects: list[dict[str, Any]]  # COCO annotations with "name", the class, instead of ids


class NamedSplit(NamedTuple):
    """Split that a file of the data set defines; the file is read on demand, because others may be unusable."""

    path: Path
    read: Callable[[], Collection[str]]  # file names


@dataclass(frozen=True)
class DataFolder:
    """All images of a data set and its splits."""

    root: Path
    content: CocoAnnotations
    splits: Mapping[str, NamedSplit]
    form: str = ""  # name of the form, for messages
    templates: Mapping[str, str] = field(default_factory=dict)  # references as given, where they were located, by image

    def split(self, name: str) -> CocoAnnotations:
        """Return the images of one split: a named one, or those of a subfolder; all images for ``""`` and ``.``.

        The folders ``images``, ``JPEGImages``, ``labels`` and ``Annotations`` may be left out: ``train`` is
        ``images/train``, too.

        Raises:
            InputError: there is no such split, or it has no images.
        """
        if name in ("", "."):
            return self.content
        if name in self.splits:
            path, read = self.splits[name]
            return images_of(self.content, read(), path)
        prefix = f"{unicodedata.normalize('NFC', str(PurePosixPath(name)))}/"
        names = [image["file_name"] for image in self.content.images]
        chosen = {each for each in names if each.startswith(prefix) or canonical(each).startswith(prefix)}
        if not chosen:
            raise InputError(f"{printable(self.root)} has no split {printable(name)}; its splits: {self.known_splits}")
        return images_of(self.content, chosen, self.root / name)

    def as_given(self, content: CocoAnnotations) -> CocoAnnotations:
        """Return a split with the references as the files name them: relative to a folder of references."""
        images = [
            {**image, KEY: self.templates[image["file_name"]]} if image["file_name"] in self.templates else image
            for image in content.images
        ]
        return replace(content, images=images)

    @property
    def split_names(self) -> list[str]:
        """Names of the splits: those that files define, and subfolders."""
        folders = {str(PurePosixPath(canonical(image["file_name"])).parent) for image in self.content.images} - {"."}
        return sorted({*self.splits, *folders})

    def __str__(self) -> str:
        """Return the form and the splits in a line."""
        images = counted(len(self.content.images), "image")
        return f"{printable(self.root)}: {self.form}, {images}, splits: {self.known_splits}"

    @property
    def known_splits(self) -> str:
        """Names of the splits, for messages."""
        return listed(self.split_names, 20) or "none"


def images_of(content: CocoAnnotations, file_names: Collection[str], path: Path) -> CocoAnnotations:
    """Return the content with only these images, in their order, and all categories; ``path`` is for messages."""
    images = [image for image in content.images if image["file_name"] in file_names]
    if not images:
        raise InputError(f"{printable(path)} has no images")
    others = {image["id"] for image in content.images} - {image["id"] for image in images}
    # annotations of unknown images stay, for the data checks
    annotations = [annotation for annotation in content.annotations if annotation["image_id"] not in others]
    return replace(content, path=path, images=images, annotations=annotations)


def coco_content(root: Path, images: Iterable[AnnotatedImage], names: Iterable[str] = ()) -> CocoAnnotations:
    """Return labelled images as the content of a COCO file.

    Args:
        root: folder of the data set.
        images: in any order, each file once.
        names: classes that need not have objects.

    Raises:
        InputError: there are no images or no classes.
    """
    images = sorted(images, key=lambda image: image.file_name)
    classes = sorted({*names, *(each["name"] for image in images for each in image.objects)})
    if not images or not classes:
        lacking = "images with labels" if not images else "objects and therefore no classes"
        raise InputError(f"{printable(root)} has no {lacking}")
    category_ids = {name: number for number, name in enumerate(classes, 1)}
    entries: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, (file_name, size, objects) in enumerate(images, 1):
        known = {} if size is None else {"height": size[0], "width": size[1]}
        entries.append({"id": image_id, "file_name": file_name, **known})
        for one in objects:
            ids = {"id": len(annotations) + 1, "image_id": image_id, "category_id": category_ids[one["name"]]}
            annotations.append(ids | {key: value for key, value in one.items() if key != "name"})
    categories = [{"id": number, "name": name} for name, number in category_ids.items()]
    return CocoAnnotations(root, entries, annotations, categories)


def coco_document(content: CocoAnnotations) -> dict[str, list[dict[str, Any]]]:
    """Return the content of a COCO file: the inverse of :func:`coco_content`, for a JSON file."""
    return {part: [dict(entry) for entry in getattr(content, part)] for part in ("images", "annotations", "categories")}


def canonical(name: str) -> str:
    """Return a path without the folders that tell images from labels.

    ``Annotations/a.xml`` belongs to ``JPEGImages/a.jpg``, ``train/labels/a.txt`` to ``train/images/a.jpg``: both pairs
    have the same canonical path up to the suffix. Both spellings of an accent (Unicode) give the same path.
    """
    *folders, file = unicodedata.normalize("NFC", name).split("/")
    return "/".join([*(folder for folder in folders if folder.lower() not in _KIND_FOLDERS), file])


def folder_of(name: str) -> str:
    """Return the folder of the canonical path, which an image and its labels share."""
    return canonical(name).rpartition("/")[0]


def stem_of(name: str) -> str:
    """Return the canonical path without suffix, the key that an image and its labels share."""
    return str(PurePosixPath(canonical(name)).with_suffix(""))


def is_image(name: str) -> bool:
    """Return True for the name of an image file; the case of the suffix does not matter."""
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def images_by_stem(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the image files among the names by :func:`stem_of`.

    Raises:
        InputError: two images would have the same label file.
    """
    found: dict[str, str] = {}
    for name in names:
        if is_image(name):
            other = found.setdefault(stem_of(name), name)
            if other != name:
                raise InputError(
                    f"{printable(root)}: the labels of {printable(other)} and {printable(name)} would be in the same "
                    "file: rename or remove one of the images"
                )
    return found


def log_left_out(root: Path, names: Iterable[str], reason: str) -> None:
    """Log a warning with the number of images that are not read, and their folders."""
    folders = Counter(str(PurePosixPath(name).parent) for name in names)
    if folders:
        logger.warning(
            "%s: %d images are left out, because %s: %s",
            printable(root),
            folders.total(),
            reason,
            listed(f"{folder} ({count})" for folder, count in folders.most_common()),
        )


def files_below(root: Path) -> list[str]:
    """Return the paths of all files below the folder, relative with forward slashes, sorted; hidden ones are left out.

    Links to folders are followed; a folder is read once, under its own name before that of a link beside it.

    Raises:
        InputError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise InputError(f"folder {printable(error.filename)} cannot be read: {error.strerror}") from error

    found, seen = [], set()
    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=refuse):
        status = os.stat(folder)  # noqa: PTH116  of a link's target
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(
            (name for name in subfolders if not name.startswith(".")),
            key=lambda name: (Path(folder, name).is_symlink(), name),
        )
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a UTF-8 file that are not blank, stripped, with their numbers from 1.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        text = read_regular(path, MAX_TEXT_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:  # UnicodeDecodeError too
        raise InputError(f"{printable(path)} cannot be used: {error}; expected lines of UTF-8 text") from error
    return [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
