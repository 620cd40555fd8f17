"""YOLO (Ultralytics, Darknet): one text file for each image, with a line ``class cx cy w h`` for each object.

Format: https://docs.ultralytics.com/datasets/detect. Centre, width and height are fractions of the image after its EXIF
rotation; classes count from 0. A line with three or more corners instead (``class x1 y1 x2 y2 x3 y3 ...``, a
segmentation label) is an object with this polygon as its mask, and the box around it. An oriented box is written as
four corners and cannot be told from a polygon: it is read as one. With ``kpt_shape`` in ``data.yaml`` the keypoints
follow the box.

The reader is written here because hotcoco's (1.3) is optional, reads one folder of labels without splits, and knows
neither corners nor the rotation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path, PurePosixPath
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.files import is_number
from detr_bf.common.text import listed, printable
from detr_bf.data.formats.folder import (
    AnnotatedImage,
    DataFolder,
    NamedSplit,
    coco_content,
    folder_of,
    images_by_stem,
    is_image,
    log_left_out,
    read_lines,
    stem_of,
)
from detr_bf.data.formats.yolo_settings import YoloSettings, images_of_list, is_class_list, read_settings
from detr_bf.data.image_headers import header_size
from detr_bf.data.masks import polygon_area

logger = logging.getLogger(__name__)

_SLACK = 0.1  # by which a value may exceed the range of a fraction: tools write boxes that leave the image a little
_UNLABELLED = "their folders have no label files (an empty one makes an image background)"
_ROUNDING = 1e-3  # by which a width may be negative


def read_yolo(root: Path, names: Sequence[str]) -> DataFolder:
    """Read a YOLO folder.

    The label file of ``images/train/a.jpg`` is ``labels/train/a.txt``, or ``a.txt`` beside the image. An image without
    label file is background if its folder has label files or a split names the folder or the image; the images of other
    folders are left out. With splits in the settings only their images belong to the data set.

    Args:
        root: of the data set.
        names: its files, relative to the root.

    Raises:
        InputError: a label file or the settings are not usable, a class has no name, a label file has no image, or a
            path leads out of the root.
    """
    settings = read_settings(root, names)
    lists = {entry for entries in settings.splits.values() for entry in entries}
    images = images_by_stem(root, names)
    labels: dict[str, str] = {}
    for name in names:
        if not name.endswith(".txt") or name in lists or is_class_list(name):
            continue
        other = labels.setdefault(stem_of(name), name)
        if other != name and stem_of(name) in images:
            raise InputError(f"{printable(root)}: {printable(other)} and {printable(name)} are for the same image")
    alone = [name for stem, name in labels.items() if stem not in images and "labels" in name.lower().split("/")]
    if alone:
        raise InputError(f"{printable(root / alone[0])} has no image, and {len(alone) - 1} more label files have none")
    labelled_images = {name for stem, name in images.items() if stem in labels}
    if not labelled_images:
        raise _unlabelled(root, images, labels)
    labelled = {folder_of(name) for name in labelled_images}
    splits = {
        split: NamedSplit(root / entries[0], partial(_images_at, root, names, entries, labelled))
        for split, entries in settings.splits.items()
    }
    if splits:
        used = _images_of_splits(root, splits, labelled_images)
        log_left_out(root, set(_below(names, lists)) - used, _UNLABELLED)
    else:
        used = {name for name in images.values() if folder_of(name) in labelled}
        log_left_out(root, set(images.values()) - used, _UNLABELLED)
    reader = _Labels(root, settings)
    found = [reader.read(name, labels.get(stem)) for stem, name in images.items() if name in used]
    reader.finish()
    return DataFolder(root, coco_content(root, found, settings.classes), splits)


def _unlabelled(root: Path, images: Mapping[str, str], labels: Mapping[str, str]) -> InputError:
    """Return the error of a set without a label file for any image; ``images`` and ``labels`` are files by stem."""
    stems = {PurePosixPath(stem).name for stem in images}
    same = next((name for stem, name in labels.items() if PurePosixPath(stem).name in stems), None)
    advice = f"; {printable(same)} has the name of one: rename its folder to labels" if same else ""
    return InputError(
        f"{printable(root)}: none of its {len(images)} images has a label file: labels/a.txt for images/a.jpg, or "
        f"a.txt beside a.jpg{advice}"
    )


def _images_of_splits(root: Path, splits: Mapping[str, NamedSplit], labelled: Collection[str]) -> set[str]:
    """Return the images of all splits.

    A split of the settings may be empty, as in exports of Roboflow, unless it is the training split or labelled images
    are in no split.

    Raises:
        InputError: a split leads nowhere.
    """
    found = {name: split.read() for name, split in splits.items()}
    used = set[str]().union(*found.values())
    lost = sorted(set(labelled) - used)
    for name, split in splits.items():
        if not found[name] and (lost or name == "train"):
            rest = f", and {len(lost)} labelled images are in no split, such as {printable(lost[0])}" if lost else ""
            raise InputError(
                f"{printable(root)}: the split {name} of the settings leads to {printable(split.path)} and has no "
                f"images{rest}: correct its path, or remove its line"
            )
    return used


def _images_at(root: Path, names: Sequence[str], entries: Sequence[str], labelled: Collection[str]) -> set[str]:
    """Return the images that the entries of a split name: folders, lists of images, and images.

    Images in a subfolder of such a folder belong to the split only if the subfolder has labels.
    """
    found, known = set[str](), set(names)
    for entry in entries:
        if entry in known:
            found |= {entry} if is_image(entry) else images_of_list(root, names, entry)
        folders = {folder_of(f"{entry}/.") if entry else "", *labelled}
        found.update(name for name in _below(names, [entry]) if folder_of(name) in folders)
    return found


def _below(names: Sequence[str], folders: Iterable[str]) -> list[str]:
    """Return the images in the folders and their subfolders."""
    prefixes = tuple(f"{folder}/" if folder else "" for folder in folders)
    return [name for name in names if name.startswith(prefixes) and is_image(name)]


class _Labels:
    """Reader of label files that collects the lines that cannot be used, and counts those that are corrected."""

    def __init__(self, root: Path, settings: YoloSettings) -> None:
        self._root, self._classes, self._keypoints = root, settings.classes, settings.keypoints
        self._problems: list[tuple[str, str]] = []  # file and line, and what is wrong
        self._clipped: list[tuple[str, float, float]] = []  # line, smallest and largest value
        self._files = set[str]()
        self._corners = Counter[int]()  # lines by number of corners, 0 for a box

    def read(self, name: str, label: str | None) -> AnnotatedImage:
        """Read the size and the labels of an image; the data checks report one whose size cannot be read."""
        size = header_size(self._root / name)
        objects = []
        for number, line in read_lines(self._root / label) if label else ():
            where = f"{printable(self._root / str(label))}:{number}"
            try:
                objects.append(self._object(where, line, size or (1, 1)))
            except ValueError as error:
                self._files.add(str(label))
                self._problems.append((where, str(error)))
        return AnnotatedImage(name, size, objects)

    def finish(self) -> None:
        """Log the number of clipped boxes, and how lines with corners are read.

        Raises:
            InputError: there were lines that cannot be used; the message has their number and the first ones.
        """
        problems = [f"{where}: {problem}" for where, problem in self._problems]
        if len(problems) == 1:
            raise InputError(problems[0])
        if problems:
            raise InputError(
                f"{printable(self._root)}: {len(problems)} label lines in {len(self._files)} files cannot be used: "
                f"{listed(problems, separator='; ')}"
            )
        if self._clipped:
            where, *_ = self._clipped[0]
            low, high = min(low for _, low, _ in self._clipped), max(high for *_, high in self._clipped)
            logger.warning(
                "%s: the boxes of %d label lines are clipped to the image, because their values reach from %.3g to "
                "%.3g, first %s",
                printable(self._root),
                len(self._clipped),
                low,
                high,
                where,
            )
        polygons = self._corners.total() - self._corners[0]
        if polygons:
            obb = " All have four corners, as oriented boxes have." if polygons == self._corners[4] else ""
            logger.info(
                "%s: %d of %d labels are polygons, the masks of their objects with model.masks=true.%s",
                printable(self._root),
                polygons,
                self._corners.total(),
                obb,
            )

    def _object(self, where: str, line: str, size: tuple[int, int]) -> dict[str, Any]:
        """Return the object of a line; ``size`` is the (height, width) of the image in pixels.

        Raises:
            ValueError: the line is no label.
        """
        try:
            label, *values = map(float, line.split())
        except ValueError:
            label, values = -1.0, []
        points = self._keypoints[0] * self._keypoints[1] if self._keypoints else 0
        if self._keypoints and len(values) != 4 + points:
            raise ValueError(
                f"{printable(line)} is no label; expected 'class cx cy w h' and {points} values of keypoints, as "
                "kpt_shape says"
            )
        if not (points or len(values) == 4 or (len(values) >= 6 and len(values) % 2 == 0)):
            raise ValueError(f"{printable(line)} is no label; expected 'class cx cy w h' or 'class x1 y1 x2 y2 ...'")
        if label not in range(len(self._classes)):
            raise ValueError(f"class {label:g}, but the classes are 0 to {len(self._classes) - 1}")
        is_box = points > 0 or len(values) == 4
        values = values[:4] if is_box else values
        if not all(is_number(value, -_SLACK, 1 + _SLACK) for value in values) or (
            is_box and min(values[2:]) < -_ROUNDING
        ):
            raise ValueError(f"{printable(line)} has values outside 0 to 1; expected fractions of the image")
        left, top, w, h = _box(values, is_box)
        if min(values) < -_ROUNDING or max(values) > 1 + _ROUNDING:
            self._clipped.append((where, min(values), max(values)))
            right, bottom = min(left + w, 1.0), min(top + h, 1.0)
            left, top = max(left, 0.0), max(top, 0.0)
            w, h = right - left, bottom - top
        height, width = size
        bbox = [left * width, top * height, w * width, h * height]
        area = max(0.0, bbox[2]) * max(0.0, bbox[3])
        found = {"name": self._classes[int(label)], "bbox": bbox, "area": area}
        self._corners[0 if is_box else len(values) // 2] += 1
        if not is_box:
            polygon = [value * side for value, side in zip(values, cycle((width, height)), strict=False)]
            found |= {"segmentation": [polygon], "area": min(polygon_area(polygon), area)}
        return {**found, "iscrowd": 0}


def _box(values: Sequence[float], is_box: bool) -> tuple[float, float, float, float]:
    """Return left, top, width and height of a box given by its centre, or of the box around corners."""
    if is_box:
        x, y, w, h = values
        return x - w / 2, y - h / 2, w, h
    left, top = min(values[::2]), min(values[1::2])
    return left, top, max(values[::2]) - left, max(values[1::2]) - top
