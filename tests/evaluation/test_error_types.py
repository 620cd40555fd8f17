"""Error types, their costs, confusion and calibration, against loops, repaired data evaluated anew, and hotcoco.

Data "with masks" have the IoU of masks: rectangles with a cut-out corner.
"""

from __future__ import annotations

import copy
import io
import json
import math
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from detr_bf.common.structures import ClassMap, Detections
from detr_bf.evaluation.coco import match_and_accumulate
from detr_bf.evaluation.error_types import (
    average_precision,
    calibration,
    confusion_matrix,
    error_costs,
    error_document,
    label_suspects,
    never_found,
    object_groups,
    scored_hits,
    update_never_found,
    worst_images,
)
from detr_bf.evaluation.matching import ImageErrors, image_errors
from detr_bf.evaluation.results import all_classes

CLASSES = ClassMap((3, 4, 9), ("a", "b", "c"))
KINDS = {
    "class": "Cls",
    "localisation": "Loc",
    "both": "Both",
    "duplicate": "Dupe",
    "background": "Bkg",
    "missed": "Miss",
}
Data = tuple[dict[str, Any], list[dict[str, Any]]]


def cut_rectangle(box: list[float], corner: np.ndarray) -> dict[str, Any]:
    """Return run lengths of a box in an image of 100 x 100 pixels without a part of its lower right corner."""
    pixels = np.zeros((100, 100), dtype=np.uint8)
    x0, y0, x1, y1 = (max(0, round(value)) for value in (box[0], box[1], box[0] + box[2], box[1] + box[3]))
    pixels[y0:y1, x0:x1] = 1
    pixels[y1 - round(float(corner[1]) * (y1 - y0)) : y1, x1 - round(float(corner[0]) * (x1 - x0)) : x1] = 0
    coded = coco_mask.encode(np.asfortranarray(pixels))
    return {"size": coded["size"], "counts": coded["counts"].decode()}


def with_masks(data: Data, seed: int) -> Data:
    """Add masks, so that the IoU of boxes and of masks differ."""
    rng = np.random.default_rng(seed)
    truth, results = copy.deepcopy(data)
    for each in (*truth["annotations"], *results):
        each["segmentation"] = cut_rectangle(each["bbox"], rng.uniform(0, 0.75, 2))
    return truth, results


def random_data(seed: int, *, crowds: float, ties: bool, masks: bool = False) -> Data:
    """Return a COCO data set of six images, the third without objects, and detections near objects and elsewhere."""
    if masks:
        return with_masks(random_data(seed, crowds=crowds, ties=ties), seed)
    rng = np.random.default_rng(seed)
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []

    def detect(image_id: int, category: int, box: list[float]) -> None:
        score = float(rng.integers(1, 40)) / 40 if ties else float(rng.uniform())
        results.append({"image_id": image_id, "category_id": category, "bbox": box, "score": score})

    for image_id in range(1, 7):
        for _ in range(0 if image_id == 3 else int(rng.integers(1, 6))):
            x, y, w, h = (float(v) for v in (*rng.integers(0, 60, 2), *rng.integers(10, 40, 2)))
            category = int(rng.choice(CLASSES.category_ids))
            annotations.append({"image_id": image_id, "category_id": category, "bbox": [x, y, w, h], "area": w * h})
            annotations[-1] |= {"id": len(annotations), "iscrowd": int(rng.random() < crowds)}
            for _ in range(int(rng.integers(0, 3))):
                dx, dy, dw, dh = (float(v) for v in rng.integers(-8, 9, 4))
                label = category if rng.random() < 0.7 else int(rng.choice(CLASSES.category_ids))
                detect(image_id, label, [x + dx, y + dy, max(1.0, w + dw), max(1.0, h + dh)])
        for _ in range(2):
            box = [float(v) for v in (*rng.integers(0, 80, 2), *rng.integers(5, 30, 2))]
            detect(image_id, int(rng.choice(CLASSES.category_ids)), box)
    categories = [{"id": i, "name": n} for i, n in zip(CLASSES.category_ids, CLASSES.names, strict=True)]
    images = [{"id": i, "height": 100, "width": 100} for i in range(1, 7)]
    return {"images": images, "annotations": annotations, "categories": categories}, results


def examined(data: Data, classes: ClassMap = CLASSES) -> list[ImageErrors]:
    truth, results = data
    detections = []
    for image in truth["images"]:
        own = [result for result in results if result["image_id"] == image["id"]]
        xywh = torch.tensor([result["bbox"] for result in own], dtype=torch.float64).reshape(-1, 4)
        boxes = torch.cat([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], dim=1)
        scores = torch.tensor([result["score"] for result in own], dtype=torch.float64)
        labels = torch.tensor([classes.index[result["category_id"]] for result in own], dtype=torch.int64)
        masks = tuple(result["segmentation"] for result in own) if has_masks(data) else None
        detections.append(Detections(image["id"], boxes, scores, labels, masks))
    return image_errors(truth, detections, classes, masks=has_masks(data))


def has_masks(data: Data) -> bool:
    return any("segmentation" in each for each in (*data[0]["annotations"], *data[1]))


@lru_cache(4096)
def decoded(counts: str) -> np.ndarray:
    return np.asarray(coco_mask.decode([{"size": [100, 100], "counts": counts}])[:, :, 0], dtype=bool)


def overlap_of(one: dict[str, Any], other: dict[str, Any], crowd: bool = False) -> float:
    """Return the IoU of masks where there are any, else of boxes."""
    if "segmentation" not in one:
        return iou(one["bbox"], other["bbox"], crowd)
    mine, theirs = (decoded(each["segmentation"]["counts"]) for each in (one, other))
    union = mine.sum() if crowd else (mine | theirs).sum()
    return float((mine & theirs).sum() / union) if union else 0.0


def iou(one: list[float], other: list[float], crowd: bool = False) -> float:
    width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    common = max(0.0, width) * max(0.0, height)
    return common / (one[2] * one[3] + (0 if crowd else other[2] * other[3] - common))


def ranked(data: Data, image_id: int) -> list[dict[str, Any]]:
    return sorted((r for r in data[1] if r["image_id"] == image_id), key=lambda result: -result["score"])


def objects_of(data: Data, image_id: int) -> list[dict[str, Any]]:
    return [a for a in data[0]["annotations"] if a["image_id"] == image_id and not a["iscrowd"]]


def best_object(result: dict[str, Any], objects: list[dict[str, Any]]) -> tuple[float, dict[str, Any] | None]:
    best: tuple[float, dict[str, Any] | None] = (0.0, None)
    for each in objects:
        overlap = overlap_of(result, each)
        if overlap > 0 and overlap >= best[0]:
            best = (overlap, each)
    return best


def verdicts(data: Data) -> list[tuple[dict[str, Any], str, dict[str, Any] | None]]:
    """Return every detection with its type and the object that it is about, by loops."""
    found = []
    for image in data[0]["images"]:
        objects, taken = objects_of(data, image["id"]), set()
        crowds = [a for a in data[0]["annotations"] if a["image_id"] == image["id"] and a["iscrowd"]]
        for result in ranked(data, image["id"]):
            same = [o for o in objects if o["category_id"] == result["category_id"]]
            others = [o for o in objects if o["category_id"] != result["category_id"]]
            overlap, match = best_object(result, [o for o in same if o["id"] not in taken])
            own, owner = best_object(result, same)
            strange, stranger = best_object(result, others)
            on_crowd = any(
                c["category_id"] == result["category_id"] and overlap_of(result, c, True) >= 0.5 for c in crowds
            )
            if match is not None and overlap >= 0.5:
                taken.add(match["id"])
                found.append((result, "hit", match))
            elif on_crowd:
                found.append((result, "ignored", None))
            elif 0.1 <= own < 0.5:
                found.append((result, "localisation", owner))
            elif strange >= 0.5:
                found.append((result, "class", stranger))
            elif own >= 0.5:
                found.append((result, "duplicate", owner))
            elif strange >= 0.1:
                found.append((result, "both", None))
            else:
                found.append((result, "background", None))
    return found


def lost(data: Data, *kinds: str) -> list[int]:
    """Return the ids of the objects that no detection of these types is about."""
    seen = {cause["id"] for _, kind, cause in verdicts(data) if kind in kinds and cause is not None}
    return [a["id"] for a in data[0]["annotations"] if not a["iscrowd"] and a["id"] not in seen]


CASES = [(seed, crowds, ties) for seed in range(10) for crowds in (0.0, 0.3) for ties in (False, True)]


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(("seed", "crowds", "ties"), CASES)
def test_types_and_missed_objects_equal_loops(seed: int, crowds: float, ties: bool, masks: bool) -> None:
    data = random_data(seed, crowds=crowds, ties=ties, masks=masks)
    found = examined(data)
    expected = verdicts(data)
    assert [kind for image in found for kind in image.types] == [kind for _, kind, _ in expected]
    for image in found:
        objects = objects_of(data, image.image_id)
        mine = [(kind, cause) for result, kind, cause in expected if result["image_id"] == image.image_id]
        for at, (kind, cause) in enumerate(mine):
            number = image.matches[at] if kind == "hit" else image.causes[at]
            assert (objects[number]["id"] if number >= 0 else None) == (cause and cause["id"])
        missed = set(lost(data, "hit", "class", "localisation"))
        assert image.missed.tolist() == [each["id"] in missed for each in objects]


def ap50(truth: dict[str, Any], results: list[dict[str, Any]]) -> float:
    truth, results = copy.deepcopy((truth, results))
    kind = "segm" if has_masks((truth, results)) else "bbox"
    if kind == "segm":
        results = [{key: value for key, value in result.items() if key != "bbox"} for result in results]
    curves = match_and_accumulate("pycocotools", truth, results, (1, 10, 100), kind)
    precision = curves.precision[0, :, :, 0, 2]
    return float(precision[precision > -1].mean()) if (precision > -1).any() else 1.0


def repaired(data: Data, kind: str) -> Data:
    """Return the data without the errors of one type."""
    truth, results = copy.deepcopy(data)
    if kind in ("missed", "false negatives"):
        gone = lost(data, "hit") if kind == "false negatives" else lost(data, "hit", "class", "localisation")
        truth["annotations"] = [a for a in truth["annotations"] if a["id"] not in gone]
        return truth, results
    taken = {cause["id"] for _, each, cause in verdicts(data) if each == "hit" and cause is not None}
    kept = []
    for result, each, cause in verdicts(data):
        if kind == "false positives" and each not in ("hit", "ignored"):
            continue
        if each != kind:
            kept.append(result)
        elif cause is not None and kind in ("class", "localisation") and cause["id"] not in taken:
            taken.add(cause["id"])
            place = {key: cause[key] for key in ("category_id", "bbox", "segmentation") if key in cause}
            kept.append(result | place)
    return truth, kept


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(("seed", "crowds", "ties"), CASES)
def test_costs_are_those_of_repaired_data_evaluated_anew(seed: int, crowds: float, ties: bool, masks: bool) -> None:
    data = random_data(seed, crowds=crowds, ties=ties, masks=masks)
    base, costs = error_costs(examined(data), CLASSES.num_classes)
    assert base == pytest.approx(ap50(*data), abs=1e-12)
    expected = verdicts(data)
    for kind, (count, cost) in costs.items():
        assert cost == pytest.approx(ap50(*repaired(data, kind)) - base, abs=1e-12), kind
        if kind in ("missed", "false negatives"):
            kinds = ("hit",) if kind == "false negatives" else ("hit", "class", "localisation")
            assert count == len(lost(data, *kinds))
        else:
            wrong = [each for _, each, _ in expected if each not in ("hit", "ignored")]
            assert count == (len(wrong) if kind == "false positives" else wrong.count(kind))


def test_masks_and_boxes_of_the_random_data_differ() -> None:
    pairs = [
        (random_data(seed, crowds=0.3, ties=False), random_data(seed, crowds=0.3, ties=False, masks=True))
        for seed in range(10)
    ]
    boxes, masks = ([kind for data in side for _, kind, _ in verdicts(data)] for side in zip(*pairs, strict=True))
    assert sum(one != other for one, other in zip(boxes, masks, strict=True)) > 25
    assert {"hit", "ignored", "class", "localisation", "both", "duplicate", "background"} == set(masks)


@pytest.mark.parametrize("seed", range(5))
def test_masks_of_stuff_are_not_examined(seed: int) -> None:
    classes = ClassMap(CLASSES.category_ids, CLASSES.names, (True, False, True))
    truth, results = random_data(seed, crowds=0.2, ties=True, masks=True)
    things = (
        truth | {"annotations": [a for a in truth["annotations"] if a["category_id"] != 4]},
        [result for result in results if result["category_id"] != 4],
    )
    found, expected = examined((truth, results), classes), verdicts(things)
    assert [kind for image in found for kind in image.types] == [kind for _, kind, _ in expected]
    assert 1 not in {label for image in found for label in (*image.labels, *image.object_labels)}
    assert error_costs(found, 3)[0] == pytest.approx(ap50(*things), abs=1e-12)


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize(("seed", "crowds", "ties"), CASES)
def test_the_confusion_matrix_equals_loops(seed: int, crowds: float, ties: bool, threshold: float) -> None:
    data = random_data(seed, crowds=crowds, ties=ties)
    expected = np.zeros((4, 4), dtype=np.int64)
    on_crowd = [result for result, kind, _ in verdicts(data) if kind == "ignored"]
    for image in data[0]["images"]:
        free = objects_of(data, image["id"])
        for result in ranked(data, image["id"]):
            if result["score"] < threshold or result in on_crowd:
                continue
            overlap, match = best_object(result, free)
            if match is not None and overlap >= 0.5:
                free.remove(match)
                expected[CLASSES.index[match["category_id"]], CLASSES.index[result["category_id"]]] += 1
            else:
                expected[3, CLASSES.index[result["category_id"]]] += 1
        for each in free:
            expected[CLASSES.index[each["category_id"]], 3] += 1
    np.testing.assert_array_equal(confusion_matrix(examined(data), 3, threshold), expected)


@pytest.mark.parametrize(("seed", "crowds", "ties"), CASES)
def test_calibration_equals_loops(seed: int, crowds: float, ties: bool) -> None:
    data = random_data(seed, crowds=crowds, ties=ties)
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
    for result, kind, _ in verdicts(data):
        if kind != "ignored":
            bins[min(9, math.floor(result["score"] * 10))].append((result["score"], kind == "hit"))
    found = calibration(all_classes(scored_hits(examined(data), 3)))
    total, error = sum(map(len, bins)), 0.0
    for at, own in enumerate(bins):
        assert found.counts[at] == len(own)
        if own:
            score, precision = (sum(values) / len(own) for values in zip(*own, strict=True))
            assert (found.scores[at], found.precision[at]) == pytest.approx((score, precision))
            error += len(own) / total * abs(score - precision)
        else:
            assert np.isnan(found.scores[at])
            assert np.isnan(found.precision[at])
    assert found.error == pytest.approx(error)


@pytest.mark.parametrize("seed", range(25))
def test_hotcoco_agrees_without_crowds(seed: int) -> None:
    hotcoco = pytest.importorskip("hotcoco")
    data = random_data(seed, crowds=0.0, ties=False)
    truth, results = copy.deepcopy(data)
    dataset = hotcoco.COCO(truth)
    evaluation = hotcoco.COCOeval(dataset, dataset.load_res(results), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    images = examined(data)
    theirs = evaluation.tide_errors()
    base, costs = error_costs(images, 3)
    assert theirs["ap_base"] == pytest.approx(base)
    for kind, name in KINDS.items():
        assert theirs["counts"][name] == costs[kind].number
    for kind, name in {"both": "Both", "duplicate": "Dupe", "background": "Bkg", "false positives": "FP"}.items():
        assert theirs["delta_ap"][name] == pytest.approx(costs[kind].cost, abs=1e-9), kind
    for threshold in (0.0, 0.5):
        matrix = evaluation.confusion_matrix(iou_thr=0.5, min_score=threshold)["matrix"]
        np.testing.assert_array_equal(matrix.astype(np.int64), confusion_matrix(images, 3, threshold))
    assert evaluation.calibration()["ece"] == pytest.approx(calibration(all_classes(scored_hits(images, 3))).error)


@pytest.mark.parametrize("seed", range(10))
def test_slices_of_hotcoco_are_evaluations_of_some_images(seed: int) -> None:
    """They are right, also with crowds; they divide images, and the report divides objects."""
    hotcoco = pytest.importorskip("hotcoco")
    truth, results = random_data(seed, crowds=0.3, ties=False)
    dataset = hotcoco.COCO(copy.deepcopy(truth))
    evaluation = hotcoco.COCOeval(dataset, dataset.load_res(copy.deepcopy(results)), "bbox")
    evaluation.evaluate()
    chosen = [image["id"] for image in truth["images"]][::2]
    sliced = evaluation.slice_by({"half": chosen})["half"]
    with redirect_stdout(io.StringIO()):
        reference = COCO()
        reference.dataset = copy.deepcopy(truth)
        reference.createIndex()
        expected = COCOeval(reference, reference.loadRes(copy.deepcopy(results)), "bbox")
        expected.params.imgIds = chosen
        expected.evaluate()
        expected.accumulate()
        expected.summarize()
    for name, value in zip(("AP", "AP50", "AP75"), expected.stats, strict=False):
        assert sliced[name] == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("threshold", [0.2, 0.6])
@pytest.mark.parametrize("seed", range(10))
def test_a_threshold_leaves_the_errors_of_the_detections_above_it(seed: int, threshold: float) -> None:
    truth, results = random_data(seed, crowds=0.3, ties=False)
    expected = examined((truth, [result for result in results if result["score"] >= threshold]))
    for image, other in zip(examined((truth, results)), expected, strict=True):
        above = image.above(threshold)
        assert above.types == other.types
        assert above.causes.tolist() == other.causes.tolist()
        assert above.missed.tolist() == other.missed.tolist()


def test_without_objects_or_detections() -> None:
    truth, results = random_data(0, crowds=0.0, ties=False)
    nothing = examined((truth, []))
    base, costs = error_costs(nothing, 3)
    assert base == 0.0
    assert costs["missed"].number == len(truth["annotations"])
    assert costs["missed"].cost == 1.0
    assert math.isnan(calibration(all_classes(scored_hits(nothing, 3))).error)
    empty = examined((truth | {"annotations": []}, results))
    assert error_costs(empty, 3) == (None, {})
    assert confusion_matrix(empty, 3, 0.0)[3].sum() == len(results)
    assert {kind for image in empty for kind in image.types} == {"background"}
    assert error_costs([], 3) == (None, {})


def test_average_precision_of_a_worked_example() -> None:
    found = [(0.9, True), (0.8, False), (0.7, True)]
    assert average_precision(found, 2) == pytest.approx((51 * 1 + 50 * 2 / 3) / 101)
    assert average_precision([], 2) == 0.0


SIZES = dict.fromkeys(range(1, 7), (100, 100)) | {2: None}
PROPERTIES = ("size", "shape", "neighbours", "border")


def property_group(name: str, box: list[float], objects: list[dict[str, Any]], image_id: int, own: bool) -> int | None:
    x, y, w, h = box
    if name == "size":
        return 0 if w * h <= 1024 else 1 if w * h <= 9216 else 2
    if name == "shape":
        return 0 if w / h <= 0.5 else 1 if w / h <= 2 else 2
    if name == "neighbours":
        near = sum(iou(box, each["bbox"]) >= 0.1 for each in objects)
        return min(2, near - 1 if own else max(0, near - 1))
    if SIZES[image_id] is None:
        return None
    return 0 if min(x, y, 100 - x - w, 100 - y - h) <= 1 else 1


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("seed", range(8))
def test_groups_equal_loops(seed: int, name: str) -> None:
    data = random_data(seed, crowds=0.2, ties=True)
    found = object_groups(examined(data), SIZES, 3, threshold=0.3)[name]
    for at, group in enumerate(found):
        totals, rows, hits = dict.fromkeys(CLASSES.category_ids, 0), [], 0
        for each in data[0]["annotations"]:
            near = objects_of(data, each["image_id"])
            if not each["iscrowd"] and property_group(name, each["bbox"], near, each["image_id"], True) == at:
                totals[each["category_id"]] += 1
        for result, kind, cause in verdicts(data):
            near = objects_of(data, result["image_id"])
            box = cause["bbox"] if kind == "hit" and cause is not None else result["bbox"]
            if kind != "ignored" and property_group(name, box, near, result["image_id"], kind == "hit") == at:
                rows.append((result["category_id"], result["score"], kind == "hit"))
                hits += kind == "hit" and result["score"] >= 0.3
        values = [
            average_precision([(score, hit) for label, score, hit in rows if label == category], total)
            for category, total in totals.items()
            if total
        ]
        assert group.objects == sum(totals.values())
        assert group.ap50 == (pytest.approx(np.mean(values)) if values else None)
        assert group.found == (pytest.approx(hits / group.objects) if group.objects else None)


@pytest.mark.parametrize("seed", range(8))
def test_the_worst_images_have_the_most_errors(seed: int) -> None:
    data = random_data(seed, crowds=0.2, ties=False)
    expected = {}
    for image in data[0]["images"]:
        own = [v for v in verdicts(data) if v[0]["image_id"] == image["id"] and v[0]["score"] >= 0.4]
        wrong = [result["score"] for result, kind, _ in own if kind not in ("hit", "ignored")]
        about = [c["id"] for _, kind, c in own if c is not None and kind in ("hit", "class", "localisation")]
        missed = sum(each["id"] not in about for each in objects_of(data, image["id"]))
        if wrong or missed:
            expected[image["id"]] = (len(wrong) + missed, sum(wrong))
    ranked = sorted(expected, key=lambda image_id: expected[image_id], reverse=True)
    assert [image.image_id for image in worst_images(examined(data), 0.4, 100)] == ranked
    assert [image.image_id for image in worst_images(examined(data), 0.4, 2)] == ranked[:2]


@pytest.mark.parametrize("seed", range(8))
def test_suspects_are_the_most_confident_and_the_largest(seed: int) -> None:
    data = random_data(seed, crowds=0.2, ties=False)
    images = examined(data)
    missing = never_found(images)
    found = label_suspects(images, 1000, missing)
    for kind, annotated in (("background", False), ("class", True)):
        scores = sorted((result["score"] for result, each, _ in verdicts(data) if each == kind), reverse=True)
        mine = [s for s in found if s.score is not None and (s.annotated is not None) == annotated]
        assert [suspect.score for suspect in mine] == scores
        assert [s.score for s in label_suspects(images, 1, missing) if s in mine] == scores[:1]
    never = [
        each
        for each in data[0]["annotations"]
        if not each["iscrowd"]
        and all(iou(r["bbox"], each["bbox"]) < 0.5 for r in data[1] if r["image_id"] == each["image_id"])
    ]
    mine = [suspect for suspect in found if suspect.score is None]
    assert sorted((s.image_id, s.box) for s in mine) == sorted(
        (a["image_id"], (x, y, x + w, y + h)) for a in never for x, y, w, h in [a["bbox"]]
    )
    areas = [(s.box[2] - s.box[0]) * (s.box[3] - s.box[1]) for s in mine]
    assert areas == sorted(areas, reverse=True)


def test_the_document_is_json_and_complete() -> None:
    data = random_data(1, crowds=0.2, ties=False)
    by_mask = examined(with_masks(data, 1))
    curves = match_and_accumulate("pycocotools", *copy.deepcopy(data), (1, 10, 100), "bbox")
    content = error_document(
        examined(data),
        SIZES,
        curves.precision[:, :, :, 0, 2],
        CLASSES.names,
        0.4,
        2,
        never_found(examined(data)),
        masks=by_mask,
        panoptic={"pq": 0.5},
    )
    assert content["masks"]["ap50"] == pytest.approx(ap50(*with_masks(data, 1)), abs=1e-12)
    assert content["masks"]["costs"]["missed"] == error_costs(by_mask, 3)[1]["missed"]._asdict()
    best = all_classes(scored_hits(by_mask, 3)).best()
    assert best is not None
    assert content["masks"]["best"]["threshold"] == best.threshold
    assert content["masks"].keys() < content.keys()
    assert content["panoptic"] == {"pq": 0.5}
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert len(content["precision_by_iou"]["0.50"]) == len(content["thresholds"]) == 101
    assert np.mean(content["precision_by_iou"]["0.50"]) == pytest.approx(content["ap50"], abs=1e-4)
    assert len(content["worst"]) == 2
    kept = [result for result in data[1] if result["score"] >= 0.4]
    point = content["thresholds"][40]
    hits = sum(kind == "hit" and result["score"] >= 0.4 for result, kind, _ in verdicts(data))
    ignored = sum(kind == "ignored" and result["score"] >= 0.4 for result, kind, _ in verdicts(data))
    assert point["precision"] == pytest.approx(hits / (len(kept) - ignored))
    empty = error_document(examined((data[0], [])), SIZES, np.zeros((10, 101, 3)), CLASSES.names, 0.5, 3, [])
    assert empty["masks"] is None
    assert empty["panoptic"] is None
    assert json.loads(json.dumps(empty, allow_nan=False)) == empty


def test_objects_never_found_shrink_with_every_evaluation(tmp_path: Path) -> None:
    truth, results = random_data(3, crowds=0.2, ties=False)
    path, halves = tmp_path / "a.json", [examined((truth, results[start::2])) for start in (0, 1)]
    first, second = (set(never_found(half)) for half in halves)
    assert update_never_found(path, halves[0]) == first
    assert first != second
    assert update_never_found(path, halves[1]) == first & second
    assert update_never_found(path, halves[1]) == first & second, "an evaluation that is repeated changes nothing"
    others = examined((truth | {"annotations": truth["annotations"][::-1]}, results))
    assert update_never_found(path, others) == set(never_found(others)), "other annotations"
    for damage in ("[", '{"annotations": 3}', "[1]"):
        path.write_text(damage)
        assert update_never_found(path, halves[0]) == first
