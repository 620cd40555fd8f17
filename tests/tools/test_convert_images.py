"""Deployment files of classifiers and masked autoencoders, written by tools/convert_checkpoint.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormer
from detr_bf.common.structures import ClassMap
from detr_bf.config import config_to_dict, load_config
from detr_bf.engine import Checkpoint, load_checkpoint
from detr_bf.tasks import read_trained, task_of
from tests.checkpoints import training
from tests.tools.image_runs import classifier_config, contrastive_config, masked_config
from tests.tools.test_train_classifier import CNN, VARIANTS, VIT
from tests.tools.test_train_net import assert_same, tool
from tools.train_net import main as train_net

CLASSES = ClassMap((0, 1, 2), ("cat", "dog", "bird"))
OPTIONS = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
TRAINING_ONLY = [name for name in VARIANTS if name not in ("context_broadcasting", "cnn")]

run_tool: Callable[[Sequence[str]], int] = tool("convert_checkpoint").main


def convert(*arguments: object) -> int:
    return run_tool([str(argument) for argument in arguments])


def saved(config: Path, *settings: str, averaged: bool = True) -> Path:
    """Save a checkpoint in the middle of training whose averaged weights differ from the current ones."""
    torch.manual_seed(0)
    found = load_config(config, settings)
    states = []
    for _ in range(2):
        model = task_of(found).build_model(CLASSES.num_classes)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    checkpoint = Checkpoint(states[0], CLASSES.to_dict(), config_to_dict(found), states[1], training())
    path = config.parent / "ours.pt"
    (checkpoint if averaged else replace(checkpoint, ema=None)).save(path)
    return path


def plain_vit(weights: dict[str, Tensor], **settings: Any) -> nn.Module:
    """Build timm's model and load all its tensors from ``weights``."""
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=16, **OPTIONS, **settings)
    model.load_state_dict(weights)
    return model.eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", TRAINING_ONLY)
def test_a_classifier_without_plugins_is_one_of_timm(
    name: str, images: Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = saved(classifier_config(tmp_path), *VARIANTS[name]), tmp_path / "plain.pth"
    assert convert(source, target, "--strip-plugins") == 0
    whole, kept = load_checkpoint(source).weights, torch.load(target, weights_only=True)
    assert_same(kept, {key: value for key, value in whole.items() if not key.startswith("plugins.")})
    assert capsys.readouterr().out.startswith(f"{len(whole) - len(kept)} tensors of plug-ins left out")
    with torch.no_grad():
        expected = read_trained(source, ["classification"])[1](images)
        assert torch.equal(plain_vit(kept, num_classes=3)(images), expected)


@pytest.mark.parametrize("averaged", [False, True])
def test_the_averaged_weights_are_taken_where_there_are_some(averaged: bool, tmp_path: Path) -> None:
    config = classifier_config(tmp_path)
    config.write_text(config.read_text().replace(VIT, CNN))
    source = saved(config, *VARIANTS["batchformer"], averaged=averaged)
    assert convert(source, tmp_path / "plain.safetensors", "--strip-plugins") == 0
    checkpoint, kept = load_checkpoint(source), load_file(tmp_path / "plain.safetensors")
    weights = checkpoint.ema if averaged else checkpoint.model
    assert_same(kept, {key: value for key, value in (weights or {}).items() if not key.startswith("plugins.")})


def test_the_encoder_of_a_masked_autoencoder_is_one_of_timm(images: Tensor, tmp_path: Path) -> None:
    source = saved(masked_config(tmp_path), "batch_former.enabled=true")
    assert convert(source, tmp_path / "encoder.safetensors", "--encoder") == 0
    encoder = plain_vit(load_file(tmp_path / "encoder.safetensors"), num_classes=0)
    model: Any = task_of(load_config(tmp_path / "masked.yaml")).build_model(3)
    model.load_state_dict(load_checkpoint(source).weights, strict=False)
    with torch.no_grad():
        assert torch.equal(encoder(images), model.eval().encoder(images))


def test_what_was_written_is_trained_on(tmp_path: Path) -> None:
    """Linear probe of the encoder, and fine-tuning without the plug-ins."""
    encoder, plain = tmp_path / "encoder.pth", tmp_path / "plain.pth"
    assert convert(saved(masked_config(tmp_path)), encoder, "--encoder") == 0
    config = classifier_config(tmp_path)
    assert convert(saved(config, *VARIANTS["batchformer_v2"]), plain, "--strip-plugins") == 0
    for file, settings in ((encoder, ["model.linear_probe=true", "model.drop_path=0"]), (plain, [])):
        folder = tmp_path / file.stem
        settings += [f"init_from={file}", f"output_dir={folder}", "train.max_steps=1", "optimizer.lr=0"]
        assert train_net(["--config", str(config), *settings]) == 0
        trained, written = load_checkpoint(folder / "last.pt").model, torch.load(file, weights_only=True)
        assert torch.equal(trained["blocks.1.mlp.fc1.weight"], written["blocks.1.mlp.fc1.weight"])


def refusals() -> Iterator[tuple[str, tuple[str, ...], list[str], str]]:
    context, probe = VARIANTS["context_broadcasting"], ("model.linear_probe=true",)
    yield "classifier", context, ["--strip-plugins"], "which evaluation uses too: without it the outputs"
    yield "classifier", probe, ["--strip-plugins"], "its head has a batch norm"
    yield "classifier", (), [], "is a checkpoint of a classifier, expected one of a detector: use --strip-plugins"
    yield (
        "classifier",
        (),
        ["--to", "detr"],
        "is a checkpoint of a classifier, expected one of a detector: use --strip-pl",
    )
    yield "classifier", (), ["--strip-batchformer"], "of a classifier, expected one of a detector: use --strip-plugins"
    yield "classifier", (), ["--encoder"], "of a classifier, expected one of a masked autoencoder: use --strip-plugins"
    yield "masked", (), [], "of a masked autoencoder, expected one of a detector: use --encoder"
    yield "masked", (), ["--to", "hf_detr"], "of a masked autoencoder, expected one of a detector: use --encoder"
    yield "masked", (), ["--strip-batchformer"], "of a masked autoencoder, expected one of a detector: use --encoder"
    yield "masked", (), ["--strip-plugins"], "of a masked autoencoder, expected one of a classifier: use --encoder"
    yield "contrastive", (), ["--strip-plugins"], "of contrastive pre-training, expected one of a classifier: use --enc"


@pytest.mark.parametrize(("kind", "settings", "options", "said"), list(refusals()))
def test_what_cannot_be_written_so(
    kind: str,
    settings: tuple[str, ...],
    options: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = {"classifier": classifier_config, "masked": masked_config, "contrastive": contrastive_config}[kind]
    config = write(tmp_path)
    assert convert(saved(config, *settings), tmp_path / "out.pth", *options) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert said in printed.err
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("option", ["--strip-plugins", "--encoder"])
def test_bad_input_is_one_message(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = classifier_config(tmp_path) if option == "--strip-plugins" else masked_config(tmp_path)
    source = saved(config)
    torch.save({"weight": torch.ones(2)}, tmp_path / "foreign.pth")
    whole = load_checkpoint(source)
    replace(whole, ema={name: x for name, x in whole.weights.items() if "norm.weight" not in name}).save(
        tmp_path / "broken.pt"
    )
    for arguments, said in (
        ([source, source], "is the checkpoint that is read"),
        ([source, tmp_path / "out.onnx"], "must end in one of"),
        ([source, source / "out.pth"], "cannot be written"),
        ([tmp_path / "gone.pt", tmp_path / "out.pth"], "file not found"),
        ([tmp_path / "foreign.pth", tmp_path / "out.pth"], "is not a detr_bf checkpoint"),
        ([tmp_path / "broken.pt", tmp_path / "out.pth"], "missing in the file"),
    ):
        assert convert(*arguments, option) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        assert said in printed.err


def test_stripping_proves_that_evaluation_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(classifier_config(tmp_path), *VARIANTS["batchformer"], "plugins.batchformer.shared_classifier=false")
    forward = BatchFormer.forward
    monkeypatch.setattr(BatchFormer, "forward", lambda self, features: forward(self.train(), features))
    monkeypatch.setattr("detr_bf.plugins.batchformer.BatchFormerPlugin.before", always)
    assert convert(source, tmp_path / "out.pth", "--strip-plugins") == 2
    assert "evaluation changes without plug-ins, so nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "out.pth").exists()


def always(self: Any, reader: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Keep batch attention in evaluation as well."""
    return (self.batch_former(args[0]), *args[1:])
