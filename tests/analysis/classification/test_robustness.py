"""Occlusion, missing patches and FGSM compared with loops, with classifiers whose accuracy is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.analysis.classification import EPSILONS, Pixels, fgsm, missing_patches, occlusion
from detr_bf.analysis.robustness import (
    SHARES,
    SIDES,
    attack,
    cover_centre,
    draw_fgsm,
    draw_missing_patches,
    draw_occlusion,
    drop_patches,
    loss_gradient,
)
from detr_bf.classification.batch import ClassTargets, LabelledImages
from detr_bf.common.errors import InputError
from tests.analysis.classification.examples import PIXELS, batches, convolutional
from tests.plugins import tiny

PLAIN = Pixels(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


class Brightness(nn.Module):
    """Classifier that returns class 1 if the mean pixel is brighter than ``threshold``."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(threshold, dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        brighter = images.mean((1, 2, 3)) - self.threshold
        return torch.stack([-brighter, brighter], 1)


def grey(*levels: float) -> LabelledImages:
    images = torch.tensor(levels, dtype=torch.float64).view(-1, 1, 1, 1).expand(-1, 3, 20, 20).clone()
    return LabelledImages(images, ClassTargets((images[:, 0, 0, 0] > 0.5).long()), torch.arange(len(levels)))


def test_dropped_patches_as_a_loop() -> None:
    [batch] = batches(2)
    order = torch.stack([torch.randperm(32) for _ in range(2)])
    fill = torch.tensor([-4.0, 7.0, 9.0], dtype=torch.float64)[:, None, None]
    found = drop_patches(batch.images, order, 0.3, (8, 4), fill)
    assert (found != batch.images).any(1).sum((1, 2)).tolist() == [round(0.3 * 32) * 32] * 2
    for image, original, indices in zip(found, batch.images, order.tolist(), strict=True):
        for number, index in enumerate(indices):
            row, column = 8 * (index // 8), 4 * (index % 8)
            patch = (slice(None), slice(row, row + 8), slice(column, column + 4))
            expected = fill.expand(3, 8, 4) if number < 10 else original[patch]
            torch.testing.assert_close(image[patch], expected, rtol=0, atol=0)


def test_covered_centre_as_a_loop_over_pixels() -> None:
    images = torch.randn(1, 3, 6, 8, dtype=torch.float64)
    fill = torch.tensor([-4.0, 7.0, 9.0], dtype=torch.float64)[:, None, None]
    for side, height, width in [(0.0, 0, 0), (0.25, 2, 2), (0.5, 3, 4), (1.0, 6, 8)]:
        found = cover_centre(images, side, fill)
        for row in range(6):
            for column in range(8):
                top, left = (6 - height) // 2, (8 - width) // 2
                inside = top <= row < top + height and left <= column < left + width
                expected = fill[:, 0, 0] if inside else images[0, :, row, column]
                assert torch.equal(found[0, :, row, column], expected)


def test_half_of_the_side_is_the_papers_square() -> None:
    """Table 8: the central 112 x 112 pixels of 224 x 224, counted in one image by a loop."""
    seen: list[Tensor] = []
    model = convolutional()
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(1, 3, 224, 224, generator=generator, dtype=torch.float64) + 2  # brighter than black
    occlusion(model, [LabelledImages(images, ClassTargets(torch.tensor([0])), torch.tensor([0]))], pixels=PIXELS)
    found = dict(zip(SIDES, seen, strict=True))[0.5]
    for channel, (mean, std) in enumerate(zip(PIXELS.mean, PIXELS.std, strict=True)):
        black = [(y, x) for y, x in (found[0, channel] < 0).nonzero().tolist()]
        assert black == [(y, x) for y in range(56, 168) for x in range(56, 168)]
        assert torch.all(found[0, channel, 56:168, 56:168] == -mean / std)
    assert torch.equal(seen[0], images)


def test_a_black_centre_darkens_images_as_it_should() -> None:
    """Images of 20 x 20 pixels lose round(20 side)^2 / 400 of their brightness."""
    levels = (0.95, 0.85, 0.65, 0.51, 0.1)
    curve = occlusion(Brightness(0.5), [grey(*levels)], pixels=PLAIN)
    expected = [sum((level * (1 - side**2) > 0.5) == (level > 0.5) for level in levels) / 5 for side in SIDES]
    assert curve.accuracies == pytest.approx(expected)
    assert curve.rows()[2] == {"side": 0.5, "accuracy": expected[2], "images": 5}
    [axes] = draw_occlusion({"run": curve}).axes
    assert list(axes.lines[0].get_xdata()) == [0, 25, 50, 75]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([100 * value for value in expected])


def test_black_patches_darken_images_as_they_should() -> None:
    """A grey image loses brightness in proportion to the black share, so each image changes class at a known share."""
    images = grey(0.95, 0.85, 0.75, 0.65, 0.1)
    curve = missing_patches(Brightness(0.5), [images], pixels=PLAIN, patch=2)
    expected = [
        sum((level * (1 - share) > 0.5) == (level > 0.5) for level in (0.95, 0.85, 0.75, 0.65, 0.1)) / 5
        for share in SHARES
    ]
    assert curve.accuracies == pytest.approx(expected)
    assert curve.mean == pytest.approx(sum(expected) / 10)
    assert (curve.strengths, curve.images) == (SHARES, 5)
    assert curve.rows()[3] == {"dropped": 0.3, "accuracy": expected[3], "images": 5}


def test_black_is_black_in_normalised_images() -> None:
    seen: list[Tensor] = []
    model = convolutional()
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    missing_patches(model, batches(2), pixels=PIXELS, patch=8, shares=[0.0, 0.5, 1.0])
    assert torch.equal(seen[0], batches(2)[0].images)
    shown = PIXELS.shown(seen[1])
    assert (shown.abs() < 1e-6).all(-1).sum((1, 2)).tolist() == [32 * 32 / 2] * 2
    assert PIXELS.shown(seen[2]).abs().max() < 1e-6


def test_the_same_patches_are_dropped_every_time_and_other_ones_in_every_image() -> None:
    def seen(seed: int) -> Tensor:
        found: list[Tensor] = []
        model = convolutional()
        model.register_forward_pre_hook(lambda module, args: found.append(args[0]))
        missing_patches(model, batches(2, 2), pixels=PIXELS, patch=8, shares=[0.3, 0.6], seed=seed)
        return torch.stack([(PIXELS.shown(images) == 0).all(-1) for images in found])

    first = seen(0)
    assert torch.equal(first, seen(0))
    assert not torch.equal(first, seen(1))
    assert not torch.equal(first[0, 0], first[0, 1])
    assert not torch.equal(first[0], first[2])
    assert (first[1] | ~first[0]).all(), "dropped patches stay dropped at larger shares"


@pytest.mark.parametrize(("make", "side"), [(tiny.vit, 8), (convolutional, 2)])
def test_patches_are_the_models_own_or_a_14th_of_the_image(make: Any, side: int) -> None:
    seen: list[Tensor] = []
    model = make()
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    missing_patches(model, batches(1), pixels=PIXELS, shares=[1 / (32 // side) ** 2])
    black = (PIXELS.shown(seen[0])[0].abs() < 1e-6).all(-1)
    assert black.sum() == side**2
    assert black.any(0).sum() == side
    with pytest.raises(InputError, match="5 x 5 pixels do not fill images of 32 x 32"):
        missing_patches(model, batches(1), pixels=PIXELS, patch=5)


def test_attacked_pixels_as_a_loop() -> None:
    [batch] = batches(2)
    gradient = torch.randn_like(batch.images)
    gradient[0, 0, 0] = 0
    found = attack(batch.images, gradient, 0.3, PIXELS)
    pixel, after = (PIXELS.shown(images).double() for images in (batch.images, found))
    for index in [(0, 0, 0), (0, 0, 5), (0, 9, 7), (1, 31, 31), (1, 3, 8)]:
        for channel in range(3):
            slope = float(gradient[index[0], channel, index[1], index[2]])
            step = math.copysign(0.3, slope) if slope else 0.0
            expected = min(max(float(pixel[(*index, channel)]) + step, 0.0), 1.0)
            assert float(after[(*index, channel)]) == pytest.approx(expected, abs=1e-6)
    low, high = (PIXELS.normalised(value, found) for value in (0.0, 1.0))
    assert (found >= low).all()
    assert (found <= high).all()


def test_the_gradient_is_that_of_the_cross_entropy_of_every_image() -> None:
    model, [batch] = convolutional(), batches(2)
    gradient = loss_gradient(model, batch)
    step = 1e-6
    for index in [(0, 0, 3, 3), (1, 2, 17, 8), (1, 1, 31, 0)]:
        up, down = batch.images.clone(), batch.images.clone()
        up[index] += step
        down[index] -= step
        row = index[0]
        losses = [
            F.cross_entropy(model(images)[row, None], batch.targets.labels[row, None]).item() for images in (up, down)
        ]
        assert gradient[index].item() == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-9)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_accuracy_falls_where_the_attack_reaches_the_threshold() -> None:
    images = grey(0.515, 0.52, 0.53, 0.6, 0.49, 0.2)  # distances to the threshold: 3.8, 5.1, 7.7, 25.5, 2.6, 76.5
    curve = fgsm(Brightness(0.5), [images], pixels=PLAIN, epsilons=[n / 255 for n in (0, 3, 4, 6, 8, 80)])
    assert [round(6 * accuracy) for accuracy in curve.accuracies] == [6, 5, 4, 3, 2, 0]
    assert curve.rows()[1]["epsilon"] == 3 / 255


def test_epsilon_0_is_the_accuracy_of_the_model() -> None:
    model, images = tiny.vit(), batches(4, 3)
    with torch.no_grad():
        right = sum(int((model(batch.images).argmax(1) == batch.targets.labels).sum()) for batch in images)
    curve = fgsm(model, images, pixels=PIXELS)
    assert curve.accuracies[0] == right / 7
    assert curve.strengths == EPSILONS
    for analysis in (occlusion, missing_patches):
        assert analysis(model, images, pixels=PIXELS).accuracies[0] == right / 7  # type: ignore[operator]


@pytest.mark.parametrize("epsilons", [[], [-0.1], [1.5]])
def test_impossible_epsilons_are_refused(epsilons: list[float]) -> None:
    with pytest.raises(InputError, match="from 0 to 1"):
        fgsm(convolutional(), batches(1), pixels=PIXELS, epsilons=epsilons)


def test_labels_outside_the_classes_and_no_images_are_refused() -> None:
    images = LabelledImages(batches(1)[0].images, ClassTargets(torch.tensor([9])), torch.tensor([0]))
    for analysis in (fgsm, occlusion, missing_patches):
        with pytest.raises(InputError, match="labels must be from 0 to 4"):
            analysis(convolutional(), [images], pixels=PIXELS)  # type: ignore[operator]
        with pytest.raises(InputError, match="got none"):
            analysis(convolutional(), [], pixels=PIXELS)  # type: ignore[operator]


def test_the_pictures_are_in_percent_and_255ths() -> None:
    curve = fgsm(convolutional(), batches(4), pixels=PIXELS, epsilons=[0, 2 / 255])
    [axes] = draw_fgsm({"run": curve}).axes
    assert list(axes.lines[0].get_xdata()) == [0, 2]
    assert list(axes.lines[0].get_ydata()) == [100 * value for value in curve.accuracies]
    curve = missing_patches(convolutional(), batches(4), pixels=PIXELS, shares=[0.0, 0.5])
    [axes] = draw_missing_patches({"run": curve}).axes
    assert list(axes.lines[0].get_xdata()) == [0, 50]
    assert axes.lines[0].get_label() == f"run, mean {100 * curve.mean:.1f}"
