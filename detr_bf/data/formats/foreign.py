"""Forms of labels that are recognised but not read, with a way to convert each of them.

Packages that read them are no extras, because a data set is converted once: the messages give the line of Python that
does it with supervision (CreateML) or datumaro (CVAT, KITTI, Open Images, VoTT, TFRecord).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.files import read_json, read_regular
from detr_bf.common.text import printable
from detr_bf.data.formats.csv_labels import BOXES, TABLES
from detr_bf.data.formats.folder import MAX_TEXT_BYTES, read_lines

_TRIED = 5  # files of a kind that are looked at
_NUMBER = r"-?\d+(\.\d+)?"
_KITTI = re.compile(rf"[A-Za-z]\S*( {_NUMBER}){{14,15}}")
_DOTA = re.compile(rf"({_NUMBER} ){{8}}\S*[A-Za-z]\S* \d")
_TFRECORD = re.compile(r"\.(tfrecords?|record)(-\d+-of-\d+)?$")
_OPEN_IMAGES = {"imageid", "labelname", "xmin"}


def _datumaro(form: str, package: str = "datumaro") -> str:
    return (
        f'run pip install {package}, then in Python datumaro.Dataset.import_from("DIR", "{form}")'
        '.export("OUT", "coco_instances", save_media=True)'
    )


def _supervision(call: str) -> str:
    return (
        f"run pip install supervision, then in Python supervision.DetectionDataset.{call}"
        '.as_coco(annotations_path="DIR/annotations.json")'
    )


_RENAME = f"rename it to {TABLES[0]}, in the folder of the images or beside a folder images"
ADVICE = {
    "CreateML": _supervision('from_createml("DIR", "DIR/FILE.json")'),
    "CVAT for images": f"export the task from CVAT as COCO, or {_datumaro('cvat')}",
    "Datumaro": _datumaro("datumaro"),
    "Detectron2": "register the list in DatasetCatalog, then in Python "
    'detectron2.data.datasets.convert_to_coco_json("NAME", "annotations.json")',
    "DOTA": "write each line as a YOLO label with corners, class x1 y1 x2 y2 x3 y3 x4 y4, into a folder labels, with a "
    "number as class, x divided by the width of the image and y by its height",
    "FiftyOne": 'in Python fiftyone.Dataset.from_dir(dataset_dir="DIR", dataset_type=fiftyone.types.FiftyOneDataset)'
    '.export(export_dir="OUT", dataset_type=fiftyone.types.COCODetectionDataset)',
    "KITTI": _datumaro("kitti_detection"),
    "Label Studio": "export the project from Label Studio as COCO or YOLO with images",
    "MMDetection": "write it as COCO; its boxes are x1, y1, x2, y2, those of COCO x, y, width, height",
    "Open Images": f"move the tables to annotations and the images to images/train, and {_datumaro('open_images')}",
    "Supervisely": "export the project from Supervisely with its app Export to COCO",
    "TFRecord": f"export the data as COCO or Pascal VOC, or {_datumaro('tf_detection_api', repr('datumaro[tf]'))}",
    "VIA": "export the project from VIA with Annotation, Export Annotations (COCO format)",
    "VoTT": f"export the project from VoTT as Pascal VOC, or {_datumaro('vott_json')}",
    "a table of another name": _RENAME,
    "a table with boxes in one column": "write the column bbox as x, y, width and height, add columns filename and "
    f"class, and {_RENAME}",
    "a table without header": "add a first line with the names of its columns, such as "
    f"filename,xmin,ymin,xmax,ymax,class, and {_RENAME}",
}


def check_foreign(root: Path, names: Sequence[str]) -> None:
    """Raise an :class:`InputError` that says how to convert the labels if a file is in a form that is not read.

    Args:
        root: of the data set.
        names: files to look at, relative to the root; of each kind only the first ones are read.
    """
    for suffix, form_of in _FORMS.items():
        for name in [name for name in names if PurePosixPath(name).suffix.lower() == suffix][:_TRIED]:
            form = None
            with suppress(InputError, OSError, ValueError):  # the readers report files that cannot be read
                form = form_of(root / name)
            if form:
                raise _not_read(root / name, form)
    if records := [name for name in names if _TFRECORD.search(name)]:
        raise _not_read(root / records[0], "TFRecord")


def _not_read(path: Path, form: str) -> InputError:
    return InputError(f"{printable(path)} is not read, its form is {form}: {ADVICE[form]}")


def _form_of_xml(path: Path) -> str | None:
    text = read_regular(path, MAX_TEXT_BYTES)
    return "CVAT for images" if b"<annotations>" in text[:1000] else None


def _form_of_lines(path: Path) -> str | None:
    lines = [line for _, line in read_lines(path)]
    if any(map(_KITTI.fullmatch, lines)):
        return "KITTI"
    return "DOTA" if any(map(_DOTA.fullmatch, lines)) else None


def _form_of_json(path: Path) -> str | None:
    content = read_json(path, MAX_TEXT_BYTES)
    keys = _KEYS_OF_LISTS if isinstance(content, list) else _KEYS_OF_OBJECTS
    first: Any = next(iter(content), None) if isinstance(content, list) else content
    if not isinstance(first, Mapping):
        return None
    values = [value for value in first.values() if isinstance(value, Mapping)] if first is content else []
    if any({"filename", "regions"} <= value.keys() for value in values):
        return "VIA"
    return next((form for needed, form in keys if needed <= first.keys()), None)


def _form_of_table(path: Path) -> str | None:
    lines = read_lines(path)
    head = next(csv.reader([lines[0][1]], delimiter=max(",;\t", key=lines[0][1].count))) if lines else []
    columns = {name.strip().lower() for name in head}
    if columns >= _OPEN_IMAGES:
        return "Open Images"
    if "region_shape_attributes" in columns:
        return "VIA"
    if {"annotation_id", "annotator"} <= columns:
        return "Label Studio"
    if any(set(each) <= columns for each in BOXES):
        return "a table of another name"
    if "bbox" in columns:
        return "a table with boxes in one column"
    numbers = sum(bool(re.fullmatch(_NUMBER, name)) for name in columns)
    return "a table without header" if numbers >= 3 else None


_KEYS_OF_LISTS: list[tuple[set[str], str]] = [
    ({"image", "annotations"}, "CreateML"),
    ({"file_name", "annotations"}, "Detectron2"),
    ({"filename", "ann"}, "MMDetection"),
    ({"data", "annotations"}, "Label Studio"),
    ({"image", "annotator"}, "Label Studio"),
]
_KEYS_OF_OBJECTS: list[tuple[set[str], str]] = [
    ({"_via_img_metadata"}, "VIA"),
    ({"assets", "tags"}, "VoTT"),
    ({"asset", "regions"}, "VoTT"),
    ({"objects", "size", "tags"}, "Supervisely"),
    ({"classes", "tags", "projectType"}, "Supervisely"),
    ({"data_list", "metainfo"}, "MMDetection"),
    ({"media_type", "sample_fields"}, "FiftyOne"),
    ({"categories", "items"}, "Datumaro"),
]
_FORMS: dict[str, Callable[[Path], str | None]] = {
    ".xml": _form_of_xml,
    ".json": _form_of_json,
    ".txt": _form_of_lines,
    ".csv": _form_of_table,
}
