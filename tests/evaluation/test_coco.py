"""Adapter of pycocotools and hotcoco: numbers, rules, and refused input."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.ops import box_convert

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap, Detections
from detr_bf.data.batches import SampleKey
from detr_bf.data.coco import CocoDetection
from detr_bf.data.masks import read_ids
from detr_bf.evaluation import CocoEvaluator, CocoSummary, merge_shards, to_coco_results, write_results
from detr_bf.evaluation import coco as coco_module
from detr_bf.evaluation.results import Result
from detr_bf.losses.postprocess import encoded

CocoFolder = Callable[..., SimpleNamespace]
ENGINES = ("pycocotools", "hotcoco")


def perfect(folder: SimpleNamespace, shift: float = 0.0) -> tuple[list[Detections], ClassMap]:
    """Return the ground truth as detections, moved to the right by ``shift`` pixels."""
    class_map = ClassMap.from_categories(folder.content["categories"])
    detections = []
    for image in folder.content["images"]:
        own = [a for a in folder.content["annotations"] if a["image_id"] == image["id"] and not a.get("iscrowd")]
        boxes = torch.tensor([a["bbox"] for a in own], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2] += shift
        labels = torch.tensor([class_map.index[a["category_id"]] for a in own], dtype=torch.int64)
        detections.append(Detections(image["id"], boxes, torch.ones(len(own)), labels))
    return detections, class_map


def empty(image_id: int) -> Detections:
    return Detections(image_id, torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))


def evaluate(
    folder: SimpleNamespace, detections: Sequence[Detections], class_map: ClassMap, **options: Any
) -> CocoSummary:
    evaluator = CocoEvaluator(folder.annotations, class_map, **options)
    evaluator.update(detections)
    return evaluator.summarize()


@pytest.mark.parametrize("engine", ENGINES)
def test_ground_truth_as_predictions_gives_one(coco_folder: CocoFolder, engine: str) -> None:
    folder = coco_folder(num_images=6, category_ids=(3, 7, 90))
    summary = evaluate(folder, *perfect(folder), engine=engine)
    assert summary.engine == engine
    assert (summary.AP, summary.AP50, summary.AP75, summary.AR) == (1.0, 1.0, 1.0, 1.0)
    assert {name: result.AP for name, result in summary.per_class.items()} == {
        "class3": 1.0,
        "class7": 1.0,
        "class90": 1.0,
    }
    assert sum(result.num_objects for result in summary.per_class.values()) == len(folder.content["annotations"])


def test_ap_falls_as_boxes_move_away(coco_folder: CocoFolder) -> None:
    folder = coco_folder(num_images=6)
    values = [evaluate(folder, *perfect(folder, shift)).AP for shift in (0.0, 1.5, 3.0, 100.0)]
    assert values[0] == 1.0
    assert values[-1] == 0.0
    assert all(nearer > farther for nearer, farther in itertools.pairwise(values)), values


def test_wrong_class_is_not_a_match(coco_folder: CocoFolder) -> None:
    folder = coco_folder(num_images=6)
    detections, class_map = perfect(folder)
    swapped = [replace(image, labels=(image.labels + 1) % class_map.num_classes) for image in detections]
    assert evaluate(folder, swapped, class_map).AP == 0.0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_class_or_size_without_ground_truth_is_none_and_not_averaged(coco_folder: CocoFolder, engine: str) -> None:
    folder = coco_folder(num_images=6, category_ids=(3, 7))
    detections, _ = perfect(folder)
    folder.content["categories"].append({"id": 90, "name": "absent"})
    folder.save()
    with_absent = ClassMap.from_categories(folder.content["categories"])
    summary = evaluate(folder, detections, with_absent, engine=engine)
    assert summary.per_class["absent"].AP is None
    assert summary.per_class["absent"].num_objects == 0
    assert summary.AP == 1.0
    assert summary.APl is None, "no object of a 64 x 48 image is large"
    assert summary.num_objects_by_size["large"] == 0
    state = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert state["APl"] is None
    assert CocoSummary.from_dict(state) == summary


@pytest.mark.parametrize("engine", ENGINES)
def test_no_detection_at_all_gives_zero(coco_folder: CocoFolder, engine: str) -> None:
    folder = coco_folder(num_images=3)
    class_map = ClassMap.from_categories(folder.content["categories"])
    summary = evaluate(folder, [empty(image["id"]) for image in folder.content["images"]], class_map, engine=engine)
    assert summary.AP == 0.0
    assert summary.AR == 0.0
    assert summary.num_detections == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_images_without_objects_give_none(coco_folder: CocoFolder, engine: str) -> None:
    folder = coco_folder(num_images=3, objects=0)
    summary = evaluate(folder, *perfect(folder), engine=engine)
    assert summary.AP is None


def test_every_image_once(coco_folder: CocoFolder) -> None:
    folder = coco_folder(num_images=4)
    detections, class_map = perfect(folder)
    evaluator = CocoEvaluator(folder.annotations, class_map)
    evaluator.update(detections[:2])
    with pytest.raises(InputError, match="given twice"):
        evaluator.update(detections[1:2])
    with pytest.raises(InputError, match="does not list"):
        evaluator.update([empty(999)])
    with pytest.raises(InputError, match="2 of 4 images were not evaluated"):
        evaluator.summarize()
    partial = evaluator.summarize(partial=True)
    assert partial.num_images == 2
    assert partial.metrics["AP"] == pytest.approx(1.0, abs=1e-12)  # images not evaluated are no misses


def test_summarize_twice_gives_the_same(coco_folder: CocoFolder) -> None:
    folder = coco_folder(num_images=4)
    detections, class_map = perfect(folder, shift=1.5)
    evaluator = CocoEvaluator(folder.annotations, class_map, engine="pycocotools")
    evaluator.update(detections)
    assert evaluator.summarize() == evaluator.summarize()


def test_shards_are_merged_by_image_id() -> None:
    first, again, other = empty(2), replace(empty(2), scores=torch.ones(0)), empty(1)
    merged = merge_shards([[first], [other, again]])
    assert [image.image_id for image in merged] == [1, 2]
    assert merged[1] is first


def test_missing_area_iscrowd_and_id_are_filled_in(coco_folder: CocoFolder) -> None:
    folder = coco_folder(num_images=6)
    detections, class_map = perfect(folder, shift=1.0)
    complete = evaluate(folder, detections, class_map)
    for annotation in folder.content["annotations"]:
        del annotation["area"], annotation["iscrowd"], annotation["id"]
    folder.save()
    before = folder.annotations.read_bytes()
    for engine in ENGINES:
        assert replace(evaluate(folder, detections, class_map, engine=engine), engine="") == replace(
            complete, engine=""
        )
    assert folder.annotations.read_bytes() == before


def test_annotation_id_zero_is_matched(coco_folder: CocoFolder) -> None:
    folder = coco_folder(num_images=3, category_ids=(3,))
    folder.content["annotations"][0]["id"] = 0
    folder.save()
    assert evaluate(folder, *perfect(folder), engine="pycocotools").AP == 1.0


def test_classes_that_share_a_name_stay_apart(coco_folder: CocoFolder) -> None:
    folder = coco_folder(num_images=4, category_ids=(3, 7))
    for category in folder.content["categories"]:
        category["name"] = "same"
    folder.save()
    assert set(evaluate(folder, *perfect(folder)).per_class) == {"same (3)", "same (7)"}


@pytest.mark.parametrize("sized", [True, False], ids=["sizes", "no sizes"])
@pytest.mark.parametrize("large", [True, False], ids=["columns", "objects"])
def test_objects_are_those_of_training(
    coco_folder: CocoFolder, sized: bool, large: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A detector that finds what training shows it has an AP of 1, whatever the boxes of the file are."""
    if large:
        monkeypatch.setattr("detr_bf.data.coco.LARGE_FILE", 1)
    folder = coco_folder(num_images=4, category_ids=(3, 7))
    boxes = [[-20, -10, 40, 30], [50, 40, 30, 30], [10, 10, 0, 5], [70, 10, 20, 20], [20, 20, -5, 5]]
    folder.content["annotations"] += [
        {"id": 100 + number, "image_id": image, "category_id": 3 + 4 * (image % 2), "bbox": bbox, "iscrowd": 0}
        for image in (1, 2, 3, 4)
        for number, bbox in enumerate(boxes)
    ]
    for image in folder.content["images"]:
        if not sized:
            del image["height"], image["width"]
    folder.save()
    data = CocoDetection(folder.images, folder.annotations, lambda sample: sample)
    detections = []
    for index in range(len(data)):
        _, target = data[SampleKey(0, index)]
        scale = torch.tensor([*target.size[::-1], *target.size[::-1]])
        shown = box_convert(target.boxes, "cxcywh", "xyxy") * scale
        detections.append(Detections(target.image_id, shown, torch.ones(len(shown)), target.labels))
    for engine in ENGINES:
        evaluator = CocoEvaluator(folder.annotations, data.class_map, engine, images=folder.images)
        evaluator.update(detections)
        summary = evaluator.summarize()
        assert (summary.AP, summary.AR) == (1.0, 1.0)
        assert sum(summary.num_objects_by_size.values()) == sum(len(each.boxes) for each in detections)
        assert not any(errors.missed.any() for errors in evaluator.errors)
    assert [
        "12 objects without area are left out of the evaluation, and 8 boxes that exceed" in record.message
        for record in caplog.records
    ] == [True]


def test_boxes_that_exceed_their_image_by_a_rounding_error_stay(coco_folder: CocoFolder) -> None:
    """COCO's own files have such boxes, and its program does not clip them."""
    folder = coco_folder(num_images=1, category_ids=(3,), objects=1)
    folder.content["annotations"][0]["bbox"] = [60.0, 40.0, 20.75, 20.5]
    folder.content["images"][0].update(height=60, width=80)
    folder.save()
    truth = coco_module.load_ground_truth(folder.annotations, ClassMap((3,), ("class3",)))
    assert truth["annotations"][0]["bbox"] == [60.0, 40.0, 20.75, 20.5]


@pytest.mark.parametrize("limit", [1, 5, 300])
def test_detections_beyond_the_limit_do_not_count(coco_folder: CocoFolder, limit: int) -> None:
    folder = coco_folder(num_images=2, category_ids=(3,), objects=2)
    detections, class_map = perfect(folder)
    summaries = [
        replace(evaluate(folder, detections, class_map, engine=engine, max_detections=limit), engine="")
        for engine in ENGINES
    ]
    assert summaries[0] == summaries[1]
    assert summaries[0].metrics["AR"] == (0.5 if limit == 1 else 1.0)
    assert summaries[0].AP is not None


def test_results_undo_the_class_map(tmp_path: Path) -> None:
    class_map = ClassMap((3, 7, 90), ("a", "b", "c"))
    detections = [
        Detections(5, torch.tensor([[10.0, 20.0, 40.0, 60.5]]), torch.tensor([0.25]), torch.tensor([2])),
        empty(6),
    ]
    expected = [{"image_id": 5, "category_id": 90, "bbox": [10.0, 20.0, 30.0, 40.5], "score": 0.25}]
    assert to_coco_results(detections, class_map) == expected
    write_results(tmp_path / "results.json", detections, class_map)
    assert json.loads((tmp_path / "results.json").read_text()) == expected


def test_non_finite_scores_are_refused(coco_folder: CocoFolder) -> None:
    folder = coco_folder(num_images=1)
    detections, class_map = perfect(folder)
    broken = replace(detections[0], scores=torch.full_like(detections[0].scores, math.nan))
    with pytest.raises(InputError, match="not finite"):
        CocoEvaluator(folder.annotations, class_map).update([broken])


def test_bad_annotation_files_and_options(coco_folder: CocoFolder, tmp_path: Path) -> None:
    folder = coco_folder(num_images=1)
    class_map = ClassMap.from_categories(folder.content["categories"])
    with pytest.raises(InputError, match="no annotation file"):
        CocoEvaluator(tmp_path / "nowhere.json", class_map)
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(InputError, match="not a COCO"):
        CocoEvaluator(tmp_path / "bad.json", class_map)
    with pytest.raises(InputError, match="calls category id 3 'class3'"):
        CocoEvaluator(folder.annotations, replace(class_map, names=("x", "y", "z")))
    with pytest.raises(InputError, match="does not know"):
        CocoEvaluator(folder.annotations, ClassMap((3,), ("class3",)))
    with pytest.raises(InputError, match="one of auto, pycocotools, hotcoco"):
        CocoEvaluator(folder.annotations, class_map, engine="fast")
    with pytest.raises(InputError, match="max_detections"):
        CocoEvaluator(folder.annotations, class_map, max_detections=0)
    folder.content["annotations"][0]["bbox"] = [1, 2, 3]
    folder.save()
    with pytest.raises(InputError, match=r"image 1 has bbox \[1, 2, 3\]"):
        CocoEvaluator(folder.annotations, class_map)


def test_auto_takes_hotcoco_only_when_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert coco_module.resolve_engine("auto") == "hotcoco"
    monkeypatch.setattr(coco_module.importlib.util, "find_spec", lambda name: None)
    assert coco_module.resolve_engine("auto") == "pycocotools"
    with pytest.raises(InputError, match=r"pip install 'detr_bf\[fast-eval\]'"):
        coco_module.resolve_engine("hotcoco")


def test_the_engines_print_nothing(coco_folder: CocoFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder = coco_folder(num_images=2)
    for engine in ENGINES:
        evaluate(folder, *perfect(folder), engine=engine)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def random_data_set(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draw crowds, sparse category ids, all sizes, tied scores, near hits and pure noise."""
    rng = np.random.default_rng(seed)
    category_ids = sorted(rng.choice(200, size=5, replace=False).tolist())
    images = [{"id": int(i)} for i in rng.choice(10_000, size=12, replace=False)]
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for image in images:
        for _ in range(rng.integers(0, 9)):
            box = [*rng.uniform(0, 200, 2), *rng.uniform(4, 180, 2)]
            category = int(rng.choice(category_ids[:4]))  # the fifth has no ground truth
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image["id"],
                    "category_id": category,
                    "bbox": [float(v) for v in box],
                    "area": float(box[2] * box[3]),
                    "iscrowd": int(rng.random() < 0.15),
                }
            )
            for _ in range(rng.integers(0, 4)):
                near = np.asarray(box) + rng.normal(0, 6, 4)
                found = category if rng.random() < 0.8 else int(rng.choice(category_ids))
                results.append(_result(image["id"], found, near, rng))
        for _ in range(rng.integers(0, 20)):
            noise = np.asarray([*rng.uniform(0, 200, 2), *rng.uniform(4, 180, 2)])
            results.append(_result(image["id"], int(rng.choice(category_ids)), noise, rng))
    return {"images": images, "annotations": annotations, "categories": [{"id": i} for i in category_ids]}, results


def _result(image_id: int, category_id: int, box: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    bbox = [float(value) for value in np.maximum(box, 1.0)]
    return {"image_id": image_id, "category_id": category_id, "bbox": bbox, "score": round(float(rng.random()), 1)}


def ellipse(box: Sequence[float]) -> dict[str, Any]:
    """Return run lengths (400 x 400 pixels) of a mask that fills the box x, y, width, height."""
    x, y, width, height = box
    rows, columns = np.mgrid[:400, :400] + 0.5
    inside = ((columns - x - width / 2) / (width / 2)) ** 2 + ((rows - y - height / 2) / (height / 2)) ** 2 <= 1
    return encoded(torch.from_numpy(inside))


def with_masks(content: dict[str, Any], results: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Replace boxes by ellipses."""
    images = [{**image, "height": 400, "width": 400} for image in content["images"]]
    annotations = [{**a, "segmentation": ellipse(a["bbox"])} for a in content["annotations"]]
    masks = [{**{k: v for k, v in r.items() if k != "bbox"}, "segmentation": ellipse(r["bbox"])} for r in results]
    return {**content, "images": images, "annotations": annotations}, masks


@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize("seed", range(8))
def test_engines_agree_bit_for_bit_with_each_other_and_with_pycocotools_own_summary(
    kind: str, seed: int, tmp_path: Path
) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    content, results = random_data_set(seed)
    if kind == "segm":
        content, results = with_masks(content, results)
    limits = (1, 10, 100)
    runs = [
        coco_module.match_and_accumulate(
            engine, json.loads(json.dumps(content)), json.loads(json.dumps(results)), limits, kind
        )
        for engine in ENGINES
    ]
    assert runs[0].precision.tobytes() == runs[1].precision.tobytes()
    assert runs[0].recall.tobytes() == runs[1].recall.tobytes()

    numbers = [list(coco_module._twelve_numbers(run).values()) for run in runs]
    assert numbers[0] == numbers[1]
    with contextlib.redirect_stdout(io.StringIO()):
        path = tmp_path / "annotations.json"
        path.write_text(json.dumps(content))
        truth = COCO(str(path))
        reference = COCOeval(truth, truth.loadRes(results), kind)
        reference.evaluate()
        reference.accumulate()
        reference.summarize()
    assert numbers[0] == [None if value == -1 else value for value in reference.stats.tolist()]
    assert 0 < numbers[0][0] < 1


@pytest.mark.parametrize("engine", ENGINES)
def test_boxes_as_an_array_and_ids_beyond_float64_give_the_same_curves(engine: str) -> None:
    content, _ = random_data_set(0)
    classes = ClassMap.from_categories(content["categories"])
    detections = [
        Detections(image["id"], torch.tensor([[5.5, 3.25, 40, 30], [1, 1, 20, 9]]), torch.rand(2), torch.tensor([0, 1]))
        for image in content["images"]
    ]
    table = coco_module.box_results(detections, classes)
    assert isinstance(table, np.ndarray)
    listed = coco_module.box_results([*detections, replace(detections[0], image_id=2**53 + 1)], classes)
    assert isinstance(listed, list)
    runs = [
        coco_module.match_and_accumulate(engine, json.loads(json.dumps(content)), results, (1, 10, 100), "bbox")
        for results in (table, listed[:-2])
    ]
    assert runs[0].precision.tobytes() == runs[1].precision.tobytes()
    assert runs[0].recall.tobytes() == runs[1].recall.tobytes()


def masked(image_id: int, masks: torch.Tensor, labels: Sequence[int]) -> Detections:
    """Return detections of score 1 with these masks (N, H, W) and unrelated boxes."""
    count, coded = len(masks), tuple(map(encoded, masks))
    return Detections(image_id, torch.zeros(count, 4), torch.ones(count), torch.tensor(labels), coded)


@pytest.mark.parametrize("engine", ENGINES)
def test_masks_of_things_of_a_panoptic_file(panoptic_folder: CocoFolder, engine: str) -> None:
    """Exact masks give 1 although the boxes are wrong; stuff and missing stuff segments do not count."""
    folder = panoptic_folder(4)
    class_map = ClassMap.from_categories(folder.content["categories"])
    evaluator = CocoEvaluator(folder.annotations, class_map, engine, masks=True, panoptic=folder.panoptic)
    for entry in folder.content["annotations"]:
        ids = read_ids(folder.panoptic / entry["file_name"])
        segments = [s for s in entry["segments_info"] if not s["iscrowd"] and s["category_id"] != 100]
        masks = torch.stack([ids == segment["id"] for segment in segments])
        labels = [class_map.index[segment["category_id"]] for segment in segments]
        evaluator.update([masked(entry["image_id"], masks, labels)])
    summary = evaluator.summarize_masks()
    boxes = evaluator.summarize()
    assert (Result(boxes).score, Result(boxes, summary).score) == (boxes.AP, summary.AP), (
        "masks choose the best weights"
    )
    assert boxes.AP != summary.AP
    assert pytest.approx(1.0) == summary.AP
    assert list(summary.per_class) == ["thing3", "thing7"]
    assert evaluator.summarize().AP < 0.1, "the metrics of the boxes"


def test_polygons_and_run_lengths_of_a_detection_file(coco_folder: CocoFolder) -> None:
    folder = coco_folder(num_images=4, objects=2)
    for annotation in folder.content["annotations"]:
        x, y, w, h = annotation["bbox"]
        polygon = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        pixels = torch.zeros(1, 48, 64)
        pixels[0, y : y + h, x : x + w] = 1
        annotation["segmentation"] = polygon if annotation["id"] % 2 else encoded(pixels[0])
    detections, class_map = perfect(folder)
    folder.save()
    evaluator = CocoEvaluator(folder.annotations, class_map, masks=True)
    for found in detections:
        masks = torch.zeros(len(found.boxes), 48, 64)
        for mask, (x0, y0, x1, y1) in zip(masks, found.boxes.int().tolist(), strict=True):
            mask[y0:y1, x0:x1] = 1
        evaluator.update([replace(found, masks=tuple(map(encoded, masks)))])
    assert evaluator.summarize_masks().AP == evaluator.summarize().AP == pytest.approx(1.0)


def test_an_object_whose_mask_has_no_pixel_counts_with_and_without_masks(coco_folder: CocoFolder) -> None:
    folder = coco_folder(num_images=1, category_ids=(3,), objects=1)
    one = folder.content["annotations"][0]
    one["segmentation"] = [[10.1, 10.1, 10.4, 10.1, 10.4, 10.4]]
    folder.save()
    truth = [
        coco_module.load_ground_truth(folder.annotations, ClassMap((3,), ("class3",)), masks=masks)["annotations"]
        for masks in (False, True)
    ]
    assert [[each["bbox"] for each in annotations] for annotations in truth] == [[one["bbox"]]] * 2


def test_ground_truth_without_masks_is_refused(coco_folder: CocoFolder) -> None:
    folder = coco_folder()
    class_map = ClassMap.from_categories(folder.content["categories"])
    with pytest.raises(InputError, match="annotation 1 of image 1 has no usable mask: segmentation is none"):
        CocoEvaluator(folder.annotations, class_map, masks=True)
    for image in folder.content["images"]:
        del image["height"]
    folder.save()
    with pytest.raises(InputError, match="give its height and width"):
        CocoEvaluator(folder.annotations, class_map, masks=True)
