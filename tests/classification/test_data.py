"""Labelled images and long-tailed subsets."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf.classification.augmentation import BatchMix, EvalTransform, TrainTransform, collate_mixed
from detr_bf.classification.batch import LabelledImages
from detr_bf.classification.data import (
    ArrayImages,
    FileImages,
    LabelledImageSet,
    LabelledSplit,
    array_split,
    class_map_of,
    kept_indices,
    long_tail_counts,
)
from detr_bf.common.errors import InputError
from detr_bf.data.batches import EpochBatches, SampleKey
from detr_bf.data.loader import make_loader

CLASSES = class_map_of(["a", "b", "c"])


def transform(crop: str = "resized", auto_augment: str = "rand-m9-mstd0.5-inc1", size: int = 8) -> TrainTransform:
    return TrainTransform(
        (size, size),
        crop=crop,
        area=[0.3, 1],
        padding=2,
        horizontal_flip=0.5,
        color_jitter=0.0,
        auto_augment=auto_augment,
        erase_prob=0.5,
        interpolation="bicubic",
        mean=[0.5] * 3,
        std=[0.25] * 3,
    )


def in_memory(count: int = 12, **changes: object) -> LabelledImageSet:
    pixels = torch.randint(0, 256, (count, 3, 10, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return LabelledImageSet(
        array_split(pixels, torch.arange(count) % 3, "numbers"),
        CLASSES,
        **{"transform": transform(), "seed": 5, **changes},
    )


def load(data: LabelledImageSet, workers: int = 0, epoch: int = 1, **settings: int) -> list[LabelledImages]:
    """Load mixed batches of four."""
    batches = EpochBatches(len(data), 4, **{"seed": 5, "epoch": epoch, **settings})
    mix = BatchMix(3, mixup=0.8, cutmix=1.0, probability=1.0, switch=0.5, smoothing=0.1)
    return list(make_loader(data, batches, collate=partial(collate_mixed, mix), workers=workers))


def assert_same(first: list[LabelledImages], second: list[LabelledImages]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.indices, other.indices)
        assert one.targets.soft_labels is not None
        assert other.targets.soft_labels is not None
        assert torch.equal(one.targets.soft_labels, other.targets.soft_labels)
        assert one.replaced == other.replaced


def test_batches_do_not_depend_on_workers_or_on_where_one_starts() -> None:
    alone = load(in_memory(), repeated_augment=2)
    assert [len(batch) for batch in alone] == [4, 4, 4]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert_same(load(in_memory(), workers=2, repeated_augment=2), alone)
    assert_same(load(in_memory(), start_batch=1, repeated_augment=2), alone[1:])
    assert all(not torch.equal(a.images, b.images) for a, b in zip(alone, load(in_memory(), epoch=2), strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_generators_of_the_training_alone(workers: int) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    load(in_memory(), workers=workers)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_copies_of_an_image_are_augmented_each_in_its_own_way() -> None:
    data = in_memory()
    first, second = (data[SampleKey(1, 3, copy)] for copy in range(2))
    assert first.index == second.index == 3
    assert first.label == second.label == 0
    assert not torch.equal(first.pixels, second.pixels)
    assert torch.equal(first.pixels, data[SampleKey(1, 3)].pixels)


def test_a_sample_knows_its_epoch() -> None:
    assert in_memory()[SampleKey(7, 3)].epoch == 7


@pytest.mark.parametrize("crop", ["padded", "none"])
def test_resizing_beforehand_changes_nothing(crop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = in_memory(transform=transform(crop, "", 16))
    assert isinstance(quick.images, ArrayImages)
    assert quick.images.pixels.shape == (12, 3, 16, 16)
    monkeypatch.setattr("detr_bf.classification.data._MAX_BYTES", 0)
    slow = in_memory(transform=transform(crop, "", 16))
    assert isinstance(slow.images, ArrayImages)
    assert slow.images.pixels.shape == (12, 3, 10, 10)
    for index in range(12):
        assert torch.equal(quick[SampleKey(0, index)].pixels, slow[SampleKey(0, index)].pixels)


def test_evaluation_gives_every_image_as_it_is() -> None:
    plain = EvalTransform(
        (10, 10), share=1.0, keep_ratio=True, interpolation="bicubic", mean=[0.0] * 3, std=[1 / 255] * 3
    )
    data = in_memory(transform=plain)
    assert isinstance(data.images, ArrayImages)
    for index in range(12):
        torch.testing.assert_close(data[SampleKey(0, index)].pixels, data.images.pixels[index].float())


def test_class_counts_and_labels() -> None:
    assert in_memory(10).class_counts == (4, 3, 3)
    assert in_memory(2).class_counts == (1, 1, 0)


def test_labels_outside_the_classes_are_refused() -> None:
    split = array_split(torch.zeros(3, 4, 4, dtype=torch.uint8), torch.tensor([0, 3, 4]), "numbers")
    with pytest.raises(InputError, match=r"numbers: 2 labels are outside the 3 classes.* the first is 3 of image 1"):
        LabelledImageSet(split, CLASSES, transform())
    with pytest.raises(InputError, match="numbers has no images"):
        LabelledImageSet(split.subset(torch.tensor([], dtype=torch.int64)), CLASSES, transform())


def on_disk(folder: Path, count: int = 8, replace_unreadable: bool = True) -> LabelledImageSet:
    folder.mkdir(exist_ok=True)
    names = [f"{number}.png" for number in range(count)]
    for number, name in enumerate(names):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 12, 3), np.uint8)).save(folder / name)
    split = LabelledSplit(FileImages(folder, names), torch.arange(count) % 3, str(folder))
    return LabelledImageSet(split, CLASSES, transform(), seed=5, replace_unreadable=replace_unreadable)


@pytest.mark.parametrize("workers", [0, 1])
def test_another_image_stands_in_for_one_that_cannot_be_read(tmp_path: Path, workers: int) -> None:
    data = on_disk(tmp_path)
    whole = load(data)
    (tmp_path / "3.png").write_bytes(b"broken")
    found = load(data, workers=workers)
    assert_same(found, load(data))
    assert [message for batch in whole for message in batch.replaced] == []
    [message] = [message for batch in found for message in batch.replaced]
    assert message.startswith(f"image file {tmp_path / '3.png'} cannot be used")
    assert 3 not in [index for batch in found for index in batch.indices.tolist()]
    assert sum(batch.indices.ne(other.indices).sum() for batch, other in zip(found, whole, strict=True)) == 1
    sample = data[SampleKey(1, 3)]
    assert sample.label == data.labels[sample.index]


def test_an_unreadable_image_is_told_where_none_may_stand_in(tmp_path: Path) -> None:
    data = on_disk(tmp_path, replace_unreadable=False)
    (tmp_path / "3.png").unlink()
    with pytest.raises(InputError, match=r"image file .*3.png does not exist"):
        load(data, workers=1)


def test_a_data_set_of_broken_images_ends(tmp_path: Path) -> None:
    data = on_disk(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(InputError, match="the file is empty"):
        data[SampleKey(0, 0)]


@pytest.mark.parametrize(
    ("n", "classes", "imbalance", "total"),
    [
        (500, 100, 10, 19573),
        (500, 100, 50, 12608),
        (500, 100, 100, 10847),
        (500, 100, 200, 9502),
        (5000, 10, 100, 12406),
        (5000, 10, 10, 20431),
    ],
)
def test_the_published_long_tails_of_cifar(n: int, classes: int, imbalance: float, total: int) -> None:
    """Sizes that papers report for CIFAR-10-LT and CIFAR-100-LT."""
    counts = long_tail_counts(n, classes, imbalance)
    assert sum(counts) == total
    assert counts[0] == n
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == int(n / imbalance)


@pytest.mark.parametrize("classes", [2, 3, 4, 7, 10, 11, 21, 100])
def test_counts_are_those_of_exact_arithmetic(classes: int) -> None:
    """Class c keeps the largest m with m ** (K - 1) * imbalance ** c <= n ** (K - 1)."""
    steps = classes - 1
    for n in [*range(1, 60), 98, 103, 107, 161, 500, 1280, 5000, 6000]:
        for imbalance in {
            value for value in (1, 1.1, 1.5, 2, 3, 4, 8, 10, 12.5, 27, 49, 50, 100, 200, 256, n) if value <= n
        }:
            exact, whole = Fraction(str(imbalance)), n**steps
            for index, kept in enumerate(long_tail_counts(n, classes, imbalance)):
                assert kept**steps * exact**index <= whole, (n, imbalance, index)
                assert (kept + 1) ** steps * exact**index > whole, (n, imbalance, index)


@pytest.mark.parametrize("n", [49, 98, 103, 107, 161])
def test_as_many_times_fewer_as_there_are_images_leaves_one(n: int) -> None:
    assert long_tail_counts(n, 10, n)[-1] == 1


def test_no_imbalance_and_a_single_class_keep_all() -> None:
    assert long_tail_counts(7, 3, 1) == [7, 7, 7]
    assert long_tail_counts(7, 1, 100) == [7]


@pytest.mark.parametrize("imbalance", [0.5, 0, -1, float("nan"), float("inf")])
def test_an_imbalance_below_one_is_refused(imbalance: float) -> None:
    with pytest.raises(InputError, match=r"imbalance must be 1 or more and finite, got"):
        long_tail_counts(7, 3, imbalance)


def test_a_tail_without_images_is_refused() -> None:
    with pytest.raises(InputError, match="imbalance=100 leaves no image of the last class, of 50 in the first"):
        long_tail_counts(50, 10, 100)


LABELS = torch.tensor([i * 7 % 5 for i in range(200)])  # 40 of each of 5 classes


def counts_of(indices: torch.Tensor) -> list[int]:
    return torch.bincount(LABELS[indices], minlength=5).tolist()


def test_the_order_says_which_classes_are_the_head() -> None:
    indices = kept_indices(LABELS, 5, imbalance=10, order=[3, 1, 4, 0, 2])
    counts = long_tail_counts(40, 5, 10)
    assert counts == [40, 22, 12, 7, 4]
    assert [counts_of(indices)[label] for label in (3, 1, 4, 0, 2)] == counts
    assert counts_of(kept_indices(LABELS, 5, imbalance=10)) == counts


def test_what_is_kept_stays_in_order_and_is_always_the_same() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    first = kept_indices(LABELS, 5, imbalance=10)
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(first, kept_indices(LABELS, 5, imbalance=10))
    assert torch.equal(first, first.unique())
    assert first.tolist()[:6] == [0, 5, 8, 10, 12, 15], "the same in every version"


def test_another_seed_keeps_other_images_in_the_same_numbers() -> None:
    drawn = [kept_indices(LABELS, 5, per_class=10, seed=seed) for seed in (0, 1, 2**32 + 1, 2**63 - 1)]
    assert torch.equal(drawn[0], kept_indices(LABELS, 5, per_class=10))
    assert all(counts_of(indices) == [10] * 5 for indices in drawn)
    shared = len(set(drawn[0].tolist()) & set(drawn[1].tolist()))
    assert 0 < shared < 30, "a quarter of 50 is expected"
    assert not torch.equal(drawn[0], drawn[3])
    tails = [kept_indices(LABELS, 5, imbalance=10, seed=seed) for seed in (0, 1)]
    assert counts_of(tails[0]) == counts_of(tails[1])
    assert not torch.equal(*tails)


def test_a_larger_imbalance_keeps_some_of_what_a_smaller_one_keeps() -> None:
    small, large = (set(kept_indices(LABELS, 5, imbalance=value).tolist()) for value in (2, 20))
    assert large < small


def test_those_kept_are_spread_over_the_class() -> None:
    """Neighbours in a data set are often similar."""
    labels = torch.zeros(1000, dtype=torch.int64)
    indices = kept_indices(labels, 1, per_class=100).float()
    assert 350 < float(indices.mean()) < 650


def test_a_limit_for_each_class_takes_all_of_a_smaller_one() -> None:
    labels = torch.tensor([0] * 10 + [1] * 3 + [2] * 10)
    assert torch.bincount(labels[kept_indices(labels, 3, per_class=5)]).tolist() == [5, 3, 5]
    assert len(kept_indices(labels, 3)) == 23


def test_the_limit_comes_before_the_tail_and_small_classes_stay_whole() -> None:
    labels = torch.tensor([0] * 100 + [1] * 3 + [2] * 100)
    kept = kept_indices(labels, 3, per_class=40, imbalance=4)
    assert torch.bincount(labels[kept]).tolist() == [40, 3, 10]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 1, 2, 3, 3], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(InputError, match="order must name each of the 5 classes, 0 to 4, once; got"):
        kept_indices(LABELS, 5, order=order)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="per_class must be 1 or more, got 0"):
        kept_indices(LABELS, 5, per_class=0)
