"""YOLO (Ultralytics): one text file for each image, with a line ``class cx cy w h`` for each object.

Format: https://docs.ultralytics.com/datasets/detect. Centre, width and height are fractions of the image after its EXIF
rotation; classes count from 0. A line with three or more corners instead (``class x1 y1 x2 y2 x3 y3 ...``, a
segmentation label) becomes the box around them. The class names are ``names`` of ``data.yaml`` or the lines of
``classes.txt``.

The reader is written here because hotcoco's (1.3) is optional, reads one folder of labels without splits, and knows
neither corners nor the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from detr_bf.data.annotation_values import is_number, value_text
from detr_bf.data.formats.folder import (
    AnnotatedImage,
    DataFolder,
    NamedSplit,
    coco_content,
    images_by_stem,
    is_image,
    read_lines,
    stem_of,
)
from detr_bf.data.images import header_size
from detr_bf.errors import InputError
from detr_bf.files import read_regular
from detr_bf.text import listed, printable

SETTINGS = ("data.yaml", "data.yml")
CLASS_LIST = "classes.txt"
_SPLITS = ("train", "val", "valid", "test")  # keys of data.yaml
_MAX_YAML_BYTES = 2**20
_SLACK = 1e-3  # by which rounding may exceed the range of a fraction


def read_yolo(root: Path, names: Sequence[str]) -> DataFolder:
    """Read a YOLO folder.

    The label file of ``images/train/a.jpg`` is ``labels/train/a.txt``, or ``a.txt`` beside the image; an image without
    label file is background. With paths of splits in ``data.yaml`` only their images belong to the data set. These
    paths are often those of another machine: they are searched inside the root alone, without leading ``../``, which
    Roboflow writes.

    Args:
        root: of the data set.
        names: its files, relative to the root.

    Raises:
        InputError: a label file or ``data.yaml`` is not readable, a class has no name, a label file has no image, or a
            path leads out of the root.
    """
    classes, paths = _settings(root, names)
    splits = {
        split: NamedSplit(root / "/".join(entries[0]), partial(_images_at, root, names, entries))
        for split, entries in paths.items()
    }
    images = images_by_stem(root, names)
    labels: dict[str, str] = {}
    for name in (name for name in names if name.endswith(".txt") and PurePosixPath(name).name != CLASS_LIST):
        other = labels.setdefault(stem_of(name), name)
        if other != name and stem_of(name) in images:
            raise InputError(f"{printable(root)}: {printable(other)} and {printable(name)} are for the same image")
    alone = [name for stem, name in labels.items() if stem not in images and "labels" in name.lower().split("/")]
    if alone:
        raise InputError(f"{printable(root / alone[0])} has no image, and {len(alone) - 1} more label files have none")
    used = set().union(*(split.read() for split in splits.values())) if splits else set(images.values())
    found = [_read_image(root, name, labels.get(stem), classes) for stem, name in images.items() if name in used]
    return DataFolder(root, coco_content(root, found, classes), splits)


def _settings(root: Path, names: Sequence[str]) -> tuple[list[str], dict[str, list[list[str]]]]:
    """Return the class names, and the paths of the splits in ``data.yaml`` as parts of paths relative to the root."""
    settings = next((name for name in SETTINGS if name in names), None)
    if settings is None:
        lists = [name for name in names if PurePosixPath(name).name == CLASS_LIST]
        if not lists:
            raise InputError(
                f"{printable(root)} has YOLO labels without class names: expected {SETTINGS[0]} with names, or a file "
                f"{CLASS_LIST} with one name in each line"
            )
        first, *others = ([line for _, line in read_lines(root / name)] for name in lists)
        if any(other != first for other in others):
            raise InputError(f"{printable(root)}: its files {CLASS_LIST} differ: {listed(lists)}")
        return _checked_classes(root / lists[0], first), {}
    path = root / settings
    try:
        content = yaml.safe_load(read_regular(path, _MAX_YAML_BYTES))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{printable(path)} is not YAML: {printable(' '.join(str(error).split()))}") from error
    if not isinstance(content, dict):
        raise InputError(f"{printable(path)} must contain 'key: value' lines")
    classes = content.get("names")
    if isinstance(classes, dict) and set(classes) == set(range(len(classes))):
        classes = [classes[number] for number in range(len(classes))]
    if not isinstance(classes, list):
        raise InputError(f"{printable(path)}: names is {value_text(classes)}, expected the class names from class 0 on")
    splits = {key: _split_paths(root, path, key, content) for key in _SPLITS if content.get(key)}
    return _checked_classes(path, classes), splits


def _checked_classes(path: Path, classes: Sequence[Any]) -> list[str]:
    """Return the names as text; each must be given once, because classes are told apart by their names."""
    named = [
        str(name).strip() for name in classes if isinstance(name, (str, int, float)) and not isinstance(name, bool)
    ]
    if not named or not all(named) or len(set(named)) < len(classes):
        raise InputError(
            f"{printable(path)}: the class names are {printable(value_text(list(classes)))}; expected text, each name "
            "once (in quotes where YAML reads yes, no, on or off)"
        )
    return named


def _split_paths(root: Path, path: Path, key: str, content: Mapping[str, Any]) -> list[list[str]]:
    """Return the paths of a split, each as it is and below the key ``path``, if that is relative."""
    entries = content[key] if isinstance(content[key], list) else [content[key]]
    base = content.get("path") or ""
    found = []
    for entry in entries:
        if not (isinstance(entry, str) and isinstance(base, str)):
            raise InputError(
                f"{printable(path)}: {key} is {value_text(content[key])}, expected a path or a list of paths"
            )
        parts = _inside(root, f"{printable(path)}: {key}", entry)
        found.append(parts)
        if base and not base.startswith("/"):
            found.append([*_inside(root, f"{printable(path)}: path", base), *parts])
    return found


def _inside(root: Path, where: str, text: str) -> list[str]:
    """Return the parts of a path without leading ``.`` and ``..``; an absolute path is made relative to the root."""
    path = PurePosixPath(text.replace("\\", "/"))
    if path.is_absolute():
        for base in (root.absolute(), root.resolve()):
            if path.is_relative_to(base.as_posix()):
                path = path.relative_to(base.as_posix())
    parts = list(path.parts)
    while parts and parts[0] == "..":
        del parts[0]
    if path.is_absolute() or ".." in parts:
        raise InputError(f"{where} is {printable(text)}, which leads out of {printable(root)}: give a path inside it")
    return parts


def _images_at(root: Path, names: Sequence[str], entries: Sequence[Sequence[str]]) -> set[str]:
    """Return the images in the folders, and of the lists of images, that the entries of a split name."""
    known, found = set(names), set()
    for entry in entries:
        path = "/".join(entry)
        if path in known and path.endswith(".txt"):
            for number, line in read_lines(root / path):
                where = f"{printable(root / path)}:{number}"
                parts = _inside(root, where, line)
                named = ("/".join(parts), "/".join((*entry[:-1], *parts)))
                image = next((name for name in named if name in known and is_image(name)), None)
                if image is None:
                    raise InputError(f"{where}: {printable(line)} is no image of {printable(root)}")
                found.add(image)
        prefix = f"{path}/" if path else ""
        found.update(name for name in names if name.startswith(prefix) and is_image(name))
    return found


def _read_image(root: Path, name: str, label: str | None, classes: Sequence[str]) -> AnnotatedImage:
    """Read the size and the labels of an image; the data checks report one whose size cannot be read."""
    size = header_size(root / name)
    lines = read_lines(root / label) if label else []
    objects = [
        _object(f"{printable(root / str(label))}:{number}", line, classes, size or (1, 1)) for number, line in lines
    ]
    return AnnotatedImage(name, size, objects)


def _object(where: str, line: str, classes: Sequence[str], size: tuple[int, int]) -> dict[str, Any]:
    """Return the object of a line; ``size`` is the (height, width) of the image in pixels."""
    try:
        label, *values = map(float, line.split())
    except ValueError:
        label, values = -1.0, []
    if not (len(values) == 4 or (len(values) >= 6 and len(values) % 2 == 0)):
        raise InputError(
            f"{where}: {printable(line)} is no label; expected 'class cx cy w h' or 'class x1 y1 x2 y2 ...'"
        )
    if label not in range(len(classes)):
        raise InputError(f"{where}: class {label:g}, but the classes are 0 to {len(classes) - 1}")
    if not all(is_number(value, -_SLACK, 1 + _SLACK) for value in values):
        raise InputError(f"{where}: {printable(line)} has values outside 0 to 1; expected fractions of the image")
    if len(values) == 4:
        x, y, w, h = values
        left, top = x - w / 2, y - h / 2
    else:
        left, top = min(values[::2]), min(values[1::2])
        w, h = max(values[::2]) - left, max(values[1::2]) - top
    height, width = size
    bbox = [left * width, top * height, w * width, h * height]
    return {"name": classes[int(label)], "bbox": bbox, "area": max(0.0, bbox[2]) * max(0.0, bbox[3]), "iscrowd": 0}
