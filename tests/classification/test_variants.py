"""Variants of a ViT compared with written-out formulas, with timm's modules, and with the sizes of the papers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.cait import TalkingHeadAttn
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from detr_bf.analysis.classification import attention_entropy
from detr_bf.classification.assembly import build_classifier
from detr_bf.classification.config import ClassifierModelConfig
from detr_bf.classification.network import build_network
from detr_bf.classification.page import _sentences
from detr_bf.classification.variants import (
    ExtraBlock,
    SqueezeExcitedMlp,
    TalkingHeads,
    UniformHeadAttention,
    complete_variant,
    variant_layers,
)
from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.engine import image_parameter_groups, load_strict
from detr_bf.plugins import add_batchformer_v2, add_context_broadcasting, num_streams
from tests.analysis.classification.test_images import batches, cam
from tests.plugins import tiny

VIT, DIM, HEADS, TOKENS = "vit_tiny_patch16_224", 32, 4, 17
WIDTH = DIM // HEADS
OPTIONS = {"patch_size": 8, "embed_dim": DIM, "depth": 2, "num_heads": HEADS}
VARIANTS = ["talking_heads", "uniform_head", "squeeze_excitation", "extra_attention", "extra_mlp"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str, name: str = VIT, **options: Any) -> Any:
    """Return a network in float64 and evaluation mode, with its own initial weights."""
    torch.manual_seed(0)
    return (
        build_network(name, num_classes=tiny.CLASSES, image_size=32, variant=variant, options={**OPTIONS, **options})
        .double()
        .eval()
    )


def with_large_weights(module: Any) -> Any:
    """Draw weights large enough to show a mistake in any term."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.double().eval()


def tokens() -> Tensor:
    return torch.randn(2, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def arrays(module: nn.Module) -> dict[str, Any]:
    return {key: value.numpy() for key, value in module.state_dict().items()}


def softmax(logits: Any) -> Any:
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def heads_of(image: Any, weights: dict[str, Any], heads: int) -> list[list[Any]]:
    """Return queries, keys and values of an image (S, C), each as a list of (S, D)."""
    packed = image @ weights["qkv.weight"].T + weights["qkv.bias"]
    return [np.split(part, heads, axis=1) for part in np.split(packed, 3, axis=1)]


def test_talking_heads_as_loops_over_heads() -> None:
    module, x = with_large_weights(TalkingHeads(DIM, HEADS, qkv_bias=True)), tokens()
    weights = arrays(module)
    before, after = weights["proj_l.weight"], weights["proj_w.weight"]
    for image, output in zip(x.numpy(), module(x).detach().numpy(), strict=True):
        queries, keys, values = heads_of(image, weights, HEADS)
        logits = [q @ k.T / np.sqrt(WIDTH) for q, k in zip(queries, keys, strict=True)]
        mixed = [softmax(sum(before[h, g] * logits[g] for g in range(HEADS))) for h in range(HEADS)]
        attention = [sum(after[h, g] * mixed[g] for g in range(HEADS)) for h in range(HEADS)]
        joined = np.concatenate([a @ v for a, v in zip(attention, values, strict=True)], 1)
        np.testing.assert_allclose(output, joined @ weights["proj.weight"].T + weights["proj.bias"], rtol=1e-9)


def test_talking_heads_are_those_of_cait_without_biases() -> None:
    module, x = with_large_weights(TalkingHeads(DIM, HEADS, qkv_bias=True)), tokens()
    cait = TalkingHeadAttn(DIM, HEADS, qkv_bias=True).double()
    missing, unexpected = cait.load_state_dict(module.state_dict(), strict=False)
    assert (sorted(missing), unexpected) == (["proj_l.bias", "proj_w.bias"], [])
    nn.init.zeros_(cait.proj_l.bias), nn.init.zeros_(cait.proj_w.bias)
    assert torch.equal(module(x), cait(x))


@pytest.mark.parametrize("fused", [False, True])
def test_a_uniform_head_is_the_last_of_the_concatenated_heads(fused: bool) -> None:
    module, x = with_large_weights(UniformHeadAttention(DIM, HEADS, qkv_bias=True)), tokens()
    module.fused_attn = fused
    weights = arrays(module)
    projection = np.concatenate([weights["proj.weight"], weights["uniform_proj.weight"]], 1)
    assert projection.shape == (DIM, DIM)
    for image, output in zip(x.numpy(), module(x).detach().numpy(), strict=True):
        found = [
            softmax(q @ k.T / np.sqrt(WIDTH)) @ v for q, k, v in zip(*heads_of(image, weights, HEADS - 1), strict=True)
        ]
        value = image @ weights["uniform_value.weight"].T + weights["uniform_value.bias"]
        found.append(np.stack([(row + sum(value) / TOKENS) / 2 for row in value]))
        np.testing.assert_allclose(output, np.concatenate(found, 1) @ projection.T + weights["proj.bias"], rtol=1e-9)


def test_squeeze_and_excitation_scales_the_output_channels_of_the_mlp() -> None:
    network, x = build("squeeze_excitation"), tokens()
    mlp = with_large_weights(network.blocks[0].mlp)
    weights = arrays(mlp)
    assert weights["se.fc1.weight"].shape == (DIM // 16, DIM)
    for image, output in zip(x, mlp(x).detach().numpy(), strict=True):
        plain = mlp.fc2(F.gelu(mlp.fc1(image))).detach().numpy()
        squeezed = np.maximum(weights["se.fc1.weight"] @ plain.mean(0) + weights["se.fc1.bias"], 0)
        gate = 1 / (1 + np.exp(-(weights["se.fc2.weight"] @ squeezed + weights["se.fc2.bias"])))
        np.testing.assert_allclose(output, plain * gate, rtol=1e-9)


@pytest.mark.parametrize("variant", ["extra_attention", "extra_mlp"])
def test_the_extra_block_stands_behind_the_last(variant: str) -> None:
    """Compare with the network of timm, whose last norm gets the block's output."""
    network, images = with_large_weights(build(variant)), tiny.images()
    plain = timm.create_model(VIT, num_classes=tiny.CLASSES, img_size=32, **OPTIONS).double().eval()
    extra = network.blocks[-1]
    assert (len(network.blocks), type(extra)) == (3, ExtraBlock)
    own = {key: value for key, value in network.state_dict().items() if not key.startswith("blocks.2.")}
    plain.load_state_dict(own)
    x = plain.blocks(plain.norm_pre(plain._pos_embed(plain.patch_embed(images))))
    if variant == "extra_attention":
        q, k, v = extra.attn.qkv(extra.norm1(x)).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        heads = (q @ k.mT / WIDTH**0.5).softmax(-1) @ v
        x = x + extra.attn.proj(heads.transpose(1, 2).flatten(2))
    else:
        assert extra.mlp.fc1.out_features == 2 * DIM
        x = x + extra.mlp.fc2(F.gelu(extra.mlp.fc1(extra.norm2(x))))
    torch.testing.assert_close(network(images), plain.forward_head(plain.norm(x)))


@pytest.mark.parametrize("variant", ["extra_attention", "extra_mlp"])
def test_the_extra_block_begins_as_timm_draws_a_block(variant: str) -> None:
    network = build_network(VIT, num_classes=2, image_size=32, drop_path=0.3, variant=variant, options={"img_size": 32})
    last, extra = network.blocks[-2], network.blocks[-1]
    for name, parameter in extra.named_parameters():
        if parameter.dim() == 2:
            assert not torch.equal(parameter, last.get_parameter(name)), name
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.05), name
        else:
            assert (parameter == float("norm" in name and "weight" in name)).all(), name
    drop = extra.drop_path1 if variant == "extra_attention" else extra.drop_path2
    assert drop.drop_prob == pytest.approx(0.3)
    assert [at["module"] for at in network.feature_info][-1] == "blocks.12"


SMALL = "configs/classification/deit/deit_small.yaml"
MILLIONS = 22.050664


@pytest.mark.parametrize(
    ("settings", "millions", "published"),
    [
        (["model.variant=plain"], MILLIONS, 22),
        (["model.variant=uniform_head"], MILLIONS - 12 * 2 * (384 + 1) * 64 / 1e6, 21),
        (["model.variant=uniform_head", "model.options.mlp_ratio=4.1667"], MILLIONS - 12 * 64 / 1e6, 22),
        (["model.variant=uniform_head", "model.options={embed_dim: 448, num_heads: 7}"], 29.164712, 29),
        (["model.variant=squeeze_excitation"], MILLIONS + 12 * (2 * 384 * 24 + 24 + 384) / 1e6, None),
        (["model.variant=talking_heads"], MILLIONS + 12 * 2 * 6**2 / 1e6, None),
    ],
)
def test_deit_small_has_the_published_number_of_parameters(
    settings: list[str], millions: float, published: int | None
) -> None:
    """Table 1 of Context Broadcasting gives whole millions for the rows A, B and C."""
    with torch.device("meta"):
        network = build_classifier(load_config(SMALL, settings), 1000, pretrained=False)
    found = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    assert found == pytest.approx(millions, abs=1e-9)
    assert published in (None, round(found))


def test_the_extra_blocks_of_figure_3_are_nearly_equal_in_size() -> None:
    sizes = {}
    for variant in ("plain", "extra_attention", "extra_mlp"):
        with torch.device("meta"):
            settings = ["model.options.depth=8", f"model.variant={variant}"]
            network = build_classifier(load_config(SMALL, settings), 1000, pretrained=False)
        sizes[variant] = sum(parameter.numel() for parameter in network.parameters())
    attention, mlp = (sizes[name] - sizes["plain"] for name in ("extra_attention", "extra_mlp"))
    assert (attention, mlp) == (4 * 384**2 + 6 * 384, 4 * 384**2 + 5 * 384)


@every_variant
def test_training_lowers_the_loss_and_reaches_every_weight(variant: str) -> None:
    network, images = build(variant).train(), tiny.images(6)
    labels = torch.arange(6) % tiny.CLASSES
    groups = image_parameter_groups(network, lr=3e-3, weight_decay=0.05)
    optimizer, losses = torch.optim.AdamW(groups), []
    before = copy.deepcopy(network.state_dict())
    for _ in range(20):
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    assert [key for key, value in network.state_dict().items() if torch.equal(value, before[key])] == []
    torch.testing.assert_close(network.eval()(images), network.train()(images))


@every_variant
def test_matrices_decay_and_vectors_do_not(variant: str) -> None:
    network = build(variant)
    groups = {group["name"]: group for group in image_parameter_groups(network, lr=1e-3, weight_decay=0.05)}
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    decayed = {names[id(parameter)] for parameter in groups["network"]["params"]}
    assert decayed == {name for name, parameter in network.named_parameters() if parameter.dim() > 1} - {
        "pos_embed",
        "cls_token",
    }
    assert {group["lr"] for group in groups.values()} == {1e-3}
    assert sum(len(group["params"]) for group in groups.values()) == len(names)


@every_variant
def test_weights_load_only_into_the_same_variant(variant: str) -> None:
    network = with_large_weights(build(variant))
    twin = build(variant)
    load_strict(twin, network.state_dict(), "ours.pt")
    assert torch.equal(twin(tiny.images()), network(tiny.images()))
    for other in {"plain", *VARIANTS} - {variant}:
        with pytest.raises(InputError):
            load_strict(build(other), network.state_dict(), "ours.pt")


@every_variant
def test_activation_checkpointing_and_an_exported_graph_give_the_same(variant: str) -> None:
    network, images = with_large_weights(build(variant)), tiny.images()
    expected = network(images)
    expected.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    network.zero_grad()
    network.set_grad_checkpointing()
    network(images).square().sum().backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-8)
    network.set_grad_checkpointing(False)
    batch = {0: torch.export.Dim("batch", min=2)}
    exported = torch.export.export(network, (images,), dynamic_shapes=(batch,)).module()
    torch.testing.assert_close(exported(images), expected)
    torch.testing.assert_close(exported(tiny.images(5)), network(tiny.images(5)))


def test_batch_attention_and_context_broadcasting_work_on_variants() -> None:
    for variant in VARIANTS:
        network, plain = build(variant), build(variant)
        add_batchformer_v2(network, [1], dropout=0.0, heads=2)
        assert torch.equal(network(tiny.images()), plain(tiny.images()))
        assert network.train()(tiny.images()).shape == (2 * tiny.IMAGES, tiny.CLASSES)
        assert num_streams(network) == 2
        if variant.startswith("extra"):
            with pytest.raises(InputError, match=r"blocks .* have none of"):
                add_context_broadcasting(plain, position="both")
        else:
            add_context_broadcasting(plain, position="both")
            assert not torch.allclose(plain(tiny.images()), network.eval()(tiny.images()))


def test_analyses_of_variants() -> None:
    """Entropy is that of the learned heads, Grad-CAM that of the last block with attention."""
    network = build("uniform_head")
    curve = attention_entropy(network, batches(2))
    assert len(curve.layers) == 2
    with pytest.raises(InputError, match=r"kind .'TalkingHeads'"):
        attention_entropy(build("talking_heads"), batches(2))
    for variant in VARIANTS:
        assert any(image.heat.max() > 0 for image in cam(with_large_weights(build(variant)), 2).images), variant


def test_the_report_names_the_variant() -> None:
    config = load_config(None, ["model.variant=talking_heads"], task="classification")
    assert _sentences(config)[0] == "deit_small_patch16_224, variant talking heads, without plug-ins."


@pytest.mark.parametrize(
    ("variant", "name", "options", "message"),
    [
        ("talking", VIT, {}, "model.variant=talking: give one of plain, talking_heads, uniform_head"),
        ("talking_heads", "resnet18", {}, "model.variant=talking_heads needs a ViT or DeiT of timm"),
        ("extra_mlp", "cifar_resnet8", {}, "model.variant=extra_mlp needs a ViT or DeiT of timm"),
        ("uniform_head", "pit_ti_224", {}, "needs a ViT or DeiT"),
        (
            "uniform_head",
            VIT,
            {"num_heads": 1},
            "^model.variant=uniform_head needs two or more heads that divide the width 32, got 1",
        ),
        ("uniform_head", VIT, {"num_heads": 3}, "two or more heads that divide the width 32, got 3"),
        ("uniform_head", VIT, {"scale_attn_norm": True}, "^model.variant=uniform_head has no norm of all heads"),
        ("talking_heads", VIT, {"qk_norm": True}, "^model.variant=talking_heads has no qk_norm=true: leave"),
        ("talking_heads", VIT, {"proj_bias": False}, "has no proj_bias=false: leave"),
        ("talking_heads", VIT, {"num_heads": 5}, "needs heads that divide the width 32, got 5"),
        ("extra_mlp", VIT, {"scale_mlp_norm": True}, "extra_mlp has no norm of its hidden layer"),
        ("talking_heads", VIT, {"attn_layer": "diff"}, "kind .*DiffAttention.*expected timm's ordinary Block"),
        ("extra_mlp", "vit_small_patch16_36x1_224", {"depth": 0}, "blocks of the kind .., expected timm's"),
        ("extra_attention", "vit_small_patch16_18x2_224", {}, "ParallelThingsBlock"),
        ("squeeze_excitation", "vit_relpos_small_patch16_224", {}, "needs a ViT or DeiT"),
    ],
)
def test_what_does_not_fit_is_refused(variant: str, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(variant, name, **options)


def test_published_weights_and_attention_masks_are_refused() -> None:
    with pytest.raises(InputError, match=r"has no weights in timm: set model\.pretrained=false"):
        build_network(VIT, num_classes=2, image_size=32, pretrained=True, variant="extra_mlp")
    for kind, said in ((TalkingHeads, "talking heads"), (UniformHeadAttention, "uniform head")):
        with pytest.raises(InputError, match=f"which the {said} of model.variant does not support"):
            kind(DIM, HEADS).double()(tokens(), attn_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool))


def test_in_python_the_layers_are_arguments_of_timm() -> None:
    """A plain network stays as it is."""
    settings: Any = {"num_classes": tiny.CLASSES, "img_size": 32, **OPTIONS}
    for variant, layer in (("talking_heads", TalkingHeads), ("squeeze_excitation", SqueezeExcitedMlp)):
        ((argument, found),) = variant_layers(variant, VIT, False).items()
        assert found is layer
        torch.manual_seed(0)
        network = timm.create_model(VIT, **settings, **{argument: layer}).double().eval()
        assert torch.equal(network(tiny.images()), build(variant)(tiny.images()))
    network = timm.create_model(VIT, **settings)
    assert variant_layers("plain", VIT, True) == {}
    complete_variant(network, "plain")
    assert {type(block) for block in network.blocks} == {Block}


def test_the_config_has_every_variant() -> None:
    assert ClassifierModelConfig().variant == "plain"
    for variant in VARIANTS:
        load_config(None, [f"model.variant={variant}"], task="classification")
    with pytest.raises(InputError, match=r"model\.variant"):
        load_config(None, ["model.variant=other"], task="classification")
