"""ONNX and OpenVINO files: their outputs are those of torch, for every detector; metadata, loading, the command."""

from __future__ import annotations

import copy
import importlib
import json
import math
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
import torch
from PIL import Image
from scipy.optimize import linear_sum_assignment

import detr_bf
from detr_bf import export
from detr_bf.batchformer import QueryBatchFormer
from detr_bf.batchformer.modes import EVALUATED_MODES
from detr_bf.commands.model_arguments import export_arguments
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.common.terminal import run_tool
from detr_bf.config import config_to_dict, load_config
from detr_bf.data.images import MAX_PIXELS
from detr_bf.data.transforms import eval_sample
from detr_bf.detectors import MaskHead
from detr_bf.evaluation import ScoreThresholds
from detr_bf.export import GivenSelections, ParityError, parity, parity_table, synthetic_images
from detr_bf.export.graph import ONNX_FORMAT, OPSET, ExportGraph, ExportSignature
from detr_bf.export.precision import MAX_CALIBRATION, calibration_files, exact_nodes, half_precision
from detr_bf.export.runtime import OnnxDetector
from detr_bf.export.sharing import SourceCheckpoint
from detr_bf.export.tensorrt import tensorrt_refusals
from detr_bf.inference.backends import TorchBackend
from detr_bf.inference.predictor import Predictor
from detr_bf.losses import Focal
from detr_bf.losses.postprocess import Postprocess
from tests.detectors.tiny import CHANNELS, DETECTORS, DIM, FOCAL, QUERIES, batch_former, model, shaken
from tests.docs.test_pages import ROOT

command: ModuleType = importlib.import_module("detr_bf.commands.export")


def export_command(arguments: Sequence[str]) -> int:
    """Run the command with a stub of load, for which RUN need not exist."""
    return run_tool(lambda: command.main(export_arguments(arguments)))


CLASSES = ClassMap((7, 3, 9), ("cat", "dog", "猫"))
FAST = ("detr", "conditional_detr", "deformable_detr_two_stage", "rtdetr")  # others share their parts: slow tests
SMALL = ("data.transforms.eval_short_side=64", "data.transforms.max_size=96", "eval.max_detections=7")
KINDS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in DETECTORS]
NO_IMAGES = '{"batch": 0, "size": null, "postprocess": false}'
THRESHOLDS = ScoreThresholds(0.25, (0.2, 0.3, 0.4))


def predictor(name: str = "detr", *settings: str, max_pixels: int = MAX_PIXELS, **changes: Any) -> Predictor:
    """Return a tiny detector with random weights; classes of sigmoid detectors have a logit that is never used."""
    loss = FOCAL[0] if FOCAL[0] in DETECTORS[name].settings else "loss.classification=cross_entropy"
    config = load_config(None, [*SMALL, loss, "data.val.images=/home/alice/secret", *settings])
    classes = CLASSES if "cross" in loss else ClassMap((*CLASSES.category_ids, 11), (*CLASSES.names, "last"))
    by_class = (*THRESHOLDS.by_class, 0.5)[: classes.num_classes]
    backend = TorchBackend(shaken(model(name, encoder_layers=1, **changes)).eval(), torch.device("cpu"))
    thresholds = ScoreThresholds(THRESHOLDS.overall, by_class)
    origin = SourceCheckpoint(config_to_dict(config), Path("run"), None)
    built = Predictor.from_config(backend, config, classes, thresholds=thresholds, origin=origin)
    return replace(built, max_pixels=max_pixels)


def same(found: Any, expected: Any) -> None:
    """Compare detections; those whose scores are equal up to rounding may have changed places."""
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=0)
    differences = torch.cdist(expected.boxes, found.boxes) + 1e6 * (expected.labels[:, None] != found.labels)
    order = linear_sum_assignment(differences)[1]
    assert found.labels[order].tolist() == expected.labels.tolist()
    torch.testing.assert_close(found.scores[order], expected.scores, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.boxes[order], expected.boxes, atol=1e-2, rtol=0)
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


def reuse(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports take the graph of an ONNX file instead of tracing the detector, which takes most of the time."""
    monkeypatch.setattr(export, "traced", lambda *_, **__: None)
    monkeypatch.setattr(export, "onnx_model", lambda *_, **__: onnx.load(str(model)))


@pytest.mark.default_tier("conditional_detr")
@pytest.mark.parametrize("name", KINDS)
def test_every_detector_gives_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = predictor(name)
    check_every_form(original, tmp_path / "it.onnx")
    assert tensorrt_refusals(onnx.load(tmp_path / "it.onnx")) == []
    reuse(tmp_path / "it.onnx", monkeypatch)
    check_every_form(original, tmp_path / "it.xml")


def check_every_form(original: Predictor, path: Path) -> None:
    """Export with any number and size of images, and compare the detections of the file with those of torch."""
    compared = original.export(path)
    assert [each.images for each in compared] == [1, 1, 1, 3]
    assert len({each.size for each in compared}) >= 3
    assert [each.padded for each in compared] == [False, False, False, True]
    for each in compared:
        assert {"logits", "boxes"} <= set(each.differences)
        assert max(each.differences.values()) < 2e-5, parity_table(compared)
    loaded = detr_bf.load(path)
    for image in synthetic_images():
        same(loaded(image, threshold=0.0), original(image, threshold=0.0))
        assert len(loaded(image, threshold=1.0)) == len(original(image, threshold=1.0)) == 0
    for found, expected in zip(
        loaded(synthetic_images(), 0.0, batch_size=3), original(synthetic_images(), 0.0, batch_size=3), strict=True
    ):
        same(found, expected)


@pytest.mark.full
def test_a_pickled_detector_reads_its_file_again(detr: tuple[Predictor, Path], tmp_path: Path) -> None:
    path = tmp_path / "it.onnx"
    shutil.copy(detr[1], path)
    loaded, image = detr_bf.load(path), synthetic_images()[0]
    expected = loaded(image, threshold=0.0)
    for copied in (pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded)):
        same(copied(image, threshold=0.0), expected)
    content = pickle.dumps(loaded)
    changed = onnx.load(str(path))
    next(each for each in changed.metadata_props if each.key == "threshold").value = "0.123"
    onnx.save(changed, str(path))
    with pytest.raises(InputError, match=r"it\.onnx has changed since its detector was pickled"):
        pickle.loads(content)
    path.unlink()
    with pytest.raises(InputError, match=r"it\.onnx cannot be read"):
        pickle.loads(content)
    with pytest.raises(InputError, match="only a detector that has a file can"):
        pickle.dumps(OnnxDetector(detr[1].read_bytes(), "bytes"))


@pytest.mark.full
def test_a_fixed_form_with_detections(tmp_path: Path) -> None:
    original = predictor("smca", "eval.nms=0.3")
    compared = original.export(tmp_path / "it.onnx", batch=2, size=(64, 96), postprocess=True)
    assert [(each.images, each.size) for each in compared] == [(2, (64, 96))]
    assert set(compared[0].differences) == {"scores", "labels", "boxes", "selection"}
    loaded, images = detr_bf.load(tmp_path / "it.onnx"), synthetic_images()
    found = loaded(images, threshold=0.0, batch_size=2)
    assert all(0 < len(each) < QUERIES for each in found), "without duplicates"
    wide = torch.randint(256, (3, 64, 96), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    same(loaded(wide, threshold=0.0), original(wide, threshold=0.0))  # fits without padding
    for one, other in zip(loaded.predict(images, batch_size=3, threshold=0.0), found, strict=True):
        same(one, other)  # more images than the file takes are computed in parts
    batch = Batch.collate([eval_sample(loaded.transform, image, 0) for image in images[:2]])
    left_out = (loaded.model.run(batch)["scores"] == 0).sum(1)
    assert left_out.tolist() == [QUERIES - len(each) for each in found[:2]], "by the graph itself"
    with pytest.raises(InputError, match="has no logits"):
        loaded.model(batch)
    with pytest.raises(InputError, match=r"eval\.nms=null: the graph of .*it\.onnx computes the detections itself"):
        detr_bf.load(tmp_path / "it.onnx", overrides=["eval.nms=null"])


@pytest.mark.parametrize("across", [False, True])
def test_the_graph_filters_duplicates_of_each_image_and_class(across: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(3, 60, generator=generator), torch.randint(2, (3, 60), generator=generator)
    centres, sizes = torch.rand(2, 3, 60, 2, generator=generator)
    sizes[:, :20] *= 3  # as wide as those of D-FINE may be
    boxes = torch.cat([centres - sizes / 2, centres + sizes / 2], dim=-1)
    rule = Postprocess(Focal(), nms=0.3, nms_across_classes=across)
    found = ExportGraph(model("detr"), rule)._without_duplicates(scores, labels, boxes, rule)
    for image in range(3):
        expected = torch.zeros(60)
        kept = rule.kept(boxes[image], scores[image], labels[image])
        expected[kept] = scores[image, kept]
        assert 10 < len(kept) < 54
        assert torch.equal(found[image], expected)


def test_the_metadata_say_what_a_user_needs(detr: tuple[Predictor, Path]) -> None:
    proto = onnx.load(str(detr[1]))
    values = {each.key: each.value for each in proto.metadata_props}
    assert values.pop("format") == ONNX_FORMAT
    found = {name: json.loads(value) for name, value in values.items()}
    assert found["classes"] == ["cat", "dog", "猫"]
    assert found["category_ids"] == [7, 3, 9]
    assert (found["threshold"], found["thresholds"]) == (0.25, [0.2, 0.3, 0.4])
    assert (found["scores"], found["license"], found["max_detections"]) == ("softmax", "mit", 7)
    assert found["resize"] == {"rule": "shorter_side", "side": 64, "longest": 96, "multiple_of": 32}
    assert found["form"] == {"batch": None, "size": None, "postprocess": False}
    assert {"detr_bf", "torch", "onnxruntime"} <= set(found["versions"])
    assert found["parity"]["images"] == "synthetic"
    assert len(found["parity"]["batches"]) == 4
    assert b"alice" not in detr[1].read_bytes()
    assert [opset.version for opset in proto.opset_import if not opset.domain] == [OPSET]
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
    with pytest.raises(
        InputError, match=r"model\.heads cannot be changed of a trained detector; overrides are eval\.nms,"
    ):
        detr_bf.load(detr[1], overrides=["model.heads=2"])
    assert detr_bf.load(detr[1], overrides=["eval.nms=0.3"]).postprocess.nms == 0.3
    for method in (loaded.save, loaded.to_huggingface, loaded.export):
        with pytest.raises(InputError, match="from a checkpoint"):
            method(tmp_path / "again.onnx")


def test_onnxruntime_keeps_neither_the_cores_nor_a_second_block_of_memory(detr: tuple[Predictor, Path]) -> None:
    options = detr_bf.load(detr[1]).model.session.get_session_options()  # type: ignore[attr-defined]
    assert not options.enable_mem_pattern
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"


@pytest.mark.full
def test_squares_of_a_fixed_size(tmp_path: Path) -> None:
    original = predictor("rtdetr", "data.transforms.square=64")
    original.export(tmp_path / "it.onnx", batch=1, size=(64, 64))
    loaded = detr_bf.load(tmp_path / "it.onnx")
    assert [each.name for each in loaded.model.session.get_inputs()] == ["images"]
    for image in synthetic_images():
        same(loaded(image, threshold=0.0), original(image, threshold=0.0))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("form", None),
        ("form", "{bad"),
        ("form", '{"batch": 1}'),
        ("form", NO_IMAGES),
        ("config", "{bad"),
        ("classes", "[1]"),
    ],
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
    reuse(detr[1], monkeypatch)
    monkeypatch.setattr(command, "load", lambda *_: detr[0])
    output = tmp_path / "it.onnx"
    assert export_command(["run", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "synthetic images" in printed
    assert "tolerance" in printed
    assert export_command(["run", "--output", str(output)]) == 2
    assert "exists: give another name" in capsys.readouterr().err
    output.unlink()
    monkeypatch.setitem(parity.TOLERANCES, "boxes", 0.0)
    monkeypatch.setattr(parity, "_difference", lambda *_: 0.5)
    assert export_command(["run", "--output", str(output)]) == 1
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
        (["--device", "cuda"], "only packages (.pt2)"),
        (["--output", "it.pt2", "--size", "64x96", "--device", "tpu"], "compiled for cpu or cuda"),
        (["--output", "it.pt2", "--half"], "in float32"),
        (["--output", "it.pt2"], "give --size"),
        (["--images", "nowhere"], "nowhere"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "load", lambda *_: predictor())
    assert export_command(["run", "--output", "it.onnx", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    for mode in EVALUATED_MODES:
        with pytest.raises(InputError, match=f"{mode}: the images of a batch attend to each other"):
            predictor(batch_former=batch_former(num_encoder_layers=1, mode=mode)).export(tmp_path / "it.onnx")
    former = QueryBatchFormer(DIM, layers=[1], num_decoder_layers=2, mode="mini_batch_inference")
    with pytest.raises(InputError, match="mini_batch_inference: the images of a batch attend to each other"):
        predictor(query_batch_former=former, decoder_layers=2).export(tmp_path / "it.onnx")
    squares = predictor("detr", "data.transforms.square=64")
    with pytest.raises(InputError, match="64x64"):
        squares.export(tmp_path / "it.onnx", size=(64, 96))
    with pytest.raises(InputError, match=r"multiples of 32 pixels.*give 64x96 for"):
        predictor().export(tmp_path / "it.onnx", size=(92, 104))


@pytest.mark.full
def test_a_backbone_that_needs_a_size_gets_that_of_the_squares(tmp_path: Path) -> None:
    squares = predictor("detr", "data.transforms.square=64")
    squares.model.add_module("padded", type("Conv2dSame", (torch.nn.Identity,), {})())
    squares.export(tmp_path / "it.onnx")
    found: Any = detr_bf.load(tmp_path / "it.onnx").model
    assert found.form.size == (64, 64)


@pytest.fixture(scope="module")
def measured(folder: Path) -> tuple[Predictor, Path, Path]:
    """Return RT-DETR, its float32 file and validation images, whose objects are its own best detections."""
    data = folder / "val"
    (data / "images").mkdir(parents=True)
    settings = (f"data.val.images={data / 'images'}", f"data.val.annotations={data / 'val.json'}")
    original = predictor("rtdetr", "data.transforms.square=64", *settings)
    for head in original.model.decoder.heads.boxes:  # boxes inside of the images, as objects of the evaluation are
        head.layers[-1].bias.data += torch.tensor([1.0, 0.0, 0.0, -0.6])
    images, objects = [], []
    for number, pixels in enumerate(synthetic_images(4), 1):
        file = data / "images" / f"{number}.png"
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file)
        images.append({"id": number, "file_name": file.name, "height": pixels.shape[1], "width": pixels.shape[2]})
        found = original(file, threshold=0.0)
        for (x0, y0, x1, y1), label in zip(found.boxes.tolist()[:3], found.labels.tolist()[:3], strict=True):
            box = {"bbox": [x0, y0, x1 - x0, y1 - y0], "category_id": original.class_map.category_ids[label]}
            assert min(x0, y0, pixels.shape[2] - x1, pixels.shape[1] - y1) >= 0
            objects.append({**box, "image_id": number, "id": len(objects) + 1})
    categories = [
        {"id": number, "name": name}
        for number, name in zip(original.class_map.category_ids, original.class_map.names, strict=True)
    ]
    content = {"images": images, "annotations": objects, "categories": categories}
    (data / "val.json").write_text(json.dumps(content))
    original.export(folder / "measured.onnx")
    return original, folder / "measured.onnx", data


@pytest.fixture
def run_command(measured: tuple[Predictor, Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the command export ``measured`` as ``run``, without tracing it again; return its data."""
    reuse(measured[1], monkeypatch)
    monkeypatch.setattr(command, "load", lambda path, *_: measured[0] if path == "run" else detr_bf.load(path))
    return measured[2]


def stored(path: Path) -> dict[str, Any]:
    values = {each.key: each.value for each in onnx.load(str(path)).metadata_props}
    return {name: json.loads(value) for name, value in values.items() if name != "format"}


def weights_of(path: Path) -> dict[int, int]:
    """Return the bytes of the weights of a file by data type."""
    found: dict[int, int] = {}
    for tensor in onnx.load(str(path)).graph.initializer:
        found[tensor.data_type] = found.get(tensor.data_type, 0) + onnx.numpy_helper.to_array(tensor).nbytes
    return found


def check_score(
    output: Path, precision: str, images: Path, before: Path, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Export with the command, compare what it stores and prints, and return the printed lines."""
    options = {"float32": [], "float16": ["--half"], "int8": ["--int8", str(images)]}[precision]
    assert export_command(["run", "--output", str(output), "--evaluate", "3", *options]) == 0
    values, printed = detr_bf.load(output).model.metadata, capsys.readouterr().out  # type: ignore[attr-defined]
    assert values["precision"] == precision
    assert set(values) >= set(stored(before)) | {"ap"}  # nothing is lost
    assert (values["parity"]["tolerances"] is None) == (precision != "float32") == ("tolerance" not in printed)
    assert values["ap"]["images"] == 3
    assert values["ap"]["torch"] > 0.9  # the objects are its own detections
    assert values["ap"]["file"] > {"float32": 0.9, "float16": 0.7, "int8": 0.2}[precision]
    assert f"torch {values['ap']['torch']:.3f}, file {values['ap']['file']:.3f}" in printed
    return printed.splitlines()


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_the_score_of_a_file(
    precision: str,
    run_command: Path,
    measured: tuple[Predictor, Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "it.onnx"
    check_score(output, precision, run_command / "images", measured[1], capsys)
    form = [[(each.name, each.type) for each in onnx.load(str(path)).graph.input] for path in (output, measured[1])]
    assert form[0] == form[1]
    assert all(each.type == "tensor(float)" for each in detr_bf.load(output).model.session.get_outputs())
    before, after = weights_of(measured[1]), weights_of(output)
    kind = {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16, "int8": onnx.TensorProto.INT8}
    narrow = {"float32": 1, "float16": 2, "int8": 4}[precision]
    assert after[kind[precision]] * narrow > 0.5 * before[onnx.TensorProto.FLOAT]


@pytest.mark.full
def test_half_precision_gives_nearly_the_same(measured: tuple[Predictor, Path, Path], tmp_path: Path) -> None:
    model = onnx.load(str(measured[1]))
    exact = exact_nodes(model.graph)
    grids = {node.input[1] for node in model.graph.node if node.op_type == "GridSample"}
    assert grids
    assert grids <= {name for node in model.graph.node if node.name in exact for name in node.output}
    half = half_precision(model)
    onnx.checker.check_model(half)
    onnx.save(half, str(tmp_path / "it.onnx"))
    image = synthetic_images()[1]
    found, expected = (detr_bf.load(path)(image, threshold=0.0) for path in (tmp_path / "it.onnx", measured[1]))
    torch.testing.assert_close(found.scores, expected.scores, atol=5e-3, rtol=0)
    assert not torch.equal(found.scores, expected.scores)


def test_a_file_that_is_not_finite_is_refused_in_every_precision() -> None:
    for tolerances in (None, parity.TOLERANCES):
        wrong = parity.Comparison(1, (64, 64), False, {"logits": math.nan, "boxes": 0.0}, tolerances)
        assert wrong.beyond == ["logits"]
    assert parity.Comparison(1, (64, 64), False, {"logits": 9.0}, None).beyond == []


@pytest.mark.full
def test_a_score_that_cannot_be_computed_does_not_stop_the_export(
    run_command: Path, measured: tuple[Predictor, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "it.onnx"
    (run_command / "val.json").rename(tmp_path / "val.json")
    try:
        assert export_command(["run", "--output", str(output), "--evaluate", "1"]) == 0
    finally:
        (tmp_path / "val.json").rename(run_command / "val.json")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("AP is not compared: ")]
    assert stored(output)["ap"] == {"not_compared": line.partition(": ")[2]}
    assert "there is no annotation file" in line


@pytest.mark.full
def test_scores_that_are_not_compared(measured: tuple[Predictor, Path, Path], panoptic_folder: Any) -> None:
    original, path, data = measured
    (data / "images" / "2.png").rename(data / "2.png")
    try:
        assert "2.png" in command.compared_ap(original, path, 0)["not_compared"]
        assert command.compared_ap(original, path, 1)["images"] == 1  # the others are not read
    finally:
        (data / "2.png").rename(data / "images" / "2.png")
    maps = panoptic_folder()
    settings = (f"data.val.images={maps.images}", f"data.val.annotations={maps.annotations}")
    masked = load_config(None, [*SMALL, "model.masks=true", *settings, f"data.val.panoptic={maps.panoptic}"])
    origin = SourceCheckpoint(config_to_dict(masked), Path("run"), None)
    assert "PQ" in command.compared_ap(replace(original, origin=origin), path, 0)["not_compared"]
    assert "checkpoint" in command.compared_ap(replace(original, origin=None), path, 0)["not_compared"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--half", "--int8", "."], "--half and --int8 exclude each other"),
        (["--int8", "nowhere"], "there is no folder nowhere"),
        (["--int8", "."], "no image files in"),
        (["--evaluate", "-1"], "--evaluate must be a whole number"),
    ],
)
def test_bad_arguments_of_precision(
    arguments: list[str],
    message: str,
    run_command: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export_command(["run", "--output", "it.onnx", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_of_one_image_or_of_squares_have_no_padding() -> None:
    padded = [
        (batch, size, square)
        for batch in (None, 1, 4)
        for size in (None, (64, 96))
        for square in (None, 64)
        if ExportSignature(batch=batch, size=size).pads(square)
    ]
    assert padded == [
        (None, None, None),
        (None, (64, 96), None),
        (1, (64, 96), None),
        (4, None, None),
        (4, (64, 96), None),
    ]


def test_calibration_files_are_spread_over_the_folder(tmp_path: Path) -> None:
    for number in range(250):
        (tmp_path / f"{number:03d}.png").touch()
    files = calibration_files(tmp_path)
    assert len(files) == len(set(files)) == MAX_CALIBRATION
    assert [file.stem for file in files[:3]] == ["000", "002", "005"]
    with pytest.raises(InputError, match="give calibration"):
        predictor().export(tmp_path / "it.onnx", precision="int8")
    with pytest.raises(InputError, match="must be one of"):
        predictor().export(tmp_path / "it.onnx", precision="int4")


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_the_score_of_an_openvino_file(
    precision: str,
    run_command: Path,
    measured: tuple[Predictor, Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "it.xml"
    lines = check_score(output, precision, run_command / "images", measured[1], capsys)
    assert output.read_text().count("category_ids") == 1  # the metadata are there once
    weights, before = output.with_suffix(".bin"), sum(weights_of(measured[1]).values())
    assert [line.split(": ")[1] for line in lines if " MB: " in line] == [str(output), str(weights)]
    least, most = {"float32": (0.95, 1.05), "float16": (0.45, 0.55), "int8": (0.25, 0.4)}[precision]
    assert least * before < weights.stat().st_size < most * before


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
@pytest.mark.parametrize("postprocess", [False, True])
@pytest.mark.parametrize("name", ["detr", "rfdetr"])
def test_masks(name: str, postprocess: bool, suffix: str, tmp_path: Path) -> None:
    """DETR's mask head, and RF-DETR's own."""
    if name == "detr":
        head = MaskHead(DIM, heads=2, finer_channels=[CHANNELS])
        original = predictor("detr", "eval.nms=0.3", mask_head=head)
        original.model.backbone.levels = 2  # a finer map and the deepest
    else:
        original = predictor("rfdetr", "eval.nms=0.3", masks=True)
    compared = original.export(tmp_path / f"it{suffix}", postprocess=postprocess)
    assert all("masks" in each.differences for each in compared)
    loaded, image = detr_bf.load(tmp_path / f"it{suffix}"), synthetic_images()[0]
    found, expected = loaded(image, threshold=0.0), original(image, threshold=0.0)
    same(found, expected)
    if name == "detr":
        assert 0 < len(found) < 5, "some of the detections of 5 queries are duplicates"
    assert (found.bitmaps() != expected.bitmaps()).mean() < 1e-3


@pytest.mark.parametrize("nms", ["null", "0.3", "0.3 eval.nms_across_classes=true"])
def test_the_example_runs_without_torch(
    nms: str, detr: tuple[Predictor, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reuse(detr[1], monkeypatch)
    original = replace(predictor("detr", *f"eval.nms={nms}".split()), thresholds=ScoreThresholds.same(0.0, 3))
    original.export(tmp_path / "it.onnx")
    picture, script = tmp_path / "photo.png", ROOT / "examples" / "onnx_numpy.py"
    assert len(script.read_text().splitlines()) <= 81
    Image.fromarray(synthetic_images()[0].permute(1, 2, 0).numpy()).save(picture)
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(script)!r}, run_name='__main__')"
    arguments = [str(tmp_path / "it.onnx"), str(picture), str(tmp_path / "drawn.png")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    expected = original(picture)
    assert (len(expected) == 5) == (nms == "null")  # 5 queries
    assert len(done.stdout.splitlines()) == len(expected) > 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == expected.names
    assert Image.open(tmp_path / "drawn.png").size == (640, 480)
