from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from detr_bf.data.checks import files as file_check
from detr_bf.data.checks.annotations import Report, examine
from detr_bf.data.coco import Source

Factory = Callable[..., SimpleNamespace]
TOOL = Path(__file__).parents[3] / "tools" / "check_data.py"


def split(data: SimpleNamespace) -> Source:
    return Source(data.images, data.annotations)


class Clinic:
    """A valid train and validation set; a test breaks one thing and asks for the findings."""

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
def clinic(coco_folder: Factory, tmp_path: Path) -> Clinic:
    return Clinic(coco_folder, tmp_path)


def test_clean_data_has_no_findings(clinic: Clinic) -> None:
    report = clinic.examine()
    assert report.findings == ()
    assert "train: 4 images, 8 objects, 3 classes" in str(report)
    assert "val: 3 images, 6 objects, 3 classes" in str(report)
    assert str(report).endswith("0 errors, 0 warnings")


def test_missing_file(clinic: Clinic) -> None:
    (clinic.train.images / "0002.png").unlink()
    assert clinic.findings() == [("error", "train", "file-missing", 1)]
    assert clinic.examine().errors[0].example == "image 2, 0002.png"


@pytest.mark.parametrize("length", [0, 3, 150])
def test_unreadable_file(clinic: Clinic, length: int) -> None:
    path = clinic.val.images / "0102.png"
    path.write_bytes(path.read_bytes()[:length])
    assert clinic.findings() == [("error", "val", "file-unreadable", 1)]
    assert "image 102, 0102.png" in clinic.examine().errors[0].example


def test_size_differs(clinic: Clinic) -> None:
    clinic.train.content["images"][0]["width"] = 65
    assert clinic.findings() == [("error", "train", "size-differs", 1)]
    assert "annotated for 65 x 48 pixels" in clinic.examine().errors[0].example


def rotate_first(data: SimpleNamespace) -> None:
    path = data.images / data.content["images"][0]["file_name"]
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.open(path).save(path, exif=exif)


def test_size_before_rotation(clinic: Clinic) -> None:
    rotate_first(clinic.train)
    assert clinic.findings() == [("warning", "train", "size-not-rotated", 1)]


def test_size_after_rotation_is_fine(clinic: Clinic) -> None:
    rotate_first(clinic.train)
    clinic.train.content["images"][0].update(width=48, height=64)
    clinic.train.content["annotations"][1]["bbox"] = [1, 2, 20, 30]  # the other would lie outside
    assert clinic.findings() == []


def add_image(data: SimpleNamespace, image_id: int, file_name: str) -> None:
    """An entry with one object."""
    data.content["images"].append({"id": image_id, "file_name": file_name, "width": 64, "height": 48})
    data.content["annotations"].append({"id": 1000, "image_id": image_id, "category_id": 3, "bbox": [1, 2, 3, 4]})


def test_repeated_image_id(clinic: Clinic) -> None:
    Image.new("RGB", (64, 48)).save(clinic.train.images / "new.png")
    add_image(clinic.train, 1, "new.png")
    assert clinic.findings() == [("error", "train", "image-id-repeated", 1)]
    assert clinic.examine().errors[0].example == "id 1"


def test_repeated_annotation_id(clinic: Clinic) -> None:
    for annotation in clinic.train.content["annotations"][:3]:
        annotation["id"] = 5
    assert clinic.findings() == [("warning", "train", "annotation-id-repeated", 3)]


def test_absent_annotation_ids_are_fine(clinic: Clinic) -> None:
    for annotation in clinic.train.content["annotations"]:
        del annotation["id"]
    assert clinic.findings() == []


def test_repeated_file(clinic: Clinic) -> None:
    add_image(clinic.train, 50, "0001.png")
    assert clinic.findings() == [("warning", "train", "file-repeated", 1)]


def test_unknown_category(clinic: Clinic) -> None:
    clinic.val.content["annotations"].append({"id": 99, "image_id": 101, "category_id": 4, "bbox": [1, 1, 5, 5]})
    assert clinic.findings() == [("error", "val", "category-unknown", 1)]
    assert clinic.examine().errors[0].example == "annotation 99 of image 101: category 4"


def test_unknown_image(clinic: Clinic) -> None:
    clinic.train.content["annotations"].append({"id": 99, "image_id": 77, "category_id": 3, "bbox": [1, 1, 5, 5]})
    assert clinic.findings() == [("error", "train", "image-unknown", 1)]


@pytest.mark.parametrize(
    "bbox", [[1, float("nan"), 3, 4], [1, 2, float("inf"), 4], [1, 2, "3", 4], [1, 2, 3], [True, 2, 3, 4], None]
)
def test_box_not_numbers(clinic: Clinic, bbox: object) -> None:
    clinic.train.content["annotations"][0]["bbox"] = bbox
    assert clinic.findings() == [("error", "train", "box-not-numbers", 1)]
    assert f"bbox {bbox}" in clinic.examine().errors[0].example


@pytest.mark.parametrize("bbox", [[5, 5, 0, 9], [5, 5, 9, 0], [20, 5, -9, 9]])
def test_box_without_area(clinic: Clinic, bbox: list[int]) -> None:
    clinic.train.content["annotations"][0]["bbox"] = bbox
    assert clinic.findings() == [("warning", "train", "box-without-area", 1)]


@pytest.mark.parametrize("bbox", [[-2, 5, 9, 9], [5, -2, 9, 9], [60, 5, 6, 9], [5, 45, 9, 5], [100, 100, 5, 5]])
def test_box_outside(clinic: Clinic, bbox: list[int]) -> None:
    clinic.train.content["annotations"][0]["bbox"] = bbox
    assert clinic.findings() == [("warning", "train", "box-outside", 1)]
    assert "in 64 x 48 pixels" in clinic.examine().warnings[0].example


def test_box_outside_of_an_image_whose_size_only_the_file_tells(clinic: Clinic) -> None:
    del clinic.train.content["images"][0]["width"]
    clinic.train.content["annotations"][0]["bbox"] = [60, 5, 6, 9]
    assert clinic.findings() == [("warning", "train", "box-outside", 1)]


def test_rounding_is_not_outside(clinic: Clinic) -> None:
    clinic.train.content["annotations"][0]["bbox"] = [-0.5, -1, 65.25, 49.9]
    assert clinic.findings() == []


def test_image_without_objects(clinic: Clinic) -> None:
    annotations = clinic.train.content["annotations"]
    clinic.train.content["annotations"] = [a for a in annotations if a["image_id"] != 2]
    assert clinic.findings() == [("warning", "train", "image-without-objects", 1)]


def test_a_crowd_is_not_an_object(clinic: Clinic) -> None:
    for annotation in clinic.train.content["annotations"][2:4]:
        annotation["iscrowd"] = 1
    assert clinic.findings() == [("warning", "train", "image-without-objects", 1)]


def test_no_objects(clinic: Clinic) -> None:
    clinic.train.content["annotations"] = []
    assert clinic.findings() == [
        ("error", "train", "no-objects", 1),
        ("warning", "train", "class-without-examples", 3),
    ]


def test_too_many_objects(clinic: Clinic) -> None:
    clinic.train.content["annotations"].append({"id": 99, "image_id": 1, "category_id": 3, "bbox": [1, 1, 5, 5]})
    assert clinic.findings(num_queries=3) == []
    assert clinic.findings(num_queries=2) == [("warning", "train", "too-many-objects", 1)]
    assert clinic.examine(num_queries=2).warnings[0].example == "image 1: 3 objects, 2 queries"


def test_class_without_examples(clinic: Clinic) -> None:
    clinic.train.content["categories"].append({"id": 4, "name": "unicorn"})
    assert clinic.findings() == [("warning", "train", "class-without-examples", 1)]
    assert clinic.examine().warnings[0].example == "4 (unicorn)"


def test_class_unknown_to_train(clinic: Clinic) -> None:
    clinic.val.content["categories"].append({"id": 4, "name": "unicorn"})
    clinic.val.content["annotations"][0]["category_id"] = 4
    assert clinic.findings() == [("error", "train, val", "class-unknown-to-train", 1)]


def test_class_with_another_name(clinic: Clinic) -> None:
    clinic.val.content["categories"][0]["name"] = "unicorn"
    assert clinic.findings() == [("error", "train, val", "class-name-differs", 1)]
    assert clinic.examine().errors[0].example == "3 is class3 in train, unicorn in val"


def test_train_val_overlap_is_found_by_content(clinic: Clinic) -> None:
    (clinic.val.images / "0102.png").write_bytes((clinic.train.images / "0003.png").read_bytes())
    assert clinic.findings() == [("warning", "train, val", "train-val-overlap", 1)]
    example = clinic.examine().warnings[0].example
    assert "0102.png" in example
    assert "0003.png" in example


def test_val_may_be_unset(clinic: Clinic) -> None:
    report = examine(split(clinic.train), None, num_queries=10, cache_dir=clinic.cache)
    assert report.findings == ()
    assert [line.split(":")[0] for line in report.contents] == ["train"]


def test_the_table_lists_errors_first_in_aligned_columns(clinic: Clinic) -> None:
    clinic.train.content["categories"].append({"id": 4, "name": "unicorn"})
    (clinic.val.images / "0102.png").unlink()
    _, _, header, error, warning, outcome = str(clinic.examine()).splitlines()
    assert error.startswith("error")
    assert warning.startswith("warning")
    assert header.index("example") == error.index("image 102") == warning.index("4 (unicorn)")
    assert outcome == "1 errors, 1 warnings"


@pytest.mark.parametrize(
    ("listed", "exists"),
    [
        ("train/images/0002.png", "0002.png"),
        (r"C:\Users\me\0002.png", "0002.png"),
        ("a%20b.png", "a b.png"),
        ("https://x.org/files/a%20b.png", "a b.png"),
    ],
)
def test_a_missing_file_that_exists_under_another_form_of_its_name(clinic: Clinic, listed: str, exists: str) -> None:
    (clinic.train.images / "0002.png").rename(clinic.train.images / exists)
    clinic.train.content["images"][1]["file_name"] = listed
    [finding] = clinic.examine().findings
    assert (finding.code, finding.example) == ("file-missing", f"image 2, {listed}; exists as {exists}")


def test_what_is_no_regular_file_is_unreadable(clinic: Clinic) -> None:
    images = clinic.train.images
    for image, name in zip(clinic.train.content["images"], ("pipe", "folder", "sparse", "x" * 300), strict=True):
        image["file_name"] = name
    os.mkfifo(images / "pipe")
    (images / "folder").mkdir()
    with (images / "sparse").open("wb") as file:
        file.truncate(30 * 2**30)
    clinic.val.content["images"][0]["file_name"] = "a\0b"
    assert clinic.findings() == [
        ("error", "train", "file-unreadable", 4),
        ("error", "val", "file-unreadable", 1),
    ]
    assert "image 1, pipe: it is a FIFO" in clinic.examine().errors[0].example


def test_16_bit_images_are_a_warning(clinic: Clinic) -> None:
    path = clinic.train.images / "0002.png"
    values = np.linspace(0, 4095, 48 * 64).astype(np.uint16).reshape(48, 64)
    Image.fromarray(values).save(path)
    for _ in range(2):  # the second time from the cache
        assert clinic.findings() == [("warning", "train", "image-16-bit", 1)]
    assert clinic.examine().warnings[0].example == "image 2, 0002.png: 12 of 16 bits"


def test_the_pixel_limit_holds_whatever_the_cache_knows(clinic: Clinic) -> None:
    source = split(clinic.train)

    def problems(max_pixels: int) -> list[str]:
        report = examine(source, None, num_queries=10, cache_dir=clinic.cache, max_pixels=max_pixels)
        return [error.example for error in report.errors]

    assert problems(64 * 48) == []
    [example] = problems(64 * 48 - 1)
    assert example.endswith("64 x 48 pixels (width x height), more than data.max_pixels=3071")
    assert problems(64 * 48) == []


def test_names_do_not_forge_the_table(clinic: Clinic) -> None:
    forged = "x\n0 errors, 0 warnings\x1b]0;title\x07\x1b[2J"
    clinic.train.content["categories"].append({"id": 4, "name": forged})
    clinic.train.content["images"][0]["file_name"] = forged
    (clinic.train.images / forged).write_bytes(b"")
    clinic.val.content["images"][0]["file_name"] = forged
    clinic.val.content["annotations"][0]["id"] = forged
    lines = str(clinic.examine()).splitlines()
    assert len(lines) == 3 + 4 + 1
    assert lines[-1] == "2 errors, 2 warnings"
    assert all(line.isprintable() for line in lines)


def test_a_class_name_of_100_000_letters_is_cut(clinic: Clinic) -> None:
    for data in (clinic.train, clinic.val):
        data.content["categories"].append({"id": 4, "name": "x" * 100_000})
    assert len(str(clinic.examine())) < 10_000


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The contents of the files that were decoded."""
    seen: list[bytes] = []
    original = file_check.check_image

    def recording(data: bytes, *limits: int) -> object:
        seen.append(data)
        return original(data, *limits)

    monkeypatch.setattr(file_check, "check_image", recording)
    return seen


def test_unchanged_files_are_read_once(clinic: Clinic, decoded: list[bytes]) -> None:
    clinic.examine()
    assert len(decoded) == 7
    clinic.examine()
    assert len(decoded) == 7


def test_a_changed_file_is_read_again(clinic: Clinic, decoded: list[bytes]) -> None:
    clinic.examine()
    decoded.clear()
    path = clinic.train.images / "0003.png"
    Image.new("RGB", (10, 10)).save(path)
    assert clinic.findings() == [("error", "train", "size-differs", 1)]
    assert decoded == [path.read_bytes()]


def test_a_file_of_the_same_size_but_another_time_is_read_again(clinic: Clinic, decoded: list[bytes]) -> None:
    clinic.examine()
    decoded.clear()
    path = clinic.train.images / "0003.png"
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert clinic.findings() == [("error", "train", "file-unreadable", 1)]
    assert clinic.findings() == [("error", "train", "file-unreadable", 1)]  # now from the cache
    assert len(decoded) == 1


def test_a_broken_cache_is_rebuilt(clinic: Clinic, decoded: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    clinic.examine()
    for cache_file in clinic.cache.iterdir():
        cache_file.write_text('{"version": 2, "files": {"0001.png": {}}}')
    decoded.clear()
    assert clinic.findings() == []
    assert len(decoded) == 7
    assert "is not valid" in caplog.text
    decoded.clear()
    clinic.examine()
    assert decoded == []


def cached(**fields: object) -> str:
    """A cache of one record with these fields as JSON."""
    record = {"bytes": 1, "modified": 1, "sha256": "a" * 64, "problem": "", "sizes": None, "depth": None} | fields
    return json.dumps({"version": 2, "files": {"0001.png": record}})


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "5",
        "null",
        '"text"',
        "[" * 100_000,
        '{"version": 2}',
        '{"version": 2, "files": []}',
        '{"version": 2, "files": {"0001.png": []}}',
        "\x00",
        "9" * 5000,
        cached(sizes={"stored": ["48", 64], "rotated": [48, 64]}),
        cached(sizes={"stored": [48], "rotated": [48, 64]}),
        cached(sizes={"stored": [-48, 64], "rotated": [48, 64]}),
        cached(sizes=5),
        cached(depth="12"),
        cached(depth=float("inf")),
        cached(sha256="abc"),
        cached(problem=5),
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


def test_a_cache_that_is_a_fifo_is_not_waited_for(clinic: Clinic) -> None:
    clinic.examine()
    for cache_file in clinic.cache.iterdir():
        cache_file.unlink()
        os.mkfifo(cache_file)
    assert clinic.findings() == []


def test_an_interrupted_check_keeps_what_it_read(
    clinic: Clinic, decoded: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = file_check.progress_bar

    def after_one(records: object, **options: object) -> object:
        yield next(iter(records))
        raise KeyboardInterrupt

    monkeypatch.setattr(file_check, "progress_bar", after_one)
    with pytest.raises(KeyboardInterrupt):
        clinic.examine()
    monkeypatch.setattr(file_check, "progress_bar", interrupted)
    decoded.clear()
    clinic.examine()
    assert len(decoded) == 6


def test_a_read_only_cache_is_reported_and_does_without(clinic: Clinic, caplog: pytest.LogCaptureFixture) -> None:
    clinic.cache.write_text("a file where the folder should be")
    assert clinic.findings() == []
    assert "cannot write" in caplog.text


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("DETR_BF_CACHE", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("check_data", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paths(clinic: Clinic) -> list[str]:
    return [
        f"data.{name}.{key}={getattr(getattr(clinic, name), key)}"
        for name in ("train", "val")
        for key in ("images", "annotations")
    ]


def test_the_tool_exits_0_on_warnings(clinic: Clinic, tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    clinic.train.content["categories"].append({"id": 4, "name": "unicorn"})
    clinic.train.save()
    assert tool.main(paths(clinic)) == 0
    assert "class-without-examples" in capsys.readouterr().out


def test_the_tool_exits_2_on_errors(clinic: Clinic, tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (clinic.train.images / "0002.png").unlink()
    config = clinic.cache.parent / "config.yaml"
    config.write_text(f"data:\n  train:\n    images: {clinic.train.images}\n")
    assert tool.main(["--config", str(config), *paths(clinic)[1:]]) == 2
    assert "file-missing" in capsys.readouterr().out


def test_the_tool_prints_mistakes_without_a_traceback(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["data.train.images=/nowhere", "data.train.annotations=/nowhere.json"]) == 2
    assert capsys.readouterr().err == "error: image folder /nowhere does not exist or is not a folder\n"
