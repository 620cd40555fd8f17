"""Vision transformer of RF-DETR; its outputs are compared in tests/golden/test_rfdetr.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.backbones import Backbone, VitOptions, build_backbone
from detr_bf.backbones.vit import interpolated_positions
from detr_bf.backbones.windowed_vit import from_windows, in_windows
from detr_bf.common.errors import InputError

TINY = {"patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2, "img_size": 40}
MAPS = {"maps": [0, 2], "windows": 2, "global_blocks": [1], "options": TINY}
NAMES = (
    *("vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2"),  # with and without registers
    *("deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"),  # two tokens; no positions of the token
)


def build(name: str = NAMES[0], **changes: Any) -> Backbone:
    torch.manual_seed(0)
    vit = VitOptions(**{**MAPS, **changes.pop("vit", {})})
    settings = {"weights": "none", "strides": [8], "dilation": False, "frozen_stages": 0, "frozen_norm": False}
    backbone = build_backbone(f"timm:{name}", vit=vit, **{**settings, **changes}).eval()
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, std=0.4)
    return backbone


def images(*sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return random images in one padded batch, and its mask."""
    torch.manual_seed(1)
    height, width = (max(size[side] for size in sizes) for side in (0, 1))
    pixels = torch.randint(0, 256, (len(sizes), 3, height, width), dtype=torch.uint8)
    mask = torch.ones(len(sizes), height, width, dtype=torch.bool)
    for row, (rows, columns) in enumerate(sizes):
        mask[row, :rows, :columns] = False
    return pixels, mask


@pytest.mark.parametrize("name", NAMES)
def test_one_window_is_the_network_of_timm(name: str) -> None:
    """Compare both maps with timm's own intermediate layers on an image of the size of its positions."""
    backbone = build(name, vit={"windows": 1})
    pixels, mask = images((40, 40))
    normalised = (pixels - backbone.mean) / backbone.std
    vit: Any = backbone.body.vit
    with torch.no_grad():
        found = backbone(pixels, mask)
        expected = vit.get_intermediate_layers(normalised, n=[0, 2], reshape=True, norm=True)
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each.tensor, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("antialias", [False, True])
def test_patches_alone_with_their_positions(antialias: bool) -> None:
    """Compare with the blocks of timm over tokens without the class token, on an image smaller than the positions."""
    backbone = build(vit={"windows": 1, "class_token": False, "antialias": antialias})
    pixels, mask = images((24, 32))
    vit: Any = backbone.body.vit
    assert vit.pos_embed.shape == (1, 26, 16), "the class token keeps its row of the table"
    table = vit.pos_embed[:, 1:].unflatten(1, (5, 5)).permute(0, 3, 1, 2)
    places = F.interpolate(table, (3, 4), mode="bicubic", antialias=antialias)
    with torch.no_grad():
        tokens = vit.patch_embed.proj((pixels - backbone.mean) / backbone.std) + places
        tokens = vit.blocks[0](tokens.flatten(2).transpose(1, 2))
        expected = vit.norm(tokens).transpose(1, 2).unflatten(2, (3, 4))
        torch.testing.assert_close(backbone(pixels, mask)[0].tensor, expected, rtol=1e-4, atol=1e-4)


def test_blocks_in_windows_see_their_window_alone() -> None:
    """Change a pixel: the map of the first block changes in its window, that after a block over all everywhere."""
    backbone, (pixels, mask) = build(vit={"maps": [0, 1]}), images((64, 64))
    changed = pixels.clone()
    changed[0, :, 40:48, 8:16] = 255 - changed[0, :, 40:48, 8:16]
    with torch.no_grad():
        before, after = backbone(pixels, mask), backbone(changed, mask)
    within, whole = (~torch.isclose(x.tensor, y.tensor).all(1)[0] for x, y in zip(before, after, strict=True))
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[4:, :4] = True
    assert torch.equal(within, expected)
    assert whole.all()


@pytest.mark.parametrize("windows", [2, 3])
def test_pixels_in_the_padding_are_not_seen(windows: int) -> None:
    """Compare the maps within each image with those of images whose padding holds other pixels."""
    body = build(vit={"windows": windows}).body
    pixels, mask = images((88, 48), (32, 96))  # whole patches
    other = torch.where(mask[:, None], 255 - pixels, pixels)
    with torch.no_grad():
        for one, two in zip(body(pixels / 255, mask), body(other / 255, mask), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_an_image_is_as_alone_beside_a_larger_one_without_windows() -> None:
    """The windows follow from the padded size of the batch; with one window this changes nothing."""
    backbone = build(vit={"windows": 1})
    sizes = [(48, 64), (33, 40)]
    pixels, mask = images(*sizes)
    with torch.no_grad():
        together = backbone(pixels, mask)
        for row, (height, width) in enumerate(sizes):
            alone = backbone(pixels[row : row + 1, :, :height, :width], mask[row : row + 1, :height, :width])
            for one, other in zip(alone, together, strict=True):
                part = other.tensor[row : row + 1, :, : one.tensor.shape[2], : one.tensor.shape[3]]
                torch.testing.assert_close(part, one.tensor, rtol=1e-4, atol=1e-4)
                assert not other.tensor[row][:, other.padding_mask[row]].any()


@pytest.mark.parametrize("size", [(50, 41), (8, 8), (7, 100)])
def test_any_size(size: tuple[int, int]) -> None:
    """Images that patches and windows do not divide; windows of nothing but padding are finite."""
    backbone = build()
    with torch.no_grad():
        maps = backbone(*images(size, (size[0], 16)))
    shape = (-(-size[0] // 8), -(-max(size[1], 16) // 8))
    assert [tuple(each.tensor.shape[-2:]) for each in maps] == [shape] * 2
    assert all(each.tensor.isfinite().all() for each in maps)
    assert backbone.channels == (16, 16)
    assert backbone.strides == (8, 8)


def test_windows_and_back() -> None:
    cells = torch.arange(2 * 6 * 9 * 3).view(2, 6, 9, 3)
    windows = in_windows(cells, 3)
    assert torch.equal(windows[4], cells[0, 2:4, 3:6].flatten(0, 1))
    assert torch.equal(from_windows(windows, 3, torch.empty(2, 6, 9)), cells)


@pytest.mark.parametrize("size", [(5, 5), (7, 6), (3, 2), (1, 9)])
def test_positions_are_those_of_torch(size: tuple[int, int]) -> None:
    """Compare with torch's antialiased interpolation, also of an image in a larger batch."""
    torch.manual_seed(0)
    table = torch.randn(5, 5, 4)
    padding = torch.ones(1, 9, 9, dtype=torch.bool)
    padding[:, : size[0], : size[1]] = False
    found = interpolated_positions(table, padding, antialias=True)[0, : size[0], : size[1]]
    whole = F.interpolate(table.permute(2, 0, 1)[None], size, mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_blocks_after_the_last_map_do_not_learn() -> None:
    backbone = build()
    found = {name for name, parameter in backbone.body.named_parameters() if not parameter.requires_grad}
    assert found
    assert all(name.startswith("vit.blocks.3.") for name in found)
    backbone.train()
    maps = backbone(*images((32, 48)))
    sum(each.tensor.square().sum() for each in maps).backward()
    missing = {name for name, parameter in backbone.body.named_parameters() if parameter.grad is None}
    assert missing == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strides": [16]}, r"strides=\[16\].*there is no stride 16; .* has feature maps of strides \[8\]"),
        ({"finer": True}, "DETR's mask head needs finer maps than of stride 8"),
        ({"vit": {"window": 3}}, "give the number of windows per side, windows, instead of window"),
        ({"vit": {"maps": [2, 0]}}, "expected blocks of timm:vit_small_patch14_dinov2, 0 to 3, in ascending order"),
        ({"vit": {"maps": [4]}}, "expected blocks of timm:vit_small_patch14_dinov2, 0 to 3"),
        ({"vit": {"global_blocks": [7]}}, "there is no block 7; timm:vit_small_patch14_dinov2 has 0 to 3"),
        ({"vit": {"maps": [], "global_blocks": []}}, "windows=2 needs maps"),
        ({"vit": {"maps": [], "windows": 1, "class_token": False}}, "class_token=False needs maps"),
    ],
    ids=str,
)
def test_wrong_settings_are_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(**changes)
