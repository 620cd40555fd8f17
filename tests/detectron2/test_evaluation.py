from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("detectron2.config")

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    COCOEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluator,
    PascalVOCDetectionEvaluator,
)
from detectron2.structures import Boxes, BoxMode, Instances
from detectron2.utils import comm
from pycocotools import mask as coco_mask

from detr_bf.common.errors import InputError
from detr_bf.data.masks import read_ids
from detr_bf.detectron2 import build_evaluator, evaluation, register_coco, register_coco_panoptic
from detr_bf.detectron2.evaluation import PanopticQualityEvaluator, ThingEvaluator
from detr_bf.evaluation import PanopticFile
from tests.detectron2.conftest import as_bmp, scattered, with_masks

Factory = Callable[..., SimpleNamespace]
pytestmark = pytest.mark.usefixtures("catalogs")


def instances(size: tuple[int, int], boxes: Any, classes: list[int], masks: Any) -> Instances:
    found = Instances(size)
    found.pred_boxes = Boxes(torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4))
    found.scores = torch.ones(len(classes))
    found.pred_classes = torch.tensor(classes, dtype=torch.int64)
    found.pred_masks = torch.as_tensor(masks).bool().reshape(-1, *size)
    return found


def true_objects(record: dict[str, Any]) -> dict[str, Any]:
    """Convert the ground truth of a detection record to a model output."""
    size = record["height"], record["width"]
    own = [one for one in record["annotations"] if not one["iscrowd"]]
    boxes = [BoxMode.convert(one["bbox"], one["bbox_mode"], BoxMode.XYXY_ABS) for one in own]
    codes = [coco_mask.merge(coco_mask.frPyObjects(one["segmentation"], *size)) for one in own]
    masks = torch.from_numpy(coco_mask.decode(codes)).permute(2, 0, 1)
    return {"instances": instances(size, boxes, [one["category_id"] for one in own], masks)}


def true_map(record: dict[str, Any]) -> dict[str, Any]:
    """Convert the ground truth of a panoptic record to a model output with a detection per segment, stuff too."""
    ids = read_ids(Path(record["pan_seg_file_name"]))
    own = [segment for segment in record["segments_info"] if not segment["iscrowd"]]
    masks = torch.stack([ids == segment["id"] for segment in own])
    boxes = torch.tensor([segment["bbox"] for segment in own]).float()
    boxes[:, 2:] += boxes[:, :2]
    kept = torch.where(masks.any(0), ids, 0)
    listed = [{"id": s["id"], "isthing": s["isthing"], "category_id": s["category_id"], "area": s["area"]} for s in own]
    found = instances(tuple(ids.shape), boxes, [segment["category_id"] for segment in own], masks)
    return {"instances": found, "panoptic_seg": (kept, listed)}


def run(evaluator: DatasetEvaluator, records: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> dict[str, Any]:
    evaluator.reset()
    for record, output in zip(records, outputs, strict=True):
        evaluator.process([record], [output])
    return evaluator.evaluate()


@pytest.fixture
def boxes(coco_folder: Factory) -> list[dict[str, Any]]:
    """Records of a registered detection data set "boxes" with sparse ids, crowds and BMP images."""
    data = as_bmp(with_masks(coco_folder(num_images=5, objects=3, category_ids=(90, 3, 7, 15)), crowd=True))
    register_coco("boxes", data.images, data.annotations)
    return DatasetCatalog.get("boxes")


@pytest.fixture
def maps(panoptic_folder: Factory) -> list[dict[str, Any]]:
    """Records of a registered panoptic data set "maps"."""
    data = scattered(panoptic_folder(num_images=5))
    register_coco_panoptic("maps", data.images, data.annotations, data.panoptic)
    return DatasetCatalog.get("maps")


def test_ground_truth_has_an_average_precision_of_100(boxes: list[dict[str, Any]], tmp_path: Path) -> None:
    evaluator = build_evaluator("boxes", tmp_path / "out", masks=True)
    result = run(evaluator, boxes, [true_objects(record) for record in boxes])
    assert result["bbox"]["AP"] == pytest.approx(100)
    assert result["segm"]["AP"] == pytest.approx(100)
    assert result["bbox"]["AP-class90"] == pytest.approx(100)
    assert (tmp_path / "out" / "coco_instances_results.json").is_file()


def test_wrong_boxes_and_classes_are_seen(boxes: list[dict[str, Any]], tmp_path: Path) -> None:
    outputs = [true_objects(record) for record in boxes]
    for output in outputs:
        output["instances"].pred_classes = (output["instances"].pred_classes + 1) % 4
    assert run(build_evaluator("boxes", tmp_path), boxes, outputs)["bbox"]["AP"] < 20
    outputs = [true_objects(record) for record in boxes]
    for output in outputs:
        output["instances"].pred_boxes.tensor[:, 0::2] += 4
    assert 0 < run(build_evaluator("boxes", tmp_path), boxes, outputs)["bbox"]["AP"] < 80


def test_without_masks_boxes_alone_are_measured(boxes: list[dict[str, Any]], tmp_path: Path) -> None:
    result = run(build_evaluator("boxes", tmp_path), boxes, [true_objects(record) for record in boxes])
    assert list(result) == ["bbox"]


def test_panoptic_ground_truth_has_100_everywhere(maps: list[dict[str, Any]], tmp_path: Path) -> None:
    evaluator = build_evaluator("maps", tmp_path, masks=True, panoptic=True)
    result = run(evaluator, maps, [true_map(record) for record in maps])
    assert result["panoptic_seg"] == pytest.approx(
        dict.fromkeys(("PQ", "SQ", "RQ", "PQ_th", "SQ_th", "RQ_th", "PQ_st", "SQ_st", "RQ_st"), 100)
    )
    for task in ("bbox", "segm"):
        assert result[task]["AP"] == pytest.approx(100)
        assert {name for name in result[task] if name.startswith("AP-")} == {"AP-thing3", "AP-thing7"}


def test_wrong_maps_are_seen(maps: list[dict[str, Any]], tmp_path: Path) -> None:
    outputs = [true_map(record) for record in maps]
    for output in outputs:
        output["instances"].pred_classes = torch.tensor([0, 3, 2, 1])[output["instances"].pred_classes]
        for segment in output["panoptic_seg"][1]:
            segment["category_id"] = (0, 3, 2, 1)[segment["category_id"]]  # swap the things
    result = run(build_evaluator("maps", tmp_path, masks=True, panoptic=True), maps, outputs)
    assert result["panoptic_seg"]["PQ_th"] == 0
    assert result["panoptic_seg"]["PQ_st"] == pytest.approx(100)
    assert result["bbox"]["AP"] == result["segm"]["AP"] == 0


def test_the_things_of_a_detector_of_boxes_are_measured_without_maps(
    maps: list[dict[str, Any]], tmp_path: Path
) -> None:
    evaluator = build_evaluator("maps", tmp_path)
    assert isinstance(evaluator, ThingEvaluator)
    outputs = [{"instances": true_map(record)["instances"]} for record in maps]
    for output in outputs:
        output["instances"].remove("pred_masks")
    result = run(evaluator, maps, outputs)
    assert list(result) == ["bbox"]
    assert result["bbox"]["AP"] == pytest.approx(100)
    things = json.loads((tmp_path / "maps_things.json").read_text())
    assert sorted(category["id"] for category in things["categories"]) == [90, 150]
    assert sum(annotation["iscrowd"] for annotation in things["annotations"]) == len(maps)


def test_a_detection_file_in_the_metadata_is_the_ground_truth_of_things(
    maps: list[dict[str, Any]], tmp_path: Path
) -> None:
    run(build_evaluator("maps", tmp_path), maps, [true_map(record) for record in maps])
    content = json.loads((tmp_path / "maps_things.json").read_text())
    for annotation in content["annotations"]:
        annotation["bbox"] = [0, 0, 1, 1]
    (tmp_path / "other.json").write_text(json.dumps(content))
    MetadataCatalog.get("maps").json_file = str(tmp_path / "other.json")
    result = run(build_evaluator("maps", tmp_path / "new"), maps, [true_map(record) for record in maps])
    assert result["bbox"]["AP"] == 0
    assert not (tmp_path / "new" / "maps_things.json").exists()


def test_evaluating_again_into_another_folder_works(maps: list[dict[str, Any]], tmp_path: Path) -> None:
    for name in ("one", "two"):
        result = run(build_evaluator("maps", tmp_path / name), maps, [true_map(record) for record in maps])
        assert result["bbox"]["AP"] == pytest.approx(100)
        assert (tmp_path / name / "maps_things.json").is_file()


def test_predicted_maps_are_written_as_coco_has_them(maps: list[dict[str, Any]], tmp_path: Path) -> None:
    evaluator = PanopticQualityEvaluator("maps", tmp_path)
    outputs = [true_map(record) for record in maps]
    run(evaluator, maps, outputs)
    written = PanopticFile(tmp_path / "predictions.json", tmp_path / "panoptic", evaluation.panoptic_classes("maps"))
    assert list(written) == [1, 2, 3, 4, 5]
    for record, output in zip(maps, outputs, strict=True):
        ids, segments = output["panoptic_seg"]
        found = written[record["image_id"]]
        assert torch.equal(found.ids, ids)
        assert [(one.id, one.label, one.area) for one in found.segments] == [
            (one["id"], one["category_id"], one["area"]) for one in segments
        ]
    listed = json.loads((tmp_path / "predictions.json").read_text())["annotations"]
    assert {segment["category_id"] for entry in listed for segment in entry["segments_info"]} == {2, 90, 120, 150}


def test_images_in_folders_of_the_same_names_stay_apart(panoptic_folder: Factory, tmp_path: Path) -> None:
    data = panoptic_folder(num_images=2)
    for image in data.content["images"]:
        target = data.images / str(image["id"]) / "same.png"
        target.parent.mkdir()
        (data.images / image["file_name"]).rename(target)
        image["file_name"] = f"{image['id']}/same.png"
    data.save()
    register_coco_panoptic("nested", data.images, data.annotations, data.panoptic)
    records = DatasetCatalog.get("nested")
    result = run(PanopticQualityEvaluator("nested", tmp_path / "out"), records, [true_map(one) for one in records])
    assert result["panoptic_seg"]["PQ"] == pytest.approx(100)
    assert (tmp_path / "out" / "panoptic" / "2" / "same.png").is_file()


def test_the_maps_of_several_processes_count_as_one(
    maps: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [true_map(record) for record in maps]
    outputs[3]["panoptic_seg"][1][0]["category_id"] = 1  # a wrong class, so that the numbers are not all 1
    alone = run(PanopticQualityEvaluator("maps", tmp_path / "alone"), maps, outputs)
    sent: list[Any] = []
    with monkeypatch.context() as other:
        other.setattr(comm, "gather", lambda own: sent.append(own) or [])
        other.setattr(comm, "is_main_process", lambda: False)
        assert run(PanopticQualityEvaluator("maps", tmp_path / "both"), maps[3:], outputs[3:]) == {}
    assert not (tmp_path / "both").exists()
    monkeypatch.setattr(comm, "gather", lambda own: [own, *sent])
    assert run(PanopticQualityEvaluator("maps", tmp_path / "both"), maps[:3], outputs[:3]) == alone
    assert 0 < alone["panoptic_seg"]["PQ"] < 100
    assert (tmp_path / "both" / "predictions.json").read_text() == (tmp_path / "alone" / "predictions.json").read_text()


def test_an_image_that_was_not_evaluated_is_told(maps: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 of 5 images were not evaluated"):
        run(PanopticQualityEvaluator("maps", tmp_path), maps[1:], [true_map(record) for record in maps[1:]])


def test_classes_without_ground_truth_are_nan(panoptic_folder: Factory, tmp_path: Path) -> None:
    data = panoptic_folder()
    for annotation in data.content["annotations"]:
        annotation["segments_info"] = [s for s in annotation["segments_info"] if s["category_id"] < 100]
    data.save()
    register_coco_panoptic("things", data.images, data.annotations, data.panoptic)
    records = DatasetCatalog.get("things")
    result = run(PanopticQualityEvaluator("things", tmp_path), records, [true_map(one) for one in records])
    assert math.isnan(result["panoptic_seg"]["PQ_st"])
    assert result["panoptic_seg"]["PQ"] == pytest.approx(100)


def test_panopticapi_is_used_where_it_is_installed(
    maps: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []
    for spec in (None, object()):
        monkeypatch.setattr(evaluation, "find_spec", lambda name, spec=spec: spec)
        built = build_evaluator("maps", tmp_path, panoptic=True)
        kinds.append([type(one) for one in built._evaluators])
    assert kinds == [[ThingEvaluator, PanopticQualityEvaluator], [ThingEvaluator, COCOPanopticEvaluator]]


def test_the_type_in_the_metadata_chooses_the_evaluator(boxes: list[dict[str, Any]], tmp_path: Path) -> None:
    assert type(build_evaluator("boxes", tmp_path)) is COCOEvaluator
    assert type(build_evaluator("voc_2007_val", tmp_path)) is PascalVOCDetectionEvaluator
    city = "cityscapes_fine_instance_seg_val"
    assert type(build_evaluator(city, tmp_path)) is CityscapesInstanceEvaluator


def test_another_type_is_refused(tmp_path: Path) -> None:
    MetadataCatalog.get("ours").evaluator_type = "sem_seg"
    with pytest.raises(InputError, match=r"'ours' has the evaluator_type 'sem_seg', expected one of coco, coco_pan"):
        build_evaluator("ours", tmp_path)
    with pytest.raises(InputError, match="has the evaluator_type None"):
        build_evaluator("nothing", tmp_path)
