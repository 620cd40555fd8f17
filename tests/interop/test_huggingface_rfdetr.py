"""RF-DETR of Hugging Face transformers as an independent check, from pixels, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import RfDetrConfig, RfDetrForObjectDetection

from detr_bf.backbones import Backbone, VitOptions, build_backbone
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Target
from detr_bf.detectors import DETECTORS, Detector, Options
from detr_bf.detectors.groups import query_groups
from detr_bf.interop.formats import from_foreign, to_foreign
from detr_bf.interop.weights import read_weights, write_weights
from detr_bf.losses import Focal, HungarianMatcher, IouAware, SetCriterion
from tests.interop.states import assert_same
from tests.interop.test_huggingface import shaken

CLASSES, DIM, WIDTH, HEADS, QUERIES, GROUPS, PATCH, SIDE = 5, 32, 24, 4, 6, 3, 8, 64


def theirs() -> nn.Module:
    """Build their detector with random weights: five blocks, of which the last is not used."""
    body: dict[str, Any] = {
        "model_type": "rf_detr_dinov2",
        "hidden_size": WIDTH,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "mlp_ratio": 2,
        "image_size": 6 * PATCH,
        "patch_size": PATCH,
        "num_windows": 2,
        "out_indices": [1, 3, 4],
        "window_block_indexes": [0, 2],
    }
    config = RfDetrConfig(
        backbone_config=body,
        d_model=DIM,
        decoder_ffn_dim=20,
        decoder_layers=2,
        decoder_n_points=2,
        decoder_self_attention_heads=HEADS,
        decoder_cross_attention_heads=8,
        dropout=0.0,
        group_detr=GROUPS,
        num_queries=QUERIES,
        num_labels=CLASSES,
    )
    torch.manual_seed(0)
    return shaken(RfDetrForObjectDetection(config)).eval()


def ours(*, masks: bool = False) -> Detector:
    vit = VitOptions(
        global_blocks=[1, 3, 4],
        antialias=True,
        maps=[0, 2, 3],
        windows=2,
        options={
            "patch_size": PATCH,
            "img_size": 6 * PATCH,
            "embed_dim": WIDTH,
            "depth": 5,
            "num_heads": 3,
            "mlp_ratio": 2,
        },
    )
    backbone = build_backbone(
        "timm:vit_small_patch14_dinov2",
        weights="none",
        strides=[PATCH],
        dilation=False,
        frozen_stages=0,
        frozen_norm=False,
        vit=vit,
    )
    return detector_over(backbone, masks=masks)


def detector_over(backbone: Backbone, *, masks: bool = False, **own: Any) -> Detector:
    """Build our detector; ``own`` are options of RF-DETR and LW-DETR."""
    options = Options(
        num_logits=CLASSES,
        hidden_dim=DIM,
        heads=HEADS,
        encoder_layers=0,
        decoder_layers=2,
        feedforward_dim=20,
        dropout=0.0,
        num_queries=QUERIES,
        groups=query_groups(QUERIES, group_detr=GROUPS),
        masks=masks,
    )
    return DETECTORS["rfdetr"](backbone, backbone.channels, options, cross_heads=8, **own)


def pixels(side: int = SIDE) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(256, (2, 3, side, side), dtype=torch.uint8)


def normalised(images: torch.Tensor, model: Detector) -> torch.Tensor:
    return (images - model.backbone.mean) / model.backbone.std


def test_their_weights_give_their_outputs() -> None:
    assert_same_outputs(theirs(), ours())


def assert_same_outputs(their: nn.Module, own: Detector) -> None:
    """Load their weights into our detector, and compare logits and boxes."""
    images, padding = pixels(), torch.zeros(2, SIDE, SIDE, dtype=torch.bool)
    own.load_state_dict(from_foreign(their.state_dict(), "it"))
    with torch.no_grad():
        expected = their(pixel_values=normalised(images, own), pixel_mask=~padding)
        found = own.eval().detect(own.backbone(images, padding), padding)
    torch.testing.assert_close(found.logits[-1], expected.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.boxes[-1], expected.pred_boxes, rtol=0, atol=2e-5)


def test_their_losses() -> None:
    assert_same_losses(theirs(), ours())


def assert_same_losses(their: nn.Module, own: Detector) -> None:
    """Load their weights, and compare all terms of a training step; theirs are those of the groups together."""
    images, padding = pixels(), torch.zeros(2, SIDE, SIDE, dtype=torch.bool)
    own.load_state_dict(from_foreign(their.state_dict(), "it"))
    torch.manual_seed(2)
    boxes = [0.3 * torch.rand(count, 4) + 0.3 for count in (2, 3)]
    labels = [torch.arange(len(each)) for each in boxes]
    wanted = [{"class_labels": c, "boxes": b} for c, b in zip(labels, boxes, strict=True)]
    expected = their.train()(pixel_values=normalised(images, own), pixel_mask=~padding, labels=wanted)
    targets = [Target(i, b, c, (1, 1), (1, 1)) for i, (b, c) in enumerate(zip(boxes, labels, strict=True))]
    outputs = own.train().detect(own.backbone(images, padding), padding, targets)
    report = SetCriterion(IouAware(), HungarianMatcher(Focal(), 2, 5, 2), mean_of_groups=True)(outputs, targets)
    torch.testing.assert_close(report.total, expected.loss, rtol=1e-4, atol=1e-4)
    found: dict[str, torch.Tensor] = {}
    for name, value in report.weighted().items():
        whole = name.replace("_group", "")
        found[whole] = found.get(whole, torch.zeros(())) + value / report.weights[whole]
    for name, value in found.items():
        torch.testing.assert_close(value, expected.loss_dict[name], rtol=1e-4, atol=1e-4)


def test_round_trip(tmp_path: Path) -> None:
    state = {key: x for key, x in theirs().state_dict().items() if not key.endswith("mask_token")}
    mapped = from_foreign(state, "it")
    assert_same(to_foreign(mapped, "hf_rfdetr"), state)
    write_weights(tmp_path / "w.safetensors", to_foreign(mapped, "hf_rfdetr"))
    assert_same(read_weights(tmp_path / "w.safetensors"), mapped)


@pytest.mark.parametrize("part", ["q_proj.weight", "v_proj.bias"])
def test_a_missing_part_of_a_joined_tensor_is_told(part: str) -> None:
    name = f"model.backbone.backbone.encoder.layer.2.attention.{part}"
    state = {key: x for key, x in theirs().state_dict().items() if key != name}
    with pytest.raises(InputError, match=r"these names are unknown there: .*k_proj"):
        from_foreign(state, "it")
