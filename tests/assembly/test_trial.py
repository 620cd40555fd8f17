from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn

from detr_bf.assembly.classification import build_classifier
from detr_bf.assembly.network import build_network
from detr_bf.assembly.trial import check_batch_norm
from detr_bf.config import load_config
from detr_bf.errors import InputError
from detr_bf.plugins import add_batchformer

PROBE = (
    "model.name=vit_tiny_patch16_224",
    "model.options={patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}",
    "model.linear_probe=true",
    "data.transforms.size=16",
)


def resnet(image_size: int) -> nn.Module:
    return build_network("resnet18", num_classes=2, image_size=image_size)


def test_batch_norm_over_one_value_is_refused_and_the_network_left_as_it_was() -> None:
    network = resnet(32)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(
        InputError, match=r"1 image of 32 x 32 pixels .*1, 512, 1, 1.*: give train.batch_size=2 or more"
    ):
        check_batch_norm(network, image_size=32, rows=1)
    assert all(module.training for module in network.modules())
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_two_images_or_more_pixels_are_enough() -> None:
    network = resnet(64)
    add_batchformer(network)
    before = copy.deepcopy(network.state_dict())
    check_batch_norm(network, image_size=64, rows=1)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert all(module.training for module in network.modules())
    check_batch_norm(network, image_size=32, rows=2)


def test_a_linear_probe_needs_two_images() -> None:
    network = build_classifier(load_config(None, PROBE, task="classification"), 2)
    with pytest.raises(InputError, match="batch norm cannot learn from 1 image"):
        check_batch_norm(network, image_size=16, rows=1)


def test_a_network_without_batch_norm_learns_from_one() -> None:
    settings = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 16}
    check_batch_norm(timm.create_model("vit_tiny_patch16_224", **settings), image_size=16, rows=1)
