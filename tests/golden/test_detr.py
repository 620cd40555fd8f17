"""Parity with outputs recorded from facebookresearch/detr and the BatchFormerV2 authors' DETR fork."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.build import build_model
from detr_bf.config import load_config
from detr_bf.detectors import Detector, detr
from detr_bf.interop import from_official_detr, is_official_detr
from detr_bf.layers import LearnedPosition, sine_position
from detr_bf.losses import CrossEntropy, HungarianMatcher, PaddedTargets, SetCriterion
from detr_bf.postprocess import Postprocess
from detr_bf.structures import FeatureMap, Outputs, Target

DC5 = ("model.backbone.dilation=true", "model.backbone.strides=[16]")
MODELS = ("01_detr", "01b_detr_prenorm", *(f"08{letter}_bf_detr" for letter in "abcde"))


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.config.getoption("--golden")
    if not folder.is_dir():
        pytest.skip(f"no recorded reference outputs at {folder}; give a folder with --golden DIR")
    return folder


def load(folder: Path, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    (path,) = (
        folder.glob(f"{prefix}*.safetensors")
        if not (folder / f"{prefix}.json").exists()
        else [folder / f"{prefix}.safetensors"]
    )
    tensors = {name: value.float() if value.is_floating_point() else value for name, value in load_file(path).items()}
    return tensors, json.loads(path.with_suffix(".json").read_text())


def build(cfg: dict[str, Any], weights: dict[str, Tensor]) -> Detector:
    model = detr(
        nn.Identity(),
        cfg["backbone_num_channels"],
        num_logits=cfg["num_classes"] + 1,
        hidden_dim=cfg["hidden_dim"],
        heads=cfg["nheads"],
        encoder_layers=cfg["enc_layers"],
        decoder_layers=cfg["dec_layers"],
        feedforward_dim=cfg["dim_feedforward"],
        dropout=0.0,
        pre_norm=cfg["pre_norm"],
        num_queries=cfg["num_queries"],
        batch_former=batch_former(cfg),
    )
    assert is_official_detr(weights)
    model.load_state_dict(from_official_detr(weights))
    return model


def batch_former(cfg: dict[str, Any]) -> BatchFormerV2 | None:
    if not cfg.get("bf"):
        return None
    after_encoder = cfg["bf"] == 1
    return BatchFormerV2(
        cfg["hidden_dim"],
        layers=[cfg["enc_layers"] - 1] if after_encoder else cfg["insert_idx"],
        num_encoder_layers=cfg["enc_layers"],
        position="after",
        shared=bool(cfg["share_bf"]),
        dropout=0.0,
    )


def features(tensors: dict[str, Tensor], cfg: dict[str, Any], prefix: str = "input.") -> FeatureMap:
    tensor = tensors[f"{prefix}features.0"]
    sizes = cfg["image_sizes_hw"]
    mask = torch.ones(len(sizes), max(h for h, _ in sizes), max(w for _, w in sizes))
    for row, (height, width) in enumerate(sizes):
        mask[row, :height, :width] = 0
    return FeatureMap(tensor, nn.functional.interpolate(mask[None], size=tensor.shape[-2:])[0].bool())


def recorded(tensors: dict[str, Tensor], prefix: str) -> Outputs:
    """The recorded output dictionary with its auxiliary layers, stacked."""
    count = sum(name.startswith(f"{prefix}aux_outputs.") and name.endswith("pred_boxes") for name in tensors)
    places = [f"{prefix}aux_outputs.{layer}." for layer in range(count)] + [prefix]
    return Outputs(
        *(torch.stack([tensors[place + name] for place in places]) for name in ("pred_logits", "pred_boxes"))
    )


def assert_close(actual: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=relative * max(expected.abs().max().item(), 1.0))


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_outputs_of_every_layer(golden: Path, case: str, mode: str) -> None:
    tensors, manifest = load(golden, case)
    weights = {name.removeprefix("weights."): value for name, value in tensors.items() if name.startswith("weights.")}
    model = build(manifest["cfg"], weights).train(mode == "train")
    outputs = model.detect([features(tensors, manifest["cfg"])])
    expected = recorded(tensors, f"{mode}.")
    assert outputs.num_streams == (2 if mode == "train" and manifest["cfg"].get("bf") else 1)
    assert_close(outputs.logits, expected.logits)
    assert_close(outputs.boxes, expected.boxes)


@pytest.mark.parametrize(
    ("official", "overrides"),
    [
        ("detr_resnet50", ["batch_former.enabled=false"]),
        ("detr_resnet101_dc5", ["batch_former.enabled=false", "model.backbone.name=resnet101", *DC5]),
        ("bf_detr_resnet50_i0_shared", ["batch_former.layers=[0]"]),
        ("bf_detr_resnet50_i0_nonshared", ["batch_former.layers=[0]", "batch_former.shared=false"]),
    ],
)
def test_full_size_checkpoints_fit_key_by_key(golden: Path, official: str, overrides: list[str]) -> None:
    shapes = json.loads((golden / "14_state_dict_keys" / f"{official}.json").read_text())["state_dict"]
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    num_classes = shapes["class_embed.bias"][0] - 1
    model = build_model(load_config(None, ["model.backbone.weights=none", *overrides]), num_classes)
    converted = from_official_detr(weights)
    own = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in converted.items()} == own


@pytest.mark.parametrize("case", MODELS)
def test_gradient_of_features(golden: Path, case: str) -> None:
    tensors, manifest = load(golden, case)
    weights = {name.removeprefix("weights."): value for name, value in tensors.items() if name.startswith("weights.")}
    model = build(manifest["cfg"], weights).train()
    feature = features(tensors, manifest["cfg"])
    feature.tensor.requires_grad_()
    outputs = model.detect([feature])
    probe = zip([*outputs.logits, *outputs.boxes], _probe_order(len(outputs.logits)), strict=True)
    total = torch.stack(
        [
            (x.double() * torch.cos(0.7 * torch.arange(x.numel(), dtype=torch.float64) + j).view_as(x)).sum()
            for x, j in probe
        ]
    ).sum()
    total.backward()
    assert total.item() == pytest.approx(manifest["probe"]["loss"], rel=1e-4, abs=1e-3)
    assert_close(feature.tensor.grad, tensors["grad.features.0"], relative=1e-3)


def _probe_order(layers: int) -> list[int]:
    """The place of each recorded name in sorted order: logits of all layers, then boxes, the last layer last."""
    names = [f"aux_outputs.{i}.pred_logits" for i in range(layers - 1)] + ["pred_logits"]
    names += [name.replace("logits", "boxes") for name in names]
    return [sorted(names).index(name) for name in names]


def targets_of(tensors: dict[str, Tensor], prefix: str) -> list[Target]:
    count = sum(name.startswith(prefix) and name.endswith(".labels") for name in tensors)
    return [
        Target(i, tensors[f"{prefix}{i}.boxes"], tensors[f"{prefix}{i}.labels"], (1, 1), (1, 1)) for i in range(count)
    ]


def assert_losses(tensors: dict[str, Tensor], sub: str, outputs: Outputs, criterion: SetCriterion) -> None:
    targets = targets_of(tensors, f"{sub}.in.targets.")
    report = criterion(outputs, targets)
    for name, loss in report.losses.items():
        assert_close(loss, tensors[f"{sub}.out.loss.{name}"])
    for name in ("class_error", "cardinality_error"):
        assert_close(report.logged[name], tensors[f"{sub}.out.loss.{name}"])
    assert_matches(tensors, sub, outputs, targets, criterion.matcher)


def assert_matches(
    tensors: dict[str, Tensor], sub: str, outputs: Outputs, targets: list[Target], matcher: HungarianMatcher
) -> None:
    matches = matcher(outputs, PaddedTargets.of(targets, outputs.num_streams))
    layers, rows = outputs.logits.shape[:2]
    for layer in range(layers):
        call = "last" if layer == layers - 1 else f"aux_{layer}"
        for row in range(rows):
            here = (matches.layer == layer) & (matches.row == row)
            assert torch.equal(matches.query[here], tensors[f"{sub}.out.indices.{call}.{row}.src"])
            assert torch.equal(matches.target[here], tensors[f"{sub}.out.indices.{call}.{row}.tgt"])


def set_criterion(no_object_weight: float) -> SetCriterion:
    classification = CrossEntropy(no_object_weight)
    return SetCriterion(classification, HungarianMatcher(classification))


@pytest.mark.parametrize("sub", ["main", "no_targets", "more_targets_than_queries"])
def test_criterion(golden: Path, sub: str) -> None:
    tensors, manifest = load(golden, "10a_detr_criterion")
    assert_losses(tensors, sub, recorded(tensors, f"{sub}.in.outputs."), set_criterion(manifest["eos_coef"]))


def test_two_stream_training_step(golden: Path) -> None:
    tensors, manifest = load(golden, "10e_bf_detr_engine_step")
    prefix = "step.in.weights."
    weights = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    outputs = build(manifest["cfg"], weights).train().detect([features(tensors, manifest["cfg"], "step.in.")])
    assert outputs.num_streams == 2
    assert_losses(tensors, "step", outputs, set_criterion(manifest["cfg"]["eos_coef"]))


def test_postprocess(golden: Path) -> None:
    tensors, _ = load(golden, "12a_detr_postprocess")
    outputs = Outputs(tensors["bbox.in.pred_logits"][None], tensors["bbox.in.pred_boxes"][None])
    sizes = [tuple(size) for size in tensors["bbox.in.target_sizes"].int().tolist()]
    targets = [Target(i, torch.empty(0, 4), torch.empty(0), size, size) for i, size in enumerate(sizes)]
    for i, detections in enumerate(Postprocess(CrossEntropy())(outputs, targets)):
        order = tensors[f"bbox.out.{i}.scores"].argsort(descending=True, stable=True)
        assert_close(detections.scores, tensors[f"bbox.out.{i}.scores"][order])
        assert_close(detections.boxes, tensors[f"bbox.out.{i}.boxes"][order])
        assert torch.equal(detections.labels, tensors[f"bbox.out.{i}.labels"][order])


@pytest.mark.parametrize("sub", ["sine", "sine_odd_mask"])
def test_sine_position(golden: Path, sub: str) -> None:
    tensors, manifest = load(golden, "13a_detr_position_encoding")
    position = sine_position(tensors[f"{sub}.in.mask"].bool(), 2 * manifest["num_pos_feats"])
    assert_close(position, tensors[f"{sub}.out.normalized"].flatten(2).transpose(1, 2))


def test_learned_position(golden: Path) -> None:
    tensors, manifest = load(golden, "13a_detr_position_encoding")
    module = LearnedPosition(2 * manifest["num_pos_feats"])
    module.load_state_dict(
        {"column.weight": tensors["learned.in.col_embed"], "row.weight": tensors["learned.in.row_embed"]}
    )
    position = module(tensors["learned.in.mask"].bool())
    assert_close(position, tensors["learned.out.pos"].flatten(2).transpose(1, 2))
