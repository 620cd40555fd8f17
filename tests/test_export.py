"""ONNX files: the outputs of onnxruntime are those of torch, for every detector; metadata, loading, the command."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
import torch
from PIL import Image
from torch import nn

import detr_bf
from detr_bf import export
from detr_bf.assembly.data import build_eval_transform
from detr_bf.assembly.model import build_panoptic_postprocess, build_postprocess
from detr_bf.config import config_to_dict, load_config
from detr_bf.data.images import MAX_PIXELS
from detr_bf.detectors import MaskHead
from detr_bf.errors import InputError
from detr_bf.evaluation import ScoreThresholds
from detr_bf.export import GivenSelections, ParityError, parity, parity_table, synthetic_images
from detr_bf.predictor import Predictor
from detr_bf.sharing import Origin
from detr_bf.structures import Batch, ClassMap
from tests.detectors.tiny import CHANNELS, DETECTORS, DIM, FOCAL, QUERIES, batch_former, model, shaken
from tests.docs.test_pages import ROOT

command: ModuleType = importlib.import_module("detr_bf.commands.export")
CLASSES = ClassMap((7, 3, 9), ("cat", "dog", "猫"))
FAST = (
    "detr",
    "conditional_detr",
    "dab_detr",
    "smca",
    "deformable_detr_two_stage",
    "dino",
    "rtdetr",
)  # an export takes seconds; the others are slow tests
SMALL = ("data.transforms.eval_short_side=64", "data.transforms.max_size=96", "eval.max_detections=7")
KINDS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in DETECTORS]
THRESHOLDS = ScoreThresholds(0.25, (0.2, 0.3, 0.4))


def predictor(name: str = "detr", *settings: str, max_pixels: int = MAX_PIXELS, **changes: Any) -> Predictor:
    """Return a tiny detector with random weights; classes of sigmoid detectors have a logit that is never used."""
    loss = FOCAL[0] if FOCAL[0] in DETECTORS[name].settings else "loss.classification=cross_entropy"
    config = load_config(None, [*SMALL, loss, "data.val.images=/home/alice/secret", *settings])
    classes = CLASSES if "cross" in loss else ClassMap((*CLASSES.category_ids, 11), (*CLASSES.names, "last"))
    by_class = (*THRESHOLDS.by_class, 0.5)[: classes.num_classes]
    return Predictor(
        model=shaken(model(name, encoder_layers=1, **changes)).eval(),
        class_map=classes,
        transform=build_eval_transform(config),
        postprocess=build_postprocess(config),
        panoptic_postprocess=build_panoptic_postprocess(config, classes),
        device=torch.device("cpu"),
        max_pixels=max_pixels,
        thresholds=ScoreThresholds(THRESHOLDS.overall, by_class),
        origin=Origin(config_to_dict(config), Path("run"), None),
    )


def same(found: Any, expected: Any) -> None:
    assert found.labels.tolist() == expected.labels.tolist()
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.boxes, expected.boxes, atol=1e-2, rtol=0)
    assert (found.masks is None) == (expected.masks is None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module")
def detr(folder: Path) -> tuple[Predictor, Path]:
    """Export DETR with inputs of any number and size."""
    original = predictor()
    original.export(folder / "detr.onnx", license="mit")
    return original, folder / "detr.onnx"


@pytest.mark.parametrize("name", KINDS)
def test_every_detector_gives_the_same(name: str, tmp_path: Path) -> None:
    original = predictor(name)
    compared = original.export(tmp_path / "it.onnx")
    assert [each.images for each in compared] == [1, 1, 1, 3]
    assert len({each.size for each in compared}) >= 3
    assert [each.padded for each in compared] == [False, False, False, True]
    for each in compared:
        assert {"logits", "boxes"} <= set(each.differences)
        assert max(each.differences.values()) < 2e-5, parity_table(compared)
    loaded = detr_bf.load(tmp_path / "it.onnx")
    for image in synthetic_images():
        same(loaded(image, threshold=0.0), original(image, threshold=0.0))
        assert len(loaded(image, threshold=1.0)) == len(original(image, threshold=1.0)) == 0
    for found, expected in zip(
        loaded(synthetic_images(), 0.0, batch_size=3), original(synthetic_images(), 0.0, batch_size=3), strict=True
    ):
        same(found, expected)


def test_a_fixed_form_with_detections(tmp_path: Path) -> None:
    original = predictor("smca")
    compared = original.export(tmp_path / "it.onnx", batch=2, size=(64, 96), postprocess=True)
    assert [(each.images, each.size) for each in compared] == [(2, (64, 96))]
    assert set(compared[0].differences) == {"scores", "labels", "boxes", "selection"}
    loaded, images = detr_bf.load(tmp_path / "it.onnx"), synthetic_images()
    found = loaded(images, threshold=0.0, batch_size=2)
    assert [len(each) for each in found] == [QUERIES] * 3
    wide = torch.randint(256, (3, 64, 96), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    same(loaded(wide, threshold=0.0), original(wide, threshold=0.0))  # fits without padding
    for one, other in zip(loaded.predict(images, batch_size=3, threshold=0.0), found, strict=True):
        same(one, other)  # more images than the file takes are computed in parts
    with pytest.raises(InputError, match="has no logits"):
        loaded.model(Batch.collate([loaded._sample(image, 0) for image in images[:2]]))


def test_the_metadata_say_what_a_user_needs(detr: tuple[Predictor, Path]) -> None:
    proto = onnx.load(str(detr[1]))
    values = {each.key: each.value for each in proto.metadata_props}
    assert values.pop("format") == export.ONNX_FORMAT
    found = {name: json.loads(value) for name, value in values.items()}
    assert found["classes"] == ["cat", "dog", "猫"]
    assert found["category_ids"] == [7, 3, 9]
    assert (found["threshold"], found["thresholds"]) == (0.25, [0.2, 0.3, 0.4])
    assert (found["scores"], found["license"], found["max_detections"]) == ("softmax", "mit", 7)
    assert found["resize"] == {"rule": "shorter_side", "side": 64, "longest": 96}
    assert found["form"] == {"batch": None, "size": None, "postprocess": False}
    assert {"detr_bf", "torch", "onnxruntime"} <= set(found["versions"])
    assert found["parity"]["images"] == "synthetic"
    assert len(found["parity"]["batches"]) == 4
    assert b"alice" not in detr[1].read_bytes()
    assert [opset.version for opset in proto.opset_import if not opset.domain] == [export.OPSET]
    inputs = {
        each.name: [dim.dim_param or dim.dim_value for dim in each.type.tensor_type.shape.dim]
        for each in proto.graph.input
    }
    assert inputs == {"images": ["batch", 3, "height", "width"], "sizes": ["batch", 2]}


def test_a_loaded_file_refuses_what_it_cannot_do(detr: tuple[Predictor, Path], tmp_path: Path) -> None:
    loaded, image = detr_bf.load(detr[1]), synthetic_images()[0]
    assert loaded.thresholds == detr[0].thresholds
    assert loaded.class_map == detr[0].class_map
    with pytest.raises(InputError, match="float32"):
        loaded(image, half=True)
    with pytest.raises(InputError, match="CPU"):
        loaded(image, device="cuda")
    with pytest.raises(InputError, match="CPU"):
        detr_bf.load(detr[1], "cuda")
    with pytest.raises(InputError, match="no mask head"):
        loaded.panoptic(image)
    for method in (loaded.save, loaded.to_huggingface, loaded.export):
        with pytest.raises(InputError, match="from a checkpoint"):
            method(tmp_path / "again.onnx")


def test_squares_of_a_fixed_size(tmp_path: Path) -> None:
    original = predictor("rtdetr", "data.transforms.square=64")
    original.export(tmp_path / "it.onnx", batch=1, size=(64, 64))
    loaded = detr_bf.load(tmp_path / "it.onnx")
    assert [each.name for each in loaded.model.session.get_inputs()] == ["images"]
    for image in synthetic_images():
        same(loaded(image, threshold=0.0), original(image, threshold=0.0))


@pytest.mark.parametrize(
    ("key", "value"),
    [("form", None), ("form", "{bad"), ("form", '{"batch": 1}'), ("config", "{bad"), ("classes", "[1]")],
)
def test_damaged_metadata(key: str, value: str | None, detr: tuple[Predictor, Path], tmp_path: Path) -> None:
    proto = onnx.load(str(detr[1]))
    [entry] = [each for each in proto.metadata_props if each.key == key]
    if value is None:
        proto.metadata_props.remove(entry)
    else:
        entry.value = value
    onnx.save(proto, str(tmp_path / "it.onnx"))
    with pytest.raises(InputError, match=r"the metadata of .* are damaged"):
        detr_bf.load(tmp_path / "it.onnx")


def test_a_choice_that_is_not_a_number_is_beyond_the_tolerance() -> None:
    given = GivenSelections([torch.tensor([0]), torch.tensor([0])])
    with given:
        torch.tensor([float("nan"), 1.0]).topk(1)
        torch.tensor([1.0, 0.0]).topk(1)
    assert math.isnan(given.shortfall)


def test_bad_files(detr: tuple[Predictor, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        detr_bf.load(tmp_path / "missing.onnx")
    (tmp_path / "damaged.onnx").write_bytes(detr[1].read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be read by onnxruntime"):
        detr_bf.load(tmp_path / "damaged.onnx")
    proto = onnx.load(str(detr[1]))
    del proto.metadata_props[:]
    onnx.save(proto, str(tmp_path / "foreign.onnx"))
    with pytest.raises(InputError, match="detr-bf export"):
        detr_bf.load(tmp_path / "foreign.onnx")


def test_a_missing_package_names_the_extra(detr: tuple[Predictor, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"onnxruntime: pip install 'detr_bf\[export\]'"):
        detr_bf.load(detr[1])


def test_a_difference_beyond_the_tolerance_is_exit_code_1(
    detr: tuple[Predictor, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "traced", lambda *_, **__: onnx.load(str(detr[1])))
    monkeypatch.setattr(command, "load", lambda *_: detr[0])
    output = tmp_path / "it.onnx"
    assert command.main(["run", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "synthetic images" in printed
    assert "tolerance" in printed
    assert command.main(["run", "--output", str(output)]) == 2
    assert "exists: give another name" in capsys.readouterr().err
    output.unlink()
    monkeypatch.setitem(parity.TOLERANCES, "boxes", 0.0)
    monkeypatch.setattr(parity, "_difference", lambda *_: 0.5)
    assert command.main(["run", "--output", str(output)]) == 1
    assert "differ by more than the tolerance in boxes, logits" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ParityError, match="was not written"):
        detr[0].export(output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch must be"),
        (["--size", "640"], "--size must be"),
        (["--output", "it.pt"], "ends in .onnx"),
        (["--images", "nowhere"], "nowhere"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "load", lambda *_: predictor())
    assert command.main(["run", "--output", "it.onnx", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mini_batch_inference"):
        predictor(batch_former=batch_former(num_encoder_layers=1, mode="mini_batch_inference")).export(
            tmp_path / "it.onnx"
        )
    squares = predictor("detr", "data.transforms.square=64")
    with pytest.raises(InputError, match="64x64"):
        squares.export(tmp_path / "it.onnx", size=(64, 96))
    same_padding = predictor()
    same_padding.model.add_module("padded", type("Conv2dSame", (nn.Identity,), {})())
    with pytest.raises(InputError, match="HEIGHTxWIDTH"):
        same_padding.export(tmp_path / "it.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("postprocess", [False, True])
def test_masks(postprocess: bool, tmp_path: Path) -> None:
    head = partial(MaskHead, DIM, heads=2, finer_channels=[CHANNELS])
    original = predictor("detr", mask_head=head())
    original.model.backbone.levels = 2  # a finer map and the deepest
    compared = original.export(tmp_path / "it.onnx", postprocess=postprocess)
    assert all("masks" in each.differences for each in compared)
    loaded, image = detr_bf.load(tmp_path / "it.onnx"), synthetic_images()[0]
    found, expected = loaded(image, threshold=0.0), original(image, threshold=0.0)
    same(found, expected)
    assert (found.bitmaps() != expected.bitmaps()).mean() < 1e-3


def test_the_example_runs_without_torch(detr: tuple[Predictor, Path], tmp_path: Path) -> None:
    picture, script = tmp_path / "photo.png", ROOT / "examples" / "onnx_numpy.py"
    assert len(script.read_text().splitlines()) <= 60
    Image.fromarray(synthetic_images()[0].permute(1, 2, 0).numpy()).save(picture)
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(script)!r}, run_name='__main__')"
    arguments = [str(detr[1]), str(picture), str(tmp_path / "drawn.png")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    expected = detr[0](picture)
    assert len(done.stdout.splitlines()) == len(expected)
    assert [line.split()[0] for line in done.stdout.splitlines()] == expected.names
    assert Image.open(tmp_path / "drawn.png").size == (640, 480)
