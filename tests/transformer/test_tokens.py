"""From feature maps to tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from detr_bf.common.structures import FeatureMap, padding_mask, resize_mask
from detr_bf.transformer import FeatureTokens
from detr_bf.transformer.position import SinePosition

DIM, SIZES, CHANNELS = 8, [(2, 3), (1, 2)], [5, 4]
IMAGE_MASK = torch.zeros(2, 16, 24, dtype=torch.bool)
IMAGE_MASK[1, 12:] = IMAGE_MASK[1, :, 18:] = True


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
    batch = module(maps, IMAGE_MASK)
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


def test_what_comes_with_the_tokens_of_a_padded_image() -> None:
    module = FeatureTokens([nn.Conv2d(channels, DIM, 1) for channels in CHANNELS], SinePosition(DIM))
    companions = module(features(), IMAGE_MASK).per_sample
    assert companions["image_size"].tolist() == [[24, 16], [18, 12]]
    expected = [[[1, 1], [1, 1]], [[2 / 3, 1], [1 / 2, 1]]]  # image, level, width and height
    torch.testing.assert_close(companions["valid_ratios"], torch.tensor(expected))


@pytest.mark.parametrize("padded", [(92, 128), (96, 128), (128, 160)])
def test_exact_fractions_do_not_depend_on_the_padding(padded: tuple[int, int]) -> None:
    """A point of the image is the same point of each level in every batch, also where the image ends within a cell."""
    strides = (8, 16, 32)
    mask, maps = padding_mask([(92, 120)], padded), []
    for stride in strides:
        cells = [math.ceil(side / stride) for side in padded]
        maps.append(FeatureMap(torch.zeros(1, 3, *cells), resize_mask(mask, cells)))
    batch = FeatureTokens([nn.Conv2d(3, DIM, 1) for _ in strides], None, strides=strides)(maps, mask)
    for level, (height, width) in enumerate(batch.static["spatial_shapes"]):
        cells = batch.per_sample["valid_ratios"][0, level] * torch.tensor([width, height])
        torch.testing.assert_close(cells * strides[level], torch.tensor([120.0, 92.0]))


def test_further_levels_are_made_from_the_last_map() -> None:
    torch.manual_seed(0)
    mask = torch.zeros(2, 4, 6, dtype=torch.bool)
    last = FeatureMap(torch.randn(2, 5, 4, 6), mask)
    projections = [
        nn.Conv2d(5, DIM, 1),
        nn.Conv2d(5, DIM, 3, stride=2, padding=1),
        nn.Conv2d(DIM, DIM, 3, stride=2, padding=1),
    ]
    embedding = nn.Parameter(torch.randn(3, DIM))
    position = SinePosition(DIM)
    batch = FeatureTokens(projections, position, level_embedding=embedding)([last], IMAGE_MASK)
    shapes = ((4, 6), (2, 3), (1, 2))
    assert batch.static["spatial_shapes"] == shapes
    second = projections[1](last.tensor)
    third = projections[2](second)
    expected = [projections[0](last.tensor), second, third]
    torch.testing.assert_close(batch.tokens, torch.cat([x.flatten(2).mT for x in expected], dim=1))
    resized = nn.functional.interpolate(IMAGE_MASK[None].float(), size=(2, 3))[0].bool()
    assert torch.equal(batch.per_sample["padding_mask"][:, 24:30], resized.flatten(1))
    torch.testing.assert_close(batch.per_sample["position"][:, 24:30], position(resized) + embedding[1])
