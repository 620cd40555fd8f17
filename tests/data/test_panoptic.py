from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import box_convert

from detr_bf.assembly import build_train_data, build_val_data, data_source
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap, Target
from detr_bf.config import load_config
from detr_bf.data.batches import EpochBatches, SampleKey
from detr_bf.data.coco import CocoDetection, read_annotations
from detr_bf.data.loader import make_loader
from detr_bf.data.masks import SegmentExtent, encoded_ids, read_ids, segment_extents
from detr_bf.data.transforms import eval_transform, train_transform

Factory = Callable[..., SimpleNamespace]
PLAIN = eval_transform(short_side=48, max_size=1000)  # leaves the fixture's 64 x 48 images unchanged


def dataset(data: SimpleNamespace, **changes: object) -> CocoDetection:
    settings = {"transform": PLAIN, "masks": True, "panoptic": data.panoptic, **changes}
    return CocoDetection(data.images, data.annotations, **settings)


def target(data: SimpleNamespace, index: int = 0, **changes: object) -> Target:
    return dataset(data, **changes)[SampleKey(0, index)][1]


def objects(data: SimpleNamespace, index: int = 0) -> list[dict[str, object]]:
    """Return the segments of an image that are not crowds, as listed in the JSON."""
    return [segment for segment in data.content["annotations"][index]["segments_info"] if not segment["iscrowd"]]


def segment_ids(data: SimpleNamespace, index: int = 0) -> Tensor:
    return read_ids(data.panoptic / data.content["annotations"][index]["file_name"])


def corners(found: Target) -> Tensor:
    """Return boxes (T, 4) x, y, width, height in pixels of the target."""
    height, width = found.size
    return box_convert(found.boxes, "cxcywh", "xywh") * torch.tensor([width, height, width, height])


def test_segments_become_annotations_of_their_images(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    content = read_annotations(data.annotations)
    assert content.maps == tuple((i, f"{i:04d}_segments.png") for i in range(1, 5))
    assert len(content.annotations) == 20
    segment = data.content["annotations"][2]["segments_info"][3]
    assert content.annotations[13] == {**segment, "image_id": 3, "file_name": "0003_segments.png"}
    assert content.class_map == ClassMap(
        (3, 7, 100, 120), ("thing3", "thing7", "stuff100", "stuff120"), (True, True, False, False)
    )


def test_a_detection_file_has_no_maps(coco_folder: Factory) -> None:
    assert read_annotations(coco_folder().annotations).maps is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments_info": {}}, r"not a COCO panoptic file: annotations\[1\]: segments_info is \{\}, expected a list"),
        ({"segments_info": [4]}, r"annotations\[1\].segments_info\[0\] is int, expected an object"),
        ({"segments_info": [{"id": 1}]}, r"segments_info\[0\] has no category_id; it has id"),
        ({"segments_info": [{"category_id": 1}]}, r"segments_info\[0\] has no id"),
        ({"segments_info": [{"id": "1", "category_id": 3}]}, r"segments_info\[0\]: id is '1', expected a whole number"),
        ({"segments_info": [{"id": 0, "category_id": 3}]}, "id is 0, expected 1 to 16777215"),
        ({"segments_info": [{"id": 2**24, "category_id": 3}]}, "id is 16777216, expected 1 to 16777215"),
        ({"file_name": 5}, r"annotations\[1\]: file_name is 5, expected a string"),
        ({"image_id": None}, r"annotations\[1\]: image_id is None, expected a whole number"),
    ],
)
def test_what_is_not_panoptic_is_explained(panoptic_folder: Factory, change: dict[str, object], message: str) -> None:
    data = panoptic_folder()
    data.content["annotations"][1].update(change)
    data.save()
    with pytest.raises(InputError, match=message):
        read_annotations(data.annotations)


@pytest.mark.parametrize("name", ["../0001_segments.png", "a/../../b.png", "/etc/passwd", "a\0.png"])
def test_a_map_outside_of_its_folder_is_refused(panoptic_folder: Factory, name: str) -> None:
    data = panoptic_folder()
    data.content["annotations"][1]["file_name"] = name
    data.save()
    with pytest.raises(InputError, match=r"not a COCO panoptic file: annotations\[1\] has the file name '"):
        read_annotations(data.annotations)


def test_an_annotation_without_segments_info_among_others_is_named(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    del data.content["annotations"][2]["segments_info"]
    data.save()
    with pytest.raises(InputError, match=r"annotations\[2\] has no segments_info; it has image_id, file_name"):
        read_annotations(data.annotations)


def test_boxes_need_no_png(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    shutil.rmtree(data.panoptic)
    found = target(data, 1, masks=False, panoptic=None)
    torch.testing.assert_close(corners(found), torch.tensor([s["bbox"] for s in objects(data, 1)]).float())
    assert found.labels.tolist() == [0, 1, 2, 3]
    assert found.masks is None


def test_a_panoptic_folder_changes_nothing_without_masks(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    plain, given = (target(data, masks=False, panoptic=folder) for folder in (None, data.panoptic))
    assert torch.equal(plain.boxes, given.boxes)
    assert given.masks is None


@pytest.mark.parametrize("index", range(4))
def test_masks_are_the_pixels_of_the_segments(panoptic_folder: Factory, index: int) -> None:
    data = panoptic_folder()
    found, ids = target(data, index), segment_ids(data, index)
    assert found.masks is not None
    assert type(found.masks) is Tensor
    assert found.masks.dtype == torch.bool
    assert found.masks.shape == (4, 48, 64)
    for mask, segment in zip(found.masks, objects(data, index), strict=True):
        assert torch.equal(mask, ids == segment["id"])
        assert mask.sum() == segment["area"]


def test_boxes_are_the_extents_of_the_masks_whatever_the_file_says(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    expected = torch.tensor([segment["bbox"] for segment in objects(data)]).float()
    for segment in objects(data):
        segment["bbox"] = [1, 1, 2, 2]
    data.save()
    torch.testing.assert_close(corners(target(data)), expected)
    torch.testing.assert_close(corners(target(data, masks=False)), torch.tensor([[1.0, 1, 2, 2]] * 4))


def test_segments_without_a_pixel_are_dropped_in_step(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    ids = segment_ids(data)
    second = objects(data)[1]
    ids[ids == second["id"]] = 0
    (data.panoptic / "0001_segments.png").write_bytes(encoded_ids(ids))
    found = target(data)
    assert found.labels.tolist() == [0, 2, 3]
    for mask, segment in zip(found.masks, [objects(data)[i] for i in (0, 2, 3)], strict=True):
        assert torch.equal(mask, ids == segment["id"])
    torch.testing.assert_close(
        corners(found), torch.tensor([objects(data)[i]["bbox"] for i in (0, 2, 3)]).float(), atol=1e-4, rtol=0
    )


def test_an_image_of_crowds_and_void_has_no_masks(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    for segment in objects(data):
        segment["iscrowd"] = 1
    data.save()
    found = target(data)
    assert found.masks.shape == (0, 48, 64)
    assert found.boxes.shape == (0, 4)


def test_segment_ids_mean_something_in_their_image_alone(panoptic_folder: Factory) -> None:
    data = panoptic_folder(num_images=2)
    for annotation in data.content["annotations"]:
        path = data.panoptic / annotation["file_name"]
        ids = read_ids(path)
        for number, segment in enumerate(annotation["segments_info"], start=1):
            ids[ids == segment["id"]] = number
            segment["id"] = number
        path.write_bytes(encoded_ids(ids))
    data.save()
    for index in range(2):
        ids = segment_ids(data, index)
        for mask, segment in zip(target(data, index).masks, objects(data, index), strict=True):
            assert torch.equal(mask, ids == segment["id"])


def test_annotations_may_come_in_any_order(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    before = [target(data, index).masks for index in range(4)]
    data.content["annotations"].reverse()
    data.save()
    assert all(torch.equal(target(data, index).masks, masks) for index, masks in enumerate(before))


def test_masks_have_the_size_of_the_resized_image(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    samples = dataset(data, transform=eval_transform(short_side=96, max_size=1000))
    image, found = samples[SampleKey(0, 0)]
    assert found.masks.shape == (4, *image.shape[-2:]) == (4, 96, 128)
    once = target(data).masks
    assert torch.equal(found.masks, once.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2))


TRAINING = train_transform(
    short_sides=[40, 50, 60],
    max_size=100,
    horizontal_flip=0.5,
    random_crop=0.5,
    crop_short_sides=[40, 60],
    crop_min=10,
    crop_max=40,
)


@pytest.mark.parametrize("epoch", range(8))
def test_augmented_masks_lie_on_the_colour_of_their_class(panoptic_folder: Factory, epoch: int) -> None:
    colours = torch.tensor([[250, 120, 20], [20, 250, 120], [60, 60, 200], [150, 150, 150], [0, 0, 0]]).float()
    samples = dataset(panoptic_folder(), transform=TRAINING)
    for index in range(4):
        image, found = samples[SampleKey(epoch, index)]
        assert found.masks.shape == (len(found.labels), *found.size)
        assert len(found.boxes) == len(found.labels)
        for mask, label in zip(found.masks, found.labels.tolist(), strict=True):
            if mask.sum() >= 20:  # few pixels: all of them are at the edge
                middle = image[:, mask].float().median(dim=1).values
                assert (middle - colours).abs().amax(dim=1).argmin() == label


def test_images_and_boxes_are_augmented_alike_with_and_without_masks(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    with_masks, without = (dataset(data, transform=TRAINING, masks=masks) for masks in (True, False))
    for epoch in range(5):
        (image, found), (plain_image, plain) = (samples[SampleKey(epoch, 1)] for samples in (with_masks, without))
        assert torch.equal(image, plain_image)
        kept = [row for row, label in enumerate(plain.labels) if label in found.labels]
        assert torch.equal(found.boxes, plain.boxes[kept])


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_bring_the_same_masks(panoptic_folder: Factory, workers: int) -> None:
    samples = dataset(panoptic_folder(), transform=TRAINING, seed=5)
    batches = list(make_loader(samples, EpochBatches(4, 2, seed=5, epoch=1), collate=Batch.collate, workers=workers))
    keys = [key for batch in EpochBatches(4, 2, seed=5, epoch=1) for key in batch]
    targets = [found for batch in batches for found in batch.targets]
    for key, found in zip(keys, targets, strict=True):
        assert torch.equal(found.masks, samples[key][1].masks)


def test_an_image_that_is_not_rotated_keeps_its_png(panoptic_folder: Factory) -> None:
    data = panoptic_folder(num_images=2)
    exif = Image.Exif()
    exif[0x0112] = 6
    for entry in data.content["images"]:
        path = data.images / entry["file_name"]
        Image.open(path).save(path, exif=exif)
    data.content["images"][1].update(width=48, height=64)
    data.save()
    assert target(data, 0).masks.shape == (4, 48, 64)
    with pytest.raises(
        InputError, match=r"image 2, 0002.png .*0002_segments.png has 64 x 48 pixels .*, the image has 48 x 64"
    ):
        target(data, 1)


def test_masks_without_a_panoptic_folder_are_refused(panoptic_folder: Factory) -> None:
    with pytest.raises(InputError, match=r"panoptic.json .* set data.train.panoptic"):
        dataset(panoptic_folder(), panoptic=None)


@pytest.mark.parametrize("masks", [True, False])
def test_a_panoptic_folder_for_a_detection_file_is_refused(coco_folder: Factory, masks: bool) -> None:
    data = coco_folder()
    with pytest.raises(InputError, match=r"annotations.json is a COCO detection file.*got .*images"):
        CocoDetection(data.images, data.annotations, PLAIN, masks=masks, panoptic=data.images)


def test_a_panoptic_folder_that_does_not_exist_is_named(panoptic_folder: Factory, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"panoptic folder .*nowhere does not exist"):
        dataset(panoptic_folder(), panoptic=tmp_path / "nowhere")


def missing_annotation(data: SimpleNamespace) -> None:
    del data.content["annotations"][1]


def repeated_annotation(data: SimpleNamespace) -> None:
    data.content["annotations"].append(data.content["annotations"][1])


def repeated_segment_id(data: SimpleNamespace) -> None:
    segments = data.content["annotations"][1]["segments_info"]
    segments[2]["id"] = segments[1]["id"]  # ids of crowds must be unique too, or pixels are ambiguous


@pytest.mark.parametrize(
    ("breaking", "message"),
    [
        (missing_annotation, "image 2 has no annotation"),
        (repeated_annotation, "several annotations are for one image"),
        (repeated_segment_id, "several segments of an image have the same id"),
    ],
)
def test_what_leaves_masks_unknown_is_refused(
    panoptic_folder: Factory, breaking: Callable[[SimpleNamespace], None], message: str
) -> None:
    data = panoptic_folder()
    breaking(data)
    data.save()
    with pytest.raises(InputError, match=f"{message}.*detr-bf check"):
        dataset(data)
    assert len(dataset(data, masks=False)) == 4


def test_a_missing_png_is_named(panoptic_folder: Factory) -> None:
    data = panoptic_folder()
    (data.panoptic / "0001_segments.png").unlink()
    with pytest.raises(InputError, match=r"image 1, 0001.png .* no panoptic PNG .*0001_segments.png"):
        target(data)


def test_a_damaged_png_is_bad_input_whatever_pillow_makes_of_it(panoptic_folder: Factory) -> None:
    path = panoptic_folder().panoptic / "0001_segments.png"
    data = path.read_bytes()
    chunk_type = data.index(b"IDAT")
    for damaged in (b"", data[:40], data[:chunk_type] + b"\x00\x01\x02\x03" + data[chunk_type + 4 :]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be read"):
            read_ids(path)


def test_extents_are_those_of_a_plain_loop() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        ids = torch.from_numpy(random.choice([0, 1, 7, 255, 256, 2**24 - 1], size=(9, 13)).astype(np.int32))
        expected = []
        for value in sorted(set(ids.flatten().tolist()) - {0}):
            pixels = [(y, x) for y in range(9) for x in range(13) if ids[y, x] == value]
            ys, xs = zip(*pixels, strict=True)
            expected.append(SegmentExtent(value, len(pixels), min(xs), min(ys), max(xs) + 1, max(ys) + 1))
        assert segment_extents(ids) == tuple(expected)
    assert segment_extents(torch.zeros(4, 5, dtype=torch.int32)) == ()


def configured(train: SimpleNamespace, val: SimpleNamespace, *overrides: str) -> list[str]:
    return [
        f"data.{name}.{key}={getattr(data, key)}"
        for name, data in (("train", train), ("val", val))
        for key in ("images", "annotations", "panoptic")
    ] + list(overrides)


def test_a_config_asks_for_masks_of_its_panoptic_folder(panoptic_folder: Factory) -> None:
    train, val = panoptic_folder(), panoptic_folder(name="val", first_image_id=101)
    config = load_config(None, configured(train, val, "model.masks=true"))
    assert data_source(config, "val")[:3] == (val.images, val.annotations, val.panoptic)
    trained = build_train_data(config)
    found = trained[SampleKey(0, 0)][1]
    assert found.masks.shape == (len(found.labels), *found.size)
    assert build_val_data(config, trained.class_map)[SampleKey(0, 0)][1].masks is None
    drawn = build_val_data(config, trained.class_map, lambda sample: sample, masks=True)[SampleKey(0, 0)][1]
    assert torch.equal(drawn.masks[0], segment_ids(val) == objects(val)[0]["id"])


def test_a_config_without_a_mask_head_asks_for_boxes(panoptic_folder: Factory) -> None:
    train, val = panoptic_folder(), panoptic_folder(name="val", first_image_id=101)
    config = load_config(None, [*configured(train, val)[:2], *configured(train, val)[3:5]])
    assert data_source(config, "train")[:3] == (train.images, train.annotations, None)
    assert build_train_data(config)[SampleKey(0, 0)][1].masks is None
