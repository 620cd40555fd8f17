"""Large COCO files: the reader into columns gives what json gives."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import random
import string
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.data import coco, coco_reader
from detr_bf.data.annotation_values import crowd_mask, suspect_crowds
from detr_bf.data.batches import SampleKey
from detr_bf.data.checks.annotations import examine
from detr_bf.data.checks.learning import Training
from detr_bf.data.coco import CocoAnnotations, CocoDetection, Source, read_annotations
from detr_bf.data.coco_reader import decode_columns
from detr_bf.data.columns import Entries, UnsupportedError
from detr_bf.data.transforms import eval_transform
from detr_bf.evaluation.coco import load_ground_truth

Factory = Callable[..., SimpleNamespace]
PLAIN = eval_transform(short_side=48, max_size=1000)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(coco_reader, "PIECE_BYTES", 200)  # pieces of one or two entries


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CocoAnnotations, CocoAnnotations]:
    """Return the content from json and from columns."""
    monkeypatch.setattr(coco, "LARGE_FILE", 2**40)
    plain = read_annotations(path)
    monkeypatch.setattr(coco, "LARGE_FILE", 1)
    return plain, read_annotations(path)


def text_of(content: CocoAnnotations) -> str:
    """Return all values with their types."""
    lists = (content.images, content.annotations, content.categories)
    return repr([[[sorted(entry.items()) for entry in entries] for entries in lists], content.maps])


def image(number: int, **keys: object) -> dict[str, Any]:
    return {"id": number, "file_name": f"{number}.jpg", "width": 640, "height": 480, **keys}


def box(number: int, **keys: object) -> dict[str, Any]:
    return {"id": number, "image_id": 1 + number % 3, "category_id": 1, "bbox": [1.5, 2, 30.25, 4], **keys}


def file(path: Path, annotations: list[dict[str, Any]], images: list[dict[str, Any]] | None = None) -> Path:
    content = {
        "info": {"text": "}, {", "list": [[1, {}]]},
        "images": images or [image(1), image(2), image(3)],
        "licenses": [],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "é"}],
    }
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


NESTED = {"a": [{"b": "}, {"}, {"c": [1, 2.0, None, True]}], "d": '\\"}],', "é": {}}
WELL_FORMED = {
    "ordinary": [box(n, area=90, iscrowd=0) for n in range(20)],
    "no annotations": [],
    "one": [box(0)],
    "crowds": [box(n, iscrowd=n % 2) for n in range(9)],
    "crowds as true": [box(n, iscrowd=n % 2 == 1) for n in range(9)],
    "missing keys": [box(n, **({"area": 2.5} if n % 3 else {}), **({} if n % 4 else {"iscrowd": 0}))
                     for n in range(20)],
    "key that comes late": [box(n) for n in range(15)] + [box(n, late="x") for n in range(5)],
    "nulls": [box(n, area=None, iscrowd=None, note=None if n % 2 else "a") for n in range(9)],
    "integers and floats": [box(n, area=[1, 1.0, 2.5, 10**9, 1e-300, -0.0, 0][n % 7]) for n in range(14)],
    "integer boxes": [box(n, bbox=[n, 2, 300, -4]) for n in range(9)],
    "mixed boxes": [box(n, bbox=[[1, 2, 3, 4], [1.0, 2, 3.5, -0.0], [0.1, 0.2, 1e9, 5e-324]][n % 3]) for n in range(9)],
    "large integers": [box(2**63 - 1 - n, other=-(2**63) + n) for n in range(5)],
    "nested": [box(n, extra=[NESTED, [], {}, "s", 1, 2.5, True][n % 7]) for n in range(21)],
    "segmentations": [box(n, segmentation=[[1, 2, 3.5, 4, 5, 6]] if n % 2 else {"size": [4, 4], "counts": "#0"})
                      for n in range(9)],
    "empty segmentations": [box(n, segmentation=[]) for n in range(9)],
    "names of the fields": [box(n, f0=1, f1="a", __init__=2, **{"": 3, "a b": [4]}) for n in range(5)],
    "strings": [box(n, note=["", "é", "日本", "\U0001f600", '"\\/\b\f\n\r\t\0', "}, {", "],", "\ue000"][n % 8])
                for n in range(16)],
    "ids of other types": [box(n, id=[1, "a", None, 1.0, True][n % 5]) for n in range(10)],
}  # fmt: skip


@pytest.mark.parametrize("annotations", WELL_FORMED.values(), ids=WELL_FORMED)
def test_the_content_is_that_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, annotations: list[dict[str, Any]]
) -> None:
    path = file(tmp_path / "a.json", annotations)
    plain, columns = both(path, monkeypatch)
    assert isinstance(columns.annotations, Entries)
    assert columns.annotations == plain.annotations
    assert text_of(columns) == text_of(plain)
    again = read_annotations(path)  # from the cache
    assert text_of(again) == text_of(plain)
    assert (columns.class_map, columns.parents) == (plain.class_map, plain.parents)
    length = len(plain.annotations)
    assert len(columns.annotations) == length
    assert [columns.annotations[at] for at in range(-length, length)] == [*plain.annotations, *plain.annotations]
    assert columns.annotations[1:-1:2] == plain.annotations[1:-1:2]
    with pytest.raises(IndexError):
        columns.annotations[length]


@pytest.mark.parametrize(
    "options", [{}, {"indent": 2}, {"separators": (",", ":")}, {"separators": (" ,\r\n\t", " : ")}]
)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_white_space_and_the_order_of_keys_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], order: int
) -> None:
    path = file(tmp_path / "a.json", WELL_FORMED["nested"])
    content = json.loads(path.read_text("utf-8"))
    keys = [list(content), list(content)[::-1], sorted(content)][order]
    path.write_text(" \n" + json.dumps({key: content[key] for key in keys}, **options) + "\n ")
    plain, columns = both(path, monkeypatch)
    assert isinstance(columns.images, Entries)
    assert text_of(columns) == text_of(plain)


@pytest.mark.parametrize("seed", range(6))
def test_random_content_in_pieces_of_random_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)

    def value(depth: int = 0) -> object:
        kind = draw.randrange(6 if depth > 2 else 8)
        if kind == 6:
            return [value(depth + 1) for _ in range(draw.randrange(4))]
        if kind == 7:
            return {value_text(): value(depth + 1) for _ in range(draw.randrange(4))}
        return [None, draw.random() < 0.5, draw.randint(-9, 9), draw.uniform(-9, 9), value_text(), ""][kind]

    def value_text() -> str:
        return "".join(draw.choice(string.printable + '}{][,:"\\é日\U0001f600') for _ in range(draw.randrange(9)))

    annotations = [box(n, **({"x": value(), "y": value()} if draw.random() < 0.8 else {})) for n in range(60)]
    path = file(tmp_path / "a.json", annotations)
    monkeypatch.setattr(coco_reader, "PIECE_BYTES", draw.randrange(5, 5000))
    plain, columns = both(path, monkeypatch)
    assert isinstance(columns.annotations, Entries)
    assert text_of(columns) == text_of(plain)


def test_a_selection_yields_its_entries(tmp_path: Path) -> None:
    annotations = WELL_FORMED["missing keys"]
    entries = Entries(decode_columns(file(tmp_path / "a.json", annotations)), "annotations")
    chosen = entries.where(entries.numbers("image_id") == 2)
    assert list(chosen) == [each for each in annotations if each["image_id"] == 2]
    last = chosen.where(chosen.is_number("area"))
    assert list(last) == [each for each in annotations if each["image_id"] == 2 and "area" in each]
    assert last.values("id")[-1] == last[-1]["id"]
    assert list(pickle.loads(pickle.dumps(last))) == list(last)


GOOD = '{"images": [{"id": 1, "file_name": "a"}], "annotations": [%s], "categories": [{"id": 1}]}'
BOX = '{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]%s}'


@pytest.mark.parametrize(
    "text",
    [
        GOOD % (BOX % ', "area": NaN'),
        GOOD % (BOX % ', "area": 1e400'),
        GOOD % (BOX % ', "id": 9223372036854775808'),
        GOOD % (BOX % ', "note": "\\ud800"'),
        GOOD % f"{BOX % ''}, {BOX.replace('[1, 2, 3, 4]', 'null') % ''}",
        GOOD % f"{BOX % ''}, {BOX.replace('[1, 2, 3, 4]', '[1, 2, 3]') % ''}",
        GOOD % (BOX.replace("[1", "[18014398509481985") % ""),
        GOOD % '{"image_id": 1, "file_name": "a.png", "segments_info": []}',
        GOOD.replace('"images"', '"annotations": [], "images"') % (BOX % ""),
        GOOD.replace('"images"', '"info": 1, "info": 2, "images"') % (BOX % ""),
        "\ufeff" + GOOD % (BOX % ""),
    ],
)
def test_other_json_is_read_by_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UnsupportedError):
        decode_columns(path)
    plain, large = both(path, monkeypatch)
    assert text_of(large) == text_of(plain)


@pytest.mark.parametrize(
    "text",
    [
        GOOD % (BOX % "") + "x",
        (GOOD % (BOX % ""))[:-1],
        GOOD % (BOX % "") + "}",
        GOOD % f"{BOX % ''},",
        GOOD % f"{BOX % ''} {BOX % ''}",
        GOOD % f",{BOX % ''}",
        GOOD % (BOX % ', "a": 01'),
        GOOD % (BOX % ', "a": "\t"'),
        GOOD % (BOX % ', "a": "\\x"'),
        GOOD % f"{BOX % ''}, 1",
        GOOD % f"{BOX % ''}, {{}}",
        GOOD % (BOX % "").replace("1", '"1"'),
        GOOD % (BOX % "").replace("1", "-1"),
        GOOD % (BOX % "").replace("1", "true"),
        GOOD.replace('"categories"', '"others"') % "",
        GOOD.replace('[{"id": 1}]', "[]") % "",
        GOOD.replace('[{"id": 1}]', '[{"id": 1}, {"id": 1}]') % "",
        GOOD.replace('{"id": 1, "file_name": "a"}', "") % "",
        GOOD.replace('"file_name": "a"', '"file_name": 1') % "",
        GOOD.replace('"file_name": "a"', '"name": "a"') % "",
        GOOD.replace('"a"}]', '"a"}, []]') % "",
        GOOD.replace('"images": [', '"images": {') % "",
        '{"images": null, "annotations": [], "categories": []}',
        "",
        "{",
        "{}",
        "[1]",
        '[{"image_id": 1, "score": 0.5}]',
        "[" * 100_000,
        '{"a": ' + "[" * 100_000,
        '{"images": [' + "[" * 100_000,
        b'{"images": [{"id": 1, "file_name": "\xff"}], "annotations": [], "categories": [{"id": 1}]}',
        b'{"x": "\xff", "images": [{"id": 1, "file_name": "a"}], "annotations": [], "categories": [{"id": 1}]}',
    ],
)
def test_errors_have_the_messages_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = []
    for limit in (2**40, 0):
        monkeypatch.setattr(coco, "LARGE_FILE", limit)
        with pytest.raises(InputError) as raised:
            read_annotations(path)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_the_reason_for_reading_with_json_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = file(tmp_path / "a.json", [box(1, bbox=None)])
    with caplog.at_level(logging.INFO):
        both(path, monkeypatch)
    assert "a.json is read as Python objects: " in caplog.text


def spoiled(data: SimpleNamespace) -> SimpleNamespace:
    """Add what the checks report."""
    images, annotations = data.content["images"], data.content["annotations"]
    images[3]["id"] = images[2]["id"]
    images[4].update(width=9)
    del images[5]["width"]
    images[6]["file_name"] = images[7]["file_name"]
    images[8].update(height=None)
    changes = (
        {"bbox": [1.5, 2, 1e10, 3]},
        {"bbox": [60, 40, 30, 30.5]},
        {"bbox": [5, 5, 0, 9]},
        {"image_id": 99},
        {"category_id": 4},
        {"iscrowd": 1},
        {"iscrowd": 2},
        {"iscrowd": True},
        {"iscrowd": "1"},
        {"area": -1},
        {"area": None},
        {"area": "big"},
        {"id": "five"},
        {"id": -3},
    )
    for annotation, change in zip(annotations, changes, strict=False):
        annotation.update(change)
    annotations[-1]["id"] = annotations[-2]["id"]
    del annotations[-3]["id"], annotations[-4]["area"]
    data.content["categories"].append({"id": 5, "name": "parent"})
    data.content["categories"][0]["supercategory"] = "parent"
    data.save()
    return data


@pytest.mark.parametrize("bad", [True, False])
@pytest.mark.parametrize("masks", [True, False])
def test_the_checks_find_the_same(
    coco_folder: Factory, monkeypatch: pytest.MonkeyPatch, bad: bool, masks: bool
) -> None:
    train, val = coco_folder(num_images=15), coco_folder(num_images=5, name="val", first_image_id=101)
    if bad:
        spoiled(train)
    else:
        train.content["annotations"][0]["iscrowd"] = 1
        train.content["annotations"][1]["bbox"] = [60.5, 40, 30, 30]
        train.content["annotations"][2]["area"] = None
        del train.content["images"][2]["width"]
        train.save()
    training = Training(5, 2, 1, None, False, 32, 48, 100, False)
    reports = []
    for limit in (2**40, 1):
        monkeypatch.setattr(coco, "LARGE_FILE", limit)
        sources = (Source(each.images, each.annotations) for each in (train, val))
        reports.append(examine(*sources, num_queries=1, masks=masks, training=training))
    codes = {finding.code for finding in reports[0].findings}
    if bad:
        assert codes >= {"image-id-repeated", "annotation-id-repeated", "annotation-id-no-number", "category-unknown"}
        assert codes >= {"box-not-numbers", "iscrowd-unknown", "area-not-number", "image-unknown", "box-outside"}
    else:
        assert reports[0].statistics or masks
    assert reports[0] == reports[1]
    assert str(reports[0]) == str(reports[1])


@pytest.mark.parametrize(
    "change",
    [
        {"bbox": [1, 2, 2e9, 4]},
        {"image_id": 99},
        {"category_id": 4},
        {"area": -1},
        {"iscrowd": 3},
        {"iscrowd": "1"},
    ],
)
def test_the_data_set_refuses_the_same(
    coco_folder: Factory, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    data = coco_folder()
    data.content["annotations"][3].update(change)
    data.save()
    said = []
    for limit in (2**40, 1):
        monkeypatch.setattr(coco, "LARGE_FILE", limit)
        with pytest.raises(InputError) as raised:
            CocoDetection(data.images, data.annotations, PLAIN)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_samples_and_ground_truth_are_the_same(coco_folder: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    data = coco_folder(num_images=12, objects=3)
    annotations = data.content["annotations"]
    random.Random(1).shuffle(annotations)
    random.Random(2).shuffle(data.content["images"])
    annotations[0]["iscrowd"], annotations[1]["iscrowd"] = 1, True
    annotations[2]["bbox"] = [1.25, 2, 30, 7.1]
    annotations[3]["bbox"] = [5, 5, 0, 9]
    del data.content["images"][2]["height"], annotations[4]["area"]
    data.save()
    found = []
    for limit in (2**40, 1):
        monkeypatch.setattr(coco, "LARGE_FILE", limit)
        samples = CocoDetection(data.images, data.annotations, PLAIN)
        truth = load_ground_truth(data.annotations, samples.class_map)
        found.append((samples, truth))
    (plain, truth), (large, large_truth) = found
    assert repr(large_truth) == repr(truth)
    assert (list(large.sizes), list(large.image_ids), list(large.file_names)) == (
        plain.sizes,
        plain.image_ids,
        plain.file_names,
    )
    assert large.sizes[2:4] == plain.sizes[2:4]
    assert large.fingerprint() == plain.fingerprint()
    assert torch.equal(large.class_counts_of_images, plain.class_counts_of_images)
    for index in range(12):
        (pixels, target), (others, other) = plain[SampleKey(0, index)], large[SampleKey(0, index)]
        assert torch.equal(pixels, others)
        assert torch.equal(target.boxes, other.boxes)
        assert torch.equal(target.labels, other.labels)
        assert (target.image_id, target.file_name) == (other.image_id, other.file_name)


def test_masks_are_the_same(coco_folder: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    data = coco_folder()
    for annotation in data.content["annotations"]:
        x, y, w, h = annotation["bbox"]
        annotation["segmentation"] = [[x, y, x + w, y, x + w, y + h - 0.5, x, y + h]]
    data.save()
    found = []
    for limit in (2**40, 1):
        monkeypatch.setattr(coco, "LARGE_FILE", limit)
        samples = CocoDetection(data.images, data.annotations, PLAIN, masks=True)
        found.append([samples[SampleKey(0, index)][1].masks for index in range(4)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_file_that_changes_while_it_is_read_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path / "a.json", copy.deepcopy(WELL_FORMED["ordinary"]))
    read = coco_reader._Document.read

    def changing(self: Any) -> Any:
        with path.open("a") as more:
            more.write(" ")
        return read(self)

    monkeypatch.setattr(coco_reader._Document, "read", changing)
    with pytest.raises(UnsupportedError, match="changed while"):
        decode_columns(path)


def test_crowds_that_are_true_or_false(coco_folder: Factory) -> None:
    data = coco_folder()
    for number, annotation in enumerate(data.content["annotations"]):
        annotation["iscrowd"] = (True, False, 1, 0, None, "yes")[number % 6]
    data.annotations.write_text(json.dumps(data.content))
    entries = Entries(decode_columns(data.annotations), "annotations")
    values = [each["iscrowd"] for each in data.content["annotations"]]
    assert len(values) >= 6
    assert crowd_mask(entries).tolist() == [value in (True, 1) and value != "yes" for value in values]
    assert suspect_crowds(entries).tolist() == [value == "yes" for value in values]


def test_no_annotations_have_no_boxes(coco_folder: Factory) -> None:
    data = coco_folder()
    data.annotations.write_text(json.dumps({**data.content, "annotations": []}))
    boxes = Entries(decode_columns(data.annotations), "annotations").boxes
    assert boxes is not None
    assert boxes.shape == (0, 4)
