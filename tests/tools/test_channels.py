"""Images of five channels of 16 bits through the commands, made of real photographs with their boxes."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import onnx
import pytest
import tifffile
import torch
from PIL import Image

import detr_bf
from detr_bf.commands import main
from detr_bf.common.errors import InputError
from detr_bf.engine import load_checkpoint
from tests.tools.conftest import TINY
from tests.tools.test_train_net import assert_same

BCCD = Path(__file__).parents[3] / "shared/data/bccd"
NAMES = ("RBC", "WBC", "Platelets")
SETTINGS = ("batch_former.enabled=false", "train.epochs=1", "train.max_steps=2", "train.batch_size=2", "device=cpu")


def channels_of(photograph: np.ndarray) -> np.ndarray:
    """Return red, green and blue as values of 12 bits, the negative of green, and noise: (H, W, 5) uint16."""
    deep = photograph.astype(np.uint16) << 4
    noise = np.random.default_rng(0).integers(0, 4096, deep.shape[:2], dtype=np.uint16)
    return np.dstack([deep, 4095 - deep[..., 1], noise])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write six photographs of blood cells, 160 x 120 pixels, as a YOLO data set, and the config of a tiny detector."""
    if not BCCD.is_dir():
        pytest.skip(f"there is no {BCCD}")
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    root = tmp_path / "cells"
    for number, file in enumerate(sorted((BCCD / "JPEGImages").glob("*.jpg"))[:6]):
        split = "train" if number < 4 else "val"
        for part in ("images", "labels"):
            (root / part / split).mkdir(parents=True, exist_ok=True)
        with Image.open(file) as image:
            values = channels_of(np.asarray(image.convert("RGB").resize((160, 120))))
        tifffile.imwrite(root / "images" / split / f"{file.stem}.tif", values, planarconfig="contig")
        lines = []
        for found in ElementTree.parse(BCCD / "Annotations" / f"{file.stem}.xml").getroot().iter("object"):
            x0, y0, x1, y1 = (int(found.findtext(f"bndbox/{key}")) for key in ("xmin", "ymin", "xmax", "ymax"))
            box = (x0 + x1) / 1280, (y0 + y1) / 960, (x1 - x0) / 640, (y1 - y0) / 480
            lines.append(" ".join(map(str, (NAMES.index(found.findtext("name")), *box))))
        (root / "labels" / split / f"{file.stem}.txt").write_text("\n".join(lines))
    (root / "data.yaml").write_text(f"names: [{', '.join(NAMES)}]\ntrain: images/train\nval: images/val\n")
    (tmp_path / "tiny.yaml").write_text(TINY)
    return root


def trained(folder: Path, name: str, *settings: str) -> Path:
    run = folder.parent / name
    model = ["--model", str(folder.parent / "tiny.yaml"), "--augment", "strong"]
    assert main(["finetune", str(folder), "--output", str(run), *model, *SETTINGS, *settings]) == 0
    return run


@pytest.mark.full
def test_five_channels_through_the_commands(folder: Path) -> None:
    run = trained(folder, "run")
    stored = load_checkpoint(run / "last.pt")
    data = stored.config["data"]
    assert (data["channels"], data["depth"]) == (5, 16)
    assert stored.model["backbone.body.conv1.weight"].shape[1] == 5
    files = sorted((folder / "images").glob("*/*.tif"))
    whole = np.stack([tifffile.imread(file) for file in files[:4]]).reshape(-1, 5) / 65535
    np.testing.assert_allclose(data["mean"], whole.mean(0), rtol=1e-4)
    np.testing.assert_allclose(data["std"], whole.std(0), rtol=1e-4)
    results = (run / "results.json").read_text()
    assert main(["evaluate", str(run)]) == 0
    assert (run / "eval-best" / "results.json").read_text() == results

    found = folder.parent / "found"
    assert main(["predict", str(run), str(files[4].parent), "--threshold", "0", "--output", str(found)]) == 0
    assert len(list(found.glob("*.png"))) == 2
    predicted = json.loads((found / "predictions.json").read_text())
    exported = folder.parent / "it.onnx"
    assert main(["export", str(run), "--output", str(exported)]) == 0
    [images, *_] = onnx.load(str(exported)).graph.input
    assert images.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert images.type.tensor_type.shape.dim[1].dim_value == 5
    loaded, original = detr_bf.load(exported), detr_bf.load(run)
    assert (loaded.backend.model.metadata["channels"], loaded.backend.model.metadata["depth"]) == (5, 16)
    for file, each in zip(files[4:], predicted, strict=True):
        scores = [one["score"] for one in each["objects"]]
        for predictor in (original, loaded):
            for given in (file, tifffile.imread(file)):
                found_scores = predictor(given, 0.0).scores.tolist()
                np.testing.assert_allclose(found_scores, scores, atol=1e-5)
    changed = tifffile.imread(files[4])
    changed[..., 4] += 1  # of 65535: a bit that 8 bits would lose
    assert original(changed, 0.0).scores.tolist() != original(files[4], 0.0).scores.tolist()
    with pytest.raises(InputError, match="frames of videos are RGB images of 8 bits"):
        next(original.predict_video("it.mp4"))
    with pytest.raises(InputError, match="detectors of transformers get RGB images of 8 bits"):
        original.to_huggingface(folder.parent / "hf")


@pytest.mark.full
def test_resumes_to_the_same_bits_and_starts_from_rgb(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, parted = trained(folder, "whole"), trained(folder, "parted", "train.max_steps=1")
    again = ["data.mean=[]", "data.std=[]", "train.max_steps=2", "--resume"]
    assert main(["train", str(parted / "config.yaml"), *again]) == 0
    straight, resumed = load_checkpoint(whole / "last.pt"), load_checkpoint(parted / "last.pt")
    assert_same(resumed.model, straight.model)
    assert resumed.config["data"]["mean"] == straight.config["data"]["mean"]
    assert main(["train", str(parted / "config.yaml"), "data.mean=[]", "data.std=[]", "data.depth=8", "--resume"]) == 2
    assert "the run was started with data.depth=16" in capsys.readouterr().err

    fewer = folder.parent / "fewer"
    shutil.copytree(folder, fewer)
    for file in (fewer / "images/train").glob("*.tif"):
        tifffile.imwrite(file, tifffile.imread(file) // 2, planarconfig="contig")
    started = load_checkpoint(trained(fewer, "from_five", f"init_from={whole}", "train.max_steps=1") / "last.pt")
    assert started.config["data"]["mean"] == straight.config["data"]["mean"]
    assert started.config["data"]["std"] == straight.config["data"]["std"]

    photographs = folder.parent / "photographs"
    shutil.copytree(folder, photographs)
    for file in photographs.glob("images/*/*.tif"):
        Image.fromarray((tifffile.imread(file)[..., :3] >> 4).astype(np.uint8)).save(file.with_suffix(".png"))
        file.unlink()
    rgb = trained(photographs, "rgb")
    before = load_checkpoint(rgb / "best.pt").weights["backbone.body.conv1.weight"]
    assert before.shape[1] == 3
    from_rgb = trained(folder, "from_rgb", f"init_from={rgb}", "optimizer.lr=0", "optimizer.backbone_lr=0")
    weight = load_checkpoint(from_rgb / "last.pt").model["backbone.body.conv1.weight"]
    torch.testing.assert_close(weight[:, :3], before * 3 / 5)
    torch.testing.assert_close(weight[:, 3:], (before.mean(1, keepdim=True) * 3 / 5).expand(-1, 2, -1, -1))


@pytest.mark.full
def test_references_have_the_channels_of_the_images(folder: Path) -> None:
    for split in ("train", "val"):
        (folder.parent / f"templates_{split}" / "images" / split).mkdir(parents=True)
        for file in (folder / "images" / split).iterdir():
            target = folder.parent / f"templates_{split}" / "images" / split / file.name
            tifffile.imwrite(target, tifffile.imread(file)[::-1], planarconfig="contig")
    folders = [f"data.{split}.references={folder.parent / f'templates_{split}'}" for split in ("train", "val")]
    splits = ["data.train.split=train", "data.val.split=val", *folders, "data.mixup.prob=0"]
    run = trained(folder, "run", *splits, "data.reference=own", "model.backbone.reference=stack")
    assert load_checkpoint(run / "last.pt").model["backbone.body.conv1.weight"].shape[1] == 10
    exported = folder.parent / "it.onnx"
    assert main(["export", str(run), "--output", str(exported)]) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("data.channels=5", "data.mean=[0.5]", "data.std=[0.5]"), "data.mean=[0.5]: expected one value for each"),
        (("data.channels=1", "data.mean=[0.5]"), "data.std=[]: expected one value for each"),
        (("data.channels=1", "data.mean=[128]", "data.std=[1]"), "expected values from 0 to 1"),
        (("data.channels=1", "data.mean=[0.5]", "data.std=[0]"), "and no deviation of 0"),
        (("data.depth=12",), "data.depth must be 8 or 16, got 12"),
        (("data.channels=4", "data.transforms.extra=[photometric_distort]"), "changes the colours of RGB images"),
        (("data.channels=4", "model.backbone.frozen_stages=1"), "set model.backbone.frozen_stages=0"),
        (("data.channels=4",), "0001.png: it has 3 channels, expected 4"),
        (("data.depth=16",), "0001.png: it has 8 bits a channel, expected 16"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: tuple[str, ...], message: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tiny), *settings]) == 2
    assert message in capsys.readouterr().err
