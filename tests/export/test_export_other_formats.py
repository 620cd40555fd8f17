"""Packages of AOTInductor and OpenVINO files: detections, metadata, and files that are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import detr_bf
from detr_bf import export
from detr_bf.common.errors import InputError
from detr_bf.common.files import file_sha256
from detr_bf.common.structures import Batch
from detr_bf.data.transforms import eval_sample
from detr_bf.export import ParityError, parity, parity_table, synthetic_images
from detr_bf.export.graph import imported_openvino, write_openvino, write_package
from detr_bf.export.runtime import package_metadata
from detr_bf.inference.predictor import Predictor
from tests.detectors.tiny import DETECTORS
from tests.export.test_export import predictor, reuse, same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@pytest.fixture(scope="module")
def package(folder: Path) -> tuple[Predictor, Path, str]:
    """Compile DETR with detections as outputs, and return it with the table of the comparison."""
    original = predictor()
    compared = original.export(folder / "it.pt2", size=(64, 96), postprocess=True, license="mit")
    assert [(each.images, each.size) for each in compared] == [(1, (64, 96))] * 3 + [(3, (64, 96))]
    assert max(value for each in compared for value in each.differences.values()) < 2e-5, parity_table(compared)
    assert {"scores", "labels", "boxes", "selection"} == set(compared[0].differences)
    return original, folder / "it.pt2", parity_table(compared)


@pytest.mark.full
def test_a_package_detects_the_same(package: tuple[Predictor, Path, str]) -> None:
    original, path, _ = package
    loaded, images = detr_bf.load(path), [torch.randint(256, (3, 64, 96), dtype=torch.uint8) for _ in range(3)]
    assert loaded.thresholds == original.thresholds
    for image in images:
        same(loaded(image, threshold=0.0), original(image, threshold=0.0))
    for found, expected in zip(loaded(images, 0.0, batch_size=3), original(images, 0.0, batch_size=3), strict=True):
        same(found, expected)
    assert len(loaded(synthetic_images(), threshold=0.0)) == 3  # resized to fit
    for refused in ({"half": True}, {"device": "cuda"}):
        with pytest.raises(InputError, match="packages"):
            loaded(images[0], **refused)


@pytest.mark.full
def test_the_metadata_of_a_package_are_a_file_in_it(package: tuple[Predictor, Path, str]) -> None:
    found = package_metadata(package[1])
    assert found["classes"] == ["cat", "dog", "猫"]
    assert (found["device"], found["padded"], found["license"]) == ("cpu", True, "mit")
    assert found["outputs"] == ["scores", "labels", "boxes", "selection_0"]
    assert len(found["parity"]["batches"]) == 4
    assert b"alice" not in package[1].read_bytes()
    assert [*torch.export.pt2_archive._package.load_pt2(str(package[1])).extra_files] == ["detr_bf.json"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "another"}, "its format is another"),
        ({"form": None}, "damaged"),
        ({"form": {"batch": 0, "size": None, "postprocess": False}}, "damaged"),
        ({"outputs": 3}, "damaged"),
        ({"device": "bananas"}, "damaged"),
        ({"compiled_for": {"machine": "z80"}}, "differs in machine"),
        ({"compiled_for": {"avx1024": True}}, "differs in avx1024"),
        ({"device": "cuda"}, "torch finds none"),
    ],
)
def test_packages_that_cannot_be_loaded(
    changes: dict[str, Any],
    message: str,
    package: tuple[Predictor, Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refuse them before their code is loaded."""
    if changes == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda _: pytest.fail("its code was loaded"))
    path = tmp_path / "it.pt2"
    with zipfile.ZipFile(package[1]) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith(".json") and "extra" in entry.filename:
                content = json.dumps(json.loads(content) | changes).encode()
            target.writestr(entry, content)
    with pytest.raises(InputError, match=message):
        detr_bf.load(path)


@pytest.mark.full
def test_damaged_packages(package: tuple[Predictor, Path, str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="file not found"):
        detr_bf.load(tmp_path / "missing.pt2")
    os.mkfifo(tmp_path / "fifo.pt2")
    with pytest.raises(InputError, match="expected a file"):
        detr_bf.load(tmp_path / "fifo.pt2")
    content = bytearray(package[1].read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "flipped.pt2").write_bytes(content)
    with pytest.raises(InputError, match="is damaged"):
        detr_bf.load(tmp_path / "flipped.pt2")
    (tmp_path / "short.pt2").write_bytes(package[1].read_bytes()[:-1000])
    with pytest.raises(InputError, match="write it with 'detr-bf export'"):
        detr_bf.load(tmp_path / "short.pt2")
    with pytest.warns(UserWarning, match="Duplicate name"):
        write_package(package[1], tmp_path / "whole.pt2", {})  # two files of metadata
    with pytest.raises(InputError, match="write it with 'detr-bf export'"):
        detr_bf.load(tmp_path / "whole.pt2")


def test_a_package_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no working C++ compiler was found")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler .*: no working"):
        predictor().export(tmp_path / "new" / "it.pt2", size=(64, 96))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector_can_be_compiled(name: str, tmp_path: Path) -> None:
    original = predictor(name)
    compared = original.export(tmp_path / "it.pt2", size=(64, 96))
    assert [each.images for each in compared] == [1, 1, 1, 3]
    for each in compared:
        assert max(each.differences.values()) < 2e-5, parity_table(compared)
    image = torch.randint(256, (3, 64, 96), dtype=torch.uint8)
    same(detr_bf.load(tmp_path / "it.pt2")(image, threshold=0.0), original(image, threshold=0.0))


@pytest.fixture(scope="module")
def openvino_file(folder: Path) -> tuple[Predictor, Path]:
    """Export DETR for OpenVINO with detections as outputs; the ONNX file that it is made of lies beside it."""
    original = predictor()
    original.export(folder / "it.onnx", postprocess=True)
    with pytest.MonkeyPatch.context() as patch:
        reuse(folder / "it.onnx", patch)
        compared = original.export(folder / "it.xml", postprocess=True, license="mit")
    assert {"scores", "labels", "boxes", "selection"} == set(compared[0].differences)
    assert max(value for each in compared for value in each.differences.values()) < 2e-5, parity_table(compared)
    return original, folder / "it.xml"


def copied(path: Path, folder: Path) -> Path:
    """Copy an OpenVINO file and its weights, and return the copy."""
    for suffix in (".xml", ".bin"):
        shutil.copyfile(path.with_suffix(suffix), folder / f"it{suffix}")
    return folder / "it.xml"


def test_openvino_detects_the_same(openvino_file: tuple[Predictor, Path]) -> None:
    original, path = openvino_file
    loaded, images = detr_bf.load(path), synthetic_images()
    assert (loaded.thresholds, loaded.class_map) == (original.thresholds, original.class_map)
    for image in images:
        same(loaded(image, threshold=0.0), original(image, threshold=0.0))
    for found, expected in zip(loaded(images, 0.0, batch_size=3), original(images, 0.0, batch_size=3), strict=True):
        same(found, expected)
    for refused in ({"half": True}, {"device": "cuda"}):
        with pytest.raises(InputError, match="OpenVINO files"):
            loaded(images[0], **refused)
    with pytest.raises(InputError, match="has no logits"):
        loaded.model(Batch.collate([eval_sample(loaded.transform, images[0], 0)]))


def test_openvino_computes_in_float32_with_the_threads_of_torch(openvino_file: tuple[Predictor, Path]) -> None:
    compiled: Any = detr_bf.load(openvino_file[1]).model.compiled  # type: ignore[attr-defined]
    assert compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"
    assert compiled.get_property("INFERENCE_NUM_THREADS") == torch.get_num_threads()
    assert compiled.get_property("ENABLE_CPU_PINNING") is False


def test_threads_can_share_an_openvino_detector(openvino_file: tuple[Predictor, Path]) -> None:
    loaded, images = detr_bf.load(openvino_file[1]), synthetic_images()
    expected = [loaded(image, threshold=0.0) for image in images]
    with ThreadPoolExecutor(3) as pool:
        for index, found in zip([0, 1, 2] * 4, pool.map(lambda i: loaded(images[i], 0.0), [0, 1, 2] * 4), strict=True):
            assert torch.equal(found.boxes, expected[index].boxes)


def test_the_metadata_of_an_openvino_file(openvino_file: tuple[Predictor, Path]) -> None:
    found = detr_bf.load(openvino_file[1]).model.metadata  # type: ignore[attr-defined]
    assert found["classes"] == ["cat", "dog", "猫"]
    assert (found["license"], found["outputs"]) == ("mit", ["scores", "labels", "boxes"])
    assert len(found["selections"]) == 1
    assert len(found["parity"]["batches"]) == 4
    assert "openvino" in found["versions"]
    assert found["weights"] == file_sha256(openvino_file[1].with_suffix(".bin"))
    content = openvino_file[1].read_bytes()
    assert b"alice" not in content
    assert str(Path.cwd()).encode() not in content


@pytest.mark.full
def test_openvino_sends_nothing_and_writes_nothing_into_the_home_folder(
    openvino_file: tuple[Predictor, Path], tmp_path: Path
) -> None:
    """Its package of telemetry is not imported."""
    code = (
        "import detr_bf, sys; detr_bf.load(sys.argv[1]); assert 'openvino' in sys.modules; "
        "assert not any(name.startswith('openvino_telemetry') for name in sys.modules)"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, str(openvino_file[1])], env=environment, check=True)
    assert not (tmp_path / "intel").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "another"}, "is not of the form"),
        ({"form": None}, "damaged"),
        ({"form": {"batch": 0, "size": None, "postprocess": False}}, "damaged"),
        ({"outputs": 3}, "damaged"),
        ({"outputs": ["scores"]}, "damaged"),
        ({"outputs": ["scores", "labels", "boxes", "nope"]}, "damaged"),
        ({"weights": "0" * 64}, "does not have the weights of"),
        ({"classes": [1]}, "damaged"),
    ],
)
def test_openvino_files_with_damaged_metadata(
    changes: dict[str, Any], message: str, openvino_file: tuple[Predictor, Path], tmp_path: Path
) -> None:
    model = imported_openvino().Core().read_model(openvino_file[1])
    values = json.loads(model.get_rt_info(["detr_bf", "metadata"]).value) | changes
    write_openvino(model, tmp_path / "it.xml", values, half=False)
    with pytest.raises(InputError, match=message):
        detr_bf.load(tmp_path / "it.xml")


def test_damaged_openvino_files(openvino_file: tuple[Predictor, Path], tmp_path: Path) -> None:
    path = copied(openvino_file[1], tmp_path)
    assert detr_bf.load(path)(synthetic_images()[0], threshold=0.0)
    weights = path.with_suffix(".bin")
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(InputError, match=r"it\.bin does not have the weights of it\.xml"):
        detr_bf.load(path)
    weights.write_bytes(content[:100])
    with pytest.raises(InputError, match=r"it\.xml and it\.bin cannot be read by OpenVINO"):
        detr_bf.load(path)
    weights.unlink()
    with pytest.raises(InputError, match=r"file not found: .*it\.bin; .*it\.xml has its weights in it\.bin"):
        detr_bf.load(path)
    os.mkfifo(weights)
    with pytest.raises(InputError, match="expected a file"):
        detr_bf.load(path)
    for name, text in {"short": path.read_text()[:1000], "foreign": "<annotation/>", "empty": ""}.items():
        (tmp_path / f"{name}.xml").write_text(text)
        (tmp_path / f"{name}.bin").touch()
        with pytest.raises(InputError, match="cannot be read by OpenVINO"):
            detr_bf.load(tmp_path / f"{name}.xml")
    with pytest.raises(InputError, match="file not found"):
        detr_bf.load(tmp_path / "missing.xml")


def test_an_openvino_file_of_another_program(openvino_file: tuple[Predictor, Path], tmp_path: Path) -> None:
    openvino = imported_openvino()
    parameter = openvino.opset13.parameter([1, 3], openvino.Type.f32)
    openvino.save_model(openvino.Model([openvino.opset13.relu(parameter)], [parameter]), tmp_path / "it.xml")
    with pytest.raises(InputError, match="write it with 'detr-bf export'"):
        detr_bf.load(tmp_path / "it.xml")


def test_openvino_must_be_installed(
    openvino_file: tuple[Predictor, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    message = r"openvino: pip install 'detr_bf\[openvino\]'"
    with pytest.raises(InputError, match=message):
        detr_bf.load(openvino_file[1])
    with pytest.raises(InputError, match=message):
        openvino_file[0].export(tmp_path / "it.xml")


def test_an_export_for_openvino_that_fails_leaves_nothing(
    openvino_file: tuple[Predictor, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, path = openvino_file
    output = tmp_path / "new" / "it.xml"
    with monkeypatch.context() as patch:
        unknown = onnx.load(str(path.with_suffix(".onnx")))
        unknown.graph.node[5].op_type = "Unknown"
        reuse(path.with_suffix(".onnx"), patch)
        patch.setattr(export, "onnx_model", lambda *_, **__: unknown)
        with pytest.raises(InputError, match=r"OpenVINO cannot convert the detector.*Unknown"):
            original.export(output, postprocess=True)
    reuse(path.with_suffix(".onnx"), monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(parity, "_difference", lambda *_: 0.5)
        with pytest.raises(ParityError, match=r"it\.xml was not written"):
            original.export(output, postprocess=True)
    with monkeypatch.context() as patch:
        patch.setattr(export, "file_sha256", lambda _: "another")
        with pytest.raises(InputError, match="does not have the weights of"):
            original.export(output, postprocess=True)
    assert list(tmp_path.iterdir()) == []
    copy = shutil.copyfile

    def fails(source: Path, target: Path) -> None:
        if target.suffix == ".bin":
            raise OSError("no space left on device")
        copy(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fails)
        with pytest.raises(OSError, match="no space"):
            original.export(output, postprocess=True)
    assert list(output.parent.iterdir()) == []
    replace = Path.replace

    def refuses(source: Path, target: Path) -> Path:
        if target.suffix == ".xml":
            assert target.with_suffix(".bin").exists()  # the weights come first
            raise OSError("read-only file system")
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuses)
        with pytest.raises(OSError, match="read-only"):
            original.export(output, postprocess=True)
    assert list(output.parent.iterdir()) == []


def test_a_loaded_openvino_detector_does_not_need_its_files(
    openvino_file: tuple[Predictor, Path], tmp_path: Path
) -> None:
    path, image = copied(openvino_file[1], tmp_path), synthetic_images()[0]
    loaded = detr_bf.load(path)
    for suffix in (".xml", ".bin"):
        os.truncate(path.with_suffix(suffix), 0)
    same(loaded(image, threshold=0.0), openvino_file[0](image, threshold=0.0))


def test_openvino_says_where_it_cannot_write(openvino_file: tuple[Predictor, Path], tmp_path: Path) -> None:
    model = imported_openvino().Core().read_model(openvino_file[1])
    (tmp_path / "it.xml").mkdir()
    with pytest.raises(InputError, match=r"OpenVINO cannot write to .*: is there space"):
        write_openvino(model, tmp_path / "it.xml", {}, half=False)


def test_weights_of_others_are_not_replaced(openvino_file: tuple[Predictor, Path], tmp_path: Path) -> None:
    (tmp_path / "it.bin").write_text("mine")
    with pytest.raises(InputError, match=r"it\.bin exists: give another name"):
        openvino_file[0].export(tmp_path / "it.xml")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("it.bin", "mine")]
