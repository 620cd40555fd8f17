"""Conversions on plain tensors, with stand-ins for detectron2's structures."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Detections, PanopticMap, Segment
from detr_bf.detectron2.tensors import (
    batch_of,
    drawn,
    fields_of,
    masks_of,
    output_target,
    panoptic_of,
    target_of,
)

RECTANGLE = [2.0, 1.0, 6.0, 1.0, 6.0, 4.0, 2.0, 4.0]


class Instances:
    """Stand-in for detectron2's ``Instances``."""

    def __init__(self, image_size: tuple[int, int], **fields: object) -> None:
        self.image_size = image_size
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def has(self, name: str) -> bool:
        return name in self.fields


def instances(corners: list[list[float]], classes: list[int], **fields: object) -> Instances:
    boxes = SimpleNamespace(tensor=torch.tensor(corners).reshape(-1, 4))
    return Instances((10, 20), gt_boxes=boxes, gt_classes=torch.tensor(classes, dtype=torch.int64), **fields)


def test_a_batch_keeps_its_images_and_says_what_is_padding() -> None:
    images = torch.rand(2, 3, 4, 5)
    batch = batch_of(images, [(4, 5), (3, 2)])
    assert batch.images is images
    assert (~batch.padding_mask).sum((1, 2)).tolist() == [20, 6]


def test_a_target_has_centres_and_sizes_in_fractions() -> None:
    target = target_of(instances([[4, 2, 12, 8]], [2]), num_classes=3, masks=False)
    torch.testing.assert_close(target.boxes, torch.tensor([[8 / 20, 5 / 10, 8 / 20, 6 / 10]]))
    assert target.labels.tolist() == [2]
    assert (target.size, target.masks) == ((10, 20), None)


def test_an_image_without_objects_is_a_target_without_boxes() -> None:
    target = target_of(instances([], []), num_classes=3, masks=False)
    assert target.boxes.shape == (0, 4)


@pytest.mark.parametrize(
    ("given", "masks", "message"),
    [
        (Instances((10, 20)), False, r"image 7 of the batch: its instances lack gt_boxes, gt_classes"),
        (instances([[0, 0, 1, 1]], [0]), True, r"lack gt_masks; .*MASK_ON"),
        (instances([[0, 0, 1, 1]], [3]), False, r"classes from 3 to 3, the model has 0 to 2: set MODEL.DETR_BF.NUM"),
        (instances([[0, 0, 1, 1]], [-1]), False, r"classes from -1 to -1"),
        (instances([[0, 0, float("nan"), 1]], [0]), False, "boxes with infinity or NaN"),
    ],
)
def test_what_cannot_be_a_target_is_told(given: Instances, masks: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        target_of(given, num_classes=3, masks=masks, number=7)


def test_polygons_are_drawn() -> None:
    masks = drawn([[np.array(RECTANGLE)], [RECTANGLE, [10.0, 0.0, 12.0, 0.0, 12.0, 2.0, 10.0, 2.0]], []], (10, 20))
    wanted = torch.zeros(3, 10, 20, dtype=torch.bool)
    wanted[:2, 1:4, 2:6] = True
    wanted[1, 0:2, 10:12] = True
    assert torch.equal(masks, wanted)


def test_masks_come_from_polygons_and_from_bits() -> None:
    polygons = masks_of(SimpleNamespace(polygons=[[RECTANGLE]]), (10, 20))
    bits = masks_of(SimpleNamespace(tensor=polygons.to(torch.uint8)), (10, 20))
    assert bits.dtype == torch.bool
    assert torch.equal(polygons, bits)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (
            SimpleNamespace(tensor=torch.zeros(1, 5, 5)),
            r"have \(5, 5\) pixels \(height, width\), the image \(10, 20\)",
        ),
        (SimpleNamespace(), "PolygonMasks or BitMasks, got SimpleNamespace"),
    ],
)
def test_masks_that_do_not_fit_are_told(masks: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        masks_of(masks, (10, 20))


def test_an_output_has_its_own_size() -> None:
    target = output_target(3, (10, 20), (100, 200))
    assert (target.image_id, target.size, target.original_size) == (3, (10, 20), (100, 200))


def detections(masks: bool) -> Detections:
    pixels = np.zeros((4, 5, 2), dtype=np.uint8, order="F")
    pixels[1, 2, 0] = pixels[3, 4, 1] = 1
    coded = tuple(coco_mask.encode(pixels)) if masks else None
    return Detections(0, torch.rand(2, 4), torch.tensor([0.9, 0.5]), torch.tensor([1, 0]), coded)


def test_detections_keep_their_order_and_get_pixels() -> None:
    found = detections(masks=True)
    fields = fields_of(found, (4, 5))
    assert torch.equal(fields.boxes, found.boxes)
    assert fields.classes.tolist() == [1, 0]
    assert fields.masks is not None
    assert fields.masks.nonzero().tolist() == [[0, 1, 2], [1, 3, 4]]


def test_classes_that_are_not_kept_go_with_their_masks() -> None:
    fields = fields_of(detections(masks=True), (4, 5), kept_classes=[True, False])
    assert fields.classes.tolist() == [0]
    assert fields.masks is not None
    assert fields.masks.nonzero().tolist() == [[0, 3, 4]]
    nothing = fields_of(detections(masks=True), (4, 5), kept_classes=[False, False])
    assert nothing.masks is not None
    assert nothing.masks.shape == (0, 4, 5)
    assert fields_of(detections(masks=False), (4, 5)).masks is None


def test_a_panoptic_map_names_class_and_kind_of_each_segment() -> None:
    ids = torch.tensor([[1, 1, 2]], dtype=torch.int32)
    found, segments = panoptic_of(PanopticMap(5, ids, (Segment(1, 4, 2), Segment(2, 0, 1))), [True] * 4 + [False])
    assert torch.equal(found, ids)
    assert segments == [
        {"id": 1, "isthing": False, "category_id": 4, "area": 2},
        {"id": 2, "isthing": True, "category_id": 0, "area": 1},
    ]
