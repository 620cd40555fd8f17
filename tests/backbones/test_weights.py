from __future__ import annotations

import os
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import resnet as torchvision_resnet

from detr_bf.backbones import Backbone, build_backbone
from detr_bf.backbones.weights import read_network_file
from detr_bf.common.errors import InputError


def build(weights: str, name: str = "resnet18") -> Backbone:
    return build_backbone(name, weights=weights, strides=[16], dilation=False, frozen_stages=2, frozen_norm=True)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return torchvision_resnet.resnet18(num_classes=5).state_dict()


@pytest.mark.parametrize("form", ["plain", "state_dict", "model", "safetensors", "without_counters_and_classifier"])
def test_a_local_file_fills_every_tensor(form: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file(state, path)
    elif form in ("state_dict", "model"):
        torch.save({form: state, "epoch": 3}, path)
    elif form == "plain":
        torch.save(state, path)
    else:
        torch.save({k: v for k, v in state.items() if "num_batches" not in k and not k.startswith("fc.")}, path)
    body = build(str(path)).body.state_dict()
    assert len(body) > 50
    assert all(torch.equal(value, state[key]) for key, value in body.items())


def test_the_folder_of_a_run_gives_its_averaged_weights_without_plugins(
    state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    raw = {key: value + 1 for key, value in state.items()}
    for name, averaged in (("last.pt", raw), ("best.pt", state)):
        content = {
            "model": raw,
            "ema": averaged | {"plugins.batchformer.x": torch.zeros(3)},
            "training": {"progress": {}},
        }
        torch.save(content, tmp_path / name)
    body = build(str(tmp_path)).body.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in body.items())
    torch.save({"model": state, "ema": raw, "training": {"progress": {"raw_is_better": 1}}}, tmp_path / "best.pt")
    assert torch.equal(build(str(tmp_path)).body.state_dict()["conv1.weight"], state["conv1.weight"])


def test_missing_unknown_and_mismatched_keys_are_listed(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    broken = {key: value for key, value in state.items() if key != "layer1.0.conv1.weight"}
    torch.save({**broken, "extra.weight": torch.zeros(1), "conv1.weight": torch.zeros(64, 1, 7, 7)}, path)
    with pytest.raises(InputError) as error:
        build(str(path))
    for words in (
        "1 missing: layer1.0.conv1.weight",
        "1 unknown: extra.weight",
        "1 of another shape: conv1.weight (64, 1, 7, 7) instead of (64, 3, 7, 7)",
        str(path),
    ):
        assert words in str(error.value)


def test_a_larger_network_of_the_same_family_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(torchvision_resnet.resnet34().state_dict(), path)
    with pytest.raises(InputError, match=r"unknown: layer1\.2.* and \d+ more"):
        build(str(path))


class Malicious:
    """Object whose unpickling creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_executes_is_refused(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    marker, path = tmp_path / "executed", tmp_path / "w.pth"
    torch.save({"state_dict": state, "trap": Malicious(marker)}, path)
    with pytest.raises(InputError, match="refused"):
        build(str(path))
    assert not marker.exists()
    torch.load(path, weights_only=False)  # a plain torch.load does run the code
    assert marker.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_truncated_file_is_named(suffix: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    if suffix == ".pth":
        torch.save(state, path)
    else:
        save_file(state, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=f"w{suffix}"):
        read_network_file(path)


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {"epoch": 3}}, {"lr": 0.1}])
def test_what_is_no_state_dict_is_refused(content: object, tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(content, path)
    with pytest.raises(InputError, match=r"weights: .*expected a dict of tensors"):
        read_network_file(path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"file not found: nowhere\.pth; expected imagenet"):
        build("nowhere.pth")


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise URLError("no network here")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", no_network)
    with pytest.raises(InputError) as error:
        build("imagenet", "resnet50")
    for words in (
        "resnet50-0676ba61.pth",
        "no network here",
        "weights=none",
        "weights=/path/to/",
    ):
        assert words in str(error.value)


def test_downloaded_weights_are_loaded(state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    full = {**state, "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    seen = {}

    def fake_download(url: str, **options: object) -> dict[str, torch.Tensor]:
        seen.update(options, url=url)
        return full

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fake_download)
    body = build("imagenet").body.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in body.items())
    assert seen["url"].endswith("resnet18-f37072fd.pth")
    assert seen["check_hash"]
    assert seen["weights_only"]
