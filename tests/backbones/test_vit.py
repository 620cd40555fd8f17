"""Plain vision transformers as backbones, against timm and against a forward pass written out for one image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from detr_bf.backbones import Backbone, VitOptions, build_backbone, timm_backbone
from detr_bf.backbones.vit import cubic_weights, interpolated_positions
from detr_bf.classification.masked_autoencoder import MaskedAutoencoder
from detr_bf.common.errors import InputError

TINY = {"patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2, "img_size": 32}
STRIDES = (2, 4, 8, 16)
NAMES = (
    "vit_tiny_patch16_224",  # class token
    "deit_tiny_distilled_patch16_224",  # class and distillation token
    "vit_small_patch14_reg4_dinov2",  # registers and layer scale
    "deit3_small_patch16_224",  # positions of the patches alone
    "vit_tiny_patch16_224 without",  # neither tokens nor learned positions
)


def build(name: str = NAMES[0], *, large: bool = True, **changes: Any) -> Backbone:
    """Build a tiny network, with weights ``large`` enough to tell things apart."""
    name, _, bare = name.partition(" ")
    further = {"class_token": False, "global_pool": "avg", "pos_embed": "none"} if bare else {}
    vit = VitOptions(**{"options": TINY | further, **changes.pop("vit", {})})
    settings = {"weights": "none", "strides": STRIDES, "dilation": False, "frozen_stages": 0, "frozen_norm": False}
    torch.manual_seed(0)
    backbone = build_backbone(f"timm:{name}", vit=vit, **{**settings, **changes}).eval()
    if large:
        for parameter in backbone.parameters():
            nn.init.normal_(parameter, std=0.4)
    return backbone


def written_out(backbone: Backbone, pixels: Tensor) -> list[Tensor]:
    """Maps of one normalised image (3, H, W), window by window and head by head."""
    body = backbone.body
    vit, side = body.vit, body.vit.patch_embed.patch_size[0]
    pixels = F.pad(pixels, (0, -pixels.shape[2] % side, 0, -pixels.shape[1] % side))
    kernel, bias = vit.patch_embed.proj.weight, vit.patch_embed.proj.bias
    grid = torch.stack(
        [
            torch.stack([(kernel * block).sum((1, 2, 3)) + bias for block in row.split(side, dim=2)])
            for row in pixels.split(side, dim=1)
        ]
    )  # (h, w, C)
    size = grid.shape[:2]
    prefix = [
        token[0] for name in ("cls_token", "dist_token", "reg_token") if (token := getattr(vit, name, None)) is not None
    ]
    before = torch.cat(prefix) if prefix else grid.new_zeros(0, grid.shape[-1])
    if vit.pos_embed is not None:
        count = 0 if vit.no_embed_class else len(before)
        table = vit.pos_embed[0, count:].unflatten(0, vit.patch_embed.grid_size).permute(2, 0, 1)
        grid = grid + F.interpolate(table[None], size, mode="bicubic", align_corners=False)[0].permute(1, 2, 0)
        before = before + vit.pos_embed[0, :count] if count else before
    for index, block in enumerate(vit.blocks):
        if index in body.whole:
            tokens = attend(block, torch.cat([before, grid.flatten(0, 1)]))
            before, grid = tokens[: len(before)], tokens[len(before) :].unflatten(0, size)
        else:
            rows = [row.split(body.window, dim=1) for row in grid.split(body.window, dim=0)]
            grid = torch.cat(
                [
                    torch.cat([attend(block, cell.flatten(0, 1)).unflatten(0, cell.shape[:2]) for cell in row], dim=1)
                    for row in rows
                ]
            )
    top = vit.norm(grid).permute(2, 0, 1)[None]
    quarter, half = body.pyramid.levels[:2]
    fine = F.conv_transpose2d(top, quarter[0].weight, quarter[0].bias, stride=2)
    fine = F.layer_norm(fine.permute(0, 2, 3, 1), fine.shape[1:2], quarter[1].weight, quarter[1].bias, eps=1e-6)
    fine = F.conv_transpose2d(F.gelu(fine).permute(0, 3, 1, 2), quarter[3].weight, quarter[3].bias, stride=2)
    padded = F.pad(top, (0, size[1] % 2, 0, size[0] % 2), value=-torch.inf)
    coarse = padded.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))
    return [fine, F.conv_transpose2d(top, half.weight, half.bias, stride=2), top, coarse]


def attend(block: Any, tokens: Tensor) -> Tensor:
    """Block of a vision transformer on the tokens (S, C) of one image or window."""
    heads = block.attn.num_heads
    q, k, v = block.attn.qkv(block.norm1(tokens)).unflatten(1, (3, heads, -1)).unbind(1)  # (S, heads, c)
    seen = [((q[:, head] @ k[:, head].T) / q.shape[-1] ** 0.5).softmax(1) @ v[:, head] for head in range(heads)]
    tokens = tokens + block.ls1(block.attn.proj(torch.cat(seen, dim=1)))
    return tokens + block.ls2(block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(tokens)))))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "vit", [{}, {"window": 2, "global_blocks": (3,)}, {"window": 3, "global_blocks": (0, 2)}], ids=str
)
def test_a_written_out_forward_pass(name: str, vit: dict[str, Any]) -> None:
    """Images that neither patches nor windows divide, beside larger ones: padding changes nothing."""
    backbone = build(name, vit=vit)
    images = torch.randint(0, 256, (2, 3, 62, 72), dtype=torch.uint8)
    mask = torch.ones(2, 62, 72, dtype=torch.bool)
    sizes = [(62, 40), (33, 72)]
    for image, (height, width) in enumerate(sizes):
        mask[image, :height, :width] = False
    with torch.no_grad():
        found = backbone(images, mask)
        for image, (height, width) in enumerate(sizes):
            pixels = (images[image, :, :height, :width].float() - backbone.mean) / backbone.std
            for level, expected, stride in zip(found, written_out(backbone, pixels), STRIDES, strict=True):
                rows, columns = -(-height // stride), -(-width // stride)  # cells that begin within the image
                part = level.tensor[image : image + 1, :, :rows, :columns]
                torch.testing.assert_close(part, expected[:, :, :rows, :columns], rtol=1e-4, atol=1e-4)
                seen = ~level.padding_mask[image]
                assert seen[:rows, :columns].all()
                assert seen.sum() == rows * columns
    assert [tuple(level.tensor.shape[1:]) for level in found] == [(4, 31, 36), (8, 16, 18), (16, 8, 9), (16, 4, 5)]
    assert all(level.tensor.isfinite().all() for level in found)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_tokens_of_timm_at_the_size_of_the_positions(name: str) -> None:
    backbone = build(name, strides=[8])
    classifier = timm.create_model(name, **TINY).eval()
    classifier.load_state_dict(backbone.body.vit.state_dict(), strict=False)
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = classifier.forward_features(pixels)[:, classifier.num_prefix_tokens :]
        (found,) = backbone.maps(pixels)
    torch.testing.assert_close(found, tokens.unflatten(1, (4, 4)).permute(0, 3, 1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(3, 9), (5, 5), (7, 2), (1, 8)])
def test_positions_are_interpolated_over_each_image(rows: int, columns: int) -> None:
    table, padding = torch.randn(5, 5, 3), torch.ones(1, 7, 9, dtype=torch.bool)
    padding[0, :rows, :columns] = False
    expected = F.interpolate(table.permute(2, 0, 1)[None], (rows, columns), mode="bicubic", align_corners=False)
    found = interpolated_positions(table, padding)[:, :rows, :columns].permute(0, 3, 1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(cubic_weights(torch.tensor([5]), 5, 5)[0], torch.eye(5))


@pytest.mark.parametrize("window", [0, 3])
def test_every_parameter_learns(window: int) -> None:
    backbone = build(vit={"window": window, "global_blocks": (1,)[:window]}, strides=[2, 8, 16]).train()
    maps = backbone(torch.randint(0, 256, (1, 3, 40, 56), dtype=torch.uint8), torch.zeros(1, 40, 56, dtype=torch.bool))
    sum(level.tensor.square().sum() for level in maps).backward()  # type: ignore[union-attr]
    without = [
        name for name, parameter in backbone.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert without == []


def test_stages_are_the_patches_and_the_blocks() -> None:
    backbone = build(frozen_stages=2)
    frozen = {name.removeprefix("body.vit.") for name, x in backbone.named_parameters() if not x.requires_grad}
    assert {name for name in frozen if not name.startswith("blocks.0.")} == {
        *("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")
    }
    assert "blocks.0.mlp.fc2.bias" in frozen
    with pytest.raises(InputError, match="5 stages"):
        build(frozen_stages=6)


def test_weights_of_a_classifier_of_smaller_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(3)
    small = timm.create_model(NAMES[0], **(TINY | {"img_size": 16}), num_classes=7)
    torch.save({"model": small.state_dict()}, tmp_path / "last.pt")  # in the folder of a run
    with caplog.at_level("INFO"):
        backbone = build(large=False, weights=str(tmp_path), strides=[8])
    assert "its pos_embed of 2 x 2 patches is interpolated to 4 x 4" in caplog.text
    state = backbone.body.vit.state_dict()
    assert torch.equal(state["blocks.3.mlp.fc1.weight"], small.blocks[3].mlp.fc1.weight)
    assert torch.equal(state["cls_token"], small.cls_token)


def test_weights_of_a_masked_autoencoder(tmp_path: Path) -> None:
    torch.manual_seed(4)
    encoder = timm.create_model(NAMES[0], **TINY, num_classes=0)
    trained = MaskedAutoencoder(
        encoder, decoder_dim=8, decoder_depth=1, decoder_heads=2, mask_ratio=0.5, norm_pix_loss=False
    )
    path = tmp_path / "best.pt"
    torch.save({"model": trained.state_dict() | {"encoder.plugins.batchformer_v2.x": torch.zeros(1)}}, path)
    read = build(large=False, weights=str(path), strides=[8])
    for name, value in encoder.state_dict().items():
        assert torch.equal(read.body.vit.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strides": [32]}, r"strides=\[32\]: there is no stride 32; .* \[2, 4, 8, 16\]"),
        (
            {"strides": [8], "vit": {"window": 2, "global_blocks": (4,)}},
            "there is no block 4; timm:vit_tiny_patch16_224 has 0 to 3",
        ),
        ({"strides": [8], "vit": {"global_blocks": (1,)}}, "set window"),
        ({"strides": [8], "vit": {"options": {"depth": "many"}}}, r"options=.*timm cannot build vit_tiny"),
        ({"strides": [8], "vit": {"options": {"act_layer": "nope"}}}, r"options=.*timm cannot build vit_tiny"),
        (
            {"strides": [8], "vit": {"options": {"features_only": True, "in_chans": 1}}},
            "features_only, in_chans cannot",
        ),
        ({"strides": [8], "vit": {"options": {"patch_size": (8, 4)}}}, "square patches, got 8 x 4"),
        ({"strides": [8], "vit": {"options": TINY | {"depth": 0}}}, "one block or more, got depth=0"),
        ({"strides": [8], "name": "resnet10t", "vit": {"window": 2}}, "no plain vision transformer"),
        ({"strides": [8], "name": "vit_small_r26_s32_224", "vit": {"options": {}}}, "one size only"),
    ],
)
def test_user_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(**changes)


def test_settings_of_other_networks_stay_at_their_defaults() -> None:
    with pytest.raises(InputError, match="vit: resnet18 is no plain vision transformer"):
        build_backbone(
            "resnet18",
            weights="none",
            strides=[8],
            dilation=False,
            frozen_stages=0,
            frozen_norm=False,
            vit=VitOptions(window=2),
        )


def test_half_precision_keeps_the_features() -> None:
    backbone = build(vit={"window": 3, "global_blocks": (1,)})
    images, mask = torch.randint(0, 256, (2, 3, 48, 40), dtype=torch.uint8), torch.zeros(2, 48, 40, dtype=torch.bool)
    mask[1, 20:] = True
    with torch.no_grad():
        expected = backbone(images, mask)
        with torch.autocast("cpu", torch.bfloat16):
            found = backbone(images, mask)
    for half, full in zip(found, expected, strict=True):
        error = (half.tensor.float() - full.tensor).norm() / full.tensor.norm()
        assert error < 0.03


def test_four_blocks_see_the_whole_image_unless_others_are_chosen() -> None:
    for depth, whole in ((12, {2, 5, 8, 11}), (6, {0, 2, 3, 5}), (2, {0, 1})):
        backbone = build(vit={"window": 2, "options": TINY | {"depth": depth}})
        assert backbone.body.whole == whole
    assert build(vit={"window": 2, "global_blocks": (3,)}).body.whole == {3}


def test_the_norm_behind_the_pooling_is_the_last_one() -> None:
    backbone = build("vit_base_patch16_rpn_224", vit={"options": TINY | {"pos_embed": "none"}}, strides=[8])
    assert isinstance(backbone.body.vit.norm, nn.LayerNorm)
    with torch.no_grad():
        (found,) = backbone.maps(torch.randn(1, 3, 32, 32))
    norm = backbone.body.vit.norm
    normalized = (found[0].permute(1, 2, 0) - norm.bias) / norm.weight
    torch.testing.assert_close(normalized.var(-1, unbiased=False), torch.ones(4, 4), rtol=1e-2, atol=1e-2)


def test_published_weights_of_another_depth_are_no_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "model.safetensors"
    save_file(timm.create_model(NAMES[0], **(TINY | {"embed_dim": 8})).state_dict(), cached)
    monkeypatch.setattr(timm_backbone, "_hub_has_an_address", lambda: False)
    monkeypatch.setattr(timm_backbone, "try_to_load_from_cache", lambda *_: str(cached))
    with pytest.raises(InputError, match=r"weights=imagenet: those of vit_tiny.* do not fit options="):
        build(weights="imagenet", large=False)


def test_stochastic_depth_rises_to_the_last_block() -> None:
    backbone = build(drop_path=0.3)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in backbone.body.vit.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
