"""Batch attention between the blocks of a backbone, in every detector: gradients between images, streams, losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from detr_bf.backbones import Backbone, VitOptions, build_backbone
from detr_bf.batchformer import BatchFormerV2
from detr_bf.detectors import Detector, MaskHead
from detr_bf.losses import Focal, HungarianMatcher, LossReport, SetCriterion
from tests.detectors.tiny import DETECTORS, DIM, IMAGES, images, influence, model, outputs_of, shaken, with_fixed_norms

every_detector = pytest.mark.parametrize("name", DETECTORS)
BLOCKS, WIDTH, HEADS = 3, 16, 2
# Without learned positions, which are interpolated in float32.
VIT = {"patch_size": 8, "embed_dim": WIDTH, "depth": BLOCKS, "num_heads": HEADS, "img_size": 32, "pos_embed": "none"}


pytestmark = pytest.mark.usefixtures("float64")


def backbone(strides: list[int], **changes: Any) -> Backbone:
    """Build a tiny vision transformer; ``changes`` are those of its batch attention, None: it has none."""
    built = build_backbone(
        "timm:vit_tiny_patch16_224",
        weights="none",
        strides=strides,
        dilation=False,
        frozen_stages=0,
        frozen_norm=False,
        vit=VitOptions(options=VIT),
    )
    if changes.pop("enabled", True):
        settings = {"layers": [1], "num_encoder_layers": BLOCKS, "place": "backbone", "dropout": 0.0, "heads": HEADS}
        built.batch_former = BatchFormerV2(WIDTH, **(settings | changes))
    return built


def detector(name: str, **changes: Any) -> Detector:
    """Return a detector in training, with random weights, whose batch norms use their running statistics."""
    strides = [4 * 2**level for level in range(DETECTORS[name].maps)]
    return with_fixed_norms(shaken(model(name, backbone(strides, **changes), dropout=0.0), 0.2).train())


def pair(name: str, **changes: Any) -> tuple[Detector, Detector]:
    """Return a detector with batch attention in its backbone, and the same one without."""
    module, plain = detector(name, **changes), detector(name, enabled=False)
    found = plain.load_state_dict(module.state_dict(), strict=False)
    assert found.missing_keys == []
    assert all(key.startswith("backbone.batch_former.mixers.shared.") for key in found.unexpected_keys)
    return module, plain


@every_detector
def test_gradients_cross_images_in_the_second_stream_alone(name: str) -> None:
    for stream, mode in ((1, "two_stream"), (0, "two_stream"), (1, "duplicate")):
        own, other = influence(detector(name, mode=mode), stream)
        assert own > 0, (stream, mode)
        assert (other > 0) == ((stream, mode) == (1, "two_stream")), (stream, mode)


@every_detector
def test_clean_stream_and_evaluation_are_those_without(name: str) -> None:
    """Also the gradients of the clean stream alone."""
    module, plain = pair(name)
    trained, alone = outputs_of(module), outputs_of(plain)
    assert trained.num_streams == 2
    loss = torch.zeros(())
    for field in ("logits", "boxes"):
        both, expected = getattr(trained, field), getattr(alone, field)
        torch.testing.assert_close(both[:, :IMAGES], expected)
        assert not torch.allclose(both[-1, IMAGES:], expected[-1])
        loss = loss + both[:, :IMAGES].square().sum()
    loss.backward()
    (alone.logits.square().sum() + alone.boxes.square().sum()).backward()
    own = dict(module.named_parameters())
    for key, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(own[key].grad, parameter.grad, rtol=1e-6, atol=1e-8)
    assert all(not parameter.grad.any() for key, parameter in own.items() if "batch_former" in key)
    evaluated, alone = module.eval()(images()), plain.eval()(images())
    assert torch.equal(evaluated.logits, alone.logits)
    assert torch.equal(evaluated.boxes, alone.boxes)


def report_of(module: Detector) -> LossReport:
    return SetCriterion(Focal(), HungarianMatcher(Focal()))(outputs_of(module), images().targets)


@every_detector
def test_losses_of_two_equal_streams_are_those_of_one(name: str) -> None:
    """All terms: of every layer, of the proposals and of the groups, which have two streams as well."""
    module, plain = pair(name, mode="duplicate")
    doubled, alone = report_of(module), report_of(plain)
    assert doubled.losses.keys() == alone.losses.keys()
    for term, loss in alone.losses.items():
        torch.testing.assert_close(doubled.losses[term], loss, msg=term)
    torch.testing.assert_close(doubled.logged["stream/clean"], doubled.logged["stream/batchformer"])


@every_detector
def test_every_parameter_gets_a_gradient(name: str) -> None:
    """DistributedDataParallel waits for each of them."""
    module = detector(name, mode="single_stream")
    report_of(module).total.backward()
    assert [key for key, p in module.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("name", ["rtdetr", "dfine"])
def test_a_second_stream_changes_no_statistics_of_norms(name: str) -> None:
    """In training each stream is normalised with statistics of its own."""
    module, plain = (each.train() for each in pair(name))
    with torch.no_grad():
        trained, alone = outputs_of(module), outputs_of(plain)
    torch.testing.assert_close(trained.logits[:, :IMAGES], alone.logits)
    torch.testing.assert_close(trained.boxes[:, :IMAGES], alone.boxes)
    statistics = dict(module.named_buffers())
    assert any(key.endswith("running_mean") and value.any() for key, value in statistics.items())
    for key, value in plain.named_buffers():
        torch.testing.assert_close(statistics[key], value)


@pytest.mark.parametrize("name", ["detr", "rtdetr"])
def test_masks_of_both_streams(name: str) -> None:
    """Each stream has masks from its own maps; those of two equal streams are equal."""
    maps = DETECTORS[name].maps
    for mode in ("two_stream", "duplicate"):
        body = backbone([2 * 2**level for level in range(maps + 1)], mode=mode)
        head = MaskHead(DIM, heads=HEADS, finer_channels=body.channels[-2::-1], see_boxes=name != "detr")
        module = with_fixed_norms(shaken(model(name, body, mask_head=head, dropout=0.0), 0.2).train())
        clean, second = outputs_of(module).masks.all().chunk(2)
        torch.testing.assert_close(clean, module.eval()(images()).masks.all())
        assert torch.allclose(clean, second) == (mode == "duplicate")


@pytest.mark.parametrize("mode", ["single_stream", "mini_batch_inference", "single_stream_inference"])
def test_modes_that_replace_the_tokens(mode: str) -> None:
    """They have one stream; in evaluation images meet in the last two modes alone."""
    module, plain = pair("detr", mode=mode)
    assert outputs_of(module).num_streams == (2 if mode == "mini_batch_inference" else 1)
    module.eval(), plain.eval()
    evaluated, alone = module(images()), plain(images())
    assert evaluated.num_streams == 1
    assert torch.equal(evaluated.logits, alone.logits) == (mode == "single_stream")


def test_a_frozen_detector_still_forks_the_batch() -> None:
    body = backbone([2, 4])
    head = MaskHead(DIM, heads=HEADS, finer_channels=body.channels[-2::-1])
    module = model("detr", body, mask_head=head)
    module.freeze_all_but_masks()
    assert outputs_of(module.train()).num_streams == 2
    assert not any(each.training for each in body.modules() if each is not body.batch_former)
    assert not any(parameter.requires_grad for parameter in body.parameters())
    module.freeze_all_but_masks(keep_dropout=True)
    module.train()
    assert all(each.training for each in body.batch_former.modules() if isinstance(each, nn.Dropout))
