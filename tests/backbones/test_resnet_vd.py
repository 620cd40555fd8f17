"""ResNet-vd: names, weights and normalisation; its outputs are compared in tests/interop/test_huggingface_rtdetr.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor

from detr_bf.backbones import Backbone, build_backbone
from detr_bf.common.errors import InputError
from detr_bf.interop.formats import to_foreign
from tests.detectors.tiny import model


def backbone(name: str, weights: str = "none", **changes: object) -> Backbone:
    settings = {"strides": [8, 16, 32], "dilation": False, "frozen_stages": 0, "frozen_norm": True}
    return build_backbone(name, weights=weights, **(settings | changes)).eval()


def pixels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (1, 3, 64, 96), generator=generator, dtype=torch.uint8)
    return images, torch.zeros(1, 64, 96, dtype=torch.bool)


def test_colours_are_not_normalised() -> None:
    body = backbone("resnet18vd")
    assert torch.equal(body.mean, torch.zeros(3, 1, 1))
    assert torch.equal(body.std, torch.full((3, 1, 1), 255.0))


@torch.no_grad()
@pytest.mark.parametrize("name", ["resnet18vd", "resnet50vd"])
def test_weights_of_timm_give_timms_maps(name: str, tmp_path: Path) -> None:
    """An added first shortcut starts as the identity, up to the epsilon of its norm."""
    torch.manual_seed(0)
    classifier = timm.create_model(name.replace("vd", "d")).eval()
    torch.save(classifier.state_dict(), tmp_path / "timm.pth")
    images, mask = pixels()
    found = backbone(name, str(tmp_path / "timm.pth"))(images, mask)
    expected = classifier.forward_intermediates(images / 255, indices=[2, 3, 4], intermediates_only=True)
    for feature, level in zip(found, expected, strict=True):
        torch.testing.assert_close(feature.tensor, level, rtol=1e-4, atol=1e-4)


@pytest.mark.default_tier("resnet18vd")
@torch.no_grad()
@pytest.mark.parametrize("name", ["resnet18vd", "resnet34vd", "resnet101vd"])
def test_files_of_the_authors_are_read(name: str, tmp_path: Path) -> None:
    """Write a backbone by the names of a whole detector of the authors, and read it by those of the backbone alone."""
    torch.manual_seed(1)
    body, detector = backbone(name), model("rtdetr")
    state = {f"backbone.{key}": x for key, x in body.state_dict().items()} | detector.state_dict()
    theirs = to_foreign(state, "rtdetr")
    alone = {key.removeprefix("backbone."): x for key, x in theirs.items() if key.startswith("backbone.")}
    assert any(key.startswith("res_layers.3.blocks.0.short.conv.norm") for key in alone)
    torch.save(alone, tmp_path / "authors.pth")
    read = backbone(name, str(tmp_path / "authors.pth"))
    for key, value in body.state_dict().items():
        assert torch.equal(read.state_dict()[key], value), key


def test_weights_of_another_depth_are_refused(tmp_path: Path) -> None:
    torch.save(timm.create_model("resnet34d").state_dict(), tmp_path / "timm.pth")
    with pytest.raises(InputError, match="belong to another network"):
        backbone("resnet18vd", str(tmp_path / "timm.pth"))


def test_stem_is_the_first_stage() -> None:
    frozen = [name for name, x in backbone("resnet50vd", frozen_stages=1).named_parameters() if not x.requires_grad]
    assert frozen == ["body.conv1.0.weight", "body.conv1.3.weight", "body.conv1.6.weight"]


def test_dilation_is_refused() -> None:
    with pytest.raises(InputError, match="only resnet50 and resnet101 can be dilated, not resnet50vd"):
        backbone("resnet50vd", dilation=True)
