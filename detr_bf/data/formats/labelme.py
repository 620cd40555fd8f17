"""labelme: one JSON file for each image, with the outlines of its objects in ``shapes``.

Format: labelme 5 (https://github.com/wkentaro/labelme); AnyLabeling and X-AnyLabeling write the same keys. Points are x
and y in pixels of the image after its EXIF rotation. A polygon or circle is an object with a mask and the box around
it, a rectangle an object with a box alone. Shapes with one label and one ``group_id`` are one object, which has a mask
if none of them is a rectangle.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.files import is_number, read_json
from detr_bf.common.text import counted, listed, printable
from detr_bf.data.annotation_values import is_id, value_text
from detr_bf.data.formats.folder import AnnotatedImage, DataFolder, coco_content, images_by_stem, is_image, stem_of
from detr_bf.data.image_headers import header_size
from detr_bf.data.masks import FARTHEST, polygon_area
from detr_bf.data.paths import PathIndex

logger = logging.getLogger(__name__)

_TRIED = 5  # files that tell the form of a folder
_KEPT = ("shapes", "imagePath", "imageHeight", "imageWidth")  # not imageData, the photograph itself
_COCO = {"images", "annotations", "categories"}  # keys of its files
_CIRCLE = 64  # corners of the polygon of a circle; a multiple of four, so that its box is that of the circle
_EXPECTED = {  # points of the shapes that are read
    "polygon": "three or more points",
    "rectangle": "two opposite corners",
    "circle": "the centre and a point of the circle",
}
_WITHOUT_AREA = ("line", "linestrip", "point", "points")  # left out


def is_labelme(root: Path, names: Sequence[str]) -> bool:
    """Return True if one of the first JSON files with the name of an image is labelme's, and no other one is COCO's."""
    stems = {PurePosixPath(name).stem for name in names if is_image(name)}
    of_images, others = list[Path](), list[Path]()
    for path in (root / name for name in names if name.lower().endswith(".json")):
        (of_images if path.stem in stems else others).append(path)
    return any("shapes" in _keys(path) for path in of_images[:_TRIED]) and not any(
        path.name.startswith("instances_") or _keys(path) >= _COCO for path in others
    )


def _keys(path: Path) -> set[str]:
    """Return the keys of a JSON file; none if it cannot be read, which the reader reports."""
    with suppress(OSError, ValueError):
        content = read_json(path)
        return set(content) if isinstance(content, dict) else set()
    return set()


def read_labelme(root: Path, names: Sequence[str]) -> DataFolder:
    """Read a folder of labelme's JSON files; other JSON files are left out, with a warning.

    The image of ``a.json`` is ``a`` with the suffix of an image, beside it or in ``images`` instead of ``labels``; if
    there is none, it is ``imagePath``, relative to the JSON file. An image without JSON file is left out. A file
    without shapes makes its image background. Lines and points have no area and are left out, with a warning.

    Args:
        root: of the data set.
        names: its files, relative to the root.

    Raises:
        InputError: a file is not JSON, two files are for the same image, or a shape cannot be used; the message has the
            number of these shapes and the first ones.
    """
    files = {name: content for name in names if name.lower().endswith(".json") and (content := _read(root / name))}
    if others := [name for name in names if name.lower().endswith(".json") and name not in files]:
        logger.warning(
            "%s: %s not of labelme's form and left out: %s",
            printable(root),
            counted(len(others), "JSON file is", "JSON files are"),
            listed(map(printable, others)),
        )
    stems = {stem_of(name) for name in files}
    beside = images_by_stem(root, (name for name in names if stem_of(name) in stems))
    index, images = PathIndex(filter(is_image, names)), dict[str, str]()
    problems, left_out, found = list[str](), Counter[str](), []
    for name, content in files.items():
        image = beside.get(stem_of(name)) or _image_of_path(name, content, index)
        other = images.setdefault(image, name)
        if other != name:
            raise InputError(f"{printable(root)}: {printable(other)} and {printable(name)} are for the same image")
        found.append(_image(root, name, image, content, problems, left_out))
    if problems:
        raise InputError(f"{counted(len(problems), 'shape')} cannot be used: {listed(problems, separator='; ')}")
    if left_out:
        kinds = listed(f"{kind} ({count})" for kind, count in left_out.most_common())
        logger.warning("%s: shapes without area are left out: %s", printable(root), kinds)
    if unlabelled := sum(map(is_image, names)) - len(images.keys() & {*names}):
        logger.info("%s: %d images have no JSON file and are left out", printable(root), unlabelled)
    return DataFolder(root, coco_content(root, found), {})


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a file of labelme; None for any other JSON."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{printable(path)} is not JSON ({error}): mend it, or move it out of the folder") from None
    return {key: content.get(key) for key in _KEPT} if _has_shapes(content) else None


def _has_shapes(content: object) -> bool:
    return isinstance(content, dict) and isinstance(content.get("shapes"), list) and "imagePath" in content


def _image_of_path(name: str, content: Mapping[str, Any], index: PathIndex) -> str:
    """Return the file of ``imagePath``; the data checks report one that is missing."""
    given, folder = content["imagePath"], str(PurePosixPath(name).parent)
    own = PureWindowsPath(given).name if isinstance(given, str) else ""  # of a path of either system
    if own in ("", ".."):
        given = own = PurePosixPath(name).with_suffix(".jpg").name
    return index.find(given, [folder]) or index.find(own, [folder]) or str(PurePosixPath(folder, own))


def _image(
    root: Path, name: str, image: str, content: Mapping[str, Any], problems: list[str], left_out: Counter[str]
) -> AnnotatedImage:
    """Return an image with its objects; append to the problems, and count the shapes that are left out."""
    groups: dict[object, list[tuple[str, str, list[float]]]] = {}  # label, kind, outline
    for number, shape in enumerate(content["shapes"], 1):
        shape = shape if isinstance(shape, dict) else {}
        kind = str(shape.get("shape_type") or "polygon")
        if kind in _WITHOUT_AREA:
            left_out[kind] += 1
            continue
        try:
            label, outline = _label(shape), _outline(kind, shape.get("points"))
        except ValueError as error:
            problems.append(f"{printable(root / name)}: shape {number}: {error}")
            continue
        group = shape.get("group_id")
        groups.setdefault(number if group is None else (label, repr(group)), []).append((label, kind, outline))
    height, width = content.get("imageHeight"), content.get("imageWidth")
    stated = is_id(height, 1) and is_id(width, 1)
    size = (int(height), int(width)) if stated else header_size(root / image)  # type: ignore[arg-type]
    return AnnotatedImage(image, size, [_object(each) for each in groups.values()])


def _label(shape: Mapping[str, Any]) -> str:
    label = shape.get("label")
    if not (isinstance(label, str) and label.strip()):
        raise ValueError(f"label is {value_text(label)}, expected the name of a class")
    return label.strip()


def _outline(kind: str, points: object) -> list[float]:
    """Return x1, y1, x2, y2, ... of the outline of a shape in pixels.

    Raises:
        ValueError: the kind of shape is not read, or the points are not those of such a shape.
    """
    if kind not in _EXPECTED:
        raise ValueError(f"shape_type is {value_text(kind)}, expected {', '.join(_EXPECTED)}: draw it as a polygon")
    pairs = points if isinstance(points, list) else []
    numbers = all(
        isinstance(pair, list) and len(pair) == 2 and all(is_number(each, -FARTHEST, FARTHEST) for each in pair)
        for pair in pairs
    )
    fits = len(pairs) in (2, 4) if kind == "rectangle" else len(pairs) == 2 if kind == "circle" else len(pairs) >= 3
    if not (numbers and fits):
        raise ValueError(
            f"the points of the {kind} are {value_text(points)}, expected {_EXPECTED[kind]}, x and y in pixels"
        )
    if kind != "circle":
        return [float(each) for each in chain.from_iterable(pairs)]
    (x, y), radius = pairs[0], math.dist(*pairs)
    turns = [2 * math.pi * step / _CIRCLE for step in range(_CIRCLE)]
    return [each for turn in turns for each in (x + radius * math.cos(turn), y + radius * math.sin(turn))]


def _object(shapes: Sequence[tuple[str, str, list[float]]]) -> dict[str, Any]:
    """Return the object of the shapes of a group: the box around them, and their outlines as its mask."""
    xs, ys = ([each for *_, outline in shapes for each in outline[first::2]] for first in (0, 1))
    left, top, width, height = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
    found = {"name": shapes[0][0], "bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}
    if all(kind != "rectangle" for _, kind, _ in shapes):
        outlines = [outline for *_, outline in shapes]
        found |= {"segmentation": outlines, "area": min(sum(map(polygon_area, outlines)), width * height)}
    return found
