"""Values of annotations: data checks, data set and evaluators accept the same values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap, Detections
from detr_bf.data.annotation_values import annotation_values, is_crowd, object_area, png_name, value_text
from detr_bf.data.checks.annotations import examine
from detr_bf.data.coco import CocoDetection, Source, read_annotations
from detr_bf.data.transforms import eval_transform
from detr_bf.evaluation import CocoEvaluator, PanopticEvaluator

Factory = Callable[..., SimpleNamespace]
HUGE = 10**400
RESIZE = eval_transform(short_side=48, max_size=64)

BAD_VALUES = [
    ({"iscrowd": "0"}, "iscrowd-unknown"),
    ({"iscrowd": 2}, "iscrowd-unknown"),
    ({"iscrowd": []}, "iscrowd-unknown"),
    ({"iscrowd": float("nan")}, "iscrowd-unknown"),
    ({"area": "12"}, "area-not-number"),
    ({"area": [12]}, "area-not-number"),
    ({"area": float("nan")}, "area-not-number"),
    ({"area": float("inf")}, "area-not-number"),
    ({"area": -1}, "area-not-number"),
    ({"area": HUGE}, "area-not-number"),
    ({"area": True}, "area-not-number"),
    ({"bbox": [1, 2, 3, HUGE]}, "box-not-numbers"),
    ({"bbox": [1, 2, 3, 1e300]}, "box-not-numbers"),
    ({"iscrowd": 1, "bbox": None}, "box-not-numbers"),
    ({"iscrowd": 1, "bbox": "1 2 3 4"}, "box-not-numbers"),
    ({"iscrowd": 1, "category_id": 4}, "category-unknown"),
]


@pytest.mark.parametrize(("change", "code"), BAD_VALUES)
def test_the_checks_find_what_data_set_and_evaluation_refuse(
    coco_folder: Factory, tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    data, clean = coco_folder(name="val", first_image_id=101), coco_folder()
    data.content["annotations"][0].update(change)
    data.save()
    source, train = Source(data.images, data.annotations), Source(clean.images, clean.annotations)
    for first, second, split in ((train, source, "val"), (source, train, "train")):
        errors = examine(first, second, num_queries=10, cache_dir=tmp_path / "cache").errors
        assert (split, code) in {(error.split, error.code) for error in errors}
    with pytest.raises(InputError, match=r"detr-bf check"):
        CocoDetection(data.images, data.annotations, RESIZE)
    classes = read_annotations(clean.annotations).class_map
    with pytest.raises(InputError, match=r"detr-bf check|does not know"):
        CocoEvaluator(data.annotations, classes)


@pytest.mark.parametrize("engine", ["pycocotools", "hotcoco"])
@pytest.mark.parametrize(
    "change",
    [
        {"iscrowd": None, "area": None},
        {"iscrowd": 0.0, "area": 12.5},
        {"iscrowd": True, "area": 0},
        {"bbox": [1, 2, -3, 4]},
        {"bbox": [-1e9, 2, 1e9, 4]},
        {"id": "a1"},
        {"id": 2**70},
        {"segmentation": {"size": [1], "counts": 5}},
        {"segmentation": "none"},
    ],
)
def test_values_that_the_checks_accept_are_evaluated(
    coco_folder: Factory, tmp_path: Path, change: dict[str, Any], engine: str
) -> None:
    pytest.importorskip(engine)
    data = coco_folder()
    data.content["annotations"][0].update(change)
    data.content["categories"][0]["name"] = "\ud800\n"
    data.save()
    report = examine(Source(data.images, data.annotations), None, num_queries=10, cache_dir=tmp_path / "cache")
    assert report.errors == ()
    evaluator = CocoEvaluator(data.annotations, CocoDetection(data.images, data.annotations, RESIZE).class_map, engine)
    box, score, label = torch.tensor([[1.0, 2.0, 5.0, 9.0]]), torch.tensor([0.5]), torch.tensor([0])
    evaluator.update([Detections(image["id"], box, score, label) for image in data.content["images"]])
    assert evaluator.summarize().num_images == 4


@pytest.mark.parametrize("part", ["images", "annotations", "categories"])
@pytest.mark.parametrize("value", [-1, 2**63, HUGE, True, 1.0, "1", None, [1], {}])
def test_ids_are_whole_numbers_of_63_bits(coco_folder: Factory, part: str, value: object) -> None:
    data = coco_folder()
    key = "category_id" if part == "annotations" else "id"
    data.content[part][0][key] = value
    data.save()
    with pytest.raises(
        InputError, match=rf"{part}\[0\]: {key} is .*, expected a whole number from 0 to 92233"
    ) as caught:
        read_annotations(data.annotations)
    assert len(str(caught.value)) < 600


BAD_SEGMENTS = [
    ({"area": None}, "area-not-number"),
    ({"area": "12"}, "area-not-number"),
    ({"area": 12.0}, "area-not-number"),
    ({"area": 0}, "area-not-number"),
    ({"area": HUGE}, "area-not-number"),
    ({"iscrowd": None}, "iscrowd-unknown"),
    ({"iscrowd": "0"}, "iscrowd-unknown"),
]


@pytest.mark.parametrize(("change", "code"), BAD_SEGMENTS)
@pytest.mark.parametrize("absent", [False, True])
def test_the_checks_find_what_panoptic_evaluation_refuses(
    panoptic_folder: Factory, tmp_path: Path, change: dict[str, Any], code: str, absent: bool
) -> None:
    data = panoptic_folder()
    segment = data.content["annotations"][1]["segments_info"][0]
    if absent:
        del segment[next(iter(change))]
    else:
        segment.update(change)
    data.save()
    source = Source(data.images, data.annotations, data.panoptic)
    [error] = examine(source, None, num_queries=10, masks=True, cache_dir=tmp_path / "cache").errors
    assert (error.code, error.count) == (code, 1)
    with pytest.raises(InputError, match=rf"{next(iter(change))}.*detr-bf check"):
        CocoDetection(data.images, data.annotations, RESIZE, masks=True, panoptic=data.panoptic)
    with pytest.raises(InputError, match=next(iter(change))):
        PanopticEvaluator(data.annotations, data.panoptic, read_annotations(data.annotations).class_map)


@pytest.mark.parametrize("file_name", ["../{}", "{folder}/{}", "a/../{}"])
def test_names_that_lead_out_of_the_results_are_found_before(
    panoptic_folder: Factory, tmp_path: Path, file_name: str
) -> None:
    data = panoptic_folder()
    image = data.content["images"][0]
    image["file_name"] = file_name.format(image["file_name"], folder=data.images)
    data.save()
    source = Source(data.images, data.annotations, data.panoptic)
    errors = examine(source, None, num_queries=10, masks=True, cache_dir=tmp_path / "cache").errors
    assert "output-name" in {error.code for error in errors}
    with pytest.raises(InputError, match=r"expected a relative one without '\.\.'"):
        CocoDetection(data.images, data.annotations, RESIZE, masks=True, panoptic=data.panoptic)
    boxes = examine(source, None, num_queries=10, cache_dir=tmp_path / "cache").errors
    assert "output-name" not in {error.code for error in boxes}, "boxes are written to one file"


def test_two_images_that_differ_in_their_extension_alone(panoptic_folder: Factory, tmp_path: Path) -> None:
    data = panoptic_folder()
    second = data.content["images"][1]
    other = data.images / "0001.bmp"
    other.write_bytes((data.images / second["file_name"]).read_bytes())
    second["file_name"] = other.name
    data.save()
    source = Source(data.images, data.annotations, data.panoptic)
    [error] = examine(source, None, num_queries=10, masks=True, cache_dir=tmp_path / "cache").errors
    assert (error.code, error.count) == ("output-name-repeated", 1)
    assert error.example == "image 2, 0001.bmp and image 1, 0001.png"
    with pytest.raises(InputError, match="images 1 and 2 would give result PNGs of the same name"):
        CocoDetection(data.images, data.annotations, RESIZE, masks=True, panoptic=data.panoptic)


def test_a_panoptic_annotation_of_no_image(panoptic_folder: Factory, tmp_path: Path) -> None:
    data = panoptic_folder()
    data.content["annotations"].append({"image_id": 99, "file_name": "0001_segments.png", "segments_info": []})
    data.save()
    source = Source(data.images, data.annotations, data.panoptic)
    [error] = examine(source, None, num_queries=10, masks=True, cache_dir=tmp_path / "cache").errors
    assert (error.code, error.example) == ("annotation-of-no-image", "image 99, 0001_segments.png")


def test_a_class_that_is_a_thing_in_one_split_alone(panoptic_folder: Factory, tmp_path: Path) -> None:
    sets = [panoptic_folder(), panoptic_folder(name="val", first_image_id=101)]
    sets[1].content["categories"][0]["isthing"] = 0
    sets[1].save()
    sources = [Source(data.images, data.annotations, data.panoptic) for data in sets]
    [error] = examine(*sources, num_queries=10, masks=True, cache_dir=tmp_path / "cache").errors
    assert (error.split, error.code) == ("train, val", "class-kind-differs")


def test_masks_need_the_sizes_of_validation_images(coco_folder: Factory, tmp_path: Path) -> None:
    sets = [coco_folder(), coco_folder(name="val", first_image_id=101)]
    for data in sets:
        for annotation in data.content["annotations"]:
            annotation["segmentation"] = [[1, 1, 20, 1, 20, 20]]
        del data.content["images"][0]["width"]
        data.save()
    sources = [Source(data.images, data.annotations) for data in sets]
    [error] = examine(*sources, num_queries=10, masks=True, cache_dir=tmp_path / "cache").errors
    assert (error.split, error.code, error.count) == ("val", "size-missing", 1)


def test_values_in_messages_are_short() -> None:
    nested: list[object] = []
    for _ in range(900):
        nested = [nested]
    for value in (HUGE, "x" * 10**6, list(range(10**6)), nested, {"a": nested}, "\ud800\n"):
        text = value_text(value)
        assert len(text) < 200
        assert text.encode().isascii()
        assert "\n" not in text


def test_valid_values_are_returned_as_they_are() -> None:
    found = annotation_values({"bbox": [1, 2, 3, 4.5]})
    assert found == ([1, 2, 3, 4.5], 13.5, False)
    assert object_area({"bbox": [1, 2, 3, 4], "area": 7}) == 7
    assert is_crowd({"iscrowd": 1})
    assert png_name("a/b.tar.jpg") == "a/b.tar.png"
    with pytest.raises(ValueError, match="cannot be turned into the name of a PNG"):
        png_name("x" * 255)


@pytest.mark.parametrize("name", [["a"], {"a": 1}, True])
def test_names_of_categories_are_strings(coco_folder: Factory, name: object) -> None:
    data = coco_folder()
    data.content["categories"][1]["name"] = name
    data.save()
    with pytest.raises(InputError, match=r"categories\[1\]: name is .*, expected a string"):
        read_annotations(data.annotations)


ROBOFLOW = [
    {"id": 0, "name": "vehicles", "supercategory": "none"},
    {"id": 1, "name": "car", "supercategory": "vehicles"},
    {"id": 2, "name": "bus", "supercategory": "vehicles"},
]


def annotations_of(path: Path, categories: list[dict[str, Any]], used: list[int]) -> Path:
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 64, "height": 48}],
        "annotations": [{"image_id": 1, "category_id": i, "bbox": [1, 2, 3, 4]} for i in used],
        "categories": categories,
    }
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("categories", "used", "classes"),
    [
        (ROBOFLOW, [1, 2], (1, 2)),
        (ROBOFLOW, [1], (1, 2)),
        (ROBOFLOW, [0, 1], (0, 1, 2)),
        ([{"id": 1, "name": "person", "supercategory": "person"}], [1], (1,)),
        ([{"id": 1, "name": "person", "supercategory": "person"}, {"id": 2, "name": "cat"}], [2], (1, 2)),
        ([{"id": 1, "name": "a", "supercategory": "b"}, {"id": 2, "name": "b", "supercategory": "a"}], [], (1, 2)),
        ([{"id": 1, "name": "a", "supercategory": ["a"]}, {"id": 2, "name": "b", "supercategory": None}], [1], (1, 2)),
    ],
)
def test_a_supercategory_without_objects_is_no_class(
    tmp_path: Path, categories: list[dict[str, Any]], used: list[int], classes: tuple[int, ...]
) -> None:
    content = read_annotations(annotations_of(tmp_path / "a.json", categories, used))
    assert content.class_map.category_ids == classes


def test_train_decides_which_categories_are_classes(coco_folder: Factory, tmp_path: Path) -> None:
    sets = [coco_folder(category_ids=(1, 2)), coco_folder(category_ids=(1, 2), name="val", first_image_id=101)]
    for data in sets:
        for category in data.content["categories"]:
            category["supercategory"] = "things"
        data.content["categories"].insert(0, {"id": 0, "name": "things", "supercategory": "none"})
        data.save()
    train, val = (Source(data.images, data.annotations) for data in sets)
    report = examine(train, val, num_queries=10, cache_dir=tmp_path / "cache")
    assert [(f.severity, f.split, f.code, f.example) for f in report.findings] == [
        ("warning", split, "category-dropped", "0 (things)") for split in ("train", "val")
    ]
    assert "train: 4 images, 8 objects, 2 classes" in str(report)
    classes = CocoDetection(train.images, train.annotations, RESIZE).class_map
    assert classes == ClassMap((1, 2), ("class1", "class2"))
    assert CocoDetection(val.images, val.annotations, RESIZE, classes).class_map == classes
    CocoEvaluator(val.annotations, classes)
    sets[1].content["annotations"][0]["category_id"] = 0
    sets[1].save()
    report = examine(train, val, num_queries=10, cache_dir=tmp_path / "cache")
    assert [error.code for error in report.errors] == ["class-unknown-to-train"]
