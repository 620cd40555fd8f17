"""From feature maps to tokens."""

from __future__ import annotations

import torch
from torch import nn

from detr_bf.layers import SinePosition
from detr_bf.structures import FeatureMap
from detr_bf.transformer import FeatureTokens

DIM, SIZES, CHANNELS = 8, [(2, 3), (1, 2)], [5, 4]


def features() -> list[FeatureMap]:
    maps = []
    for channels, (height, width) in zip(CHANNELS, SIZES, strict=True):
        mask = torch.zeros(2, height, width, dtype=torch.bool)
        mask[1, :, width - 1] = True
        maps.append(FeatureMap(torch.randn(2, channels, height, width), mask))
    return maps


def test_every_cell_of_every_map_is_one_token() -> None:
    torch.manual_seed(0)
    position = SinePosition(DIM)
    module, maps = FeatureTokens([nn.Conv2d(channels, DIM, 1) for channels in CHANNELS], position), features()
    batch = module(maps)
    assert batch.tokens.shape == (2, 8, DIM)
    assert batch.static["spatial_shapes"] == tuple(SIZES)
    assert batch.num_streams == 1
    place = 0
    for project, feature in zip(module.projections, maps, strict=True):
        height, width = feature.tensor.shape[-2:]
        encoding = position(feature.padding_mask)
        for y in range(height):
            for x in range(width):
                projected = feature.tensor[:, :, y, x] @ project.weight[:, :, 0, 0].T + project.bias
                torch.testing.assert_close(batch.tokens[:, place], projected)
                assert torch.equal(batch.per_sample["padding_mask"][:, place], feature.padding_mask[:, y, x])
                assert torch.equal(batch.per_sample["position"][:, place], encoding[:, y * width + x])
                place += 1
    assert place == batch.tokens.shape[1]
