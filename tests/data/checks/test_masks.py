from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from detr_bf.common.errors import InputError
from detr_bf.data.batches import SampleKey
from detr_bf.data.checks import files as file_check
from detr_bf.data.checks.annotations import Report, examine
from detr_bf.data.coco import CocoDetection, Source
from detr_bf.data.masks import encoded_ids, read_ids

Factory = Callable[..., SimpleNamespace]
FIRST = "0001_segments.png"


class DataSets:
    """Valid panoptic training set; each test breaks one thing and checks the findings."""

    def __init__(self, data: SimpleNamespace, cache: Path) -> None:
        self.data = data
        self.cache = cache

    @property
    def segments(self) -> list[dict[str, object]]:
        """Segments of the first image: things, crowd, stuff."""
        return self.data.content["annotations"][0]["segments_info"]

    def repaint(self, old: int, new: int) -> None:
        """Assign the pixels of one segment id in the first PNG to another id."""
        ids = read_ids(self.data.panoptic / FIRST)
        ids[ids == old] = new
        (self.data.panoptic / FIRST).write_bytes(encoded_ids(ids))

    def examine(self, masks: bool = True) -> Report:
        self.data.save()
        source = Source(self.data.images, self.data.annotations, self.data.panoptic)
        return examine(source, None, num_queries=10, masks=masks, cache_dir=self.cache, workers=2)

    def findings(self, masks: bool = True) -> list[tuple[str, str, int]]:
        return [(finding.severity, finding.code, finding.count) for finding in self.examine(masks).findings]


@pytest.fixture
def sets(panoptic_folder: Factory, tmp_path: Path) -> DataSets:
    return DataSets(panoptic_folder(), tmp_path / "cache")


@pytest.mark.parametrize("masks", [True, False])
def test_clean_data_has_no_findings(sets: DataSets, masks: bool) -> None:
    report = sets.examine(masks)
    assert report.findings == ()
    assert "train: 4 images, 16 objects, 4 classes" in str(report)


def test_panoptic_data_may_validate_itself(sets: DataSets, panoptic_folder: Factory) -> None:
    val = panoptic_folder(name="val", first_image_id=101)
    source, other = (Source(data.images, data.annotations, data.panoptic) for data in (sets.data, val))
    assert examine(source, other, num_queries=10, masks=True, cache_dir=sets.cache).findings == ()


@pytest.mark.parametrize("kind", [None, "yes", 2])
def test_a_category_that_is_neither_thing_nor_stuff(sets: DataSets, kind: object) -> None:
    sets.data.content["categories"][1]["isthing"] = kind
    assert sets.findings() == [("error", "isthing-missing", 1)]
    assert sets.findings(masks=False) == [("error", "isthing-missing", 1)]
    assert sets.examine().errors[0].example == f"7 (thing7): isthing {kind!r}"


def test_categories_without_isthing(sets: DataSets) -> None:
    for category in sets.data.content["categories"]:
        del category["isthing"]
    assert sets.findings() == [("error", "isthing-missing", 4)]


def test_repeated_segment_id(sets: DataSets) -> None:
    sets.segments.append(dict(sets.segments[0]))
    assert sets.findings() == [("error", "segment-id-repeated", 1)]
    assert sets.examine().errors[0].example == f"segment {sets.segments[0]['id']} of image 1, {FIRST}"


def test_one_segment_id_in_several_images_is_fine(sets: DataSets) -> None:
    first, second = (sets.data.content["annotations"][index] for index in (0, 1))
    old, new = second["segments_info"][0]["id"], first["segments_info"][0]["id"]
    path = sets.data.panoptic / second["file_name"]
    ids = read_ids(path)
    ids[ids == old] = new
    path.write_bytes(encoded_ids(ids))
    second["segments_info"][0]["id"] = new
    assert sets.findings() == []


def test_several_annotations_for_one_image(sets: DataSets) -> None:
    entry = sets.data.content["annotations"][1]
    sets.data.content["annotations"].append({**entry, "segments_info": []})
    assert sets.findings() == [("error", "annotation-repeated", 1)]
    assert sets.examine().errors[0].example == "image 2"


def test_an_image_without_annotation(sets: DataSets) -> None:
    del sets.data.content["annotations"][1]
    background = ("warning", "image-without-objects", 1)
    assert sets.findings() == [("error", "annotation-missing", 1), background]
    assert sets.examine().errors[0].example == "image 2, 0002.png"
    assert sets.findings(masks=False) == [background]


def test_missing_png(sets: DataSets) -> None:
    (sets.data.panoptic / FIRST).unlink()
    assert sets.findings() == [("error", "png-missing", 1)]
    assert sets.examine().errors[0].example == f"image 1, {FIRST}"
    assert sets.findings(masks=False) == []


@pytest.mark.parametrize("length", [0, 30, 150])
def test_unreadable_png(sets: DataSets, length: int) -> None:
    path = sets.data.panoptic / FIRST
    path.write_bytes(path.read_bytes()[:length])
    assert sets.findings() == [("error", "png-unreadable", 1)]
    assert f"image 1, {FIRST}: " in sets.examine().errors[0].example


def test_a_grey_png_is_unreadable(sets: DataSets) -> None:
    Image.new("L", (64, 48)).save(sets.data.panoptic / FIRST)
    assert sets.findings() == [("error", "png-unreadable", 1)]
    assert "is a L image" in sets.examine().errors[0].example


def test_png_size_differs(sets: DataSets) -> None:
    ids = read_ids(sets.data.panoptic / FIRST)
    (sets.data.panoptic / FIRST).write_bytes(encoded_ids(torch.nn.functional.pad(ids, (0, 1))))
    assert sets.findings() == [("error", "png-size-differs", 1)]
    assert sets.examine().errors[0].example == f"image 1, {FIRST}: 65 x 48 pixels, the image has 64 x 48"


def test_the_png_of_a_rotated_image_has_its_annotated_size(sets: DataSets) -> None:
    path = sets.data.images / "0001.png"
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.open(path).save(path, exif=exif)
    assert sets.findings() == [("warning", "size-not-rotated", 1)]
    sets.data.content["images"][0].update(width=48, height=64)
    assert ("error", "png-size-differs", 1) in sets.findings()


def test_an_id_that_is_not_listed(sets: DataSets) -> None:
    removed = sets.segments.pop(0)
    assert sets.findings() == [("warning", "segment-not-listed", 1)]
    example = sets.examine().warnings[0].example
    assert example == f"image 1, {FIRST}: id {removed['id']}, {removed['area']} pixels"


def test_a_segment_without_a_pixel(sets: DataSets) -> None:
    sets.repaint(sets.segments[0]["id"], 0)
    assert sets.findings() == [("warning", "segment-absent", 1)]
    assert sets.examine().warnings[0].example == f"segment {sets.segments[0]['id']} of image 1"


def test_an_area_that_differs(sets: DataSets) -> None:
    pixels = sets.segments[0]["area"]
    sets.segments[0]["area"] = 1
    assert sets.findings() == [("warning", "area-differs", 1)]
    assert sets.examine().warnings[0].example.endswith(f"area 1, the PNG has {pixels} pixels")


@pytest.mark.parametrize("side", range(4))
def test_a_box_that_differs_by_more_than_a_pixel(sets: DataSets, side: int) -> None:
    bbox = list(sets.segments[0]["bbox"])
    sets.segments[0]["bbox"] = [value - (index == side) for index, value in enumerate(bbox)]
    assert sets.findings() == []
    sets.segments[0]["bbox"] = [value - 1.5 * (index == side) for index, value in enumerate(bbox)]
    assert sets.findings() == [("warning", "box-differs", 1)]
    assert sets.examine().warnings[0].example.endswith(f"the PNG has {bbox}")


def test_a_box_that_is_none_is_not_compared(sets: DataSets) -> None:
    sets.segments[0]["bbox"] = None
    assert sets.findings() == [("error", "box-not-numbers", 1)]


def test_masks_without_their_folder_are_refused(sets: DataSets) -> None:
    sets.data.panoptic = None
    with pytest.raises(InputError, match=r"set data\.train.panoptic"):
        sets.findings()
    assert sets.findings(masks=False) == []


def segmentation_findings(data: SimpleNamespace, cache: Path, masks: bool = True) -> Report:
    data.save()
    return examine(Source(data.images, data.annotations), None, num_queries=10, masks=masks, cache_dir=cache)


def test_objects_without_a_usable_segmentation(coco_folder: Factory, tmp_path: Path) -> None:
    data = coco_folder()
    annotations = data.content["annotations"]
    for annotation in annotations:
        annotation["segmentation"] = [[1, 1, 20, 1, 20, 20]]
    assert segmentation_findings(data, tmp_path / "cache").findings == ()
    del annotations[1]["segmentation"]
    annotations[2]["segmentation"] = {"size": [64, 48], "counts": [64 * 48]}
    annotations[4].update(segmentation=None, iscrowd=1)
    annotations[5]["segmentation"] = []
    missing, finding = segmentation_findings(data, tmp_path / "cache").findings
    assert (missing.severity, missing.code, missing.count) == ("error", "mask-missing", 3), "crowds are read too"
    assert missing.example.startswith("annotation 2 of image 1: bbox [34, 26, 24, 17], 0001.png; annotation 5 of")
    assert (finding.severity, finding.code, finding.count) == ("error", "segmentation-unusable", 1)
    assert finding.example.startswith("annotation 3 of image 2: run lengths are for 48 x 64 pixels")
    assert segmentation_findings(data, tmp_path / "cache", masks=False).findings == ()


def test_polygons_without_a_pixel_in_their_image_are_counted(coco_folder: Factory, tmp_path: Path) -> None:
    data = coco_folder()
    annotations = data.content["annotations"]
    for annotation in annotations:
        annotation["segmentation"] = [[1, 1, 20, 1, 20, 20]]
    annotations[1]["segmentation"] = [[70, 1, 90, 1, 90, 20]]  # right of the 64 x 48 pixels
    annotations[2]["segmentation"] = [[1, -30, 20, -30, 20, -9], [-5, 1, -2, 1, -2, 9]]
    annotations[3]["segmentation"] = [[5, 5, 5.1, 5, 5.1, 5.1]]
    annotations[4]["segmentation"] = {"size": [48, 64], "counts": [48 * 64]}
    annotations[5]["segmentation"] = [[70, 1, 90, 1, 90, 20], [1, 1, 20, 1, 20, 20]]  # one of two is inside
    annotations[6].update(segmentation=[[70, 1, 90, 1, 90, 20]], iscrowd=1)
    [finding] = segmentation_findings(data, tmp_path / "cache").findings
    assert (finding.severity, finding.code, finding.count) == ("warning", "mask-outside", 4)
    assert finding.example == "annotation 2 of image 1 in 64 x 48 pixels"
    assert segmentation_findings(data, tmp_path / "cache", masks=False).findings == ()
    dataset = CocoDetection(data.images, data.annotations, lambda sample: sample, masks=True)
    assert sum(len(dataset[SampleKey(0, index)][1].labels) for index in range(4)) == 8 - 4 - 1  # 4 and the crowd


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the decoded PNG files."""
    seen: list[Path] = []
    original = file_check.read_ids

    def recording(path: Path, *limits: int) -> torch.Tensor:
        seen.append(path)
        return original(path, *limits)

    monkeypatch.setattr(file_check, "read_ids", recording)
    return seen


def test_unchanged_pngs_are_read_once_and_found_the_same(sets: DataSets, decoded: list[Path]) -> None:
    sets.segments.pop(0)
    sets.segments[0]["bbox"] = [0, 0, 60, 40]
    Image.new("L", (64, 48)).save(sets.data.panoptic / "0002_segments.png")
    report = sets.examine()
    assert len(report.findings) == 3
    assert len(decoded) == 4
    assert sets.examine() == report
    assert len(decoded) == 4


def test_a_changed_png_is_read_again(sets: DataSets, decoded: list[Path]) -> None:
    sets.examine()
    decoded.clear()
    sets.repaint(sets.segments[0]["id"], 0)
    path = sets.data.panoptic / FIRST
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert sets.findings() == [("warning", "segment-absent", 1)]
    assert decoded == [path]


def test_boxes_alone_read_no_png(sets: DataSets, decoded: list[Path]) -> None:
    assert sets.findings(masks=False) == []
    assert decoded == []


def test_images_and_pngs_may_share_a_folder(sets: DataSets, decoded: list[Path]) -> None:
    for path in sets.data.panoptic.iterdir():
        path.rename(sets.data.images / path.name)
    sets.data.panoptic = sets.data.images
    assert sets.findings() == []
    assert sets.findings() == []
    assert len(decoded) == 4


def test_masks_of_copy_paste_are_needed_in_the_training_split_only(coco_folder: Factory, tmp_path: Path) -> None:
    data = coco_folder()
    for annotation in data.content["annotations"]:
        annotation["segmentation"] = [[1, 1, 20, 1, 20, 20]]
    data.save()
    boxes = tmp_path / "boxes.json"
    without = [{k: v for k, v in each.items() if k != "segmentation"} for each in data.content["annotations"]]
    boxes.write_text(json.dumps({**data.content, "annotations": without}))
    with_masks, no_masks = Source(data.images, data.annotations), Source(data.images, boxes)
    settings = {"num_queries": 10, "train_masks": True, "cache_dir": tmp_path / "cache"}
    for train, val, codes in ((with_masks, no_masks, []), (no_masks, with_masks, ["mask-missing"])):
        found = examine(train, val, **settings).findings
        assert [each.code for each in found if each.severity == "error" and "mask" in each.code] == codes
