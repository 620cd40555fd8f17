"""Folders of COCO JSON files and of CSV tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from detr_bf.assembly import build_train_data, build_val_data, data_source
from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.data.coco import read_annotations
from detr_bf.data.formats import read_folder
from detr_bf.tasks.detection import DetectionTask

Factory = Callable[..., SimpleNamespace]


def write(root: Path, json_file: str, folder: str, data: SimpleNamespace) -> None:
    """Put the images of a data set into ``folder`` and its annotations into ``json_file``."""
    (root / json_file).parent.mkdir(parents=True, exist_ok=True)
    (root / json_file).write_text(json.dumps(data.content))
    (root / folder).mkdir(parents=True, exist_ok=True)
    for path in data.images.iterdir():
        (root / folder / path.name).write_bytes(path.read_bytes())


LAYOUTS = {
    "coco": ("annotations/instances_{}2017.json", "{}2017"),
    "cvat": ("annotations/instances_{}.json", "images/{}"),
    "beside": ("{}/annotations.json", "{}"),
    "label studio": ("{}/result.json", "{}/images"),
    "names of splits": ("{}.json", "images"),
    "folders of splits": ("{}.json", "{}/images"),
}


@pytest.mark.parametrize(("json_file", "folder"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_layouts_of_coco_files(coco_folder: Factory, tmp_path: Path, json_file: str, folder: str) -> None:
    root = tmp_path / "root"
    given = {"train": coco_folder(num_images=4), "val": coco_folder(num_images=3, first_image_id=101, name="val")}
    for name, data in given.items():
        write(root, json_file.format(name), folder.format(name), data)
    (root / "license.txt").write_text("free")
    (root / "info.json").write_text('{"version": 1}')
    splits = [f"{name}2017" if "2017" in json_file else name for name in given]
    chosen = [f"data.train.split={splits[0]}", f"data.val.split={splits[1]}"]
    config = load_config(None, [f"data.root={root}", *chosen])
    found = {finding.code for finding in DetectionTask(config).examine().findings}
    assert found == {"few-steps", "few-images", "few-val-images"}, "nothing but the small numbers of this test"
    train = build_train_data(config)
    val = build_val_data(config, train.class_map)
    assert train.class_map.category_ids == (3, 7, 90), "ids of the files"
    for data, source in ((train, given["train"]), (val, given["val"])):
        assert data.image_ids == [image["id"] for image in source.content["images"]]
        expected = [image["file_name"] for image in source.content["images"]]
        assert [Path(name).name for name in data.file_names] == expected
    folder_read = read_folder(root)
    for split, data in zip(splits, given.values(), strict=True):
        assert [each["bbox"] for each in folder_read.split(split).annotations] == [
            each["bbox"] for each in data.content["annotations"]
        ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("templates/{}", "train/templates/{}"),  # below the folder of the images
        ("../plain/{}", "plain/{}"),
        ("plain/{}", "plain/{}"),  # below the root
        ("{}", "{}"),  # the name of the image itself: in a folder of references
        ("nowhere/{}", "nowhere/{}"),
    ],
)
@pytest.mark.parametrize("settings", [["data.train.split=train"], ["data.val_fraction=0.5"], ["data.folds=2"]])
def test_references_of_a_folder(
    coco_folder: Factory, tmp_path: Path, given: str, expected: str, settings: list[str]
) -> None:
    root, data = tmp_path / "root", coco_folder(num_images=4)
    for image in data.content["images"]:
        image["template"] = given.format(image["file_name"])
    write(root, "train.json", "train", data)
    write(root, "unused.json.txt", "plain", data)
    write(root, "unused.json.txt", "train/templates", data)
    config = load_config(None, [f"data.root={root}", *settings])
    found = read_annotations(data_source(config, "train").annotations).images
    assert len(found) == (4 if "split" in settings[0] else 2)
    for image in found:
        assert image["template"] == expected.format(Path(image["file_name"]).name)
    config = load_config(None, [f"data.root={root}", *settings, f"data.train.references={tmp_path / 'plain'}"])
    for image in read_annotations(data_source(config, "train").annotations).images:
        assert image["template"] == given.format(Path(image["file_name"]).name), "relative to the folder of references"


@pytest.mark.parametrize(
    ("json_file", "images"), [("annotations/instances_default.json", "images/default"), ("labels.json", "data")]
)
def test_exports_of_cvat_and_fiftyone(coco_folder: Factory, tmp_path: Path, json_file: str, images: str) -> None:
    write(tmp_path / "root", json_file, images, coco_folder())
    content = read_folder(tmp_path / "root").split("")
    assert content.images[0]["file_name"] == f"{images}/0001.png"


def test_a_link_to_nowhere_and_odd_ids(coco_folder: Factory, tmp_path: Path) -> None:
    root, data = tmp_path / "root", coco_folder()
    data.content["annotations"][0]["id"] = [1]
    write(root, "train.json", "images", data)
    assert len(read_folder(root).content.annotations) == 8
    (root / "other.json").symlink_to("nowhere.json")
    read_folder.cache_clear()
    with pytest.raises(InputError, match=r"other\.json is not JSON"):
        read_folder(root)


def test_one_file_is_all_images(coco_folder: Factory, tmp_path: Path) -> None:
    write(tmp_path / "root", "annotations.json", "images", coco_folder())
    content = read_folder(tmp_path / "root").split("")
    assert [image["file_name"] for image in content.images] == [f"images/{number:04d}.png" for number in range(1, 5)]


def test_files_with_the_same_ids_are_numbered_anew(coco_folder: Factory, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("train", "val"):
        data = coco_folder(name=name)
        write(root, f"{name}/annotations.json", name, data)
    content = read_folder(root).content
    assert [image["id"] for image in content.images] == list(range(1, 9))
    assert [each["id"] for each in content.annotations] == list(range(1, 17))
    assert [each["image_id"] for each in content.annotations] == [number for number in range(1, 9) for _ in range(2)]


def rename(data: SimpleNamespace) -> None:
    data.content["categories"][0]["name"] = "another"


def lose(data: SimpleNamespace) -> None:
    for image in data.content["images"]:
        image["file_name"] = f"lost/x{image['file_name']}"


def leave(data: SimpleNamespace) -> None:
    data.content["images"][0]["file_name"] = "../train/9999.png"


def take(data: SimpleNamespace) -> None:
    data.content["images"][0]["file_name"] = "../train/0001.png"


def renumber(data: SimpleNamespace) -> None:
    data.content["categories"][0]["id"] = 4
    for each in data.content["annotations"]:
        each["category_id"] = max(each["category_id"], 4)


def orphan(data: SimpleNamespace) -> None:
    data.content["annotations"][0]["image_id"] = 77


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, "calls category 3 another, and another file of .* class3: they do not belong together"),
        (lose, r"val\.json: lost/x0001\.png and the images after it are in none of the folders"),
        (leave, "leads out of the folder"),
        (take, r"train/0001\.png is listed in train\.json and in val\.json"),
        (renumber, r"call class3 both category 3 and category 4"),
        (orphan, "has annotations of image 77, not listed"),
    ],
)
def test_files_that_contradict_each_other(
    coco_folder: Factory, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    root = tmp_path / "root"
    write(root, "train.json", "train", coco_folder())
    data = coco_folder(name="val")
    change(data)
    write(root, "val.json", "val", data)
    with pytest.raises(InputError, match=message):
        read_folder(root)


def test_an_image_in_two_files_and_broken_json(coco_folder: Factory, tmp_path: Path) -> None:
    root, data = tmp_path / "root", coco_folder()
    write(root, "all.json", "images", data)
    write(root, "train.json", "images", data)
    with pytest.raises(InputError, match=r"images/0001\.png is listed in all\.json and in train\.json"):
        read_folder(root)
    (root / "all.json").write_text("{")
    read_folder.cache_clear()
    with pytest.raises(InputError, match=r"all\.json is not JSON"):
        read_folder(root)
    for name in ("all.json", "train.json"):
        (root / name).write_text("{}")
    read_folder.cache_clear()
    with pytest.raises(InputError, match="has no JSON file with images, annotations and categories"):
        read_folder(root)


def table(root: Path, text: str, name: str = "labels.csv", images: str = "") -> Path:
    (root / images).mkdir(parents=True, exist_ok=True)
    for file in ("a.jpg", "b.jpg", "c.jpg"):
        Image.new("RGB", (100, 50)).save(root / images / file)
    (root / name).write_text(text, encoding="utf-8")
    return root


CORNERS = "filename,width,height,class,xmin,ymin,xmax,ymax\nb.jpg,100,50,dog,10,20,30,45\nb.jpg,100,50,cat,0,0,5,5\n"
SAME = [
    CORNERS + ",,,,,,,\n",
    "\ufeff" + CORNERS.replace(",", ";"),
    "image\tlabel\tx\ty\tw\th\r\nb.jpg\tdog\t10\t20\t20\t25\r\nb.jpg\tcat\t0\t0\t5\t5\r\n",
    " Path , NAME , x , y , width , height \n b.jpg , dog , 10 , 20 , 20 , 25 \nb.jpg,cat,0,0,5,5\na.jpg,,,,,\n",
    '"x1","y1","x2","y2","file","category"\n"10","20","30","45","b.jpg","dog"\n"0","0","5","5","b.jpg","cat"\n',
]


@pytest.mark.parametrize("text", SAME, ids=range(len(SAME)))
@pytest.mark.parametrize("images", ["", "images"])
def test_tables_of_objects(tmp_path: Path, text: str, images: str) -> None:
    content = read_folder(table(tmp_path, text, images=images)).split("")
    assert [Path(image["file_name"]).name for image in content.images] == ["a.jpg", "b.jpg", "c.jpg"]
    assert [category["name"] for category in content.categories] == ["cat", "dog"]
    assert [(each["image_id"], each["category_id"], each["bbox"]) for each in content.annotations] == [
        (2, 2, [10, 20, 20, 25]),
        (2, 1, [0, 0, 5, 5]),
    ]


def test_a_box_of_the_whole_image_is_a_box(tmp_path: Path) -> None:
    root = table(tmp_path, "filename,class,x,y,width,height\na.jpg,dog,0,0,100,50\nb.jpg,dog,0,0,100,50\n")
    assert [each["bbox"] for each in read_folder(root).content.annotations] == [[0, 0, 100, 50]] * 2


def test_two_tables_in_one_folder_are_refused(tmp_path: Path) -> None:
    table(table(tmp_path, CORNERS), CORNERS, "annotations.csv")
    with pytest.raises(InputError, match=r"two tables in one folder: annotations\.csv, labels\.csv"):
        read_folder(tmp_path)


def test_tables_of_roboflow_for_each_split(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        table(tmp_path / split, CORNERS, "_annotations.csv")
    folder = read_folder(tmp_path)
    assert len(folder.content.annotations) == 4
    assert [image["file_name"] for image in folder.split("valid").images] == [f"valid/{x}.jpg" for x in "abc"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("filename,class\na.jpg,dog\n", r"labels\.csv has the columns filename, class; expected a header"),
        ("", "has the columns ; expected a header"),
        (CORNERS.replace("b.jpg", "z.jpg"), r"labels\.csv:2: there is no image z\.jpg, nor images/z\.jpg"),
        (CORNERS.replace("20,30", "x,30"), r"labels\.csv:2 has the box 10, x, 30, 45, expected four numbers"),
        (CORNERS.replace("20,30", "nan,30"), "expected four numbers"),
        (CORNERS.replace("45\n", "45,1\n"), r"labels\.csv:2 has more fields than the header"),
        (CORNERS.replace("b.jpg", "", 1), r"labels\.csv:2 names no file"),
        (CORNERS.replace("dog", ""), r"labels\.csv:2 has a box and no class"),
        ('filename,class,x,y,w,h\n"a.jpg,dog,1,2,3,4\n', "cannot be used"),
        (
            "filename,class,left,top,right,bottom,width,height\na.jpg,dog,1,2,9,9,8,7\n",
            "left, top, right, bottom and left, top",
        ),
        ("filename,class,x,y,width,height\na.jpg,dog,1,2,100,50\nb.jpg,dog,0,2,100,50\n", "are those of the image"),
        ('filename,class,bbox\na.jpg,dog,"[1, 2, 3, 4]"\n', "bbox as four columns x, y, width, height"),
        ("filename,class,x,y,w,h\na.jpg,,,,,\n", "no objects and therefore no classes"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_folder(table(tmp_path, text))
