"""Contrastive denoising against a loop over images, groups and objects, and its limits; DINO with any objects."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Target
from detr_bf.detectors import Options
from detr_bf.detectors.denoising import (
    DUMMY_BOX,
    EMPTY,
    ContrastiveDenoising,
    NoiseDraws,
    add_contrastive_noise,
    contrastive_slots,
    group_count,
)
from detr_bf.losses import Focal, HungarianMatcher, SetCriterion
from tests.detectors.tiny import (
    CHANNELS,
    DETECTORS,
    DIM,
    IMAGES,
    LAYERS,
    LOGITS,
    QUERIES,
    Averages,
    images,
    model,
    shaken,
)

CLASSES = 5


def targets(*counts: int) -> list[Target]:
    """Return one target per count, with boxes inside the image."""
    generator = torch.Generator().manual_seed(3)
    return [
        Target(
            image,
            torch.rand(count, 4, generator=generator) * 0.2 + 0.3,
            torch.randint(CLASSES, (count,), generator=generator),
            (1, 1),
            (1, 1),
        )
        for image, count in enumerate(counts)
    ]


def draws(images: int, slots: int, seed: int = 0) -> NoiseDraws:
    torch.manual_seed(seed)
    return NoiseDraws.draw((images, slots), CLASSES, torch.device("cpu"))


@pytest.mark.parametrize(("counts", "groups"), [((3, 1), 2), ((0, 4), 3), ((1,), 1)])
def test_every_slot_against_a_loop(counts: tuple[int, ...], groups: int) -> None:
    given, most = targets(*counts), max(counts)
    size = groups * 2 * most
    drawn = draws(len(counts), size)
    found = add_contrastive_noise(contrastive_slots(given, groups), drawn, label_noise=0.8, box_noise=0.4)
    assert found.labels.shape == (len(counts), size)
    for image, target in enumerate(given):
        for slot in range(size):
            index, negative = slot % most, slot // most % 2
            if index >= counts[image]:
                assert found.labels[image, slot] == EMPTY
                assert found.objects[image, slot] == -1
                assert not found.boxes[image, slot].any()
                continue
            changed = drawn.change[image, slot] < 0.4
            assert found.labels[image, slot] == (drawn.label[image, slot] if changed else target.labels[index])
            assert found.objects[image, slot] == (-1 if negative else index)
            x, y, w, h = target.boxes[index].tolist()
            corners = []
            for side, (start, length) in enumerate([(x - w / 2, w), (y - h / 2, h), (x + w / 2, w), (y + h / 2, h)]):
                distance = (drawn.distance[image, slot, side].item() + negative) * 0.4 * length / 2
                corners.append(start + distance * (1 if drawn.sign[image, slot, side] else -1))
            x0, y0, x1, y1 = (min(max(corner, 0.0), 1.0) for corner in corners)
            expected = torch.tensor([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0])
            torch.testing.assert_close(found.boxes[image, slot], expected, rtol=0, atol=1e-6)


def test_without_noise_positives_are_the_objects() -> None:
    given = targets(2, 3)
    slots = contrastive_slots(given, 2)
    found = add_contrastive_noise(slots, draws(2, 12), label_noise=0.0, box_noise=0.0)
    assert torch.equal(found.labels, slots.labels)
    positive = found.objects >= 0
    torch.testing.assert_close(found.boxes[positive], slots.boxes[positive])
    assert [row[row >= 0].tolist() for row in found.objects] == [[0, 1] * 2, [0, 1, 2] * 2]


def test_corners_stay_in_the_image() -> None:
    target = targets(4)[0]
    target.boxes[:, :2] = torch.tensor([[0.1, 0.1], [0.9, 0.9], [0.1, 0.9], [0.5, 0.5]])
    found = add_contrastive_noise(contrastive_slots([target], 4), draws(1, 32), label_noise=0.5, box_noise=1.0)
    for corner in (found.boxes[..., :2] - found.boxes[..., 2:] / 2, found.boxes[..., :2] + found.boxes[..., 2:] / 2):
        assert corner.min() > -1e-6
        assert corner.max() < 1 + 1e-6


def test_a_batch_without_objects_has_no_slots_or_dummies() -> None:
    empty = contrastive_slots(targets(0, 0), 1)
    found = add_contrastive_noise(empty, draws(2, 0), label_noise=0.5, box_noise=0.4)
    assert found.labels.shape == (2, 0)
    assert found.boxes.shape == (2, 0, 4)
    assert found.objects.shape == (2, 0)
    dummies = contrastive_slots(targets(0, 0), 1, dummy=True)
    assert dummies.labels.tolist() == dummies.objects.tolist() == [[-1, -1]] * 2
    torch.testing.assert_close(dummies.boxes, torch.tensor(DUMMY_BOX).expand(2, 2, 4))
    noised = add_contrastive_noise(dummies, draws(2, 2), label_noise=1.0, box_noise=1.0)
    assert torch.equal(noised.labels, dummies.labels), "a dummy has no label to replace"
    assert not torch.isclose(noised.boxes, dummies.boxes).any()
    filled = contrastive_slots(targets(0, 2), 1, dummy=True)
    assert not filled.boxes[0].any(), "dummies are for batches without any object"


def test_number_of_groups() -> None:
    assert group_count(100, targets(0, 0)) == 1
    assert group_count(100, targets(1, 0)) == 100
    assert group_count(100, targets(7, 30)) == 3
    assert group_count(100, targets(7, 300)) == 1, "at least one group with more objects than denoising queries"


def test_labels_of_one_and_of_a_thousand_classes() -> None:
    for classes in (1, 1000):
        drawn = NoiseDraws.draw((1, 4000), classes, torch.device("cpu"))
        assert drawn.label.min() == 0
        assert drawn.label.max() < classes
        assert len(drawn.label.unique()) > classes * 0.95


def with_objects(*counts: int, classes: int = 4) -> Batch:
    """Return the tiny images with objects of ``classes`` classes."""
    given = [replace(target, labels=target.labels % classes) for target in targets(*counts)]
    return replace(images(), targets=tuple(given))


def criterion() -> SetCriterion:
    return SetCriterion(Focal(), HungarianMatcher(Focal()))


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (1, 1), (3, 2), (25 * QUERIES, 1)], ids=str)
@pytest.mark.parametrize("classes", [1, 1000])
def test_dino_with_any_number_of_objects_and_classes(counts: tuple[int, ...], classes: int) -> None:
    module = shaken(model("dino", num_logits=classes, dropout=0.0), std=0.1).train()
    batch = with_objects(*counts, classes=classes)
    outputs = module(batch)
    ((group, predicted),) = outputs.groups
    size = 2 * max(counts) * group.parts
    assert group.parts == (max(1, 100 // max(counts)) if any(counts) else 1)
    assert predicted.logits.shape == (LAYERS, IMAGES, size, classes)
    report = criterion()(outputs, batch.targets)
    denoising = {name: loss for name, loss in report.losses.items() if "_dn" in name}
    assert len(denoising) == 3 * LAYERS
    assert all((loss > 0) == any(counts) for loss in denoising.values())
    report.total.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_dino_draws_classes_from_a_larger_book_of_labels() -> None:
    make = partial(DETECTORS["dino"].make, label_book=40, denoising=ContrastiveDenoising(label_noise=1.0))
    module = make(Averages(2), [CHANNELS] * 2, Options(LOGITS, DIM, 2, 1, 1, 12, num_queries=QUERIES)).train()
    labels = module.decoder.queries.labels
    assert labels.num_embeddings == 41
    criterion()(module(with_objects(3, 2)), with_objects(3, 2).targets).total.backward()
    assert labels.weight.grad[:LOGITS].any(1).all()
    assert not labels.weight.grad[LOGITS:].any()
    with pytest.raises(InputError, match=f"label_book=3 must be at least the number of classes, {LOGITS}"):
        partial(make, label_book=3)(Averages(2), [CHANNELS] * 2, Options(LOGITS, DIM, 2, 1, 1, 12))
