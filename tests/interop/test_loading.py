"""Loading of weights: every reader finds a changed bit, and NaN is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import detr_bf
from detr_bf.assembly import build_model, read_initial_weights
from detr_bf.backbones.weights import load_network_weights as load_backbone
from detr_bf.backbones.weights import read_network_file
from detr_bf.classification.config import ClassifierConfig, ClassifierModelConfig
from detr_bf.classification.network import read_network_weights
from detr_bf.classification.task import initial_weights
from detr_bf.commands.convert import convert, deploy
from detr_bf.common.errors import InputError, TrainingError
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.common.weights import read_content
from detr_bf.config import DetectionConfig, config_to_dict, load_config
from detr_bf.detectors import Detector
from detr_bf.engine import Checkpoint, RunFolder, is_checkpoint, load_checkpoint
from detr_bf.engine.recovery import load_capture
from detr_bf.engine.state import Progress, TrainingState
from detr_bf.tasks import read_trained
from tests.checkpoints import training

CLASSES = ClassMap((3, 7), ("cat", "dog"))
SETTINGS = [
    "batch_former.enabled=true",
    *("model.hidden_dim=32", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=1"),
    *("model.feedforward_dim=32", "model.num_queries=6", "model.backbone.name=resnet18"),
    *("model.backbone.weights=none", "device=cpu", "batch_former.heads=2"),
]
NORM = "decoder.norm.weight"


@pytest.fixture(scope="module")
def config() -> DetectionConfig:
    return load_config(None, SETTINGS)


@pytest.fixture(scope="module")
def model(config: DetectionConfig) -> Detector:
    return build_model(config, CLASSES.num_classes)


@pytest.fixture
def checkpoint(model: Detector, config: DetectionConfig) -> Checkpoint:
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Checkpoint(weights, CLASSES.to_dict(), config_to_dict(config), training=training())


def _convert(path: Path) -> object:
    return convert(path, path.with_name("converted.pt"))


def _strip(path: Path) -> object:
    return deploy(path, path.with_name("stripped.pt"), "detection")


def _trained(path: Path) -> object:
    return read_trained(path, ["classification"])


def _load_capture(path: Path) -> object:
    return load_capture(path, lambda config: Batch)


READERS: list[Callable[[Path], object]] = [
    *(load_checkpoint, is_checkpoint, _load_capture, read_content, read_initial_weights, read_network_weights),
    *(initial_weights, read_network_file, _trained, detr_bf.load, detr_bf.load_classifier, _convert, _strip),
]


@pytest.mark.parametrize("read", READERS, ids=lambda read: f"{read.__module__}.{read.__qualname__}")
def test_every_reader_finds_a_changed_bit(
    tmp_path: Path, checkpoint: Checkpoint, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "a.pt"
    checkpoint.save(path)
    content = bytearray(path.read_bytes())
    content[content.index(checkpoint.model[NORM].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # torch itself does not check
    with pytest.raises(InputError, match=r"a\.pt is damaged: its part .* is not what was written"):
        read(path)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize("load", [detr_bf.load, _convert, _strip])
def test_what_uses_weights_refuses_those_that_are_not_finite(
    tmp_path: Path, checkpoint: Checkpoint, load: Callable[[Path], object], value: float
) -> None:
    checkpoint.model[NORM][1] = value
    checkpoint.save(tmp_path / "a.pt")
    with pytest.raises(InputError, match=rf"a\.pt holds NaN or infinite weights, .* in {NORM}"):
        load(tmp_path / "a.pt")


def test_a_backbone_refuses_weights_that_are_not_finite() -> None:
    network = nn.ModuleDict({"conv": nn.Conv2d(3, 2, 1), "fc": nn.Linear(2, 2)})
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    weights["fc.bias"][0] = torch.nan
    load_backbone(network, weights, classifier=("fc",), source="a.pth")  # the entry that is left out
    weights["conv.bias"][0] = torch.nan
    with pytest.raises(InputError, match=r"weights=a\.pth holds NaN or infinite weights, .* in conv\.bias"):
        load_backbone(network, weights, classifier=("fc",), source="a.pth")


def test_a_backbone_refuses_weights_that_are_not_floating_point() -> None:
    network = nn.ModuleDict({"conv": nn.Conv2d(3, 2, 1), "fc": nn.Linear(2, 2)})
    weights = {name: value.long() for name, value in network.state_dict().items()}
    with pytest.raises(InputError, match=r"weights=a\.pth: expected floating-point weights, got conv\.weight"):
        load_backbone(network, weights, classifier=("fc",), source="a.pth")


@pytest.mark.parametrize("load", [detr_bf.load, _strip])
@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        ("model", {"name": "../../etc/passwd"}, "model.name must be one of"),
        ("model", {"heads": 3}, "model.heads=3 must divide"),
    ],
)
def test_settings_of_a_file_that_make_no_model_name_the_file(
    tmp_path: Path,
    checkpoint: Checkpoint,
    load: Callable[[Path], object],
    group: str,
    settings: dict[str, Any],
    message: str,
) -> None:
    config = checkpoint.config | {group: checkpoint.config[group] | settings}
    replace(checkpoint, config=config).save(tmp_path / "a.pt")
    with pytest.raises(InputError, match=rf"^the config in .*a\.pt: {message}"):
        load(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "load", [detr_bf.load_classifier, lambda path: deploy(path, path.with_name("b.pt"), "classification")]
)
def test_settings_of_a_file_that_make_no_classifier_name_the_file(
    tmp_path: Path, load: Callable[[Path], object]
) -> None:
    settings = ClassifierConfig(model=ClassifierModelConfig(name="toaster"), device="cpu")
    Checkpoint({"a": torch.ones(1)}, CLASSES.to_dict(), config_to_dict(settings)).save(tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"^the config in .*a\.pt: model\.name"):
        load(tmp_path / "a.pt")


def state_of(folder: Path, model: nn.Module) -> TrainingState:
    optimizer = torch.optim.AdamW([next(model.parameters())], fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = TrainingState(
        model, None, optimizer, scaler, folder=RunFolder(folder), class_map=CLASSES, config={}, data={}
    )
    state.progress = Progress(step=3)
    return state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"weight": torch.full((2, 2), torch.nan), "bias": torch.zeros(2)}}, r"NaN .* in weight"),
        ({"training": None}, "holds only weights"),
        ({"training": training() | {"progress": {"step": 1, "evaluated_step": 0, "unknown": 3}}}, "another version"),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    network = nn.Linear(2, 2)
    state = training(parameter=network.weight)
    sound = Checkpoint(network.state_dict(), CLASSES.to_dict(), {}, training=state)
    if changes.get("training"):
        changes = {"training": state | {"progress": changes["training"]["progress"]}}
    with pytest.raises(InputError, match=message):
        state_of(tmp_path, network).restore(replace(sound, **changes), seed=0)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_failing_write_says_whether_there_is_an_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    if earlier:
        (tmp_path / "last.pt").touch()

    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    message = (
        "The checkpoint of an earlier step is there: .*--resume" if earlier else "No checkpoint was written .*again"
    )
    with pytest.raises(TrainingError, match=rf"step 3 cannot be written to .*No space.*{message}"):
        state_of(tmp_path, nn.Linear(2, 2)).save()


def test_a_checkpoint_of_another_or_of_no_task_is_not_deployed(tmp_path: Path, checkpoint: Checkpoint) -> None:
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    replace(checkpoint, config=checkpoint.config | {"task": ["detection"]}).save(source)
    with pytest.raises(InputError, match="task must be one of"):
        deploy(source, target, "detection")
    replace(checkpoint, config={key: x for key, x in checkpoint.config.items() if key != "task"}).save(source)
    with pytest.raises(InputError, match="a checkpoint of a detector, expected one of a classifier: use --strip-batch"):
        deploy(source, target, "classification")
    assert not target.exists()
