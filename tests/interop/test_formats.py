"""Detection of formats, and errors for unknown ones."""

from __future__ import annotations

import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.common.weights import without_wrapper
from detr_bf.interop.formats import FORMATS, NAMES, format_of, from_foreign, is_ours, to_foreign
from tests.detectors.tiny import DETECTORS, batch_former
from tests.interop.states import assert_same, state_of

SHARED = {  # formats of other detectors
    "dino_shared_heads": ("dino",),
    "dn_detr": ("dab_detr",),
    "group_detr": ("conditional_detr", "hf_conditional_detr"),
    "h_deformable_detr": ("deformable_detr",),
}
FORMATS_OF = {
    name: [
        form for form in NAMES if form.removeprefix("hf_") == family or form in ("detectron2", *SHARED.get(name, ()))
    ]
    for name in DETECTORS
    for family in [name.removesuffix("_refine").removesuffix("_two_stage").removesuffix("_patterns")]
}
PAIRS = [(name, form) for name, forms in FORMATS_OF.items() for form in forms]
every_pair = pytest.mark.parametrize(("name", "form"), PAIRS)


def test_every_detector_has_the_formats_of_its_authors_of_hugging_face_and_of_the_adapter() -> None:
    published = {"detr": 3, "conditional_detr": 3, "deformable_detr": 3, "smca": 2, "smca_multi_scale": 2}
    published |= {"dab_detr": 3, "dn_detr": 2, "dab_deformable_detr": 2}
    assert {name: len(FORMATS_OF[name]) for name in published} == published


@every_pair
def test_what_is_written_is_recognised_and_read_to_the_bit(name: str, form: str) -> None:
    state = state_of(name)
    written = to_foreign(state, form)
    found = format_of(written)
    assert found is not None
    assert found.name == form
    assert not is_ours(written)
    assert_same(from_foreign(written, "x"), state)


@every_pair
def test_no_other_format_has_as_many_signs(name: str, form: str) -> None:
    written = to_foreign(state_of(name), form)
    fitting = [other for other in FORMATS if not other.missing_signs(written)]
    most = max(len(other.signs) for other in fitting)
    assert [other.name for other in fitting if len(other.signs) == most] == [form]


@pytest.mark.parametrize("name", DETECTORS)
def test_ours_are_no_foreign_format(name: str) -> None:
    state = state_of(name)
    assert format_of(state) is None
    assert is_ours(state)


@pytest.mark.default_tier(
    "detr-rtdetr",
    "detr-hf_conditional_detr",
    "dino-detr",
    "dino-rtdetr",
    "smca-deformable_detr",
    "rtdetr-hf_detr",
    "deformable_detr_two_stage-dab_detr",
    "conditional_detr-detr",
)
@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in DETECTORS for form in NAMES if (name, form) not in PAIRS]
)
def test_other_detectors_are_refused(name: str, form: str) -> None:
    shapes = {key: tensor.shape for key, tensor in state_of(name).items()}
    owners = [owner for owner, other in PAIRS if other == form]
    if any({key: tensor.shape for key, tensor in state_of(owner).items()} == shapes for owner in owners):
        pytest.skip("a detector with the same tensors")
    with pytest.raises(InputError, match=r"no names for these tensors|not the weights of a whole"):
        to_foreign(state_of(name), form)


@pytest.mark.parametrize("form", [form for form in NAMES if form.startswith("hf_detr")])
def test_hugging_face_has_no_batch_attention(form: str) -> None:
    with pytest.raises(InputError, match=r"no names for these tensors: .*batch_former"):
        to_foreign(state_of("detr", batch_former=batch_former()), form)


@pytest.mark.parametrize("form", ["detr", "hf_detr"])
def test_norms_behind_the_projection_have_no_place(form: str) -> None:
    with pytest.raises(InputError, match=r"tokens\.projections\.0\.1\.weight"):
        to_foreign(state_of("detr", input_norm=True), form)


def test_a_backbone_that_is_no_resnet_has_its_place_in_timm_alone() -> None:
    state = state_of("detr") | {"backbone.body.blocks.0.weight": torch.zeros(1)}
    assert "model.backbone.model.blocks.0.weight" in to_foreign(state, "hf_detr")
    with pytest.raises(InputError, match=r"no names for these tensors: backbone\.body\.blocks\.0\.weight"):
        to_foreign(state, "hf_detr_no_timm")


def test_weights_of_half_a_detector_are_refused() -> None:
    half = {name: tensor for name, tensor in state_of("detr").items() if not name.startswith("decoder.layers.0")}
    with pytest.raises(InputError, match=r"a whole official DETR detector: .*multihead_attn is missing"):
        to_foreign(half, "detr")


def test_unknown_format_to_write() -> None:
    with pytest.raises(InputError, match="no checkpoint format 'mask_rcnn'; there are: detr, detr_panoptic"):
        to_foreign({}, "mask_rcnn")


def test_unknown_format_to_read_names_those_tried_and_the_closest() -> None:
    state = to_foreign(state_of("conditional_detr"), "conditional_detr")
    without = {name: x for name, x in state.items() if "ref_point_head" not in name}
    with pytest.raises(InputError) as caught:
        from_foreign(without, "file.pth")
    said = str(caught.value)
    assert "file.pth" in said
    assert all(name in said for name in NAMES)
    count = len(without)
    assert f"closest is conditional_detr, which knows {count} of the {count} names and misses transf" in said
    with pytest.raises(InputError, match="none knows any of the names"):
        from_foreign({"blocks.0.weight": torch.zeros(1)}, "file.pth")


def test_unknown_names_of_a_known_format_are_listed() -> None:
    state = to_foreign(state_of("detr"), "detr") | {f"extra.{i}": torch.zeros(1) for i in range(10)}
    with pytest.raises(InputError, match=r"file.pth looks like official DETR.*unknown there: extra\.0, .* and 2 more"):
        from_foreign(state, "file.pth")


def test_the_wrapper_of_data_parallel_training_is_taken_off() -> None:
    state = state_of("detr")
    wrapped = {f"module.{name}": tensor for name, tensor in to_foreign(state, "detr").items()}
    assert_same(from_foreign(wrapped, "x"), state)
    mixed = {"module.a": torch.zeros(1), "b": torch.zeros(1)}
    assert_same(without_wrapper(mixed), mixed)
