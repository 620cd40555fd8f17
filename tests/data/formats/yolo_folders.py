"""Folders of the YOLO family, and file names that differ between annotations and disk, as public tools write them.

All images have 20 x 10 pixels. A label is the box 4, 2, 8, 4 (x, y, width, height) unless the row is about another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from tests.data.formats.public_folders import PublicFolder

LINE = "0 0.4 0.4 0.4 0.4"
BOX = ("cat", 4.0, 2.0, 8.0, 4.0)
NAMES = "names: [cat, dog]\n"
LISTED = "data/images/train/a.jpg\n", "data/images/val/b.jpg\n"
COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"  # one name in two Unicode forms


def files(content: dict[str, str | None]) -> Callable[[Path], None]:
    """Return a function that writes text files, and an image for each name without text."""

    def build(folder: Path) -> None:
        for name, text in content.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                Image.new("RGB", (20, 10), (len(name), 80, 9)).save(path)
            else:
                path.write_text(text, encoding="utf-8")

    return build


def coco(*names: str) -> str:
    """Return a COCO file with one box in each image."""
    images = [{"id": n, "file_name": name, "width": 20, "height": 10} for n, name in enumerate(names, 1)]
    boxes = [{"id": n, "image_id": n, "category_id": 1, "bbox": [4, 2, 8, 4]} for n in range(1, len(names) + 1)]
    return json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]})


SPLITS: dict[str, str | None] = {  # of Ultralytics
    "images/train/a.jpg": None,
    "labels/train/a.txt": LINE,
    "images/val/b.jpg": None,
    "labels/val/b.txt": LINE,
}
BESIDE: dict[str, str | None] = {"images/a.jpg": None, "labels/a.txt": LINE}
BOTH = {"images/train/a.jpg": [BOX], "images/val/b.jpg": [BOX]}
ONE = {"images/a.jpg": [BOX]}


def yolo(
    name: str,
    tool: str,
    content: dict[str, str | None],
    boxes: dict[str, list[tuple[str, float, float, float, float]]] | None = None,
    message: str | None = None,
) -> PublicFolder:
    """Return a row."""
    return PublicFolder(name, tool, files(content), boxes, message)


def settings(text: str) -> dict[str, str | None]:
    """Return the folder of Ultralytics with this ``data.yaml``."""
    return {**SPLITS, "data.yaml": text + NAMES}


YOLO_FOLDERS = [
    yolo("relative paths", "Ultralytics", settings("path: .\ntrain: images/train\nval: images/val\n"), BOTH),
    yolo("foreign path", "Ultralytics", settings("path: /home/ann/pets\ntrain: images/train\nval: images/val\n"), BOTH),
    yolo(
        "foreign splits",
        "Ultralytics",
        settings("train: /home/ann/p/images/train\nval: /home/ann/p/images/val\n"),
        BOTH,
    ),
    yolo(
        "splits of Windows",
        "Ultralytics",
        settings("path: D:\\p\ntrain: D:\\p\\images\\train\nval: D:\\p\\images\\val\n"),
        BOTH,
    ),
    yolo("image files", "Ultralytics", settings("train: [images/train/a.jpg]\nval: images/val/b.jpg\n"), BOTH),
    yolo(
        "foreign image files",
        "Ultralytics",
        settings("train: [/x/images/train/a.jpg]\nval: [/x/images/val/b.jpg]\n"),
        BOTH,
    ),
    yolo(
        "foreign list of images",
        "Ultralytics",
        {**settings("train: train.txt\nval: images/val\n"), "train.txt": "/content/p/images/train/a.jpg\n"},
        BOTH,
    ),
    yolo(
        "list of images that are lost",
        "Ultralytics",
        {
            **settings("train: train.txt\nval: images/val\n"),
            "train.txt": "images/train/a.jpg\nlost/1.jpg\nlost/2.jpg\n",
        },
        message=r"train\.txt:2 is lost/1\.jpg, which is no image of .*; so are 2 of 3 lines",
    ),
    yolo(
        "two paths of one image",
        "Ultralytics",
        {**settings("train: train.txt\nval: images/val\n"), "train.txt": "p/a/c.jpg\np/b/c.jpg\n", "c.jpg": None},
        message=r"p/a/c\.jpg and p/b/c\.jpg would both be the file c\.jpg",
    ),
    yolo(
        "another YAML file",
        "Ultralytics",
        {**SPLITS, "coco128.yaml": f"train: images/train\nval: images/val\n{NAMES}"},
        BOTH,
    ),
    yolo(
        "two YAML files",
        "Ultralytics",
        {**SPLITS, "a.yaml": f"train: images/train\n{NAMES}", "b.yaml": f"train: images/val\n{NAMES}"},
        message=r"several YAML files with class names and splits: a\.yaml, b\.yaml\. Rename",
    ),
    yolo(
        "pose of two values a point",
        "Ultralytics",
        {**BESIDE, "data.yaml": f"kpt_shape: [3, 2]\n{NAMES}", "labels/a.txt": f"{LINE} 0.1 0.2 0.3 0.4 0.5 0.6"},
        ONE,
    ),
    yolo(
        "pose of three values a point",
        "Ultralytics",
        {**BESIDE, "data.yaml": f"kpt_shape: [2, 3]\n{NAMES}", "labels/a.txt": f"{LINE} 0.1 0.2 2 0 0 0"},
        ONE,
    ),
    yolo(
        "pose with another number of points",
        "Ultralytics",
        {**BESIDE, "data.yaml": f"kpt_shape: [3, 2]\n{NAMES}", "labels/a.txt": f"{LINE} 0.1 0.2"},
        message=r"a\.txt:1: .* is no label; expected 'class cx cy w h' and 6 values of keypoints",
    ),
    yolo(
        "polygons",
        "Ultralytics",
        {**BESIDE, "data.yaml": NAMES + "train: images\n", "labels/a.txt": "0 0.2 0.3 0.6 0.2 0.5 0.6"},
        ONE,
    ),
    yolo(
        "oriented boxes",
        "Ultralytics",
        {**BESIDE, "classes.txt": "cat\n", "labels/a.txt": "0 0.2 0.4 0.4 0.2 0.6 0.4 0.4 0.6"},
        ONE,
    ),
    yolo(
        "data.yaml beside the splits",
        "Roboflow",
        {
            "train/images/a.jpg": None,
            "train/labels/a.txt": LINE,
            "valid/images/b.jpg": None,
            "valid/labels/b.txt": "",
            "data.yaml": f"train: ../train/images\nval: ../valid/images\n{NAMES}",
        },
        {"train/images/a.jpg": [BOX], "valid/images/b.jpg": []},
    ),
    yolo(
        "Darknet labels",
        "Roboflow",
        {"train/a.jpg": None, "train/a.txt": LINE, "train/_darknet.labels": "cat\ndog\n"},
        {"train/a.jpg": [BOX]},
    ),
    yolo(
        "Ultralytics format with lists",
        "CVAT",
        {
            **settings("path: .\ntrain: train.txt\nval: val.txt\n"),
            **dict(zip(("train.txt", "val.txt"), LISTED, strict=True)),
        },
        BOTH,
    ),
    yolo(
        "YOLO 1.1",
        "CVAT",
        {
            "obj.names": "cat\ndog\n",
            "obj.data": "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n",
            "train.txt": "data/obj_train_data/a.jpg\ndata/obj_train_data/b.jpg\n",
            "obj_train_data/a.jpg": None,
            "obj_train_data/a.txt": LINE,
            "obj_train_data/b.jpg": None,
            "obj_train_data/b.txt": "",
        },
        {"obj_train_data/a.jpg": [BOX], "obj_train_data/b.jpg": []},
    ),
    yolo(
        "data and names in a folder",
        "Darknet",
        {
            "data/obj.names": "cat\n",
            "data/obj.data": "classes=1\ntrain=data/train.txt\nvalid=data/test.txt\nnames=data/obj.names\n",
            "data/train.txt": "data/img/a.jpg\n",
            "data/test.txt": "data/img/b.jpg\n",
            "data/img/a.jpg": None,
            "data/img/a.txt": LINE,
            "data/img/b.jpg": None,
        },
        {"data/img/a.jpg": [BOX], "data/img/b.jpg": []},
    ),
    yolo(
        "labels beside the images", "LabelImg", {"a.jpg": None, "a.txt": LINE, "classes.txt": "cat\n"}, {"a.jpg": [BOX]}
    ),
    yolo("YOLO", "Label Studio", {**BESIDE, "classes.txt": "cat\n", "notes.json": '{"categories": []}'}, ONE),
    yolo(
        "raw photographs in another folder",
        "any",
        {**BESIDE, "classes.txt": "cat\n", "raw/1.jpg": None, "raw/2.jpg": None, "images/c.jpg": None},
        {**ONE, "images/c.jpg": []},
    ),
    yolo(
        "background in a folder that data.yaml names",
        "Ultralytics",
        {**SPLITS, "none/c.jpg": None, "none/raw/d.jpg": None, "data.yaml": f"train: [images/train, none]\n{NAMES}"},
        {"images/train/a.jpg": [BOX], "none/c.jpg": []},
    ),
    yolo(
        "background in the folder of data.yaml",
        "Ultralytics",
        {
            "set/a.jpg": None,
            "set/a.txt": LINE,
            "b.jpg": None,
            "raw/c.jpg": None,
            "data.yaml": f"path: ../p\ntrain: .\n{NAMES}",
        },
        {"set/a.jpg": [BOX], "b.jpg": []},
    ),
    yolo(
        "values slightly outside",
        "any",
        {**BESIDE, "classes.txt": "cat\n", "labels/a.txt": "0 0.5 0.5 1.03 0.4\n0 -0.008 0.2 0.8 0.2 0.8 0.5\n"},
        {"images/a.jpg": [("cat", 0, 3, 20, 4), ("cat", 0, 2, 16, 3)]},
    ),
    yolo(
        "pixels instead of fractions",
        "any",
        {**BESIDE, "classes.txt": "cat\n", "labels/a.txt": "0 8 4 8 4\n0 8 4 2 2\n"},
        message=r"2 label lines in 1 files cannot be used: .*a\.txt:1: 0 8 4 8 4 has values outside 0 to 1.*a\.txt:2",
    ),
    yolo(
        "images of one name in two suffixes",
        "any",
        {"a.png": None, "a.PNG": None, "a.txt": LINE, "classes.txt": "cat\n"},
        message=r"the labels of a\.PNG and a\.png would be in the same file: rename or remove one of the images",
    ),
    yolo(
        "accents in two Unicode forms",
        "any (macOS)",
        {f"images/{COMPOSED}.jpg": None, f"labels/{DECOMPOSED}.txt": LINE, "classes.txt": "cat\n"},
        {f"images/{COMPOSED}.jpg": [BOX]},
    ),
    yolo(
        "upper-case suffix and number sign",
        "any",
        {"images/set #1/a#2.JPG": None, "labels/set #1/a#2.txt": LINE, "classes.txt": "cat\n"},
        {"images/set #1/a#2.JPG": [BOX]},
    ),
]
NAMED_FILES = [
    yolo(
        "COCO with upload paths of Windows",
        "Label Studio",
        {
            "result.json": coco("..\\..\\upload\\4\\x.png", "..\\..\\upload\\4\\y.png"),
            "images/x.png": None,
            "images/y.png": None,
        },
        {"images/x.png": [BOX], "images/y.png": [BOX]},
    ),
    yolo(
        "COCO with absolute paths",
        "Label Studio",
        {"result.json": coco("/data/upload/4/x%20y.png"), "images/x y.png": None},
        {"images/x y.png": [BOX]},
    ),
    yolo(
        "COCO with backslashes",
        "any (Windows)",
        {"train.json": coco("train\\x.png", "train\\y.png"), "images/train/x.png": None, "images/train/y.png": None},
        {"images/train/x.png": [BOX], "images/train/y.png": [BOX]},
    ),
    yolo(
        "COCO with paths that lead nowhere",
        "any",
        {"train.json": coco("../../a/x.png", "../../a/y.png"), "images/z.png": None},
        message=r"\.\./\.\./a/x\.png leads out of the folder, and no end of it is inside; so are 2 of 2 images",
    ),
    yolo(
        "COCO with two paths of one name",
        "any",
        {"train.json": coco("/a/x.png", "/b/x.png"), "images/x.png": None},
        message=r"/a/x\.png and /b/x\.png would both be the file images/x\.png",
    ),
    yolo(
        "COCO with accents in another Unicode form",
        "any (macOS)",
        {"train.json": coco(f"{DECOMPOSED}.png"), f"images/{COMPOSED}.png": None},
        {f"images/{COMPOSED}.png": [BOX]},
    ),
    yolo(
        "COCO with the suffix in another case",
        "any",
        {"train.json": coco("x.png", "y.png"), "images/x.PNG": None, "images/y.png": None, "images/y.PNG": None},
        {"images/x.PNG": [BOX], "images/y.png": [BOX]},
    ),
    yolo(
        "table with paths of Windows, raw photographs in another folder",
        "any",
        {
            "labels.csv": "path,class,xmin,ymin,xmax,ymax\nC:\\p\\a.jpg,cat,4,2,12,6\nC:\\p\\c.jpg,,,,,\n",
            "images/a.jpg": None,
            "images/b.jpg": None,
            "images/c.jpg": None,
            "raw/1.jpg": None,
        },
        {"images/a.jpg": [BOX], "images/b.jpg": [], "images/c.jpg": []},
    ),
]
