"""Files for phones: detections of ExecuTorch and LiteRT, what Core ML can express, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import detr_bf
from detr_bf import export
from detr_bf.common.errors import InputError
from detr_bf.export import parity_table, synthetic_images
from detr_bf.export.mobile import write_mobile
from detr_bf.export.runtime import mobile_program
from tests.detectors.tiny import DETECTORS
from tests.export.test_export import predictor, same
from tests.export.test_export_references import attending

SUFFIXES = {".pte": "executorch", ".tflite": "litert_torch", ".mlpackage": "coremltools"}  # and the packages
FORM: dict[str, Any] = {"batch": 1, "size": (64, 96)}


def installed(suffix: str) -> None:
    if importlib.util.find_spec(SUFFIXES[suffix]) is None:
        pytest.skip(f"{SUFFIXES[suffix]} is not installed: docs/export.md, Phones and boards")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pte", ".tflite"])
@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector_gives_the_same_on_a_phone(name: str, suffix: str, tmp_path: Path) -> None:
    installed(suffix)
    original = predictor(name)
    compared = original.export(tmp_path / f"it{suffix}", **FORM)
    assert [(each.images, each.padded) for each in compared] == [(1, False), (1, True), (1, True)]
    assert max(value for each in compared for value in each.differences.values()) < 1e-4, parity_table(compared)
    image = torch.randint(256, (3, 64, 96), dtype=torch.uint8)
    same(detr_bf.load(tmp_path / f"it{suffix}")(image, threshold=0.0), original(image, threshold=0.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", DETECTORS)
def test_core_ml_takes_a_detector_or_says_why_not(name: str, tmp_path: Path) -> None:
    """Files that coremltools writes cannot be computed on Linux: only the metadata and the names are checked."""
    installed(".mlpackage")
    import coremltools

    path = tmp_path / "it.mlpackage"
    if name not in ("detr", "conditional_detr", "dab_detr", "dab_detr_patterns", "dn_detr", "group_detr"):
        with pytest.raises(InputError, match=r"Core ML cannot express the detector: .* outputs a rank 6 tensor"):
            predictor(name).export(path, **FORM)
        assert list(tmp_path.iterdir()) == []
        return
    assert predictor(name).export(path, license="mit", **FORM) == []
    model = coremltools.models.MLModel(str(path), skip_model_load=True)
    assert [each.name for each in model.get_spec().description.input] == ["images", "sizes"]
    assert [each.name for each in model.get_spec().description.output] == ["logits", "boxes"]
    metadata = json.loads(model.user_defined_metadata["detr_bf"])
    assert (metadata["format"], metadata["license"], metadata["parity"]) == ("detr_bf coreml 1", "mit", None)
    with pytest.raises(InputError, match=r"it\.mlpackage exists"):
        predictor(name).export(path, **FORM)
    with pytest.raises(InputError, match="computed by macOS and iOS, not here"):
        detr_bf.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pte", ".tflite"])
def test_detections_references_and_copies(suffix: str, tmp_path: Path) -> None:
    installed(suffix)
    original, path = attending(), tmp_path / f"it{suffix}"
    (first, *_), reference = synthetic_images(), synthetic_images()[0].flip(-1)
    compared = original.export(path, postprocess=True, license="mit", **FORM)
    assert all(each.reference_effect for each in compared)
    loaded = detr_bf.load(path)
    found = loaded(first, threshold=0.0, reference=reference)
    same(pickle.loads(pickle.dumps(loaded))(first, threshold=0.0, reference=reference), found)
    _, metadata = mobile_program(path)
    assert (metadata["license"], metadata["outputs"][:3]) == ("mit", ["scores", "labels", "boxes"])
    assert len(metadata["parity"]["batches"]) == 4
    assert b"alice" not in path.read_bytes()
    write_mobile(bytes(1000), path, metadata)  # a program that is none
    with pytest.raises(InputError, match="cannot be read by"):
        detr_bf.load(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give --batch 1 --size HEIGHTxWIDTH"),
        ({"batch": 2, "size": (64, 96)}, "one image of a fixed size"),
        ({"batch": 1}, "one image of a fixed size"),
        ({**FORM, "precision": "float16"}, "are in float32: leave --half and --int8 out"),
        ({**FORM, "device": "cuda"}, "not compiled for a device"),
    ],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_forms_that_phones_do_not_have(suffix: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        predictor().export(tmp_path / f"it{suffix}", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("suffix", "module", "extra"),
    [
        (".pte", "executorch.runtime", "executorch"),
        (".tflite", "ai_edge_litert.interpreter", "litert"),
        (".mlpackage", "coremltools", "coreml"),
    ],
)
def test_a_package_of_a_mobile_format_is_missing(
    suffix: str, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("executorch.exir", "litert_torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(InputError, match=rf"need the package \w+: pip install 'detr_bf\[{extra}\]'"):
        predictor().export(tmp_path / f"it{suffix}", **FORM)


def test_phones_filter_no_duplicates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(export, "check_mobile", lambda *_: None)  # no package is needed
    for suffix in SUFFIXES:
        with pytest.raises(InputError, match="cannot express the operator torchvision::nms"):
            predictor("detr", "eval.nms=0.3").export(tmp_path / f"it{suffix}", postprocess=True, **FORM)


def test_files_of_phones_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "it.pte"
    write_mobile(b"program", path, {"outputs": 3})
    assert mobile_program(path)[0] == b"program"
    assert zipfile.ZipFile(path).namelist() == ["detr_bf.json"]
    with pytest.raises(InputError, match=r"the metadata of .* are damaged"):
        detr_bf.load(path)
    shutil.copy(path, tmp_path / "it.tflite")
    with pytest.raises(InputError, match="its format is detr_bf executorch 1"):
        detr_bf.load(tmp_path / "it.tflite")
    path.write_bytes(b"changed" + path.read_bytes()[7:])
    with pytest.raises(InputError, match="its program is not the one that was written"):
        detr_bf.load(path)
    path.write_bytes(b"of another program")
    with pytest.raises(InputError, match="write it with 'detr-bf export'"):
        detr_bf.load(path)
    with pytest.raises(InputError, match="file not found"):
        detr_bf.load(tmp_path / "missing.pte")
    with pytest.raises(InputError, match="computed by macOS and iOS, not here"):
        detr_bf.load(tmp_path / "it.mlpackage")
