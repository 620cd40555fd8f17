"""Batches are the same with any number of workers; unreadable images are replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Target
from detr_bf.data.batches import EpochBatches, SameSizeBatches, SampleKey
from detr_bf.data.coco import CocoDetection
from detr_bf.data.loader import make_loader
from detr_bf.data.transforms import train_transform

Factory = Callable[..., SimpleNamespace]
TRAINING = train_transform(
    short_sides=[40, 50, 60],
    max_size=100,
    horizontal_flip=0.5,
    random_crop=0.5,
    crop_short_sides=[40, 60],
    crop_min=20,
    crop_max=40,
)


def load(data: SimpleNamespace, batch_size: int = 2, workers: int = 0, epoch: int = 1, start: int = 0) -> list[Batch]:
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    chosen = EpochBatches(len(dataset), batch_size, seed=5, epoch=epoch, start_batch=start)
    return list(make_loader(dataset, chosen, collate=Batch.collate, workers=workers))


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.padding_mask, other.padding_mask)
        assert [target.image_id for target in one.targets] == [target.image_id for target in other.targets]
        for target, same in zip(one.targets, other.targets, strict=True):
            assert torch.equal(target.boxes, same.boxes)
            assert torch.equal(target.labels, same.labels)


def test_pixels_do_not_depend_on_workers_or_on_the_first_batch(coco_folder: Factory) -> None:
    data = coco_folder(num_images=9)
    alone = load(data)
    assert len(alone) == 4
    torch.manual_seed(1234)
    assert_same(load(data, workers=2), alone)
    assert_same(load(data, workers=2, start=1), alone[1:])


def test_another_epoch_sees_other_pixels(coco_folder: Factory) -> None:
    data = coco_folder(num_images=4)
    first, second = (
        {batch.targets[0].image_id: batch.images.shape for batch in load(data, batch_size=1, epoch=epoch)}
        for epoch in (1, 2)
    )
    assert first.keys() == second.keys()
    assert first != second


def test_fewer_images_than_a_batch(coco_folder: Factory) -> None:
    assert [len(batch) for batch in load(coco_folder(num_images=2), batch_size=8)] == [2]


@pytest.mark.parametrize("workers", [0, 1])
def test_iterating_leaves_the_global_generator_alone(coco_folder: Factory, workers: int) -> None:
    data = coco_folder(num_images=2)
    state = torch.get_rng_state()
    load(data, workers=workers)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named_without_a_traceback(coco_folder: Factory, workers: int) -> None:
    data = coco_folder(num_images=2)
    (data.images / "0002.png").write_bytes(b"broken")
    with pytest.raises(InputError) as caught:
        load(data, workers=workers)
    assert str(caught.value).startswith(f"image file {data.images / '0002.png'} cannot be used")
    assert "Traceback" not in str(caught.value)


class Interrupting(CocoDetection):
    """Data set that sends SIGINT to the loading process with every sample."""

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, Target]:
        os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(key)


def test_workers_outlive_ctrl_c(coco_folder: Factory) -> None:
    data = coco_folder(num_images=2)
    dataset = Interrupting(data.images, data.annotations, TRAINING)
    loader = make_loader(dataset, SameSizeBatches(dataset.sizes, 1), collate=Batch.collate, workers=1)
    assert len(list(loader)) == 2


def replacing(data: SimpleNamespace, **changes: object) -> CocoDetection:
    return CocoDetection(data.images, data.annotations, TRAINING, seed=5, replace_unreadable=True, **changes)


def load_all(dataset: CocoDetection, workers: int = 0, epoch: int = 1) -> list[Batch]:
    chosen = EpochBatches(len(dataset), 2, seed=5, epoch=epoch)
    return list(make_loader(dataset, chosen, collate=Batch.collate, workers=workers))


def test_another_image_replaces_an_unreadable_one(coco_folder: Factory) -> None:
    data = coco_folder(num_images=8)
    whole = load_all(replacing(data))
    assert [batch.replaced for batch in whole] == [()] * 4
    assert_same(
        whole,
        load(data),
    )
    broken = data.images / "0003.png"
    broken.write_bytes(b"broken")
    mended = load_all(replacing(data))
    for before, after in zip(whole, mended, strict=True):
        for target, other in zip(before.targets, after.targets, strict=True):
            if target.image_id == 3:
                assert other.image_id != 3
                assert other.file_name == f"{other.image_id:04d}.png"
                assert other.replaced.startswith(f"image file {broken} cannot be used")
            else:
                assert (other.image_id, other.replaced) == (target.image_id, "")
                assert torch.equal(other.boxes, target.boxes)
    [message] = [message for batch in mended for message in batch.to("cpu").replaced]
    assert str(broken) in message


def test_the_replacement_depends_only_on_seed_epoch_and_index(coco_folder: Factory) -> None:
    data = coco_folder(num_images=8)
    for image_id in (2, 3, 5, 8):
        (data.images / f"{image_id:04d}.png").unlink()
    alone = load_all(replacing(data))
    assert sum(len(batch.replaced) for batch in alone) == 4
    assert_same(load_all(replacing(data), workers=2), alone)
    samples = replacing(data)
    replacements = [samples[SampleKey(epoch, 1)][1].image_id for epoch in range(30)]
    assert set(replacements) == {1, 4, 6, 7}


def test_a_replacement_is_augmented_like_the_requested_image(coco_folder: Factory) -> None:
    """An image that is requested itself in the same epoch gets another augmentation."""
    data = coco_folder(num_images=2)
    sizes = [[replacing(data)[SampleKey(epoch, index)][1].size for index in range(2)] for epoch in range(10)]
    (data.images / "0001.png").unlink()
    samples = replacing(data)
    for epoch, (requested, _) in enumerate(sizes):
        _, target = samples[SampleKey(epoch, 0)]
        assert target.image_id == 2
        assert target.size == requested
    assert sum(first != second for first, second in sizes) > 3


def test_unreadable_masks_are_replaced_too(panoptic_folder: Factory) -> None:
    data = panoptic_folder(num_images=3)
    samples = replacing(data, masks=True, panoptic=data.panoptic)
    (data.panoptic / "0001_segments.png").write_bytes(b"broken")
    _, target = samples[SampleKey(0, 0)]
    assert target.image_id in (2, 3)
    assert "image 1, 0001.png has no usable masks" in target.replaced
    with pytest.raises(InputError, match="has no usable masks"):
        CocoDetection(data.images, data.annotations, TRAINING, masks=True, panoptic=data.panoptic)[SampleKey(0, 0)]


def test_only_reading_is_tried_with_another_image(coco_folder: Factory) -> None:
    def transform(sample: object) -> None:
        raise InputError("a fault of the transform")

    samples = replacing(coco_folder())
    samples.transform = transform
    with pytest.raises(InputError, match="a fault of the transform"):
        samples[SampleKey(0, 0)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_without_readable_images_is_refused(coco_folder: Factory, workers: int) -> None:
    data = coco_folder(num_images=2)
    for file in data.images.iterdir():
        file.unlink()
    with pytest.raises(InputError, match=r"image file .*000[12].png does not exist"):
        load_all(replacing(data), workers)
