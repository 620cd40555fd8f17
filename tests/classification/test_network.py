"""Networks by name, and the dry run on meta tensors."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from detr_bf.backbones.weights import with_resized_positions
from detr_bf.classification.assembly import build_classifier
from detr_bf.classification.network import build_network, check_batch_norm
from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.engine import load_fitting
from detr_bf.plugins import add_batchformer

VIT = "vit_tiny_patch16_224"
TINY = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


def build(name: str = VIT, *, image_size: int = 32, num_classes: int = 2, **settings: Any) -> torch.nn.Module:
    return build_network(name, num_classes=num_classes, image_size=image_size, **settings)


def refusals() -> Any:
    vit = {"options": TINY}
    yield VIT, {"image_size": 33, **vit}, r"size=33 is not a multiple of .* patches of 8 x 8 pixels: give 32"
    yield VIT, {"image_size": 5, **vit}, r"size=5 is not a multiple .*: give 8"
    yield VIT, {"image_size": 33, "num_classes": 0, **vit}, r"size=33 is not a multiple"
    yield VIT, {"options": TINY | {"img_size": 64}}, r"model.options.img_size=64 and data.transforms.size=32 differ"
    yield VIT, {"options": TINY | {"img_size": [32, 64]}}, r"img_size=\[32, 64\] and data.transforms.size=32 differ"
    yield VIT, {"options": TINY | {"in_chans": 1}}, r"colour images of data.transforms.size=32 .*1 channels.*options"
    yield (
        VIT,
        {"options": TINY | {"global_pool": ""}},
        r"returns \(2, 17, 2\) for two images, expected one row of 2 logits",
    )
    yield VIT, {"options": TINY | {"num_classes": 5}}, r"returns \(2, 5\) for two images"
    yield VIT, {"options": TINY | {"embed_dim": -3}}, r"does not take .*negative dimension"
    yield VIT, {"options": TINY | {"patch_size": 0}}, r"does not take .*'patch_size': 0"
    yield VIT, {"options": TINY | {"act_layer": "no"}}, r"does not take .*'act_layer': 'no'"
    yield "inception_v3", {}, r"colour images of data.transforms.size=32 "
    yield "vgg11", {"drop_path": 0.1}, r"vgg11 does not take .*drop_path_rate"
    yield "cifar_resnet1000002", {}, r"give a depth of at most four digits"
    yield "cifar_resnet" + "9" * 5000, {}, r"give a depth of at most four digits"
    yield "cifar_resnet8", {"pretrained": True}, r"cifar_resnet8 has no pretrained: set model.pretrained=false"
    yield "cifar_resnet8", {"dropout": 0.1}, r"cifar_resnet8 has no dropout: set model.dropout=0"
    yield "cifar_resnet8", {"drop_path": 0.1}, r"cifar_resnet8 has no drop_path: set model.drop_path=0"


@pytest.mark.parametrize(("name", "settings", "message"), list(refusals()))
def test_what_does_not_fit_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build(name, **settings)
    assert "model.pretrained=true" not in str(caught.value)


def test_without_numbers_the_same_is_refused() -> None:
    with torch.device("meta"), pytest.raises(InputError, match="colour images"):
        build(options=TINY | {"in_chans": 1})


@pytest.mark.parametrize("name", [VIT, "resnet18", "cifar_resnet8"])
def test_the_trial_changes_neither_the_network_nor_random_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TINY if name == VIT else {}
    torch.manual_seed(0)
    tried, after = build(name, options=options), torch.rand(3)
    monkeypatch.setattr("detr_bf.classification.network.check_shapes", lambda *_, **__: None)
    torch.manual_seed(0)
    plain, expected = build(name, options=options), torch.rand(3)
    assert torch.equal(after, expected)
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in tried.state_dict().items())
    assert all(module.training for module in tried.modules())


class NeedsNumbers(torch.nn.Module):
    """Network whose forward pass reads tensor values; with ``wrong`` it fails on real tensors too."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.linear, self.wrong = torch.nn.Linear(3, 2), wrong

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.mean().item() > 7 or self.wrong:
            raise RuntimeError("too bright")
        return self.linear(images.mean((2, 3)))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_network_that_needs_numbers_is_tried_with_them(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: NeedsNumbers(wrong))
    if wrong:
        with pytest.raises(InputError, match="too bright"):
            build("resnet18")
    else:
        assert isinstance(build("resnet18"), NeedsNumbers)


def test_only_a_failed_download_speaks_of_pretrained_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: Exception) -> None:
        def create(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(timm, "create_model", create)

    failing(ConnectionError("no network here"))
    with pytest.raises(
        InputError, match=r"model.pretrained=true: .*resnet18 cannot be loaded \(no network here\).*init_from"
    ):
        build("resnet18", pretrained=True)
    failing(RuntimeError("size mismatch"))
    with pytest.raises(InputError, match=r"resnet18 with its pretrained weights does not take .*: size mismatch"):
        build("resnet18", pretrained=True)
    with pytest.raises(InputError, match=r"timm has no weights of coatnet_0_224"):
        build("coatnet_0_224", pretrained=True)


def test_positions_of_another_image_size_are_interpolated(caplog: pytest.LogCaptureFixture) -> None:
    file, model = build(options=TINY, image_size=32), build(options=TINY, image_size=64)
    weights = file.state_dict()
    weights["pos_embed"] = torch.randn(1, 17, 16)
    with caplog.at_level(logging.INFO):
        resized = with_resized_positions(model, weights, "a.pt")
    assert "a.pt: its pos_embed of 4 x 4 patches is interpolated to 8 x 8" in caplog.text
    assert "of another shape" not in load_fitting(model, resized, "a.pt")
    assert torch.equal(model.pos_embed[:, 0], weights["pos_embed"][:, 0]), "the class token has no position in the grid"
    small = F.avg_pool2d(model.pos_embed[0, 1:].T.unflatten(1, (8, 8)), 2)
    grid = weights["pos_embed"][0, 1:].T.unflatten(1, (4, 4))
    assert F.cosine_similarity(small.flatten(), grid.flatten(), dim=0) > 0.9


@pytest.mark.parametrize("positions", [torch.zeros(1, 17, 8), torch.zeros(1, 16, 16), torch.zeros(3), None])
def test_positions_that_are_no_grid_are_left_alone(positions: torch.Tensor | None) -> None:
    model, weights = build(options=TINY, image_size=64), {"a": torch.zeros(2)}
    weights |= {} if positions is None else {"pos_embed": positions}
    assert with_resized_positions(model, weights, "a.pt").keys() == weights.keys()
    assert with_resized_positions(model, weights, "a.pt").get("pos_embed") is positions
    assert with_resized_positions(torch.nn.Linear(2, 2), weights, "a.pt") == weights


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
    with pytest.raises(InputError, match="batch norm cannot train on 1 image"):
        check_batch_norm(network, image_size=16, rows=1)


def test_a_network_without_batch_norm_learns_from_one() -> None:
    settings = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 16}
    check_batch_norm(timm.create_model("vit_tiny_patch16_224", **settings), image_size=16, rows=1)
