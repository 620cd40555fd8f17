"""Residual networks for CIFAR."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from detr_bf.classification.cifar_resnet import BasicBlock, cifar_resnet
from detr_bf.common.errors import InputError
from detr_bf.plugins import add_batchformer, num_streams


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)])
def test_parameters_and_layers_are_as_many_as_published(depth: int, millions: float) -> None:
    model = cifar_resnet(depth, 10)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == depth


def test_stages_have_the_published_sizes() -> None:
    model, sizes = cifar_resnet(20, 7), []
    for stage in (model.layer1, model.layer2, model.layer3):
        stage.register_forward_hook(lambda module, args, output: sizes.append(tuple(output.shape[1:])))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert sizes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    assert cifar_resnet(20, 7, width=4)(torch.randn(2, 3, 30, 21)).shape == (2, 7)


@pytest.mark.parametrize(("channels_in", "channels"), [(4, 8), (3, 6)])
def test_shortcut_takes_every_second_pixel_and_pads_channels_with_zeros(channels_in: int, channels: int) -> None:
    block = BasicBlock(channels_in, channels, stride=2).eval()
    nn.init.zeros_(block.bn2.weight)
    images = torch.rand(2, channels_in, 6, 6)
    out, before = block(images), (channels - channels_in) // 2
    for channel in range(channels):
        for row in range(3):
            for column in range(3):
                source = channel - before
                inside = 0 <= source < channels_in
                expected = images[:, source, 2 * row, 2 * column] if inside else torch.zeros(2)
                assert torch.equal(out[:, channel, row, column], expected)


def test_a_block_without_stride_adds_what_it_got() -> None:
    block, images = BasicBlock(4, 4).eval(), torch.randn(2, 4, 5, 5)
    residual = block.bn2(block.conv2(block.bn1(block.conv1(images)).clamp(min=0)))
    torch.testing.assert_close(block(images), (images + residual).clamp(min=0))


def test_batch_attention_finds_its_classifier() -> None:
    model, images = cifar_resnet(8, 5).eval(), torch.randn(3, 3, 32, 32)
    plain = model(images)
    plugin = add_batchformer(model, dropout=0.0)
    assert plugin.batch_former.mixer.layers[0].linear1.in_features == 64
    assert torch.equal(model(images), plain)
    plugin.train()
    torch.testing.assert_close(model(images)[:3], plain)
    assert num_streams(model) == 2
    assert model.get_classifier() is model.fc


@pytest.mark.parametrize("depth", [18, 34, 2, 0, -4])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(InputError, match=f"20, 32, 44 or 56 in the paper; got depth={depth}"):
        cifar_resnet(depth, 10)


@pytest.mark.parametrize("settings", [{"num_classes": 0}, {"num_classes": 3, "width": 0}])
def test_no_classes_and_no_channels_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InputError, match="must be 1 or more"):
        cifar_resnet(20, **settings)
