"""Denoising queries of DN-DETR and DINO: numbers of objects, streams, evaluation, and ranks without objects."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from detr_bf.common import distributed
from detr_bf.common.structures import Batch, Target
from detr_bf.detectors import Detector
from detr_bf.detectors.dn_detr import Noise, noised
from detr_bf.engine.step import TrainingStep, wrap_ddp
from detr_bf.losses import Focal, HungarianMatcher, LossReport, SetCriterion
from tests.detectors.tiny import IMAGES, LAYERS, LOGITS, QUERIES, batch_former, images, model, shaken
from tests.processes import run_together

GROUPS = 2  # of the tiny DN-DETR
both = pytest.mark.parametrize("name", ["dn_detr", "dino"])


def with_objects(*counts: int, classes: int = LOGITS) -> Batch:
    """Return the tiny images with random objects."""
    generator = torch.Generator().manual_seed(5)
    targets = []
    for number, count in enumerate(counts):
        boxes = 0.3 + 0.3 * torch.rand(count, 4, generator=generator)
        targets.append(Target(number, boxes, torch.randint(classes, (count,), generator=generator), (32, 48), (32, 48)))
    return replace(images(), targets=tuple(targets))


def criterion() -> SetCriterion:
    return SetCriterion(Focal(), HungarianMatcher(Focal()))


def trained(name: str = "dn_detr", **changes: object) -> Detector:
    return shaken(model(name, dropout=0.0, **changes), std=0.1).train()


def loss_of(module: Detector, batch: Batch) -> LossReport:
    return criterion()(module(batch), batch.targets)


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (1, 1), (3, 2), (4 * QUERIES, 1)], ids=str)
@pytest.mark.parametrize("classes", [1, 3, 1000])
def test_any_number_of_objects_and_classes(counts: tuple[int, ...], classes: int) -> None:
    module, batch = trained(num_logits=classes), with_objects(*counts, classes=classes)
    outputs = module(batch)
    ((group, predicted),) = outputs.groups
    size = GROUPS * max(counts)
    assert group.size == size
    assert predicted.logits.shape == (LAYERS, IMAGES, size, classes)
    assert [int((row >= 0).sum()) for row in group.assigned] == [GROUPS * count for count in counts]
    report = criterion()(outputs, batch.targets)
    denoising = {name: loss for name, loss in report.losses.items() if "_dn" in name}
    assert len(denoising) == 3 * LAYERS
    assert all((loss > 0) == any(counts) for loss in denoising.values())
    report.total.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@both
def test_main_queries_do_not_depend_on_the_objects(name: str) -> None:
    module = trained(name)
    with_targets, without = module(with_objects(3, 2)), module(replace(images(), targets=()))
    torch.testing.assert_close(with_targets.logits, without.logits)
    torch.testing.assert_close(with_targets.boxes, without.boxes)
    assert without.groups[0][0].size == 0


def test_groups_do_not_depend_on_each_other() -> None:
    module, batch = trained(), with_objects(3, 2)
    module.decoder.queries.label_noise = module.decoder.queries.box_noise = 0.0
    first, second = module(batch).groups[0][1].boxes.chunk(GROUPS, 2)
    torch.testing.assert_close(first, second)
    module.decoder.queries.groups = 1
    torch.testing.assert_close(module(batch).groups[0][1].boxes, first)


@both
def test_both_streams_denoise_the_same_objects(name: str) -> None:
    module, batch = trained(name, batch_former=batch_former(dropout=0.0)), with_objects(3, 2)
    tokens = module.tokens(module.backbone(batch.images, batch.padding_mask), batch.padding_mask)
    queries = module.decoder.queries(module.encoder(tokens), batch.targets)
    assert len(queries.content) == 2 * IMAGES
    for each in (queries.content, queries.reference, queries.groups[0].assigned):
        assert torch.equal(*(each[:, QUERIES:] if each.dim() == 3 else each).chunk(2))
    streams = module(batch).groups[0][1].logits.chunk(2, 1)
    assert not torch.allclose(*streams), "their memories differ"


@both
def test_evaluation_has_no_groups_and_draws_no_random_numbers(name: str) -> None:
    module, before = trained(name).eval(), torch.get_rng_state()
    assert module(with_objects(3, 2)).groups == ()
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_of_boxes_and_labels() -> None:
    boxes, labels = torch.tensor([[[[0.5, 0.5, 0.2, 0.4], [0.98, 0.5, 0.1, 0.9]]]]), torch.tensor([[[4, 5]]])
    shift = torch.tensor([[[[0.5, -0.5, 1.0, -1.0], [1.0, 0.0, 0.0, 1.0]]]])
    noise = Noise(torch.tensor([[[0.19, 0.2]]]), torch.tensor([[[7, 8]]]), shift)
    new_labels, new_boxes = noised(labels, boxes, noise, 0.2, 0.4)
    assert new_labels.tolist() == [[[7, 5]]]
    expected = torch.tensor([[[[0.52, 0.46, 0.28, 0.24], [1.0, 0.5, 0.1, 1.0]]]])
    torch.testing.assert_close(new_boxes, expected)


def gradients(module: Detector, objects: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return gradients and loss of one image on each of two ranks, or of both images without ranks."""
    batch = with_objects(*objects)
    step = TrainingStep(module, criterion(), torch.device("cpu"), torch.float32)
    if distributed.world_size() > 1:
        torch.manual_seed(distributed.rank())
        own = slice(distributed.rank(), distributed.rank() + 1)
        batch = Batch(batch.images[own], batch.padding_mask[own], batch.targets[own])
    wrapped = wrap_ddp(step)  # alive until the gradients are reduced
    loss = wrapped(batch).total
    loss.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()} | {"loss": loss.detach()}


def without_noise(objects: tuple[int, ...]) -> dict[str, torch.Tensor]:
    module = trained()
    module.decoder.queries.label_noise = module.decoder.queries.box_noise = 0.0
    return gradients(module, objects)


def with_noise(name: str, objects: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return gradients(trained(name), objects)


def test_two_ranks_learn_what_one_process_learns() -> None:
    """With equal numbers of objects, because other numbers give other numbers of queries without an object."""
    whole, parts = without_noise((2, 2)), run_together(2, without_noise, (2, 2))
    torch.testing.assert_close(sum(part["loss"] for part in parts) / 2, whole["loss"])
    for name, gradient in whole.items():
        if name != "loss":
            torch.testing.assert_close(parts[0][name], gradient, atol=1e-5, rtol=1e-3)


@both
@pytest.mark.parametrize("objects", [(3, 1), (2, 0), (0, 0)], ids=str)
def test_ranks_with_other_numbers_of_objects_or_none(name: str, objects: tuple[int, ...]) -> None:
    one, other = run_together(2, with_noise, name, objects)
    for parameter, gradient in one.items():
        assert gradient is not None, parameter
        assert gradient.isfinite().all(), parameter
        assert parameter == "loss" or torch.equal(gradient, other[parameter]), parameter
