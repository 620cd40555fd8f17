"""References on the command line: training, evaluation, resuming to the same bits, ranks, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from detr_bf.assembly import build_model
from detr_bf.commands import main
from detr_bf.config import load_config
from detr_bf.engine import load_checkpoint
from tests.tools.launch import Job
from tests.tools.test_train_net import assert_same, train_net

READERS = {
    "single_stream_inference": ("batch_former.references=true", "batch_former.mode=single_stream_inference"),
    "mini_batch_inference": ("batch_former.references=true", "batch_former.mode=mini_batch_inference"),
    "two_stream": ("batch_former.references=true",),
    "stack": ("batch_former.enabled=false", "model.backbone.reference=stack"),
    "difference": ("batch_former.enabled=false", "model.backbone.reference=difference"),
}


@pytest.fixture
def paired(tiny: Path, tmp_path: Path) -> Path:
    """Return the config of a tiny detector whose images have references, in folders beside them."""
    for name in ("train", "val"):
        folder = tmp_path / name / "references"
        folder.mkdir()
        for file in (tmp_path / name / "images").iterdir():
            with Image.open(file) as image:
                ImageOps.flip(image.convert("RGB")).save(folder / file.name)
    text = tiny.read_text()
    for name in ("train", "val"):
        images = tmp_path / name / "images"
        text = text.replace(f"images: {images},", f"images: {images}, references: {tmp_path / name / 'references'},")
    tiny.write_text(text.replace("data:\n", "data:\n  reference: own\n", 1))
    return tiny


@pytest.mark.default_tier("single_stream_inference", "stack")
@pytest.mark.parametrize("reader", READERS)
def test_trains_resumes_to_the_same_bits_and_evaluates(reader: str, paired: Path, tmp_path: Path) -> None:
    command = ["--config", str(paired), *READERS[reader], "eval.pictures=0"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train_net([*command, f"output_dir={whole}", "train.max_steps=6"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=2"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=6", "--resume"]) == 0
    straight, resumed = load_checkpoint(whole / "last.pt"), load_checkpoint(parted / "last.pt")
    assert_same(resumed.model, straight.model)
    assert_same(resumed.weights, straight.weights)
    trained = (whole / "results.json").read_text()
    evaluation = [*command, f"init_from={whole / 'last.pt'}", "--eval-only"]
    assert train_net([*evaluation, f"output_dir={tmp_path / 'same'}"]) == 0
    assert (tmp_path / "same" / "results.json").read_text() == trained
    first, again = (json.loads((each / "evaluation.json").read_text()) for each in (whole, tmp_path / "same"))
    assert first["losses"]
    assert again["losses"] == first["losses"]
    for file in (tmp_path / "val" / "references").iterdir():
        with Image.open(file) as image:
            ImageOps.invert(image.convert("RGB")).save(file)
    assert train_net([*evaluation, f"output_dir={tmp_path / 'changed'}"]) == 0
    is_read = reader != "two_stream"
    assert ((tmp_path / "changed" / "results.json").read_text() != trained) == is_read


@pytest.mark.full
def test_two_ranks_train_as_one_process(paired: Path, tmp_path: Path) -> None:
    settings = (*READERS["single_stream_inference"], "batch_former.dropout=0", "model.dropout=0", "eval.pictures=0")
    fixed = (*settings, "model.backbone.frozen_norm=true", "train.max_steps=2", "data.transforms.random_crop=0")
    losses, weights = {}, {}
    for processes, size in ((1, 4), (2, 2)):
        job = Job(paired, tmp_path / str(processes), (*fixed, f"train.batch_size={size}"), processes=processes)
        assert job.run().code == 0
        lines = (tmp_path / str(processes) / "metrics.jsonl").read_text().splitlines()
        losses[processes] = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
        weights[processes] = load_checkpoint(tmp_path / str(processes) / "last.pt").model
    assert len(losses[1]) == 3, "two steps and the validation"
    assert losses[2] == pytest.approx(losses[1], rel=1e-3)
    torch.testing.assert_close(weights[2], weights[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", ["random", "same_group"])
def test_images_of_the_split_as_references(choice: str, paired: Path, tmp_path: Path) -> None:
    annotations = tmp_path / "train" / "annotations.json"
    for name in ("train", "val"):
        annotations = tmp_path / name / "annotations.json"
        content = json.loads(annotations.read_text())
        for number, entry in enumerate(content["images"]):
            entry["group"] = f"camera {number % 2}"
        annotations.write_text(json.dumps(content))
    command = ["--config", str(paired), *READERS["single_stream_inference"], f"data.reference={choice}"]
    run = tmp_path / "run"
    assert train_net([*command, "train.max_steps=2", "eval.pictures=0", "data.sampler=group"]) == 0
    again = [*command, "--eval-only", "eval.pictures=0", f"init_from={run / 'last.pt'}"]
    assert train_net([*again, f"output_dir={tmp_path / 'eval'}"]) == 0
    assert (tmp_path / "eval" / "results.json").read_text() == (run / "results.json").read_text()


@pytest.mark.parametrize(("count", "full"), [(3, 3), (2, 2), (4, 0)])
def test_a_group_fills_each_batch(
    count: int,
    full: int,
    paired: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """15 images in groups of 5, of 7 and 8, and of 3 and 4, in batches of 5."""
    from detr_bf.detectors import Detector

    annotations = tmp_path / "train" / "annotations.json"
    content = json.loads(annotations.read_text())
    groups = {}
    for number, entry in enumerate(content["images"]):
        entry["group"] = groups[entry["id"]] = number % count
    annotations.write_text(json.dumps(content))
    seen: list[set[int]] = []
    forward = Detector.forward

    def noted(self: Detector, batch):  # type: ignore[no-untyped-def]
        if self.training:
            seen.append({groups[target.image_id] for target in batch.targets})
        return forward(self, batch)

    monkeypatch.setattr(Detector, "forward", noted)
    command = ["--config", str(paired), "data.reference=none", "data.sampler=group", "train.batch_size=5"]
    assert train_net([*command, "train.epochs=1", "eval.pictures=0"]) == 0
    assert len(seen) == 3
    assert sum(len(found) == 1 for found in seen) == full
    said = capsys.readouterr().err
    assert ("data.sampler=group" in said) == (full < 3)
    assert full == 3 or f"{full} of 3 batches of an epoch hold 5 images of one group" in said


def test_missing_references_are_counted(paired: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train/references/0003.png", "val/references/0101.png", "val/references/0102.png"):
        (tmp_path / name).unlink()
    command = ["--config", str(paired), *READERS["single_stream_inference"], "eval.pictures=0"]
    assert train_net([*command, "train.max_steps=2"]) == 0
    said = capsys.readouterr().err
    assert "data.train: 1 of 15 images have no reference" in said
    assert "data.val: 2 of 4 images have no reference" in said


def test_the_bits_of_references_count(paired: Path, tmp_path: Path) -> None:
    for file in (tmp_path / "train" / "references").iterdir():
        Image.fromarray(np.full((48, 64), 3000, np.uint16)).save(file)
    assert train_net(["--config", str(paired), *READERS["stack"], "train.max_steps=1", "eval.pictures=0"]) == 0
    assert load_checkpoint(tmp_path / "run" / "last.pt").config["data"]["grey_bits"] == 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("data.reference=own",), "nothing reads the references of data.reference=own"),
        (("data.reference=none", *READERS["two_stream"]), "batch_former.references=true reads a reference"),
        (("model.backbone.reference=stack", *READERS["two_stream"]), "both read the reference of an image"),
        ((*READERS["two_stream"], "data.mixup.prob=0.5"), "mixup.prob puts objects of other images"),
        ((*READERS["two_stream"], "batch_former.gather=true"), "batch_former.references chooses among"),
        (("data.reference=none", "data.reference_shift=4"), "data.reference_shift=4 moves references"),
        ((*READERS["two_stream"], "data.sampler=group"), "all images are in one"),
        ((*READERS["two_stream"], "data.reference=same_group"), "all images are in one"),
        ((*READERS["two_stream"], "data.train.references=nowhere"), "folder of references nowhere does not exist"),
        (
            ("batch_former.enabled=false", "model.backbone.reference=stack", "model.backbone.frozen_stages=1"),
            "set frozen_stages=0",
        ),
    ],
)
def test_what_is_refused(
    settings: tuple[str, ...], message: str, paired: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_net(["--config", str(paired), *settings]) == 2
    assert message in capsys.readouterr().err
    assert main(["check", str(paired), *settings]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("settings", [("data.sampler=group",), ("data.reference=same_group",)])
def test_a_group_that_is_no_name_is_refused(
    settings: tuple[str, ...], paired: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "val"):
        annotations = tmp_path / name / "annotations.json"
        content = json.loads(annotations.read_text())
        content["images"][0]["group"], content["images"][1]["group"] = 1.5, 2
        annotations.write_text(json.dumps(content))
    for command in ("check", "train"):
        assert main([command, str(paired), *READERS["two_stream"], *settings]) == 2
        assert "image 1: group is 1.5, expected text or a whole number" in capsys.readouterr().err


def test_batch_attention_between_references_has_the_weights_of_batch_attention(paired: Path) -> None:
    models = [
        build_model(load_config(paired, [*settings, "seed=1"]), 3, pretrained=False)
        for settings in (READERS["two_stream"], ("data.reference=none",))
    ]
    assert models[0].state_dict().keys() == models[1].state_dict().keys()


def test_weights_without_a_reference_do_not_fit_a_stacked_backbone(
    paired: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    assert train_net(["--config", str(paired), "data.reference=none", "train.max_steps=1", "eval.pictures=0"]) == 0
    command = ["--config", str(paired), *READERS["stack"], f"init_from={run / 'last.pt'}", f"output_dir={other}"]
    assert train_net([*command, "train.max_steps=1"]) == 0
    assert "freshly initialised (1): backbone.body.conv1.weight" in capsys.readouterr().err
