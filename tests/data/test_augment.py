"""Boxes, masks and labels follow coloured rectangles through every augmentation, over many seeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchvision.tv_tensors import BoundingBoxes, Image, Mask

from detr_bf.assembly.data import augmented_epochs, build_loader, build_train_data
from detr_bf.common.errors import InputError
from detr_bf.config import DetectionConfig, load_config
from detr_bf.data.augment import (
    AUGMENTATIONS,
    Augmentation,
    iou_cropped,
    mosaic,
    pasted,
    scale_jittered,
    zoomed_out,
)
from detr_bf.data.batches import EpochBatches, SampleKey
from detr_bf.data.coco import CocoDetection
from detr_bf.data.transforms import Sample, SquareResize

# Colours of labels 0 to 7; any two differ by 255 in a channel. Black is the background.
COLOURS = torch.tensor([c for c in itertools.product((0, 255), repeat=3) if any(c)], dtype=torch.int16)
THINGS = (True,) * len(COLOURS)
Corners = tuple[int, int, int, int]
THREE = ((5, 8, 40, 30), (60, 10, 95, 55), (20, 45, 50, 75))


def scene(height: int, width: int, *corners: Corners, first: int = 0, masks: bool = False) -> Sample:
    """Draw one rectangle (x0, y0, x1, y1) for each label from ``first`` on, in its colour, on black."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    drawn = torch.zeros(len(corners), height, width, dtype=torch.uint8)
    for number, (x0, y0, x1, y1) in enumerate(corners):
        image[:, y0:y1, x0:x1] = COLOURS[first + number].to(torch.uint8)[:, None, None]
        drawn[number, y0:y1, x0:x1] = 1
    boxes = torch.tensor(corners, dtype=torch.float32).reshape(-1, 4)
    boxes = BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width))
    labels = torch.arange(first, first + len(corners))
    return Sample(Image(image), boxes, labels, Mask(drawn) if masks else None)


def pixels_of(image: Tensor, label: int) -> Tensor:
    """Return (h, w) bool: the pixels nearer to the colour of a label than to any other."""
    return ((image.as_subclass(Tensor).to(torch.int16) - COLOURS[label][:, None, None]).abs() < 128).all(0)


def box_around(pixels: Tensor) -> Tensor:
    rows, columns = torch.nonzero(pixels, as_tuple=True)
    return torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])


def check(result: Sample, tolerance: float = 1.0) -> None:
    """Check that each box encloses the pixels of its object tightly, and that its mask covers them."""
    image, boxes, labels, masks = result
    height, width = image.shape[-2:]
    assert image.dtype == torch.uint8
    assert boxes.canvas_size == (height, width)
    assert len(boxes) == len(labels)
    corners = boxes.as_subclass(Tensor)
    assert (corners >= 0).all()
    assert (corners <= torch.tensor([width, height, width, height]) + 1e-3).all()
    assert masks is None or (masks.shape == (len(labels), height, width) and masks.dtype == torch.uint8)
    assert len(set(labels.tolist())) == len(labels), "these scenes have each label once"
    for number, label in enumerate(labels.tolist()):
        if (corners[number, 2:] - corners[number, :2]).min() < 3:
            continue  # a line of one or two pixels fades into black when it is resized
        seen = pixels_of(image, label)
        assert (box_around(seen) - corners[number]).abs().max() <= tolerance, label
        if masks is not None:
            assert (box_around(masks[number] > 0) - corners[number]).abs().max() <= tolerance
            edge = 2 * tolerance * sum(seen.shape)
            assert ((masks[number] > 0) ^ seen).sum() <= edge, "they differ along the edges at most"


def everything_seen_is_labelled(result: Sample) -> None:
    """Check that no colour is visible without an object, except lines."""
    for label in range(len(COLOURS)):
        seen = pixels_of(result.image, label)
        if label not in result.labels.tolist() and seen.any():
            corners = box_around(seen)
            assert (corners[2:] - corners[:2]).min() <= 2, label


def seeded(function: Callable[[], Sample], seed: int) -> Sample:
    torch.manual_seed(seed)
    return function()


@pytest.mark.parametrize("masks", [False, True])
def test_scale_jitter_keeps_boxes_on_their_pixels(masks: bool) -> None:
    original = scene(80, 100, *THREE, masks=masks)
    lost = 0
    for seed in range(80):
        factor = 0.1 + 1.9 * seed / 79
        result = seeded(lambda factor=factor: scale_jittered(original, factor), seed)
        check(result)
        everything_seen_is_labelled(result)
        lost += len(result.labels) < 3
        assert (result.image.shape[-2:] == (80, 100)) == (factor <= 1)
        if factor < 1 and len(result.labels):  # every object has the same scale
            corners = result.boxes.as_subclass(Tensor)
            before = original.boxes.as_subclass(Tensor)[result.labels]
            sides = (corners[:, 2:] - corners[:, :2]) / (before[:, 2:] - before[:, :2])
            assert (sides - factor).abs().max() < 0.02
    assert 5 < lost < 75


@pytest.mark.parametrize("masks", [False, True])
def test_zoom_out_keeps_all_objects_on_their_pixels(masks: bool) -> None:
    original = scene(80, 100, *THREE, masks=masks)
    sizes = set()
    for seed in range(40):
        result = seeded(lambda: zoomed_out(original, 3.0), seed)
        check(result, 0)
        assert result.labels.tolist() == [0, 1, 2]
        sizes.add(result.image.shape[-2:])
        assert 80 <= result.image.shape[-2] <= 240
    assert len(sizes) > 30


class Largest(TorchFunctionMode):
    """Size in bytes of the largest tensor that a function of torch has returned."""

    nbytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.nbytes = max(self.nbytes, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize("masks", [False, True])
def test_zoom_out_shrinks_images_on_a_canvas_that_would_fill_the_memory(
    masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, planes = scene(80, 100, *THREE, masks=masks), 6 if masks else 3
    drawn = [seeded(lambda: zoomed_out(original, 4.0), seed) for seed in range(20)]
    limit = planes * 80 * 100 * 4
    monkeypatch.setattr("detr_bf.data.augment._MOST_BYTES", limit)
    shrunk = 0
    for seed, free in enumerate(drawn):
        with Largest() as largest:
            result = seeded(lambda: zoomed_out(original, 4.0), seed)
        height, width = result.image.shape[-2:]
        if planes * free.image[0].numel() <= limit:
            assert torch.equal(result.image, free.image)
            continue
        shrunk += 1
        assert 0.95 * limit <= planes * height * width <= limit
        assert largest.nbytes <= limit
        assert height / width == pytest.approx(free.image.shape[-2] / free.image.shape[-1], rel=0.02)
        check(result, tolerance=1.5)
    assert 5 < shrunk < 18


@pytest.mark.parametrize("masks", [False, True])
def test_iou_crop_keeps_the_objects_whose_centre_is_inside(masks: bool) -> None:
    original = scene(80, 100, *THREE, masks=masks)
    counts = set()
    for seed in range(80):
        result = seeded(lambda: iou_cropped(original, (0.3, 1.0)), seed)
        check(result, 0)
        counts.add(len(result.labels))
        for label in range(3):  # half of the pixels of an object, or less, are left of those that were dropped
            x0, y0, x1, y1 = THREE[label]
            share = int(pixels_of(result.image, label).sum()) / ((x1 - x0) * (y1 - y0))
            assert share >= 0.25 if label in result.labels.tolist() else share <= 0.5
    assert {1, 2, 3} <= counts


def test_iou_crop_of_images_without_objects_and_of_few_pixels() -> None:
    empty = scene(80, 100)
    assert torch.equal(iou_cropped(empty, (0.3, 1.0)).image, empty.image)
    for seed in range(30):
        result = seeded(lambda: iou_cropped(scene(3, 3, (0, 0, 3, 3)), (0.3, 1.0)), seed)
        assert result.image.shape == (3, 3, 3)
        tiny = seeded(lambda: iou_cropped(scene(4, 9, (0, 0, 4, 4)), (0.3, 1.0)), seed)
        assert min(tiny.image.shape) >= 1


@pytest.mark.parametrize("masks", [False, True])
def test_least_visible_share(masks: bool) -> None:
    original = scene(80, 100, *THREE, masks=masks)
    dropped = 0
    for seed in range(60):
        any_part = seeded(lambda: scale_jittered(original, 1.7), seed)
        most = seeded(lambda: scale_jittered(original, 1.7, min_visible=0.6), seed)
        assert torch.equal(any_part.image, most.image)
        for label in any_part.labels.tolist():
            x0, y0, x1, y1 = THREE[label]
            share = int(pixels_of(most.image, label).sum()) / ((x1 - x0) * (y1 - y0))
            assert (label in most.labels.tolist()) == (share >= 0.6)
            dropped += share < 0.6
    assert dropped > 10


@pytest.mark.parametrize("masks", [False, True])
def test_mosaic_has_the_objects_of_all_four(masks: bool) -> None:
    sizes = ((80, 100), (100, 60), (50, 50), (30, 120))
    four = [
        scene(h, w, (w // 5, h // 4, w // 2, h - 3), first=number, masks=masks) for number, (h, w) in enumerate(sizes)
    ]
    for seed in range(40):
        torch.manual_seed(seed)
        row, column = (0.2 + 0.6 * torch.rand(2)).tolist()
        result = mosaic(four, (row, column))
        assert result.image.shape[-2:] == (100, 120)
        assert result.labels.tolist() == [0, 1, 2, 3]
        check(result)
        for label, box in enumerate(result.boxes.as_subclass(Tensor)):  # each in its quarter, with its aspect ratio
            below, right = divmod(label, 2)
            assert box[0] >= round(column * 120) - 1 if right else box[2] <= round(column * 120) + 1
            assert box[1] >= round(row * 100) - 1 if below else box[3] <= round(row * 100) + 1
            height, width = sizes[label]
            sides = width // 2 - width // 5, height - 3 - height // 4
            scale = [float(box[2] - box[0]) / sides[0], float(box[3] - box[1]) / sides[1]]
            assert scale[0] == pytest.approx(scale[1], rel=0.1)


@pytest.mark.parametrize("masks", [False, True])
def test_a_mosaic_is_smaller_where_its_canvas_would_fill_the_memory(
    masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long images across each other: the canvas has many times their pixels."""
    four = [
        scene(40, 800, (10, 2, 400, 38), masks=masks),
        scene(800, 40, (2, 10, 38, 400), first=1, masks=masks),
        scene(200, 200, (20, 30, 150, 180), first=2, masks=masks),
        scene(100, 300, (20, 30, 150, 80), first=3, masks=masks),
    ]
    planes, limit = (7, 2_000_000) if masks else (3, 700_000)
    assert mosaic(four, (0.5, 0.5)).image.shape == (3, 800, 800)
    monkeypatch.setattr("detr_bf.data.augment._MOST_BYTES", limit)
    for centre in ((0.5, 0.5), (0.4, 0.6), (0.6, 0.55)):
        with Largest() as largest:
            result = mosaic(four, centre)
        height, width = result.image.shape[-2:]
        assert height == width
        assert 0.95 * limit <= planes * height * width <= limit
        assert largest.nbytes <= limit * max(3, planes - 3) / planes, "image and masks once each"
        assert result.labels.tolist() == [0, 1, 2, 3]
        check(result, tolerance=1.5)


def test_mosaic_of_images_without_objects_and_of_single_pixels() -> None:
    result = mosaic([scene(1, 1), scene(1, 1), scene(40, 40), scene(1, 1)], (0.5, 0.5))
    assert result.image.shape == (3, 40, 40)
    assert result.boxes.shape == (0, 4)
    assert mosaic([scene(1, 1)] * 4, (0.9, 0.1)).image.shape == (3, 2, 2)


def test_copy_paste_covers_and_labels() -> None:
    target = scene(80, 100, *THREE, masks=True)
    source = scene(70, 70, (5, 5, 40, 60), (45, 10, 68, 40), first=3, masks=True)
    covered = added = 0
    for seed in range(60):
        result = seeded(lambda: pasted(target, source, THINGS), seed)
        check(result)
        everything_seen_is_labelled(result)
        new = [label for label in result.labels.tolist() if label >= 3]
        assert new, "one object or more is pasted"
        added += len(new)
        assert result.masks is not None
        assert (result.masks.sum(0) <= 1).all(), "every pixel has one object"
        for label in (0, 1, 2):
            x0, y0, x1, y1 = THREE[label]
            covered += int(pixels_of(result.image, label).sum()) < (x1 - x0) * (y1 - y0)
    assert added > 70
    assert covered > 20


def test_copy_paste_drops_objects_that_are_too_much_covered() -> None:
    target = scene(60, 60, (20, 20, 40, 40), masks=True)
    source = scene(60, 60, (0, 0, 60, 60), first=1, masks=True)
    kept = set()
    for seed in range(60):
        result = seeded(lambda: pasted(target, source, THINGS, min_visible=0.5), seed)
        share = int(pixels_of(result.image, 0).sum()) / 400
        assert (0 in result.labels.tolist()) == (share >= 0.5)
        kept.add(0 in result.labels.tolist())
    assert kept == {False, True}


def test_copy_paste_leaves_stuff_where_it_is() -> None:
    target = scene(60, 60, (20, 20, 40, 40), masks=True)
    source = scene(60, 60, (0, 0, 60, 30), (10, 40, 30, 60), first=1, masks=True)
    for seed in range(20):
        result = seeded(lambda: pasted(target, source, (True, False, True)), seed)
        assert 1 not in result.labels.tolist()
        assert 2 in result.labels.tolist()
        check(result)
    assert pasted(target, source, (True, False, False)) is target
    assert pasted(target, scene(50, 50, masks=True), THINGS) is target


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_augmentation_alone_changes_images(name: str) -> None:
    original = scene(80, 100, *THREE, masks=True)
    other = scene(70, 70, (5, 5, 40, 60), first=3, masks=True)
    alone = Augmentation(min_visible=0.2).only(name)
    assert alone.names == (name,)
    changed = 0
    for seed in range(20):
        torch.manual_seed(seed)
        result = alone(original, lambda: other, THINGS)
        changed += not torch.equal(result.image, original.image)
        if name == "photometric_distort":
            assert torch.equal(result.boxes, original.boxes)
            assert torch.equal(result.masks, original.masks)
        elif name != "mosaic":  # its three other images have the same label here
            check(result)
    assert changed >= 15


def test_all_augmentations_together_and_the_resize() -> None:
    # without colours, which the check reads, and copy-paste, which leaves lines of an object that a resize may lose
    everything = Augmentation(mosaic=0.7, scale_jitter=0.7, zoom_out=0.7, iou_crop=0.7)
    for seed in range(60):
        others = iter([scene(60, 90, (9, 9, 60, 50), first=label, masks=True) for label in (3, 4, 5, 6)])
        torch.manual_seed(seed)
        result = everything(scene(80, 100, *THREE, masks=True), partial(next, others), THINGS)
        check(result, tolerance=3.0)  # a pixel of each resize of masks: into the mosaic, its scale, scale jitter
        check(SquareResize(96)(result), tolerance=4.0)


def test_a_mosaic_gets_neither_zoom_out_nor_iou_crop() -> None:
    both = Augmentation(mosaic=1.0, mosaic_scale=(0.5, 1.0), zoom_out=1.0, iou_crop=1.0)
    for seed in range(20):
        torch.manual_seed(seed)
        result = both(scene(80, 100, *THREE), lambda: scene(80, 100), THINGS)
        assert result.image.shape == (3, 80, 100)


def test_images_of_any_size_pass_all_augmentations() -> None:
    """Images of 1 x 1 to 40 x 40 pixels and of one line, with 0 to 3 objects of any size, with and without masks."""
    everything = Augmentation(**dict.fromkeys(AUGMENTATIONS, 0.6), min_visible=0.1)
    generator = torch.Generator().manual_seed(0)

    def draw(masks: bool = True) -> Sample:
        height, width, count = torch.randint(1, 41, (3,), generator=generator).tolist()
        height, width, count = 1 if width > 35 else height, 1 if height > 35 else width, count % 4
        near = torch.rand(count, 2, generator=generator) * torch.tensor([width, height]) * 0.9
        far = near + (torch.tensor([width, height]) - near) * torch.rand(count, 2, generator=generator).clamp(min=0.1)
        corners = torch.stack([near.floor(), far.ceil()], 1).flatten(1).int().tolist()
        return scene(height, width, *(tuple(each) for each in corners), masks=masks)

    for seed in range(400):
        torch.manual_seed(seed)
        masks = seed % 2 == 0
        now = everything if masks else replace(everything, copy_paste=0.0)
        result = now(draw(masks), partial(draw, masks), THINGS)
        height, width = result.image.shape[-2:]
        assert min(height, width) >= 1
        corners = result.boxes.as_subclass(Tensor)
        assert corners.isfinite().all()
        assert (corners[:, 2:] - corners[:, :2] >= 1).all()
        assert (corners >= 0).all()
        assert (corners <= torch.tensor([width, height, width, height]) + 1e-3).all()
        assert (result.masks is not None) == masks
        if masks:
            assert result.masks.shape == (len(corners), height, width)
            assert result.masks.flatten(1).any(1).all()


# The data set: seeds, workers, epochs, unreadable images, settings.


def config_of(folder: SimpleNamespace, *settings: str) -> DetectionConfig:
    paths = [f"data.train.images={folder.images}", f"data.train.annotations={folder.annotations}"]
    sizes = "data.transforms={short_sides: [48], max_size: 96, crop_short_sides: [40], crop_min: 20, crop_max: 40}"
    found = load_config(None, [*paths, sizes, "data.workers=0", *settings])
    assert isinstance(found, DetectionConfig)
    return found


ALL_BOXES = "data.augment={mosaic: 0.5, scale_jitter: 0.3, photometric_distort: 0.5, zoom_out: 0.5, iou_crop: 0.8}"


def equal(one: tuple[Tensor, object], two: tuple[Tensor, object]) -> bool:
    return one[0].shape == two[0].shape and bool((one[0] == two[0]).all()) and str(one[1]) == str(two[1])


def test_augmented_samples_are_a_function_of_seed_epoch_index_and_copy(
    coco_folder: Callable[..., SimpleNamespace],
) -> None:
    data = build_train_data(config_of(coco_folder(num_images=8), ALL_BOXES))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = [data[SampleKey(3, index)] for index in range(8)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = [data[SampleKey(3, index)] for index in reversed(range(8))][::-1]
    assert all(equal(one, two) for one, two in zip(first, again, strict=True))
    assert not any(equal(one, data[SampleKey(4, index)]) for index, one in enumerate(first))
    assert not any(equal(one, data[SampleKey(3, index, 1)]) for index, one in enumerate(first))


def test_workers_give_the_same_batches(coco_folder: Callable[..., SimpleNamespace]) -> None:
    folder = coco_folder(num_images=8)
    found = []
    for workers in (0, 2):
        config = config_of(folder, ALL_BOXES, "data.batch_sides=[32,64,96]", f"data.workers={workers}")
        data, load = build_train_data(config), build_loader(config, torch.device("cpu"))
        batches = EpochBatches(8, 2, seed=1, epoch=0, sides=config.data.batch_sides)
        found.append([(batch.images, batch.targets) for batch in load(data, batches)])
    assert len(found[0]) == 4
    assert all(equal(one, two) for one, two in zip(*found, strict=True))


def test_off_means_the_same_bits_as_before(coco_folder: Callable[..., SimpleNamespace]) -> None:
    """Without augmentation, in plain epochs, and with probabilities of 0 a sample is the one without these settings."""
    folder = coco_folder(num_images=6)
    plain = build_train_data(config_of(folder))
    assert plain.augment is None
    settings = [ALL_BOXES, "train.epochs=10", "data.plain_first_epochs=2", "data.plain_last_epochs=3"]
    data = build_train_data(config_of(folder, *settings))
    for epoch in range(10):
        same = [equal(data[SampleKey(epoch, index)], plain[SampleKey(epoch, index)]) for index in range(6)]
        assert all(same) if epoch in (0, 1, 7, 8, 9) else not any(same)


def test_mosaic_ends_before_the_other_augmentations(coco_folder: Callable[..., SimpleNamespace]) -> None:
    settings = [ALL_BOXES, "train.epochs=10", "data.augment.until_epoch=4", "data.plain_first_epochs=1"]
    config = config_of(coco_folder(), *settings)
    assert augmented_epochs(config) == (range(1, 10), range(1, 4))
    augment = build_train_data(config).augment
    assert augment is not None
    assert augment.at(0) is None
    for epoch in range(1, 10):
        now = augment.at(epoch)
        assert now is not None
        assert ("mosaic" in now.names) == (epoch < 4)
        assert now.names[-4:] == AUGMENTATIONS[2:]


def test_names_of_all_images_of_a_mosaic_are_kept(coco_folder: Callable[..., SimpleNamespace]) -> None:
    data = build_train_data(config_of(coco_folder(num_images=9), "data.augment.mosaic=1"))
    _, target = data[SampleKey(0, 4)]
    names = target.file_name.split(" with ")
    assert names[0] == "0005.png"
    assert len(names) == 4
    assert target.image_id == 5


def test_an_unreadable_partner_is_replaced_or_refused(coco_folder: Callable[..., SimpleNamespace]) -> None:
    folder = coco_folder(num_images=4)
    for broken in (2, 3, 4):
        (folder.images / f"{broken:04d}.png").write_bytes(b"no image")
    data = build_train_data(config_of(folder, "data.augment.mosaic=1", "data.max_unreadable=0.5"))
    _, target = data[SampleKey(0, 0)]
    assert target.file_name == " with ".join(["0001.png"] * 4)
    assert not target.replaced, "each image is counted where it is loaded for itself"
    strict = build_train_data(config_of(folder, "data.augment.mosaic=1", "data.max_unreadable=0"))
    with pytest.raises(InputError, match=r"000[234]\.png"):
        strict[SampleKey(0, 0)]


def test_copy_paste_reads_masks_for_a_detector_without_mask_head(
    panoptic_folder: Callable[..., SimpleNamespace],
) -> None:
    folder = panoptic_folder(num_images=4)
    settings = [f"data.train.panoptic={folder.panoptic}", "train.epochs=4", "data.plain_last_epochs=1"]
    plain = build_train_data(config_of(folder, *settings))
    data = build_train_data(config_of(folder, *settings, "data.augment.copy_paste=1"))
    pasted_ones = [data[SampleKey(0, index)][1] for index in range(4)]
    assert all(target.masks is None for target in pasted_ones)
    assert any(" with " in target.file_name for target in pasted_ones)
    assert all(equal(data[SampleKey(3, index)], plain[SampleKey(3, index)]) for index in range(4))


def test_panoptic_pixels_have_one_segment_after_copy_paste(panoptic_folder: Callable[..., SimpleNamespace]) -> None:
    folder = panoptic_folder(num_images=4)
    settings = [f"data.train.panoptic={folder.panoptic}", "model.masks=true", "data.augment.copy_paste=1"]
    data = build_train_data(config_of(folder, *settings, "data.transforms.random_crop=0"))
    for epoch, index in itertools.product(range(5), range(4)):
        _, target = data[SampleKey(epoch, index)]
        assert target.masks is not None
        assert len(target.masks) == len(target.labels)
        assert target.masks.sum(0).max() == 1


def test_copy_paste_without_masks_is_refused(coco_folder: Callable[..., SimpleNamespace]) -> None:
    with pytest.raises(InputError, match=r"^data\.augment\.copy_paste needs masks: .*annotation 1 of image 1"):
        build_train_data(config_of(coco_folder(), "data.augment.copy_paste=0.5"))


def test_one_side_for_each_batch(coco_folder: Callable[..., SimpleNamespace]) -> None:
    sides = [32, 64, 96, 128]
    rank0, rank1, alone = (
        [keys[0].side for keys in EpochBatches(40, size, seed=5, epoch=2, sides=sides, rank=rank, world_size=world)]
        for size, rank, world in ((2, 0, 2), (2, 1, 2), (4, 0, 1))
    )
    assert rank0 == rank1 == alone
    assert len(set(rank0)) > 2
    resumed = EpochBatches(40, 4, seed=5, epoch=2, sides=sides, start_batch=4)
    assert [keys[0].side for keys in resumed] == alone[4:]
    assert all(len({key.side for key in keys}) == 1 for keys in resumed)
    other = EpochBatches(40, 4, seed=5, epoch=3, sides=sides)
    assert [keys[0].side for keys in other] != alone
    assert SampleKey(1, 2, 0, 64).sample_seed(7) == SampleKey(1, 2).sample_seed(7)


@pytest.mark.parametrize(("square", "expected"), [("null", (64, 85)), ("50", (64, 64))])
def test_sides_replace_short_sides_or_the_square(
    coco_folder: Callable[..., SimpleNamespace], square: str, expected: tuple[int, int]
) -> None:
    settings = ["data.batch_sides=[32,64]", f"data.transforms.square={square}", "data.transforms.random_crop=0"]
    settings.append("data.transforms.size_divisor=1")
    data = build_train_data(config_of(coco_folder(), *settings))  # 64 x 48 pixels
    image, target = data[SampleKey(0, 0, side=64)]
    assert tuple(image.shape[-2:]) == expected == target.size
    image, _ = data[SampleKey(0, 0)]
    assert tuple(image.shape[-2:]) == ((48, 64) if square == "null" else (50, 50))


def test_a_square_keeps_boxes_and_masks_on_their_pixels() -> None:
    check(SquareResize(128)(scene(80, 100, *THREE, masks=True)))
    assert SquareResize(33)(scene(80, 100, *THREE)).image.shape == (3, 33, 33)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.augment.mosaic=1.5", "data.augment.mosaic must be between 0 and 1"),
        ("data.augment.mosaic_offsets=[0.5]", "expected two numbers"),
        ("data.augment.mosaic_offsets=[0.5,1]", "at most 0.99"),
        ("data.augment.scale_jitter_range=[2,1]", "the smaller first"),
        ("data.augment.iou_crop_scale=[0,1]", "greater than 0"),
        ("data.augment.zoom_out_max=0.5", "zoom_out_max=0.5 must be 1 or more"),
        ("data.batch_sides=[480,500]", "data.batch_sides must be multiples of 32"),
        ("data.augment.until_epoch=3", r"until_epoch=3 must be greater than data\.plain_first_epochs=3"),
        ("data.augment.until_epoch=301", "and at most 300, the end of augmentation"),
        ("data.plain_last_epochs=297", "leave no epoch with augmentation in a run of train.epochs=300"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(None, ["data.plain_first_epochs=3", "data.augment.mosaic=0.5", setting])


def test_first_plain_epochs_keep_batch_sides() -> None:
    load_config(None, ["data.batch_sides=[64]", "data.plain_first_epochs=300"])
    with pytest.raises(InputError, match=r"leave no epoch with data\.batch_sides"):
        load_config(None, ["data.batch_sides=[64]", "data.plain_last_epochs=300"])


def test_mixup_needs_two_images_in_a_batch() -> None:
    with pytest.raises(InputError, match=r"train\.batch_size is 1"):
        load_config(None, ["data.mixup.prob=0.5", "train.batch_size=1"])


def test_data_sets_of_evaluation_are_not_augmented(coco_folder: Callable[..., SimpleNamespace]) -> None:
    folder = coco_folder()
    data = CocoDetection(folder.images, folder.annotations, transform=lambda sample: sample)
    assert data.augment is None
