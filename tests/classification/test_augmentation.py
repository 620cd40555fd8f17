"""Augmentation of images, mixup and CutMix."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf.classification.augmentation import (
    BatchMix,
    EvalTransform,
    Normalize,
    Resize,
    TrainTransform,
    centre,
    collate_mixed,
    cutout,
    seeded,
    shifted,
)
from detr_bf.classification.batch import ClassTargets, LabelledImage, LabelledImages
from detr_bf.common.errors import InputError
from detr_bf.data.batches import SampleKey

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.5]
EVERYTHING = {
    "crop": "resized",
    "area": [0.08, 1.0],
    "padding": 0,
    "horizontal_flip": 0.5,
    "color_jitter": 0.3,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "erase_prob": 0.5,
}
NOTHING = {"crop": "none", "horizontal_flip": 0.0, "color_jitter": 0.0, "auto_augment": "", "erase_prob": 0.0}


def train_transform(size: tuple[int, int] = (16, 16), **changes: object) -> TrainTransform:
    return TrainTransform(size, interpolation="bicubic", mean=MEAN, std=STD, **{**EVERYTHING, **changes})


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def states() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()


SETTINGS = [
    {},
    {"crop": "padded", "padding": 3},
    {"auto_augment": "augmix-m3-w3"},
    {"auto_augment": "original"},
    {"auto_augment": "v0"},
    {"auto_augment": "cifar10", "cutout": 8},
    {**NOTHING, "cutout": 5},
    {"auto_augment": "", "crop": "none"},
    {**NOTHING, "crop": "padded", "padding": 3, "horizontal_flip": 0.5},
    {**NOTHING, "erase_prob": 1.0},
]


@pytest.mark.parametrize("changes", SETTINGS)
def test_pixels_are_a_function_of_the_seed_alone(changes: dict[str, object]) -> None:
    transform, pixels = train_transform(**changes), noise(3, 24, 20)
    given = pixels.clone()
    first = [transform(pixels, seed) for seed in range(12)]
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = states()
    again = [transform(pixels, seed) for seed in reversed(range(12))][::-1]
    assert states() == before, "the random generators of the training are untouched"
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert torch.equal(pixels, given), "and so is the image"
    assert len({tuple(image.flatten().tolist()) for image in first}) > 5
    assert all(image.shape == (3, 16, 16) and image.dtype == torch.float32 for image in first)


@pytest.mark.parametrize("numpy", [False, True])
def test_generators_are_restored_after_an_error(numpy: bool) -> None:
    before = states()

    def fail() -> None:
        with seeded(2**64 - 1, numpy=numpy):
            random.random()
            np.random.rand() if numpy else None
            torch.rand(1)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert states() == before


def test_seeded_numbers_are_the_same_every_time() -> None:
    drawn = []
    for seed in (7, 8, 7):
        with seeded(seed):
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))


def test_without_augmentation_training_sees_the_normalised_image() -> None:
    pixels = noise(3, 16, 16)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(train_transform(**NOTHING)(pixels, 1), (pixels / 255 - mean) / std)


def test_grey_becomes_three_equal_channels_before_they_are_normalised() -> None:
    pixels = noise(1, 5, 6)
    torch.testing.assert_close(Normalize(MEAN, STD)(pixels), Normalize(MEAN, STD)(pixels.expand(3, -1, -1)))
    for changes in SETTINGS:
        assert train_transform(**changes)(pixels, 3).shape == (3, 16, 16)


def test_a_flip_comes_as_often_as_asked() -> None:
    pixels = noise(1, 16, 16)
    plain = Normalize(MEAN, STD)(pixels)
    transform = train_transform(**{**NOTHING, "horizontal_flip": 0.25})
    seen = [transform(pixels, seed) for seed in range(400)]
    flipped = sum(torch.equal(image, plain.flip(-1)) for image in seen)
    assert flipped + sum(torch.equal(image, plain) for image in seen) == 400
    assert 70 <= flipped <= 130, "100 on average, with a deviation of 9"


def test_a_padded_crop_shifts_by_every_distance_and_brings_in_black() -> None:
    pixels = noise(1, 16, 16)
    transform = train_transform(**{**NOTHING, "crop": "padded", "padding": 1})
    normalize = Normalize(MEAN, STD)
    expected = [normalize(shifted(pixels, down, right)) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    seen = [[torch.equal(transform(pixels, seed), one) for one in expected].index(True) for seed in range(150)]
    assert set(seen) == set(range(9))


@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, -1), (-3, 4), (5, 0), (0, -6), (9, 9)])
def test_a_shift_moves_every_pixel(down: int, right: int) -> None:
    pixels = noise(3, 5, 6)
    moved = shifted(pixels, down, right)
    for y in range(5):
        for x in range(6):
            inside = 0 <= y - down < 5 and 0 <= x - right < 6
            expected = pixels[:, y - down, x - right] if inside else torch.zeros(3, dtype=torch.uint8)
            assert torch.equal(moved[:, y, x], expected)


def test_erasing_comes_as_often_as_asked_and_leaves_the_rest() -> None:
    pixels = noise(3, 16, 16)
    plain, transform = Normalize(MEAN, STD)(pixels), train_transform(**{**NOTHING, "erase_prob": 0.5})
    changed = [(transform(pixels, seed) != plain).any(0) for seed in range(200)]
    assert 72 <= sum(bool(mask.any()) for mask in changed) <= 128
    for mask in changed:
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        assert int(mask.sum()) == len(rows) * len(columns), "the mixed region is a rectangle"


@pytest.mark.parametrize(("side", "row", "column"), [(4, 5, 6), (4, 0, 9), (5, 8, 0), (40, 3, 3)])
def test_a_black_square_is_around_its_pixel(side: int, row: int, column: int) -> None:
    pixels = noise(3, 9, 10) | 1
    found = cutout(pixels, side, row, column)
    for y in range(9):
        for x in range(10):
            inside = 0 <= y - (row - side // 2) < side and 0 <= x - (column - side // 2) < side
            assert torch.equal(found[:, y, x], torch.zeros(3, dtype=torch.uint8) if inside else pixels[:, y, x])


def test_cutout_blackens_a_square_of_every_image_at_any_place() -> None:
    transform, black = train_transform(**{**NOTHING, "cutout": 4}), (-torch.tensor(MEAN) / torch.tensor(STD))
    pixels, places = torch.full((3, 16, 16), 200, dtype=torch.uint8), set()
    for seed in range(200):
        dark = (transform(pixels, seed) - black[:, None, None]).abs().amax(0) < 1e-5
        assert 4 <= dark.sum() <= 16, "a quarter of the square is left in a corner"
        places.add(tuple(dark.nonzero()[0].tolist()))
    assert len(places) > 50


def test_colours_change_with_and_without_a_policy() -> None:
    grey = torch.full((3, 16, 16), 100, dtype=torch.uint8)
    jitter = train_transform(**{**NOTHING, "color_jitter": 0.4})
    assert len({float(jitter(grey, seed)[0, 0, 0]) for seed in range(10)}) > 5
    for seed in range(5):  # a policy replaces the colour jitter
        policies = [train_transform(auto_augment="rand-m3", color_jitter=jitter) for jitter in (0.0, 0.4)]
        assert torch.equal(*(policy(grey, seed) for policy in policies))


def test_the_strongest_level_of_a_policy_works() -> None:
    """At level 10, Posterize keeps 0 bits, which Pillow refuses from version 13 on."""
    transform, pixels = train_transform(auto_augment="rand-m10-inc1", erase_prob=0.0), noise(3, 16, 16)
    seen = [transform(pixels, seed) for seed in range(150)]
    assert all(bool(image.isfinite().all()) for image in seen)


@pytest.mark.parametrize("name", ["rand-x9", "augment", "augmix-x1", "randaugment-"])
def test_an_unknown_policy_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"auto_augment={re.escape(repr(name))} is no policy that timm knows"):
        train_transform(auto_augment=name)


def test_resizing_is_pillows() -> None:
    pixels = noise(3, 9, 12)
    resized = Resize((16, 8), "bilinear")(pixels)
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((8, 16), Image.Resampling.BILINEAR)
    assert torch.equal(resized.permute(1, 2, 0), torch.from_numpy(np.array(picture)))
    assert Resize((9, 12), "bicubic")(pixels) is pixels


def eval_transform(size: tuple[int, int], share: float, keep_ratio: bool) -> EvalTransform:
    return EvalTransform(size, share=share, keep_ratio=keep_ratio, interpolation="bilinear", mean=MEAN, std=STD)


def test_evaluation_looks_at_the_middle_of_an_image_of_its_own_ratio() -> None:
    pixels = noise(3, 40, 20)
    seen = eval_transform((8, 8), 0.8, keep_ratio=True)(pixels, 1)
    expected = Resize((20, 10), "bilinear")(pixels)[:, 6:14, 1:9]
    assert torch.equal(seen, Normalize(MEAN, STD)(expected))


def test_evaluation_sees_all_of_a_wide_image_where_training_does() -> None:
    pixels = noise(1, 28, 56)
    seen = eval_transform((32, 32), 1.0, keep_ratio=False)(pixels, 1)
    assert torch.equal(seen, Normalize(MEAN, STD)(Resize((32, 32), "bilinear")(pixels)))
    assert torch.equal(centre(pixels, (28, 56)), pixels)


@pytest.mark.parametrize("size", [(7, 5), (3, 100), (100, 3), (1, 1)])
def test_evaluation_of_odd_sizes(size: tuple[int, int]) -> None:
    assert eval_transform((16, 16), 0.875, keep_ratio=True)(noise(3, *size), 0).shape == (3, 16, 16)


def test_an_impossible_share_is_refused() -> None:
    with pytest.raises(InputError, match="eval_crop must be greater than 0 and at most 1, got 0"):
        eval_transform((16, 16), 0, keep_ratio=True)


LABELS = [0, 1, 2, 3, 4, 0, 1, 2]


def batch(size: int = 8) -> LabelledImages:
    """Images whose pixels all equal the index of the image."""
    values = torch.arange(size, dtype=torch.float32)
    targets = ClassTargets(torch.tensor(LABELS[:size]), epoch=3)
    return LabelledImages(values.view(-1, 1, 1, 1).expand(-1, 3, 8, 8).clone(), targets, torch.arange(size))


def mix(**changes: float) -> BatchMix:
    return BatchMix(5, **{"mixup": 0.8, "cutmix": 1.0, "probability": 1.0, "switch": 0.5, "smoothing": 0.0, **changes})


def expected_shares(mixed: LabelledImages) -> torch.Tensor:
    """Compute each class's share of the pixels, pixel by pixel from the values of an image and its partner."""
    count, soft_labels = len(mixed), torch.zeros(len(mixed), 5)
    for row, image in enumerate(mixed.images):
        other = count - 1 - row
        share = float((image.mean() - other) / (row - other)) if row != other else 1.0
        soft_labels[row, LABELS[row]] += share
        soft_labels[row, LABELS[other]] += 1 - share
    return soft_labels


@pytest.mark.parametrize("changes", [{"cutmix": 0.0}, {"mixup": 0.0}, {}])
def test_shares_are_those_of_the_pixels(changes: dict[str, float]) -> None:
    for seed in range(20):
        mixed = mix(**changes)(batch(), seed)
        assert mixed.targets.soft_labels is not None
        torch.testing.assert_close(mixed.targets.soft_labels, expected_shares(mixed), atol=1e-5, rtol=0)
        assert torch.equal(mixed.targets.labels, batch().targets.labels)
        assert mixed.targets.epoch == 3
        assert torch.equal(mixed.indices, batch().indices)


def test_mixup_blends_and_cutmix_cuts() -> None:
    blended, cut = mix(cutmix=0.0)(batch(), 1), mix(mixup=0.0)(batch(), 1)
    assert len(blended.images[0].unique()) == 1
    assert set(cut.images[0].unique().tolist()) == {0.0, 7.0}


def test_both_come_where_both_are_on() -> None:
    kinds = [len(mix(switch=0.25)(batch(), seed).images[0].unique()) for seed in range(200)]
    assert 25 <= kinds.count(2) <= 75


def test_a_batch_is_mixed_as_often_as_asked() -> None:
    plain = sum(torch.equal(mix(probability=0.25)(batch(), seed).images, batch().images) for seed in range(200))
    assert 125 <= plain <= 175


def test_smoothing_is_in_the_shares_mixed_or_not() -> None:
    soft_labels = mix(probability=0.0, smoothing=0.2)(batch(), 1).targets.soft_labels
    assert soft_labels is not None
    assert soft_labels[0].tolist() == pytest.approx([0.84, 0.04, 0.04, 0.04, 0.04])
    mixed = mix(smoothing=0.2)(batch(), 1).targets.soft_labels
    assert mixed is not None
    assert mixed.sum(1).tolist() == pytest.approx([1.0] * 8)
    assert float(mixed.min()) == pytest.approx(0.04)


@pytest.mark.parametrize("size", [1, 7])
def test_an_odd_last_image_keeps_its_pixels(size: int) -> None:
    mixed = mix()(batch(size), 2)
    assert torch.equal(mixed.images[-1], batch(size).images[-1])
    assert mixed.targets.soft_labels is not None
    assert mixed.targets.soft_labels[-1].tolist() == torch.eye(5)[LABELS[size - 1]].tolist()
    if size > 1:
        even = mix()(batch(6), 2)
        assert not torch.equal(mixed.images[:6], batch(7).images[:6])
        assert torch.equal(mixed.images[:6], even.images)


def test_the_given_batch_and_the_generators_are_untouched() -> None:
    np.random.seed(3)
    before, given = np.random.get_state()[1].tolist(), batch()
    first, second, other = (mix()(given, seed) for seed in (5, 5, 6))
    assert np.random.get_state()[1].tolist() == before
    assert torch.equal(given.images, batch().images)
    assert torch.equal(first.images, second.images)
    assert not torch.equal(first.images, other.images)


def test_nothing_to_mix_with_is_refused() -> None:
    with pytest.raises(InputError, match=r"mixup=0.0 and cutmix=0.0"):
        mix(mixup=0.0, cutmix=0.0)


def test_a_collated_batch_is_mixed_by_the_key_of_its_first_image() -> None:
    seeds: list[int] = []

    def note(given: LabelledImages, seed: int) -> LabelledImages:
        seeds.append(seed)
        return given

    samples = [LabelledImage(torch.full((3, 4, 4), i), i, i, 2) for i in range(3)]
    for keys, seed in [
        ([(0, 0, 0), (0, 1, 0)], 1),
        ([(0, 0, 0), (0, 2, 0)], 1),
        ([(1, 0, 0), (0, 1, 0)], 1),
        ([(0, 0, 1), (0, 1, 0)], 1),
        ([(0, 0, 0), (0, 1, 0)], 2),
    ]:
        keyed = [replace(samples[key[1]], seed=SampleKey(*key).sample_seed(seed)) for key in keys]
        made = collate_mixed(note, keyed)
        assert made.indices.tolist() == [key[1] for key in keys]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4
