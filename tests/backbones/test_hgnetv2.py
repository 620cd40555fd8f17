"""HGNetv2: colours, stages and weights; its maps are compared in tests/golden/test_dfine_encoder.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

from detr_bf.backbones import Backbone, build_backbone
from detr_bf.common.errors import InputError


def backbone(name: str, weights: str = "none", **changes: object) -> Backbone:
    settings = {"strides": [8, 16, 32], "dilation": False, "frozen_stages": 0, "frozen_norm": False}
    return build_backbone(name, weights=weights, **(settings | changes)).eval()


def test_colours_are_not_normalised() -> None:
    body = backbone("hgnetv2_b0")
    assert torch.equal(body.mean, torch.zeros(3, 1, 1))
    assert torch.equal(body.std, torch.full((3, 1, 1), 255.0))


@torch.no_grad()
@pytest.mark.parametrize("head", [True, False])
def test_weights_with_and_without_a_classifier_give_timms_maps(head: bool, tmp_path: Path) -> None:
    """The authors' file of the backbone has no classifier; its names are timm's."""
    torch.manual_seed(0)
    classifier = timm.create_model("hgnetv2_b0").eval()
    state = {key: x for key, x in classifier.state_dict().items() if head or not key.startswith("head.")}
    torch.save(state, tmp_path / "weights.pth")
    images = torch.randint(256, (1, 3, 64, 96), dtype=torch.uint8)
    found = backbone("hgnetv2_b0", str(tmp_path / "weights.pth"))(images, torch.zeros(1, 64, 96, dtype=torch.bool))
    expected = classifier.forward_intermediates(images / 255, indices=[1, 2, 3], intermediates_only=True)
    for feature, level in zip(found, expected, strict=True):
        torch.testing.assert_close(feature.tensor, level, rtol=1e-4, atol=1e-4)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    torch.save(timm.create_model("hgnetv2_b0").state_dict(), tmp_path / "timm.pth")
    with pytest.raises(InputError, match="belong to another network"):
        backbone("hgnetv2_b1", str(tmp_path / "timm.pth"))


def test_stem_is_the_first_stage() -> None:
    body = backbone("hgnetv2_b4", frozen_stages=1, frozen_norm=True)
    frozen = [name for name, x in body.named_parameters() if not x.requires_grad]
    assert frozen == [f"body.stem.stem{part}.conv.weight" for part in ("1", "2a", "2b", "3", "4")]
    assert body.stages == ("stem", "stages_0", "stages_1", "stages_2", "stages_3")
    assert (body.channels, body.strides) == ((512, 1024, 2048), (8, 16, 32))
