from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torchvision.ops import box_convert
from torchvision.tv_tensors import BoundingBoxes, Image, Mask, wrap

from detr_bf.assembly.data import build_train_data
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Target
from detr_bf.config import load_config
from detr_bf.data.batches import SampleKey
from detr_bf.data.transforms import (
    TRANSFORMS,
    RandomSizeCrop,
    Sample,
    SampleTransform,
    eval_transform,
    mixup,
    resized_size,
    train_transform,
)


def sample(height: int, width: int, *corners: tuple[int, int, int, int]) -> Sample:
    """Draw one solid rectangle of its own brightness on black for every box (x0, y0, x1, y1), with labels 0, 1, ..."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    for number, (x0, y0, x1, y1) in enumerate(corners):
        image[number, y0:y1, x0:x1] = 255
    boxes = torch.tensor(corners, dtype=torch.float32).reshape(-1, 4)
    boxes = BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width))
    return Sample(Image(image), boxes, torch.arange(len(corners)))


def painted(image: Tensor, channel: int) -> Tensor:
    """Return the corners of the bright pixels of a channel."""
    rows, columns = torch.nonzero(image[channel] > 127, as_tuple=True)
    return torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])


@pytest.mark.parametrize(
    ("height", "width", "short_side", "max_size", "expected"),
    [
        (480, 640, 800, 1333, (800, 1066)),  # 800 * 640 / 480 = 1066.67, rounded down
        (640, 480, 800, 1333, (1066, 800)),
        (100, 100, 64, None, (64, 64)),
        (333, 500, 333, 1333, (333, 500)),
        # 1280 / 427 * 800 = 2398 is too long: 1333 * 427 / 1280 = 444.68 -> 445, then 445 * 1280 / 427 = 1333.96
        (427, 1280, 800, 1333, (445, 1333)),
        # 100 * 30 / 201 = 14.93 -> 15, then 15 * 201 / 30 = 100.5, rounded down
        (30, 201, 64, 100, (15, 100)),
        # 100 * 30 / 197 = 15.23 -> 15, then 15 * 197 / 30 = 98.5: below max_size, where torchvision gives 100
        (30, 197, 64, 100, (15, 98)),
        # 100 * 3 / 200 = 1.5 -> 2, then 2 * 200 / 3 = 133: beyond max_size
        (3, 200, 64, 100, (2, 133)),
        (1, 5000, 64, 100, (1, 5000)),
    ],
)
def test_resized_size(
    height: int, width: int, short_side: int, max_size: int | None, expected: tuple[int, int]
) -> None:
    assert resized_size(height, width, short_side, max_size) == expected


@pytest.mark.parametrize(
    ("size", "short_side", "max_size", "divisor", "expected"),
    [
        ((92, 128), 92, 128, 16, (96, 128)),
        ((128, 92), 92, 128, 16, (128, 96)),
        ((480, 640), 800, 1333, 32, (800, 1056)),  # 1066 is nearer to 1056 than to 1088
        ((480, 640), 800, 1333, 64, (832, 1088)),  # halves are rounded up
        ((427, 1280), 800, 1333, 32, (448, 1312)),  # 1344 is nearer to 1333, but larger than max_size
        ((1, 5000), 64, 100, 32, (32, 96)),
        ((100, 100), 64, 20, 32, (32, 32)),  # at least one cell
    ],
)
def test_resized_sides_are_multiples(
    size: tuple[int, int], short_side: int, max_size: int, divisor: int, expected: tuple[int, int]
) -> None:
    assert resized_size(*size, short_side, max_size, divisor) == expected


def test_images_of_training_and_evaluation_are_multiples_and_boxes_follow() -> None:
    original = sample(70, 100, (10, 12, 45, 40), (55, 30, 95, 66))
    transforms = [training(size_divisor=32), eval_transform(short_side=80, max_size=133, size_divisor=32)]
    for seed in range(30):
        torch.manual_seed(seed)
        for transform in transforms:
            image, boxes, labels, _ = transform(original)
            assert all(side % 32 == 0 for side in image.shape[-2:])
            for box, label in zip(boxes.as_subclass(Tensor), labels.tolist(), strict=True):
                if (box[2:] - box[:2]).min() >= 6:  # slivers fade into black when resized
                    assert (painted(image, label) - box).abs().max() <= 2.0


def test_evaluation_resizes_image_and_boxes() -> None:
    image, boxes, labels, masks = eval_transform(short_side=80, max_size=133)(
        sample(48, 64, (8, 6, 40, 36), (50, 2, 60, 20))
    )
    assert image.shape == (3, 80, 106)
    assert image.dtype == torch.uint8
    factor = torch.tensor([106 / 64, 80 / 48, 106 / 64, 80 / 48])
    torch.testing.assert_close(
        boxes.as_subclass(Tensor), torch.tensor([[8, 6, 40, 36], [50, 2, 60, 20]]) * factor, atol=1e-4, rtol=0
    )
    assert labels.tolist() == [0, 1]
    assert masks is None


def training(**changes: object) -> SampleTransform:
    settings = {"horizontal_flip": 0.5, "random_crop": 0.5, "crop_min": 40, "crop_max": 70, "max_size": 160}
    return train_transform(short_sides=[80, 96, 112], crop_short_sides=[60, 90], **{**settings, **changes})


@pytest.mark.parametrize("seed", range(40))
def test_boxes_stay_on_their_pixels(seed: int) -> None:
    torch.manual_seed(seed)
    image, boxes, labels, _ = training()(sample(70, 100, (10, 12, 45, 40), (55, 30, 95, 66)))
    assert min(image.shape[-2:]) in (80, 96, 112) or max(image.shape[-2:]) >= 157
    assert boxes.canvas_size == image.shape[-2:]
    for box, label in zip(boxes.as_subclass(Tensor), labels.tolist(), strict=True):
        if (box[2:] - box[:2]).min() >= 6:  # slivers fade into black when resized
            assert (painted(image, label) - box).abs().max() <= 2.0


def test_both_training_branches_and_the_flip_occur() -> None:
    original = sample(70, 100, (0, 0, 30, 70))
    flipped = cropped = 0
    for seed in range(60):
        torch.manual_seed(seed)
        image, boxes, _, _ = training()(original)
        scale = min(image.shape[-2:]) / 70
        cropped += len(boxes) == 0 or abs(float(boxes[0, 2] - boxes[0, 0]) - 30 * scale) > 2
        flipped += len(boxes) == 1 and float(boxes[0, 0]) > 0
    assert 15 <= cropped <= 45
    assert flipped >= 10


def test_probabilities_zero_and_one() -> None:
    original = sample(70, 100, (0, 0, 30, 70))
    for seed in range(10):
        torch.manual_seed(seed)
        image, boxes, _, _ = training(horizontal_flip=1.0, random_crop=0.0)(original)
        assert float(boxes[0, 2]) == pytest.approx(image.shape[-1])
        image, boxes, _, _ = training(horizontal_flip=0.0, random_crop=0.0)(original)
        assert float(boxes[0, 0]) == 0.0


def test_crop_sides_cover_their_range_inclusively() -> None:
    heights, widths = set(), set()
    for seed in range(120):
        torch.manual_seed(seed)
        image, _, _, _ = RandomSizeCrop(5, 8)(sample(30, 7))
        heights.add(image.shape[-2])
        widths.add(image.shape[-1])
    assert heights == {5, 6, 7, 8}
    assert widths == {5, 6, 7}  # at most all pixels


def test_an_image_below_the_smallest_crop_is_kept_whole() -> None:
    image, boxes, _, _ = RandomSizeCrop(50, 60)(sample(20, 30, (1, 2, 9, 8)))
    assert image.shape == (3, 20, 30)
    assert boxes.tolist() == [[1, 2, 9, 8]]


def test_crop_clips_boxes_and_removes_those_outside_with_their_labels() -> None:
    corners = ((0, 0, 10, 10), (30, 0, 40, 10), (10, 20, 30, 40))
    kept = set()
    for seed in range(50):
        torch.manual_seed(seed)
        image, boxes, labels, _ = RandomSizeCrop(15, 25)(sample(40, 40, *corners))
        visible = [channel for channel in range(3) if image[channel].any()]
        assert labels.tolist() == visible
        for box, label in zip(boxes.as_subclass(Tensor), visible, strict=True):
            assert torch.equal(painted(image, label).float(), box)
        kept.add(len(visible))
    assert {1, 2} <= kept


def test_images_without_objects_pass() -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        _, boxes, labels, masks = training()(sample(70, 100))
        assert boxes.shape == (0, 4)
        assert labels.shape == (0,)
        assert masks is None


def with_masks(plain: Sample) -> Sample:
    """Draw the same image, with the bright pixels of each object's channel as its mask."""
    masks = (plain.image.as_subclass(Tensor)[: len(plain.labels)] > 127).to(torch.uint8)
    return plain._replace(masks=Mask(masks))


@pytest.mark.parametrize("seed", range(40))
def test_masks_stay_on_their_pixels(seed: int) -> None:
    original = sample(70, 100, (10, 12, 45, 40), (55, 30, 95, 66))
    torch.manual_seed(seed)
    plain = training()(original)
    torch.manual_seed(seed)
    image, boxes, labels, masks = training()(with_masks(original))
    assert torch.equal(image, plain.image)
    assert torch.equal(boxes, plain.boxes)
    assert torch.equal(labels, plain.labels)
    assert masks is not None
    assert masks.dtype == torch.uint8
    assert masks.shape == (len(labels), *image.shape[-2:])
    for mask, box in zip(masks, boxes.as_subclass(Tensor), strict=True):
        assert mask.any()
        if (box[2:] - box[:2]).min() >= 6:
            # one pixel for each of two roundings; the 40 pixels of the smallest crop may have become 112
            assert (painted(mask[None] * 255, 0) - box).abs().max() <= 1 + 112 / 40
            assert torch.equal(mask.bool(), torch.outer(mask.any(dim=1), mask.any(dim=0)))  # it is still a rectangle


def test_masks_are_resized_to_the_nearest_pixel() -> None:
    torch.manual_seed(0)
    masks = torch.randint(0, 2, (2, 30, 40), dtype=torch.uint8)
    original = sample(30, 40, (0, 0, 40, 30), (0, 0, 40, 30))._replace(masks=Mask(masks))
    resized = eval_transform(short_side=47, max_size=100)(original).masks
    rows, columns = torch.arange(47) * 30 // 47, torch.arange(62) * 40 // 62
    assert torch.equal(resized.as_subclass(Tensor), masks[:, rows][:, :, columns])


def test_masks_are_flipped_with_the_image() -> None:
    original = with_masks(sample(70, 100, (0, 0, 30, 70)))
    flipped = training(horizontal_flip=1.0, random_crop=0.0, max_size=1000)(original).masks[0]
    straight = training(horizontal_flip=0.0, random_crop=0.0, max_size=1000)(original).masks[0]
    assert not flipped[:, : flipped.shape[1] // 2].any()
    assert not straight[:, straight.shape[1] // 2 :].any()


def test_a_crop_removes_objects_of_which_no_pixel_is_left() -> None:
    plain = sample(40, 40, (0, 0, 40, 40), (0, 0, 40, 40))
    masks = torch.zeros(2, 40, 40, dtype=torch.uint8)
    masks[0, :10, :10] = 1  # the boxes always cross the crop, these pixels never do
    masks[1, 30:, 30:] = 1
    seen = set()
    for seed in range(50):
        torch.manual_seed(seed)
        uncut = RandomSizeCrop(15, 25)(plain)
        torch.manual_seed(seed)
        image, boxes, labels, cut = RandomSizeCrop(15, 25)(plain._replace(masks=Mask(masks)))
        assert len(uncut.labels) == 2
        assert torch.equal(image, uncut.image)
        assert len(boxes) == len(labels) == len(cut)
        assert cut.flatten(1).any(dim=1).all()
        seen.add(tuple(labels.tolist()))
    assert {(), (0,), (1,)} <= seen


def test_images_without_objects_pass_with_masks() -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        image, boxes, _, masks = training()(with_masks(sample(70, 100)))
        assert boxes.shape == (0, 4)
        assert masks.shape == (0, *image.shape[-2:])


def test_extra_transforms_are_applied_after_the_standard_ones(
    coco_folder: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Register a transform in one line, name it in the config, and use it on the training data."""
    seen = []

    def inverted(sample: Sample) -> Sample:
        seen.append(tuple(sample.image.shape[-2:]))
        return sample._replace(image=wrap(255 - sample.image, like=sample.image))

    monkeypatch.setitem(TRANSFORMS, "inverted", inverted)
    data = coco_folder()
    paths = [f"data.train.images={data.images}", f"data.train.annotations={data.annotations}"]
    plain = build_train_data(load_config(None, paths))[SampleKey(0, 0)]
    image, target = build_train_data(load_config(None, [*paths, "data.transforms.extra=[inverted]"]))[SampleKey(0, 0)]
    assert torch.equal(image, 255 - plain[0])
    assert seen == [target.size]
    assert torch.equal(target.boxes, plain[1].boxes)


def test_registered_transforms_keep_the_form_of_a_sample() -> None:
    for name in TRANSFORMS:
        image, boxes, labels, _ = training(extra=[name])(sample(200, 300, (10, 12, 145, 140)))
        assert image.dtype == torch.uint8
        assert len(boxes) == len(labels)


def test_vertical_flip_flips_image_and_boxes_half_of_the_time() -> None:
    before = training(extra=[])(sample(200, 300, (10, 12, 145, 140)))
    flipped = []
    for seed in range(40):
        torch.manual_seed(seed)
        after = TRANSFORMS["vertical_flip"](before)
        flipped.append(not torch.equal(after.image, before.image))
        if flipped[-1]:
            height = before.image.shape[-2]
            left, top, right, bottom = before.boxes[0].tolist()
            assert torch.equal(after.image, before.image.flip(-2))
            assert after.boxes[0].tolist() == pytest.approx([left, height - bottom, right, height - top])
    assert 10 <= sum(flipped) <= 30


def test_a_registered_transform_that_changes_the_type_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSFORMS, "to_float", lambda sample: sample._replace(image=sample.image.float()))
    with pytest.raises(TypeError, match="'to_float' must return a Sample whose image is uint8"):
        training(extra=["to_float"])(sample(200, 300, (10, 12, 145, 140)))


def test_an_unknown_extra_transform_is_refused() -> None:
    with pytest.raises(InputError, match=r"data\.transforms\.extra must be one of .*distort, .*; got 'wings'"):
        training(extra=["photometric_distort", "wings"])


def batch_of_two(first: tuple[int, int] = (6, 8), second: tuple[int, int] = (8, 4)) -> Batch:
    """Return two random images of sizes (height, width), the first with two objects and the second with one."""
    generator = torch.Generator().manual_seed(0)

    def sample(size: tuple[int, int], count: int) -> tuple[Tensor, Target]:
        image = torch.randint(1, 256, (3, *size), generator=generator, dtype=torch.uint8)
        boxes = torch.tensor([[0.5, 0.5, 0.5, 0.25], [0.25, 0.5, 0.5, 1.0]])[:count]
        masks = torch.ones(count, *size, dtype=torch.bool)
        return image, Target(count, boxes, torch.arange(count), size, size, f"{count}.png", masks)

    return Batch.collate([sample(first, 2), sample(second, 1)])


def test_mixup_blends_neighbours_and_joins_their_objects() -> None:
    batch = batch_of_two()
    mixed = mixup(batch, 0.75)
    expected = (0.75 * batch.images.double() + 0.25 * batch.images.flip(0).double()).round().to(torch.uint8)
    assert torch.equal(mixed.images, expected)
    for index, (own, other) in enumerate(((0, 1), (1, 0))):
        target = mixed.targets[index]
        assert (target.image_id, target.size) == (batch.targets[own].image_id, (8, 8))
        pixels = [box_convert(t.boxes, "cxcywh", "xyxy") * torch.tensor(t.size[::-1] * 2) for t in batch.targets]
        found = box_convert(target.boxes, "cxcywh", "xyxy") * 8
        torch.testing.assert_close(found, torch.cat([pixels[own], pixels[other]]))  # objects keep their pixels
        assert target.labels.tolist() == [*batch.targets[own].labels, *batch.targets[other].labels]
        assert target.masks is not None
        areas = [8 * 6] * 2 + [8 * 4] if own == 0 else [8 * 4] + [8 * 6] * 2
        assert target.masks.sum((1, 2)).tolist() == areas
    assert not mixed.padding_mask.any()
    assert mixed.fits(num_classes=2)


def test_mixup_leaves_padding_that_neither_image_covers() -> None:
    mixed = mixup(
        Batch.collate(
            [(torch.ones(3, h, w, dtype=torch.uint8), plain_target(h, w)) for h, w in ((4, 4), (6, 4), (4, 9))]
        ),
        0.5,
    )
    assert [target.size for target in mixed.targets] == [(4, 9), (6, 4), (6, 9)]
    assert [(~mask).sum().item() for mask in mixed.padding_mask] == [36, 24, 54]


def plain_target(height: int, width: int) -> Target:
    return Target(1, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), (height, width), (height, width))


def test_mixup_of_one_image_is_that_image() -> None:
    batch = Batch.collate([(torch.ones(3, 4, 4, dtype=torch.uint8), plain_target(4, 4))])
    assert mixup(batch, 0.5) is batch
