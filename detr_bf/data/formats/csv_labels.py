"""A folder of images with a table of their objects, one row for each: ``labels.csv``, or Roboflow's CSV export."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.files import read_regular
from detr_bf.common.text import printable
from detr_bf.data.formats.folder import MAX_TEXT_BYTES, AnnotatedImage, DataFolder, coco_content, is_image, log_left_out
from detr_bf.data.image_headers import header_size
from detr_bf.data.paths import PathIndex

TABLES = ("labels.csv", "annotations.csv", "_annotations.csv")
_FILE = ("filename", "file", "file_name", "image", "image_path", "path")
_CLASS = ("class", "label", "name", "class_name", "category")
_CORNERS = (
    ("xmin", "ymin", "xmax", "ymax"),
    ("x0", "y0", "x1", "y1"),
    ("x1", "y1", "x2", "y2"),
    ("left", "top", "right", "bottom"),
)
_EXTENTS = (("x", "y", "width", "height"), ("x", "y", "w", "h"), ("left", "top", "width", "height"))
BOXES = (*_CORNERS, *_EXTENTS)  # names of the columns
_EXPECTED = (
    "expected a header with a file name (filename, file, image, path), a class (class, label, name) and a box in "
    "pixels (xmin, ymin, xmax, ymax, or x, y, width, height)"
)


def read_csv(root: Path, names: Sequence[str]) -> DataFolder:
    """Read the tables of a folder.

    The files that a table names are beside it, or in the folder ``images`` beside it. A row without box names an image
    without objects. An image without a row is background if a row names another image of its folder; the images of
    other folders are left out.

    Args:
        root: of the data set.
        names: its files, relative to the root.

    Raises:
        InputError: there is no table, or a row cannot be used; the message names table and line.
    """
    tables = [name for name in names if PurePosixPath(name).name in TABLES]
    if not tables:
        raise InputError(f"{printable(root)} has no {', '.join(TABLES[:2])} (a table of the objects)")
    folders = [PurePosixPath(name).parent for name in tables]
    if len({*folders}) < len(folders):
        raise InputError(f"{printable(root)} has two tables in one folder: {', '.join(map(printable, tables))}")
    objects: dict[str, list[dict[str, Any]]] = {name: [] for name in names if is_image(name)}
    index, labelled = PathIndex(objects), set()
    for table, folder in zip(tables, folders, strict=True):
        where, rows = printable(root / table), _rows(root / table, printable(root / table))
        if unnamed := next((line for line, file, _ in rows if not file), None):
            raise InputError(f"{where}:{unnamed} names no file")
        try:
            found = index.find_all([file for _, file, _ in rows], [str(folder), str(folder / "images")])
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        if lost := [row for row, name in zip(rows, found, strict=True) if name is None]:
            line, file, _ = lost[0]
            beside, below = printable(folder / file), printable(folder / "images" / file)
            raise InputError(
                f"{where}:{line}: there is no image {beside}, nor {below}; so are {len(lost)} of {len(rows)} rows: "
                "add the images, or remove the rows"
            )
        for (_, _, one), name in zip(rows, found, strict=True):
            assert name is not None, "others are refused"
            objects[name] += [one] if one else []
            labelled.add(PurePosixPath(name).parent)
    used = {name: each for name, each in objects.items() if PurePosixPath(name).parent in labelled}
    log_left_out(root, objects.keys() - used.keys(), "no row names an image of their folders")
    images = [AnnotatedImage(name, header_size(root / name), found) for name, found in used.items()]
    boxes = [(one["bbox"], image.size) for image in images for one in image.objects]
    of_images = all(size and sorted(box[2:]) == sorted(size) for box, size in boxes)
    if of_images and any(box[0] > 0 or box[1] > 0 for box, _ in boxes):
        raise InputError(
            f"{printable(root)}: width and height of every row of {', '.join(map(printable, tables))} are those of the "
            "image, expected those of the box: add columns of the box, such as xmin, ymin, xmax, ymax"
        )
    return DataFolder(root, coco_content(root, images), {})


def _box_columns(where: str, names: Collection[str]) -> tuple[str, ...] | None:
    """Return the names of the columns of the box, None if there are none.

    Raises:
        InputError: two sets of columns may be the box.
    """
    found = [each for each in BOXES if set(each) <= {*names}]
    if len(found) > 1:
        sets = " and ".join(", ".join(each) for each in found)
        raise InputError(
            f"{where} has several sets of columns that may be the box: {sets}; rename or remove those that are not, "
            "such as width and height of the image"
        )
    return found[0] if found else None


def _rows(path: Path, where: str) -> list[tuple[int, str, dict[str, Any] | None]]:
    """Return line, file name and object (None without a box) of each row."""
    try:
        text = read_regular(path, MAX_TEXT_BYTES).decode("utf-8-sig")
        head = text.split("\n", 1)[0]
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count), strict=True)
        rows = [(reader.line_num, row) for row in reader if any(row.values())]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{where} cannot be used: {printable(error)}; {_EXPECTED}") from error
    columns = {(name or "").strip().lower(): name for name in reader.fieldnames or ()}
    file, kind = (next((columns[each] for each in known if each in columns), None) for known in (_FILE, _CLASS))
    box = _box_columns(where, columns)
    if file is None or kind is None or box is None:
        whole = "; write the column bbox as four columns x, y, width, height" if "bbox" in columns and not box else ""
        raise InputError(f"{where} has the columns {printable(', '.join(columns))}; {_EXPECTED}{whole}")
    sides = [columns[each] for each in box]
    if longer := next((line for line, row in rows if row.get(None)), None):
        raise InputError(f"{where}:{longer} has more fields than the header")
    return [
        (line, _text(row, file), _object(f"{where}:{line}", row, kind, sides, box in _CORNERS)) for line, row in rows
    ]


def _object(
    where: str, row: Mapping[str, Any], kind: str, sides: Sequence[str], corners: bool
) -> dict[str, Any] | None:
    texts, name = [_text(row, side) for side in sides], _text(row, kind)
    if not any(texts):
        return None
    try:
        values = [float(text) for text in texts]
    except ValueError:
        values = [math.nan]
    if not name:
        raise InputError(f"{where} has a box and no class")
    if not all(map(math.isfinite, values)):
        raise InputError(f"{where} has the box {printable(', '.join(texts))}, expected four numbers")
    x, y, width, height = values
    if corners:
        width, height = width - x, height - y
    return {"name": name, "bbox": [x, y, width, height], "area": max(0.0, width) * max(0.0, height), "iscrowd": 0}


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    return value.strip() if isinstance(value, str) else ""
