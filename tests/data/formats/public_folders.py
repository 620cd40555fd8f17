"""Small folders of labels in the forms that public tools write, one function for each form.

All have the boxes of :data:`BOXES`. The files are made here, none is downloaded; the forms are those of the tools'
documentation.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

Box = tuple[str, float, float, float, float]  # class, x, y, width, height in pixels
Boxes = dict[str, list[Box]]

SIZES = {"one.jpg": (100, 80), "two.jpg": (80, 60)}  # width, height
BOXES: Boxes = {
    "one.jpg": [("cat", 10, 20, 30, 40), ("dog", 50, 10, 40, 25)],
    "two.jpg": [("dog", 45, 30, 25, 20)],
}
CLASSES = ("cat", "dog")


@dataclass(frozen=True)
class PublicFolder:
    """Folder of labels as a tool writes it, and its boxes, or the message that refuses it."""

    name: str
    tool: str
    build: Callable[[Path], None]
    boxes: Boxes | None = None  # by the name of the image file without its folder
    message: str | None = None  # regular expression


def put_image(path: Path) -> None:
    """Write the image of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = SIZES[path.name]
    Image.effect_noise((width, height), 80).convert("RGB").save(path)


def put(path: Path, content: object) -> None:
    """Write text as it is, and anything else as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def images(folder: Path, names: Iterable[str] = SIZES) -> None:
    for name in names:
        put_image(folder / name)


def scaled(name: str, box: Box) -> tuple[float, float, float, float]:
    """Return x, y, width, height as fractions of the image."""
    (width, height), (_, x, y, w, h) = SIZES[name], box
    return x / width, y / height, w / width, h / height


def corners(box: Box) -> list[float]:
    _, x, y, w, h = box
    return [x, y, x + w, y + h]


# COCO


def coco(
    names: Iterable[str] = SIZES, prefix: str = "", box: Callable[[str, Box], Iterable[float]] = lambda _, b: b[1:]
) -> dict[str, Any]:
    """Return the content of a COCO file; ``box`` returns the four numbers of ``bbox``."""
    content: dict[str, Any] = {
        "info": {"description": "made"},
        "licenses": [],
        "images": [],
        "annotations": [],
        "categories": [{"id": 1, "name": "cat", "supercategory": ""}, {"id": 2, "name": "dog", "supercategory": ""}],
    }
    for name in names:
        image_id = list(SIZES).index(name) + 1
        size = {"width": SIZES[name][0], "height": SIZES[name][1]}
        content["images"].append({"id": image_id, "file_name": prefix + name, **size})
        for each in BOXES[name]:
            content["annotations"].append(
                {
                    "id": 10 * image_id + len(content["annotations"]),
                    "image_id": image_id,
                    "category_id": CLASSES.index(each[0]) + 1,
                    "bbox": list(box(name, each)),
                    "area": each[3] * each[4],
                    "iscrowd": 0,
                    "segmentation": [],
                }
            )
    return content


def coco_file(root: Path, file: str, folder: str, **options: Any) -> None:
    put(root / file, coco(**options))
    images(root / folder)


def coco_official(root: Path) -> None:
    for name, split in (("one.jpg", "train2017"), ("two.jpg", "val2017")):
        images(root / split, [name])
        put(root / f"annotations/instances_{split}.json", coco([name]))
        caption = {"id": 1, "image_id": 1, "caption": "an animal"}
        put(root / f"annotations/captions_{split}.json", {**coco([name]), "annotations": [caption]})


def coco_of_roboflow(root: Path) -> None:
    for name, split in (("one.jpg", "train"), ("two.jpg", "valid")):
        images(root / split, [name])
        content = coco([name])
        content["categories"] = [{"id": 0, "name": "animals", "supercategory": "none"}, *content["categories"]]
        for each in content["categories"][1:]:
            each["supercategory"] = "animals"
        put(root / split / "_annotations.coco.json", content)
    put(root / "README.dataset.txt", "made\n")


def coco_of_mmdetection(root: Path) -> None:
    for name, split in (("one.jpg", "train"), ("two.jpg", "val")):
        images(root / split, [name])
        put(root / split / "annotation_coco.json", coco([name]))


# Pascal VOC


def voc(name: str, *, folder: str = "JPEGImages") -> str:
    """Return an XML file: coordinates count from 1, and the last pixel is included."""
    objects = "".join(
        f"<object><name>{kind}</name><pose>Unspecified</pose><truncated>0</truncated><difficult>0</difficult><bndbox>"
        f"<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
        for kind, x, y, w, h in BOXES[name]
    )
    width, height = SIZES[name]
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><folder>{folder}</folder><filename>{name}</filename>{size}{objects}</annotation>"


def voc_folder(root: Path, labels: str, pictures: str, **files: str) -> None:
    """Write XML files and images into two folders, and text files ``stem="content"`` into ImageSets/Main."""
    for name in SIZES:
        put(root / labels / f"{Path(name).stem}.xml", voc(name))
    images(root / pictures)
    for stem, content in files.items():
        put(root / "ImageSets/Main" / f"{stem}.txt", content)


def voc_of_cvat(root: Path) -> None:
    voc_folder(root, "Annotations", "JPEGImages", default="one\ntwo\n")
    put(root / "labelmap.txt", "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncat:128,0,0::\ndog:0,128,0::\n")


def voc_of_labelme(root: Path) -> None:
    voc_folder(root, "Annotations", "JPEGImages")
    images(root / "AnnotationsVisualization")
    put(root / "class_names.txt", "_background_\ncat\ndog\n")


def voc_of_roboflow(root: Path) -> None:
    for name, split in (("one.jpg", "train"), ("two.jpg", "valid")):
        images(root / split, [name])
        put(root / split / f"{Path(name).stem}.xml", voc(name, folder=""))


def voc_with_subfolders(root: Path) -> None:
    for name, split in (("one.jpg", "train"), ("two.jpg", "val")):
        images(root / "JPEGImages" / split, [name])
        put(root / "Annotations" / split / f"{Path(name).stem}.xml", voc(name))


# CSV


def rows(names: Iterable[str], columns: Iterable[str], row: Callable[[str, Box], Iterable[object]]) -> str:
    """Return a table with a row for each box; no header without columns."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([[*columns]] if columns else [])
    writer.writerows([[*row(name, box)] for name in names for box in BOXES[name]])
    return text.getvalue()


def csv_of_tensorflow(names: Iterable[str]) -> str:
    columns = ("filename", "width", "height", "class", "xmin", "ymin", "xmax", "ymax")
    return rows(names, columns, lambda name, box: (name, *SIZES[name], box[0], *corners(box)))


def csv_of_roboflow(root: Path) -> None:
    for name, split in (("one.jpg", "train"), ("two.jpg", "valid")):
        images(root / split, [name])
        put(root / split / "_annotations.csv", csv_of_tensorflow([name]))


def csv_file(
    root: Path,
    file: str,
    columns: Iterable[str],
    row: Callable[[str, Box], Iterable[object]],
    folder: str = "images",
) -> None:
    images(root / folder)
    put(root / file, rows(SIZES, columns, row))


def fractions(name: str, box: Box) -> tuple[object, ...]:
    x, y, w, h = scaled(name, box)
    return name, box[0], x, y, x + w, y + h


def kaggle_wheat(name: str, box: Box) -> tuple[object, ...]:
    return Path(name).stem, *SIZES[name], str([float(value) for value in box[1:]]), "usask_1"


def via_row(name: str, box: Box) -> tuple[object, ...]:
    kind, x, y, w, h = box
    shape = json.dumps({"name": "rect", "x": x, "y": y, "width": w, "height": h})
    return name, 1234, "{}", len(BOXES[name]), BOXES[name].index(box), shape, json.dumps({"class": kind})


def label_studio_row(name: str, box: Box) -> tuple[object, ...]:
    return 1, f"/data/upload/1/{name}", json.dumps([label_studio_value(name, box)]), 1, 1, "2026-11-27"


def openimages(root: Path) -> None:
    images(root / "train")
    columns = (
        "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside"
    )

    def row(name: str, box: Box) -> tuple[object, ...]:
        x, y, w, h = scaled(name, box)
        return Path(name).stem, "xclick", f"/m/{box[0]}", 1, x, x + w, y, y + h, 0, 0, 0, 0, 0

    put(root / "annotations/train-annotations-bbox.csv", rows(SIZES, columns.split(","), row))
    put(root / "annotations/class-descriptions-boxable.csv", "/m/cat,cat\n/m/dog,dog\n")


# Others


def cvat_xml(root: Path) -> None:
    found = []
    for number, (name, boxes) in enumerate(BOXES.items()):
        width, height = SIZES[name]
        shapes = "".join(
            f'<box label="{each[0]}" source="manual" occluded="0" xtl="{x0:.2f}" ytl="{y0:.2f}" xbr="{x1:.2f}" '
            f'ybr="{y1:.2f}" z_order="0"></box>'
            for each in boxes
            for x0, y0, x1, y1 in [corners(each)]
        )
        found.append(f'<image id="{number}" name="{name}" width="{width}" height="{height}">{shapes}</image>')
    labels = "".join(f"<label><name>{kind}</name><attributes></attributes></label>" for kind in CLASSES)
    meta = f"<meta><task><size>2</size><mode>annotation</mode><labels>{labels}</labels></task></meta>"
    content = f"<annotations><version>1.1</version>{meta}{''.join(found)}</annotations>"
    put(root / "annotations.xml", f'<?xml version="1.0" encoding="utf-8"?>\n{content}')
    images(root / "images")


def createml(names: Iterable[str]) -> list[dict[str, Any]]:
    return [
        {
            "image": name,
            "annotations": [
                {"label": kind, "coordinates": {"x": x + w / 2, "y": y + h / 2, "width": w, "height": h}}
                for kind, x, y, w, h in BOXES[name]
            ],
        }
        for name in names
    ]


def createml_of_roboflow(root: Path) -> None:
    for name, split in (("one.jpg", "train"), ("two.jpg", "valid")):
        images(root / split, [name])
        put(root / split / "_annotations.createml.json", createml([name]))


def labelme(root: Path) -> None:
    images(root)
    for name, boxes in BOXES.items():
        shapes = [
            {
                "label": each[0],
                "points": [[x0, y0], [x1, y1]],
                "group_id": None,
                "description": "",
                "shape_type": "rectangle",
                "flags": {},
            }
            for each in boxes
            for x0, y0, x1, y1 in [corners(each)]
        ]
        content = {"version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": name, "imageData": None}
        width, height = SIZES[name]
        put(root / f"{Path(name).stem}.json", {**content, "imageHeight": height, "imageWidth": width})


def via_json(root: Path) -> None:
    images(root)
    content = {}
    for name, boxes in BOXES.items():
        regions = [
            {
                "shape_attributes": {"name": "rect", "x": x, "y": y, "width": w, "height": h},
                "region_attributes": {"class": kind},
            }
            for kind, x, y, w, h in boxes
        ]
        size = (root / name).stat().st_size
        content[f"{name}{size}"] = {"filename": name, "size": size, "regions": regions, "file_attributes": {}}
    put(root / "via_export_json.json", content)


def vott_json(root: Path) -> None:
    folder = root / "vott-json-export"
    images(folder)
    assets = {}
    for number, (name, boxes) in enumerate(BOXES.items()):
        width, height = SIZES[name]
        regions = [
            {
                "id": f"r{place}",
                "type": "RECTANGLE",
                "tags": [kind],
                "boundingBox": {"height": h, "width": w, "left": x, "top": y},
                "points": [{"x": x, "y": y}, {"x": x + w, "y": y}, {"x": x + w, "y": y + h}, {"x": x, "y": y + h}],
            }
            for place, (kind, x, y, w, h) in enumerate(boxes)
        ]
        asset = {"format": "jpg", "id": f"id{number}", "name": name, "path": f"file:{name}"}
        asset |= {"size": {"width": width, "height": height}, "state": 2, "type": 1}
        assets[f"id{number}"] = {"asset": asset, "regions": regions, "version": "2.2.0"}
    tags = [{"name": kind, "color": "#ff0000"} for kind in CLASSES]
    put(folder / "pets-export.json", {"name": "pets", "version": "2.2.0", "tags": tags, "assets": assets})


def supervisely(root: Path) -> None:
    images(root / "pets/img")
    classes = [{"title": kind, "shape": "rectangle", "color": "#ff0000", "id": 1} for kind in CLASSES]
    put(root / "meta.json", {"classes": classes, "tags": [], "projectType": "images"})
    for name, boxes in BOXES.items():
        width, height = SIZES[name]
        objects = [
            {
                "id": 1,
                "classTitle": each[0],
                "geometryType": "rectangle",
                "tags": [],
                "points": {"exterior": [[x0, y0], [x1, y1]], "interior": []},
            }
            for each in boxes
            for x0, y0, x1, y1 in [corners(each)]
        ]
        content = {"description": "", "tags": [], "size": {"height": height, "width": width}, "objects": objects}
        put(root / f"pets/ann/{name}.json", content)


def label_studio_value(name: str, box: Box) -> dict[str, Any]:
    x, y, w, h = (100 * value for value in scaled(name, box))
    width, height = SIZES[name]
    value = {"x": x, "y": y, "width": w, "height": h, "rotation": 0, "rectanglelabels": [box[0]]}
    return {**value, "original_width": width, "original_height": height}


def label_studio_json(root: Path, *, short: bool = False) -> None:
    images(root / "images")
    tasks: list[dict[str, Any]] = []
    for number, (name, boxes) in enumerate(BOXES.items(), 1):
        data = f"/data/upload/1/{name}"
        values = [label_studio_value(name, each) for each in boxes]
        if short:
            tasks.append({"id": number, "image": data, "label": values, "annotator": 1})
            continue
        result = [{"type": "rectanglelabels", "from_name": "label", "to_name": "image", "value": v} for v in values]
        tasks.append({"id": number, "data": {"image": data}, "annotations": [{"id": number, "result": result}]})
    put(root / "project-1-at-2026-11-27-00-00-abcdef01.json", tasks)


def detectron2_dicts(root: Path) -> None:
    images(root / "images")
    records = []
    for number, (name, boxes) in enumerate(BOXES.items()):
        width, height = SIZES[name]
        objects = [{"bbox": corners(b), "bbox_mode": 0, "category_id": CLASSES.index(b[0])} for b in boxes]
        record = {"file_name": f"images/{name}", "image_id": number, "height": height, "width": width}
        records.append({**record, "annotations": objects})
    put(root / "train.json", records)


def mmdetection_old(root: Path) -> None:
    images(root / "images")
    content = []
    for name, boxes in BOXES.items():
        found = {"bboxes": [corners(b) for b in boxes], "labels": [CLASSES.index(b[0]) for b in boxes]}
        content.append({"filename": name, "width": SIZES[name][0], "height": SIZES[name][1], "ann": found})
    put(root / "train.json", content)


def mmdetection_new(root: Path) -> None:
    images(root / "images")
    listed = []
    for number, (name, boxes) in enumerate(BOXES.items()):
        found = [{"bbox": corners(b), "bbox_label": CLASSES.index(b[0]), "ignore_flag": 0} for b in boxes]
        width, height = SIZES[name]
        listed.append({"img_path": name, "img_id": number, "width": width, "height": height, "instances": found})
    put(root / "train.json", {"metainfo": {"classes": list(CLASSES)}, "data_list": listed})


def fiftyone(root: Path) -> None:
    images(root / "data")
    samples = []
    for name, boxes in BOXES.items():
        found = [{"_cls": "Detection", "label": b[0], "bounding_box": list(scaled(name, b))} for b in boxes]
        detections = {"_cls": "Detections", "detections": found}
        samples.append({"filepath": f"data/{name}", "tags": [], "ground_truth": detections})
    put(root / "samples.json", {"samples": samples})
    put(root / "metadata.json", {"name": "pets", "media_type": "image", "sample_fields": {}, "info": {}})


def datumaro(root: Path) -> None:
    images(root / "images/default")
    items = []
    for name, boxes in BOXES.items():
        found = [
            {
                "id": 0,
                "type": "bbox",
                "attributes": {},
                "group": 0,
                "label_id": CLASSES.index(b[0]),
                "bbox": list(b[1:]),
            }
            for b in boxes
        ]
        size = {"path": name, "size": list(reversed(SIZES[name]))}
        items.append({"id": Path(name).stem, "annotations": found, "attr": {}, "image": size})
    labels = [{"name": kind, "parent": "", "attributes": []} for kind in CLASSES]
    categories = {"label": {"labels": labels, "attributes": []}}
    put(root / "annotations/default.json", {"info": {}, "categories": categories, "items": items})


def kitti(root: Path, labels: str, pictures: str) -> None:
    images(root / pictures)
    for name, boxes in BOXES.items():
        lines = [
            f"{each[0]} 0.00 0 -1.58 {x0:.2f} {y0:.2f} {x1:.2f} {y1:.2f} 1.65 1.67 3.64 -0.65 1.71 46.70 -1.59\n"
            for each in boxes
            for x0, y0, x1, y1 in [corners(each)]
        ]
        put(root / labels / f"{Path(name).stem}.txt", "".join(lines))


def dota(root: Path, *, settings: str = "") -> None:
    images(root / "images")
    for name, boxes in BOXES.items():
        lines = [
            f"{x0:.1f} {y0:.1f} {x1:.1f} {y0:.1f} {x1:.1f} {y1:.1f} {x0:.1f} {y1:.1f} {each[0]} 0\n"
            for each in boxes
            for x0, y0, x1, y1 in [corners(each)]
        ]
        put(root / "labelTxt" / f"{Path(name).stem}.txt", "imagesource:GoogleEarth\ngsd:0.5\n" + "".join(lines))
    if settings:
        put(root / "data.yaml", settings)


def tfrecord(root: Path) -> None:
    for split in ("train", "valid"):
        (root / split).mkdir()
        (root / split / "pets.tfrecord").write_bytes(b"\x10\0\0\0\0\0\0\0\x51\x5d\xcf\x0a" + b"\0" * 20)
        put(root / split / "pets_label_map.pbtxt", 'item {\n  name: "cat",\n  id: 1\n}\n')


def other_unit(file: str, box: Callable[[str, Box], Iterable[float]]) -> Callable[[Path], None]:
    return partial(coco_file, file=file, folder="images", box=box)


_CORNERS = ("xmin", "ymin", "xmax", "ymax")

_COCO = [
    PublicFolder("coco-official", "COCO 2017", coco_official, BOXES),
    PublicFolder("coco-roboflow", "Roboflow, COCO", coco_of_roboflow, BOXES),
    PublicFolder(
        "coco-cvat",
        "CVAT, COCO 1.0",
        partial(coco_file, file="annotations/instances_default.json", folder="images/default"),
        BOXES,
    ),
    PublicFolder(
        "coco-label-studio",
        "Label Studio, COCO with images",
        partial(coco_file, file="result.json", folder="images", prefix="images/"),
        BOXES,
    ),
    PublicFolder(
        "coco-fiftyone", "FiftyOne, COCODetectionDataset", partial(coco_file, file="labels.json", folder="data"), BOXES
    ),
    PublicFolder(
        "coco-labelme",
        "labelme, labelme2coco.py",
        partial(coco_file, file="annotations.json", folder="JPEGImages", prefix="JPEGImages/"),
        BOXES,
    ),
    PublicFolder("coco-via", "VIA 2, COCO", partial(coco_file, file="pets_coco.json", folder="."), BOXES),
    PublicFolder(
        "coco-makesense",
        "makesense, COCO JSON",
        partial(coco_file, file="labels_pets_2026-11-27-00-00-00.json", folder="."),
        BOXES,
    ),
    PublicFolder("coco-mmdetection", "MMDetection, annotation_coco.json for each split", coco_of_mmdetection, BOXES),
    PublicFolder(
        "coco-corners",
        "scripts, COCO JSON with corners in bbox",
        other_unit("train.json", lambda _, box: corners(box)),
        message="fit into it as the corners x1, y1, x2, y2",
    ),
    PublicFolder(
        "coco-fractions",
        "scripts, COCO JSON with fractions in bbox",
        other_unit("train.json", scaled),
        message="look like fractions of the image; multiply",
    ),
]
_VOC = [
    PublicFolder(
        "voc-2012",
        "Pascal VOC 2012",
        partial(voc_folder, labels="Annotations", pictures="JPEGImages", train="one\n", cat_train="one 1\n"),
        BOXES,
    ),
    PublicFolder("voc-subfolders", "Pascal VOC with a subfolder for each split", voc_with_subfolders, BOXES),
    PublicFolder("voc-roboflow", "Roboflow, Pascal VOC", voc_of_roboflow, BOXES),
    PublicFolder("voc-cvat", "CVAT, Pascal VOC 1.1", voc_of_cvat, BOXES),
    PublicFolder("voc-labelimg", "labelImg, Pascal VOC", partial(voc_folder, labels=".", pictures="."), BOXES),
    PublicFolder("voc-labelme", "labelme, labelme2voc.py", voc_of_labelme, BOXES),
    PublicFolder(
        "voc-label-studio",
        "Label Studio, Pascal VOC",
        partial(voc_folder, labels="Annotations", pictures="images"),
        BOXES,
    ),
    PublicFolder("voc-makesense", "makesense, VOC XML", partial(voc_folder, labels="labels", pictures="images"), BOXES),
    PublicFolder(
        "voc-vott",
        "VoTT, Pascal VOC",
        partial(voc_folder, labels="Annotations", pictures="JPEGImages", cat_val="one.jpg 1\n", dog_val="two.jpg 1\n"),
        BOXES,
    ),
    PublicFolder(
        "voc-annots",
        "GitHub data sets with annots beside images",
        partial(voc_folder, labels="annots", pictures="images"),
        BOXES,
    ),
]
_TABLES = [
    PublicFolder("csv-roboflow", "Roboflow, TensorFlow Object Detection CSV", csv_of_roboflow, BOXES),
    PublicFolder(
        "csv-tensorflow",
        "xml_to_csv.py of TensorFlow tutorials",
        lambda root: put(root / "train_labels.csv", csv_of_tensorflow(SIZES)),
        message="train_labels.csv is not read, its form is a table of another name: rename it to labels.csv",
    ),
    PublicFolder(
        "csv-vott",
        "VoTT, CSV",
        partial(
            csv_file,
            file="vott-csv-export/pets-export.csv",
            columns=("image", *_CORNERS, "label"),
            row=lambda name, box: (name, *corners(box), box[0]),
            folder="vott-csv-export",
        ),
        message="pets-export.csv is not read, its form is a table of another name: rename it to labels.csv",
    ),
    PublicFolder(
        "csv-makesense",
        "makesense, CSV",
        partial(
            csv_file,
            file="labels_pets_2026-11-27-00-00-00.csv",
            columns=(),
            row=lambda name, box: (*box, name, *SIZES[name]),
        ),
        message="its form is a table without header: add a first line",
    ),
    PublicFolder(
        "csv-retinanet",
        "keras-retinanet, CSV",
        partial(
            csv_file,
            file="annotations.csv",
            columns=(),
            row=lambda name, box: (f"images/{name}", *corners(box), box[0]),
        ),
        message="expected a header with a file name",
    ),
    PublicFolder(
        "csv-kaggle-bbox",
        "Kaggle, a column bbox with [x, y, w, h]",
        partial(
            csv_file, file="train.csv", columns=("image_id", "width", "height", "bbox", "source"), row=kaggle_wheat
        ),
        message="its form is a table with boxes in one column: write the column bbox as x, y, width and height",
    ),
    PublicFolder(
        "csv-kaggle-fractions",
        "Kaggle, corners as fractions",
        partial(csv_file, file="labels.csv", columns=("filename", "class", *_CORNERS), row=fractions),
        message="look like fractions of the image; multiply",
    ),
    PublicFolder(
        "csv-kaggle-corners",
        "Kaggle, corners in x, y, width, height",
        partial(
            csv_file,
            file="labels.csv",
            columns=("image", "label", "x", "y", "width", "height"),
            row=lambda name, box: (name, box[0], *corners(box)),
        ),
        message="fit into it as the corners x1, y1, x2, y2",
    ),
    PublicFolder(
        "csv-two-sets",
        "scripts, a CSV with x, y, w, h and the size of the image",
        partial(
            csv_file,
            file="labels.csv",
            columns=("filename", "width", "height", "class", "x", "y", "w", "h"),
            row=lambda name, box: (name, *SIZES[name], *box),
        ),
        message="several sets of columns that may be the box: x, y, width, height and x, y, w, h",
    ),
    PublicFolder(
        "csv-image-size",
        "scripts, a CSV with points and the size of the image",
        partial(
            csv_file,
            file="labels.csv",
            columns=("filename", "width", "height", "class", "x", "y"),
            row=lambda name, box: (name, *SIZES[name], *box[:3]),
        ),
        message="width and height of every row of labels.csv are those of the image",
    ),
    PublicFolder(
        "csv-via",
        "VIA 2, CSV",
        partial(
            csv_file,
            file="via_export_csv.csv",
            columns=(
                "filename",
                "file_size",
                "file_attributes",
                "region_count",
                "region_id",
                "region_shape_attributes",
                "region_attributes",
            ),
            row=via_row,
        ),
        message="its form is VIA: export the project",
    ),
    PublicFolder(
        "csv-label-studio",
        "Label Studio, CSV",
        partial(
            csv_file,
            file="project-1-at-2026-11-27-00-00-abcdef01.csv",
            columns=("id", "image", "label", "annotator", "annotation_id", "created_at"),
            row=label_studio_row,
        ),
        message="its form is Label Studio: export the project from Label Studio as COCO or YOLO",
    ),
    PublicFolder(
        "csv-open-images", "Open Images", openimages, message="its form is Open Images: move the tables to annotations"
    ),
]
_OTHERS = [
    PublicFolder("cvat-xml", "CVAT, CVAT for images 1.1", cvat_xml, message="its form is CVAT for images: export"),
    PublicFolder("createml-roboflow", "Roboflow, CreateML", createml_of_roboflow, message="from_createml"),
    PublicFolder(
        "createml-labelimg",
        "labelImg, CreateML",
        lambda root: put(root / "pets.json", createml(SIZES)),
        message="from_createml",
    ),
    PublicFolder("labelme", "labelme", labelme, BOXES),
    PublicFolder("via-json", "VIA 2, JSON", via_json, message="its form is VIA: export the project"),
    PublicFolder("vott-json", "VoTT, JSON", vott_json, message="its form is VoTT: export the project"),
    PublicFolder("supervisely", "Supervisely", supervisely, message="its app Export to COCO"),
    PublicFolder(
        "label-studio-json", "Label Studio, JSON", label_studio_json, message="its form is Label Studio: export"
    ),
    PublicFolder(
        "label-studio-json-min",
        "Label Studio, JSON-MIN",
        partial(label_studio_json, short=True),
        message="its form is Label Studio: export",
    ),
    PublicFolder("detectron2", "Detectron2, a list of dicts", detectron2_dicts, message="convert_to_coco_json"),
    PublicFolder("mmdetection-2", "MMDetection 2, a list", mmdetection_old, message="its form is MMDetection: write"),
    PublicFolder(
        "mmdetection-3", "MMDetection 3, data_list", mmdetection_new, message="its form is MMDetection: write"
    ),
    PublicFolder("fiftyone", "FiftyOne, FiftyOneDataset", fiftyone, message="COCODetectionDataset"),
    PublicFolder("datumaro", "Datumaro", datumaro, message='import_from."DIR", "datumaro"'),
    PublicFolder(
        "kitti",
        "KITTI",
        partial(kitti, labels="training/label_2", pictures="training/image_2"),
        message="its form is KITTI: run pip install datumaro, then in Python datumaro.Dataset.import_from",
    ),
    PublicFolder(
        "kitti-tao", "NVIDIA TAO, KITTI", partial(kitti, labels="labels", pictures="images"), message="kitti_detection"
    ),
    PublicFolder("dota", "DOTA", dota, message="its form is DOTA: write each line as a YOLO label with corners"),
    PublicFolder(
        "dota-data-yaml",
        "DOTA with a data.yaml",
        partial(dota, settings="train: images\nnames: [cat, dog]\n"),
        message="its form is DOTA: write each line",
    ),
    PublicFolder("tfrecord-roboflow", "Roboflow, TFRecord", tfrecord, message="its form is TFRecord: export the data"),
]
FOLDERS = [*_COCO, *_VOC, *_TABLES, *_OTHERS]
