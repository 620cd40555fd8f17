"""LW-DETR of Hugging Face transformers as an independent check, from pixels, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LwDetrConfig, LwDetrForObjectDetection

from detr_bf.backbones import VitOptions, build_backbone
from detr_bf.common.errors import InputError
from detr_bf.detectors import Detector
from detr_bf.interop.formats import from_foreign, to_foreign
from detr_bf.interop.weights import read_weights, write_weights
from tests.interop.states import assert_same
from tests.interop.test_huggingface import shaken
from tests.interop.test_huggingface_rfdetr import (
    CLASSES,
    DIM,
    GROUPS,
    HEADS,
    PATCH,
    QUERIES,
    SIDE,
    assert_same_losses,
    assert_same_outputs,
    detector_over,
)

SCALES = {"P3": 2.0, "P4": 1.0, "P5": 0.5}
WIDE = 516  # channels of a backbone whose maps are narrowed before they are enlarged
CASES = [(("P4",), 24), (("P3", "P5"), 24), (("P3", "P5"), WIDE)]


def theirs(levels: Sequence[str], width: int) -> nn.Module:
    """Build their detector with random weights; the windows are 4 x 4 of an image, as their blocks assume."""
    body: dict[str, Any] = {
        "model_type": "lw_detr_vit",
        "hidden_size": width,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "mlp_ratio": 2,
        "image_size": SIDE,
        "pretrain_image_size": 6 * PATCH,
        "patch_size": PATCH,
        "num_windows": 16,
        "out_indices": [1, 3, 4],
        "window_block_indices": [0, 2],
    }
    config = LwDetrConfig(
        backbone_config=body,
        projector_scale_factors=[SCALES[level] for level in levels],
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
    return shaken(LwDetrForObjectDetection(config)).eval()


def ours(levels: Sequence[str], width: int) -> Detector:
    vit = VitOptions(
        global_blocks=[1, 3],
        maps=[0, 2, 3],
        windows=4,
        class_token=False,
        options={
            "patch_size": PATCH,
            "img_size": 6 * PATCH,
            "embed_dim": width,
            "depth": 4,
            "num_heads": 3,
            "mlp_ratio": 2,
            "init_values": 0.1,
            "final_norm": False,
        },
    )
    backbone = build_backbone(
        "timm:deit_tiny_patch16_224",
        weights="none",
        strides=[PATCH],
        dilation=False,
        frozen_stages=0,
        frozen_norm=False,
        vit=vit,
    )
    return detector_over(backbone, levels=levels, layer_norm=False)


@pytest.mark.parametrize(("levels", "width"), CASES)
def test_their_weights_give_their_outputs(levels: Sequence[str], width: int) -> None:
    assert_same_outputs(theirs(levels, width), ours(levels, width))


@pytest.mark.parametrize(("levels", "width"), CASES[:2])
def test_their_losses(levels: Sequence[str], width: int) -> None:
    assert_same_losses(theirs(levels, width), ours(levels, width))


@pytest.mark.parametrize(("levels", "width"), CASES)
def test_round_trip(levels: Sequence[str], width: int, tmp_path: Path) -> None:
    state = theirs(levels, width).state_dict()
    mapped = from_foreign(state, "it")
    assert_same(to_foreign(mapped, "hf_lwdetr"), state)
    assert_same(from_foreign(to_foreign(mapped, "lwdetr"), "it"), mapped)
    write_weights(tmp_path / "w.safetensors", to_foreign(mapped, "hf_lwdetr"))
    assert_same(read_weights(tmp_path / "w.safetensors"), mapped)


def test_keys_have_no_bias() -> None:
    their = theirs(*CASES[0]).state_dict()
    own = from_foreign(their, "it")
    query, key, value = own["backbone.body.vit.blocks.1.attn.qkv.bias"].chunk(3)
    attention = "model.backbone.backbone.encoder.layer.1.attention"
    assert query.equal(their[f"{attention}.q_proj.bias"])
    assert value.equal(their[f"{attention}.v_proj.bias"])
    assert not key.any()
    del their[f"{attention}.v_proj.bias"]
    with pytest.raises(InputError, match=r"these names are unknown there: .*q_proj\.bias"):
        from_foreign(their, "it")
