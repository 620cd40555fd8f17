"""Detectors of Hugging Face transformers as an independent check: the same weights give the same outputs.

Both models read the same pixels through the same ResNet, which compares backbone, padding masks, position encodings,
transformer and heads. Deformable DETR's encodings number the cell centres from -0.5 in both implementations.

Two differences of transformers are avoided. With ``auxiliary_loss`` its DETR and Conditional DETR feed normalised
states into the next layer, so it is off and the tests apply the heads to the outputs of the layers. It ties the class
heads of all layers, but box refinement needs separate heads, so with refinement tying is off, and the tests share the
box heads with the decoder. Its DAB-DETR inverts sigmoids with an eps of 1e-5, the authors' with 1e-3; the anchors of
the tests are farther than both from 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    ConditionalDetrConfig,
    DabDetrConfig,
    DeformableDetrConfig,
    DetrConfig,
    ResNetConfig,
    TimmBackboneConfig,
)

from detr_bf.backbones import build_backbone
from detr_bf.backbones.backbone import MEAN, STD
from detr_bf.common.structures import Batch, Outputs
from detr_bf.detectors import DETECTORS, Detector, Options
from detr_bf.interop.formats import format_of, from_foreign, to_foreign
from detr_bf.interop.weights import read_weights, write_weights
from tests.interop.states import assert_same

DIM, HEADS, HIDDEN, QUERIES, CLASSES, ENCODER_LAYERS, DECODER_LAYERS = 32, 4, 24, 7, 3, 2, 3
SIZES = {
    "d_model": DIM,
    "encoder_layers": ENCODER_LAYERS,
    "decoder_layers": DECODER_LAYERS,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "num_queries": QUERIES,
    "num_labels": CLASSES,
    "dropout": 0.0,
}
REFINE = {"with_box_refine": True, "tie_word_embeddings": False}
TWO_STAGE = REFINE | {"two_stage": True, "two_stage_num_proposals": QUERIES}
DAB = {"hidden_size": DIM}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "detr": ("detr", {}),
    "detr_learned_position": ("detr", {"position_embedding_type": "learned"}),
    "conditional_detr": ("conditional_detr", {}),
    "dab_detr": ("dab_detr", DAB),
    "dab_detr_patterns": ("dab_detr", DAB | {"num_patterns": 2}),
    "deformable_detr": ("deformable_detr", {}),
    "deformable_detr_refine": ("deformable_detr", REFINE),
    "deformable_detr_two_stage": ("deformable_detr", TWO_STAGE),
}
every_case = pytest.mark.parametrize("case", CASES)
both_backbones = pytest.mark.parametrize("timm", [False, True], ids=["own_resnet", "timm"])


def theirs(case: str, *, timm: bool = False, **more: Any) -> nn.Module:
    """Build their detector with random weights."""
    family, changes = CASES[case]
    changes = changes | more
    config, model = {
        "detr": (DetrConfig, transformers.DetrForObjectDetection),
        "conditional_detr": (ConditionalDetrConfig, transformers.ConditionalDetrForObjectDetection),
        "dab_detr": (DabDetrConfig, transformers.DabDetrForObjectDetection),
        "deformable_detr": (DeformableDetrConfig, transformers.DeformableDetrForObjectDetection),
    }[family]
    built = model(config(backbone_config=_backbone_config(family, timm), **(SIZES | changes)))
    if family == "dab_detr":
        built.model.decoder.bbox_embed = built.bbox_predictor
    if changes.get("with_box_refine"):
        built.model.decoder.bbox_embed = built.bbox_embed
    if changes.get("two_stage"):
        built.model.decoder.class_embed = built.class_embed
    return shaken(built).eval()


def _backbone_config(family: str, timm: bool) -> Any:
    levels = (2, 3, 4) if family == "deformable_detr" else (4,)
    if timm:
        return TimmBackboneConfig(backbone="resnet18", out_indices=levels, use_pretrained_backbone=False)
    return ResNetConfig(
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        out_features=[f"stage{level}" for level in levels],
    )


def shaken(module: nn.Module) -> nn.Module:
    """Make every tensor random; variances and scales of the norms stay around 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.dtype.is_floating_point and tensor.dim() == 1 and name.endswith(("weight", "running_var")):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dtype.is_floating_point:
                tensor.normal_(std=1.0 / max(tensor[0].numel(), 4) ** 0.5)
    return module


def ours(case: str) -> Detector:
    """Build our detector of the same kind, with other weights."""
    family, changes = CASES[case]
    strides = [8, 16, 32] if family == "deformable_detr" else [32]
    backbone = build_backbone(
        "resnet18", weights="none", strides=strides, dilation=False, frozen_stages=0, frozen_norm=True
    )
    options = Options(
        num_logits=CLASSES + (family == "detr"),
        hidden_dim=DIM,
        heads=HEADS,
        encoder_layers=ENCODER_LAYERS,
        decoder_layers=DECODER_LAYERS,
        feedforward_dim=HIDDEN,
        num_queries=QUERIES,
        position_encoding=changes.get("position_embedding_type", "sine"),
        activation="prelu" if family == "dab_detr" else "relu",
        position_temperature=20.0 if family == "dab_detr" else 10000.0,
    )
    own: dict[str, Any] = {
        "deformable_detr": {"box_refine": "with_box_refine" in changes, "two_stage": "two_stage" in changes},
        "dab_detr": {"patterns": changes.get("num_patterns", 0)},
    }.get(family, {})
    return DETECTORS[family](backbone, backbone.channels, options, **own).eval()


def format_name(case: str, timm: bool) -> str:
    return f"hf_{CASES[case][0]}{'' if timm else '_no_timm'}"


def batch() -> Batch:
    """Return two images, the second smaller in both directions."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (2, 3, 128, 192), generator=generator, dtype=torch.uint8)
    mask = torch.zeros(2, 128, 192, dtype=torch.bool)
    mask[1, 90:] = mask[1, :, 120:] = True
    return Batch(pixels, mask)


def their_outputs(model: nn.Module, images: Batch) -> Outputs:
    """Return the outputs of all decoder layers, and the proposals of two-stage detectors."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    pixels = ((images.images / 255 - mean) / std).masked_fill(images.padding_mask[:, None], 0.0)
    visible = (~images.padding_mask).long()
    with seen([model.model, *model.model.decoder.layers]) as outputs:
        found = model(pixel_values=pixels, pixel_mask=visible)
    *states, inner = outputs
    if isinstance(model, transformers.DeformableDetrForObjectDetection):
        references = [found.init_reference_points, *found.intermediate_reference_points.unbind(1)[:-1]]
        heads = list(zip(model.class_embed, model.bbox_embed, strict=True))[: len(states)]
    elif isinstance(model, transformers.DabDetrForObjectDetection):
        states, references = inner.intermediate_hidden_states.unbind(), inner.reference_points.unbind()
        heads = [(model.class_embed, model.bbox_predictor)] * len(states)
    else:
        states = [model.model.decoder.layernorm(state) for state in states]
        points = inner.get("reference_points")
        references = [None if points is None else points.transpose(0, 1)] * len(states)
        heads = [(model.class_labels_classifier, model.bbox_predictor)] * len(states)
    logits = torch.stack([classes(state) for (classes, _), state in zip(heads, states, strict=True)])
    boxes = torch.stack([_boxes(head(x), point) for (_, head), x, point in zip(heads, states, references, strict=True)])
    torch.testing.assert_close(logits[-1], found.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(boxes[-1], found.pred_boxes, rtol=0, atol=1e-5)
    proposals = None
    if found.get("enc_outputs_class") is not None:
        proposals = Outputs(found.enc_outputs_class[None], found.enc_outputs_coord_logits.sigmoid()[None])
    return Outputs(logits, boxes, proposals=proposals)


@contextmanager
def seen(modules: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Record the modules' results inside the block, in the order of their completion."""
    outputs: list[Any] = []
    hooks = [module.register_forward_hook(lambda module, inputs, output: outputs.append(output)) for module in modules]
    yield outputs
    for hook in hooks:
        hook.remove()


def _boxes(offsets: Tensor, reference: Tensor | None) -> Tensor:
    if reference is None:
        return offsets.sigmoid()
    known = reference.shape[-1]
    moved = offsets[..., :known] + torch.logit(reference, eps=1e-5)
    return torch.cat([moved, offsets[..., known:]], dim=-1).sigmoid()


def assert_equal_outputs(actual: Outputs, expected: Outputs) -> None:
    for name in ("logits", "boxes"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * max(other.abs().max().item(), 1.0))
    assert (actual.proposals is None) == (expected.proposals is None)
    if actual.proposals is not None and expected.proposals is not None:
        assert_equal_outputs(actual.proposals, expected.proposals)


@pytest.mark.default_tier("detr-own_resnet", "dab_detr_patterns-timm", "deformable_detr_refine-own_resnet")
@torch.no_grad()
@both_backbones
@every_case
def test_their_weights_give_their_outputs_in_all_layers(case: str, timm: bool) -> None:
    model, converted = theirs(case, timm=timm), ours(case)
    converted.load_state_dict(from_foreign(model.state_dict(), case))
    expected = their_outputs(model, batch())
    assert expected.logits.std() > 0.05, "the weights change the result"
    assert_equal_outputs(converted(batch()), expected)


@pytest.mark.default_tier("detr-timm", "conditional_detr-own_resnet", "deformable_detr_refine-timm")
@torch.no_grad()
@both_backbones
@every_case
def test_our_weights_give_our_outputs_there(case: str, timm: bool) -> None:
    model, original = theirs(case, timm=timm), shaken(ours(case))
    state = to_foreign(original.state_dict(), format_name(case, timm))
    assert {name: x.shape for name, x in state.items()} == {name: x.shape for name, x in model.state_dict().items()}
    model.load_state_dict(state)
    assert_equal_outputs(original(batch()), their_outputs(model, batch()))


@pytest.mark.default_tier("detr-own_resnet", "conditional_detr-timm", "deformable_detr_refine-timm")
@both_backbones
@every_case
def test_round_trip_to_the_bit(case: str, timm: bool) -> None:
    state = theirs(case, timm=timm).state_dict()
    found = format_of(state)
    assert found is not None
    assert found.name == format_name(case, timm)
    assert_same(to_foreign(from_foreign(state, case), found.name), state)


@pytest.mark.default_tier("detr-tied", "deformable_detr_refine-untied", "dab_detr_patterns-tied")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@every_case
def test_what_their_save_pretrained_writes(case: str, tied: bool, tmp_path: Path) -> None:
    """The file has the names of transformers 4, and only one of tied tensors."""
    model = theirs(case, timm=tied, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any("conv_encoder" in name for name in stored)
    assert_same(read_weights(tmp_path / "model.safetensors"), from_foreign(model.state_dict(), case))


@pytest.mark.default_tier("detr", "deformable_detr_refine")
@torch.no_grad()
@every_case
def test_their_from_pretrained_reads_what_we_write(case: str, tmp_path: Path) -> None:
    timm = case.startswith("deformable_detr")
    model, original = theirs(case, timm=timm), shaken(ours(case))
    model.config.save_pretrained(tmp_path)
    write_weights(tmp_path / "model.safetensors", original.state_dict(), format_name(case, timm))
    with safe_open(tmp_path / "model.safetensors", "pt") as written:
        assert written.metadata() == {"format": "pt"}, "transformers 4 requires it"
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert_equal_outputs(original(batch()), their_outputs(loaded.eval(), batch()))


@pytest.mark.parametrize("name", ["resnet50", "resnet101"])
def test_bottlenecks_of_their_own_resnet(name: str) -> None:
    depths = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3]}[name]
    with torch.device("meta"):
        backbone_config = ResNetConfig(depths=depths, out_features=["stage4"])
        state = transformers.DetrForObjectDetection(DetrConfig(backbone_config=backbone_config)).state_dict()
        body = build_backbone(
            name, weights="none", strides=[32], dilation=False, frozen_stages=0, frozen_norm=True
        ).state_dict()
    mapped = {name: x.shape for name, x in from_foreign(state, name).items() if name.startswith("backbone.")}
    assert mapped == {f"backbone.{name}": x.shape for name, x in body.items()}


def test_counters_of_norms_that_are_not_frozen_are_left_out() -> None:
    state = theirs("detr", timm=True).state_dict()
    counted = state | {"model.backbone.model.layer1.0.bn1.num_batches_tracked": torch.tensor(1)}
    assert_same(from_foreign(counted, "counted"), from_foreign(state, "not"))
    converted = from_foreign(state, "x") | {"backbone.body.bn1.num_batches_tracked": torch.tensor(1)}
    assert_same(to_foreign(converted, "hf_detr"), state)
