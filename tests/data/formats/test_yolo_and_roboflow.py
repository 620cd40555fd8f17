from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from detr_bf.assembly import build_train_data, build_val_data
from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.data.batches import SampleKey
from detr_bf.data.coco import CocoAnnotations, read_annotations
from detr_bf.data.formats import read_folder
from detr_bf.data.image_headers import header_size
from detr_bf.data.paths import PathIndex
from detr_bf.tasks.detection import DetectionTask
from tests.data.formats.public_folders import PublicFolder
from tests.data.formats.yolo_folders import NAMED_FILES, YOLO_FOLDERS

Factory = Callable[..., SimpleNamespace]
YAML = "train: ../train/images\nval: ../valid/images\nnc: 2\nnames: [wolf, ant]\n"


def image(path: Path, size: tuple[int, int] = (100, 50), **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path, **options)


def label(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def yolo(root: Path, settings: str = YAML) -> Path:
    """Write a folder as Roboflow does: paths of data.yaml begin with ../ although it lies beside the splits."""
    image(root / "train/images/b.jpg")
    label(root / "train/labels/b.txt", "0 0.5 0.5 0.2 0.4\n\n1 0.1 0.1 0.3 0.1 0.3 0.5\n")
    image(root / "train/images/a.PNG")
    image(root / "valid/images/c.jpg")
    label(root / "valid/labels/c.txt", "1 0.25 0.5 0.5 1")
    (root / "data.yaml").write_text(settings)
    return root


def boxes(content: CocoAnnotations) -> list[tuple[str, str, list[float]]]:
    """Return file, class and box of each object."""
    files = {image["id"]: image["file_name"] for image in content.images}
    names = {category["id"]: category["name"] for category in content.categories}
    return [
        (files[a["image_id"]], names[a["category_id"]], [round(value, 9) for value in a["bbox"]])
        for a in content.annotations
    ]


def test_yolo_as_roboflow_exports_it(tmp_path: Path) -> None:
    folder = read_folder(yolo(tmp_path))
    assert [(i["id"], i["file_name"], i["height"], i["width"]) for i in folder.content.images] == [
        (1, "train/images/a.PNG", 50, 100),  # no label file: background
        (2, "train/images/b.jpg", 50, 100),
        (3, "valid/images/c.jpg", 50, 100),
    ]
    assert folder.content.categories == [{"id": 1, "name": "ant"}, {"id": 2, "name": "wolf"}]
    assert boxes(folder.split("train")) == [
        ("train/images/b.jpg", "wolf", [40, 15, 20, 20]),
        ("train/images/b.jpg", "ant", [10, 5, 20, 20]),
    ]
    for name in ("val", "valid", "valid/images"):
        assert boxes(folder.split(name)) == [("valid/images/c.jpg", "ant", [0, 0, 50, 50])]


def test_labels_beside_the_images_and_names_in_classes_txt(tmp_path: Path) -> None:
    image(tmp_path / "a.jpg")
    label(tmp_path / "a.txt", "1 0.5 0.5 1 1")
    label(tmp_path / "classes.txt", "one\ntwo\n")
    assert boxes(read_folder(tmp_path).content) == [("a.jpg", "two", [0, 0, 100, 50])]


def test_contradicting_files_are_refused(tmp_path: Path) -> None:
    image(tmp_path / "images/a.jpg")
    label(tmp_path / "labels/a.txt", "1 0.5 0.5 1 1")
    label(tmp_path / "classes.txt", "one\ntwo\n")
    label(tmp_path / "labels/classes.txt", "one\ntwo\n")
    assert len(read_folder(tmp_path).content.annotations) == 1
    read_folder.cache_clear()
    label(tmp_path / "labels/classes.txt", "two\none\n")
    with pytest.raises(InputError, match=r"its files classes\.txt differ: classes\.txt, labels/classes\.txt"):
        read_folder(tmp_path)
    (tmp_path / "labels/classes.txt").unlink()
    label(tmp_path / "images/a.txt", "0 0.5 0.5 1 1")
    with pytest.raises(InputError, match=r"images/a\.txt and labels/a\.txt are for the same image"):
        read_folder(tmp_path)


@pytest.mark.parametrize("base", ["", "path: ../datasets/pets\n", "path: /content/pets\n", "path: pets\n"])
@pytest.mark.parametrize("lists", [False, True])
def test_splits_of_ultralytics(tmp_path: Path, base: str, lists: bool) -> None:
    for split, name in (("train", "a"), ("val", "b"), ("more", "z")):
        image(tmp_path / "images" / split / f"{name}.jpg")
        label(tmp_path / "labels" / split / f"{name}.txt", "0 0.5 0.5 0.5 0.5")
    entries = {"train": "images/train", "val": "images/val"}
    if lists:
        for split, name in (("train", "a"), ("val", "b")):
            (tmp_path / f"{split}.txt").write_text(f"./images/{split}/{name}.jpg\n")
            entries[split] = f"{split}.txt"
    (tmp_path / "data.yaml").write_text(
        f"{base}train: [{entries['train']}]\nval: {entries['val']}\ntest:\nnames:\n  0: cat\n"
    )
    folder = read_folder(tmp_path)
    assert [i["file_name"] for i in folder.content.images] == ["images/train/a.jpg", "images/val/b.jpg"]
    assert [i["id"] for i in folder.split("val").images] == [2]


def test_sizes_are_those_after_the_rotation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image(tmp_path / "images/a.jpg", exif=exif)
    label(tmp_path / "labels/a.txt", "0 0.5 0.25 0.5 0.5")
    label(tmp_path / "classes.txt", "cat")
    content = read_folder(tmp_path).content
    assert [(i["height"], i["width"]) for i in content.images] == [(100, 50)]
    assert boxes(content) == [("images/a.jpg", "cat", [12.5, 0, 25, 50])]
    config = load_config(None, [f"data.root={tmp_path}", "data.transforms.random_crop=0"])
    _, target = build_train_data(config)[SampleKey(0, 0)]
    torch.testing.assert_close(target.boxes, torch.tensor([[0.5, 0.25, 0.5, 0.5]]), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.bmp", "a.tiff", "a.gif"])
def test_header_sizes(tmp_path: Path, name: str) -> None:
    image(tmp_path / name, (31, 17))
    assert header_size(tmp_path / name) == (17, 31)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:9])
    assert header_size(tmp_path / name) is None
    assert header_size(tmp_path) is None
    assert header_size(tmp_path / "none") is None


def test_an_unreadable_image_is_reported_by_the_checks(tmp_path: Path) -> None:
    root = yolo(tmp_path)
    (root / "train/images/b.jpg").write_bytes(b"not an image")
    config = load_config(None, [f"data.root={root}", "data.train.split=train", "data.val.split=val"])
    found = DetectionTask(config).examine().errors
    assert "file-unreadable" in {finding.code for finding in found}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0.5 0.5 0.2", r"b\.txt:1: 0 0\.5 0\.5 0\.2 is no label"),
        ("0 0.5 0.5 0.2 0.2\n0 0.5 0.5 0.2 0.2 0.9", r"b\.txt:2: .* is no label"),  # with a score: a prediction
        ("cat 0.5 0.5 0.2 0.2", "is no label"),
        ("2 0.5 0.5 0.2 0.2", r"b\.txt:1: class 2, but the classes are 0 to 1"),
        ("-1 0.5 0.5 0.2 0.2", "class -1"),
        ("0.5 0.5 0.5 0.2 0.2", r"class 0\.5"),
        ("nan 0.5 0.5 0.2 0.2", "class nan"),
        ("0 50 25 20 20", "values outside 0 to 1"),
        ("0 0.5 0.5 -0.2 0.2", "values outside 0 to 1"),
        ("0 0.5 nan 0.2 0.2", "values outside 0 to 1"),
        ("0 0.5 0.5 0.2 " + "9" * 5000, "values outside 0 to 1"),
        (b"0 0.5 0.5 0.2 0.2\xff", "expected lines of UTF-8 text"),
    ],
)
def test_a_bad_label_is_named_with_file_and_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    root = yolo(tmp_path)
    (root / "train/labels/b.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message):
        read_folder(root)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("names: 5", "names is 5, expected the class names"),
        ("names: {1: a}", "names is {1: 'a'}"),
        ("names: []", r"the class names are \[\]"),
        ("names: [yes, no]", "in quotes where YAML reads yes"),
        ("names: [a, a]", "each name once"),
        ("[1]", "must contain 'key: value' lines"),
        ("names: [a, b", "is not YAML"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nnames: [*b, *b]", "expected text, each name once"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("train: 5\nnames: [a, b]", "train is 5, expected a path"),
        ("train: /etc\nnames: [a, b]", "train is /etc, which leads out of"),
        ("train: train/../../other\nnames: [a, b]", "which leads out of"),
        (
            "train: list.txt\nnames: [a, b]",
            r"list\.txt:1: /etc/passwd is /etc/passwd, which leads out of|list\.txt:1 is",
        ),
    ],
)
def test_bad_settings_of_yolo(tmp_path: Path, settings: str, message: str) -> None:
    root = yolo(tmp_path, settings)
    (root / "list.txt").write_text("/etc/passwd\n")
    with pytest.raises(InputError, match=message):
        read_folder(root)


def test_labels_without_image_or_names_are_refused(tmp_path: Path) -> None:
    root = yolo(tmp_path)
    label(root / "train/labels/lost.txt", "0 0.5 0.5 0.1 0.1")
    with pytest.raises(InputError, match=r"train/labels/lost\.txt has no image"):
        read_folder(root)
    read_folder.cache_clear()
    (root / "train/labels/lost.txt").unlink()
    (root / "data.yaml").unlink()
    with pytest.raises(InputError, match="YOLO labels without class names"):
        read_folder(root)


def test_a_folder_of_two_forms_needs_the_setting(tmp_path: Path) -> None:
    root = yolo(tmp_path)
    label(root / "a.xml", "<annotation></annotation>")
    with pytest.raises(InputError, match=r"could be of the forms voc, yolo: give data\.format"):
        read_folder(root)
    assert len(read_folder(root, "yolo").content.images) == 3


def roboflow(root: Path, make: Factory) -> Path:
    """Write two splits whose category ids differ, and a supercategory without objects."""
    for name, ids, first in (("train", (1, 2), 1), ("valid", (2, 1), 101)):
        data = make(num_images=3, category_ids=ids, name=f"made_{name}", first_image_id=first)
        (root / name).mkdir(parents=True)
        for file in data.images.iterdir():
            file.rename(root / name / file.name)
        names = {ids[0]: "wolf", ids[1]: "ant"}
        data.content["categories"] = [
            {"id": 0, "name": "animals", "supercategory": "none"},
            *({"id": i, "name": names[i], "supercategory": "animals"} for i in ids),
        ]
        (root / name / "_annotations.coco.json").write_text(json.dumps(data.content))
    return root


def test_folders_of_roboflow(coco_folder: Factory, tmp_path: Path) -> None:
    root = roboflow(tmp_path / "root", coco_folder)
    folder = read_folder(root)
    assert [i["file_name"] for i in folder.content.images] == [
        *(f"train/{number:04d}.png" for number in (1, 2, 3)),
        *(f"valid/{number:04d}.png" for number in (101, 102, 103)),
    ]
    assert folder.content.categories == [{"id": 1, "name": "ant"}, {"id": 2, "name": "wolf"}]
    config = load_config(None, [f"data.root={root}", "data.train.split=train", "data.val.split=valid"])
    found = {finding.code for finding in DetectionTask(config).examine().findings}
    assert found == {"few-steps", "few-images", "few-val-images"}, "nothing but the small numbers of this test"
    train = build_train_data(config)
    val = build_val_data(config, train.class_map)
    for split, data in (("train", train), ("valid", val)):
        given = json.loads((root / split / "_annotations.coco.json").read_text())
        names = {category["id"]: category["name"] for category in given["categories"]}
        files = {image["id"]: f"{split}/{image['file_name']}" for image in given["images"]}
        assert boxes(folder.split(split)) == [
            (files[a["image_id"]], names[a["category_id"]], a["bbox"]) for a in given["annotations"]
        ]
        assert len(data) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["images"][0].update(file_name="../x.png"), "leads out of the folder"),
        (lambda c: c["images"][0].update(file_name="/etc/passwd"), "leads out of the folder"),
        (lambda c: c["images"][1].update(id=1), "lists an image id or a file twice"),
        (lambda c: c["annotations"][0].update(image_id=77), r"annotations\[0\] names image 77"),
        (lambda c: c["annotations"][0].update(category_id=77), "category 77, and one of them is not listed"),
        (lambda c: c["categories"][0].pop("name"), "category 0 has no name"),
        (lambda c: c.pop("images"), "images missing"),
    ],
)
def test_bad_files_of_roboflow(
    coco_folder: Factory, tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    root = roboflow(tmp_path / "root", coco_folder)
    path = root / "train" / "_annotations.coco.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        read_folder(root)


@pytest.mark.parametrize("form", ["voc", "yolo"])
def test_the_writers_of_hotcoco_are_read_back(coco_folder: Factory, tmp_path: Path, form: str) -> None:
    hotcoco = pytest.importorskip("hotcoco")
    data = coco_folder()
    root = tmp_path / "written"
    for file in data.images.iterdir():
        image(root / "images" / file.name, (64, 48))
    labels = root if form == "voc" else root / "labels"
    labels.mkdir(exist_ok=True)
    getattr(hotcoco.COCO(str(data.annotations)), f"to_{form}")(str(labels))
    if form == "yolo":
        (labels / "data.yaml").rename(root / "data.yaml")
    found = sorted(boxes(read_folder(root).content))
    given = read_annotations(data.annotations)
    expected = sorted((f"images/{file}", name, box) for file, name, box in boxes(given))
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[2] == pytest.approx(other[2], abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            YAML.replace("valid/", "vald/"),
            r"split val .*vald/images and has no images, and 1 labelled images .* such as valid/images/c\.jpg: correct",
        ),
        (YAML.replace("train/", "trian/"), r"split train .*trian/images and has no images, and 1 labelled images"),
        (
            "train: nowhere\nval: [train, valid]\nnames: [wolf, ant]\n",
            r"split train .* has no images: correct its path",
        ),
    ],
)
def test_a_split_that_leads_nowhere(tmp_path: Path, settings: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_folder(yolo(tmp_path, settings))


def test_an_empty_split_of_roboflow(tmp_path: Path) -> None:
    folder = read_folder(yolo(tmp_path, YAML + "test: ../test/images\n"))
    assert len(folder.content.images) == 3
    with pytest.raises(InputError, match=r"test/images has no images"):
        folder.split("test")


def test_labels_in_a_folder_of_another_name(tmp_path: Path) -> None:
    image(tmp_path / "images/a.jpg")
    label(tmp_path / "labelTxt/a.txt", "0 0.5 0.5 0.1 0.1")
    label(tmp_path / "data.yaml", "train: images\nnames: [cat]\n")
    with pytest.raises(
        InputError, match=r"none of its 1 images has a label file.*; labelTxt/a\.txt has the name of one"
    ):
        read_folder(tmp_path)


@pytest.mark.parametrize("row", [*YOLO_FOLDERS, *NAMED_FILES], ids=lambda row: f"{row.tool}: {row.name}")
def test_folders_of_public_tools(tmp_path: Path, row: PublicFolder) -> None:
    row.build(tmp_path)
    if row.message is not None:
        with pytest.raises(InputError, match=row.message):
            read_folder(tmp_path)
        return
    content = read_folder(tmp_path).content
    found: dict[str, list[Any]] = {image["file_name"]: [] for image in content.images}
    for file, *box in boxes(content):
        found[file].append((box[0], *box[1]))
    assert found == row.boxes


def test_images_that_are_left_out_and_clipped_lines_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "yolo"
    for name in ("images/a", "images/b", "raw/1", "raw/2", "more/raw/3"):
        image(root / f"{name}.jpg")
    label(root / "labels/a.txt", "0 0.5 0.5 1.03 0.4\n0 0.5 0.5 0.4 0.4\n0 -0.008 0.2 0.8 0.2 0.8 0.5\n")
    label(root / "classes.txt", "cat")
    content = read_folder(root).content
    assert [entry["file_name"] for entry in content.images] == ["images/a.jpg", "images/b.jpg"]
    left_out, clipped = (record.getMessage() for record in caplog.records if "are polygons" not in record.message)
    assert left_out.startswith(f"{root}: 3 images are left out, because their folders have no label files")
    assert left_out.endswith(": raw (2), more/raw (1)")
    assert clipped.startswith(f"{root}: the boxes of 2 label lines are clipped to the image")
    assert clipped.endswith(f"reach from -0.008 to 1.03, first {root}/labels/a.txt:1")

    caplog.clear()
    table = tmp_path / "csv"
    for name in ("images/a", "images/b", "raw/1"):
        image(table / f"{name}.jpg")
    label(table / "labels.csv", "filename,class,xmin,ymin,xmax,ymax\na.jpg,cat,1,1,9,9\n")
    assert len(read_folder(table).content.images) == 2
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{table}: 1 images are left out, because no row names an image of their folders: raw (1)"
    )


def test_all_bad_lines_are_counted_in_one_error(tmp_path: Path) -> None:
    root = yolo(tmp_path)
    label(root / "train/labels/b.txt", "\n".join(["0 0.5 0.5 0.2 0.2", *["0 40 20 9 9"] * 20]))
    label(root / "valid/labels/c.txt", "7 0.5 0.5 0.2 0.2")
    with pytest.raises(InputError) as caught:
        read_folder(root)
    assert f"{root}: 21 label lines in 2 files cannot be used: {root}/train/labels/b.txt:2: 0 40" in str(caught.value)
    assert str(caught.value).endswith("and 13 more")


def test_a_split_name_in_another_unicode_form(tmp_path: Path) -> None:
    image(tmp_path / "cafe\u0301/images/a.jpg")
    label(tmp_path / "caf\u00e9/labels/a.txt", "0 0.5 0.5 0.5 0.5")
    label(tmp_path / "classes.txt", "cat")
    folder = read_folder(tmp_path)
    assert len(folder.split("caf\u00e9").annotations) == len(folder.split("cafe\u0301").annotations) == 1


@pytest.mark.parametrize("shape", ["3", "[3]", "[3, 4]", "[0, 2]", "[a, 2]", "{a: 1}"])
def test_bad_numbers_of_keypoints(tmp_path: Path, shape: str) -> None:
    root = yolo(tmp_path, f"{YAML}kpt_shape: {shape}\n")
    with pytest.raises(InputError, match=r"kpt_shape is .*, expected the number of keypoints, and 2 or 3 values"):
        read_folder(root)


def test_the_pose_of_the_issue(tmp_path: Path) -> None:
    image(tmp_path / "a.jpg", (15, 10))
    label(tmp_path / "a.txt", "0 0.1333 0.3 0.2667 0.2 0.1 0.2 0.3 0.4 0.5 0.6")
    label(tmp_path / "data.yaml", "names: [cat]\nkpt_shape: [3, 2]\n")
    [(_, _, (x, y, width, height))] = boxes(read_folder(tmp_path).content)
    assert (x, y, x + width, y + height) == pytest.approx((0, 2, 4, 4), abs=2e-3)
    read_folder.cache_clear()
    label(tmp_path / "data.yaml", "names: [cat]\n")
    assert boxes(read_folder(tmp_path).content) == [("a.jpg", "cat", [1.5, 2, 6, 4])]  # a polygon


def test_a_path_that_exists_is_not_shortened(tmp_path: Path) -> None:
    """One path of the list exists, so the others are missing files and not files under an end of their paths."""
    index = PathIndex(["train/1.jpg", "2.jpg", "images/3.jpg"])
    assert index.find_all(["train/1.jpg", "train/2.jpg"]) == ["train/1.jpg", None]
    assert index.find_all(["x/train/1.jpg", "x/train/2.jpg"]) == ["train/1.jpg", "2.jpg"]
    assert index.find_all([r"..\..\up\3.jpg"], ["", "images"]) == ["images/3.jpg"]
    assert index.find_all(["/etc/passwd", "../../..", ""]) == [None, None, None]
