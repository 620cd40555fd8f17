"""RF-DETR with its mask head of Hugging Face transformers as an independent check, from pixels, with random weights.

Their code is changed at four places where it differs from the released one (rfdetr 1.11.2): the proposals' map is not
projected, points outside the centres of the outermost cells read zeros, the number of points of the matching is a
function of the number of queries, and the layer norms of the projector add 1e-5 instead of 1e-6.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RfDetrForInstanceSegmentation
from transformers.loss import loss_rf_detr

from detr_bf.common.structures import Target
from detr_bf.detectors import Detector
from detr_bf.interop.formats import from_foreign, to_foreign
from detr_bf.losses import Focal, HungarianMatcher, IouAware, SetCriterion, point_masks
from tests.interop.states import assert_same
from tests.interop.test_huggingface import shaken
from tests.interop.test_huggingface_rfdetr import CLASSES, DIM, PATCH, normalised, ours, pixels, theirs

SIDE = 6 * PATCH  # that of the positions, which theirs interpolates in float32
CELLS = (SIDE // 4) ** 2  # of a mask
NAMES = {"loss_mask": "loss_mask_ce", "loss_dice": "loss_mask_dice"}

pytestmark = pytest.mark.usefixtures("float64")


class AsReleased(RfDetrForInstanceSegmentation):
    def segmentation_head(self, spatial_features: Tensor, *others: Any, skip_blocks: bool = False) -> Any:
        if not skip_blocks:
            return super().segmentation_head(spatial_features, *others)
        queries, size = others
        resized = F.interpolate(spatial_features, size=[side // 4 for side in size], mode="bilinear")
        return self.get_mask_logits(queries, self.spatial_features_proj(resized))


class Drawing:
    """The module torch, with points that depend on their number alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def rand(rows: int, number: int, _: int, device: object) -> Tensor:
        return points(CELLS // 16 if rows == 1 else number).expand(rows, -1, -1)


def points(number: int) -> Tensor:
    return torch.rand(number, 2, generator=torch.Generator().manual_seed(number))


@pytest.fixture(autouse=True)
def fixed_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same points in both implementations."""
    monkeypatch.setattr(loss_rf_detr, "torch", Drawing())
    sample = partial(loss_rf_detr.sample_point, padding_mode="border")
    monkeypatch.setattr(
        loss_rf_detr, "sample_point", lambda maps, *others, **how: sample(maps.double(), *others, **how)
    )
    monkeypatch.setattr(
        point_masks, "random_points", lambda *counts, **_: points(counts[-1]).expand(*counts[:-1], -1, -1)
    )


def theirs_with_masks() -> nn.Module:
    config = theirs().config
    config.intermediate_size = 4 * DIM
    model = AsReleased(config)
    model.loss_type = "RfDetrForInstanceSegmentation"  # read from the name of the class
    for module in model.model.model.backbone.projector.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-6
    return shaken(model).eval()


def ours_with_masks() -> Detector:
    return ours(masks=True)


def targets() -> list[Target]:
    torch.manual_seed(2)
    boxes = [0.3 * torch.rand(count, 4) + 0.3 for count in (2, 3)]
    masks = [F.interpolate(torch.rand(1, len(each), 8, 8), size=(SIDE, SIDE))[0] < 0.4 for each in boxes]
    return [
        Target(i, each, torch.arange(len(each)) % CLASSES, (SIDE, SIDE), (SIDE, SIDE), masks=mask)
        for i, (each, mask) in enumerate(zip(boxes, masks, strict=True))
    ]


def test_their_weights_give_their_masks() -> None:
    their, own = theirs_with_masks(), ours_with_masks().eval()
    images, padding = pixels(SIDE), torch.zeros(2, SIDE, SIDE, dtype=torch.bool)
    own.load_state_dict(from_foreign(their.state_dict(), "it"))
    with torch.no_grad():
        expected = their(pixel_values=normalised(images, own), pixel_mask=~padding)
        found = own.detect(own.backbone(images, padding), padding)
    torch.testing.assert_close(found.logits[-1], expected.logits, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.masks.all(), expected.pred_masks, rtol=0, atol=1e-8)
    torch.testing.assert_close(
        found.proposals.layer_masks[0].all(), expected.enc_outputs_mask_logits, rtol=0, atol=1e-8
    )


def test_their_losses_and_gradients() -> None:
    their, own = theirs_with_masks().train(), ours_with_masks().train()
    images, padding = pixels(SIDE), torch.zeros(2, SIDE, SIDE, dtype=torch.bool)
    own.load_state_dict(from_foreign(their.state_dict(), "it"))
    wanted = [{"class_labels": each.labels, "boxes": each.boxes, "masks": each.masks} for each in targets()]
    expected = their(pixel_values=normalised(images, own), pixel_mask=~padding, labels=wanted)
    outputs = own.detect(own.backbone(images, padding), padding, targets())
    report = SetCriterion(
        IouAware(), HungarianMatcher(Focal(), 2, 5, 2), mask_weight=5.0, dice_weight=5.0, mean_of_groups=True
    )(outputs, targets())
    found: dict[str, Tensor] = {}
    for name, value in report.weighted().items():
        whole = name.replace("_group", "")
        found[whole] = found.get(whole, torch.zeros(())) + value / report.weights[whole]
    for name, value in found.items():
        for own_name, their_name in NAMES.items():
            name = name.replace(own_name, their_name)
        torch.testing.assert_close(value, expected.loss_dict[name], rtol=1e-6, atol=1e-6, msg=name)
    assert {name for name in found if "mask" in name} == {"loss_mask", "loss_mask_0", "loss_mask_enc"}
    report.total.backward()
    expected.loss.backward()
    gradients = from_foreign(
        {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in their.named_parameters()
        },
        "it",
    )
    for name, parameter in own.named_parameters():
        assert parameter.grad is not None or not name.startswith("mask_head"), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6, msg=name)
            assert parameter.grad.any() or not name.startswith("mask_head"), name


def test_round_trips() -> None:
    state = {key: x for key, x in theirs_with_masks().state_dict().items() if not key.endswith("mask_token")}
    mapped = from_foreign(state, "it")
    assert_same(to_foreign(mapped, "hf_rfdetr_masks"), state)
    official = to_foreign(mapped, "rfdetr")
    assert official["segmentation_head.bias"].shape == (1,)
    assert_same(from_foreign(official, "it"), mapped)
