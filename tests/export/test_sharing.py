"""Folders of trained detectors: saved, loaded, and what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import detr_bf
from detr_bf.assembly import build_model
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.config import config_to_dict, load_config
from detr_bf.engine import Checkpoint
from tests.checkpoints import training

IMAGE = torch.randint(256, (3, 50, 70), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
SETTINGS = [
    "batch_former.enabled=true",
    *("model.hidden_dim=32", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=2"),
    *("model.feedforward_dim=32", "model.num_queries=6", "model.backbone.name=resnet18", "device=cpu"),
    *("model.backbone.weights=none", "data.transforms.eval_short_side=64", "data.transforms.max_size=96"),
    *(
        "data.train.images=/home/alice/secret",
        "data.train.annotations=/home/alice/a.json",
        "output_dir=/home/alice/run",
    ),
    *("data.val.images=/home/alice/secret", "data.val.annotations=/home/alice/b.json", "init_from=/home/alice/w.pt"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the folder of a run with a detector of two classes, its metrics and statistics."""
    torch.manual_seed(0)
    config, folder = load_config(None, SETTINGS), tmp_path_factory.mktemp("runs") / "cells"
    folder.mkdir()
    state = training()
    step = state["progress"]["step"]
    Checkpoint(
        build_model(config, 2).state_dict(),
        ClassMap((7, 3), ("cat", "a: b\n# c")).to_dict(),
        config_to_dict(config),
        training=state,
        thresholds={"overall": 0.25, "by_class": [0.2, 0.3]},
    ).save(folder / "best.pt")
    records = [{"kind": "val", "step": other, "AP": other / 10, "AP50": 0.75} for other in (step - 1, step, step + 1)]
    records[1]["score/raw"] = 0.5  # of weights that may not be those of the file
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*records, {"kind": "train", "step": step}])))
    (folder / "data_statistics.json").write_text(json.dumps({"splits": {"train": {"images": 205, "objects": 2764}}}))
    return folder


def test_a_saved_detector_gives_the_same_bits(run: Path, tmp_path: Path) -> None:
    original = detr_bf.load(run, "cpu")
    original.save(tmp_path / "mine", license="mit")
    found, expected = detr_bf.load(tmp_path / "mine", "cpu")(IMAGE), original(IMAGE)
    for name in ("boxes", "scores", "labels"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    loaded = detr_bf.load(str(tmp_path / "mine"), "cpu")
    assert loaded.thresholds == original.thresholds
    assert loaded.class_map == original.class_map
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "mine/model.safetensors").read_bytes()
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"model.safetensors", "config.json", "README.md"}


def test_no_path_leaves_the_machine(run: Path, tmp_path: Path) -> None:
    detr_bf.load(run, "cpu").save(tmp_path / "mine")
    for path in (tmp_path / "mine").iterdir():
        content = path.read_bytes()
        assert b"alice" not in content, path.name
        assert str(run).encode() not in content, path.name


def test_the_model_card_says_what_the_run_knows(run: Path, tmp_path: Path) -> None:
    predictor = detr_bf.load(run, "cpu")
    predictor.save(tmp_path / "mine", license="apache-2.0", name="Cells\n# b")
    card = (tmp_path / "mine" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "apache-2.0"
    step = training()["progress"]["step"]
    assert f"| AP | {step / 10:.3f} |" in text, "of the step of the checkpoint"
    assert "Scores from 0.25 have the highest F1" in text
    assert "| train | 205 | 2764 |" in text
    assert "**Classes (2):** cat, a: b" in text
    assert text.count("\n# ") == 1
    content = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert content["metrics"] == {"AP": step / 10, "AP50": 0.75}
    detr_bf.load(tmp_path / "mine", "cpu").save(tmp_path / "bare")
    bare = (tmp_path / "bare" / "README.md").read_text()
    assert "Not evaluated at this checkpoint." in bare
    assert "No licence was given" in bare


def test_files_of_others_are_not_replaced(run: Path, tmp_path: Path) -> None:
    predictor = detr_bf.load(run, "cpu")
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(InputError, match=r"README\.md exists: give a new folder"):
        predictor.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-100] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def edited(**changes: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> object:
        content = json.loads((folder / "config.json").read_text())
        return (folder / "config.json").write_text(json.dumps(content | changes))

    return edit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip, "is not the file that was saved"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "written by another program"),
        (edited(format="other"), "written by another program"),
        (edited(classes={"names": 3}), "lacks a part or has a wrong one"),
        (edited(weights=None), "is not the file that was saved"),
        (edited(weights=[1]), "is not the file that was saved"),
        (edited(thresholds=[1]), "lacks a part or has a wrong one"),
        (edited(thresholds={"overall": 0.5, "by_class": [0.5]}), "1 thresholds for 2 classes"),
        (edited(config={"model": {"nane": 3}}), "nane"),
        (lambda folder: (folder / "model.safetensors").unlink(), "mine"),
    ],
)
def test_a_damaged_folder_is_refused(run: Path, tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    detr_bf.load(run, "cpu").save(tmp_path / "mine")
    change(tmp_path / "mine")
    with pytest.raises(InputError, match=message):
        detr_bf.load(tmp_path / "mine", "cpu")
