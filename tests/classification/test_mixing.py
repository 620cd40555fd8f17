from __future__ import annotations

import numpy as np
import pytest
import torch

from detr_bf.classification.mixing import BatchMix, MixedBatch
from detr_bf.data.batches import SampleKey
from detr_bf.errors import InputError
from detr_bf.labelled import ClassTargets, LabelledImage, LabelledImages

LABELS = [0, 1, 2, 3, 4, 0, 1, 2]


def batch(size: int = 8) -> LabelledImages:
    """Image i has the value i everywhere."""
    values = torch.arange(size, dtype=torch.float32)
    targets = ClassTargets(torch.tensor(LABELS[:size]), epoch=3)
    return LabelledImages(values.view(-1, 1, 1, 1).expand(-1, 3, 8, 8).clone(), targets, torch.arange(size))


def mix(**changes: float) -> BatchMix:
    return BatchMix(5, **{"mixup": 0.8, "cutmix": 1.0, "probability": 1.0, "switch": 0.5, "smoothing": 0.0, **changes})


def expected_shares(mixed: LabelledImages) -> torch.Tensor:
    """What each class has of the pixels, counted pixel by pixel from an image's own value and its partner's."""
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
        assert torch.equal(mixed.places, batch().places)


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
        made = MixedBatch(note, seed)([(SampleKey(*key), samples[key[1]]) for key in keys])
        assert made.places.tolist() == [key[1] for key in keys]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4
