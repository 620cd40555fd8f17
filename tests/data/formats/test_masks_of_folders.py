"""Masks in folders: polygons of YOLO and labelme, PNG files of Pascal VOC."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.data.batches import SampleKey
from detr_bf.data.checks.annotations import examine
from detr_bf.data.coco import CocoDetection, Source
from detr_bf.data.formats import read_folder
from detr_bf.data.formats.labelme import _read
from detr_bf.inference.loading import _evaluated_split

SIZE = (20, 10)  # width, height


@pytest.fixture(autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path_factory.mktemp("cache")))
    read_folder.cache_clear()


def put(path: Path, content: object = None) -> None:
    """Write an image for no content, text, or anything else as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        Image.new("RGB", SIZE, (len(path.name), 80, 9)).save(path)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def objects(root: Path) -> list[dict[str, Any]]:
    """Return the annotations without ids."""
    return [
        {key: value for key, value in each.items() if key not in ("id", "image_id", "category_id", "iscrowd")}
        for each in read_folder(root).content.annotations
    ]


def masks(root: Path, split: str = "") -> Tensor:
    """Return the masks (N, 10, 20) of the first image as training gets them."""
    data = CocoDetection(root, read_folder(root).split(split), lambda sample: sample, masks=True)
    found = data[SampleKey(0, 0)][1].masks
    assert found is not None
    return found


def codes(root: Path, masks: bool = True) -> list[tuple[str, int, str]]:
    """Return code, number and first case of the errors that the checks report."""
    source = Source(root, read_folder(root).content)
    found = examine(source, None, num_queries=10, masks=masks).errors
    return [(each.code, each.count, each.example) for each in found]


def yolo(root: Path, lines: str) -> Path:
    put(root / "images/a.jpg")
    put(root / "labels/a.txt", lines)
    put(root / "classes.txt", "cat\ndog\n")
    return root


def test_a_yolo_polygon_is_the_mask_of_its_object(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = yolo(tmp_path, "1 0.1 0.2 0.5 0.2 0.5 0.6\n0 0.25 0.5 0.5 1\n")
    with caplog.at_level(logging.INFO):
        polygon, box = objects(root)
    assert polygon["bbox"] == pytest.approx([2, 2, 8, 4])
    assert (polygon["area"], polygon["segmentation"]) == (16, [[2, 2, 10, 2, 10, 6]])  # half of the box
    assert box == {"bbox": [0, 0, 10, 10], "area": 100}
    assert "1 of 2 labels are polygons, the masks of their objects with model.masks=true.\n" in caplog.text


def test_masks_of_yolo_polygons_in_training(tmp_path: Path) -> None:
    [mask] = masks(yolo(tmp_path, "0 0.1 0.2 0.5 0.2 0.5 0.6 0.1 0.6\n"))
    expected = np.zeros((10, 20), dtype=bool)
    expected[2:6, 2:10] = True
    assert (mask.numpy() == expected).all()


def test_oriented_boxes_are_polygons_and_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = yolo(tmp_path, "0 0.2 0.4 0.4 0.2 0.6 0.4 0.4 0.6\n")
    with caplog.at_level(logging.INFO):
        assert objects(root)[0]["segmentation"] == [[4, 4, 8, 2, 12, 4, 8, 6]]
    assert "All have four corners, as oriented boxes have." in caplog.text


def test_a_polygon_that_leaves_the_image_keeps_its_points_and_its_box_is_clipped(tmp_path: Path) -> None:
    root = yolo(tmp_path, "0 -0.05 0 0.5 0 0.5 1.05 -0.05 1.05\n")
    [found] = objects(root)
    assert found["bbox"] == [0, 0, 10, 10]
    assert found["segmentation"][0] == pytest.approx([-1, 0, 10, 0, 10, 10.5, -1, 10.5])
    assert found["area"] == 100, "at most that of the box"
    assert masks(root).sum() == 100


@pytest.mark.parametrize(
    "line", ["0 0.1 0.2 0.5 0.2", "0 0.1 0.2 0.5 0.2 0.5", "0 0.1 0.2 0.5 0.2 0.5 0.6 0.1", "0 0.1 0.2", "0"]
)
def test_yolo_polygons_of_a_wrong_number_of_values(tmp_path: Path, line: str) -> None:
    if len(line.split()) == 5:  # two points cannot be told from a box
        assert "segmentation" not in objects(yolo(tmp_path, line))[0]
        return
    with pytest.raises(InputError, match=r"a\.txt:1: .* is no label; expected .* 'class x1 y1 x2 y2 \.\.\.'"):
        read_folder(yolo(tmp_path, line))


@pytest.mark.parametrize("value", ["nan", "inf", "1.2", "-0.2", "640"])
def test_yolo_polygons_with_a_value_that_is_no_fraction(tmp_path: Path, value: str) -> None:
    with pytest.raises(InputError, match="values outside 0 to 1; expected fractions of the image"):
        read_folder(yolo(tmp_path, f"0 0.1 0.2 0.5 0.2 0.5 {value}"))


def test_objects_without_mask_are_an_error_of_the_checks_with_masks_alone(tmp_path: Path) -> None:
    root = yolo(tmp_path, "1 0.1 0.2 0.5 0.2 0.5 0.6\n0 0.25 0.5 0.5 1\n")
    assert codes(root) == [("mask-missing", 1, "annotation 2 of image 1: bbox [0.0, 0.0, 10.0, 10.0], images/a.jpg")]
    assert codes(root, masks=False) == []


def test_a_polygon_without_area_is_told_with_masks(tmp_path: Path) -> None:
    root = yolo(tmp_path, "1 0.1 0.2 0.5 0.2 0.5 0.6\n0 0.1 0.1 0.5 0.5 0.3 0.3\n")
    report = examine(Source(root, read_folder(root).content), None, num_queries=10, masks=True)
    assert [(each.code, each.example) for each in report.findings if each.code == "mask-outside"] == [
        ("mask-outside", "annotation 2 of image 1 in 20 x 10 pixels")
    ]


def test_polygons_refer_to_the_image_after_its_rotation(tmp_path: Path) -> None:
    root = yolo(tmp_path, "0 0.5 0 1 0 1 0.25 0.5 0.25\n")
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn: 10 x 20 pixels are shown
    Image.new("RGB", SIZE).save(root / "images/a.jpg", exif=exif)
    assert objects(root)[0]["segmentation"] == [[5, 0, 10, 0, 10, 5, 5, 5]]
    [mask] = masks(root)
    assert mask.shape == (20, 10)
    assert mask[:5, 5:].all()
    assert mask.sum() == 25


def test_fingerprint_and_boxes_without_masks_do_not_depend_on_polygons(tmp_path: Path) -> None:
    polygons = yolo(tmp_path / "polygons", "1 0.1 0.2 0.5 0.2 0.5 0.6 0.1 0.6\n")
    boxes = yolo(tmp_path / "boxes", "1 0.3 0.4 0.4 0.4\n")
    found = []
    for root in (polygons, boxes):
        data = CocoDetection(root, read_folder(root).content, lambda sample: sample)
        found.append((data.fingerprint(), data.fingerprint(quick=True), data[SampleKey(0, 0)][1].boxes.tolist()))
    assert found[0] == found[1]


def voc(root: Path, pixels: np.ndarray | None, mode: str = "P", more: str = "") -> Path:
    """Write a cat and a dog, with the PNG file of their masks (H, W)."""
    put(root / "JPEGImages/a.jpg")
    boxes = (("cat", 1, 1, 4, 4), ("dog", 11, 1, 20, 10))
    shown = "".join(
        f"<object><name>{name}</name>{more}<bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax>"
        "</bndbox></object>"
        for name, x0, y0, x1, y1 in boxes
    )
    size = "<size><width>20</width><height>10</height><depth>3</depth></size>"
    put(root / "Annotations/a.xml", f"<annotation>{size}{shown}</annotation>")
    if pixels is not None:
        folder = root / "SegmentationObject"
        folder.mkdir()
        image = Image.fromarray(pixels.astype(np.uint8)).convert(mode if mode != "P" else "L")
        if mode == "P":
            image.putpalette([value for number in range(256) for value in (number, 0, 255 - number)])
        image.save(folder / "a.png")
        (root / "SegmentationClass").mkdir()
        Image.new("P", SIZE).save(root / "SegmentationClass/a.png")
    return root


def object_pixels() -> np.ndarray:
    pixels = np.zeros((10, 20), dtype=np.uint8)
    pixels[0:4, 0:4] = 1
    pixels[0, 0:5] = 255  # void
    pixels[0:10, 10:20] = 2
    return pixels


def test_voc_masks_are_the_pixels_of_the_number_of_the_object(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = voc(tmp_path, object_pixels())
    with caplog.at_level(logging.INFO):
        cat, dog = objects(root)
    assert (cat["bbox"], cat["area"]) == ([0, 0, 4, 4], 12)
    assert (dog["bbox"], dog["area"]) == ([10, 0, 10, 10], 100)
    assert "2 of the 2 objects of 1 images with a PNG file in SegmentationObject have masks" in caplog.text
    assert "no XML file" not in caplog.text  # the PNG files are no images
    found = masks(root).numpy()
    assert (found[0] == (object_pixels() == 1)).all()
    assert (found[1] == (object_pixels() == 2)).all()
    assert codes(root) == []


def test_a_voc_object_without_pixels_has_no_mask(tmp_path: Path) -> None:
    pixels = object_pixels()
    pixels[pixels == 1] = 0
    root = voc(tmp_path, pixels)
    assert ["segmentation" in each for each in objects(root)] == [False, True]
    assert objects(root)[0]["area"] == 16
    assert codes(root) == [("mask-missing", 1, "annotation 1 of image 1: bbox [0.0, 0.0, 4.0, 4.0], JPEGImages/a.jpg")]


def test_void_is_no_object_of_voc(tmp_path: Path) -> None:
    root = voc(tmp_path, object_pixels())
    text = (root / "Annotations/a.xml").read_text()
    [first] = re.findall("<object>.*?</object>", text)[:1]
    put(root / "Annotations/a.xml", text.replace("</annotation>", 298 * first + "</annotation>"))
    put(root / "SegmentationObject/a.txt", "notes")
    found = objects(root)
    assert [number for number, each in enumerate(found, 1) if "segmentation" in each] == [1, 2]
    assert len(found) == 300


def test_voc_without_png_files_is_as_before(tmp_path: Path) -> None:
    root = voc(tmp_path, None)
    assert objects(root) == [{"bbox": [0, 0, 4, 4], "area": 16}, {"bbox": [10, 0, 10, 10], "area": 100}]


@pytest.mark.parametrize(
    ("change", "mode", "message"),
    [
        (lambda pixels: pixels[:, :19], "P", r"19 x 10 pixels \(width x height\), the image has 20 x 10"),
        (lambda pixels: pixels + 1, "P", "pixels of object 3, the XML file has 2 objects"),
        (lambda pixels: pixels, "RGB", "a RGB image, expected a palette"),
    ],
)
def test_voc_masks_that_do_not_fit_are_left_out_with_a_warning(
    tmp_path: Path, change: Any, mode: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    pixels = object_pixels()
    pixels[pixels == 255] = 0
    root = voc(tmp_path, change(pixels), mode)
    assert not any("segmentation" in each for each in objects(root))
    assert "the masks of 1 image are left out: SegmentationObject/a.png" in caplog.text
    assert re.search(message, caplog.text)


def test_a_voc_png_that_is_damaged_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = voc(tmp_path, object_pixels())
    path = root / "SegmentationObject/a.png"
    path.write_bytes(path.read_bytes()[:60])
    assert not any("segmentation" in each for each in objects(root))
    assert "the masks of 1 image are left out" in caplog.text


def test_voc_png_files_without_xml_file_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = voc(tmp_path, object_pixels())
    (root / "SegmentationObject/a.png").rename(root / "SegmentationObject/b.png")
    assert not any("segmentation" in each for each in objects(root))
    assert "1 PNG files in SegmentationObject belong to no XML file" in caplog.text


def test_the_lists_of_segmentation_are_splits_of_their_own(tmp_path: Path) -> None:
    root = voc(tmp_path, object_pixels())
    put(root / "ImageSets/Main/train.txt", "a\n")
    put(root / "ImageSets/Segmentation/val.txt", "a\n")
    folder = read_folder(root)
    assert {"train", "Segmentation/val"} <= {*folder.split_names}
    assert len(folder.split("Segmentation/val").annotations) == 2


@pytest.mark.parametrize(("trained", "split"), [(True, "Segmentation/val"), (False, "val")])
def test_a_run_with_masks_is_evaluated_on_the_split_with_masks(tmp_path: Path, trained: bool, split: str) -> None:
    root = voc(tmp_path, object_pixels())
    for folder in ("Main", "Segmentation"):
        put(root / f"ImageSets/{folder}/val.txt", "a\n")
    override = f"data.root={root}"
    config = load_config(None, [override, "data.val_fraction=0.2", f"model.masks={trained}"], task="detection")
    assert f'data.val.split="{split}"' in _evaluated_split(config, [override], root)


def shape(kind: str | None, points: Any, label: Any = "cat", group: Any = None) -> dict[str, Any]:
    return {"label": label, "points": points, "group_id": group, "shape_type": kind, "flags": {}}


def labelme(root: Path, *shapes: Any, name: str = "a", **more: Any) -> Path:
    put(root / f"{name}.jpg")
    content = {"version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": f"{name}.jpg", "imageData": None}
    put(root / f"{name}.json", {**content, "imageHeight": 10, "imageWidth": 20, **more})
    return root


TRIANGLE = [[2, 2], [10, 2], [10, 6]]


def test_shapes_of_labelme(tmp_path: Path) -> None:
    root = labelme(
        tmp_path,
        shape("polygon", TRIANGLE, "dog"),
        shape("rectangle", [[9, 8], [1.5, 3]]),
        shape(None, TRIANGLE),  # labelme 3 wrote no type
        shape("rectangle", [[1, 3], [9, 3], [9, 8], [1, 8]]),  # X-AnyLabeling
    )
    labelme(tmp_path, name="b")
    folder = read_folder(root)
    assert str(folder).startswith(f"{root}: labelme JSON, 2 images")
    assert [each["name"] for each in folder.content.categories] == ["cat", "dog"]
    assert [each["category_id"] for each in folder.content.annotations] == [2, 1, 1, 1]
    polygon = {"bbox": [2, 2, 8, 4], "area": 16, "segmentation": [[2, 2, 10, 2, 10, 6]]}
    assert objects(root) == [
        polygon,
        {"bbox": [1.5, 3, 7.5, 5], "area": 37.5},
        polygon,
        {"bbox": [1, 3, 8, 5], "area": 40},
    ]
    assert [(each["file_name"], each["height"], each["width"]) for each in folder.content.images] == [
        ("a.jpg", 10, 20),
        ("b.jpg", 10, 20),
    ]


def test_a_circle_of_labelme_is_its_polygon(tmp_path: Path) -> None:
    root = labelme(tmp_path, shape("circle", [[10, 5], [13, 9]]))  # radius 5
    [found] = objects(root)
    assert found["bbox"] == pytest.approx([5, 0, 10, 10])
    assert found["area"] == pytest.approx(np.pi * 25, rel=2e-3)
    assert masks(root).sum() == pytest.approx(np.pi * 25, rel=0.05)


def test_a_group_of_labelme_is_one_object(tmp_path: Path) -> None:
    square = [[12, 1], [14, 1], [14, 3], [12, 3]]
    root = labelme(
        tmp_path,
        shape("polygon", TRIANGLE, group=1),
        shape("polygon", square, group=1),
        shape("polygon", square, "dog", group=1),  # another class
        shape("polygon", TRIANGLE, group=2),
        shape("rectangle", [[0, 0], [3, 3]], group=2),  # no outline
    )
    both, dog, mixed = objects(root)
    assert both == {
        "bbox": [2, 1, 12, 5],
        "area": 20,
        "segmentation": [[2, 2, 10, 2, 10, 6], [12, 1, 14, 1, 14, 3, 12, 3]],
    }
    assert dog["bbox"] == [12, 1, 2, 2]
    assert mixed == {"bbox": [0, 0, 10, 6], "area": 60}
    assert codes(root) == [("mask-missing", 1, "annotation 3 of image 1: bbox [0.0, 0.0, 10.0, 6.0], a.jpg")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (shape("polygon", []), r"the points of the polygon are \[\], expected three or more points"),
        (shape("polygon", TRIANGLE[:2]), "expected three or more points, x and y in pixels"),
        (shape("polygon", [*TRIANGLE, [1]]), "expected three or more points"),
        (shape("polygon", [*TRIANGLE, [1, float("nan")]]), "expected three or more points"),
        (shape("polygon", [*TRIANGLE, [1, 1e300]]), "expected three or more points"),
        (shape("polygon", None), "the points of the polygon are None"),
        (shape("rectangle", TRIANGLE), "expected two opposite corners"),
        (shape("circle", TRIANGLE), "expected the centre and a point of the circle"),
        (shape("mask", [[1, 1], [5, 5]]), "shape_type is 'mask', expected polygon, rectangle, circle: draw it as"),
        (shape("polygon", TRIANGLE, ""), "label is '', expected the name of a class"),
        (shape("polygon", TRIANGLE, 3), "label is 3, expected the name of a class"),
        ("polygon", "label is None"),
    ],
)
def test_shapes_of_labelme_that_cannot_be_used(tmp_path: Path, given: Any, message: str) -> None:
    root = labelme(tmp_path, shape("polygon", TRIANGLE), given)
    with pytest.raises(InputError, match=rf"1 shape cannot be used: .*a\.json: shape 2: .*{message}"):
        read_folder(root)


def test_shapes_without_area_are_left_out_with_a_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = labelme(
        tmp_path,
        shape("point", [[1, 1]]),
        shape("line", [[1, 1], [2, 2]]),
        shape("point", [[2, 2]]),
        shape("polygon", TRIANGLE),
    )
    assert len(objects(root)) == 1
    assert "shapes without area are left out: point (2), line (1)" in caplog.text


def test_images_of_labelme_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "train/images/a.PNG")
    put(tmp_path / "photos/7.jpg")
    put(tmp_path / "photos/unlabelled.jpg")
    base = {"shapes": [shape("polygon", TRIANGLE)]}
    put(tmp_path / "train/labels/a.json", {**base, "imagePath": "C:\\old\\name.jpg"})
    put(tmp_path / "json/b.json", {**base, "imagePath": "..\\photos\\7.jpg"})
    put(tmp_path / "gone/c.json", {**base, "imagePath": "/home/ann/c.jpg"})
    put(tmp_path / "settings.json", {"version": 1})
    with caplog.at_level(logging.INFO):
        folder = read_folder(tmp_path)
    assert [(each["file_name"], each.get("width")) for each in folder.content.images] == [
        ("gone/c.jpg", None),
        ("photos/7.jpg", 20),
        ("train/images/a.PNG", 20),
    ]
    assert "1 JSON file is not of labelme's form and left out: settings.json" in caplog.text
    assert "1 images have no JSON file" in caplog.text
    assert len(folder.split("train").images) == 1
    assert ("file-missing", 1) in [found[:2] for found in codes(tmp_path)]


@pytest.mark.parametrize("path", ["", "..", "/", 7, None])
def test_an_image_path_without_a_name_is_that_of_the_file(tmp_path: Path, path: object) -> None:
    put(tmp_path / "a.json", {"shapes": [shape("polygon", TRIANGLE)], "imagePath": path})
    [image] = read_folder(tmp_path, "labelme").content.images
    assert image["file_name"] == "a.jpg"


@pytest.mark.parametrize("name", ["instances_train.json", "all.json"])
def test_a_folder_with_coco_files_beside_labelme_is_coco(tmp_path: Path, name: str) -> None:
    root = labelme(tmp_path, shape("polygon", TRIANGLE))
    image = {"id": 3, "file_name": "a.jpg", "width": 20, "height": 10}
    box = {"id": 1, "image_id": 3, "category_id": 9, "bbox": [1, 1, 4, 4], "area": 16, "iscrowd": 0}
    put(root / name, {"images": [image], "annotations": [box], "categories": [{"id": 9, "name": "zebra"}]})
    assert read_folder(root).form == "COCO JSON"
    assert len(read_folder(root, "labelme").content.annotations) == 1


def test_the_photograph_inside_a_labelme_file_is_not_kept(tmp_path: Path) -> None:
    root = labelme(tmp_path, shape("polygon", TRIANGLE), imageData="iVBORw0KGgo")
    assert "imageData" not in (_read(root / "a.json") or {})
    assert len(objects(root)) == 1


def test_two_labelme_files_of_one_image_are_refused(tmp_path: Path) -> None:
    root = labelme(tmp_path, shape("polygon", TRIANGLE))
    put(root / "b.json", {"shapes": [], "imagePath": "a.jpg"})
    with pytest.raises(InputError, match=r"a\.json and b\.json are for the same image"):
        read_folder(root)


def test_a_damaged_labelme_file_is_refused(tmp_path: Path) -> None:
    root = labelme(tmp_path, shape("polygon", TRIANGLE))
    put(root / "b.json", "{")
    with pytest.raises(InputError, match=r"b\.json is not JSON .*mend it, or move it out of the folder"):
        read_folder(root)
