from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2.config")

from detectron2.config import LazyCall, instantiate
from detectron2.data import (
    DatasetCatalog,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.data import transforms as T
from detectron2.structures import BitMasks, PolygonMasks
from PIL import Image
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision.ops import box_convert

from detr_bf.common.errors import InputError
from detr_bf.data.batches import SampleKey
from detr_bf.data.coco import CocoDetection
from detr_bf.data.masks import encoded_ids
from detr_bf.data.transforms import eval_transform
from detr_bf.detectron2 import DetrBfDatasetMapper, register_coco, register_coco_panoptic
from detr_bf.detectron2.mapper import eval_augmentations, train_augmentations
from detr_bf.detectron2.tensors import masks_of
from tests.detectron2.conftest import scattered, segment_ids, with_masks

Factory = Callable[..., SimpleNamespace]
pytestmark = pytest.mark.usefixtures("catalogs")
COLOURS = torch.tensor([(255, 120, 0), (0, 255, 120), (120, 0, 255)])  # of coco_folder's objects, in their order
SMALL = {"short_sides": (180, 220), "crop_short_sides": (160, 200), "crop_size": (60, 170)}


def mapper(*augmentations: T.Augmentation, **settings: Any) -> DetrBfDatasetMapper:
    return DetrBfDatasetMapper(augmentations=augmentations, **settings)


def detection(coco_folder: Factory, kind: str = "polygon", **settings: Any) -> list[dict[str, Any]]:
    """Records of a registered data set; an object of class k has colour k."""
    data = with_masks(coco_folder(**{"objects": 3, "size": (320, 240), **settings}), kind)
    register_coco("boxes", data.images, data.annotations)
    return DatasetCatalog.get("boxes")


def panoptic(panoptic_folder: Factory) -> tuple[SimpleNamespace, list[dict[str, Any]]]:
    data = scattered(panoptic_folder(name="maps"))
    register_coco_panoptic("maps", data.images, data.annotations, data.panoptic)
    return data, DatasetCatalog.get("maps")


def painted(image: Tensor, colour: int) -> Tensor:
    """Return the mask (h, w) bool of pixels that have nearly this colour."""
    return ((image.permute(1, 2, 0).int() - COLOURS[colour]).abs() < 60).all(-1)


@pytest.mark.parametrize("mask_format", ["polygon", "bitmask"])
@pytest.mark.parametrize("flip", ["horizontal", "vertical"])
def test_boxes_and_masks_stay_on_the_objects_of_the_image(coco_folder: Factory, mask_format: str, flip: str) -> None:
    record = detection(coco_folder)[0]
    make = mapper(*train_augmentations(**SMALL, flip=flip), masks=True, mask_format=mask_format)
    np.random.seed(0)
    samples = [make(record) for _ in range(24)]
    for sample in samples:
        found = sample["instances"]
        height, width = sample["image"].shape[-2:]
        assert found.image_size == (height, width)
        masks = masks_of(found.gt_masks, found.image_size)
        for colour, box, mask in zip(found.gt_classes.tolist(), found.gt_boxes.tensor, masks, strict=True):
            pixels = painted(sample["image"], colour)
            ys, xs = pixels.nonzero().T
            if len(ys) < 40:
                assert (box[2:] - box[:2]).min() < 6  # a blurred sliver at the edge of a crop
                continue
            extent = torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
            assert (box - extent).abs().max() <= 3
            assert (mask ^ pixels).sum() <= 4 * (box[2:] - box[:2]).sum()  # edges are blurred
        lost = set(range(3)) - set(found.gt_classes.tolist())
        assert all(int(painted(sample["image"], colour).sum()) < 40 for colour in lost)
    assert len({str(s["instances"].gt_boxes) for s in samples}) > 12
    assert {len(sample["instances"]) for sample in samples} >= {1, 3}  # both crops and full images occurred


def test_polygons_and_run_lengths_of_the_same_objects_give_the_same_samples(coco_folder: Factory) -> None:
    found = []
    for kind in ("polygon", "run lengths"):
        data = with_masks(coco_folder(objects=3, size=(320, 240), name=kind), kind)
        register_coco(kind, data.images, data.annotations)
        np.random.seed(3)
        found.append(mapper(*train_augmentations(**SMALL), masks=True)(DatasetCatalog.get(kind)[0])["instances"])
    assert torch.equal(found[0].gt_classes, found[1].gt_classes)
    torch.testing.assert_close(found[0].gt_boxes.tensor, found[1].gt_boxes.tensor)
    for one, other in zip(*(instances.gt_masks.tensor for instances in found), strict=True):
        assert (one & other).sum() / (one | other).sum() > 0.95


def test_arrays_and_plain_run_lengths_are_masks_too(coco_folder: Factory) -> None:
    [coded, *_] = detection(coco_folder, "run lengths")
    wanted = mapper(*eval_augmentations(short_side=240), masks=True)(coded)["instances"].gt_masks.tensor
    assert wanted.any()
    for change in (coco_mask.decode, plain_run_lengths):
        record = copy.deepcopy(coded)
        for one in record["annotations"]:
            one["segmentation"] = change(one["segmentation"])
        found = mapper(*eval_augmentations(short_side=240), masks=True)(record)["instances"]
        assert torch.equal(found.gt_masks.tensor, wanted)


def plain_run_lengths(code: dict[str, Any]) -> dict[str, Any]:
    """Encode a mask as COCO does for crowds: column by column, zeros first."""
    counts, last = [0], 0
    for value in coco_mask.decode(code).flatten(order="F").tolist():
        if value != last:
            counts.append(0)
            last = value
        counts[-1] += 1
    return {"size": code["size"], "counts": counts}


def test_numpys_seed_alone_decides_on_a_sample(coco_folder: Factory) -> None:
    record = detection(coco_folder)[0]
    make = mapper(*train_augmentations(**SMALL), masks=True)

    def sample(seed: int, other: int) -> dict[str, Any]:
        np.random.seed(seed)
        torch.manual_seed(other)
        return make(record)

    one, same = sample(5, 1), sample(5, 2)
    assert torch.equal(one["image"], same["image"])
    assert torch.equal(one["instances"].gt_boxes.tensor, same["instances"].gt_boxes.tensor)
    assert len({tuple(sample(seed, 1)["image"].shape) for seed in range(8)}) > 3


def test_the_defaults_are_the_augmentation_of_detr() -> None:
    image = np.zeros((480, 640, 3), dtype=np.uint8)
    flipped, cropped, sides = 0, 0, set()
    np.random.seed(0)
    for _ in range(300):
        flip, *crop, resize = T.AugmentationList(train_augmentations())(T.AugInput(image)).transforms
        flipped += isinstance(flip, T.HFlipTransform)
        sides.add(min(resize.new_h, resize.new_w))
        assert max(resize.new_h, resize.new_w) <= 1333
        if len(crop) == 2:
            cropped += 1
            small, cut = crop
            assert min(small.new_h, small.new_w) in (400, 500, 600)
            assert min(cut.h, cut.w) >= 384
            assert max(cut.h, cut.w) <= 600
    assert 120 < flipped < 180
    assert 120 < cropped < 180
    assert sides >= set(range(480, 801, 32))


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("short_side", [48, 96])
def test_panoptic_objects_are_those_of_the_core(
    panoptic_folder: Factory, index: int, masks: bool, short_side: int
) -> None:
    data, records = panoptic(panoptic_folder)
    core = CocoDetection(
        data.images,
        data.annotations,
        eval_transform(short_side=short_side, max_size=1000),
        masks=masks,
        panoptic=data.panoptic,
    )
    image, target = core[SampleKey(0, index)]
    sample = mapper(*eval_augmentations(short_side=short_side, max_size=1000), masks=masks)(records[index])
    found = sample["instances"]
    height, width = target.size
    assert sample["image"].shape == image.shape
    assert (sample["image"].int() - image.int()).abs().max() <= 1
    corners = box_convert(target.boxes, "cxcywh", "xyxy") * torch.tensor([width, height] * 2)
    torch.testing.assert_close(found.gt_boxes.tensor, corners)
    assert torch.equal(found.gt_classes, target.labels)
    assert found.has("gt_masks") == masks
    assert target.masks is None or torch.equal(found.gt_masks.tensor, target.masks)


def test_panoptic_masks_stay_on_their_colours(panoptic_folder: Factory) -> None:
    data, records = panoptic(panoptic_folder)
    colours = {3: (250, 120, 20), 1: (20, 250, 120), 0: (60, 60, 200), 2: (150, 150, 150)}  # by class index
    crop = T.RandomCrop("absolute_range", (24, 40))
    make = mapper(T.RandomFlip(), T.ResizeShortestEdge((96, 144), sample_style="choice"), crop, masks=True)
    np.random.seed(1)
    classes = set()
    for _ in range(20):
        sample = make(records[0])
        found = sample["instances"]
        for label, box, mask in zip(found.gt_classes.tolist(), *(found.gt_boxes, found.gt_masks), strict=True):
            if mask.sum() < 40:
                continue
            away = (sample["image"].permute(1, 2, 0).int() - torch.tensor(colours[label])).abs().amax(-1)
            assert away[mask].float().quantile(0.4) <= 12  # except the blurred edges
            ys, xs = mask.nonzero().T
            x0, y0, x1, y1 = box.tolist()
            assert x0 <= int(xs.min()) + 1
            assert y0 <= int(ys.min()) + 1
            assert x1 >= int(xs.max())
            assert y1 >= int(ys.max())
            classes.add(label)
    assert classes == {0, 1, 2, 3}
    crowd = next(s for s in data.content["annotations"][0]["segments_info"] if s["iscrowd"])
    whole = mapper(masks=True)(records[0])["instances"].gt_masks.tensor
    assert not whole[:, segment_ids(data, 0) == crowd["id"]].any()


def test_a_segment_without_a_pixel_is_left_out(panoptic_folder: Factory) -> None:
    data = scattered(panoptic_folder())
    gone = data.content["annotations"][0]["segments_info"][0]["id"]
    ids = segment_ids(data, 0)
    path = data.panoptic / data.content["annotations"][0]["file_name"]
    path.write_bytes(encoded_ids(torch.where(ids == gone, 0, ids)))
    register_coco_panoptic("maps", data.images, data.annotations, data.panoptic)
    found = mapper(masks=True)(DatasetCatalog.get("maps")[0])["instances"]
    assert found.gt_classes.tolist() == [1, 0, 2]


@pytest.mark.parametrize("mask_format", ["polygon", "bitmask"])
def test_an_object_of_which_a_crop_shows_no_pixel_is_dropped(coco_folder: Factory, mask_format: str) -> None:
    record = detection(coco_folder, num_images=1, objects=2)[0]
    triangle = [[10, 10, 200, 10, 10, 200]]
    for annotation in record["annotations"]:
        annotation.update(bbox=[10, 10, 190, 190], segmentation=triangle)
    shown = mapper(T.CropTransform(15, 15, 40, 30), masks=True, mask_format=mask_format)(record)["instances"]
    assert shown.gt_boxes.tensor.tolist() == [[0, 0, 40, 30]] * 2
    assert masks_of(shown.gt_masks, (30, 40)).all()
    corner = T.CropTransform(150, 150, 40, 40)
    assert len(mapper(corner, masks=True, mask_format=mask_format)(record)["instances"]) == 0
    assert len(mapper(corner)(record)["instances"]) == 2


def test_crowds_are_left_out_and_images_without_objects_are_kept(coco_folder: Factory) -> None:
    data = with_masks(coco_folder(objects=1), crowd=True)
    register_coco("crowds", data.images, data.annotations)
    for mask_format, kind in (("polygon", PolygonMasks), ("bitmask", BitMasks)):
        found = mapper(masks=True, mask_format=mask_format)(DatasetCatalog.get("crowds")[0])["instances"]
        assert len(found) == 0
        assert isinstance(found.gt_masks, kind)
        assert found.gt_boxes.tensor.shape == (0, 4)


def test_records_are_left_as_they_were(coco_folder: Factory) -> None:
    record, again = detection(coco_folder)[0], DatasetCatalog.get("boxes")[0]
    mapper(*train_augmentations(**SMALL), masks=True, mask_format="polygon")(record)
    assert record == again


def test_evaluation_resizes_alone_and_reads_no_ground_truth(coco_folder: Factory, panoptic_folder: Factory) -> None:
    make = mapper(*eval_augmentations(short_side=120, max_size=150), is_train=False, masks=True)
    record = detection(coco_folder)[0]
    sample = make(record)
    assert sample["image"].shape == (3, 113, 150)
    del sample["image"]
    assert sample == {key: record[key] for key in ("file_name", "image_id", "height", "width")}
    _, records = panoptic(panoptic_folder)
    Path(records[0]["pan_seg_file_name"]).unlink()
    del records[0]["height"], records[0]["width"]
    sample = make(records[0])
    assert set(sample) == {"file_name", "image_id", "height", "width", "image"}
    assert (sample["height"], sample["width"]) == (48, 64)


def test_images_come_in_the_wanted_order_of_channels(coco_folder: Factory) -> None:
    record = detection(coco_folder)[0]
    rgb, bgr = (mapper(image_format=order)(record)["image"] for order in ("RGB", "BGR"))
    assert torch.equal(rgb, torch.from_numpy(np.array(Image.open(record["file_name"]))).permute(2, 0, 1))
    assert torch.equal(bgr, rgb.flip(0))


def test_what_cannot_be_used_is_told(coco_folder: Factory, panoptic_folder: Factory) -> None:
    with pytest.raises(InputError, match="MASK_FORMAT must be one of polygon, bitmask; got 'rle'"):
        mapper(masks=True, mask_format="rle")
    with pytest.raises(InputError, match=r"INPUT.RANDOM_FLIP\) must be one of .* got 'both'"):
        train_augmentations(flip="both")
    record = detection(coco_folder, "run lengths")[0]
    with pytest.raises(InputError, match=r"0001.png: the segmentation of an object is a dict, expected polygons"):
        mapper(masks=True, mask_format="polygon")(record)
    record["annotations"][0]["segmentation"]["size"] = [10, 12]
    with pytest.raises(InputError, match=r"a mask has \(10, 12\) pixels \(height, width\), the image \(240, 320\)"):
        mapper(masks=True)(record)
    del record["annotations"][0]["segmentation"]
    with pytest.raises(InputError, match="the segmentation of an object is missing"):
        mapper(masks=True)(record)
    _, records = panoptic(panoptic_folder)
    Path(records[0]["pan_seg_file_name"]).write_bytes(encoded_ids(torch.ones(5, 6, dtype=torch.int32)))
    with pytest.raises(InputError, match=r"0001_segments.png has \(5, 6\) pixels \(height, width\), the image"):
        mapper(masks=True)(records[0])


def test_a_yacs_config_says_all_of_it(tiny_cfg: Callable[..., Any], coco_folder: Factory) -> None:
    cfg = tiny_cfg(masks=True)
    given = cfg.INPUT
    given.MIN_SIZE_TRAIN, given.MAX_SIZE_TRAIN, given.MIN_SIZE_TEST, given.MAX_SIZE_TEST = (60, 90), 100, 30, 50
    given.RANDOM_FLIP, given.MASK_FORMAT, given.FORMAT = "vertical", "bitmask", "BGR"
    given.CROP.ENABLED, given.CROP.TYPE, given.CROP.SIZE = True, "absolute", [20, 25]
    given.CROP_PROBABILITY, given.CROP_SHORT_SIDES = 1.0, (44,)
    record = detection(coco_folder)[0]
    make = DetrBfDatasetMapper(cfg, is_train=True)
    sizes = set()
    np.random.seed(0)
    for _ in range(20):
        flip, small, cut, resize = make.augmentations(T.AugInput(np.zeros((240, 320, 3), dtype=np.uint8))).transforms
        assert isinstance(flip, (T.NoOpTransform, T.VFlipTransform))
        assert min(small.new_h, small.new_w) == 44
        assert (cut.h, cut.w) == (20, 25)
        sizes.add((resize.new_h, resize.new_w))
    assert sizes == {(60, 75), (80, 100)}
    sample = make(record)
    assert isinstance(sample["instances"].gt_masks, BitMasks)
    assert DetrBfDatasetMapper(cfg, is_train=False)(record)["image"].shape == (3, 30, 40)
    given.CROP.ENABLED = False
    assert len(DetrBfDatasetMapper(cfg).augmentations.augs) == 2


def test_a_lazy_config_is_a_call(coco_folder: Factory) -> None:
    config = LazyCall(DetrBfDatasetMapper)(
        is_train=True, augmentations=LazyCall(train_augmentations)(short_sides=(64,), max_size=80), masks=True
    )
    config.augmentations.short_sides = [48]
    sample = instantiate(config)(detection(coco_folder)[0])
    assert min(sample["image"].shape[1:]) == 48


def test_detectron2s_loaders_take_it(coco_folder: Factory) -> None:
    detection(coco_folder)
    records = get_detection_dataset_dicts("boxes")
    train = build_detection_train_loader(
        records, mapper=mapper(*train_augmentations(**SMALL)), total_batch_size=2, num_workers=0
    )
    batch = next(iter(train))
    assert len(batch) == 2
    assert all(sample["instances"].image_size == sample["image"].shape[1:] for sample in batch)
    test = build_detection_test_loader(records, mapper=mapper(*eval_augmentations(), is_train=False), num_workers=0)
    assert [sample["image_id"] for batch in test for sample in batch] == [1, 2, 3, 4]
