from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from detr_bf.common.errors import InputError
from detr_bf.data import coco
from detr_bf.data.annotation_values import unit_problem
from detr_bf.data.checks import files as file_check
from detr_bf.data.checks.annotations import Report, examine
from detr_bf.data.coco import CocoDetection, Source
from detr_bf.data.transforms import eval_transform

Factory = Callable[..., SimpleNamespace]
VERSION = file_check._VERSION
TOOL = Path(__file__).parents[3] / "tools" / "check_data.py"


def split(data: SimpleNamespace) -> Source:
    return Source(data.images, data.annotations)


class DataSets:
    """Valid training and validation sets; each test breaks one thing and checks the findings."""

    def __init__(self, make: Factory, tmp_path: Path) -> None:
        self.train = make()
        self.val = make(num_images=3, name="val", first_image_id=101)
        self.cache = tmp_path / "cache"

    def examine(self, num_queries: int = 10) -> Report:
        self.train.save()
        self.val.save()
        return examine(split(self.train), split(self.val), num_queries=num_queries, cache_dir=self.cache, workers=2)

    def findings(self, num_queries: int = 10) -> list[tuple[str, str, str, int]]:
        findings = self.examine(num_queries).findings
        return [(finding.severity, finding.split, finding.code, finding.count) for finding in findings]


@pytest.fixture
def sets(coco_folder: Factory, tmp_path: Path) -> DataSets:
    return DataSets(coco_folder, tmp_path)


def test_clean_data_has_no_findings(sets: DataSets) -> None:
    report = sets.examine()
    assert report.findings == ()
    assert "train: 4 images, 8 objects, 3 classes" in str(report)
    assert "val: 3 images, 6 objects, 3 classes" in str(report)
    assert str(report).endswith("0 errors, 0 warnings")


def test_missing_file(sets: DataSets) -> None:
    (sets.train.images / "0002.png").unlink()
    assert sets.findings() == [("error", "train", "file-missing", 1)]
    assert sets.examine().errors[0].example == "image 2, 0002.png"


@pytest.mark.parametrize("length", [0, 3, 150])
def test_unreadable_file(sets: DataSets, length: int) -> None:
    path = sets.val.images / "0102.png"
    path.write_bytes(path.read_bytes()[:length])
    assert sets.findings() == [("error", "val", "file-unreadable", 1)]
    assert "image 102, 0102.png" in sets.examine().errors[0].example


def test_size_differs(sets: DataSets) -> None:
    sets.train.content["images"][0]["width"] = 65
    assert sets.findings() == [("error", "train", "size-differs", 1)]
    assert "annotated for 65 x 48 pixels" in sets.examine().errors[0].example


def as_fractions(image: dict[str, Any], box: list[float]) -> list[float]:
    x, y, w, h = box
    return [x / image["width"], y / image["height"], w / image["width"], h / image["height"]]


def as_corners(image: dict[str, Any], box: list[float]) -> list[float]:
    x, y, w, h = box
    return [x, y, x + w, y + h]


@pytest.mark.parametrize(("change", "problem"), [(as_fractions, "look like fractions"), (as_corners, "as the corners")])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("large", [False, True])
def test_boxes_in_another_unit(
    sets: DataSets,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any], list[float]], list[float]],
    problem: str,
    sized: bool,
    large: bool,
) -> None:
    monkeypatch.setattr(coco, "LARGE_FILE", 1 if large else 2**40)
    content = sets.val.content
    images = {image["id"]: image for image in content["images"]}
    for each in content["annotations"]:
        each["bbox"] = [float(value) for value in change(images[each["image_id"]], each["bbox"])]
    for image in content["images"] if not sized else ():
        del image["width"], image["height"]
    found = [finding for finding in sets.examine().errors if finding.code == "box-units"]
    assert [(finding.split, finding.count) for finding in found] == [("val", 1)]
    assert problem in found[0].example
    if sized or change is as_fractions:  # training without checks does not read the images
        with pytest.raises(InputError, match=problem):
            CocoDetection(sets.val.images, sets.val.annotations, eval_transform(short_side=48, max_size=64))


@pytest.mark.parametrize(
    "boxes",
    [
        [[0, 0, 1, 1], [0.2, 0.3, 0.5, 1.5]],  # one is larger than a pixel
        [[30, 20, 60, 40], [30, 20, 20, 20], [1, 2, 20, 30], [3, 2, 20, 30]],  # only one of them leaves the image
        [[30, 20, 60, 40], [30, 20, 20, 60], [30, 20, 20, 60], [1, 2, 3, 4]],  # most do, and are no corners
        [[2, 2, 63, 47], [3, 4, 63, 46]],  # large objects that exceed the image a little
        [[30, 20, 0, 0]],
        [],
    ],
)
def test_boxes_in_pixels(boxes: list[list[float]]) -> None:
    annotations = [{"image_id": 1, "bbox": box} for box in boxes]
    assert unit_problem(annotations, {1: (48, 64)}.get) is None


def rotate_first(data: SimpleNamespace) -> None:
    path = data.images / data.content["images"][0]["file_name"]
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.open(path).save(path, exif=exif)


def test_size_before_rotation(sets: DataSets) -> None:
    rotate_first(sets.train)
    assert sets.findings() == [("warning", "train", "size-not-rotated", 1)]


def test_size_after_rotation_is_fine(sets: DataSets) -> None:
    rotate_first(sets.train)
    sets.train.content["images"][0].update(width=48, height=64)
    sets.train.content["annotations"][1]["bbox"] = [1, 2, 20, 30]  # the other box would be outside
    assert sets.findings() == []


def add_image(data: SimpleNamespace, image_id: int, file_name: str) -> None:
    """Entry with one object."""
    data.content["images"].append({"id": image_id, "file_name": file_name, "width": 64, "height": 48})
    data.content["annotations"].append({"id": 1000, "image_id": image_id, "category_id": 3, "bbox": [1, 2, 3, 4]})


def test_repeated_image_id(sets: DataSets) -> None:
    Image.new("RGB", (64, 48)).save(sets.train.images / "new.png")
    add_image(sets.train, 1, "new.png")
    assert sets.findings() == [("error", "train", "image-id-repeated", 1)]
    assert sets.examine().errors[0].example == "id 1"


def test_repeated_annotation_id(sets: DataSets) -> None:
    for annotation in sets.train.content["annotations"][:3]:
        annotation["id"] = 5
    assert sets.findings() == [("warning", "train", "annotation-id-repeated", 3)]


def test_absent_annotation_ids_are_fine(sets: DataSets) -> None:
    for annotation in sets.train.content["annotations"]:
        del annotation["id"]
    assert sets.findings() == []


def test_repeated_file(sets: DataSets) -> None:
    add_image(sets.train, 50, "0001.png")
    assert sets.findings() == [("warning", "train", "file-repeated", 1)]


def test_unknown_category(sets: DataSets) -> None:
    sets.val.content["annotations"].append({"id": 99, "image_id": 101, "category_id": 4, "bbox": [1, 1, 5, 5]})
    assert sets.findings() == [("error", "val", "category-unknown", 1)]
    assert sets.examine().errors[0].example == "annotation 99 of image 101: category 4"


def test_unknown_image(sets: DataSets) -> None:
    sets.train.content["annotations"].append({"id": 99, "image_id": 77, "category_id": 3, "bbox": [1, 1, 5, 5]})
    assert sets.findings() == [("error", "train", "image-unknown", 1)]


@pytest.mark.parametrize(
    "bbox", [[1, float("nan"), 3, 4], [1, 2, float("inf"), 4], [1, 2, "3", 4], [1, 2, 3], [True, 2, 3, 4], None]
)
def test_box_not_numbers(sets: DataSets, bbox: object) -> None:
    sets.train.content["annotations"][0]["bbox"] = bbox
    assert sets.findings() == [("error", "train", "box-not-numbers", 1)]
    assert f"bbox {bbox}" in sets.examine().errors[0].example


@pytest.mark.parametrize("bbox", [[5, 5, 0, 9], [5, 5, 9, 0], [20, 5, -9, 9]])
def test_box_without_area(sets: DataSets, bbox: list[int]) -> None:
    sets.train.content["annotations"][0]["bbox"] = bbox
    assert sets.findings() == [("warning", "train", "box-without-area", 1)]


@pytest.mark.parametrize("bbox", [[-2, 5, 9, 9], [5, -2, 9, 9], [60, 5, 6, 9], [5, 45, 9, 5], [100, 100, 5, 5]])
def test_box_outside(sets: DataSets, bbox: list[int]) -> None:
    sets.train.content["annotations"][0]["bbox"] = bbox
    assert sets.findings() == [("warning", "train", "box-outside", 1)]
    assert "in 64 x 48 pixels" in sets.examine().warnings[0].example


def test_box_outside_of_an_image_whose_size_only_the_file_tells(sets: DataSets) -> None:
    del sets.train.content["images"][0]["width"]
    sets.train.content["annotations"][0]["bbox"] = [60, 5, 6, 9]
    assert sets.findings() == [("warning", "train", "box-outside", 1)]


def test_rounding_is_not_outside(sets: DataSets) -> None:
    sets.train.content["annotations"][0]["bbox"] = [-0.5, -1, 65.25, 49.9]
    assert sets.findings() == []


def test_image_without_objects(sets: DataSets) -> None:
    annotations = sets.train.content["annotations"]
    sets.train.content["annotations"] = [a for a in annotations if a["image_id"] != 2]
    assert sets.findings() == [("warning", "train", "image-without-objects", 1)]


def test_a_crowd_is_not_an_object(sets: DataSets) -> None:
    for annotation in sets.train.content["annotations"][2:4]:
        annotation["iscrowd"] = 1
    assert sets.findings() == [("warning", "train", "image-without-objects", 1)]


def test_no_objects(sets: DataSets) -> None:
    sets.train.content["annotations"] = []
    assert sets.findings() == [
        ("error", "train", "no-objects", 1),
        ("warning", "train", "class-without-examples", 3),
    ]


def test_too_many_objects_after_mosaic_and_mixup(sets: DataSets) -> None:
    def found(joined: int, num_queries: int) -> list[tuple[str, str]]:
        sources = split(sets.train), split(sets.val)
        report = examine(*sources, num_queries=num_queries, joined=joined, cache_dir=sets.cache, workers=2)
        return [(finding.split, finding.code) for finding in report.findings]

    objects = len(sets.train.content["annotations"]) / len(sets.train.content["images"])
    assert objects == 2
    assert found(8, 16) == found(1, 16) == []
    assert found(8, 15) == [("train", "too-many-joined")]


def test_too_many_objects(sets: DataSets) -> None:
    sets.train.content["annotations"].append({"id": 99, "image_id": 1, "category_id": 3, "bbox": [1, 1, 5, 5]})
    assert sets.findings(num_queries=3) == []
    assert sets.findings(num_queries=2) == [("warning", "train", "too-many-objects", 1)]
    assert sets.examine(num_queries=2).warnings[0].example == "image 1: 3 objects, 2 queries"


@pytest.mark.parametrize("large", [False, True])
def test_objects_listed_twice(sets: DataSets, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr("detr_bf.data.coco.LARGE_FILE", 1)
    first = sets.train.content["annotations"][0]
    sets.train.content["annotations"] += [
        {**first, "id": 90},
        {**first, "id": 91, "iscrowd": 1},
        {**first, "id": 92, "bbox": [*first["bbox"][:3], first["bbox"][3] + 1]},
        {**first, "id": 93, "category_id": 3 + 4 * (first["category_id"] == 3)},
    ]
    assert sets.findings() == [("warning", "train", "object-repeated", 1)]
    assert sets.examine().warnings[0].example == f"annotation 90 of image 1: bbox {first['bbox']}"


def test_class_names_that_are_the_same(sets: DataSets) -> None:
    for data in (sets.train, sets.val):
        for category, name in zip(data.content["categories"], ("cell", "Cell ", "unicorn"), strict=True):
            category["name"] = name
    assert [finding[2] for finding in sets.findings()] == ["class-name-repeated"] * 2
    ids = [category["id"] for category in sets.train.content["categories"]]
    assert sets.examine().warnings[0].example == f"{ids[0]} ('cell'), {ids[1]} ('Cell ')"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((48, 64), {"size-not-rotated": 3}),  # of the image that is turned: those of the file
        ((64, 48), {}),
        (None, {"rotation-unknown": 2}),
    ],
)
def test_exif_rotations_that_the_size_does_not_tell(
    sets: DataSets, sizes: tuple[int, int] | None, expected: dict[str, int]
) -> None:
    for name, orientation in (("0001", 2), ("0002", 6), ("0003", 4)):
        exif, path = Image.Exif(), sets.train.images / f"{name}.png"
        exif[0x0112] = orientation
        with Image.open(path) as image:
            image.load()
        image.save(path, exif=exif)
    turned = sets.train.content["images"][1]
    del turned["height"], turned["width"]
    if sizes is not None:
        turned["height"], turned["width"] = sizes
    for annotation in sets.train.content["annotations"]:
        if annotation["image_id"] == turned["id"]:
            annotation["bbox"] = [1, 1, 4, 5 + annotation["id"]]
    found = {code: count for severity, _, code, count in sets.findings()}
    assert found == expected
    if sizes is None:
        assert sets.examine().warnings[0].example == "image 1, 0001.png: EXIF orientation 2"


def test_more_validation_objects_than_detections_that_count(sets: DataSets) -> None:
    sets.findings()
    report = examine(split(sets.train), split(sets.val), num_queries=10, max_detections=1, cache_dir=sets.cache)
    [finding] = report.findings
    assert (finding.split, finding.code, finding.count) == ("val", "more-objects-than-detections", 3)
    assert finding.example == "image 101: 2 objects; set eval.max_detections=2 or more (now 1)"


def test_class_without_examples(sets: DataSets) -> None:
    sets.train.content["categories"].append({"id": 4, "name": "unicorn"})
    assert sets.findings() == [("warning", "train", "class-without-examples", 1)]
    assert sets.examine().warnings[0].example == "4 (unicorn)"


def test_class_unknown_to_train(sets: DataSets) -> None:
    sets.val.content["categories"].append({"id": 4, "name": "unicorn"})
    sets.val.content["annotations"][0]["category_id"] = 4
    assert sets.findings() == [("error", "train, val", "class-unknown-to-train", 1)]


def test_class_with_another_name(sets: DataSets) -> None:
    sets.val.content["categories"][0]["name"] = "unicorn"
    assert sets.findings() == [("error", "train, val", "class-name-differs", 1)]
    assert sets.examine().errors[0].example == "3 is class3 in train, unicorn in val"


def test_train_val_overlap_is_found_by_content(sets: DataSets) -> None:
    (sets.val.images / "0102.png").write_bytes((sets.train.images / "0003.png").read_bytes())
    assert sets.findings() == [("warning", "train, val", "train-val-overlap", 1)]
    example = sets.examine().warnings[0].example
    assert "0102.png" in example
    assert "0003.png" in example


def test_val_may_be_unset(sets: DataSets) -> None:
    report = examine(split(sets.train), None, num_queries=10, cache_dir=sets.cache)
    assert report.findings == ()
    assert [line.split(":")[0] for line in report.contents] == ["train"]


def test_the_table_lists_errors_first_in_aligned_columns(sets: DataSets) -> None:
    sets.train.content["categories"].append({"id": 4, "name": "unicorn"})
    (sets.val.images / "0102.png").unlink()
    _, _, header, error, warning, outcome = str(sets.examine()).splitlines()
    assert error.startswith("error")
    assert warning.startswith("warning")
    assert header.index("example") == error.index("image 102") == warning.index("4 (unicorn)")
    assert outcome == "1 error, 1 warning"


@pytest.mark.parametrize(
    ("listed", "exists"),
    [
        ("train/images/0002.png", "0002.png"),
        (r"C:\Users\me\0002.png", "0002.png"),
        ("a%20b.png", "a b.png"),
        ("https://x.org/files/a%20b.png", "a b.png"),
        ("0002.png", "0002.PNG"),
        ("caf\u00e9.png", "cafe\u0301.png"),
        (r"set\train\0002.png", "train/0002.png"),
    ],
)
def test_a_missing_file_that_exists_under_another_form_of_its_name(sets: DataSets, listed: str, exists: str) -> None:
    (sets.train.images / "train").mkdir()
    (sets.train.images / "0002.png").rename(sets.train.images / exists)
    sets.train.content["images"][1]["file_name"] = listed
    [finding] = sets.examine().findings
    assert (finding.code, finding.example) == (
        "file-missing",
        f"image 2, {listed}; exists as {exists}: --fix renames it",
    )


def test_what_is_no_regular_file_is_unreadable(sets: DataSets) -> None:
    images = sets.train.images
    for image, name in zip(sets.train.content["images"], ("pipe", "folder", "sparse", "x" * 300), strict=True):
        image["file_name"] = name
    os.mkfifo(images / "pipe")
    (images / "folder").mkdir()
    with (images / "sparse").open("wb") as file:
        file.truncate(30 * 2**30)
    sets.val.content["images"][0]["file_name"] = "a\0b"
    assert sets.findings() == [
        ("error", "train", "file-unreadable", 4),
        ("error", "val", "file-unreadable", 1),
    ]
    assert "image 1, pipe: it is a FIFO" in sets.examine().errors[0].example


def test_16_bit_images_are_a_warning(sets: DataSets) -> None:
    path = sets.train.images / "0002.png"
    values = np.linspace(0, 4095, 48 * 64).astype(np.uint16).reshape(48, 64)
    Image.fromarray(values).save(path)
    for _ in range(2):  # the second run reads the cache
        assert sets.findings() == [("warning", "train", "image-16-bit", 1)]
    assert sets.examine().warnings[0].example == "image 2, 0002.png: 12 bits in use, scaled from 12"


def test_the_pixel_limit_holds_whatever_the_cache_knows(sets: DataSets) -> None:
    source = split(sets.train)

    def problems(max_pixels: int) -> list[str]:
        report = examine(source, None, num_queries=10, cache_dir=sets.cache, max_pixels=max_pixels)
        return [error.example for error in report.errors]

    assert problems(64 * 48) == []
    [example] = problems(64 * 48 - 1)
    assert example.endswith("64 x 48 pixels (width x height), more than data.max_pixels=3071")
    assert problems(64 * 48) == []


def test_names_do_not_forge_the_table(sets: DataSets) -> None:
    forged = "x\n0 errors, 0 warnings\x1b]0;title\x07\x1b[2J"
    sets.train.content["categories"].append({"id": 4, "name": forged})
    sets.train.content["images"][0]["file_name"] = forged
    (sets.train.images / forged).write_bytes(b"")
    sets.val.content["images"][0]["file_name"] = forged
    sets.val.content["annotations"][0]["id"] = forged
    lines = str(sets.examine()).splitlines()
    assert len(lines) == 3 + 4 + 1
    assert lines[-1] == "2 errors, 2 warnings"
    assert all(line.isprintable() for line in lines)


def test_a_class_name_of_100_000_letters_is_cut(sets: DataSets) -> None:
    for data in (sets.train, sets.val):
        data.content["categories"].append({"id": 4, "name": "x" * 100_000})
    assert len(str(sets.examine())) < 10_000


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the contents of the decoded files."""
    seen: list[bytes] = []
    original = file_check.check_image

    def recording(data: bytes, *limits: int) -> object:
        seen.append(data)
        return original(data, *limits)

    monkeypatch.setattr(file_check, "check_image", recording)
    return seen


def test_unchanged_files_are_read_once(sets: DataSets, decoded: list[bytes]) -> None:
    sets.examine()
    assert len(decoded) == 7
    sets.examine()
    assert len(decoded) == 7


def test_a_changed_file_is_read_again(sets: DataSets, decoded: list[bytes]) -> None:
    sets.examine()
    decoded.clear()
    path = sets.train.images / "0003.png"
    Image.new("RGB", (10, 10)).save(path)
    assert sets.findings() == [("error", "train", "size-differs", 1)]
    assert decoded == [path.read_bytes()]


def test_a_file_of_the_same_size_but_another_time_is_read_again(sets: DataSets, decoded: list[bytes]) -> None:
    sets.examine()
    decoded.clear()
    path = sets.train.images / "0003.png"
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert sets.findings() == [("error", "train", "file-unreadable", 1)]
    assert sets.findings() == [("error", "train", "file-unreadable", 1)]  # this run reads the cache
    assert len(decoded) == 1


def test_a_broken_cache_is_rebuilt(sets: DataSets, decoded: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    sets.examine()
    for cache_file in sets.cache.iterdir():
        cache_file.write_text(f'{{"version": {VERSION}, "files": {{"0001.png": {{}}}}}}')
    decoded.clear()
    assert sets.findings() == []
    assert len(decoded) == 7
    assert "is not valid" in caplog.text
    decoded.clear()
    sets.examine()
    assert decoded == []


def cached(**fields: object) -> str:
    """Cache of one record with these fields as JSON."""
    record = {"bytes": 1, "modified": 1, "sha256": "a" * 64, "problem": "", "sizes": None, "depth": None, "phash": ""}
    record |= {"stored": None, "moments": [], **fields}
    return json.dumps({"version": VERSION, "files": {"0001.png": record}})


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "5",
        "null",
        '"text"',
        "[" * 100_000,
        f'{{"version": {VERSION}}}',
        f'{{"version": {VERSION}, "files": []}}',
        f'{{"version": {VERSION}, "files": {{"0001.png": []}}}}',
        "\x00",
        "9" * 5000,
        cached(sizes={"stored": ["48", 64], "rotated": [48, 64]}),
        cached(sizes={"stored": [48], "rotated": [48, 64]}),
        cached(sizes={"stored": [-48, 64], "rotated": [48, 64]}),
        cached(sizes=5),
        cached(depth="12"),
        cached(stored=[5, "16"]),
        cached(moments=[[0.5, 1.5]]),
        cached(depth=float("inf")),
        cached(sha256="abc"),
        cached(problem=5),
        cached(phash=5),
        cached(phash="abc"),
        cached(bytes=1.5),
        cached(modified=10**400),
    ],
)
def test_a_damaged_cache_is_ignored(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache.json").write_text(content)
    assert file_check._load(file_check.ImageRecord, tmp_path / "cache.json") == {}
    assert "is not valid" in caplog.text


def test_a_cache_of_whole_records_is_read(tmp_path: Path) -> None:
    (tmp_path / "cache.json").write_text(cached(depth=12))
    assert file_check._load(file_check.ImageRecord, tmp_path / "cache.json")["0001.png"].depth == 12


def test_a_cache_that_is_a_fifo_is_not_waited_for(sets: DataSets) -> None:
    sets.examine()
    for cache_file in sets.cache.iterdir():
        cache_file.unlink()
        os.mkfifo(cache_file)
    assert sets.findings() == []


def test_an_interrupted_check_keeps_what_it_read(
    sets: DataSets, decoded: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = file_check.progress_bar

    def after_one(records: object, **options: object) -> object:
        yield next(iter(records))
        raise KeyboardInterrupt

    monkeypatch.setattr(file_check, "progress_bar", after_one)
    with pytest.raises(KeyboardInterrupt):
        sets.examine()
    monkeypatch.setattr(file_check, "progress_bar", interrupted)
    decoded.clear()
    sets.examine()
    assert len(decoded) == 6


def test_a_read_only_cache_is_reported_and_does_without(sets: DataSets, caplog: pytest.LogCaptureFixture) -> None:
    sets.cache.write_text("a file where the folder should be")
    assert sets.findings() == []
    assert "cannot write" in caplog.text


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("check_data", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paths(sets: DataSets) -> list[str]:
    return [
        f"data.{name}.{key}={getattr(getattr(sets, name), key)}"
        for name in ("train", "val")
        for key in ("images", "annotations")
    ]


def test_the_tool_exits_0_on_warnings(sets: DataSets, tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    sets.train.content["categories"].append({"id": 4, "name": "unicorn"})
    sets.train.save()
    assert tool.main(paths(sets)) == 0
    assert "class-without-examples" in capsys.readouterr().out


def test_the_tool_exits_2_on_errors(sets: DataSets, tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (sets.train.images / "0002.png").unlink()
    config = sets.cache.parent / "config.yaml"
    config.write_text(f"data:\n  train:\n    images: {sets.train.images}\n")
    assert tool.main(["--config", str(config), *paths(sets)[1:]]) == 2
    assert "file-missing" in capsys.readouterr().out


def test_the_tool_prints_mistakes_without_a_traceback(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["data.train.images=/nowhere", "data.train.annotations=/nowhere.json"]) == 2
    assert capsys.readouterr().err == "error: image folder /nowhere does not exist or is not a folder\n"
