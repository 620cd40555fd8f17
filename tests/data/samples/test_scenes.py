from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from scipy import ndimage

from detr_bf.common.errors import InputError
from detr_bf.data.masks import read_ids
from detr_bf.data.samples import scenes
from detr_bf.data.samples.composite import BACKGROUND
from detr_bf.data.samples.digits import load_photos, split_glyphs
from detr_bf.data.samples.scenes import (
    BRIGHTNESS,
    STUFF,
    STUFF_SHARES,
    TINT,
    build_scenes,
    random_panoptic_scene,
    random_regions,
    stuff_areas,
    tinted,
)
from tests.data.samples.conftest import Loaded, contents


@pytest.fixture(scope="module")
def built(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "load_glyphs", lambda: loaded)
        return build_scenes(tmp_path_factory.mktemp("sets") / "scenes", num_train=40, num_val=5, image_size=96)


def panoptic_of(folder: Path, split: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{split}_panoptic.json").read_text())
    return content


@pytest.mark.usefixtures("glyphs_once")
def test_two_builds_are_equal_byte_for_byte(tmp_path: Path) -> None:
    first = build_scenes(tmp_path / "a", num_train=6, num_val=3, image_size=64)
    second = build_scenes(tmp_path / "b", num_train=6, num_val=3, image_size=64)
    other_seed = build_scenes(tmp_path / "c", num_train=6, num_val=3, image_size=64, seed=1)
    assert contents(first) == contents(second)
    for name in ("train/train_000000.jpg", "train_panoptic/train_000000.png"):
        assert contents(first)[name] != contents(other_seed)[name]


@pytest.mark.usefixtures("glyphs_once")
def test_an_image_and_its_map_do_not_depend_on_how_many_are_made(tmp_path: Path) -> None:
    few = contents(build_scenes(tmp_path / "few", num_train=2, num_val=1, image_size=64))
    many = contents(build_scenes(tmp_path / "many", num_train=5, num_val=4, image_size=64))
    pictures = [name for name in few if name.endswith((".jpg", ".png"))]
    assert len(pictures) == 6
    assert all(many[name] == few[name] for name in pictures)


@pytest.mark.parametrize("split", ["train", "val"])
def test_segments_say_exactly_what_the_png_holds(built: Path, split: str) -> None:
    content = panoptic_of(built, split)
    assert len(content["annotations"]) == len(content["images"])
    for annotation in content["annotations"]:
        ids = read_ids(built / f"{split}_panoptic" / annotation["file_name"]).numpy()
        assert ids.shape == (96, 96)
        segments = annotation["segments_info"]
        assert sorted(segment["id"] for segment in segments) == np.unique(ids).tolist(), "no void and no unlisted id"
        for segment in segments:
            rows, columns = np.nonzero(ids == segment["id"])
            left, top = columns.min(), rows.min()
            assert segment["bbox"] == [left, top, columns.max() + 1 - left, rows.max() + 1 - top]
            assert segment["area"] == len(rows)
            assert segment["iscrowd"] == 0


def test_ten_digits_are_things_and_three_textures_are_stuff(built: Path) -> None:
    content = panoptic_of(built, "train")
    kinds = [(category["id"], category["name"], category["isthing"]) for category in content["categories"]]
    assert kinds == [(d + 1, str(d), 1) for d in range(10)] + [(11, "brick", 0), (12, "grass", 0), (13, "gravel", 0)]
    per_image = [[segment["category_id"] for segment in a["segments_info"]] for a in content["annotations"]]
    assert {category for categories in per_image for category in categories} == set(range(1, 14))
    stuff = [[category for category in categories if category > 10] for categories in per_image]
    assert {len(of_image) for of_image in stuff} == {1, 2, 3}
    assert all(len(of_image) == len(set(of_image)) for of_image in stuff), "stuff has one segment per class"
    assert {len(categories) - len(s) for categories, s in zip(per_image, stuff, strict=True)} == {1, 2, 3, 4}


def test_instance_masks_are_the_things_of_the_panoptic_map(built: Path) -> None:
    coco = COCO(str(built / "train.json"))
    assert sorted(coco.cats) == list(range(1, 11))
    panoptic = panoptic_of(built, "train")
    assert panoptic["images"] == coco.dataset["images"]
    for annotation in panoptic["annotations"]:
        ids = read_ids(built / "train_panoptic" / annotation["file_name"]).numpy()
        things = [segment for segment in annotation["segments_info"] if segment["category_id"] <= 10]
        objects = coco.imgToAnns[annotation["image_id"]]
        assert len(objects) == len(things)
        for found, segment in zip(objects, things, strict=True):
            assert found["category_id"] == segment["category_id"]
            assert (coco.annToMask(found).astype(bool) == (ids == segment["id"])).all()


def test_the_map_says_which_texture_every_pixel_has(loaded: Loaded) -> None:
    """Flat textures so different that no tint makes two look alike."""
    levels = {11: 20, 12: 60, 13: 180}
    areas = stuff_areas([Image.new("RGB", (300, 300), (level,) * 3) for level in levels.values()], "train")
    glyphs = split_glyphs(*loaded)["train"]
    for seed in range(12):
        scene = random_panoptic_scene(areas, glyphs, 96, (0.3, 0.5), np.random.default_rng(seed))
        assert scene.stuff is not None
        away_from_digits = ~ndimage.binary_dilation(scene.owner != BACKGROUND, iterations=4)
        for category_id, level in levels.items():
            pixels = scene.image[away_from_digits & (scene.stuff == category_id)]
            assert (pixels >= level * (1 - TINT) * BRIGHTNESS[0] - 1).all()
            assert (pixels <= level * (1 + TINT) * BRIGHTNESS[1] + 1).all()


def test_areas_of_the_splits_are_disjoint() -> None:
    textures = load_photos([f"{name}.png" for name in STUFF])
    train, val = stuff_areas(textures, "train"), stuff_areas(textures, "val")
    assert list(train) == list(val) == [11, 12, 13]
    for category_id in train:
        assert train[category_id].photo is val[category_id].photo
        assert train[category_id].box[2] <= val[category_id].box[0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_regions_are_large_and_have_smooth_boundaries(count: int) -> None:
    for seed in range(20):
        regions = random_regions(128, count, np.random.default_rng(seed))
        shares = np.bincount(regions.ravel(), minlength=count) / regions.size
        assert len(shares) == count
        assert shares.min() >= STUFF_SHARES[0] * (1 - STUFF_SHARES[1]) - 0.01
        ragged = ndimage.median_filter(regions, 5, mode="nearest") != regions
        assert ragged.mean() < 0.01


def test_regions_differ_from_image_to_image() -> None:
    first, second = (random_regions(64, 3, np.random.default_rng(seed)) for seed in (0, 1))
    assert (first != second).mean() > 0.2


def test_a_tint_scales_whole_channels_and_keeps_the_pattern() -> None:
    pixels = np.repeat(np.arange(10, 180, dtype=np.uint8)[:, None], 3, axis=1)[None]
    for seed in range(20):
        found = tinted(pixels, np.random.default_rng(seed)).astype(float)
        gains = found[0, -1] / pixels[0, -1]
        assert np.abs(found - pixels * gains).max() <= 1.1
        assert gains.max() / gains.min() <= (1 + TINT) / (1 - TINT) + 0.02


@pytest.mark.usefixtures("glyphs_once")
def test_a_complete_set_is_kept_and_one_without_a_map_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_scenes(tmp_path / "scenes", num_train=1, num_val=1, image_size=64)

    def unwanted() -> Loaded:
        raise AssertionError("built again")

    monkeypatch.setattr(scenes, "load_glyphs", unwanted)
    assert build_scenes(folder, num_train=1, num_val=1, image_size=64) == folder
    (folder / "val_panoptic" / "val_000000.png").unlink()
    with pytest.raises(InputError, match="lost files"):
        build_scenes(folder, num_train=1, num_val=1, image_size=64)


def test_a_missing_texture_says_what_to_install() -> None:
    with pytest.raises(InputError, match=r"lacks marble\.png.*pip install 'detr_bf\[demo\]'"):
        load_photos(["brick.png", "marble.png"])
