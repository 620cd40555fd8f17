"""D-FINE of Hugging Face transformers as an independent check, from pixels, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DFineConfig, HGNetV2Config

from detr_bf.assembly import build_criterion
from detr_bf.backbones import build_backbone
from detr_bf.common.structures import Target
from detr_bf.config import load_config
from detr_bf.detectors import DETECTORS, Detector
from detr_bf.inference.loading import recipe_file
from detr_bf.interop.formats import format_of, from_foreign, to_foreign
from detr_bf.interop.weights import read_weights, write_weights
from tests.interop.states import assert_same
from tests.interop.test_huggingface import shaken
from tests.interop.test_huggingface_rtdetr import CLASSES, DIM, HEADS, LAYERS, QUERIES, images, options

B0: dict[str, Any] = {
    "stem_channels": [3, 16, 16],
    "stage_in_channels": [16, 64, 256, 512],
    "stage_mid_channels": [16, 32, 64, 128],
    "stage_out_channels": [64, 256, 512, 1024],
    "stage_num_blocks": [1, 1, 2, 1],
    "stage_downsample": [False, True, True, True],
    "stage_light_block": [False, False, True, True],
    "stage_kernel_size": [3, 3, 5, 5],
    "stage_numb_of_layers": [3, 3, 3, 3],
    "hidden_sizes": [64, 256, 512, 1024],
    "use_learnable_affine_block": True,
}
CASES: dict[str, tuple[list[int], int, list[int]]] = {  # strides, width of the encoder, points
    "three_levels": ([8, 16, 32], DIM, [3, 6, 3]),
    "two_levels": ([16, 32], DIM, [6, 6]),
    "wide_encoder": ([8, 16, 32], 2 * DIM, [2, 4, 2]),
}
every_case = pytest.mark.parametrize("case", CASES)


def theirs(case: str) -> nn.Module:
    """Build their detector with random weights; the numbers of points and the settings of the bins stay."""
    strides, width, points = CASES[case]
    body = HGNetV2Config(**B0, hidden_act="relu", out_features=["stage2", "stage3", "stage4"][-len(strides) :])
    config = DFineConfig(
        backbone_config=body,
        d_model=DIM,
        encoder_hidden_dim=width,
        encoder_ffn_dim=24,
        encoder_attention_heads=HEADS,
        encoder_in_channels=B0["stage_out_channels"][-len(strides) :],
        encode_proj_layers=[len(strides) - 1],
        feat_strides=strides,
        hidden_expansion=0.5,
        depth_mult=2 / 3,
        decoder_in_channels=[width] * len(strides),
        decoder_ffn_dim=20,
        decoder_attention_heads=HEADS,
        decoder_layers=LAYERS,
        decoder_n_points=points,
        num_feature_levels=len(strides),
        num_queries=QUERIES,
        num_labels=CLASSES,
    )
    torch.manual_seed(0)
    model = transformers.DFineForObjectDetection(config)
    settings = ("num_points_scale", "decoder.up", "decoder.reg_scale")
    kept = {name: value.clone() for name, value in model.state_dict().items() if name.endswith(settings)}
    shaken(model).load_state_dict(kept, strict=False)
    return model.eval()


def ours(case: str) -> Detector:
    strides, width, points = CASES[case]
    body = build_backbone(
        "hgnetv2_b0", weights="none", strides=strides, dilation=False, frozen_stages=0, frozen_norm=False
    )
    return DETECTORS["dfine"](
        body,
        body.channels,
        options(strides=strides),
        encoder_dim=width,
        encoder_feedforward_dim=24,
        expansion=0.5,
        fusion_blocks=2,
        points=points,
    ).eval()


@torch.no_grad()
@every_case
@pytest.mark.parametrize("size", [(128, 128), (64, 160)])
def test_their_weights_give_their_outputs(case: str, size: tuple[int, int]) -> None:
    model, converted = theirs(case), ours(case)
    found = from_foreign(model.state_dict(), case)
    missing = converted.load_state_dict(found, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys)
    batch = images(*size)
    expected, outputs = model(pixel_values=batch.images / 255), converted(batch)
    assert expected.logits.std() > 0.05, "the weights change the result"
    assert outputs.proposals is not None
    for actual, wanted in (
        (outputs.logits[-1], expected.logits),
        (outputs.boxes[-1], expected.pred_boxes),
        (outputs.proposals.logits[0], expected.enc_topk_logits),
        (outputs.proposals.boxes[0], expected.enc_topk_bboxes),
    ):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-5 * max(wanted.abs().max().item(), 1.0))


@torch.no_grad()
def test_their_losses_of_the_last_layer_and_of_the_tokens() -> None:
    """Compare the terms whose pairs are the same without the union: in evaluation theirs has no others."""
    model, converted = theirs("three_levels"), ours("three_levels")
    converted.load_state_dict(from_foreign(model.state_dict(), ""), strict=False)
    batch, generator = images(128, 128), torch.Generator().manual_seed(3)
    targets = []
    for number in (3, 2):
        centers, sizes = (torch.rand(number, 2, generator=generator) for _ in range(2))
        boxes = torch.cat([0.3 + 0.4 * centers, 0.1 + 0.2 * sizes], dim=1)
        labels = torch.randint(CLASSES, (number,), generator=generator)
        targets.append(Target(0, boxes, labels, (128, 128), (128, 128)))
    labelled = [{"class_labels": target.labels, "boxes": target.boxes} for target in targets]
    expected = model(pixel_values=batch.images / 255, labels=labelled).loss_dict
    criterion = build_criterion(load_config([recipe_file("dfine_s")], ["loss.union=false"], task="detection"))
    found = criterion(converted(batch), targets).weighted()
    for suffix, their_suffix in (("", ""), ("_enc", "_aux_0")):
        for name, their_name in (("loss_ce", "loss_vfl"), ("loss_bbox", "loss_bbox"), ("loss_giou", "loss_giou")):
            torch.testing.assert_close(found[name + suffix], expected[their_name + their_suffix], rtol=1e-4, atol=1e-5)
    assert len(expected) == 6


@every_case
def test_ours_go_to_their_model_and_back(case: str, tmp_path: Path) -> None:
    """Write and read all tensors but the counters of the backbone's norms, which are frozen in theirs."""
    state = ours(case).state_dict()
    written = to_foreign(state, "hf_dfine")
    form = format_of(written)
    assert form is not None
    assert form.name == "hf_dfine"
    report = theirs(case).load_state_dict(written, strict=False)
    assert not report.missing_keys
    assert all(name.endswith("num_batches_tracked") for name in report.unexpected_keys)
    write_weights(tmp_path / "model.safetensors", state, "hf_dfine")
    assert_same(read_weights(tmp_path / "model.safetensors"), state)


def test_names_of_transformers_4_are_read() -> None:
    state = ours("two_levels").state_dict()
    older = {}
    for name, tensor in to_foreign(state, "hf_dfine").items():
        name = name.replace("model.encoder.aifi.", "model.encoder.encoder.").replace(".o_proj.", ".out_proj.")
        older[name.replace(".mlp.layers.0", ".fc1").replace(".mlp.layers.1", ".fc2")] = tensor
    assert_same(from_foreign(older, "x"), state)
