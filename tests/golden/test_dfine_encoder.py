"""Backbone, input projections and hybrid encoder of D-FINE against the authors' code, without the decoder."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from timm.models import hgnet
from torch import Tensor

from detr_bf.backbones import Backbone, build_backbone
from detr_bf.common.structures import FeatureMap
from detr_bf.detectors import Options
from detr_bf.detectors.dfine_encoder import dfine_encoder
from detr_bf.detectors.hybrid_encoder import HybridEncoder, NormedConvolution
from detr_bf.detectors.smca_multi_scale import as_maps
from detr_bf.interop.formats import from_foreign
from detr_bf.transformer import FeatureTokens
from tests.golden.cases import Case, assert_close, features, samples_mask

MODES = ("eval", "train")


def tiny_backbone(case: Case, monkeypatch: pytest.MonkeyPatch) -> Backbone:
    """Build the small HGNetv2 of the case in the place of one of timm's."""
    cfg = case.cfg["backbone"]
    name = "hgnetv2_b0" if cfg["use_lab"] else "hgnetv2_b4"
    assert cfg["stem_channels"][0] == 3
    stages = {f"stage{number}": stage for number, stage in enumerate(cfg["stages"], start=1)}
    monkeypatch.setitem(hgnet.model_cfgs, name, {"stem_type": "v2", "stem_chs": cfg["stem_channels"][1:], **stages})
    frozen = cfg["freeze_at"] + 1
    return build_backbone(
        name,
        weights="none",
        strides=[4 * 2**stage for stage in cfg["return_idx"]],
        dilation=False,
        frozen_stages=frozen if cfg["freeze_stem_only"] or not frozen else frozen + 1,
        frozen_norm=cfg["freeze_norm"],
    )


def loaded(case: Case, **parts: torch.nn.Module) -> None:
    """Load the weights of the case into parts of our detector, by the names of the parts."""
    state = from_foreign(case.below("weights."), case.name)
    for name, part in parts.items():
        part.load_state_dict({k.removeprefix(f"{name}."): x for k, x in state.items() if k.startswith(f"{name}.")})


def tokens_and_encoder(case: Case) -> tuple[FeatureTokens, HybridEncoder]:
    cfg = case.cfg
    width, channels = cfg["hidden_dim"], cfg["backbone_num_channels"]
    chosen = Options(
        num_logits=cfg["num_classes"],
        hidden_dim=width,
        heads=cfg["nheads"],
        encoder_layers=cfg["num_encoder_layers"],
        dropout=0.0,
    )
    tokens = FeatureTokens([NormedConvolution(count, width) for count in channels], None)
    encoder = dfine_encoder(
        chosen,
        width=width,
        feedforward_dim=cfg["enc_dim_feedforward"],
        levels=len(channels),
        expansion=cfg["expansion"],
        blocks=round(3 * cfg["depth_mult"]),
        attention_levels=cfg["use_encoder_idx"],
        as_released=True,
    )
    loaded(case, tokens=tokens, encoder=encoder)
    return tokens, encoder


def assert_recorded(found: Sequence[Tensor], case: Case, prefix: str, first: int = 0) -> None:
    """Compare with the recorded maps ``PREFIX0`` and so on, of which at least one must be there."""
    expected = [case.tensors.get(f"{prefix}{index + first}") for index in range(len(found))]
    assert any(x is not None for x in expected), f"{case.name} has no {prefix}"
    for x, recorded in zip(found, expected, strict=True):
        if recorded is not None:
            assert_close(x, recorded)


@pytest.mark.parametrize("mode", MODES)
def test_maps_of_the_encoder(dfine_encoder_case: Case, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, mask = dfine_encoder_case, samples_mask(dfine_encoder_case)
    tokens, encoder = tokens_and_encoder(case)
    if "input.images" in case.tensors:
        backbone = tiny_backbone(case, monkeypatch)
        loaded(case, backbone=backbone)
        maps: Sequence[FeatureMap] = backbone.train(mode == "train")(255 * case.tensors["input.images"], mask)
    else:
        maps = features(case)
    batch = tokens.train(mode == "train")(maps, mask)
    memory = encoder.train(mode == "train")(batch)
    assert_recorded(as_maps(memory.tokens, batch.static["spatial_shapes"]), case, f"mid.{mode}.encoder_out.")


def test_maps_of_the_backbone(dfine_pixels_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone(dfine_pixels_case, monkeypatch)
    loaded(dfine_pixels_case, backbone=backbone)
    images, mask = dfine_pixels_case.tensors["input.images"], samples_mask(dfine_pixels_case)
    found = [level.tensor for level in backbone.eval()(255 * images, mask)]
    first = dfine_pixels_case.cfg["backbone"]["return_idx"][0]
    assert_recorded(found, dfine_pixels_case, "mid.eval.backbone.stage.", first)


def test_frozen_parts_of_the_backbone(dfine_pixels_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the parameters without gradients; frozen norms have none of either kind."""
    backbone = tiny_backbone(dfine_pixels_case, monkeypatch)
    frozen = {name for name, x in backbone.body.named_parameters() if not x.requires_grad}
    recorded = dfine_pixels_case.manifest["loss_grads"]["param_grads"]
    theirs = {
        name.removeprefix("backbone.").replace("stages.", "stages_", 1)
        for name, numbers in recorded.items()
        if name.startswith("backbone.") and numbers is None
    }
    assert frozen == theirs
