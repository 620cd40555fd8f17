from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from detr_bf.data.samples.composite import (
    BACKGROUND,
    MAX_BOX_OVERLAP,
    MIN_VISIBLE,
    Sprite,
    area_of,
    box_overlap,
    compose,
    random_crop,
    rotate_and_fit,
)


def position_photo(width: int, height: int) -> Image.Image:
    """Photo whose red is the column and whose green is the row, scaled to 0 to 249."""
    columns, rows = np.meshgrid(np.arange(width) * 250 // width, np.arange(height) * 250 // height)
    return Image.fromarray(np.dstack([columns, rows, np.zeros_like(rows)]).astype(np.uint8))


@pytest.mark.parametrize(("width", "height", "channel"), [(500, 300, 0), (300, 500, 1), (400, 400, 0)])
def test_crops_of_the_splits_never_share_a_part_of_the_photograph(width: int, height: int, channel: int) -> None:
    photo = position_photo(width, height)
    rng = np.random.default_rng(0)
    train = np.stack([random_crop(area_of(photo, "train"), 48, rng) for _ in range(200)])[..., channel]
    val = np.stack([random_crop(area_of(photo, "val"), 48, rng) for _ in range(200)])[..., channel]
    assert train.max() < val.min()
    assert train.min() < 20  # both areas are used up to their outer edges
    assert val.max() > 230
    assert train.max() > 120


def test_areas_meet_without_overlap() -> None:
    photo = position_photo(501, 300)
    train, val = area_of(photo, "train"), area_of(photo, "val")
    assert train.box[2] == val.box[0]
    assert train.box[0] == 0
    assert val.box[2] == 501
    assert train.crop_side == val.crop_side


def disc(category_id: int, size: int, value: float) -> Sprite:
    rows, columns = np.mgrid[:size, :size] - (size - 1) / 2
    alpha = (np.hypot(rows, columns) <= size / 2).astype(np.float32)
    return Sprite(category_id, alpha, lambda under, rng: np.full_like(under, value))


@pytest.mark.parametrize("seed", range(20))
def test_every_object_keeps_its_visible_part(seed: int) -> None:
    sprites = [disc(i, size, 10 * i) for i, size in enumerate((40, 30, 30, 24, 24, 20, 20, 16), start=1)]
    scene = compose(np.full((64, 64, 3), 255, dtype=np.uint8), sprites, np.random.default_rng(seed))
    assert scene.category_ids[0] == 1
    for layer, category_id in enumerate(scene.category_ids):
        mask = scene.visible_mask(layer)
        assert mask.sum() >= MIN_VISIBLE * sprites[category_id - 1].solid.sum()
        assert (scene.image[mask] == 10 * category_id).all()
    assert (scene.image[scene.owner == BACKGROUND] == 255).all()


def test_objects_do_hide_each_other() -> None:
    sprites = [disc(1, 30, 0), disc(2, 30, 0), disc(3, 30, 0)]
    scenes = [compose(np.zeros((64, 64, 3), dtype=np.uint8), sprites, np.random.default_rng(i)) for i in range(10)]
    assert any(scene.visible_mask(0).sum() < sprites[0].solid.sum() for scene in scenes)


def test_a_sprite_without_a_fair_place_is_left_out() -> None:
    scene = compose(np.zeros((32, 32, 3), dtype=np.uint8), [disc(1, 30, 50), disc(2, 30, 90)], np.random.default_rng(0))
    assert scene.category_ids == (1,)
    assert (scene.image != 90).all()


def test_box_overlap_is_relative_to_the_smaller_box() -> None:
    large, small = (slice(0, 10), slice(0, 10)), (slice(8, 12), slice(8, 12))
    assert box_overlap(large, small) == pytest.approx(4 / 16)
    assert box_overlap(small, large) == pytest.approx(4 / 16)
    assert box_overlap(large, (slice(10, 12), slice(0, 2))) == 0
    assert 0 < MAX_BOX_OVERLAP < 1


def test_soft_edges_blend() -> None:
    sprite = Sprite(1, np.full((4, 4), 0.25, dtype=np.float32), lambda under, rng: np.full_like(under, 200))
    scene = compose(np.full((8, 8, 3), 100, dtype=np.uint8), [sprite], np.random.default_rng(0))
    assert (scene.image == 125).all(axis=-1).sum() == 16
    assert not scene.visible_mask(0).any()  # pixels covered by a quarter do not belong to the object


@pytest.mark.parametrize("degrees", [0.0, 15.0, -40.0])
@pytest.mark.parametrize("size", [20, 61])
def test_rotate_and_fit_is_tight(degrees: float, size: int) -> None:
    pixels = np.zeros((60, 80, 4), dtype=np.uint8)
    pixels[20:50, 10:70] = (200, 100, 50, 255)
    colors, alpha = rotate_and_fit(Image.fromarray(pixels), degrees, size)
    assert colors.shape == (*alpha.shape, 3)
    assert max(alpha.shape) == size
    solid = alpha >= 0.5
    assert solid[[0, 1]].any()
    assert solid[[-1, -2]].any()
    assert solid[:, [0, 1]].any()
    assert solid[:, [-1, -2]].any()
    assert np.abs(colors[alpha > 0.5] - (200, 100, 50)).max() < 30  # transparent black pixels do not darken the edges
