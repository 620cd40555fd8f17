"""TensorFlow's SAME padding at the lower right."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers.conv2d_same import Conv2dSame
from torch import nn

from detr_bf.backbones import build_backbone
from detr_bf.backbones.same_padding import pad_at_the_end


@pytest.mark.parametrize("kernel", [1, 3, 5, (3, 5)])
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("size", [(12, 18), (13, 16), (11, 17)])
def test_a_map_and_the_map_with_zeros_up_to_whole_cells(
    kernel: int | tuple[int, int], stride: int, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    theirs, x = Conv2dSame(2, 3, kernel, stride), torch.randn(1, 2, *size)
    ours = nn.Sequential(copy.deepcopy(theirs))
    pad_at_the_end(ours)
    whole = F.pad(x, (0, -size[1] % stride, 0, -size[0] % stride))  # timm divides the rest in one way then
    torch.testing.assert_close(ours(x), theirs(whole))
    assert ours(x).shape == theirs(x).shape


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "dm_nfnet_f0", "tf_efficientnet_cc_b0_4e", "pnasnet5large"])
def test_multiples_of_the_strides_give_the_librarys_maps(name: str) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(name, features_only=True, out_indices=(0, 1, 2)).eval()
    ours = copy.deepcopy(theirs)
    pad_at_the_end(ours)
    with torch.no_grad():
        for found, expected in zip(ours(x := torch.randn(1, 3, 32, 64)), theirs(x), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("frozen_norm", [False, True])
def test_cells_stay_where_they_are_when_the_image_grows(frozen_norm: bool) -> None:
    """Rows and columns more at the lower right leave the maps of the upper left as they are."""
    torch.manual_seed(0)
    settings = {"weights": "none", "strides": [2, 4, 8], "dilation": False, "frozen_stages": 0}
    backbone = build_backbone("timm:tf_efficientnet_lite0", **settings, frozen_norm=frozen_norm).eval()
    pixels = torch.randn(1, 3, 96, 128)
    with torch.no_grad():
        whole = backbone.maps(pixels)
        for height, width in ((96, 127), (91, 126), (95, 125)):
            for part, level in zip(backbone.maps(pixels[:, :, :height, :width]), whole, strict=True):
                rows, columns = level.shape[2] // 3, level.shape[3] // 3  # beyond the reach of the lower right
                torch.testing.assert_close(part[:, :, :rows, :columns], level[:, :, :rows, :columns])
