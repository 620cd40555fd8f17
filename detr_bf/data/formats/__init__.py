"""Data set folders in other forms than COCO files: readers that return the same content, and repeatable splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

from detr_bf.common.errors import InputError
from detr_bf.common.files import is_folder
from detr_bf.common.text import printable
from detr_bf.data.coco import CocoAnnotations
from detr_bf.data.formats.coco_files import read_coco
from detr_bf.data.formats.csv_labels import TABLES, read_csv
from detr_bf.data.formats.folder import MASK_SPLITS, DataFolder, files_below, images_of
from detr_bf.data.formats.foreign import check_foreign
from detr_bf.data.formats.labelme import is_labelme, read_labelme
from detr_bf.data.formats.roboflow import ANNOTATION_FILE
from detr_bf.data.formats.splitting import divided, readable, split_images
from detr_bf.data.formats.voc import read_voc
from detr_bf.data.formats.yolo import read_yolo
from detr_bf.data.formats.yolo_settings import CLASS_LIST, SETTINGS, is_yolo

__all__ = [
    "MASK_SPLITS",
    "READERS",
    "DataFolder",
    "divided",
    "images_of",
    "read_folder",
    "read_split",
    "readable",
    "split_images",
]

READERS: dict[str, Callable[[Path, Sequence[str]], DataFolder]] = {  # by the setting data.format
    "coco": read_coco,
    "csv": read_csv,
    "labelme": read_labelme,
    "voc": read_voc,
    "yolo": read_yolo,
}
_FORM_NAMES = {
    "coco": "COCO JSON",
    "csv": "CSV table",
    "labelme": "labelme JSON",
    "voc": "Pascal VOC",
    "yolo": "YOLO",
}
_SUFFIXES = {"voc": ".xml", "yolo": ".txt"}  # of files that another form may have, too
_FORMS = (
    f"expected COCO JSON, {ANNOTATION_FILE} of Roboflow, XML files of Pascal VOC, {SETTINGS[0]} or labels/*.txt of "
    f"YOLO, JSON files of labelme, or {TABLES[0]}"
)


@lru_cache(maxsize=4)  # a run needs both splits several times; the folder is read once in a process
def read_folder(root: Path, form: str = "auto") -> DataFolder:
    """Read the folder of a data set.

    Args:
        root: of the data set.
        form: a name in :data:`READERS`, or ``auto`` to tell it from the names of the files.

    Raises:
        InputError: the folder does not exist, or it cannot be read in this form.
    """
    if not is_folder(root):
        raise InputError(
            f"folder {printable(root)} does not exist: give data.root=DIR of a COCO, Roboflow, Pascal VOC, YOLO, "
            "labelme or CSV folder (docs/data.md says how to get the data of configs/bccd.yaml and configs/cards.yaml)"
        )
    names = files_below(root)
    form = form if form != "auto" else _form_of(root, names)
    exported = form == "coco" and any(PurePosixPath(name).name == ANNOTATION_FILE for name in names)
    return replace(READERS[form](root, names), form="Roboflow (COCO JSON)" if exported else _FORM_NAMES[form])


@lru_cache(maxsize=8)
def read_split(root: Path, form: str, name: str) -> CocoAnnotations:
    """Return one split of a folder, see :func:`read_folder` and :meth:`DataFolder.split`."""
    return read_folder(root, form).split(name)


def _form_of(root: Path, names: Sequence[str]) -> str:
    paths = [PurePosixPath(name) for name in names]
    signs = {
        "coco": any(path.name == ANNOTATION_FILE for path in paths),
        "csv": any(path.name in TABLES for path in paths),
        "voc": any(path.suffix.lower() == ".xml" for path in paths),
        "yolo": any(
            str(path) in SETTINGS or path.name == CLASS_LIST or (path.suffix == ".txt" and "labels" in path.parts)
            for path in paths
        ),
    }
    found = [form for form, present in signs.items() if present]
    if not found:  # files that other forms may have beside their labels
        json = any(path.suffix.lower() == ".json" for path in paths)
        weak = {"yolo": is_yolo(root, names), ("labelme" if json and is_labelme(root, names) else "coco"): json}
        found = [form for form, present in weak.items() if present]
    if not found:
        check_foreign(root, names)
        raise InputError(f"{printable(root)} has no labels: {_FORMS}")
    if len(found) > 1:
        raise InputError(f"{printable(root)} could be of the forms {', '.join(found)}: give data.format")
    if suffix := _SUFFIXES.get(found[0]):
        check_foreign(root, [name for name in names if name.lower().endswith(suffix)])
    return found[0]
