"""Checkpoints made inside detectron2: the adapter's, with our and their backbones, and official DETR's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from detr_bf.backbones import build_backbone
from detr_bf.common.errors import InputError
from detr_bf.interop.formats import FORMATS, format_of, from_foreign, is_ours, to_foreign
from detr_bf.interop.weights import read_weights, write_weights
from tests.detectors.tiny import DETECTORS, batch_former
from tests.interop.states import assert_same, state_of

MASK_HEAD = {
    "mask_head.attention.key.weight": torch.randn(2, 2),
    "mask_head.convolutions.layers.4.bias": torch.randn(2),
}
WITH_RESNET = ["detectron2_resnet", "detr_detectron2", "detr_detectron2_panoptic"]


def body(name: str = "resnet18", *, frozen_norm: bool = True) -> dict[str, Tensor]:
    """Build the backbone of our detector with random values."""
    made = build_backbone(name, weights="none", strides=[32], dilation=False, frozen_stages=0, frozen_norm=frozen_norm)
    state = made.state_dict()
    generator = torch.Generator().manual_seed(3)
    return {
        f"backbone.{key}": torch.randn(x.shape, generator=generator) if x.is_floating_point() else x
        for key, x in state.items()
    }


def state_for(form: str, name: str = "detr", **changes: object) -> dict[str, Tensor]:
    return state_of(name, **changes) | body() | (MASK_HEAD if form.endswith("panoptic") else {})


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage")
@pytest.mark.parametrize("name", DETECTORS)
def test_the_adapter_holds_our_names_in_its_detector(name: str) -> None:
    state = state_of(name) | body() | MASK_HEAD
    written = to_foreign(state, "detectron2")
    assert_same(written, {f"detector.{key}": x for key, x in state.items()})
    assert_same(from_foreign(written, "x"), state)


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage")
@pytest.mark.parametrize(
    ("form", "name"), [*[("detectron2_resnet", name) for name in DETECTORS], *[(form, "detr") for form in WITH_RESNET]]
)
def test_what_has_their_resnet_is_recognised_and_read_to_the_bit(form: str, name: str) -> None:
    state = state_for(form, name)
    written = to_foreign(state, form)
    found = format_of(written)
    assert found is not None
    assert found.name == form
    assert not is_ours(written)
    fitting = [other for other in FORMATS if not other.missing_signs(written)]
    most = max(len(other.signs) for other in fitting)
    assert [other.name for other in fitting if len(other.signs) == most] == [form]
    assert_same(from_foreign(written, "x"), state)


@pytest.mark.parametrize("form", ["detectron2", *WITH_RESNET])
def test_batch_attention_makes_a_round_trip(form: str) -> None:
    state = state_for(form, batch_former=batch_former())
    assert any("batch_former" in key for key in state)
    assert_same(from_foreign(to_foreign(state, form), "x"), state)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("stem.conv1.weight", "conv1.weight"),
        ("stem.conv1.norm.running_var", "bn1.running_var"),
        ("res2.1.conv2.weight", "layer1.1.conv2.weight"),
        ("res5.0.conv1.norm.bias", "layer4.0.bn1.bias"),
        ("res3.0.shortcut.weight", "layer2.0.downsample.0.weight"),
        ("res4.0.shortcut.norm.running_mean", "layer3.0.downsample.1.running_mean"),
    ],
)
@pytest.mark.parametrize(
    ("form", "prefix"),
    [
        ("detectron2_resnet", "detector.backbone.body"),
        ("detr_detectron2", "detr.backbone.0.backbone"),
        ("detr_detectron2_panoptic", "detr.detr.backbone.0.backbone"),
    ],
)
def test_their_resnet_is_torchvisions_under_other_names(form: str, prefix: str, theirs: str, ours: str) -> None:
    state = state_for(form)
    assert torch.equal(to_foreign(state, form)[f"{prefix}.{theirs}"], state[f"backbone.body.{ours}"])


@pytest.mark.parametrize("name", ["resnet50", "resnet101"])
def test_bottlenecks_have_a_third_convolution(name: str) -> None:
    state = state_of("detr") | body(name)
    written = to_foreign(state, "detectron2_resnet")
    assert torch.equal(
        written["detector.backbone.body.res4.5.conv3.norm.weight"], state["backbone.body.layer3.5.bn3.weight"]
    )
    assert_same(from_foreign(written, "x"), state)


def test_counters_of_norms_that_are_not_frozen_stay_with_them() -> None:
    state = state_of("detr") | body(frozen_norm=False)
    written = to_foreign(state, "detectron2_resnet")
    assert "detector.backbone.body.res2.0.conv1.norm.num_batches_tracked" in written
    assert_same(from_foreign(written, "x"), state)


@pytest.mark.parametrize(
    ("form", "theirs"),
    [
        ("detr_detectron2", "detr.transformer.decoder.layers.1.multihead_attn.in_proj_weight"),
        ("detr_detectron2", "detr.class_embed.weight"),
        ("detr_detectron2_panoptic", "detr.detr.query_embed.weight"),
        ("detr_detectron2_panoptic", "detr.bbox_attention.k_linear.weight"),
        ("detr_detectron2_panoptic", "detr.mask_head.lay5.bias"),
    ],
)
def test_official_detr_lies_in_a_module_of_its_wrapper(form: str, theirs: str) -> None:
    written = to_foreign(state_for(form), form)
    assert theirs in written
    assert all(name.startswith("detr.") for name in written)


@pytest.mark.parametrize("form", ["detr_detectron2", "detr_detectron2_panoptic"])
def test_the_weights_of_their_criterion_are_left_out(form: str) -> None:
    state = state_for(form)
    stored = to_foreign(state, form) | {"criterion.empty_weight": torch.ones(81)}
    assert_same(from_foreign(stored, "x"), state)


def test_another_backbone_has_its_place_only_where_it_is_ours() -> None:
    state = state_of("detr") | {"backbone.body.blocks.0.weight": torch.zeros(1)}
    assert "detector.backbone.body.blocks.0.weight" in to_foreign(state, "detectron2")
    for form in ("detectron2_resnet", "detr_detectron2"):
        with pytest.raises(InputError, match=r"no names for these tensors: backbone\.body\.blocks\.0\.weight"):
            to_foreign(state, form)


@pytest.mark.parametrize("form", ["detectron2", *WITH_RESNET])
def test_files_hold_the_weights_where_detectron2_looks_for_them(form: str, tmp_path: Path) -> None:
    state, path = state_for(form), tmp_path / "model_final.pth"
    write_weights(path, state, form)
    assert set(torch.load(path, weights_only=True)) == {"model"}
    assert_same(read_weights(path), state)


def test_what_the_trainer_writes_beside_the_weights_is_no_hindrance(tmp_path: Path) -> None:
    state = state_of("deformable_detr_two_stage")
    trainer = {"iteration": 9, "_trainer": {"optimizer": {"state": {}, "param_groups": [{"lr": 1e-4}]}}, "hooks": {}}
    torch.save({"model": to_foreign(state, "detectron2"), "trainer": trainer, "iteration": 9}, tmp_path / "model.pth")
    assert_same(read_weights(tmp_path / "model.pth"), state)
