"""RT-DETR and RT-DETRv2 of Hugging Face transformers as an independent check, from pixels, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import RTDetrConfig, RTDetrResNetConfig, RTDetrV2Config

from detr_bf.backbones import build_backbone
from detr_bf.common.structures import Batch
from detr_bf.detectors import DETECTORS, Detector, Options
from detr_bf.interop.formats import format_of, from_foreign, to_foreign
from detr_bf.interop.weights import read_weights, write_weights
from tests.interop.states import assert_same
from tests.interop.test_huggingface import shaken

DIM, HEADS, QUERIES, CLASSES, LAYERS, POINTS = 32, 4, 9, 5, 3, 2
BACKBONES: dict[str, dict[str, Any]] = {
    "resnet18vd": {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"},
    "resnet50vd": {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3], "layer_type": "bottleneck"},
}
# name: (detector, backbone, width of the encoder, expansion, method of v2)
CASES = {
    "rtdetr": ("rtdetr", "resnet50vd", DIM, 1.0, ""),
    "rtdetr_narrow": ("rtdetr", "resnet18vd", 2 * DIM, 0.5, ""),
    "rtdetrv2": ("rtdetrv2", "resnet18vd", DIM, 0.5, "default"),
    "rtdetrv2_discrete": ("rtdetrv2", "resnet50vd", DIM, 1.0, "discrete"),
}
every_case = pytest.mark.parametrize("case", CASES)


def theirs(case: str) -> nn.Module:
    """Build their detector with random weights; the scales of the sampling points stay as they are."""
    name, backbone, width, expansion, method = CASES[case]
    body = RTDetrResNetConfig(**BACKBONES[backbone], out_features=["stage2", "stage3", "stage4"])
    settings: dict[str, Any] = {
        "backbone_config": body,
        "d_model": DIM,
        "encoder_hidden_dim": width,
        "encoder_ffn_dim": 24,
        "encoder_attention_heads": HEADS,
        "encoder_in_channels": BACKBONES[backbone]["hidden_sizes"][1:],
        "hidden_expansion": expansion,
        "decoder_in_channels": [width] * 3,
        "decoder_ffn_dim": 20,
        "decoder_attention_heads": HEADS,
        "decoder_layers": LAYERS,
        "decoder_n_points": POINTS,
        "num_queries": QUERIES,
        "num_labels": CLASSES,
        "num_denoising": 10,
    }
    torch.manual_seed(0)
    if name == "rtdetr":
        model = transformers.RTDetrForObjectDetection(RTDetrConfig(**settings))
    else:
        model = transformers.RTDetrV2ForObjectDetection(RTDetrV2Config(**settings, decoder_method=method))
    scales = {key: x.clone() for key, x in model.state_dict().items() if key.endswith("n_points_scale")}
    shaken(model).load_state_dict(scales, strict=False)
    return model.eval()


def options(**changes: Any) -> Options:
    """Return the options of our detector, which are those of theirs."""
    return Options(
        num_logits=CLASSES,
        hidden_dim=DIM,
        heads=HEADS,
        encoder_layers=1,
        decoder_layers=LAYERS,
        feedforward_dim=20,
        num_queries=QUERIES,
        **changes,
    )


def ours(case: str) -> Detector:
    name, backbone, width, expansion, method = CASES[case]
    body = build_backbone(
        backbone, weights="none", strides=[8, 16, 32], dilation=False, frozen_stages=0, frozen_norm=True
    )
    return DETECTORS[name](
        body,
        body.channels,
        options(),
        encoder_dim=width,
        encoder_feedforward_dim=24,
        expansion=expansion,
        points=POINTS,
        sampling="discrete" if method == "discrete" else "bilinear",
    ).eval()


def images(height: int, width: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (2, 3, height, width), generator=generator, dtype=torch.uint8)
    return Batch(pixels, torch.zeros(2, height, width, dtype=torch.bool))


@pytest.mark.default_tier("size1-rtdetr", "size0-rtdetrv2")
@torch.no_grad()
@every_case
@pytest.mark.parametrize("size", [(128, 128), (64, 160)])
def test_their_weights_give_their_outputs(case: str, size: tuple[int, int]) -> None:
    """Compare all layers and the selected tokens; discrete sampling on squares, where their columns are in the map."""
    if "discrete" in case:
        size = (size[0], size[0])
    model, converted = theirs(case), ours(case)
    converted.load_state_dict(from_foreign(model.state_dict(), case))
    batch = images(*size)
    found = model(pixel_values=batch.images / 255)
    outputs = converted(batch)
    assert found.logits.std() > 0.05, "the weights change the result"
    assert outputs.proposals is not None
    for actual, expected in (
        (outputs.logits, found.intermediate_logits.transpose(0, 1)),
        (outputs.boxes, found.intermediate_reference_points.transpose(0, 1)),
        (outputs.logits[-1], found.logits),
        (outputs.boxes[-1], found.pred_boxes),
        (outputs.proposals.logits[0], found.enc_topk_logits),
        (outputs.proposals.boxes[0], found.enc_topk_bboxes),
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5 * max(expected.abs().max().item(), 1.0))


@pytest.mark.default_tier("rtdetrv2", "rtdetr_narrow")
@every_case
def test_ours_go_to_their_model_and_back(case: str, tmp_path: Path) -> None:
    state = ours(case).state_dict()
    written = to_foreign(state, f"hf_{CASES[case][0]}")
    form = format_of(written)
    assert form is not None
    assert form.name == f"hf_{CASES[case][0]}"
    theirs(case).load_state_dict(written)
    write_weights(tmp_path / "model.safetensors", state, form.name)
    assert_same(read_weights(tmp_path / "model.safetensors"), state)


@every_case
def test_names_of_transformers_4_are_read(case: str) -> None:
    """Compare files of transformers 4, where the encoder and the heads had other names."""
    state = ours(case).state_dict()
    older = {}
    for name, tensor in to_foreign(state, f"hf_{CASES[case][0]}").items():
        name = name.replace("model.encoder.aifi.", "model.encoder.encoder.").replace(".o_proj.", ".out_proj.")
        older[name.replace(".mlp.fc", ".fc")] = tensor
    assert_same(from_foreign(older, "x"), state)


@pytest.mark.default_tier("rtdetrv2", "rtdetr_narrow")
@every_case
def test_files_of_the_authors(case: str, tmp_path: Path) -> None:
    """Write and read the authors' checkpoints, whose averaged weights are under ``ema`` and ``module``."""
    state, path = ours(case).state_dict(), tmp_path / "checkpoint.pth"
    write_weights(path, state, CASES[case][0])
    content = torch.load(path, weights_only=True)
    assert list(content) == ["ema"]
    assert list(content["ema"]) == ["module"]
    torch.save({"model": {"x": torch.zeros(1)}, **content, "last_epoch": 71}, path)
    assert_same(read_weights(path), state)
