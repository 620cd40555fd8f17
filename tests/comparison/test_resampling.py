"""Tables of run folders, the draws of images, and paired differences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from detr_bf.classification.batch import ClassTargets, LabelledImages
from detr_bf.classification.config import ClassifierConfig
from detr_bf.classification.metrics import ClassificationEvaluator, write_predictions
from detr_bf.common.errors import InputError
from detr_bf.common.files import write_json, write_text
from detr_bf.common.structures import ClassMap, Detections, PanopticMap
from detr_bf.comparison.resampling import image_draws, resample, resample_differences, table_of
from detr_bf.comparison.tables import BoxTable, ClassifierTable, ImageTable, PanopticTable, table_from_dict
from detr_bf.config import DetectionConfig, config_from_dict, config_to_yaml
from detr_bf.evaluation import CocoEvaluator, PanopticEvaluator, PanopticFile, write_panoptic, write_results

Folder = Callable[..., SimpleNamespace]


def ones(table: ImageTable) -> dict[str, float | None]:
    found = table.metrics(np.ones((1, len(table.image_ids)), dtype=np.int64))
    return {name: None if np.isnan(value[0]) else float(value[0]) for name, value in found.items()}


def noisy(image: dict[str, Any], folder: SimpleNamespace, class_map: ClassMap, rng: np.random.Generator) -> Detections:
    own = [a for a in folder.content["annotations"] if a["image_id"] == image["id"]]
    boxes = torch.tensor([a["bbox"] for a in own], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    boxes += torch.from_numpy(rng.normal(0, 1.5, boxes.shape)).float()
    labels = torch.tensor([class_map.index[a["category_id"]] for a in own], dtype=torch.int64)
    return Detections(image["id"], boxes, torch.from_numpy(rng.random(len(own))).float(), labels)


@pytest.fixture
def box_run(tmp_path: Path, coco_folder: Folder) -> SimpleNamespace:
    """Write the run folder of a detector and return it with the summary of its evaluation."""
    train = coco_folder(num_images=4, name="train")
    val = coco_folder(num_images=9, name="val", first_image_id=100)
    splits = {
        name: {"images": str(x.images), "annotations": str(x.annotations)}
        for name, x in (("train", train), ("val", val))
    }
    run, rng = tmp_path / "run", np.random.default_rng(0)
    config = config_from_dict({"task": "detection", "data": splits, "output_dir": str(run)}, source="test")
    assert isinstance(config, DetectionConfig)
    class_map = ClassMap.from_categories(train.content["categories"])
    evaluator = CocoEvaluator(val.annotations, class_map)
    evaluator.update([noisy(image, val, class_map, rng) for image in val.content["images"]])
    summary = evaluator.summarize()
    write_text(run / "config.yaml", config_to_yaml(config))
    write_results(run / "results.json", evaluator.detections, class_map)
    write_json(run / "evaluation.json", summary.to_dict())
    return SimpleNamespace(path=run, summary=summary, val=val)


def test_the_table_of_a_detector_has_the_metrics_of_its_evaluation(box_run: SimpleNamespace) -> None:
    table = table_of(box_run.path)
    assert isinstance(table, BoxTable)
    assert table.image_ids == tuple(range(100, 109))
    found = ones(table)
    for name in ("AP", "AP50", "AP75", "APs", "APm", "APl"):
        assert found[name] == pytest.approx(box_run.summary.metrics[name], abs=1e-12)
    assert 0.1 < found["AP"] < 0.9
    for name, result in box_run.summary.per_class.items():
        assert found[f"AP/{name}"] == pytest.approx(result.AP, abs=1e-12)


def test_a_run_that_is_not_finished_or_does_not_fit_its_data_is_refused(box_run: SimpleNamespace) -> None:
    run = box_run.path
    results = json.loads((run / "results.json").read_text())
    for content, message in (
        ([*results, {**results[0], "image_id": 7}], "image ids 7, which the validation annotations do not list"),
        ([*results, {"image_id": 100}], f"entry {len(results)} is not a detection"),
        ({"results": []}, "entry 0 is not a detection"),
    ):
        write_json(run / "results.json", content)
        with pytest.raises(InputError, match=message):
            table_of(run)
    (run / "results.json").write_text("[")
    with pytest.raises(InputError, match=r"results\.json cannot be read"):
        table_of(run)
    (run / "results.json").unlink()
    with pytest.raises(InputError, match=r"neither results\.json"):
        table_of(run)
    (run / "evaluation.json").unlink()
    with pytest.raises(InputError, match="not the folder of a finished run"):
        table_of(run)


def test_the_table_of_a_panoptic_run(tmp_path: Path, panoptic_folder: Folder) -> None:
    train, val = panoptic_folder(2, name="train"), panoptic_folder(5, name="val", first_image_id=50)
    splits = {
        name: {"images": str(x.images), "annotations": str(x.annotations), "panoptic": str(x.panoptic)}
        for name, x in (("train", train), ("val", val))
    }
    run, class_map = tmp_path / "run", ClassMap.from_categories(val.content["categories"])
    settings = {"task": "detection", "data": splits, "model": {"masks": True}, "output_dir": str(run)}
    write_text(run / "config.yaml", config_to_yaml(config_from_dict(settings, source="test")))
    truth = PanopticFile(val.annotations, val.panoptic, class_map)
    maps = []
    for number, image_id in enumerate(truth):
        ids = torch.roll(truth[image_id].ids, number, dims=1)
        kept = tuple(s for s in truth[image_id].segments if not s.is_crowd)
        ids[~torch.isin(ids, torch.tensor([s.id for s in kept], dtype=torch.int32))] = 0
        maps.append(PanopticMap(image_id, ids, kept))
    evaluator = PanopticEvaluator(val.annotations, val.panoptic, class_map)
    evaluator.update(maps)
    summary = evaluator.summarize()
    names = {image["id"]: image["file_name"] for image in val.content["images"]}
    write_panoptic(run / "panoptic.json", run / "panoptic", maps, class_map, names)
    write_json(run / "evaluation.json", summary.to_dict())
    write_json(run / "results.json", [])
    table = table_of(run)
    assert isinstance(table, PanopticTable)
    found = ones(table)
    assert 0.1 < found["PQ"] < 1
    for name, value in found.items():
        assert value == pytest.approx(summary.metrics[name], abs=1e-12)


def test_the_table_of_a_classifier(tmp_path: Path) -> None:
    class_map = ClassMap(tuple(range(4)), ("=cat", "dog", "dog", "bird"))
    evaluator = ClassificationEvaluator(class_map, (200, 50, 50, 3))
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 4, 40))
    logits = torch.from_numpy(rng.normal(size=(40, 4))).float()
    logits[torch.arange(40), labels] += 1
    logits[3] = torch.nan
    indices = torch.from_numpy(rng.permutation(40))
    batch = LabelledImages(torch.zeros(40, 3, 1, 1), ClassTargets(labels), indices)
    evaluator.update(batch, logits)
    result = evaluator.summarize()
    write_text(tmp_path / "config.yaml", config_to_yaml(ClassifierConfig()))
    write_json(tmp_path / "evaluation.json", result.to_dict())
    write_predictions(tmp_path / "predictions.csv", evaluator.predictions(), class_map)
    table = table_of(tmp_path)
    assert isinstance(table, ClassifierTable)
    assert table.image_ids == tuple(range(40))
    found = ones(table)
    assert found == pytest.approx({name: result.metrics[name] for name in found}, abs=1e-12)
    assert set(found) == {"top1", "balanced", "many", "medium", "few"}
    (tmp_path / "predictions.csv").write_text("index,class,predicted,score\n0,cow,dog (1),0.5\n")
    with pytest.raises(InputError, match=r"predictions\.csv is damaged"):
        table_of(tmp_path)


def test_draws_are_multinomial_and_belong_to_the_images() -> None:
    ids = tuple(range(50))
    draws = np.concatenate(list(image_draws(ids, 4000, 0, rows=1000)))
    assert draws.shape == (4000, 50)
    assert (draws.sum(1) == 50).all()
    assert draws.mean(0) == pytest.approx(np.ones(50), abs=0.1)
    assert draws.var() == pytest.approx(0.98, abs=0.02), "multiplicities above 1 count"
    assert (np.concatenate(list(image_draws(ids, 4000, 0, rows=1000))) == draws).all()
    for other in (image_draws(ids, 1000, 1, rows=1000), image_draws(tuple(range(1, 51)), 1000, 0, rows=1000)):
        assert (next(iter(other)) != draws[:1000]).any()


def a_table(seed: int, first_id: int = 0) -> ClassifierTable:
    rng = np.random.default_rng(seed)
    labels = np.arange(30) % 3
    predicted = np.where(rng.random(30) < 0.7, labels, 0)
    return ClassifierTable(tuple(range(first_id, first_id + 30)), labels, predicted, ("many", "many", "few"))


def test_cells_with_the_same_images_share_their_draws() -> None:
    tables = {"a": a_table(0), "b": a_table(1), "again": a_table(0), "other images": a_table(0, 100)}
    found = resample(tables, 300, seed=4)
    assert (found["a"].draws["top1"] == found["again"].draws["top1"]).all()
    assert (found["a"].draws["top1"] != found["other images"].draws["top1"]).any()
    alone = resample({"b": tables["b"]}, 300, seed=4)
    assert (alone["b"].draws["balanced"] == found["b"].draws["balanced"]).all(), "independent of the other cells"
    assert found["a"].values["top1"] == np.mean(tables["a"].labels == tables["a"].predicted)


def test_equal_arms_have_no_difference() -> None:
    found = resample({(arm, seed): a_table(seed) for arm in "ab" for seed in range(3)}, 100)
    differences = resample_differences({(seed, None): (found["a", seed], found["b", seed]) for seed in range(3)})
    assert set(differences) == {"top1", "balanced", "many", "few"}
    for own in differences.values():
        assert own.values == (0, 0, 0)
        assert own.both is not None
        assert (own.both.interval(), own.both.p_value) == ((0, 0), 1)


def test_the_images_interval_is_that_of_the_mean_over_images() -> None:
    """For top1 with one pair, the standard error is that of the mean of the differences of the images."""
    arm, base = a_table(5), a_table(6)
    found = resample({"arm": arm, "base": base}, 20_000)
    own = resample_differences({(0, None): (found["arm"], found["base"])})["top1"]
    change = (arm.predicted == arm.labels).astype(float) - (base.predicted == base.labels)
    assert own.values == (pytest.approx(change.mean()),)
    assert own.images is not None
    assert own.images.standard_error == pytest.approx(change.std(ddof=1) / np.sqrt(30), rel=0.03)
    assert own.seeds.interval() is None
    assert own.both is not None
    assert own.both.interval() is None


def test_a_metric_without_ground_truth_has_no_estimate() -> None:
    table = BoxTable.match(
        {"images": [{"id": 1}, {"id": 2}], "annotations": [], "categories": [{"id": 1}]}, [], {1: "a"}
    )
    found = resample({"arm": table, "base": table_from_dict(table.to_dict())}, 20)
    own = resample_differences({(0, None): (found["arm"], found["base"])})["AP"]
    assert own.values == (None,)
    assert np.isnan(own.seeds.mean)
    assert (own.images, own.both) == (None, None)
