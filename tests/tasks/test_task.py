"""``init_from``: rows of class heads are matched by class name, for every detector and for classifiers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.config import config_to_dict, load_config
from detr_bf.engine import Checkpoint
from detr_bf.tasks import Task, task_of
from tests.detectors.tiny import DETECTORS, settings_of, shaken

SMALL = (
    *("model.hidden_dim=32", "model.heads=2", "model.encoder_layers=2", "model.decoder_layers=2"),
    *("model.feedforward_dim=12", "model.num_queries=5", "model.backbone.name=resnet18"),
    *("model.backbone.weights=none", "batch_former.enabled=false"),
)
BEFORE = ClassMap((1, 2, 3), ("cat", "dog", "owl"))
SAME, AFTER = ClassMap((1, 2, 3), ("owl", "cat", "dog")), ClassMap((0, 5), ("owl", "elk"))
HEADS = "decoder.heads.classes."
TRUNK = ("model.name=resnet18", "data.transforms.size=32")


def saved(task: Task, classes: ClassMap, path: Path) -> dict[str, torch.Tensor]:
    """Save a model with random weights, and return these."""
    model = shaken(task.build_model(classes.num_classes))  # type: ignore[arg-type]
    Checkpoint(model.state_dict(), classes.to_dict(), config_to_dict(task.config)).save(path)
    return model.state_dict()


def initialized(task: Task, classes: ClassMap) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the model after ``init_from``, and its weights before."""
    torch.manual_seed(7)
    model = task.build_model(classes.num_classes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task.initialize(model, classes)
    return model, before


def detection(path: Path, *settings: str) -> Task:
    return task_of(load_config(None, [*SMALL, *settings, f"init_from={path}"], task="detection"))


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage")
@pytest.mark.parametrize("name", DETECTORS)
def test_every_tensor_with_a_row_for_each_class_is_matched_by_name(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = detection(tmp_path / "before.pt", *settings_of(name))
    weights = saved(task, BEFORE, tmp_path / "before.pt")
    heads = [key for key in weights if "class" in key.removeprefix("decoder.queries.class_embed") or "labels" in key]
    assert any(key.startswith(HEADS) for key in heads)
    any_object = "decoder.queries.embed.weight" in weights  # proposals whose class 0 is any object
    for classes, rows in ((SAME, [2, 0, 1]), (AFTER, [2, None])):
        with caplog.at_level(logging.INFO):
            model, fresh = initialized(task, classes)
        loaded = model.state_dict()
        for key, value in loaded.items():
            if key not in heads:
                assert torch.equal(value, weights[key]), key
                continue
            first = any_object and key.startswith("decoder.queries.")
            for row, old in enumerate([0, None, None][: classes.num_classes] if first else rows):
                assert torch.equal(value[row], fresh[key][row] if old is None else weights[key][old]), (key, row)
            assert torch.equal(value[classes.num_classes :], weights[key][3:]), f"{key}: no object, or no label"
    assert "3 of 3 classes by name, 0 new" in caplog.text
    assert "1 of 2 classes by name (owl), 1 new: elk" in caplog.text


def test_heads_of_another_classification_loss_are_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three classes and no object have as many rows as four classes of a focal loss."""
    saved(detection(tmp_path / "a.pt"), BEFORE, tmp_path / "a.pt")
    classes = ClassMap((1, 2, 3, 4), (*BEFORE.names, "elk"))
    with caplog.at_level(logging.INFO):
        model, fresh = initialized(detection(tmp_path / "a.pt", "loss.classification=focal"), classes)
    weight = f"{HEADS}0.weight"
    assert torch.equal(model.state_dict()[weight], fresh[weight])
    assert f"of another classification loss and not loaded: {weight}" in caplog.text


def test_weights_without_names_are_taken_in_order_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = detection(tmp_path / "bare.pth")
    model = shaken(task.build_model(3))  # type: ignore[arg-type]
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    found, _ = initialized(task, BEFORE)
    assert torch.equal(found.state_dict()[f"{HEADS}0.bias"], model.state_dict()[f"{HEADS}0.bias"])
    assert "bare.pth does not say its classes: its class heads are taken to be of the 3 of the data" in caplog.text
    caplog.clear()
    initialized(task, AFTER)
    assert "does not say" not in caplog.text, "heads of another size are new"


def test_a_frozen_detector_must_have_the_classes_of_the_data(tmp_path: Path) -> None:
    weights = saved(detection(tmp_path / "a.pt"), BEFORE, tmp_path / "a.pt")
    frozen = detection(tmp_path / "a.pt", "model.masks=true", "freeze.detector=true")
    model, _ = initialized(frozen, SAME)
    bias = f"{HEADS}0.bias"
    assert torch.equal(model.state_dict()[bias], weights[bias][[2, 0, 1, 3]])
    for classes in (AFTER, ClassMap((1, 2), ("cat", "dog"))):
        with pytest.raises(InputError, match=r"a\.pt is a detector of other classes .* \((cat|owl)") as said:
            initialized(frozen, classes)
        assert "freeze.detector=false" in str(said.value)


@pytest.mark.parametrize(
    "settings",
    [(), ("model.name=cifar_resnet8", "model.experts=2", "loss.name=ride", "data.mix.probability=0")],
    ids=str,
)
def test_classifiers_are_matched_by_name_too(settings: tuple[str, ...], tmp_path: Path) -> None:
    given = [*TRUNK, *settings, f"init_from={tmp_path / 'a.pt'}"]
    task = task_of(load_config(None, given, task="classification"))
    model = task.build_model(3)
    weights = model.state_dict()
    Checkpoint(weights, BEFORE.to_dict(), config_to_dict(task.config)).save(tmp_path / "a.pt")
    found, _ = initialized(task, SAME)
    loaded = found.state_dict()
    heads = [name for name, value in loaded.items() if len(value.shape) and len(value) == 3 and "conv" not in name]
    assert heads
    for name, value in loaded.items():
        assert torch.equal(value, weights[name][[2, 0, 1]] if name in heads else weights[name]), name
