from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from PIL import Image
from pycocotools.coco import COCO

from detr_bf.assembly import build_train_data, data_source
from detr_bf.common.errors import InputError
from detr_bf.config import DetectionConfig, load_config
from detr_bf.data.coco import CocoAnnotations, read_annotations
from detr_bf.data.formats import read_folder
from detr_bf.tasks.detection import DetectionTask

SHARED = Path(__file__).parents[4] / "shared" / "data"
Box = tuple[str, float, float, float, float]


def xml(boxes: Sequence[Box], *, size: tuple[int, int] | None = (64, 48), head: str = "", more: str = "") -> str:
    """Return an annotation file; the name of the image in it is wrong, as in real data sets."""
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>" if size else ""
    objects = "".join(
        f"<object><name>{escape(name)}</name>{more}<bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax>"
        f"<ymax>{y1}</ymax></bndbox></object>"
        for name, x0, y0, x1, y1 in boxes
    )
    return f"{head}<annotation><filename>other.jpeg</filename>{sides}{objects}</annotation>"


def write(root: Path, images: dict[str, Sequence[Box]], *, form: str = "annotations") -> Path:
    """Write a data set: XML files in Annotations or beside the images, whose name has its suffix."""
    for number, (name, boxes) in enumerate(images.items()):
        image = root / ("JPEGImages" if form == "annotations" else "") / name
        label = (root / "Annotations" if form == "annotations" else image.parent) / f"{image.stem}.xml"
        for path in (image, label):
            path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), (number, 90, 0)).save(image)
        label.write_text(xml(boxes), encoding="utf-8")
    return root


def lists(root: Path, **names: Sequence[str]) -> None:
    folder = root / "ImageSets" / "Main"
    folder.mkdir(parents=True)
    for name, stems in names.items():
        (folder / f"{name}.txt").write_text("\n".join(stems) + "\n")


IMAGES: dict[str, Sequence[Box]] = {
    "b.JPG": [("cat", 1, 1, 64, 48), ("ant", 11, 21, 20, 40)],
    "a.jpg": [("cat", 5, 5, 6, 6)],
    "c.png": [],
}


def settings(root: Path, *overrides: str) -> DetectionConfig:
    config: DetectionConfig = load_config(None, [f"data.root={root}", "data.workers=0", *overrides])
    return config


def content(root: Path, split: str = "") -> CocoAnnotations:
    return read_folder(root).split(split)


def test_content_in_the_form_of_coco(tmp_path: Path) -> None:
    found = content(write(tmp_path, IMAGES))
    assert found.images == [
        {"id": 1, "file_name": "JPEGImages/a.jpg", "height": 48, "width": 64},
        {"id": 2, "file_name": "JPEGImages/b.JPG", "height": 48, "width": 64},
        {"id": 3, "file_name": "JPEGImages/c.png", "height": 48, "width": 64},
    ]
    assert found.categories == [{"id": 1, "name": "ant"}, {"id": 2, "name": "cat"}]
    assert [(a["image_id"], a["category_id"], a["bbox"], a["area"]) for a in found.annotations] == [
        (1, 2, [4, 4, 2, 2], 4),
        (2, 2, [0, 0, 64, 48], 64 * 48),  # the first to the last pixel: the whole image
        (2, 1, [10, 20, 10, 20], 200),
    ]


def test_both_layouts_have_the_same_objects(tmp_path: Path) -> None:
    one, other = (content(write(tmp_path / form, IMAGES, form=form)) for form in ("annotations", "beside"))
    assert one.annotations == other.annotations
    assert [image["file_name"] for image in other.images] == ["a.jpg", "b.JPG", "c.png"]


def test_content_written_as_json_is_read_as_the_same(tmp_path: Path) -> None:
    found = content(write(tmp_path, IMAGES))
    path = tmp_path / "coco.json"
    parts = {name: getattr(found, name) for name in ("images", "annotations", "categories")}
    path.write_text(json.dumps(parts))
    again = read_annotations(path)
    assert {name: getattr(again, name) for name in parts} == parts
    assert COCO(path).getImgIds() == [1, 2, 3]


def test_lists_and_folders_are_splits_with_the_ids_of_the_whole(tmp_path: Path) -> None:
    lists(write(tmp_path / "voc", IMAGES), train=["b", "a"], val=["c"])
    train, val = (content(tmp_path / "voc", name) for name in ("train", "val"))
    assert [image["id"] for image in (*train.images, *val.images)] == [1, 2, 3]
    assert [len(train.annotations), len(val.annotations)] == [3, 0]
    assert train.categories == val.categories
    write(tmp_path / "flat" / "images" / "one", IMAGES, form="beside")
    write(tmp_path / "flat" / "images" / "two", {"z.bmp": [("dog", 1, 1, 2, 2)]}, form="beside")
    for name in ("two", "images/two"):
        two = content(tmp_path / "flat", name)
        assert [(image["id"], image["file_name"]) for image in two.images] == [(4, "images/two/z.bmp")]
        assert [a["category_id"] for a in two.annotations] == [3]


def test_the_order_of_the_files_does_not_matter(tmp_path: Path) -> None:
    one = content(write(tmp_path / "one", IMAGES))
    other = content(write(tmp_path / "other", dict(reversed(IMAGES.items()))))
    assert (one.images, one.annotations) == (other.images, other.annotations)


def test_a_missing_image_is_reported_by_the_checks(tmp_path: Path) -> None:
    root = write(tmp_path, IMAGES)
    (root / "JPEGImages" / "b.JPG").unlink()
    report = DetectionTask(settings(root, f"output_dir={tmp_path}/run")).examine()
    assert [(finding.code, finding.count) for finding in report.errors] == [("file-missing", 1)]
    assert "Annotations/b.jpg" in report.errors[0].example


def test_equal_and_exchanged_corners_are_boxes_without_area(tmp_path: Path) -> None:
    boxes = [("cat", 7, 7, 7, 9), ("cat", 9, 9, 5, 12), ("cat", 3, 3, 5, 5)]
    root = write(tmp_path, {"a.png": boxes})
    report = DetectionTask(settings(root)).examine()
    assert [(finding.code, finding.count) for finding in report.findings] == [
        ("box-without-area", 2),
        ("few-steps", 1),
        ("few-images", 1),
    ]
    assert len(build_train_data(settings(root))._boxes) == 3
    target = build_train_data(settings(root))._objects(0, (48, 64))
    assert target[0].tolist() == [[2, 2, 5, 5]]


def test_difficult_objects_are_crowds(tmp_path: Path) -> None:
    root = write(tmp_path, {"a.png": [("cat", 1, 1, 9, 9)]})
    (root / "Annotations" / "a.xml").write_text(xml([("cat", 1, 1, 9, 9)], more="<difficult>1</difficult>"))
    assert [a["iscrowd"] for a in content(root).annotations] == [1]


def test_boxes_of_parts_are_not_those_of_objects(tmp_path: Path) -> None:
    root = write(tmp_path, {"a.png": []})
    part = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
    (root / "Annotations" / "a.xml").write_text(xml([("cat", 3, 3, 9, 9)], more=part))
    assert [a["bbox"] for a in content(root).annotations] == [[2, 2, 7, 7]]


def test_a_size_of_zero_is_no_size(tmp_path: Path) -> None:
    root = write(tmp_path, {"a.png": []})
    (root / "Annotations" / "a.xml").write_text(xml([("cat", 3, 3, 9, 9)], size=(0, 0)))
    assert content(root).images == [{"id": 1, "file_name": "JPEGImages/a.png"}]


def test_images_without_labels_and_hidden_files_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write(tmp_path, IMAGES)
    shutil.copy(root / "JPEGImages" / "a.jpg", root / "JPEGImages" / "unlabelled.jpg")
    (root / "Annotations" / "._a.xml").write_bytes(b"\0\5\26\7")
    with caplog.at_level("INFO"):
        assert len(content(root).images) == 3
    assert "1 images have no XML file" in caplog.text


def test_a_loop_of_links_is_followed_once(tmp_path: Path) -> None:
    root = write(tmp_path, IMAGES)
    (root / "Annotations" / "loop").symlink_to(root)
    assert len(content(root).images) == 3


@pytest.mark.parametrize(
    ("labels", "pictures"),
    [("annots", "images"), ("xml", "."), (".", "photos"), ("annots/train", "images/train"), ("a/train/xml", "a/train")],
)
def test_images_in_a_folder_beside_that_of_the_files(tmp_path: Path, labels: str, pictures: str) -> None:
    root = write(tmp_path, IMAGES, form="beside")
    expected = content(root)
    read_folder.cache_clear()
    for folder, suffixes in ((labels, (".xml",)), (pictures, (".jpg", ".JPG", ".png"))):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for path in [path for path in root.iterdir() if path.suffix in suffixes]:
            path.rename(root / folder / path.name)
    found = content(root)
    assert [root / image["file_name"] for image in found.images] == [
        root / pictures / image["file_name"] for image in expected.images
    ]
    assert found.annotations == expected.annotations


@pytest.mark.parametrize(
    ("labels", "pictures", "message"),
    [
        ("annots", ("one", "two"), "the XML files of annots may belong to the images of each of one, two"),
        ("train/annots", ("test/images",), "none of its 2 XML files has an image of its name: put them beside"),
        ("train", ("test",), "none of its 2 XML files has an image"),
        ("annots", (), "rename the folders to Annotations and JPEGImages"),
    ],
)
def test_files_whose_images_are_not_known(tmp_path: Path, labels: str, pictures: Sequence[str], message: str) -> None:
    for name in ("a", "b"):
        (tmp_path / labels).mkdir(parents=True, exist_ok=True)
        (tmp_path / labels / f"{name}.xml").write_text(xml([("cat", 1, 1, 9, 9)]))
        for folder in pictures:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 48)).save(tmp_path / folder / f"{name}.png")
    with pytest.raises(InputError, match=message):
        content(tmp_path)


LAUGHS = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10 if i else "lol"}">' for i in range(10))
GOOD = xml([("cat", 1, 1, 2, 2)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD[:-20], "no element found|mismatched|unclosed"),
        ("", "no element found"),
        (f"<!DOCTYPE annotation [{LAUGHS}]>" + GOOD.replace("cat", "&l9;"), "it has a document type"),
        ('<!DOCTYPE annotation [<!ENTITY x SYSTEM "file:///etc/passwd">]>' + GOOD, "it has a document type"),
        ("<rdf></rdf>", "expected <annotation>, got <rdf>"),
        (GOOD.replace("<xmin>1<", "<xmin>nan<"), r"object 1 \(cat\): xmin is 'nan', expected a number of pixels"),
        (GOOD.replace("<ymax>2<", "<ymax>1e999<"), r"ymax is '1e999'"),
        (GOOD.replace("<ymax>2<", "<ymax>" + "9" * 5000 + "<"), "ymax is '999"),
        (GOOD.replace("<xmin>1</xmin>", ""), "xmin is ''"),
        (GOOD.replace("bndbox", "robndbox"), r"object 1 \(cat\) has no bndbox"),
        (GOOD.replace("cat", " "), "object 1 has no name"),
        (GOOD.replace("<width>64", "<width>-64"), "size is -64 x 48"),
        (GOOD.replace("<width>64", "<width>64.5"), "size is 64.5 x 48"),
        (GOOD.replace("<name>cat", "<difficult>x</difficult><name>cat"), "difficult is x, expected 0 or 1"),
        (GOOD.replace("cat", "\udcff"), "not well-formed"),
        ('<?xml version="1.0" encoding="latin-17"?>' + GOOD, "unknown encoding"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    root = write(tmp_path, IMAGES)
    (root / "Annotations" / "b.xml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=message) as told:
        content(root)
    assert str(root / "Annotations" / "b.xml") in str(told.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\nnew\n", r"train\.txt:2: new is the name of no XML file"),
        (b"../Annotations/a\n", "is the name of no XML file"),
        (b"a 1\nb -1\n", "a 1 is the name of no XML file"),  # lists of one class
        (b"\n\n", r"train\.txt has no images"),
        (b"a\xff\n", "expected lines of UTF-8 text"),
    ],
)
def test_a_bad_list_is_refused_when_it_is_used(tmp_path: Path, data: bytes, message: str) -> None:
    root = write(tmp_path, IMAGES)
    lists(root, train=[], val=["a"])
    (root / "ImageSets" / "Main" / "train.txt").write_bytes(data)
    assert len(content(root, "val").images) == 1
    with pytest.raises(InputError, match=message):
        content(root, "train")


def test_two_files_for_one_name_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path, IMAGES)
    shutil.copy(root / "JPEGImages" / "b.JPG", root / "JPEGImages" / "b.png")
    with pytest.raises(InputError, match=r"JPEGImages/b\.JPG and JPEGImages/b\.png"):
        content(root)
    (root / "JPEGImages" / "b.png").unlink()
    shutil.copy(root / "Annotations" / "b.xml", root / "b.xml")
    with pytest.raises(InputError, match=r"Annotations/b\.xml and b\.xml are for the same image"):
        content(root)


@pytest.mark.parametrize("name", ["nope", "../other", "/etc", "a.jpg", "Jpeg"])
def test_an_unknown_split_names_the_known_ones(tmp_path: Path, name: str) -> None:
    root = write(tmp_path / "root", IMAGES)
    write(tmp_path / "other", IMAGES)
    lists(root, test=["a"], train=["b"])
    with pytest.raises(InputError, match=r"has no split .*; its splits: test, train"):
        content(root, name)


def test_what_is_no_data_set_is_explained(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"give data\.root=DIR of a COCO, Roboflow, Pascal VOC, YOLO, labelme or CSV folder"
    ):
        read_folder(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no labels"):
        read_folder(tmp_path / "empty")
    write(tmp_path / "none", {"a.png": []})
    with pytest.raises(InputError, match="has no objects and therefore no classes"):
        read_folder(tmp_path / "none")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.root=x", "data.train.images=y"], "data.root is given"),
        (["data.train.split=a"], "data.train.split=a is a split of data.root, which is not given"),
        (["data.folds=1"], "expected at least 2 folds"),
        (["data.folds=3", "data.fold=3"], "a fold from 0 to data.folds - 1"),
        (["data.fold=1"], "expected at least 2 folds"),
        (["data.folds=3", "data.val_fraction=0.1"], "give only one"),
        (["data.root=x", "data.folds=3", "data.val.split=val"], r"data.folds takes .*data\.val\.split=null"),
        (["data.val_fraction=0.1", "data.val.images=val"], "data.val_fraction takes"),
        (["data.val_fraction=0.1", "data.train.panoptic=x"], "do not divide panoptic files"),
    ],
)
def test_settings_that_exclude_each_other(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(None, overrides)


def test_a_folder_needs_a_validation_split(tmp_path: Path) -> None:
    lists(write(tmp_path, IMAGES), test=["a"])
    with pytest.raises(InputError, match=r"data\.val\.split is not set: give one of test"):
        data_source(settings(tmp_path), "val")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the data sets of ../shared/data beside the checkout")
@pytest.mark.parametrize(
    ("name", "train", "images", "boxes", "sizes"),
    [
        ("bccd", "trainval", (292, 72), (3943, 945), {(480, 640)}),
        ("cards/images", "train", (296, 67), (527, 143), None),
    ],
)
def test_real_folders(
    name: str, train: str, images: tuple[int, int], boxes: tuple[int, int], sizes: set[tuple[int, int]] | None
) -> None:
    config = settings(SHARED / name, f"data.train.split={train}", "data.val.split=test")
    contents = [read_annotations(data_source(config, split).annotations) for split in ("train", "val")]
    assert tuple(len(each.images) for each in contents) == images
    assert tuple(len(each.annotations) for each in contents) == boxes
    assert not {image["id"] for image in contents[0].images} & {image["id"] for image in contents[1].images}
    counts = Counter(
        c["name"] for each in contents for a in each.annotations for c in each.categories if c["id"] == a["category_id"]
    )
    if name == "bccd":
        assert counts == {"RBC": 4155, "WBC": 372, "Platelets": 361}
    else:
        assert len(counts) == 6
    data = build_train_data(config)
    assert sizes is None or set(data.sizes) == sizes
    assert all(os.path.isfile(data.folder / file) for file in data.file_names)  # noqa: PTH113
