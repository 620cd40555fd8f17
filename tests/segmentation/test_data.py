"""Files of images and maps, their augmentation, and the messages for those that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.data.batches import SampleKey
from detr_bf.segmentation.assembly import build_segmentation_data
from detr_bf.segmentation.augmentation import EvalResize, TrainCrop
from detr_bf.segmentation.batch import IGNORE, SegmentationBatch
from detr_bf.segmentation.data import PixelSplits, read_pixel_splits
from detr_bf.tasks import task_of
from tests.segmentation.maps import NAMES, SIZE, TINY, pairs, settings_of, write_maps, write_panoptic_maps


def splits_of(root: Path, *settings: str, panoptic: bool = False) -> PixelSplits:
    return read_pixel_splits(
        load_config(None, [*settings_of(root, panoptic=panoptic), *settings], task="segmentation").data
    )


def crop(**changes: object) -> TrainCrop:
    plain = {"short_side": 20, "max_size": 100, "scales": (1.0, 1.0), "crop": 16, "max_share": 1.0}
    return TrainCrop(**{**plain, "horizontal_flip": 0.0, "photometric": False, **changes})  # type: ignore[arg-type]


def test_maps_of_classes_are_read_as_written(tmp_path: Path) -> None:
    write_maps(tmp_path)
    found = splits_of(tmp_path)
    assert found.class_map.names == NAMES
    for index, (image, labels) in enumerate(pairs(8, seed=1)):
        pixels, classes = found.val.read(index)
        assert np.array_equal(pixels.permute(1, 2, 0), image)
        assert np.array_equal(classes, labels)


def test_values_below_the_first_class_and_the_ignored_one_have_no_class(tmp_path: Path) -> None:
    write_maps(tmp_path, first_class=1)
    values = np.array([[0, 1, 2], [3, 254, 1]], dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "labels/val/0.png")
    found = splits_of(tmp_path, "data.first_class=1", "data.ignore=254")
    assert found.val.read_labels(0).tolist() == [[IGNORE, 0, 1], [2, IGNORE, 0]]


def test_a_palette_png_holds_its_indices(tmp_path: Path) -> None:
    write_maps(tmp_path)
    labels = pairs(1, seed=1)[0][1]
    image = Image.fromarray(labels, mode="P")
    image.putpalette([200, 40, 40, 40, 200, 40, 40, 40, 200])
    image.save(tmp_path / "labels/val/0.png")
    assert np.array_equal(splits_of(tmp_path).val.read_labels(0), labels)


def test_panoptic_maps_are_merged_to_classes(tmp_path: Path) -> None:
    write_panoptic_maps(tmp_path)
    found = splits_of(tmp_path, panoptic=True)
    assert found.class_map.category_ids == (10, 20, 30)
    for index, (_, labels) in enumerate(pairs(4, seed=0)):
        assert np.array_equal(found.train.read_labels(index), labels)


def test_names_may_differ_by_their_ends(tmp_path: Path) -> None:
    write_maps(tmp_path, count=2)
    for split in ("train", "val"):
        for number in range(2):
            (tmp_path / f"images/{split}/{number}.png").rename(tmp_path / f"images/{split}/{number}_photo.png")
            (tmp_path / f"labels/{split}/{number}.png").rename(tmp_path / f"labels/{split}/{number}_ids.png")
    ends = [
        f"data.{split}.{key}"
        for split in ("train", "val")
        for key in ("image_suffix=_photo.png", "label_suffix=_ids.png")
    ]
    found = splits_of(tmp_path, *ends)
    assert found.train.names == ("0_photo.png", "1_photo.png")
    assert found.train.label_names == ("0_ids.png", "1_ids.png")


def grey(values: np.ndarray) -> Callable[[Path], None]:
    return lambda root: Image.fromarray(values).save(root / "labels/val/3.png")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (grey(np.zeros((20, 30), np.uint8)), r"3\.png has 30 x 20 pixels \(width x height\), its image 28 x 20"),
        (grey(np.full(SIZE, 3, np.uint8)), r"has the values 3; expected classes from 0 to 2, or data\.ignore=255"),
        (
            grey(np.zeros((*SIZE, 3), np.uint8)),
            "is a RGB image; expected a grey or palette PNG whose values are classes",
        ),
        (grey(np.zeros(SIZE, np.uint16)), "image of 16 bits; expected a grey or palette PNG"),
        (lambda root: (root / "labels/val/3.png").write_bytes(b"no image"), "3.png cannot be read"),
        (lambda root: (root / "images/val/3.png").write_bytes(b"no image"), "the image cannot be decoded"),
    ],
    ids=["size", "value", "colour", "deep", "damaged map", "damaged image"],
)
def test_a_bad_file_is_found_before_training(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    write_maps(tmp_path)
    damage(tmp_path)
    task = task_of(load_config(None, [*settings_of(tmp_path), *TINY], task="segmentation"))
    with pytest.raises(InputError, match=f"(?s)the data cannot be trained on.*{message}"):
        task.check()


def test_sizes_that_differ_are_told_when_an_image_is_read(tmp_path: Path) -> None:
    write_maps(tmp_path)
    grey(np.zeros((20, 30), np.uint8))(tmp_path)
    with pytest.raises(InputError, match=r"has 30 x 20 pixels \(width x height\), its image 28 x 20"):
        splits_of(tmp_path).val.read(3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.train.images=''"], r"data\.train\.images and data\.train\.labels must be given"),
        (["data.classes=''"], "exclude each other, and one of them is needed"),
        (["data.val.annotations=x.json"], "must both be given, or neither"),
        (["data.classes=missing.txt"], "missing.txt cannot be read"),
        (["data.val.labels=nowhere"], "there is no folder nowhere"),
        (["data.val.label_suffix=.jpg"], r"8 of 8 images have no map: there is no file for .*0\.jpg"),
        (["data.val.image_suffix=_photo.png"], "has no images that end with _photo.png"),
        (["data.first_class=253"], "has 3 classes, expected from 2 to 2"),
    ],
)
def test_settings_that_find_no_data_are_refused(settings: list[str], message: str, tmp_path: Path) -> None:
    write_maps(tmp_path)
    with pytest.raises(InputError, match=message):
        splits_of(tmp_path, *settings)


def test_checks_count_what_has_no_class(tmp_path: Path) -> None:
    write_maps(tmp_path)
    for path in (tmp_path / "labels/val").iterdir():
        Image.fromarray(np.full(SIZE, 255, np.uint8)).save(path)
    (tmp_path / "images/val/0.png").write_bytes((tmp_path / "images/train/0.png").read_bytes())
    report = task_of(load_config(None, [*settings_of(tmp_path), *TINY], task="segmentation")).examine()
    assert not report.errors
    assert {(each.split, each.code, each.count) for each in report.warnings} == {
        ("val", "map-empty", 8),
        ("val", "class-absent", 3),
        ("train, val", "train-val-overlap", 1),
    }
    assert "100.0% of the pixels without a class" in report.contents[1]


def test_image_and_map_are_cropped_and_flipped_together() -> None:
    """The first channel of the image is the map, without interpolation at a scale of 1."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 200, (20, 40), generator=generator, dtype=torch.uint8)
    for seed in range(8):
        torch.manual_seed(seed)
        image, found = crop(horizontal_flip=0.5)(labels.expand(3, -1, -1), labels)
        assert found.shape == (16, 16)
        assert torch.equal(image[0], found)
        places = labels.unfold(0, 16, 1).unfold(1, 16, 1)
        assert ((places == found) | (places == found.flip(-1))).flatten(2).all(-1).any()


def test_the_scale_is_random_within_its_limits() -> None:
    labels = torch.zeros(20, 40, dtype=torch.uint8)
    widths = set()
    for seed in range(20):
        torch.manual_seed(seed)
        widths.add(crop(scales=(0.5, 2.0), crop=1000)(labels.expand(3, -1, -1), labels)[1].shape[1])
    assert 20 <= min(widths) < 30
    assert 60 < max(widths) <= 80


def test_crops_of_one_class_are_avoided() -> None:
    labels = torch.zeros(20, 200, dtype=torch.uint8)
    labels[:, 100:] = 1
    both = 0
    for seed in range(10):
        torch.manual_seed(seed)
        both += len(
            crop(crop=100, short_side=20, max_size=200, max_share=0.75)(labels.expand(3, -1, -1), labels)[1].unique()
        )
    assert both == 20


def test_evaluation_resizes_the_image_alone() -> None:
    labels = torch.zeros(20, 40, dtype=torch.uint8)
    image, same = EvalResize(30, 50)(labels.expand(3, -1, -1), labels)
    assert image.shape == (3, 25, 50)
    assert same is labels


def test_augmentation_depends_on_seed_epoch_and_index_alone(tmp_path: Path) -> None:
    write_maps(tmp_path)
    data = build_segmentation_data(load_config(None, [*settings_of(tmp_path), *TINY], task="segmentation")).train
    before = torch.get_rng_state()
    first, again, other = (data[SampleKey(epoch, 3)] for epoch in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.image, again.image)
    assert first.image.shape != other.image.shape or not torch.equal(first.image, other.image)


def test_a_batch_survives_a_capture(tmp_path: Path) -> None:
    write_maps(tmp_path)
    data = build_segmentation_data(load_config(None, [*settings_of(tmp_path), *TINY], task="segmentation")).train
    batch = SegmentationBatch.collate([data[SampleKey(0, index)] for index in range(3)])
    again = SegmentationBatch.from_dict(batch.to_dict())
    assert again.names == batch.names == ("0.png", "1.png", "2.png")
    assert all(torch.equal(a, b) for a, b in zip(again.targets, batch.targets, strict=True))
    assert again.fits(3)
    assert not again.fits(1)
