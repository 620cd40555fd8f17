from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf.classification.augmentation import EvalTransform, TrainTransform
from detr_bf.classification.labelled_images import LabelledImageSet
from detr_bf.classification.mixing import BatchMix, MixedBatch, WithKeys
from detr_bf.classification.sources.splits import ArrayImages, FileImages, LabelledSplit, array_split, class_map_of
from detr_bf.data.batches import EpochBatches, SampleKey
from detr_bf.data.loader import make_loader
from detr_bf.errors import InputError
from detr_bf.labelled import LabelledImages

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
        erase=0.5,
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
    """Mixed batches of four."""
    batches = EpochBatches(len(data), 4, **{"seed": 5, "epoch": epoch, **settings})
    mix = BatchMix(3, mixup=0.8, cutmix=1.0, probability=1.0, switch=0.5, smoothing=0.1)
    return list(make_loader(WithKeys(data), batches, collate=MixedBatch(mix, 5), workers=workers))


def assert_same(first: list[LabelledImages], second: list[LabelledImages]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.places, other.places)
        assert one.targets.soft_labels is not None
        assert other.targets.soft_labels is not None
        assert torch.equal(one.targets.soft_labels, other.targets.soft_labels)
        assert one.replaced == other.replaced


def test_batches_do_not_depend_on_workers_or_on_where_one_starts() -> None:
    alone = load(in_memory(), repeats=2)
    assert [len(batch) for batch in alone] == [4, 4, 4]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert_same(load(in_memory(), workers=2, repeats=2), alone)
    assert_same(load(in_memory(), start_batch=1, repeats=2), alone[1:])
    assert all(not torch.equal(a.images, b.images) for a, b in zip(alone, load(in_memory(), epoch=2), strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_generators_of_the_training_alone(workers: int) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    load(in_memory(), workers=workers)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_copies_of_an_image_are_augmented_each_in_its_own_way() -> None:
    data = in_memory()
    first, second = (data[SampleKey(1, 3, copy)] for copy in range(2))
    assert first.place == second.place == 3
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
    monkeypatch.setattr("detr_bf.classification.labelled_images._MAX_BYTES", 0)
    slow = in_memory(transform=transform(crop, "", 16))
    assert isinstance(slow.images, ArrayImages)
    assert slow.images.pixels.shape == (12, 3, 10, 10)
    for place in range(12):
        assert torch.equal(quick[SampleKey(0, place)].pixels, slow[SampleKey(0, place)].pixels)


def test_evaluation_gives_every_image_as_it_is() -> None:
    plain = EvalTransform(
        (10, 10), share=1.0, keep_ratio=True, interpolation="bicubic", mean=[0.0] * 3, std=[1 / 255] * 3
    )
    data = in_memory(transform=plain)
    assert isinstance(data.images, ArrayImages)
    for place in range(12):
        torch.testing.assert_close(data[SampleKey(0, place)].pixels, data.images.pixels[place].float())


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
    assert 3 not in [place for batch in found for place in batch.places.tolist()]
    assert sum(batch.places.ne(other.places).sum() for batch, other in zip(found, whole, strict=True)) == 1
    sample = data[SampleKey(1, 3)]
    assert sample.label == data.labels[sample.place]


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
