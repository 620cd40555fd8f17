"""Values per block against loops: attention, similarity of patches, learned scales."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from detr_bf.analysis.blocks import (
    LayerCurve,
    draw_attention_distance,
    draw_attention_entropy,
    draw_class_token_entropy,
    draw_patch_similarity,
    draw_scale_ratios,
    measure_attention,
    patch_distances,
)
from detr_bf.analysis.classification import (
    attention_distance,
    attention_entropy,
    class_token_entropy,
    patch_similarity,
    scale_ratios,
)
from detr_bf.classification.batch import ClassTargets, LabelledImages
from detr_bf.common.errors import InputError
from detr_bf.plugins import add_context_broadcasting
from tests.analysis.classification.examples import all_images, batches
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


def test_entropy_of_the_class_token_as_a_loop() -> None:
    """The query is the class token alone, without the distillation token; the keys are all tokens."""
    model, images = tiny.deit(), batches(*SIZES)
    curve = class_token_entropy(model, images)
    for at, attention in zip(curve.layers, timms_attention(model, all_images(images)), strict=True):
        values = [-sum(a * math.log(a) for a in head[0] if a > 0) for image in attention.tolist() for head in image]
        assert len(values) == sum(SIZES) * tiny.HEADS
        assert at.mean == pytest.approx(sum(values) / len(values), rel=1e-10)
        assert (at.low, at.high) == pytest.approx(tuple(np.percentile(values, [15, 85])), rel=1e-10)
    assert curve.bound == pytest.approx(math.log(18))
    [axes] = draw_class_token_entropy({"run": curve}).axes
    assert "class token" in axes.get_title(loc="left")
    with pytest.raises(InputError, match="no class token"):
        class_token_entropy(tiny.vit(class_token=False, global_pool="avg"), images)


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


def looped_similarities(images: Tensor) -> list[float]:
    """Return P(h) of section 3 of each image of (R, P, C), by a loop over the pairs i != j."""
    values = []
    for image in images:
        total, count = 0.0, len(image)
        for i, a in enumerate(image):
            for j, b in enumerate(image):
                total += 0.0 if i == j else abs(float(a @ b)) / (float(a.norm()) * float(b.norm()))
        values.append(total / (count * (count - 1)))
    return values


def test_similarity_of_swin_is_that_before_every_down_sampling_and_at_the_end() -> None:
    model, images = tiny.swin(), batches(2)
    curve = patch_similarity(model, images)
    with torch.no_grad():
        maps, before = model.patch_embed(all_images(images)), []
        for stage in model.layers:
            before.append(maps)
            maps = stage.blocks(stage.downsample(maps))
    inputs = [*before[1:], maps]  # (2, side, side, channels)
    assert [tuple(each.shape[1:]) for each in inputs] == [(16, 16, 8), (8, 8, 16), (4, 4, 32)]
    for at, each in zip(curve.layers, inputs, strict=True):
        assert at.mean == pytest.approx(np.mean(looped_similarities(each.reshape(2, -1, each.shape[-1]))), rel=1e-10)


def test_similarity_of_a_resnet_takes_each_position_for_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a few rows of the pairs at a time with a loop over all."""
    monkeypatch.setattr("detr_bf.plugins.diverse_patch._PAIR_ROWS", 7)
    torch.manual_seed(0)
    model: Any = timm.create_model("resnet18", block_args={}, num_classes=tiny.CLASSES).double().eval()
    images = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    curve = patch_similarity(model, [LabelledImages(images, ClassTargets(torch.tensor([0])), torch.tensor([0]))])
    with torch.no_grad():
        maps = [model.act1(model.bn1(model.conv1(images)))]
        maps.append(model.layer1(model.maxpool(maps[0])))
        for stage in (model.layer2, model.layer3, model.layer4):
            maps.append(stage(maps[-1]))
    assert [each.shape[-1] for each in maps] == [32, 16, 8, 4, 2]
    for at, each in list(zip(curve.layers, maps, strict=True))[1:]:
        positions = [[each[:, :, row, column] for column in range(each.shape[3])] for row in range(each.shape[2])]
        patches = torch.stack([position for row in positions for position in row], 1)
        assert at.mean == pytest.approx(looped_similarities(patches)[0], rel=1e-10)
    assert 0 < curve.layers[0].mean < 1
    with pytest.raises(InputError, match="layer 4 has a single patch"):
        patch_similarity(model, batches(1))


def test_patches_that_are_all_the_same_have_similarity_1() -> None:
    model = tiny.vit()
    nn.init.zeros_(model.patch_embed.proj.weight)  # only the bias is left
    nn.init.zeros_(model.pos_embed)
    curve = patch_similarity(model, batches(2))
    assert [at.mean for at in curve.layers] == pytest.approx([1.0] * tiny.DEPTH, rel=1e-12)
    assert curve.bound == 1.0


def test_another_model_is_refused_and_a_picture_is_drawn() -> None:
    with pytest.raises(InputError, match=r"expected timm's VisionTransformer \(ViT, DeiT\), SwinTransformer or ResNet"):
        patch_similarity(tiny.mixer(), batches(2))
    [axes] = draw_patch_similarity({"run": patch_similarity(tiny.vit(), batches(2))}).axes
    assert [line.get_label() for line in axes.lines] == ["run", "upper bound 1.000"]


def quantile(values: list[float], share: float) -> float:
    """Quantile by sorting, linear between neighbours."""
    ordered, at = sorted(values), share * (len(values) - 1)
    low = int(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def test_ratio_and_mean_of_the_size_of_scales_as_a_loop() -> None:
    model = tiny.vit(embed_dim=22, num_heads=2)
    plugin = add_context_broadcasting(model, [1, 3], scaled=True)
    for layer in ("1", "3"):
        nn.init.normal_(plugin.scales[layer], mean=0.3)
    for at, layer in zip(scale_ratios(model).layers, (1, 3), strict=True):
        sizes = [scale if scale > 0 else -scale for scale in plugin.scales[str(layer)].tolist()]
        assert at.layer == layer
        assert (at.low, at.high) == pytest.approx((quantile(sizes, 0.1), quantile(sizes, 0.9)))
        assert at.ratio == pytest.approx(quantile(sizes, 0.1) / quantile(sizes, 0.9))
        assert at.mean == pytest.approx(sum(sizes) / len(sizes))
        expected = {"layer": layer, "q10": at.low, "q90": at.high, "ratio": at.ratio, "mean": at.mean}
        assert scale_ratios(model).rows()[layer // 2] == expected


def test_the_sign_of_scales_does_not_matter_and_equal_sizes_have_ratio_1() -> None:
    model = tiny.vit(embed_dim=22, num_heads=2)
    plugin = add_context_broadcasting(model, [1, 3], scaled=True)
    plugin.scales["1"].data = torch.tensor([0.5, -0.5], dtype=torch.float64).repeat(11)
    plugin.scales["3"].data = torch.arange(22, dtype=torch.float64).flip(0) - 10.5
    first, last = scale_ratios(model).layers
    assert (first.ratio, first.mean) == (1.0, 0.5)
    assert (last.low, last.high, last.ratio, last.mean) == pytest.approx((1.5, 9.5, 1.5 / 9.5, 5.5))
    [axes] = draw_scale_ratios({"run": scale_ratios(model)}).axes
    assert [line.get_label() for line in axes.lines] == ["run, |λ|₀.₁ / |λ|₀.₉", "run, mean |λ|"]
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.0, last.ratio], [0.5, last.mean]]


def test_scales_before_training_have_no_ratio() -> None:
    model = tiny.vit()
    add_context_broadcasting(model, "all", scaled=True)
    ratios = scale_ratios(model)
    assert [(at.ratio, at.mean) for at in ratios.layers] == [(None, 0.0)] * tiny.DEPTH
    [axes] = draw_scale_ratios({"run": ratios}).axes
    assert all(math.isnan(value) for value in axes.lines[0].get_ydata())


def test_a_model_without_scales_is_refused() -> None:
    model = tiny.vit()
    add_context_broadcasting(model)
    for without in (model, tiny.vit()):
        with pytest.raises(InputError, match=r"no learned scales.*context_broadcasting\.scaled=true"):
            scale_ratios(without)
