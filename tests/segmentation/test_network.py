"""UPerNet's head, its loss, plug-ins and backbones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2.functional import resize

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch
from detr_bf.config import load_config
from detr_bf.segmentation.assembly import build_segmenter, segmentation_optimizer
from detr_bf.segmentation.batch import IGNORE
from detr_bf.segmentation.criterion import SegmentationCriterion
from detr_bf.segmentation.network import PyramidPooling, SegmentationOutputs, Segmenter, UperHead
from tests.segmentation.maps import TINY

SMALL = "{options: {embed_dim: 24, depth: 2, num_heads: 2}}"
VIT = f"model.backbone={{name: timm:vit_tiny_patch16_224, weights: none, vit: {SMALL}}}"


def build(*settings: str) -> Segmenter:
    return build_segmenter(load_config(None, [*TINY, *settings], task="segmentation"), 3)


def images(height: int = 64, width: int = 96) -> Batch:
    pixels = torch.randint(0, 256, (2, 3, height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Batch(pixels, torch.zeros(2, height, width, dtype=torch.bool))


@pytest.mark.parametrize(
    "backbone", ["model.backbone={name: resnet18, weights: none}", VIT, "model.backbone.strides=[8, 16]"]
)
def test_logits_have_the_size_of_the_finest_map(backbone: str) -> None:
    model = build(backbone).eval()
    stride = model.backbone.strides[0]
    with torch.no_grad():
        outputs = model(images())
    assert outputs.logits.shape == (2, 3, 64 // stride, 96 // stride)
    assert outputs.auxiliary is None
    assert outputs.size == (64, 96)
    assert outputs.labels(0, (60, 90), (30, 45)).shape == (30, 45)


def test_the_second_head_is_for_training_alone_and_can_be_left_out() -> None:
    assert build().train()(images()).auxiliary is not None
    without = build("model.auxiliary_weight=0")
    assert without.auxiliary is None
    assert without.train()(images()).auxiliary is None


def test_pooled_maps_are_means_of_their_cells() -> None:
    """With the identity instead of each convolution."""
    pooling = PyramidPooling(1, 1, [1, 2])
    for pool in pooling.pooled:
        pool[1] = nn.Identity()
    pooling.fuse = nn.Identity()
    features = torch.arange(16.0).view(1, 1, 4, 4)
    same, whole, quarters = pooling(features)[0]
    assert torch.equal(same, features[0, 0])
    assert torch.allclose(whole, features.mean())
    assert quarters[0, 0] == pytest.approx(float(features[0, 0, :2, :2].mean()))


def test_every_map_reaches_the_logits() -> None:
    head = UperHead([4, 4, 4], 8, 3, bins=[1], dropout=0.0).eval()
    maps = [torch.randn(1, 4, side, side, requires_grad=True) for side in (16, 8, 4)]
    head(maps).sum().backward()
    assert all(each.grad is not None and bool(each.grad.abs().sum() > 0) for each in maps)


def loss_by_hand(logits: Tensor, labels: list[np.ndarray], weights: tuple[float, ...] = (1, 1, 1)) -> float:
    """Return the weighted mean of -log softmax over all pixels with a class, pixel by pixel."""
    terms, factors = [], []
    for image, classes in zip(logits.double().numpy(), labels, strict=True):
        for (row, column), label in np.ndenumerate(classes):
            if label != IGNORE:
                scores = image[:, row, column]
                terms.append(np.log(np.exp(scores).sum()) - scores[label])
                factors.append(weights[label])
    return float(np.average(terms, weights=factors))


def test_the_loss_is_the_mean_over_pixels_with_a_class() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(2, 3, 4, 5))).float()
    labels = [rng.integers(0, 3, (4, 5)).astype(np.uint8), rng.integers(0, 3, (3, 4)).astype(np.uint8)]
    labels[0][1, :3] = IGNORE
    outputs = SegmentationOutputs(logits, (4, 5), logits.flip(1))
    report = SegmentationCriterion(0.4)(outputs, [torch.from_numpy(each) for each in labels])
    assert float(report.losses["loss_ce"]) == pytest.approx(loss_by_hand(logits, labels), rel=1e-5)
    assert float(report.losses["loss_auxiliary"]) == pytest.approx(loss_by_hand(logits.flip(1), labels), rel=1e-5)
    total = report.losses["loss_ce"] + 0.4 * report.losses["loss_auxiliary"]
    assert torch.allclose(report.total, total)
    weighted = SegmentationCriterion(0.4, [5, 1, 0.5])(outputs, [torch.from_numpy(each) for each in labels])
    assert float(weighted.losses["loss_ce"]) == pytest.approx(loss_by_hand(logits, labels, (5, 1, 0.5)), rel=1e-5)


@pytest.mark.parametrize("weights", [[], [5.0, 1.0, 1.0]])
def test_a_batch_without_classes_has_a_loss_of_zero_with_gradients(weights: list[float]) -> None:
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    outputs = SegmentationOutputs(logits, (8, 8))
    loss = SegmentationCriterion(0.4, weights)(outputs, [torch.full((8, 8), IGNORE, dtype=torch.uint8)]).total
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_logits_that_are_not_finite_have_no_class() -> None:
    logits = torch.zeros(1, 3, 2, 2)
    logits[0, 1] = 1.0
    logits[0, :, 0, 0] = torch.nan
    assert SegmentationOutputs(logits, (2, 2)).labels(0, (2, 2), (2, 2)).tolist() == [[IGNORE, 1], [1, 1]]


def test_context_broadcasting_changes_the_maps_of_a_vit() -> None:
    on = "plugins.context_broadcasting={enabled: true, layers: all}"
    plain, broadcasting = build(VIT).eval(), build(VIT, on).eval()
    broadcasting.load_state_dict(plain.state_dict(), strict=False)  # the plug-in remembers its blocks
    with torch.no_grad():
        assert not torch.allclose(plain(images()).logits, broadcasting(images()).logits)
    with pytest.raises(InputError, match=r"plugins\.context_broadcasting needs a plain vision transformer"):
        build(on)


def test_the_backbone_may_have_its_own_learning_rate_and_positions_do_not_decay() -> None:
    config = load_config(None, [*TINY, VIT, "optimizer.backbone_lr=0.0001"], task="segmentation")
    model = build_segmenter(config, 3)
    groups: dict[str, Any] = {group["name"]: group for group in segmentation_optimizer(config, model).param_groups}
    assert set(groups) == {"head", "head_no_decay", "backbone", "backbone_no_decay"}
    assert (groups["head"]["lr"], groups["backbone"]["lr"]) == (0.01, 0.0001)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    spared = {names[id(each)] for each in groups["backbone_no_decay"]["params"]}
    assert any(name.endswith("pos_embed") for name in spared)
    assert groups["backbone_no_decay"]["weight_decay"] == 0


def test_probabilities_of_scales_and_flips_are_averaged() -> None:
    model = build("eval.scales=[1.0, 0.75]", "eval.flip=true").eval()
    plain = build().eval()
    plain.load_state_dict(model.state_dict())
    batch, expected = images(), torch.zeros(2, 3, 64, 96)
    with torch.no_grad():
        for size in ([64, 96], [48, 72]):
            pixels = resize(batch.images, size, antialias=True)
            for turn in (False, True):
                seen = pixels.flip(-1) if turn else pixels
                logits = plain(Batch(seen, torch.zeros(2, *size, dtype=torch.bool))).logits
                share = F.interpolate(logits, (64, 96), mode="bilinear", align_corners=False).softmax(1)
                expected += (share.flip(-1) if turn else share) / 4
        outputs = model(batch)
    assert outputs.size == (64, 96)
    torch.testing.assert_close(outputs.logits.exp(), expected)
    labels = outputs.labels(1, (64, 96), (64, 96)).long()
    torch.testing.assert_close(expected[1].gather(0, labels[None])[0], expected[1].amax(0))
    assert model.train()(batch).logits.shape == (2, 3, 16, 24), "training sees one scale"


def test_a_class_without_probability_does_not_hide_the_others() -> None:
    model = build("eval.flip=true").eval()
    model.head.classify[1].bias.data = torch.tensor([0.0, 500.0, -500.0])
    with torch.no_grad():
        assert bool((model(images()).labels(0, (64, 96), (64, 96)) == 1).all())


@pytest.mark.parametrize("scales", ["[]", "[0.0]", "[1.0, .inf]"])
def test_scales_of_the_evaluation_are_factors(scales: str) -> None:
    with pytest.raises(InputError, match=r"eval\.scales must be"):
        build(f"eval.scales={scales}")
