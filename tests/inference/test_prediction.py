"""Predictions of single images: their formats, pictures and crops, and detection in parts of an image."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import supervision as sv
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from scipy import ndimage
from torch import nn

import detr_bf
from detr_bf.assembly import build_model
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap, Detections, Segment
from detr_bf.config import config_to_dict, load_config
from detr_bf.engine import Checkpoint
from detr_bf.evaluation import ScoreThresholds, write_panoptic
from detr_bf.inference.backends import TorchBackend
from detr_bf.inference.prediction import COLUMNS, PanopticPrediction, Prediction
from detr_bf.inference.predictor import Predictor
from detr_bf.inference.tiling import join_tiles, tiles_of
from detr_bf.losses.postprocess import encoded
from tools.train_net import main as train_net

SIZE = (60, 80)
CLASSES = ClassMap((7, 3), ("cat", 'dog, "old"'))


def prediction(masks: bool = False, **changes: Any) -> Prediction:
    """Return two objects on a grey image."""
    bitmaps = torch.zeros(2, *SIZE, dtype=torch.uint8)
    bitmaps[0, 5:20, 10:30] = 1
    bitmaps[1, 30:, 40:] = 1
    found = Prediction(
        image_id=4,
        boxes=torch.tensor([[10.0, 5.0, 30.5, 20.0], [40.0, 30.0, 80.0, 60.0]]),
        scores=torch.tensor([0.75, 0.5]),
        labels=torch.tensor([0, 1]),
        masks=tuple(map(encoded, bitmaps)) if masks else None,
        class_map=CLASSES,
        given=torch.full((3, *SIZE), 128, dtype=torch.uint8),
        source="photos/a.jpg",
        size=SIZE,
    )
    return replace(found, **changes)


def panoptic(**changes: Any) -> PanopticPrediction:
    """Return a thing and two regions of stuff on a grey image, with pixels that belong to none."""
    ids = torch.zeros(SIZE, dtype=torch.int32)
    ids[5:20, 10:30], ids[30:, 40:], ids[:2] = 1, 2, 2
    segments = (Segment(1, 0, 15 * 20), Segment(2, 1, 30 * 40 + 2 * 80))
    fields = {name: getattr(prediction(), name) for name in ("class_map", "given", "source", "size")}
    return PanopticPrediction(**({"image_id": 4, "ids": ids, "segments": segments} | fields | changes))


def test_panoptic_formats() -> None:
    found = panoptic()
    assert str(found) == 'photos/a.jpg: cat, dog, "old"'
    assert (len(found), found.names, found.category_ids) == (2, ["cat", 'dog, "old"'], [7, 3])
    content = json.loads(found.to_json())
    assert content["file"] == "photos/a.jpg"
    first, second = content["segments"]
    assert (first["id"], first["category_id"], first["name"], first["area"]) == (1, 7, "cat", 300)
    assert (first["bbox"], second["bbox"]) == ([10, 5, 20, 15], [0, 0, 80, 60])
    masks = [coco_mask.decode(each["segmentation"]).astype(bool) for each in (first, second)]
    assert all((mask == (found.ids.numpy() == number)).all() for number, mask in enumerate(masks, 1))
    assert (found.bitmaps() == np.array(masks)).all()
    empty = panoptic(ids=torch.zeros(SIZE, dtype=torch.int32), segments=())
    assert json.loads(empty.to_json())["segments"] == []
    assert empty.bitmaps().shape == (0, *SIZE)
    assert str(empty) == "photos/a.jpg: nothing found"


def test_panoptic_results_are_read_back(tmp_path: Path) -> None:
    """The PNG has the ids as pycocotools and panopticapi read them, and the entry is that of the results file."""
    entry, png = panoptic().to_coco(9)
    assert (entry["image_id"], entry["file_name"]) == (9, "a.png")
    pixels = np.asarray(Image.open(io.BytesIO(png))).astype(int)
    assert (pixels @ [1, 256, 65536] == panoptic().ids.numpy()).all()
    (tmp_path / "maps").mkdir()
    write_panoptic(tmp_path / "found.json", tmp_path / "maps", [panoptic()], CLASSES, {4: "a.png"})
    written = json.loads((tmp_path / "found.json").read_text())["annotations"]
    assert written == [panoptic().to_coco().annotation]
    assert (tmp_path / "maps" / "a.png").read_bytes() == panoptic().to_coco().png


def test_panoptic_plot_tints_the_segments() -> None:
    drawn = np.asarray(panoptic().plot()).astype(int)
    scale = drawn.shape[0] // SIZE[0]
    assert (np.abs(drawn[50 * scale, 70 * scale] - 128) > 5).any()
    assert (drawn[25 * scale, 60 * scale] == 128).all(), "pixels of no segment are unchanged"


def test_panoptic_maps_come_as_boxes_do(tmp_path: Path) -> None:
    """Lists, folders and batches, with files that cannot be read left out of a folder."""
    model_settings = "model: {masks: true, hidden_dim: 32, heads: 2, encoder_layers: 1, decoder_layers: 1, "
    model_settings += "feedforward_dim: 32, num_queries: 5, backbone: {name: resnet18, weights: none}}\n"
    others = "data: {transforms: {eval_short_side: 64}}\neval: {panoptic: {threshold: 0}}\ndevice: cpu\n"
    (tmp_path / "config.yaml").write_text(model_settings + others)
    config = load_config(tmp_path / "config.yaml", task="detection")
    model = build_model(config, 2, pretrained=False)
    with torch.no_grad():
        model.decoder.heads.classes[0].bias[-1] = -10.0  # no query predicts no object
    Checkpoint(model.state_dict(), CLASSES.to_dict(), config_to_dict(config)).save(tmp_path / "masks.pt")
    detector = detr_bf.load(tmp_path / "masks.pt")
    (tmp_path / "photos").mkdir()
    generator = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        Image.fromarray(generator.integers(0, 255, (*SIZE, 3), dtype=np.uint8)).save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "c.png").write_text("no image")
    found, batched = detector.panoptic(tmp_path / "photos"), detector.panoptic(tmp_path / "photos", batch_size=2)
    assert [each.source for each in batched] == [each.source for each in found]
    assert all((one.ids == other.ids).float().mean() > 0.9 for one, other in zip(batched, found, strict=True))
    assert [Path(each.source).name for each in found] == ["a.png", "b.png"]
    assert all(each.size == SIZE == tuple(each.ids.shape) and len(each) for each in found)
    single = detector.panoptic(tmp_path / "photos" / "a.png")
    assert torch.equal(single.ids, found[0].ids)
    assert torch.equal(single.image, found[0].image)
    (listed,) = detector.panoptic([single.image])
    assert torch.equal(listed.ids, single.ids)
    with pytest.raises(InputError, match=r"c\.png"):
        detector.panoptic([tmp_path / "photos" / "c.png"])


NOTHING = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}


def test_names_and_ids() -> None:
    assert len(prediction()) == 2
    assert prediction().names == ["cat", 'dog, "old"']
    assert prediction().category_ids == [7, 3]


def test_text() -> None:
    assert str(prediction()) == 'photos/a.jpg: cat 0.75, dog, "old" 0.50'
    assert str(prediction(source="", **NOTHING)) == "image: nothing found"
    assert "given" not in repr(prediction())


def test_json() -> None:
    content = json.loads(prediction(masks=True).to_json())
    assert content["file"] == "photos/a.jpg"
    first, second = content["objects"]
    assert {key: first[key] for key in ("category_id", "name", "score", "bbox")} == {
        "category_id": 7,
        "name": "cat",
        "score": 0.75,
        "bbox": [10.0, 5.0, 20.5, 15.0],
    }
    assert coco_mask.decode(second["segmentation"])[30:, 40:].all()
    assert "segmentation" not in prediction().to_dict()["objects"][0]
    assert json.loads(prediction(**NOTHING).to_json())["objects"] == []


def test_coco_results() -> None:
    assert prediction().to_coco()[1] == {
        "image_id": 4,
        "category_id": 3,
        "score": 0.5,
        "bbox": [40.0, 30.0, 40.0, 30.0],
    }
    assert [each["image_id"] for each in prediction(masks=True).to_coco(99)] == [99, 99]


def test_csv_and_pandas() -> None:
    header, *rows = csv.reader(io.StringIO(prediction().to_csv()))
    assert tuple(header) == COLUMNS
    assert rows[1] == ["photos/a.jpg", "3", 'dog, "old"', "0.5", "40.0", "30.0", "40.0", "30.0"]
    assert prediction().to_csv(header=False).count("\n") == 2
    frame = prediction().to_pandas()
    pd.testing.assert_frame_equal(frame, pd.read_csv(io.StringIO(prediction().to_csv())))
    assert list(prediction(**NOTHING).to_pandas().columns) == list(COLUMNS)


def test_yolo() -> None:
    first, second = prediction().to_yolo(scores=True).splitlines()
    assert first == "0 0.253125 0.208333 0.256250 0.250000 0.750000"
    assert second.startswith("1 0.750000 0.750000 0.500000 0.500000")
    assert prediction().to_yolo().splitlines() == [line.rpartition(" ")[0] for line in (first, second)]
    height, width = SIZE
    over = replace(
        prediction(), boxes=torch.tensor([[-width, -height, width, height], [2.0 * width, 0, 3 * width, height]])
    )
    assert over.to_yolo() == "0 0.500000 0.500000 1.000000 1.000000\n", "a box is cut, and one outside is left out"
    assert prediction(**NOTHING).to_yolo() == ""


def test_polygons_are_the_outlines_of_the_masks() -> None:
    assert prediction().polygons() is None
    rectangle, corner = [10, 5, 30, 5, 30, 20, 10, 20], [40, 30, 80, 30, 80, 60, 40, 60]
    found = prediction(masks=True)
    assert found.polygons() == [[rectangle], [corner]]
    ring = torch.zeros(2, *SIZE, dtype=torch.uint8)  # the second mask is empty
    ring[0, 10:20, 10:20] = 1
    ring[0, 12:14, 12:14] = 0  # a hole
    ring[0, 40, 70] = 1
    apart = replace(found, masks=tuple(map(encoded, ring)))
    assert apart.polygons() == [[[10, 10, 20, 10, 20, 20, 10, 20], [70, 40, 71, 40, 71, 41, 70, 41]], []]
    [line] = apart.to_yolo().splitlines()
    label, *values = line.split()
    points = np.array(values, dtype=float).reshape(-1, 2) * [SIZE[1], SIZE[0]]
    assert label == "0"
    assert np.allclose(points[[0, 4, 5, 9, 10]], [[10, 10], [10, 10], [70, 40], [70, 40], [10, 10]], atol=1e-3)
    read = coco_mask.decode(coco_mask.frPyObjects([points.ravel().tolist()], *SIZE))[..., 0]
    ring[0, 12:14, 12:14] = 1
    assert (read == ring[0].numpy()).all(), "the lines between the regions have no pixels"


def test_yolo_with_masks() -> None:
    first, second = prediction(masks=True).to_yolo(scores=True).splitlines()
    assert first == "0 0.125000 0.083333 0.375000 0.083333 0.375000 0.333333 0.125000 0.333333 0.750000"
    assert second.startswith("1 0.500000 0.500000 1.000000 0.500000 1.000000 1.000000 0.500000 1.000000")
    assert prediction(**NOTHING).to_yolo() == ""


def test_labelme() -> None:
    content = prediction().to_labelme()
    assert (content["imagePath"], content["imageHeight"], content["imageWidth"]) == ("a.jpg", *SIZE)
    first, second = content["shapes"]
    assert first == {
        "label": "cat",
        "group_id": None,
        "description": "0.750",
        "points": [[10.0, 5.0], [30.5, 20.0]],
        "shape_type": "rectangle",
        "flags": {},
    }
    assert second["label"] == 'dog, "old"'
    bitmaps = torch.zeros(2, *SIZE, dtype=torch.uint8)
    bitmaps[1, 5:7, 5:7] = bitmaps[1, 8:9, 5:7] = 1
    shapes = replace(prediction(), masks=tuple(map(encoded, bitmaps))).to_labelme("../a.jpg")["shapes"]
    assert [(each["shape_type"], each["group_id"], each["points"]) for each in shapes] == [
        ("polygon", 2, [[5, 5], [7, 5], [7, 7], [5, 7]]),
        ("polygon", 2, [[5, 8], [7, 8], [7, 9], [5, 9]]),
    ], "an empty mask is left out, two regions are a group"
    assert prediction(**NOTHING).to_labelme()["shapes"] == []


@pytest.mark.parametrize("masks", [False, True])
def test_supervision(masks: bool) -> None:
    found = prediction(masks).to_supervision()
    assert found.xyxy.tolist() == [[10.0, 5.0, 30.5, 20.0], [40.0, 30.0, 80.0, 60.0]]
    assert found.class_id.tolist() == [0, 1]
    assert found["class_name"].tolist() == ["cat", 'dog, "old"']
    assert (found.mask is not None) == masks
    if masks:
        assert found.mask.sum((1, 2)).tolist() == [15 * 20, 30 * 40]
    assert len(prediction(**NOTHING).to_supervision()) == 0
    assert isinstance(sv.BoxAnnotator().annotate(np.zeros((*SIZE, 3), np.uint8), found), np.ndarray)


def test_plot_shows_boxes_and_masks() -> None:
    plain, boxed, masked = (
        np.asarray(each.plot()) for each in (prediction(**NOTHING), prediction(), prediction(masks=True))
    )
    assert plain.shape == boxed.shape == (480, 640, 3), "enlarged to 640 pixels"
    assert (plain == 128).all()
    inside = (slice(380, 460), slice(480, 600))  # of the second object, away from its outline and label
    assert (boxed[inside] == 128).all()
    assert (masked[inside] != 128).any(axis=2).all()


def test_crops_have_whole_pixels() -> None:
    assert [each.size for each in prediction().crop()] == [(21, 15), (40, 30)]
    odd = torch.tensor([[-5.0, -5.0, 0.0, 0.0], [79.9, 59.9, 300.0, 300.0]])
    assert [each.size for each in prediction(boxes=odd).crop()] == [(1, 1), (1, 1)]


def test_the_image_of_a_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", SIZE[::-1], "red").save(path)
    found = prediction(given=path)
    assert found.image[:, 0, 0].tolist() == [255, 0, 0]
    Image.new("RGB", (5, 5)).save(path)
    with pytest.raises(InputError, match="has changed since it was predicted"):
        found.plot()


@pytest.mark.parametrize("name", ["pandas", "supervision"])
def test_what_is_not_installed_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(InputError, match=f"pip install {name}"):
        getattr(prediction(), f"to_{name}")()


class Blobs(TorchBackend):
    """Detector that finds every bright rectangle of a batch, with a score that grows with its area."""

    reads_references = False

    def compute(self, batch: Batch, convert: Any, half: bool) -> list[Any]:
        found: list[Any] = []
        for image, target in zip(batch.images, batch.targets, strict=True):
            height, width = target.original_size
            regions, count = ndimage.label(image[0, :height, :width].numpy() > 100)
            places = ndimage.find_objects(regions)
            boxes = torch.tensor([[x.start, y.start, x.stop, y.stop] for y, x in places], dtype=torch.float32)
            boxes = boxes.reshape(-1, 4)
            areas, order = (boxes[:, 2:] - boxes[:, :2]).prod(1).sort(descending=True)
            bitmaps = [regions == number + 1 for number in order.tolist()]
            boxes, masks = boxes[order], tuple(encoded(torch.from_numpy(each)) for each in bitmaps)
            labels = torch.zeros(count, dtype=torch.int64)
            found.append(Detections(target.image_id, boxes, areas / (areas + 1000), labels, masks))
        return found


def blobs(backend: type[TorchBackend] = Blobs, model: Any = None) -> Any:
    unchanged: Any = lambda sample: sample  # noqa: E731
    nothing: Any = None
    return Predictor(backend(model or nn.Identity(), torch.device("cpu")), CLASSES, unchanged, nothing, nothing)


def mosaic(height: int, width: int) -> tuple[torch.Tensor, set[tuple[float, ...]]]:
    """Return a large image with bright rectangles of 3 to 90 pixels that do not touch, and their boxes."""
    rng, image, boxes = np.random.default_rng(1), torch.zeros(3, height, width, dtype=torch.uint8), set()
    for top in range(2, height - 100, 100):
        for left in range(2, width - 100, 100):
            high, wide = rng.integers(3, 91, 2)
            y, x = top + rng.integers(0, 97 - high), left + rng.integers(0, 97 - wide)
            image[:, y : y + high, x : x + wide] = 255
            boxes.add((float(x), float(y), float(x + wide), float(y + high)))
    return image, boxes


@pytest.mark.parametrize("tile", [(200, 100), (256, 128), (150, 60), (400, 30), (2000, 0)], ids=str)
@pytest.mark.parametrize("size", [(1210, 1503), (300, 1503), (140, 130)], ids=str)
def test_every_object_of_a_mosaic_is_found_once(tile: tuple[int, int], size: tuple[int, int]) -> None:
    image, boxes = mosaic(*size)
    found = blobs()(image, 0, tile=tile, batch_size=3)
    whole = blobs()(image, 0)
    assert {tuple(box) for box in whole.boxes.tolist()} == boxes
    assert {tuple(box) for box in found.boxes.tolist()} == boxes
    assert len(found) == len(boxes)
    assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
    masks = {tuple(box): mask for box, mask in zip(whole.boxes.tolist(), whole.masks, strict=True)}
    assert [masks[tuple(box)] for box in found.boxes.tolist()] == list(found.masks)


@pytest.mark.parametrize("scores", [(0.9, 0.8, 0.7), (0.9, 0.7, 0.8), (0.7, 0.8, 0.9), (0.8, 0.7, 0.9)], ids=str)
def test_an_object_across_three_parts_is_one_whatever_the_scores(scores: tuple[float, ...]) -> None:
    found = []
    for left, score in zip((0, 80, 160), scores, strict=True):
        box = torch.tensor([[max(50.0, left), 10.0, min(210.0, left + 100), 40.0]])
        box -= torch.tensor([left, 0.0, left, 0.0])
        part = Detections(3, box, torch.tensor([score]), torch.tensor([1]))
        found.append(((left, 0, left + 100, 100), part))
    joint = join_tiles(found, (100, 260))
    assert joint.boxes.tolist() == [[50.0, 10.0, 210.0, 40.0]]
    assert joint.scores.tolist() == pytest.approx([0.9])
    assert joint.image_id == 3


def test_a_box_that_no_border_cuts_is_kept() -> None:
    whole = Detections(0, torch.tensor([[70.0, 10.0, 95.0, 40.0]]), torch.tensor([0.5]), torch.tensor([0]))
    part = Detections(0, torch.tensor([[0.0, 12.0, 14.0, 39.0]]), torch.tensor([0.9]), torch.tensor([0]))
    joint = join_tiles([((0, 0, 100, 100), whole), ((80, 0, 180, 100), part)], (100, 180))
    assert joint.boxes.tolist() == [[70.0, 10.0, 95.0, 40.0]]
    assert joint.scores.tolist() == pytest.approx([0.9])


@pytest.mark.parametrize("name", ["boxes", "scores"])
def test_what_is_not_finite_is_refused(name: str) -> None:
    class Broken(Blobs):
        def compute(self, batch: Batch, convert: Any, half: bool) -> list[Any]:
            found = super().compute(batch, convert, half)
            return [replace(each, **{name: getattr(each, name) * torch.nan}) for each in found]

    predictor = blobs(Broken)
    image = torch.full((3, 20, 30), 255, dtype=torch.uint8)
    for options, said in (({}, "take an earlier checkpoint"), ({"half": True}, "give half=False")):
        with pytest.raises(InputError, match=f"^image 0: the detector's boxes or scores are not finite: {said}"):
            predictor(image, 0, **options)


def test_with_parts_one_image_is_read_at_a_time() -> None:
    read = []

    def images() -> Any:
        for number in range(3):
            read.append(number)
            yield torch.full((3, 20, 30), 255, dtype=torch.uint8)

    assert len(next(blobs().predict(images(), 32, 0, tile=(10, 2)))) == 1
    assert read == [0]


def test_objects_of_other_classes_are_not_joined() -> None:
    class Both(Blobs):
        def compute(self, batch: Batch, convert: Any, half: bool) -> list[Any]:
            left, right = super().compute(batch, convert, half)
            return [left, replace(right, labels=torch.ones_like(right.labels))]

    image = torch.zeros(3, 50, 90, dtype=torch.uint8)
    image[:, 10:30, 42:48] = 255
    predictor = blobs(Both)
    assert len(blobs()(image, 0, tile=(50, 10))) == 1
    assert predictor(image, 0, tile=(50, 10), batch_size=2).labels.tolist() == [0, 1]


def test_tiles_cover_the_image() -> None:
    for size in ((1, 1), (100, 100), (101, 250), (99, 1000)):
        seen = torch.zeros(size, dtype=torch.bool)
        for x0, y0, x1, y1 in tiles_of(size, (100, 20)):
            assert (x1 - x0, y1 - y0) == (min(100, size[1]), min(100, size[0]))
            seen[y0:y1, x0:x1] = True
        assert seen.all()
    assert len(tiles_of((100, 100), (100, 20))) == 1
    assert len(tiles_of((100, 101), (100, 20))) == 2
    with pytest.raises(InputError, match=r"tile=\(2, 1\) divides an image of 5000 x 5000 pixels .* 24,990,001 parts"):
        tiles_of((5000, 5000), (2, 1))


@pytest.mark.parametrize("tile", [640, (640,), (640, 640), (640, -1), (0, 0), (64.0, 3), (True, 0), "ab", (1, 2, 3)])
def test_wrong_tiles_are_refused_at_once(tile: Any) -> None:
    with pytest.raises(InputError, match="tile must be None or"):
        blobs().predict([torch.zeros(3, 9, 9, dtype=torch.uint8)], tile=tile)


def test_a_folder_is_predicted_in_order_without_its_broken_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "more").mkdir()
    for name in ("c.png", "a.png", "more/b.png"):
        Image.new("RGB", (9, 8), "white").save(tmp_path / name)
    (tmp_path / "b.jpg").write_text("no image")
    (tmp_path / "notes.txt").write_text("no image")
    with caplog.at_level(logging.WARNING):
        found = list(blobs().predict(str(tmp_path), batch_size=2, threshold=0))
    assert [Path(each.source).name for each in found] == ["a.png", "c.png", "b.png"]
    assert [each.image_id for each in found] == [0, 2, 3]
    assert "1 of 4 images cannot be read and were left out" in caplog.text
    assert "b.jpg" in caplog.text
    assert [each.source for each in blobs()(tmp_path, 0)] == [each.source for each in found]
    with pytest.raises(InputError, match=r"b\.jpg cannot be used"):
        blobs()([tmp_path / "a.png", tmp_path / "b.jpg"])
    with pytest.raises(InputError, match="no image files in"):
        blobs().predict(make_empty(tmp_path / "empty"))
    broken = make_empty(tmp_path / "broken")
    (broken / "a.jpg").write_text("no image")
    with pytest.raises(InputError, match="no image can be read"):
        list(blobs().predict(broken))


def make_empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_an_unknown_device_is_refused() -> None:
    predictor = blobs(model=nn.Linear(1, 1))
    for device in ("toaster", "cuda:99", 3.5, "meta"):
        with pytest.raises(InputError, match=f"device={device} cannot be used"):
            predictor([], device=device)


def test_the_copy_for_another_device_is_made_once(checkpoint: Path) -> None:
    loaded = detr_bf.load(checkpoint, "cpu")
    predictor = replace(loaded, backend=replace(loaded.backend, device=torch.device("meta")))
    copy = predictor.backend.on("cpu")
    assert copy.device == torch.device("cpu")
    assert copy is predictor.backend.on(torch.device("cpu"))
    assert copy.model is not predictor.model
    assert copy.on("auto") is copy.on(None) is copy
    image = torch.zeros(3, 40, 50, dtype=torch.uint8)
    assert torch.equal(predictor(image, 0, device="cpu").scores, detr_bf.load(checkpoint, "cpu")(image, 0).scores)


SETTINGS = [
    "batch_former.enabled=true",
    *("model.hidden_dim=32", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=1"),
    *("model.feedforward_dim=32", "model.num_queries=6", "model.backbone.name=resnet18", "device=cpu"),
    *("model.backbone.weights=none", "data.transforms.eval_short_side=64", "data.transforms.max_size=96"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an untrained detector of three classes with masks."""
    torch.manual_seed(0)
    config = load_config(None, [*SETTINGS, "model.masks=true"])
    path = tmp_path_factory.mktemp("weights") / "a.pt"
    classes = ClassMap((3, 7, 9), ("class3", "class7", "class9"))
    Checkpoint(build_model(config, 3).state_dict(), classes.to_dict(), config_to_dict(config)).save(path)
    return path


def test_every_form_of_an_image_gives_the_same_prediction(checkpoint: Path, tmp_path: Path) -> None:
    predictor = detr_bf.load(checkpoint, "cpu")
    array = np.random.default_rng(0).integers(256, size=(50, 70, 3), dtype=np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(array).save(path)
    expected = predictor(path, 0)
    assert len(expected) == 6
    assert expected.source == str(path)
    forms: list[Any] = [str(path), path.read_bytes(), array, torch.from_numpy(array).permute(2, 0, 1), Image.open(path)]
    for given in [*predictor(forms, 0), predictor(array[:, :, ::-1], 0, bgr=True)]:
        assert torch.equal(given.boxes, expected.boxes)
        assert torch.equal(given.scores, expected.scores)
        assert given.masks == expected.masks
        assert torch.equal(given.image, expected.image)


def test_a_notebook_shows_a_few_lines_and_pictures(checkpoint: Path, tmp_path: Path) -> None:
    detector = detr_bf.load(checkpoint, "cpu")
    assert repr(detector).splitlines() == [
        f"Predictor: detr on resnet18, {sum(each.numel() for each in detector.model.parameters()):,} parameters",
        "3 classes: class3, class7, class9",
        "images: shorter side 64 pixels, longer side at most 96",
        "threshold: 0.50, as none is stored",
        "device: cpu",
        f"from: {checkpoint}",
    ]
    stored = replace(detector, thresholds=ScoreThresholds(0.25, (0.1, 0.2, 0.3)), origin=None)
    assert "threshold: 0.25\n" in repr(stored)
    path = tmp_path / "<a>.png"
    Image.fromarray(np.zeros((50, 1500, 3), dtype=np.uint8)).save(path)
    found = detector([path] * 14, 0)
    picture = Image.open(io.BytesIO(found[0]._repr_png_() or b""))
    assert (picture.format, max(picture.size)) == ("PNG", 1000)
    html = found._repr_html_()
    assert html.count("<img ") == html.count("data:image/jpeg;base64,") == 12
    assert html.endswith("<p>and 2 more</p>")
    assert "<a>" not in html
    panoptic = detector.panoptic([path])
    assert panoptic._repr_html_().count("<img ") == 1
    path.unlink()
    assert found[0]._repr_png_() is None, "a notebook then shows the text"
    assert "<img" not in found._repr_html_()
    assert detector([], 0)._repr_html_() == "no predictions"


def test_half_precision_is_near(checkpoint: Path) -> None:
    predictor = detr_bf.load(checkpoint, "cpu")
    image = torch.randint(256, (3, 50, 70), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    full, half = predictor(image, 0), predictor(image, 0, half=True, device="cpu")
    assert not torch.equal(full.scores, half.scores)
    torch.testing.assert_close(full.scores, half.scores, atol=0.02, rtol=0)
    assert half.boxes.dtype == torch.float32


@pytest.mark.full
def test_evaluation_is_that_of_the_command(
    checkpoint: Path, coco_folder: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    """The ground truth is a part of what the untrained detector predicts, moved a little, so that AP is not 0."""
    data, predictor = coco_folder(num_images=5, category_ids=(3, 7, 9)), detr_bf.load(checkpoint, "cpu")
    objects = []
    for number, image in enumerate(data.content["images"]):
        for each in predictor(data.images / image["file_name"], 0).to_coco(image["id"])[number % 3 : 4]:
            x, y, width, height = each["bbox"]
            box = {"bbox": [x, y, 0.9 * width, height], "area": width * height, "iscrowd": 0, "id": len(objects) + 1}
            objects.append(each | box)
    data.content["annotations"] = objects
    data.save()
    given = [f"data.val.images={data.images}", f"data.val.annotations={data.annotations}", f"init_from={checkpoint}"]
    (tmp_path / "masks.yaml").write_text("model: {masks: true}")
    outputs = [str(tmp_path / "masks.yaml"), f"output_dir={tmp_path / 'out'}"]
    assert train_net(["--eval-only", *outputs, *SETTINGS, *given]) == 0
    expected = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    result = predictor.evaluate(data.annotations, data.images, batch_size=2)
    assert 0.1 < result.metrics["AP"] < 1
    assert 0.1 < result.metrics["mask/AP"] < 1
    found = json.loads(json.dumps(result.to_dict()))
    assert {name: expected[name] for name in found} == found | {"losses": expected["losses"]}


def test_evaluation_of_other_classes_is_refused(checkpoint: Path, coco_folder: Callable[..., SimpleNamespace]) -> None:
    data = coco_folder(category_ids=(3, 8))
    with pytest.raises(InputError, match="8"):
        detr_bf.load(checkpoint, "cpu").evaluate(data.annotations, data.images)
