"""Metrics of resamples: equal to those of the data set in which images are really repeated."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import time
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap, PanopticMap, Segment
from detr_bf.comparison.tables import BOX_TABLE_METRICS, BoxTable, ClassifierTable, PanopticTable, table_from_dict
from detr_bf.evaluation import PanopticEvaluator, write_panoptic
from detr_bf.evaluation.coco import _twelve_numbers, match_and_accumulate

BCCD = Path(__file__).parents[3] / "shared" / "data" / "bccd"
CLOSE = {"rtol": 0, "atol": 1e-12}


def random_detections(seed: int, num_images: int = 12, noise: int = 12) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draw crowds, all sizes, near misses, noise, images without objects and a class without ground truth.

    Scores are equal between images, but not within one, where COCO's order of copies is another one.
    """
    rng = np.random.default_rng(seed)
    images = [{"id": int(i)} for i in rng.choice(10_000, size=num_images, replace=False)]
    objects: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for image in images:
        scores = iter((rng.permutation(200) / 200).tolist())
        for _ in range(rng.integers(0, 9)):
            side = 2 ** rng.uniform(2, 8, 2)  # 4 to 256 pixels: small, medium, large
            box, category = [*rng.uniform(0, 300, 2), *side], int(rng.integers(1, 4))
            objects.append(an_object(len(objects) + 1, image["id"], category, box, rng.random() < 0.15))
            for _ in range(rng.integers(0, 4)):
                near = np.array(box) + rng.normal(0, 0.08, 4) * side[[0, 1, 0, 1]]
                found = category if rng.random() < 0.85 else int(rng.integers(1, 5))
                results.append(a_detection(image["id"], found, near, next(scores)))
        for _ in range(rng.integers(0, noise)):
            box = [*rng.uniform(0, 300, 2), *2 ** rng.uniform(2, 8, 2)]
            results.append(a_detection(image["id"], int(rng.integers(1, 5)), box, next(scores)))
    return {"images": images, "annotations": objects, "categories": [{"id": i} for i in (1, 2, 3, 4)]}, results


def an_object(number: int, image_id: int, category: int, box: Any, crowd: bool = False) -> dict[str, Any]:
    bbox = [float(v) for v in box]
    shown = {"bbox": bbox, "area": bbox[2] * bbox[3], "iscrowd": int(crowd)}
    return {"id": number, "image_id": image_id, "category_id": category, **shown}


def a_detection(image_id: int, category: int, box: Any, score: float) -> dict[str, Any]:
    bbox = [float(v) for v in np.maximum(box, 1.0)]
    return {"image_id": image_id, "category_id": category, "bbox": bbox, "score": score}


def repeated(content: dict[str, Any], results: list[dict[str, Any]], weights: np.ndarray) -> tuple[Any, Any]:
    """Return the data set and detections with every image as often as ``weights`` says, under new ids."""
    annotations, detections, images = [], [], []
    for place, image in enumerate(sorted(content["images"], key=lambda image: image["id"])):
        for number in range(weights[place]):
            new = place * 1000 + number
            images.append({**image, "id": new})
            annotations += [{**a, "image_id": new} for a in content["annotations"] if a["image_id"] == image["id"]]
            detections += [{**d, "image_id": new} for d in results if d["image_id"] == image["id"]]
    numbered = [{**annotation, "id": number} for number, annotation in enumerate(annotations, 1)]
    return {**content, "images": images, "annotations": numbered}, detections


def coco_metrics(content: dict[str, Any], results: list[dict[str, Any]], limit: int = 100) -> dict[str, float]:
    """Return the metrics of pycocotools; NaN without ground truth."""
    curves = match_and_accumulate("pycocotools", *copy.deepcopy((content, results)), (1, min(10, limit), limit), "bbox")
    numbers = {name: _twelve_numbers(curves)[name] for name in BOX_TABLE_METRICS}
    for k, category in enumerate(content["categories"]):
        precision = curves.precision[:, :, k, 0, 2]
        numbers[f"AP/c{category['id']}"] = float(precision.mean()) if (precision > -1).any() else None
    return {name: np.nan if value is None else value for name, value in numbers.items()}


def table_of_boxes(content: dict[str, Any], results: list[dict[str, Any]], limit: int = 100) -> BoxTable:
    return BoxTable.match(content, results, {c["id"]: f"c{c['id']}" for c in content["categories"]}, limit)


def some_weights(num_images: int, resamples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).multinomial(num_images, np.full(num_images, 1 / num_images), resamples)


def assert_equals_pycocotools(content: Any, results: Any, weights: np.ndarray, limit: int = 100) -> None:
    found = table_of_boxes(content, results, limit).metrics(weights)
    for row, one in enumerate(weights):
        expected = coco_metrics(*repeated(content, results, one), limit)
        assert found.keys() == expected.keys()
        np.testing.assert_allclose([found[name][row] for name in expected], list(expected.values()), **CLOSE)


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_pycocotools_on_repeated_images(seed: int) -> None:
    content, results = random_detections(seed)
    weights = some_weights(len(content["images"]), 10, seed)
    weights[0] = 1
    assert_equals_pycocotools(content, results, weights)


def test_the_limit_of_detections_is_that_of_pycocotools() -> None:
    content, results = random_detections(7, num_images=6, noise=40)
    assert_equals_pycocotools(content, results, some_weights(6, 4, 0), limit=3)


def bccd_annotations(names: list[str]) -> dict[str, Any]:
    classes = {"RBC": 1, "WBC": 2, "Platelets": 3}
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": [{"id": i} for i in classes.values()]}
    for number, name in enumerate(names, 1):
        content["images"].append({"id": number})
        for node in ElementTree.parse(BCCD / "Annotations" / f"{name}.xml").getroot().iter("object"):
            x0, y0, x1, y1 = (float(node.findtext(f"bndbox/{key}") or 0) for key in ("xmin", "ymin", "xmax", "ymax"))
            category = classes[node.findtext("name") or ""]
            content["annotations"].append(
                an_object(len(content["annotations"]) + 1, number, category, [x0, y0, x1 - x0, y1 - y0])
            )
    return content


def perturbed(content: dict[str, Any], seed: int, per_image: int = 100) -> list[dict[str, Any]]:
    """Return detections near the objects and noise, ``per_image`` of every image."""
    rng = np.random.default_rng(seed)
    results = []
    for image in content["images"]:
        own = [a for a in content["annotations"] if a["image_id"] == image["id"]]
        for _ in range(per_image):
            target = own[int(rng.integers(len(own)))] if own and rng.random() < 0.6 else None
            if target is not None:
                box = np.array(target["bbox"])
                spread = rng.exponential(0.1)
                near = box + rng.normal(0, spread, 4) * box[[2, 3, 2, 3]]
                score = float(np.float32(1 / (1 + np.exp(10 * spread - 2 + rng.normal()))))
                results.append(a_detection(image["id"], target["category_id"], near, score))
            else:
                box = [*rng.uniform(0, 500, 2), *rng.uniform(15, 200, 2)]
                results.append(
                    a_detection(image["id"], int(rng.integers(1, 4)), box, float(np.float32(rng.beta(1, 8))))
                )
    return results


def test_metrics_equal_pycocotools_on_photographs() -> None:
    if not BCCD.is_dir():
        pytest.skip(f"{BCCD} is absent")
    names = (BCCD / "ImageSets" / "Main" / "test.txt").read_text().split()[:12]
    content = bccd_annotations(names)
    assert_equals_pycocotools(content, perturbed(content, 0, 30), some_weights(len(names), 3, 0))


def test_without_detections_and_without_objects() -> None:
    content, _ = random_detections(1)
    weights = some_weights(len(content["images"]), 3, 0)
    assert_equals_pycocotools(content, [], weights)
    empty = table_of_boxes({**content, "annotations": []}, []).metrics(weights)
    assert all(np.isnan(values).all() for values in empty.values())


def test_a_box_table_is_small_and_survives_json() -> None:
    """72 images with 100 detections each take less than 60 KB."""
    rng = np.random.default_rng(0)
    content: dict[str, Any] = {"images": [{"id": i} for i in range(72)], "annotations": []}
    content["categories"] = [{"id": 1}, {"id": 2}, {"id": 3}]
    for image, _ in itertools.product(range(72), range(13)):
        box = [*rng.uniform(0, 500, 2), *rng.uniform(15, 150, 2)]
        content["annotations"].append(an_object(len(content["annotations"]) + 1, image, int(rng.integers(1, 4)), box))
    table = table_of_boxes(content, perturbed(content, 0))
    text = json.dumps(table.to_dict())
    assert len(text) < 60_000
    weights = some_weights(72, 20, 1)
    again = table_from_dict(json.loads(text)).metrics(weights)
    for name, values in table.metrics(weights).items():
        np.testing.assert_array_equal(again[name], values)
    assert table.metrics(weights[:1])["AP"] > 0.1


def random_map(rng: np.random.Generator, image_id: int, like: PanopticMap | None = None) -> PanopticMap:
    """Draw a map of rectangles of 3 classes and void, with a crowd; or ``like`` with moved borders and classes."""
    ids, segments = np.zeros((24, 32), dtype=np.int32), []
    if like is not None:
        shift = int(rng.integers(0, 3))
        ids = np.roll(like.ids.numpy(), shift, axis=1)
        kept = [s for s in like.segments if not s.is_crowd and (ids == s.id).any()]
        ids[~np.isin(ids, [s.id for s in kept])] = 0
        segments = [
            Segment(s.id, int(rng.integers(0, 3)) if rng.random() < 0.2 else s.label, int((ids == s.id).sum()), False)
            for s in kept
        ]
        return PanopticMap(image_id, torch.from_numpy(ids), tuple(segments))
    for number in range(1, 1 + int(rng.integers(0, 7))):
        top, left = rng.integers(0, 18, 2)
        ids[top : top + rng.integers(2, 9), left : left + rng.integers(2, 14)] = number
    for number in np.unique(ids[ids > 0]).tolist():
        segments.append(Segment(number, int(rng.integers(0, 3)), int((ids == number).sum()), rng.random() < 0.15))
    return PanopticMap(image_id, torch.from_numpy(ids), tuple(segments))


def test_panoptic_metrics_equal_the_evaluator_on_repeated_images(tmp_path: Path) -> None:
    rng, class_map = np.random.default_rng(0), ClassMap((3, 7, 9), ("a", "b", "c"), (True, True, False))
    truths = [random_map(rng, image_id) for image_id in range(8)]
    found = [random_map(rng, image_id, truth) for image_id, truth in enumerate(truths)]
    names = {image_id: f"{image_id}.png" for image_id in range(8)}
    write_panoptic(tmp_path / "truth.json", tmp_path / "maps", truths, class_map, names)
    content = json.loads((tmp_path / "truth.json").read_text())
    for annotation in content["annotations"]:
        for info, segment in zip(annotation["segments_info"], truths[annotation["image_id"]].segments, strict=True):
            info["iscrowd"] = int(segment.is_crowd)

    def evaluated(weights: np.ndarray) -> PanopticEvaluator:
        annotations, maps = [], []
        for annotation in content["annotations"]:
            for number in range(weights[annotation["image_id"]]):
                new = annotation["image_id"] * 100 + number
                annotations.append({**annotation, "image_id": new})
                maps.append(PanopticMap(new, found[annotation["image_id"]].ids, found[annotation["image_id"]].segments))
        path = tmp_path / "repeated.json"
        path.write_text(json.dumps({**content, "annotations": annotations}))
        evaluator = PanopticEvaluator(path, tmp_path / "maps", class_map)
        evaluator.update(maps)
        return evaluator

    ones = evaluated(np.ones(8, dtype=np.int64))
    assert sum(len(image.matches) for image in ones.counts.values()) > 5
    table = PanopticTable.from_dict(json.loads(json.dumps(PanopticTable.of(ones).to_dict())))
    weights = some_weights(8, 10, 0)
    weights[1] = [8, *[0] * 7]  # few classes
    metrics = table.metrics(weights)
    assert set(metrics) == {"PQ", "SQ", "RQ", "PQ_th", "PQ_st"}
    for row, one in enumerate(weights):
        expected = evaluated(one).summarize().metrics
        for name, values in metrics.items():
            np.testing.assert_allclose(values[row], np.nan if (e := expected[name]) is None else e, **CLOSE)


def test_classifier_metrics_equal_a_loop_over_repeated_images() -> None:
    rng = np.random.default_rng(0)
    groups = ("many", "medium", "few", "few", "medium")
    labels = rng.choice([0, 1, 2, 3], size=30, p=[0.5, 0.3, 0.1, 0.1])  # class 4 has no image
    predicted = np.where(rng.random(30) < 0.6, labels, rng.integers(-1, 5, 30))
    table = ClassifierTable(tuple(range(30)), labels, predicted, groups)
    again = table_from_dict(json.loads(json.dumps(table.to_dict())))
    weights = some_weights(30, 12, 0)
    metrics = again.metrics(weights)
    assert set(metrics) == {"top1", "balanced", "many", "medium", "few"}
    for row, one in enumerate(weights):
        images = [image for image in range(30) for _ in range(one[image])]
        right = {c: [predicted[i] == c for i in images if labels[i] == c] for c in range(5)}
        accuracy = {c: sum(own) / len(own) for c, own in right.items() if own}
        expected = {
            "top1": np.mean([labels[i] == predicted[i] for i in images]),
            "balanced": np.mean([*accuracy.values()]),
        }
        for group in ("many", "medium", "few"):
            own = [accuracy[c] for c in accuracy if groups[c] == group]
            expected[group] = np.mean(own) if own else np.nan
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name][row], value, **CLOSE)


def test_damaged_tables_are_refused() -> None:
    good = table_of_boxes(*random_detections(0)).to_dict()
    huge = {"dtype": "<u8", "shape": [12, 4, 4], "data": base64.b85encode(zlib.compress(bytes(10**6))).decode()}
    changes: list[tuple[str, Any]] = [
        ("kind", "circles"),
        ("kind", None),
        ("image_ids", None),
        ("image_ids", []),
        ("image_ids", [3, 2, 1]),
        ("image_ids", good["image_ids"][1:]),
        ("image_ids", {"first": 1}),
        ("image_ids", {"first": 1, "last": 11}),
        ("image_ids", {"first": 2, "last": 1}),
        ("image_ids", {"first": 0, "last": 10**15}),
        ("image_ids", {"first": "1", "last": "9"}),
        ("image_ids", ["a"] * 12),
        ("classes", ["a"]),
        ("classes", [1, 2, 3, 4]),
        ("objects", good["images"]),
        ("objects", "text"),
        ("objects", {**good["objects"], "dtype": "object"}),
        ("objects", {**good["objects"], "data": "\u00e9"}),
        ("objects", {**good["objects"], "data": 5}),
        ("objects", {**good["objects"], "data": base64.b85encode(b"no zlib").decode()}),
        ("objects", {**good["objects"], "data": good["starts"]["data"]}),
        ("objects", huge),
        ("starts", {**good["starts"], "shape": [4]}),
        ("ignored", good["hits"]),
    ]
    for key, value in changes:
        with pytest.raises(InputError, match="damaged"):
            table_from_dict({**good, key: value})
    for state in (None, [], {}, {key: value for key, value in good.items() if key != "hits"}):
        with pytest.raises(InputError, match="damaged"):
            table_from_dict(state)
    labels = ClassifierTable((1, 2), np.array([0, 1]), np.array([0, 1]), ("few", "few")).to_dict()
    assert labels["image_ids"] == {"first": 1, "last": 2}
    for image_ids in (labels["image_ids"], [1, 2]):
        assert table_from_dict({**labels, "image_ids": image_ids}).image_ids == (1, 2)
    with pytest.raises(InputError, match="a label is not one of the classes"):
        table_from_dict({**labels, "groups": ["few"]})


@pytest.mark.slow
def test_speed_of_72_images() -> None:
    """2,000 resamples of 72 images, 100 detections each, 3 classes, all metrics, in some seconds on one core.

    OMP_NUM_THREADS=1 python -m pytest -m slow -s tests/comparison/test_tables.py -k speed_of_72
    """
    content = bccd_annotations((BCCD / "ImageSets" / "Main" / "test.txt").read_text().split())
    table = table_of_boxes(content, perturbed(content, 0))
    start = time.process_time()
    table.metrics(some_weights(72, 2000, 0))
    seconds = time.process_time() - start
    print(f"\n{seconds:.1f} s, {len(json.dumps(table.to_dict()))} bytes")
    assert seconds < 20


@pytest.mark.slow
def test_speed_of_5000_images() -> None:
    """200 resamples of 5,000 images, 80 classes, 100 detections each; prints seconds and the memory at most.

    OMP_NUM_THREADS=1 python -m pytest -m slow -s tests/comparison/test_tables.py -k speed_of_5000
    """
    import resource

    rng = np.random.default_rng(0)
    content: dict[str, Any] = {"images": [{"id": i} for i in range(5000)], "annotations": []}
    content["categories"] = [{"id": i} for i in range(1, 81)]
    shares = rng.dirichlet(np.full(80, 0.5))
    results = []
    for image in range(5000):
        own = []
        for _ in range(7):
            box, category = [*rng.uniform(0, 400, 2), *2 ** rng.uniform(3, 8, 2)], int(rng.choice(80, p=shares)) + 1
            own.append(an_object(len(content["annotations"]) + len(own) + 1, image, category, box))
        content["annotations"] += own
        for number in range(100):
            target = own[number % 7]
            near = np.array(target["bbox"]) * rng.normal(1, 0.15, 4)
            category = target["category_id"] if number < 21 else int(rng.choice(80, p=shares)) + 1
            results.append(a_detection(image, category, near, float(rng.random() / (1 + number // 7))))
    start = time.process_time()
    table = table_of_boxes(content, results)
    matched = time.process_time()
    table.metrics(some_weights(5000, 200, 0))
    seconds = matched - start, time.process_time() - matched
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    size = len(json.dumps(table.to_dict()))
    print(f"\nmatching {seconds[0]:.0f} s, resampling {seconds[1]:.0f} s, {memory:.1f} GiB at most, {size:,} bytes")
    assert seconds[1] < 300
    assert memory < 4
