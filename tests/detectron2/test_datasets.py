from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("detectron2.config")

from detectron2.data import DatasetCatalog, MetadataCatalog, get_detection_dataset_dicts
from PIL import Image

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.detectron2 import register_coco, register_coco_panoptic
from detr_bf.detectron2.datasets import panoptic_classes
from tests.detectron2.conftest import as_bmp, scattered, segment_ids, with_masks

Factory = Callable[..., SimpleNamespace]
pytestmark = pytest.mark.usefixtures("catalogs")


def register(data: SimpleNamespace, name: str = "ours") -> None:
    register_coco(name, data.images, data.annotations)


def register_panoptic(data: SimpleNamespace, name: str = "ours") -> None:
    register_coco_panoptic(name, data.images, data.annotations, data.panoptic)


def test_metadata_are_complete_before_the_data_are_asked_for(coco_folder: Factory) -> None:
    data = coco_folder(category_ids=(90, 3, 7))
    register(data)
    assert MetadataCatalog.get("ours").as_dict() == {
        "name": "ours",
        "evaluator_type": "coco",
        "image_root": str(data.images),
        "json_file": str(data.annotations),
        "thing_classes": ["class3", "class7", "class90"],
        "thing_dataset_id_to_contiguous_id": {3: 0, 7: 1, 90: 2},
    }


def test_records_have_class_indices_and_images_of_any_format(coco_folder: Factory) -> None:
    data = as_bmp(with_masks(coco_folder(category_ids=(90, 3, 7)), crowd=True))
    register(data)
    records = get_detection_dataset_dicts("ours")
    assert [Path(record["file_name"]).suffix for record in records] == [".bmp"] * 4
    assert all(Path(record["file_name"]).is_file() for record in records)
    found = [one for record in records for one in record["annotations"]]
    wanted = data.content["annotations"]
    assert [one["bbox"] for one in found] == [one["bbox"] for one in wanted]
    assert [one["category_id"] for one in found] == [{3: 0, 7: 1, 90: 2}[one["category_id"]] for one in wanted]
    assert [one["iscrowd"] for one in found] == [0, 1] * 4


def test_names_that_categories_share_stay_apart(coco_folder: Factory) -> None:
    data = coco_folder(category_ids=(3, 7))
    data.content["categories"] = [{"id": 3, "name": "cat"}, {"id": 7, "name": "cat"}]
    data.save()
    register(data)
    assert MetadataCatalog.get("ours").thing_classes == ["cat (3)", "cat (7)"]
    assert len(get_detection_dataset_dicts("ours")) == 4


def test_things_and_stuff_share_one_row_of_classes(panoptic_folder: Factory) -> None:
    data = scattered(panoptic_folder())
    register_panoptic(data)
    metadata = MetadataCatalog.get("ours")
    assert metadata.thing_dataset_id_to_contiguous_id == {90: 1, 150: 3}
    assert metadata.stuff_dataset_id_to_contiguous_id == {2: 0, 120: 2}
    assert metadata.thing_classes == metadata.stuff_classes == ["stuff100", "thing7", "stuff120", "thing3"]
    assert (metadata.ignore_label, metadata.label_divisor) == (255, 1000)
    assert panoptic_classes("ours") == ClassMap(
        (2, 90, 120, 150), ("stuff100", "thing7", "stuff120", "thing3"), (False, True, False, True)
    )


def test_panoptic_records_name_both_files_and_every_segment(panoptic_folder: Factory) -> None:
    data = scattered(panoptic_folder(size=(80, 48)))
    register_panoptic(data)
    record = get_detection_dataset_dicts("ours")[1]
    segments = data.content["annotations"][1]["segments_info"]
    assert record == {
        "file_name": str(data.images / "0002.bmp"),
        "image_id": 2,
        "height": 48,
        "width": 80,
        "pan_seg_file_name": str(data.panoptic / "0002_segments.png"),
        "segments_info": [
            {**segment, "category_id": index, "isthing": isthing}
            for segment, index, isthing in zip(segments, (3, 1, 3, 0, 2), (True, True, True, False, False), strict=True)
        ],
    }


def test_the_visualiser_draws_what_was_registered(coco_folder: Factory, panoptic_folder: Factory) -> None:
    pytest.importorskip("cv2")
    from detectron2.utils.visualizer import Visualizer

    register(with_masks(coco_folder(name="boxes")), "boxes")
    data = scattered(panoptic_folder(name="maps"))
    register_panoptic(data, "maps")
    record = DatasetCatalog.get("boxes")[0]
    image = np.asarray(Image.open(record["file_name"]))
    assert (Visualizer(image, MetadataCatalog.get("boxes")).draw_dataset_dict(record).get_image() != image).any()
    record = DatasetCatalog.get("maps")[0]
    image = np.asarray(Image.open(record["file_name"]))
    drawn = Visualizer(image, MetadataCatalog.get("maps")).draw_panoptic_seg(
        segment_ids(data, 0), record["segments_info"], area_threshold=0
    )
    assert (drawn.get_image() != image).any()


def test_registering_twice_changes_nothing(
    coco_folder: Factory, panoptic_folder: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes, maps = coco_folder(name="boxes"), panoptic_folder(name="maps")
    register(boxes, "boxes")
    register_panoptic(maps, "maps")
    before = [MetadataCatalog.get(name).as_dict() for name in ("boxes", "maps")]
    register(boxes, "boxes")
    register_panoptic(maps, "maps")
    monkeypatch.chdir(boxes.images.parent)
    register_coco("boxes", "images", "annotations.json")
    assert [MetadataCatalog.get(name).as_dict() for name in ("boxes", "maps")] == before
    assert len(DatasetCatalog.get("boxes")) == 4


def test_a_name_belongs_to_one_data_set(coco_folder: Factory, panoptic_folder: Factory) -> None:
    register(coco_folder(name="one"))
    with pytest.raises(InputError, match=r"'ours' is taken: its image_root is .*one.*this data set's is .*two"):
        register(coco_folder(name="two"))
    with pytest.raises(InputError, match="'ours' is taken: its evaluator_type is coco"):
        register_panoptic(panoptic_folder(name="three"))
    with pytest.raises(InputError, match="'coco_2017_val' is taken"):
        register(coco_folder(name="four"), "coco_2017_val")


def test_colours_set_before_stay_and_other_classes_are_refused(coco_folder: Factory) -> None:
    data = coco_folder()
    MetadataCatalog.get("ours").thing_colors = [(1, 2, 3)] * 3
    register(data)
    assert MetadataCatalog.get("ours").thing_colors == [(1, 2, 3)] * 3
    MetadataCatalog.get("others").thing_classes = ["a", "b", "c"]
    with pytest.raises(InputError, match="its thing_classes is"):
        register(data, "others")
    assert "others" not in DatasetCatalog


def no_sizes(content: dict[str, Any]) -> None:
    del content["images"][2]["height"]


def same_ids(content: dict[str, Any]) -> None:
    content["annotations"][1]["id"] = content["annotations"][0]["id"]


def unknown_category(content: dict[str, Any]) -> None:
    content["annotations"][1]["category_id"] = 4


def no_box(content: dict[str, Any]) -> None:
    del content["annotations"][1]["bbox"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_sizes, "image 3 has no height and width"),
        (same_ids, "needs a unique id for every annotation"),
        (unknown_category, r"objects of categories \[4\], which it does not list"),
        (no_box, "image 1 has bbox None, expected four finite numbers"),
    ],
)
def test_what_detectron2_cannot_read_is_said_at_once(
    coco_folder: Factory, spoil: Callable[[dict[str, Any]], None], message: str
) -> None:
    data = coco_folder()
    spoil(data.content)
    data.save()
    with pytest.raises(InputError, match=message):
        register(data)
    assert "ours" not in DatasetCatalog


@pytest.mark.parametrize(("key", "value", "message"), [("area", None, "lack area"), ("id", 0, "id 0 counts as no")])
def test_what_detectron2_cannot_evaluate_is_warned_of(
    coco_folder: Factory, caplog: pytest.LogCaptureFixture, key: str, value: object, message: str
) -> None:
    data = coco_folder()
    data.content["annotations"][0][key] = value
    if value is None:
        del data.content["annotations"][0][key]
    data.save()
    register(data)
    assert message in caplog.text
    assert len(DatasetCatalog.get("ours")) == 4


def test_missing_files_are_said_at_once(coco_folder: Factory, panoptic_folder: Factory, tmp_path: Path) -> None:
    boxes, maps = coco_folder(name="boxes"), panoptic_folder(name="maps")
    with pytest.raises(InputError, match=r"image folder .*nowhere does not exist"):
        register_coco("ours", tmp_path / "nowhere", boxes.annotations)
    with pytest.raises(InputError, match=r"there is no annotation file .*nowhere"):
        register_coco("ours", boxes.images, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"lists the image .*0001\.png, which does not exist"):
        register_coco("ours", tmp_path, boxes.annotations)
    with pytest.raises(InputError, match=r"panoptic folder .*nowhere does not exist"):
        register_coco_panoptic("ours", maps.images, maps.annotations, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"lists the map .*0001_segments\.png, which does not exist"):
        register_coco_panoptic("ours", maps.images, maps.annotations, tmp_path)


def test_each_kind_of_file_has_its_function(coco_folder: Factory, panoptic_folder: Factory) -> None:
    boxes, maps = coco_folder(name="boxes"), panoptic_folder(name="maps")
    with pytest.raises(InputError, match="register it with register_coco_panoptic"):
        register(maps)
    with pytest.raises(InputError, match=r"register it with register_coco$"):
        register_coco_panoptic("ours", boxes.images, boxes.annotations, maps.panoptic)


def test_every_image_has_one_map(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    removed = data.content["annotations"].pop()
    data.save()
    with pytest.raises(InputError, match=r"4 images and 3 annotations, .* without annotation: \[4\]"):
        register_panoptic(data)
    data.content["annotations"] += [removed, {**removed, "image_id": 9}]
    data.save()
    with pytest.raises(InputError, match=r"4 images and 5 annotations, .* not in images: \[9\]"):
        register_panoptic(data)


def test_metadata_of_two_rows_of_classes_are_refused() -> None:
    MetadataCatalog.get("ours").set(
        thing_dataset_id_to_contiguous_id={1: 0, 2: 1}, stuff_dataset_id_to_contiguous_id={5: 0, 6: 1}
    )
    with pytest.raises(InputError, match=r"numbers things \[0, 1\] and stuff \[0, 1\], expected every number from 0"):
        panoptic_classes("ours")
