from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from detr_bf.data.coco import CocoDetection, SampleKey
from detr_bf.data.loader import EpochBatches, SameSizeBatches, make_loader
from detr_bf.data.transforms import train_transform
from detr_bf.errors import InputError
from detr_bf.structures import Batch, Target

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


def batches(num_samples: int, batch_size: int, **changes: object) -> list[list[SampleKey]]:
    settings = {"seed": 0, "epoch": 3, **changes}
    return list(EpochBatches(num_samples, batch_size, **settings))


def places(chosen: list[list[SampleKey]]) -> list[int]:
    return [key.place for batch in chosen for key in batch]


def test_an_epoch_is_a_seeded_permutation() -> None:
    order = places(batches(50, 5))
    assert sorted(order) == list(range(50))
    assert order == places(batches(50, 5))
    assert order != places(batches(50, 5, epoch=4))
    assert order != places(batches(50, 5, seed=1))
    assert {key.epoch for batch in batches(50, 5) for key in batch} == {3}


@pytest.mark.parametrize("start", [0, 1, 7, 12, 13])
def test_an_epoch_resumes_at_any_batch(start: int) -> None:
    assert batches(50, 4, start_batch=start) == batches(50, 4)[start:]
    assert len(EpochBatches(50, 4, seed=0, epoch=3, start_batch=start)) == max(0, 12 - start)


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "sizes"), [(10, 4, [4, 4]), (3, 4, [3]), (8, 4, [4, 4]), (1, 1, [1])]
)
def test_incomplete_batches(num_samples: int, batch_size: int, sizes: list[int]) -> None:
    assert [len(batch) for batch in batches(num_samples, batch_size)] == sizes


def test_evaluation_puts_images_of_one_size_together_and_each_comes_once() -> None:
    sizes = [(4, 6), (6, 4), (4, 6), None, (4, 6), None, (6, 4), (4, 6)]
    chosen = [[key.place for key in batch] for batch in SameSizeBatches(sizes, 2)]
    assert chosen == [[0, 2], [4, 7], [1, 6], [3], [5]]
    assert [[key.place for key in batch] for batch in SameSizeBatches(sizes, 1)] == [
        [i] for i in (0, 2, 4, 7, 1, 6, 3, 5)
    ]


def test_an_empty_batch_size_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1, got 0"):
        batches(3, 0)
    with pytest.raises(InputError, match="at least 1, got 0"):
        SameSizeBatches([], 0)


def load(data: SimpleNamespace, batch_size: int = 2, workers: int = 0, epoch: int = 1, start: int = 0) -> list[Batch]:
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    chosen = EpochBatches(len(dataset), batch_size, seed=5, epoch=epoch, start_batch=start)
    return list(make_loader(dataset, chosen, workers=workers))


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.padding_mask, other.padding_mask)
        assert [target.image_id for target in one.targets] == [target.image_id for target in other.targets]
        for target, same in zip(one.targets, other.targets, strict=True):
            assert torch.equal(target.boxes, same.boxes)
            assert torch.equal(target.labels, same.labels)


def test_pixels_do_not_depend_on_workers_or_on_where_one_starts(coco_folder: Factory) -> None:
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
    """Every sample comes with a Ctrl-C for the process that loads it."""

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, Target]:
        os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(key)


def test_workers_outlive_ctrl_c(coco_folder: Factory) -> None:
    data = coco_folder(num_images=2)
    dataset = Interrupting(data.images, data.annotations, TRAINING)
    loader = make_loader(dataset, SameSizeBatches(dataset.sizes, 1), workers=1)
    assert len(list(loader)) == 2
