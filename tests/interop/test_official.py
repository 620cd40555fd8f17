"""Special contents of the authors' files, and some names written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.interop.formats import from_foreign, to_foreign
from tests.detectors.tiny import DIM, QUERIES, batch_former
from tests.interop.states import assert_same, state_of

ENCODER, DECODER = "transformer.encoder.layers.1", "transformer.decoder.layers.1"
BATCH_FORMERS = {
    "shared": {"layers": [0]},
    "shared_twice": {"layers": [0, 1]},
    "own": {"layers": [1], "shared": False},
    "own_twice": {"layers": [0, 1], "shared": False},
    "deep": {"layers": [0], "num_layers": 2},
    "deep_own": {"layers": [0, 1], "num_layers": 2, "shared": False},
}
NAMES = {
    "detr": {
        f"{ENCODER}.norm1.weight": "encoder.layers.1.attention_residual.norm.weight",
        f"{ENCODER}.norm2.bias": "encoder.layers.1.feed_forward_residual.norm.bias",
        f"{ENCODER}.linear1.weight": "encoder.layers.1.feed_forward.expand.weight",
        f"{ENCODER}.linear2.weight": "encoder.layers.1.feed_forward.contract.weight",
        f"{ENCODER}.self_attn.out_proj.weight": "encoder.layers.1.attention.attention.out.weight",
        f"{DECODER}.norm1.weight": "decoder.layers.1.self_residual.norm.weight",
        f"{DECODER}.norm2.weight": "decoder.layers.1.cross_residual.norm.weight",
        f"{DECODER}.norm3.weight": "decoder.layers.1.feed_forward_residual.norm.weight",
        f"{DECODER}.multihead_attn.out_proj.bias": "decoder.layers.1.cross_attention.attention.out.bias",
        "transformer.decoder.norm.weight": "decoder.norm.weight",
        "transformer.encoder.norm.weight": "encoder.norm.weight",
        "backbone.1.col_embed.weight": "tokens.position.column.weight",
        "backbone.1.row_embed.weight": "tokens.position.row.weight",
        "bbox_embed.layers.1.weight": "decoder.heads.boxes.0.layers.1.weight",
        "class_embed.bias": "decoder.heads.classes.0.bias",
        "query_embed.weight": "decoder.queries.position.weight",
        "input_proj.weight": "tokens.projections.0.weight",
    },
    "conditional_detr": {
        f"{DECODER}.ca_kcontent_proj.weight": "decoder.layers.1.cross_attention.content_key.weight",
        f"{DECODER}.sa_qpos_proj.weight": "decoder.layers.1.self_attention.position_query.weight",
        "transformer.decoder.query_scale.layers.1.bias": "decoder.update_queries.scale.layers.1.bias",
    },
    "smca": {f"{DECODER}.point2.weight": "decoder.layers.1.cross_attention.gaussian.offset.weight"},
    "deformable_detr": {
        # norm1 of Deformable DETR belongs to its cross-attention
        f"{DECODER}.norm1.weight": "decoder.layers.1.cross_residual.norm.weight",
        f"{DECODER}.norm2.weight": "decoder.layers.1.self_residual.norm.weight",
        f"{DECODER}.cross_attn.value_proj.weight": "decoder.layers.1.cross_attention.attention.value.weight",
        "transformer.reference_points.weight": "decoder.queries.reference.weight",
        "class_embed.1.weight": "decoder.heads.classes.0.weight",
    },
}
EXTRA = {"detr": {"pre_norm": True, "position_encoding": "learned"}}


@pytest.mark.parametrize("name", NAMES)
def test_each_name_goes_to_its_own_place(name: str) -> None:
    state = state_of(name, **EXTRA.get(name, {}))
    written = to_foreign(state, name)
    for theirs, ours in NAMES[name].items():
        assert torch.equal(written[theirs], state[ours]), theirs


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (f"{ENCODER}.self_attn", "encoder.layers.1.attention.attention"),
        (f"{DECODER}.self_attn", "decoder.layers.1.self_attention.attention"),
        (f"{DECODER}.multihead_attn", "decoder.layers.1.cross_attention.attention"),
    ],
)
def test_packed_projections_are_query_key_and_value(theirs: str, ours: str) -> None:
    state = state_of("detr")
    written = to_foreign(state, "detr")
    for index, part in enumerate(("query", "key", "value")):
        rows = slice(index * DIM, (index + 1) * DIM)
        assert torch.equal(written[f"{theirs}.in_proj_weight"][rows], state[f"{ours}.{part}.weight"])
        assert torch.equal(written[f"{theirs}.in_proj_bias"][rows], state[f"{ours}.{part}.bias"])


def test_query_embedding_of_deformable_detr_is_position_and_content() -> None:
    state = state_of("deformable_detr")
    packed = to_foreign(state, "deformable_detr")["query_embed.weight"]
    assert packed.shape == (QUERIES, 2 * DIM)
    assert torch.equal(packed[:, :DIM], state["decoder.queries.position.weight"])
    assert torch.equal(packed[:, DIM:], state["decoder.queries.content.weight"])


@pytest.mark.parametrize("kind", BATCH_FORMERS)
@pytest.mark.parametrize("name", ["detr", "conditional_detr", "smca", "smca_multi_scale", "deformable_detr"])
def test_batch_attention_makes_a_round_trip(name: str, kind: str) -> None:
    state = with_batch_former(name, kind)
    assert_same(from_foreign(to_foreign(state, name), "x"), state)


def with_batch_former(name: str, kind: str) -> dict[str, Tensor]:
    return state_of(name, batch_former=batch_former(**BATCH_FORMERS[kind]))


@pytest.mark.parametrize("prefix", ["transformer.bf.", "transformer.encoder.bf.", ""], ids=["one", "other", "both"])
@pytest.mark.parametrize("kind", BATCH_FORMERS)
@pytest.mark.parametrize("name", ["detr", "deformable_detr"])
def test_batch_attention_in_one_place_or_the_other_or_both(name: str, kind: str, prefix: str) -> None:
    state = with_batch_former(name, kind)
    stored = in_both_places(to_foreign(state, name))
    chosen = {key: x for key, x in stored.items() if ".bf." not in key or key.startswith(prefix)}
    assert_same(from_foreign(chosen, "x"), state)


def in_both_places(state: dict[str, Tensor]) -> dict[str, Tensor]:
    copies = {key.replace("transformer.bf.", "transformer.encoder.bf."): x for key, x in state.items()}
    return state | copies


def test_modules_that_are_not_shared_are_written_in_both_places() -> None:
    written = to_foreign(with_batch_former("detr", "own_twice"), "detr")
    prefixes = {key.removesuffix(".linear1.weight") for key in written if ".bf." in key and "linear1.weight" in key}
    assert prefixes == {f"transformer.{prefix}.{layer}" for prefix in ("bf", "encoder.bf") for layer in (0, 1)}


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_places_that_differ_are_refused(kind: str) -> None:
    state = in_both_places(to_foreign(with_batch_former("detr", kind), "detr"))
    [changed] = [key for key in state if key.startswith("transformer.encoder.bf.") and key.endswith("norm2.bias")]
    with pytest.raises(InputError, match="should hold the same tensor"):
        from_foreign(state | {changed: state[changed] + 1}, "x")


@pytest.mark.parametrize("name", ["deformable_detr", "deformable_detr_refine", "deformable_detr_two_stage"])
def test_counters_of_a_profiler_are_left_out(name: str) -> None:
    state = state_of(name)
    counted = to_foreign(state, "deformable_detr")
    for prefix in ("", "transformer.encoder.layers.0.", "bbox_embed.0."):
        counted |= {f"{prefix}total_{what}": torch.zeros(1) for what in ("params", "ops")}
    assert_same(from_foreign(counted, "x"), state)


@pytest.mark.parametrize("name", ["deformable_detr_refine", "deformable_detr_two_stage"])
def test_heads_of_refinement_that_are_stored_once(name: str) -> None:
    """Files of safetensors' converter keep only the first name of each tensor."""
    state = state_of(name)
    once = {key: x for key, x in to_foreign(state, "hf_deformable_detr").items() if "decoder.bbox_embed" not in key}
    once = {key: x for key, x in once.items() if "decoder.class_embed" not in key}
    assert_same(from_foreign(once, "x"), state)


def test_two_stages_with_one_decoder_layer() -> None:
    state = state_of("deformable_detr_two_stage", decoder_layers=1)
    assert_same(from_foreign(to_foreign(state, "deformable_detr"), "x"), state)


def test_heads_without_refinement_that_are_stored_once() -> None:
    state = state_of("deformable_detr")
    for form in ("deformable_detr", "hf_deformable_detr"):
        written = to_foreign(state, form)
        once = {key: x for key, x in written.items() if not key.startswith(("bbox_embed.1", "class_embed.1"))}
        assert len(once) < len(written)
        assert_same(from_foreign(once, "x"), state)


@pytest.mark.parametrize("kind", [None, *BATCH_FORMERS])
def test_panoptic_files_hold_the_detector_and_a_mask_head(kind: str | None) -> None:
    state = with_batch_former("detr", kind) if kind else state_of("detr")
    mask_head = {
        "mask_head.attention.query.weight": torch.randn(DIM, DIM),
        "mask_head.convolutions.layers.0.weight": torch.randn(3, 3),
    }
    written = to_foreign(state | mask_head, "detr_panoptic")
    assert {key.split(".")[0] for key in written} == {"detr", "bbox_attention", "mask_head"}
    assert_same(from_foreign(written, "x"), state | mask_head)
    stored = in_both_places(written)
    for prefix in ("transformer.bf.", "transformer.encoder.bf."):
        one_prefix = {key: x for key, x in stored.items() if ".bf." not in key or key.startswith(f"detr.{prefix}")}
        assert_same(from_foreign(one_prefix, "x"), state | mask_head)
