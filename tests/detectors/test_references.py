"""Every detector with a reference beside each image."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from detr_bf.backbones.backbone import Backbone, Network, build_resnet
from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Target
from detr_bf.detectors import Detector
from detr_bf.detectors.mask_head import MaskHead
from tests.detectors.tiny import CHANNELS, DETECTORS, DIM, LAYERS, Averages, model, shaken

SIZE = (32, 40)


def batch(has_reference: Tensor | None = None) -> Batch:
    torch.manual_seed(1)
    coarse = torch.randint(256, (2, 2, 3, SIZE[0] // 8, SIZE[1] // 8), dtype=torch.uint8)  # averages differ
    images, references = coarse.repeat_interleave(8, -2).repeat_interleave(8, -1)
    mask = torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[1, :, 32:] = True
    images, references = (each.masked_fill(mask[:, None], 0) for each in (images, references))
    box = torch.tensor([[0.5, 0.5, 0.4, 0.4]])
    targets = tuple(Target(number, box, torch.tensor([1]), SIZE, SIZE) for number in range(2))
    return Batch(images, mask, targets, references, has_reference)


def detector(name: str, layers: list[int] | None = None, **changes: object) -> Detector:
    is_hybrid = name.startswith("rtdetr")
    former = BatchFormerV2(
        DIM,
        layers=layers or [0],
        num_encoder_layers=LAYERS + is_hybrid,
        dropout=0.0,
        references=True,
        **changes,  # type: ignore[arg-type]
    )
    built = shaken(model(name, batch_former=former, dropout=0.0))
    return built.train()


@pytest.mark.default_tier("detr", "deformable_detr", "rtdetr", "dino")
@pytest.mark.parametrize("name", DETECTORS)
def test_a_reference_changes_its_own_image_alone(float64: None, name: str) -> None:
    built = detector(name, mode="single_stream_inference").eval()
    given = batch()
    assert given.references is not None
    outputs = built(given)
    changed = given.references.clone()
    changed[0] = 255 - changed[0]
    again = built(replace(given, references=changed))
    assert outputs.logits.shape[1] == 2
    assert not torch.allclose(again.logits[:, 0], outputs.logits[:, 0], atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(again.logits[:, 1], outputs.logits[:, 1], atol=1e-9, rtol=1e-7)
    alone = built(replace(given, has_reference=torch.tensor([True, False])))
    torch.testing.assert_close(alone.logits[:, 0], outputs.logits[:, 0], atol=1e-9, rtol=1e-7)
    assert not torch.allclose(alone.logits[:, 1], outputs.logits[:, 1], atol=1e-7, rtol=1e-7)
    nothing = built(replace(given, references=None))
    torch.testing.assert_close(nothing.logits[:, 1], alone.logits[:, 1], atol=1e-9, rtol=1e-7)


@pytest.mark.default_tier("detr", "rtdetr")
@pytest.mark.parametrize("name", DETECTORS)
def test_training_has_two_streams_and_evaluation_ignores_references(name: str) -> None:
    layers = {"rfdetr": [0]}.get(name, [0, LAYERS] if name.startswith("rtdetr") else [0, 1])
    built = detector(name, layers)
    given = batch()
    outputs = built(given)
    assert outputs.num_streams == 2
    assert outputs.logits.shape[1] == 4
    outputs.logits.square().sum().backward()
    weights = dict(built.encoder.named_parameters())
    (name,) = (name for name in weights if name.endswith("mixers.shared.layers.0.linear1.weight"))
    assert weights[name].grad is not None
    assert weights[name].grad.abs().sum() > 0
    built.eval()
    torch.testing.assert_close(built(given).logits, built(replace(given, references=None)).logits, atol=0, rtol=0)


def test_rtdetr_fuses_the_references_for_an_insertion_after_the_fusion(float64: None) -> None:
    built = detector("rtdetr", [LAYERS], mode="single_stream_inference").eval()
    given = batch()
    assert given.references is not None
    assert not torch.allclose(
        built(given).logits, built(replace(given, references=given.images)).logits, atol=1e-7, rtol=1e-7
    )


def test_masks_are_those_of_the_images(float64: None) -> None:
    head = MaskHead(DIM, heads=2, finer_channels=[CHANNELS])
    former = BatchFormerV2(
        DIM,
        layers=[0],
        num_encoder_layers=LAYERS,
        dropout=0.0,
        references=True,
        mode="single_stream_inference",
    )
    built = shaken(model("detr", batch_former=former, mask_head=head)).eval()
    built.backbone, built.levels = Averages(2), 1

    def masks(given: Batch) -> Tensor:
        found = built(given).masks
        assert found is not None
        return found.all()

    given = batch()
    assert given.references is not None
    own = masks(given)
    changed = given.references.clone()
    changed[0] = 255 - changed[0]
    other = masks(replace(given, references=changed))
    assert own.shape[0] == 2
    assert not torch.allclose(other[0], own[0], atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(other[1], own[1], atol=1e-9, rtol=1e-7)
    without = masks(replace(given, has_reference=torch.tensor([False, False])))
    torch.testing.assert_close(without, masks(replace(given, references=None)), atol=1e-9, rtol=1e-7)
    assert not torch.allclose(without[1], own[1], atol=1e-7, rtol=1e-7)


def test_missing_references_leave_no_trace_in_norms_in_training(float64: None) -> None:
    built = detector("rtdetr", [0, LAYERS], mode="single_stream")
    given = batch(torch.tensor([True, False]))
    assert given.references is not None
    outputs = built(given)
    changed = given.references.clone()
    changed[1] = 255 - changed[1]
    torch.testing.assert_close(built(replace(given, references=changed)).logits, outputs.logits)


def network() -> Network:
    torch.manual_seed(0)
    return build_resnet("resnet18", weights="none", strides=[8], dilation=False)


def test_a_stacked_backbone_begins_as_the_one_of_the_image() -> None:
    given = batch()
    assert given.references is not None
    stacked, plain = Backbone(network(), "stack").eval(), Backbone(network()).eval()
    images, mask = given.images, given.padding_mask
    (expected,) = plain(images, mask)
    (found,) = stacked(images, mask, given.references)
    torch.testing.assert_close(found.tensor, expected.tensor)
    first = next(module for module in stacked.body.modules() if isinstance(module, torch.nn.Conv2d))
    found.tensor.sum().backward()
    assert first.weight.shape[1] == 6
    assert first.weight.grad is not None
    assert first.weight.grad[:, 3:].abs().sum() > 0


def test_the_difference_is_zero_where_both_images_agree() -> None:
    given = batch()
    assert given.references is not None
    built = Backbone(network(), "difference").eval()
    seen = []
    built.maps = lambda pixels, mask: seen.append(pixels) or []  # type: ignore[method-assign,func-returns-value]
    built(given.images, given.padding_mask, given.references)
    mean, std = built.mean, built.std
    expected = (given.images.float() - given.references.float()) / std
    torch.testing.assert_close(seen[0], expected.masked_fill(given.padding_mask[:, None], 0), atol=1e-4, rtol=1e-4)
    assert mean.shape == (3, 1, 1)
    built(given.images, given.padding_mask, given.images)
    assert seen[1].abs().sum() == 0


def test_a_missing_reference_of_the_backbone_is_the_image() -> None:
    given = batch(torch.tensor([True, False]))
    assert given.references is not None
    assert torch.equal(given.references_or_images[0], given.references[0])
    assert torch.equal(given.references_or_images[1], given.images[1])
    assert replace(given, references=None).references_or_images is given.images


def test_a_frozen_stem_cannot_see_a_stacked_reference() -> None:
    frozen = network()
    frozen.body.requires_grad_(False)
    with pytest.raises(InputError, match="frozen_stages=0"):
        Backbone(frozen, "stack")
