"""Values per block against loops: attention, similarity of patches, learned scales."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from detr_bf.classification.analysis import attention_distance, attention_entropy, patch_similarity, scale_ratios
from detr_bf.classification.analysis.blocks import (
    LayerCurve,
    draw_attention_distance,
    draw_attention_entropy,
    draw_patch_similarity,
    draw_scale_ratios,
    measure_attention,
    patch_distances,
)
from detr_bf.errors import InputError
from detr_bf.plugins import add_context_broadcasting
from tests.classification.analysis.examples import all_images, batches
from tests.plugins import tiny

SIZES = (3, 2)
GRID = (4, 4)


def timms_attention(model: Any, images: Tensor) -> list[Tensor]:
    """Return timm's unfused attention weights of every block, after the softmax, each (R, H, S, S)."""
    found: list[Tensor] = []
    hooks = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop = nn.Identity()
        hooks.append(block.attn.attn_drop.register_forward_hook(lambda m, args, output: found.append(output.clone())))
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return found


def make_uniform(model: Any) -> Any:
    """Set all queries to 0, so that every token attends to all tokens equally."""
    for block in model.blocks:
        nn.init.zeros_(block.attn.qkv.weight[: tiny.DIM])
        nn.init.zeros_(block.attn.qkv.bias[: tiny.DIM])
    return model


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"reg_tokens": 2}])
def test_the_attention_is_that_of_timm_without_fusion(changes: dict[str, Any]) -> None:
    model, images = tiny.vit(**changes), batches(*SIZES)
    assert all(cast("Any", block).attn.fused_attn for block in model.blocks)
    seen = measure_attention(model, images, lambda attention, grid: attention)
    expected = timms_attention(model, all_images(images))
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(torch.cat(ours), theirs, rtol=1e-12, atol=1e-15)


def test_entropy_as_a_loop() -> None:
    model, images = tiny.deit(), batches(*SIZES)
    curve = attention_entropy(model, images)
    for at, attention in zip(curve.layers, timms_attention(model, all_images(images)), strict=True):
        values = [
            -sum(a * math.log(a) for a in query if a > 0)
            for image in attention.tolist()
            for head in image
            for query in head
        ]
        assert len(values) == sum(SIZES) * tiny.HEADS * (2 + 16)
        assert at.mean == pytest.approx(sum(values) / len(values), rel=1e-10)
        assert (at.low, at.high) == pytest.approx(tuple(np.percentile(values, [15, 85])), rel=1e-10)
    assert curve.bound == pytest.approx(math.log(18)), "class and distillation token count"


def test_uniform_attention_has_the_largest_entropy_ln_s() -> None:
    curve = attention_entropy(make_uniform(tiny.vit()), batches(2))
    for at in curve.layers:
        assert (at.mean, at.low, at.high) == pytest.approx((math.log(17),) * 3, rel=1e-12)
    assert [row["bound"] for row in curve.rows()] == [math.log(17)] * tiny.DEPTH


def test_attention_to_one_token_alone_has_entropy_and_distance_0() -> None:
    model = tiny.vit()
    for block in model.blocks:  # key of the class token: 1e4, all others: -1e4
        attention = cast("Any", block).attn
        nn.init.zeros_(attention.qkv.weight)
        attention.k_norm.register_forward_hook(lambda module, args, keys: one_token(keys))
        attention.q_norm.register_forward_hook(lambda module, args, queries: torch.ones_like(queries))
    assert [at.mean for at in attention_entropy(model, batches(2)).layers] == [0.0] * tiny.DEPTH
    assert [at.high for at in attention_distance(model, batches(2)).layers] == [0.0] * tiny.DEPTH


def one_token(keys: Tensor) -> Tensor:
    """Keys of which only the first gets attention."""
    chosen = torch.full_like(keys, -1e4)
    chosen[:, :, 0] = 1e4
    return chosen


def test_distance_as_a_loop_over_patches() -> None:
    model, images = tiny.vit(), batches(*SIZES)
    curve = attention_distance(model, images)
    height, width = GRID
    for at, attention in zip(curve.layers, timms_attention(model, all_images(images)), strict=True):
        values = []
        for head in attention.flatten(0, 1)[:, 1:, 1:].tolist():
            for i, query in enumerate(head):
                values.append(0.0)
                for j, a in enumerate(query):
                    if i != j:
                        rows, columns = abs(i // width - j // width), abs(i % width - j % width)
                        values[-1] += a * (rows / height + columns / width)
        assert at.mean == pytest.approx(sum(values) / len(values), rel=1e-10)
        assert (at.low, at.high) == pytest.approx(tuple(np.percentile(values, [15, 85])), rel=1e-10)


def test_distance_of_uniform_attention_is_known() -> None:
    """The mean distance on an axis of k patches is (k^2 - 1) / (3 k^2); the class token takes 1/17 of the weight."""
    curve = attention_distance(make_uniform(tiny.vit()), batches(2))
    expected = 16 / 17 * 2 * (4**2 - 1) / (3 * 4**2)
    assert [at.mean for at in curve.layers] == pytest.approx([expected] * tiny.DEPTH, rel=1e-12)


def test_distances_on_a_grid_that_is_not_square() -> None:
    between = patch_distances((2, 3))
    assert between.shape == (6, 6)
    assert between[0, 5].item() == pytest.approx(1 / 2 + 2 / 3)
    assert between[1, 3].item() == pytest.approx(1 / 2 + 1 / 3)


def test_the_model_stays_as_it_was() -> None:
    model = tiny.vit().train()
    model.blocks[1].eval()
    attention_entropy(model, batches(2))
    assert [block.training for block in model.blocks] == [True, False, True, True]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("analysis", [attention_entropy, attention_distance])
def test_other_models_and_no_images_are_refused(analysis: Any) -> None:
    with pytest.raises(InputError, match="expected timm's VisionTransformer"):
        analysis(tiny.mixer(), batches(2))
    with pytest.raises(InputError, match="got none"):
        analysis(tiny.vit(), [])
    other = tiny.vit()
    cast("Any", other.blocks[1]).attn = nn.Identity()
    with pytest.raises(InputError, match=r"\['Identity'\].*timm\.layers\.Attention"):
        analysis(other, batches(2))
    empty = timm.create_model("vit_tiny_patch16_224", depth=0, embed_dim=16, num_heads=2, img_size=32, patch_size=8)
    with pytest.raises(InputError, match="0 blocks"):
        analysis(empty.double(), batches(2))


def test_the_picture_holds_a_line_a_run_and_the_bound() -> None:
    runs = {"one": attention_entropy(tiny.vit(), batches(2)), "two": attention_entropy(tiny.vit(depth=2), batches(2))}
    [axes] = draw_attention_entropy(runs).axes
    assert [line.get_label() for line in axes.lines] == ["one", "two", "upper bound 2.833"]
    assert [len(line.get_xdata()) for line in axes.lines[:2]] == [tiny.DEPTH, 2]
    assert list(axes.lines[1].get_ydata()) == [at.mean for at in runs["two"].layers]
    [axes] = draw_attention_distance({"one": LayerCurve.of([[torch.tensor([1.0, 3.0])]])}).axes
    assert list(axes.lines[0].get_ydata()) == [2.0]


def block_outputs(model: Any, images: Tensor) -> list[Tensor]:
    """Return the outputs of all blocks by calling the parts of timm's model in turn."""
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(images))
        found = []
        for block in model.blocks:
            tokens = block(tokens)
            found.append(tokens)
    return found


def test_similarity_as_a_loop_over_pairs() -> None:
    model, images = tiny.deit(), batches(3, 2)
    curve = patch_similarity(model, images)
    for at, tokens in zip(curve.layers, block_outputs(model, all_images(images)), strict=True):
        values = []
        for image in tokens[:, 2:]:
            pairs = [(a, b) for i, a in enumerate(image) for j, b in enumerate(image) if i != j]
            cosines = [abs(float(a @ b) / float(a.norm() * b.norm())) for a, b in pairs]
            values.append(sum(cosines) / len(cosines))
        assert at.mean == pytest.approx(sum(values) / 5, rel=1e-10)
        assert (at.low, at.high) == pytest.approx(tuple(np.percentile(values, [15, 85])), rel=1e-10)


def test_patches_that_are_all_the_same_have_similarity_1() -> None:
    model = tiny.vit()
    nn.init.zeros_(model.patch_embed.proj.weight)  # only the bias is left
    nn.init.zeros_(model.pos_embed)
    curve = patch_similarity(model, batches(2))
    assert [at.mean for at in curve.layers] == pytest.approx([1.0] * tiny.DEPTH, rel=1e-12)
    assert curve.bound == 1.0


def test_another_model_is_refused_and_a_picture_is_drawn() -> None:
    with pytest.raises(InputError, match="expected timm's VisionTransformer"):
        patch_similarity(tiny.swin(), batches(2))
    [axes] = draw_patch_similarity({"run": patch_similarity(tiny.vit(), batches(2))}).axes
    assert [line.get_label() for line in axes.lines] == ["run", "upper bound 1.000"]


def test_the_ratio_of_known_scales() -> None:
    model = tiny.vit(embed_dim=22, num_heads=2)  # quantiles 0.1 and 0.9 of 22 numbers are 2.1 from the ends
    plugin = add_context_broadcasting(model, [1, 3], scaled=True)
    plugin.scales["3"].data = torch.arange(22, dtype=torch.float64).flip(0) - 10.5
    plugin.scales["1"].data = torch.arange(22, dtype=torch.float64) - 3.1
    first, last = scale_ratios(model).layers
    assert (first.layer, last.layer) == (1, 3)
    assert (first.low, first.high, first.ratio) == pytest.approx((-1.0, 15.8, 1 / 15.8))
    assert (last.low, last.high, last.ratio) == pytest.approx((-8.4, 8.4, 1.0))
    assert scale_ratios(model).rows()[0] == {"layer": 1, "q10": first.low, "q90": first.high, "ratio": first.ratio}


def test_scales_before_training_have_no_ratio() -> None:
    model = tiny.vit()
    add_context_broadcasting(model, "all", scaled=True)
    ratios = scale_ratios(model)
    assert [at.ratio for at in ratios.layers] == [None] * tiny.DEPTH
    [axes] = draw_scale_ratios({"run": ratios}).axes
    assert all(math.isnan(value) for value in axes.lines[0].get_ydata())


def test_a_model_without_scales_is_refused() -> None:
    model = tiny.vit()
    add_context_broadcasting(model)
    for without in (model, tiny.vit()):
        with pytest.raises(InputError, match=r"no learned scales.*context_broadcasting\.scaled=true"):
            scale_ratios(without)
