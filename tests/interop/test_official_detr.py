"""The name table, on a state dict whose official names and shapes are written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.detectors import detr
from detr_bf.interop import from_official_detr, is_official_detr

CHANNELS, DIM, HIDDEN, QUERIES, LOGITS, LAYERS = 3, 8, 12, 5, 4, 12

ATTENTION = {
    "in_proj_weight": (3 * DIM, DIM),
    "in_proj_bias": (3 * DIM,),
    "out_proj.weight": (DIM, DIM),
    "out_proj.bias": (DIM,),
}
NORM = {"weight": (DIM,), "bias": (DIM,)}


def linear(width_in: int, width_out: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (width_out, width_in), "bias": (width_out,)}


ENCODER_LAYER = {
    "self_attn": ATTENTION,
    "linear1": linear(DIM, HIDDEN),
    "linear2": linear(HIDDEN, DIM),
    "norm1": NORM,
    "norm2": NORM,
}
DECODER_LAYER = ENCODER_LAYER | {"multihead_attn": ATTENTION, "norm3": NORM}
BATCH_FORMER = ENCODER_LAYER | {"linear1": linear(DIM, DIM), "linear2": linear(DIM, DIM)}


def filled(modules: dict[str, dict[str, tuple[int, ...]]], prefix: str = "") -> dict[str, Tensor]:
    return {
        f"{prefix}{module}.{name}": torch.randn(shape)
        for module, parameters in modules.items()
        for name, shape in parameters.items()
    }


def official(*, pre_norm: bool = False, learned: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    modules = {
        "class_embed": linear(DIM, LOGITS),
        "bbox_embed.layers.0": linear(DIM, DIM),
        "bbox_embed.layers.1": linear(DIM, DIM),
        "bbox_embed.layers.2": linear(DIM, 4),
        "query_embed": {"weight": (QUERIES, DIM)},
        "input_proj": {"weight": (DIM, CHANNELS, 1, 1), "bias": (DIM,)},
        "backbone.0.body.conv1": {"weight": (CHANNELS, 3, 1, 1)},
        "transformer.decoder.norm": NORM,
    }
    if pre_norm:
        modules["transformer.encoder.norm"] = NORM
    if learned:
        modules |= {f"backbone.1.{axis}_embed": {"weight": (50, DIM // 2)} for axis in ("row", "col")}
    state = filled(modules)
    for layer in range(LAYERS):
        state |= filled(ENCODER_LAYER, f"transformer.encoder.layers.{layer}.")
        state |= filled(DECODER_LAYER, f"transformer.decoder.layers.{layer}.")
    return state


def ours(*, batch_former: BatchFormerV2 | None = None, **changes: object) -> nn.Module:
    backbone = nn.Module()
    backbone.body = nn.Module()
    backbone.body.conv1 = nn.Conv2d(3, CHANNELS, 1, bias=False)
    return detr(
        backbone,
        CHANNELS,
        num_logits=LOGITS,
        hidden_dim=DIM,
        heads=2,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        feedforward_dim=HIDDEN,
        num_queries=QUERIES,
        batch_former=batch_former,
        **changes,
    )


def batch_former(layers: list[int], *, shared: bool) -> BatchFormerV2:
    return BatchFormerV2(DIM, layers=layers, num_encoder_layers=LAYERS, shared=shared)


def assert_fits(module: nn.Module, state: dict[str, Tensor]) -> None:
    wanted = {name: value.shape for name, value in module.state_dict().items()}
    assert {name: value.shape for name, value in state.items()} == wanted


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_names_become_exactly_ours(pre_norm: bool, learned: bool) -> None:
    module = ours(pre_norm=pre_norm, position_encoding="learned" if learned else "sine")
    assert_fits(module, from_official_detr(official(pre_norm=pre_norm, learned=learned)))


def test_every_value_is_kept() -> None:
    state = official(learned=True)
    numbers = torch.cat([value.flatten() for value in state.values()]).sort().values
    mapped = torch.cat([value.flatten() for value in from_official_detr(state).values()]).sort().values
    assert torch.equal(mapped, numbers)


def test_each_name_goes_to_its_own_place() -> None:
    state = official(pre_norm=True, learned=True)
    mapped = from_official_detr(state)
    encoder, decoder = "transformer.encoder.layers.10.", "transformer.decoder.layers.1."
    for theirs, name in {
        f"{encoder}norm1.weight": "encoder.layers.10.attention_residual.norm.weight",
        f"{encoder}norm2.bias": "encoder.layers.10.feed_forward_residual.norm.bias",
        f"{encoder}linear1.weight": "encoder.layers.10.feed_forward.expand.weight",
        f"{encoder}linear2.weight": "encoder.layers.10.feed_forward.contract.weight",
        f"{encoder}self_attn.out_proj.weight": "encoder.layers.10.attention.out.weight",
        f"{decoder}norm1.weight": "decoder.layers.1.self_residual.norm.weight",
        f"{decoder}norm2.weight": "decoder.layers.1.cross_residual.norm.weight",
        f"{decoder}norm3.weight": "decoder.layers.1.feed_forward_residual.norm.weight",
        f"{decoder}self_attn.out_proj.bias": "decoder.layers.1.self_attention.out.bias",
        f"{decoder}multihead_attn.out_proj.bias": "decoder.layers.1.cross_attention.out.bias",
        "transformer.encoder.norm.weight": "encoder.norm.weight",
        "transformer.decoder.norm.weight": "decoder.norm.weight",
        "backbone.1.col_embed.weight": "tokens.position.column.weight",
        "backbone.1.row_embed.weight": "tokens.position.row.weight",
        "backbone.0.body.conv1.weight": "backbone.body.conv1.weight",
        "bbox_embed.layers.1.weight": "box_head.layers.1.weight",
        "class_embed.bias": "class_head.bias",
        "query_embed.weight": "decoder.query_position.weight",
    }.items():
        assert torch.equal(mapped[name], state[theirs]), name


@pytest.mark.parametrize(
    ("theirs", "name"),
    [
        ("transformer.encoder.layers.0.self_attn", "encoder.layers.0.attention"),
        ("transformer.decoder.layers.2.self_attn", "decoder.layers.2.self_attention"),
        ("transformer.decoder.layers.2.multihead_attn", "decoder.layers.2.cross_attention"),
    ],
)
def test_packed_projections_are_taken_apart(theirs: str, name: str) -> None:
    state = official()
    mapped = from_official_detr(state)
    for index, part in enumerate(("query", "key", "value")):
        rows = slice(index * DIM, (index + 1) * DIM)
        assert torch.equal(mapped[f"{name}.{part}.weight"], state[f"{theirs}.in_proj_weight"][rows])
        assert torch.equal(mapped[f"{name}.{part}.bias"], state[f"{theirs}.in_proj_bias"][rows])


@pytest.mark.parametrize("stored_twice", [False, True])
def test_shared_batch_former(stored_twice: bool) -> None:
    once = filled(BATCH_FORMER, "transformer.bf.")
    twice = {name.replace("transformer.", "transformer.encoder."): value for name, value in once.items()}
    mapped = from_official_detr(official() | once | (twice if stored_twice else {}))
    assert_fits(ours(batch_former=batch_former([1, 3], shared=True)), mapped)
    for name, value in once.items():
        inner = name.removeprefix("transformer.bf.")
        assert torch.equal(mapped[f"encoder.batch_former.mixers.0.layers.0.{inner}"], value)


@pytest.mark.parametrize("layers", [[0], [1, 2], [2, 10]])
def test_batch_formers_that_are_not_shared_are_stored_twice_and_read_once_in_order(layers: list[int]) -> None:
    state = official()
    for layer in reversed(layers):
        once = filled(BATCH_FORMER, f"transformer.bf.{layer}.")
        state |= once | {name.replace("transformer.", "transformer.encoder."): value for name, value in once.items()}
    mapped = from_official_detr(state)
    assert_fits(ours(batch_former=batch_former(layers, shared=False)), mapped)
    for insertion, layer in enumerate(layers):
        ours_name = f"encoder.batch_former.mixers.{insertion}.layers.0.norm1.weight"
        assert torch.equal(mapped[ours_name], state[f"transformer.bf.{layer}.norm1.weight"])


def test_official_checkpoints_are_recognised_and_ours_are_not() -> None:
    assert is_official_detr(official())
    assert not is_official_detr(ours().state_dict())
    assert not is_official_detr({})
