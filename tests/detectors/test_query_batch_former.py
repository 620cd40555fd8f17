"""Batch attention between the queries of every detector: gradients between images, streams, losses, denoising."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from detr_bf.batchformer import QueryBatchFormer
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Queries
from detr_bf.detectors import Detector
from detr_bf.engine.optimizer import parameter_groups
from detr_bf.engine.step import TrainingStep
from detr_bf.losses import Focal, HungarianMatcher, LossReport, SetCriterion
from tests.detectors.test_mask_head import with_masks
from tests.detectors.tiny import (
    DETECTORS,
    DIM,
    IMAGES,
    LAYERS,
    images,
    influence,
    model,
    outputs_of,
    shaken,
    with_fixed_norms,
)

every_detector = pytest.mark.parametrize("name", DETECTORS)
WITH_GROUPS = ("dino", "dino_shared_heads", "dn_detr", "group_detr", "h_deformable_detr", "rtdetr", "rtdetrv2", "dfine")
CONTENT_FROM_TOKENS = ("dino_shared_heads", "deformable_detr_two_stage", "rtdetr", "rtdetrv2", "dfine")


pytestmark = pytest.mark.usefixtures("float64")


def former(**changes: object) -> QueryBatchFormer:
    settings = {"layers": [LAYERS - 1], "num_decoder_layers": LAYERS, "dropout": 0.0, "heads": 2} | changes
    return QueryBatchFormer(DIM, **settings)  # type: ignore[arg-type]


def detector(name: str, **changes: object) -> Detector:
    """Return a detector in training, with random weights; an image depends on others by batch attention alone."""
    return with_fixed_norms(shaken(model(name, dropout=0.0, query_batch_former=former(**changes))).train())


@every_detector
def test_gradients_cross_images_in_the_second_stream_alone(name: str) -> None:
    own, other = influence(detector(name), 1)
    assert own > 0
    assert other > 0
    for stream, mode in ((0, "two_stream"), (1, "self_only"), (1, "duplicate")):
        own, other = influence(detector(name, mode=mode), stream)
        assert own > 0, (stream, mode)
        assert other == 0, (stream, mode)


@every_detector
def test_clean_stream_and_evaluation_are_those_without(name: str) -> None:
    module, plain = detector(name), with_fixed_norms(shaken(model(name, dropout=0.0)).train())
    found = plain.load_state_dict(module.state_dict(), strict=False)
    assert found.missing_keys == []
    assert all(key.startswith("decoder.batch_former.mixers.shared.") for key in found.unexpected_keys)
    trained, alone = outputs_of(module), outputs_of(plain)
    assert trained.num_streams == 2
    for field in ("logits", "boxes"):
        both, expected = getattr(trained, field), getattr(alone, field)
        torch.testing.assert_close(both[:, :IMAGES], expected)
        torch.testing.assert_close(both[:-1, IMAGES:], expected[:-1], msg="equal before the insertion")
        assert not torch.allclose(both[-1, IMAGES:], expected[-1])
    evaluated, alone = module.eval()(images()), plain.eval()(images())
    assert torch.equal(evaluated.logits, alone.logits)
    assert torch.equal(evaluated.boxes, alone.boxes)


def report_of(module: Detector) -> LossReport:
    return SetCriterion(Focal(), HungarianMatcher(Focal()))(outputs_of(module), images().targets)


@every_detector
def test_losses_of_two_equal_streams_are_those_of_one(name: str) -> None:
    """All terms: of every layer, of the proposals and of the groups, which have two streams as well."""
    module, plain = detector(name, mode="duplicate"), with_fixed_norms(shaken(model(name, dropout=0.0)).train())
    plain.load_state_dict(module.state_dict())
    doubled, alone = report_of(module), report_of(plain)
    assert doubled.losses.keys() == alone.losses.keys()
    for term, loss in alone.losses.items():
        torch.testing.assert_close(doubled.losses[term], loss, msg=term)
    assert torch.equal(doubled.logged["stream/clean"], doubled.logged["stream/batchformer"])


@every_detector
def test_every_parameter_gets_a_gradient(name: str) -> None:
    """DistributedDataParallel waits for each of them."""
    module = detector(name, mode="single_stream")
    report_of(module).total.backward()
    assert [key for key, p in module.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_main_queries_never_see_denoising_queries_and_groups(name: str) -> None:
    module = detector(name)
    before = outputs_of(module)
    assert before.groups

    def changed(_: torch.nn.Module, __: Any, queries: Queries) -> Queries:
        count = sum(group.size for group in queries.groups)
        content = queries.content.clone()
        content[:, -count:] += 5.0
        return replace(queries, content=content)

    handle = module.decoder.queries.register_forward_hook(changed)
    after = outputs_of(module)
    handle.remove()
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(after.boxes, before.boxes, rtol=1e-10, atol=1e-10)
    for (group, predicted), (_, others) in zip(before.groups, after.groups, strict=True):
        assert torch.allclose(predicted.logits, others.logits) == (group.name == "pre"), group.name
        if not group.name.startswith(("dn", "pre")):  # attend to themselves alone, and no image attends to another
            torch.testing.assert_close(*predicted.logits.chunk(2, 1))


@pytest.mark.parametrize("name", ["detr", "rtdetr"])
def test_masks_of_both_streams(name: str) -> None:
    module = with_fixed_norms(with_masks(name, dropout=0.0, query_batch_former=former()).train())
    trained, evaluated = outputs_of(module).masks, module.eval()(images()).masks
    clean, second = trained.all().chunk(2)
    torch.testing.assert_close(clean, evaluated.all())
    assert clean.shape == second.shape
    assert not torch.allclose(clean, second)


def test_a_frozen_detector_forks_for_its_mask_head() -> None:
    module = with_masks(query_batch_former=former())
    module.freeze_all_but_masks()
    assert [module.train(mode)(images()).num_streams for mode in (True, False)] == [2, 1]


def test_training_ends_it_and_gives_it_a_learning_rate_of_its_own() -> None:
    module = detector("dino", until_epoch=1)
    step = TrainingStep(module, lambda outputs, targets: report_of(module), torch.device("cpu"), torch.float64)
    streams = []
    for epoch in (0, 1):
        step.begin_epoch(epoch)
        streams.append(outputs_of(module).num_streams)
    assert streams == [2, 1]
    groups = parameter_groups(module, lr=1.0, backbone_lr=0.1, weight_decay=0.1, batch_former_lr_factor=0.5)
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    assert {rates[id(parameter)] for parameter in module.decoder.batch_former.parameters()} == {0.5}


@pytest.mark.parametrize("name", ["detr", "dino"])
@pytest.mark.parametrize("mode", ["two_stream", "single_stream", "self_only"])
def test_it_trains_under_autocast(name: str, mode: str) -> None:
    torch.set_default_dtype(torch.float32)
    module = detector(name, mode=mode)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = outputs_of(module, images())
    loss = SetCriterion(Focal(), HungarianMatcher(Focal()))(outputs, images().targets).total
    loss.backward()
    assert loss.isfinite()


@every_detector
def test_layer_0_is_refused_where_all_images_have_the_same_contents(name: str) -> None:
    if name in CONTENT_FROM_TOKENS:
        outputs = outputs_of(detector(name, layers=[0, 1]))
        first, second = outputs.logits[0].chunk(2)
        assert not torch.allclose(first, second)
        return
    with pytest.raises(InputError, match=r"at=queries give batch_former\.layers from 1 on, got \[0, 1\]"):
        detector(name, layers=[0, 1])
